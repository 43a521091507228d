// The critical path of a timeline, drawn as a line that jumps between workers, and the selected range of time, with its
// sums by kind in the side panel.
(function () {
  "use strict";

  const data = () => window.tracekitTimelineSpans;
  const THICK = 3, HALO = 2.5;

  // Loads the path and its sentence if the state asks for them.
  async function load(timeline) {
    const words = document.getElementById("timeline-path-words"), wanted = timeline.state.critical === "yes";
    timeline.path = wanted ? data().unpack(await (await timeline.ask("path", { op: "", at: "" })).arrayBuffer()) : null;
    if (words) words.textContent = wanted ? timeline.path.words : "";
    timeline.frame();
  }

  // Corners of the line, [x, y, x, y, ...] in pixels. Ops that the filters hide are left out.
  function corners(scene, view, path, labels) {
    const scale = view.width / (view.to - view.from), points = [];
    for (let index = 0; index < path.row.length; index += 1) {
      if (path.row[index] < 0) continue;
      const line = scene.block.lines[path.line[index]];
      const y = window.tracekitTimelineDraw.rowTop(scene, view, path.row[index]) + line.y + line.height - THICK / 2;
      const x = labels + (path.start[index] - view.from) * scale;
      points.push(x, y, x + path.duration[index] * scale, y);
    }
    return points;
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
    const match = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(state.range || "");
    return match ? [Number(match[1]) / 1e3, Number(match[2]) / 1e3] : null;
  }

  // Selects the range between two times, in seconds; none if they are equal. `done`: the drag has ended.
  function select(timeline, from, to, done) {
    const clamped = (time) => Math.min(Math.max(time, timeline.earliest), timeline.longest);
    const [first, last] = [from, to].map((time) => Math.round(clamped(time) * 1e6) / 1e3).sort((a, b) => a - b);
    timeline.state.range = first < last ? `${first}-${last}` : null;
    timeline.frame();
    if (!done) return;
    timeline.unpin();
    window.tracekit.remember({ range: timeline.state.range });
    timeline.guarded(() => sum(timeline));
  }

  // Shows the sums of the range, or of the ops found in view, unless the panel has them or a range is being dragged.
  async function sum(timeline) {
    if (timeline.gesture && timeline.gesture.selects) return;
    const { state } = timeline, aside = document.getElementById("timeline-details");
    const query = timeline.query({ op: "", at: "", ...(state.range ? { from: "", to: "" } : {}) });
    if ((!state.range && !state.find) || query === aside.dataset.sums) return;
    const request = (timeline.detailRequests = (timeline.detailRequests || 0) + 1);
    const sums = await (await timeline.ask("sums", { op: "", at: "" })).json();
    if (request !== timeline.detailRequests || !aside.isConnected) return;
    window.tracekitTimelinePanel.sums(aside, sums);
    delete aside.dataset.op;
    Object.assign(aside.dataset, { kept: "true", sums: query });
  }

  window.tracekitTimelineRange = { of, select, sum };
})();
