// The critical path over the timeline: the ops that the step consists of, joined by a line that jumps between workers.
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

  window.tracekitTimelinePath = { load: load, draw: draw };
})();
