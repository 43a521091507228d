// Wheel, pointer and keys of a timeline.
(function () {
  "use strict";

  const paint = () => window.tracekitTimelineDraw;
  const rows = () => window.tracekitTimelineRows, range = () => window.tracekitTimelineRange;
  const element = (id) => document.getElementById(id);

  function listen(timeline) {
    const on = (target, kind, act, more) => target.addEventListener(kind, act, { signal: timeline.gone.signal, ...more });
    on(timeline.scroll, "scroll", () => timeline.moved());
    on(timeline.canvas, "wheel", (event) => wheel(timeline, event), { passive: false });
    on(timeline.canvas, "pointerdown", (event) => grab(timeline, event));
    on(timeline.canvas, "pointermove", (event) => (timeline.held ? drag : point)(timeline, event));
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
    on(timeline.small, "pointerdown", (event) => jump(timeline, event));
    on(timeline.small, "pointermove", (event) => event.buttons && jump(timeline, event));
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

  // Fingers on the canvas: where each is. Two of them zoom.
  const fingers = new Map();
  const spread = () => Math.max(20, Math.abs([...fingers.values()].reduce((one, other) => one - other)));
  const middle = () => [...fingers.values()].reduce((one, other) => one + other) / 2;

  function cancel(timeline, event) {
    fingers.delete(event.pointerId);
    timeline.held = null;
  }

  function pinch(timeline, { wide, at, spread: before }) {
    const left = timeline.canvas.getBoundingClientRect().left + paint().LABELS, now = (wide * before) / spread();
    const from = at - ((middle() - left) / timeline.width) * now;
    timeline.show(from, from + now);
  }

  function grab(timeline, event) {
    if (event.button || !timeline.scene) return;
    timeline.canvas.setPointerCapture(event.pointerId);
    if (event.pointerType === "touch") fingers.set(event.pointerId, event.clientX);
    if (fingers.size > 1) {
      const at = timeline.time(middle() - timeline.canvas.getBoundingClientRect().left);
      timeline.held = { pinch: { wide: timeline.to - timeline.from, at: at, spread: spread() } };
      return;
    }
    const { from, to } = timeline, top = timeline.scroll.scrollTop, box = timeline.canvas.getBoundingClientRect();
    const selects = event.shiftKey || event.clientY - box.top < paint().AXIS;
    timeline.held = { x: event.clientX, y: event.clientY, moved: false, from: from, to: to, top: top, selects: selects };
  }

  function select(timeline, event, held, done) {
    const left = timeline.canvas.getBoundingClientRect().left;
    range().select(timeline, timeline.time(held.x - left), timeline.time(event.clientX - left), done);
  }

  function drag(timeline, event) {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event.clientX);
    if (timeline.held.pinch) return fingers.size > 1 && pinch(timeline, timeline.held.pinch);
    const right = event.clientX - timeline.held.x, down = event.clientY - timeline.held.y;
    timeline.held.moved = timeline.held.moved || Math.abs(right) + Math.abs(down) > 4;
    if (!timeline.held.moved) return;
    timeline.tip.hidden = true;
    if (timeline.held.selects) return select(timeline, event, timeline.held, false);
    const by = (right / timeline.width) * (timeline.held.to - timeline.held.from);
    timeline.show(timeline.held.from - by, timeline.held.to - by);
    timeline.scroll.scrollTop = timeline.held.top - down;
  }

  function release(timeline, event) {
    const { held } = timeline, moved = held && (held.moved || held.pinch), box = timeline.canvas.getBoundingClientRect();
    cancel(timeline, event);
    if (moved && held.selects) select(timeline, event, held, true);
    if (moved || !timeline.scene) return;
    const x = event.clientX - box.left, y = event.clientY - box.top, { scene } = timeline;
    const mark = timeline.under(x, y), place = rows().at(timeline, y);
    timeline.scroll.focus({ preventScroll: true });
    if (mark) timeline.guarded(() => timeline.pin(mark.name));
    else if (place && (x < paint().LABELS || rows().isGroup(scene, place.row))) rows().toggle(timeline, place.row);
    else timeline.letGo();
  }

  // What is under the pointer, in a few words; the panel follows on the other half where it shows nothing that was asked
  // for.
  function point(timeline, event) {
    const { canvas, scene, tip } = timeline, box = canvas.getBoundingClientRect(), { AXIS, LABELS } = paint();
    const x = event.clientX - box.left, y = event.clientY - box.top, mark = timeline.under(x, y), place = scene && rows().at(timeline, y);
    const named = !mark && place && (x < LABELS || rows().isGroup(scene, place.row));
    clearTimeout(timeline.dwelling);
    canvas.style.cursor = mark || named ? "pointer" : x < LABELS ? "default" : y < AXIS ? "col-resize" : "grab";
    tip.hidden = !mark && !named;
    if (tip.hidden) return;
    tip.textContent = mark ? window.tracekitTimelinePanel.summary(mark, timeline.spans, scene.names) : rows().hint(scene, place.row);
    const host = element("timeline-host").getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(event.clientX - host.left + 14, host.width - 330))}px`;
    tip.style.top = `${event.clientY - host.top + 18}px`;
    if (!mark || timeline.pinned || timeline.state.range || timeline.state.find) return;
    element("timeline-details").classList.toggle("left", event.clientX - host.left > host.width / 2);
    timeline.dwelling = setTimeout(() => timeline.guarded(() => timeline.tell(mark.name, false)), 90);
  }

  function jump(timeline, event) {
    if (!timeline.scene) return;
    const box = timeline.small.getBoundingClientRect(), wide = timeline.to - timeline.from;
    const share = (event.clientX - box.left - paint().LABELS) / timeline.width;
    if (share >= 0) {
      const { begins, ends, overview } = timeline.scene, at = begins + share * (ends[overview[2]] - begins);
      timeline.show(at - wide / 2, at + wide / 2);
    }
    const total = timeline.scene.tops[timeline.scene.rows];
    timeline.scroll.scrollTop = ((event.clientY - box.top) / box.height) * total - timeline.height / 2;
  }

  function key(timeline, event) {
    if (!timeline.scene || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowLeft: () => timeline.pan(-0.1), ArrowRight: () => timeline.pan(0.1),
      a: () => timeline.pan(-0.1), d: () => timeline.pan(0.1), w: () => timeline.zoom(0.7), s: () => timeline.zoom(1 / 0.7),
      "+": () => timeline.zoom(0.7), "=": () => timeline.zoom(0.7), "-": () => timeline.zoom(1 / 0.7),
      Home: () => timeline.home(), Escape: () => timeline.letGo(), f: () => timeline.full(),
      r: () => range().select(timeline, timeline.from, timeline.to, true),
      t: () => rows().pin(timeline, timeline.pinned || rows().worker(timeline.scene, timeline.visible()[0])),
      n: () => timeline.guarded(() => timeline.next(1)), p: () => timeline.guarded(() => timeline.next(-1)),
      ArrowDown: () => (timeline.scroll.scrollTop += timeline.scene.block.height),
      ArrowUp: () => (timeline.scroll.scrollTop -= timeline.scene.block.height),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  window.tracekitTimelineInput = { listen: listen };
})();
