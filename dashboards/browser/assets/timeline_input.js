// Wheel, pointer and keys of a timeline.
(function () {
  "use strict";

  const paint = () => window.tracekitTimelineDraw;
  const rows = () => window.tracekitTimelineRows, range = () => window.tracekitTimelineRange;
  const element = (id) => document.getElementById(id);

  function listen(timeline) {
    const on = (target, kind, handler, options) => target.addEventListener(kind, handler, { signal: timeline.closing.signal, ...options });
    on(timeline.scroll, "scroll", () => timeline.moved());
    on(timeline.canvas, "wheel", (event) => wheel(timeline, event), { passive: false });
    on(timeline.canvas, "pointerdown", (event) => grab(timeline, event));
    on(timeline.canvas, "pointermove", (event) => (timeline.gesture ? drag : point)(timeline, event));
    on(timeline.canvas, "pointerup", (event) => release(timeline, event));
    on(timeline.canvas, "pointercancel", (event) => cancel(timeline, event)); // the browser scrolls the page
    on(timeline.canvas, "pointerleave", () => {
      timeline.tip.hidden = true;
      clearTimeout(timeline.dwelling);
      if (element("timeline-details")?.dataset.kept === "false") window.tracekitTimelinePanel.clear();
    });
    on(timeline.scroll, "keydown", (event) => key(timeline, event));
    on(element("timeline-find"), "keydown", (event) => event.key === "Enter" && timeline.nextFound());
    on(element("timeline-full"), "click", () => timeline.full());
    on(document, "fullscreenchange", () => timeline.scene && timeline.resize());
    on(document.body, "keydown", (event) => event.target === document.body && key(timeline, event));
    on(timeline.overview, "pointerdown", (event) => jump(timeline, event));
    on(timeline.overview, "pointermove", (event) => event.buttons && jump(timeline, event));
    on(element("timeline-home"), "click", () => timeline.scene && timeline.home());
    on(element("timeline-png"), "click", () => timeline.png());
  }

  function wheel(timeline, event) {
    if (!timeline.scene) return;
    event.preventDefault();
    if (event.shiftKey) {
      timeline.scroll.scrollTop += event.deltaY || event.deltaX;
      return;
    }
    const x = event.clientX - timeline.canvas.getBoundingClientRect().left;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) timeline.pan(event.deltaX / timeline.width);
    else timeline.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.002), x);
  }

  // The x of each finger on the canvas. Two of them zoom.
  const fingers = new Map();
  const fingerSpread = () => Math.max(20, Math.abs([...fingers.values()].reduce((a, b) => a - b)));
  const fingerMiddle = () => [...fingers.values()].reduce((a, b) => a + b) / 2;

  function cancel(timeline, event) {
    fingers.delete(event.pointerId);
    timeline.gesture = null;
  }

  function pinch(timeline, { duration, centre, spread }) {
    const left = timeline.canvas.getBoundingClientRect().left + paint().LABELS, newDuration = (duration * spread) / fingerSpread();
    const from = centre - ((fingerMiddle() - left) / timeline.width) * newDuration;
    timeline.show(from, from + newDuration);
  }

  function grab(timeline, event) {
    if (event.button || !timeline.scene) return;
    timeline.canvas.setPointerCapture(event.pointerId);
    if (event.pointerType === "touch") fingers.set(event.pointerId, event.clientX);
    if (fingers.size > 1) {
      const centre = timeline.time(fingerMiddle() - timeline.canvas.getBoundingClientRect().left);
      timeline.gesture = { pinch: { duration: timeline.to - timeline.from, centre, spread: fingerSpread() } };
      return;
    }
    const { from, to } = timeline, top = timeline.scroll.scrollTop, box = timeline.canvas.getBoundingClientRect();
    const selects = event.shiftKey || event.clientY - box.top < paint().AXIS;
    timeline.gesture = { x: event.clientX, y: event.clientY, moved: false, from, to, top, selects };
  }

  function select(timeline, event, gesture, done) {
    const left = timeline.canvas.getBoundingClientRect().left;
    range().select(timeline, timeline.time(gesture.x - left), timeline.time(event.clientX - left), done);
  }

  function drag(timeline, event) {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event.clientX);
    if (timeline.gesture.pinch) return fingers.size > 1 && pinch(timeline, timeline.gesture.pinch);
    const right = event.clientX - timeline.gesture.x, down = event.clientY - timeline.gesture.y;
    timeline.gesture.moved = timeline.gesture.moved || Math.abs(right) + Math.abs(down) > 4;
    if (!timeline.gesture.moved) return;
    timeline.tip.hidden = true;
    if (timeline.gesture.selects) return select(timeline, event, timeline.gesture, false);
    const by = (right / timeline.width) * (timeline.gesture.to - timeline.gesture.from);
    timeline.show(timeline.gesture.from - by, timeline.gesture.to - by);
    timeline.scroll.scrollTop = timeline.gesture.top - down;
  }

  function release(timeline, event) {
    const { gesture } = timeline, moved = gesture && (gesture.moved || gesture.pinch), box = timeline.canvas.getBoundingClientRect();
    cancel(timeline, event);
    if (moved && gesture.selects) select(timeline, event, gesture, true);
    if (moved || !timeline.scene) return;
    const x = event.clientX - box.left, y = event.clientY - box.top, { scene } = timeline;
    const mark = timeline.spanAt(x, y), place = rows().rowAtY(timeline, y);
    timeline.scroll.focus({ preventScroll: true });
    if (mark) timeline.guarded(() => timeline.pin(mark.name));
    else if (place && (x < paint().LABELS || rows().isGroup(scene, place.row))) rows().toggle(timeline, place.row);
    else timeline.deselect();
  }

  // Shows the op or row under the pointer in the tip, and the op also in the panel if that is free, on the other half.
  function point(timeline, event) {
    const { canvas, scene, tip } = timeline, box = canvas.getBoundingClientRect(), { AXIS, LABELS } = paint();
    const x = event.clientX - box.left, y = event.clientY - box.top, mark = timeline.spanAt(x, y), place = scene && rows().rowAtY(timeline, y);
    const isName = !mark && place && (x < LABELS || rows().isGroup(scene, place.row));
    clearTimeout(timeline.dwelling);
    canvas.style.cursor = mark || isName ? "pointer" : x < LABELS ? "default" : y < AXIS ? "col-resize" : "grab";
    tip.hidden = !mark && !isName;
    if (tip.hidden) return;
    tip.textContent = mark ? window.tracekitTimelinePanel.summary(mark, timeline.spans, scene.names) : rows().hint(scene, place.row);
    const host = element("timeline-host").getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(event.clientX - host.left + 14, host.width - 330))}px`;
    tip.style.top = `${event.clientY - host.top + 18}px`;
    if (!mark || timeline.pinned || timeline.state.range || timeline.state.find) return;
    element("timeline-details").classList.toggle("left", event.clientX - host.left > host.width / 2);
    timeline.dwelling = setTimeout(() => timeline.guarded(() => timeline.showDetails(mark.name, false)), 90);
  }

  function jump(timeline, event) {
    if (!timeline.scene) return;
    const box = timeline.overview.getBoundingClientRect(), duration = timeline.to - timeline.from;
    const share = (event.clientX - box.left - paint().LABELS) / timeline.width;
    if (share >= 0) {
      const { begins, ends, overview } = timeline.scene, centre = begins + share * (ends[overview[2]] - begins);
      timeline.show(centre - duration / 2, centre + duration / 2);
    }
    const total = timeline.scene.tops[timeline.scene.rows];
    timeline.scroll.scrollTop = ((event.clientY - box.top) / box.height) * total - timeline.height / 2;
  }

  function key(timeline, event) {
    if (!timeline.scene || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = {
      ArrowLeft: () => timeline.pan(-0.1), ArrowRight: () => timeline.pan(0.1),
      a: () => timeline.pan(-0.1), d: () => timeline.pan(0.1), w: () => timeline.zoom(0.7), s: () => timeline.zoom(1 / 0.7),
      "+": () => timeline.zoom(0.7), "=": () => timeline.zoom(0.7), "-": () => timeline.zoom(1 / 0.7),
      Home: () => timeline.home(), Escape: () => timeline.deselect(), f: () => timeline.full(),
      r: () => range().select(timeline, timeline.from, timeline.to, true),
      t: () => rows().pin(timeline, timeline.pinned || rows().worker(timeline.scene, timeline.visible()[0])),
      n: () => timeline.guarded(() => timeline.next(1)), p: () => timeline.guarded(() => timeline.next(-1)),
      ArrowDown: () => (timeline.scroll.scrollTop += timeline.scene.block.height),
      ArrowUp: () => (timeline.scroll.scrollTop -= timeline.scene.block.height),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  window.tracekitTimelineInput = { listen };
})();
