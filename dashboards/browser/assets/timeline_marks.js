// What is marked in a timeline: the critical path, the ops that the step consists of, joined by a line that jumps between
// workers; and a range of time that is selected, with its sums by kind in the side panel.
(function () {
  "use strict";

  const data = () => window.tracekitTimelineSpans;
  const THICK = 3, HALO = 2.5;

  // Asks for the path where the state wants one, and says of whom the step consists.
  async function load(timeline) {
    const words = document.getElementById("timeline-path-words"), wanted = timeline.state.critical === "yes";
    timeline.path = wanted ? data().unpack(await (await timeline.ask("path", { op: "", at: "" })).arrayBuffer()) : null;
    if (words) words.textContent = wanted ? timeline.path.words : "";
    timeline.frame();
  }

  // Corners of the line, in pixels of the tracks; what the filters hide has no place and is left out.
  function corners(scene, view, path, labels) {
    const scale = view.width / (view.to - view.from), found = [];
    for (let at = 0; at < path.row.length; at += 1) {
      if (path.row[at] < 0) continue;
      const line = scene.block.lines[path.line[at]];
      const y = window.tracekitTimelineDraw.rowTop(scene, view, path.row[at]) + line.y + line.height - THICK / 2;
      const x = labels + (path.start[at] - view.from) * scale;
      found.push(x, y, x + path.duration[at] * scale, y);
    }
    return found;
  }

  function draw(context, scene, view, path, { labels, top, foot }) {
    const line = corners(scene, view, path, labels);
    context.save();
    context.beginPath();
    context.rect(labels, top, view.width, view.height - top - foot);
    context.clip();
    context.lineJoin = "round";
    for (const [width, colour] of [[THICK + HALO, scene.colours.paper], [THICK - 1, scene.colours.outline]]) {
      context.lineWidth = width;
      context.strokeStyle = colour;
      context.beginPath();
      for (let i = 0; i < line.length; i += 2) context.lineTo(line[i], line[i + 1]);
      context.stroke();
    }
    context.restore();
  }

  window.tracekitTimelinePath = { load, draw };

  // The range in seconds, [from, to]; null for none.
  function of(state) {
    const found = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(state.range || "");
    return found ? [Number(found[1]) / 1e3, Number(found[2]) / 1e3] : null;
  }

  // Selects what is between two times, in seconds; nothing where they are equal. `done`: the person let go.
  function select(timeline, from, to, done) {
    const inside = (time) => Math.min(Math.max(time, timeline.earliest), timeline.longest);
    const [first, last] = [from, to].map((time) => Math.round(inside(time) * 1e6) / 1e3).sort((one, other) => one - other);
    timeline.state.range = first < last ? `${first}-${last}` : null;
    timeline.frame();
    if (!done) return;
    timeline.unpin();
    window.tracekit.remember({ range: timeline.state.range });
    timeline.guarded(() => sum(timeline));
  }

  // The sums of the range, or of what the search finds in view, where the panel does not show them; not of a range
  // that is still being drawn.
  async function sum(timeline) {
    if (timeline.held && timeline.held.selects) return;
    const { state } = timeline, aside = document.getElementById("timeline-details");
    const asked = timeline.query({ op: "", at: "", ...(state.range ? { from: "", to: "" } : {}) });
    if ((!state.range && !state.find) || asked === aside.dataset.sums) return;
    const told = (timeline.told = (timeline.told || 0) + 1);
    const found = await (await timeline.ask("sums", { op: "", at: "" })).json();
    if (told !== timeline.told || !aside.isConnected) return;
    window.tracekitTimelinePanel.sums(aside, found);
    delete aside.dataset.op;
    Object.assign(aside.dataset, { kept: "true", sums: asked });
  }

  window.tracekitTimelineRange = { of, select, sum };
})();
