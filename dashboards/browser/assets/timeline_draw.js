// Draws a timeline on a 2D context, from the scene and the view. Nothing here listens, fetches or keeps state.
(function () {
  "use strict";

  const rowsOf = () => window.tracekitTimelineRows;
  const AXIS = 30, EDGE = 8;
  let LABELS = 216, STREAM_AT = 132;
  const USUAL_HEIGHT = 20, GAP = 8, FLAG = 18;
  // Rows shrink until FITTING of them fit, down to these heights of a line: names stay readable.
  const FITTING = 40, LEAST = 6, LEAST_NAMED = 10;
  const STREAM_NAMES = {
    compute: "compute", "forward-send": "fwd send", "forward-recv": "fwd recv", "backward-send": "bwd send",
    "backward-recv": "bwd recv", "data-parallel": "data par.", "model-parallel": "model par.",
  };
  const LETTERS = { "forward-compute": "F", "backward-compute": "B", optimizer: "opt", gc: "gc", "data-load": "load",
    checkpoint: "ckpt", "host-delay": "host" };
  const FONT = '11px system-ui, "DejaVu Sans", sans-serif';

  // The lines of a row, [{replay, stream, y, height, first}], and the row's height. `first`: whether a stream begins;
  // `lineHeight`: of a line of computes.
  function blockOf(lines, lineHeight) {
    const small = lineHeight < USUAL_HEIGHT, gap = small ? 3 : GAP;
    let y = gap / 2;
    const blockLines = lines.map(([replay, stream, computes], index) => {
      const first = index === 0 || lines[index - 1][1] !== stream;
      if (first && index > 0 && !small) y += 2;
      const height = Math.max(3, Math.round(lineHeight * (computes ? 1 : 0.55) * (small && !first ? 0.6 : 1)));
      const line = { replay, stream, y, height, first };
      y += height + 1;
      return line;
    });
    return { lines: blockLines, height: Math.max(small ? 13 : 26, Math.ceil(y + gap / 2)) };
  }

  // The tallest block with which FITTING rows, or all of `count`, fit into `room` pixels.
  function fittedBlock(lines, count, room, hasNames) {
    let lineHeight = USUAL_HEIGHT, block = blockOf(lines, lineHeight);
    while (lineHeight > (hasNames ? LEAST_NAMED : LEAST) && block.height * Math.min(FITTING, count) > room) block = blockOf(lines, (lineHeight -= 1));
    return block;
  }

  // Adds `blocks`, the lines of each row down to the last used one, and `tops`, where each row begins.
  function placeRows(scene) {
    const { lines, height } = scene.block, count = lines.length;
    const blocks = lines.map((line, index) => (index + 1 === count ? scene.block : { lines: lines.slice(0, index + 1), height: Math.min(height, Math.max(26, line.y + line.height + GAP)) }));
    scene.blocks = Array.from({ length: scene.rows }, (_, row) => blocks[(scene.used ? scene.used[row] : count) - 1]);
    scene.tops = scene.blocks.reduce((tops, block) => (tops.push(tops[tops.length - 1] + block.height), tops), [0]);
  }

  // The last row that begins at that height or above.
  function rowAt(scene, height) {
    let [row, end] = [0, scene.rows];
    while (end - row > 1) {
      const middle = (row + end) >> 1;
      if (scene.tops[middle] <= height) row = middle;
      else end = middle;
    }
    return row;
  }

  // The y of a row on the canvas: pinned rows stay on top.
  const rowTop = (scene, view, row) => AXIS + scene.tops[row] - (row < scene.pinned ? 0 : view.top);
  // The y at which the scrolling rows begin.
  const scrollingTop = (scene) => AXIS + scene.tops[scene.pinned];

  // The first scrolling row in view, and the one after the last.
  function inView(scene, top, height) {
    return [rowAt(scene, scene.tops[scene.pinned] + top), Math.min(scene.rows, rowAt(scene, top + height - AXIS - footHeight(scene)) + 1)];
  }

  // The height of the strip below the tracks, which has a row for the end of each replay.
  function footHeight(scene) {
    return scene.replays.length * FLAG + 4;
  }

  // Ticks 1, 2 or 5 x 10^n seconds apart, in the unit that reads best: [{time, text}].
  function ticks(from, to, width) {
    const least = ((to - from) / width) * 90;
    const power = Math.pow(10, Math.floor(Math.log10(least)));
    const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= least);
    const unit = step >= 0.5 ? ["s", 1] : step >= 0.5e-3 ? ["ms", 1e3] : ["us", 1e6];
    const digits = Math.max(0, Math.ceil(-Math.log10(step * unit[1]) - 1e-9));
    const tickList = [];
    for (let number = Math.ceil(from / step); number * step <= to; number += 1) {
      tickList.push({ time: number * step, text: `${(number * step * unit[1]).toFixed(digits)} ${unit[0]}` });
    }
    return tickList;
  }

  function classOf(ratio, bounds) {
    let level = 0;
    while (level < bounds.length && ratio > bounds[level]) level += 1;
    return level;
  }

  // Collects rectangles and paints them a colour at a time: changing the colour is slow.
  function Batch(colours) {
    const rects = colours.map(() => []);
    return {
      add(colour, x, y, width, height) { rects[colour].push(x, y, width, height); },
      paint(context) {
        rects.forEach((list, colour) => {
          context.fillStyle = colours[colour];
          for (let i = 0; i < list.length; i += 4) context.fillRect(list[i], list[i + 1], list[i + 2], list[i + 3]);
        });
      },
    };
  }

  // Adds a track to the batch. Spans that fall into one pixel are one rectangle in the colour of the slowest.
  function track(batch, labelled, view, spans, begin, end, line, y, { bounds, matches }) {
    const scale = view.width / (view.to - view.from), right = LABELS + view.width;
    const WAIT = 0, FIRST = 1; // positions in the colours of the batch
    let pixel = -1, worst = 0;
    const flush = () => {
      if (pixel >= 0) batch.add(FIRST + worst, pixel, y, worst ? 2 : 1, line.height);
      pixel = -1;
    };
    for (let index = begin; index < end; index += 1) {
      const x = LABELS + (spans.start[index] - view.from) * scale;
      if (x > right) break;
      const width = Math.max(spans.duration[index], spans.covers[index]) * scale;
      if (x + width < LABELS && x + 1 < LABELS) continue;
      const level = classOf(spans.ratio[index], bounds);
      if (matches && !matches(spans, index)) {
        flush();
        const left = Math.max(x, LABELS);
        batch.add(WAIT, left, y, Math.max(Math.min(x + width, right) - left, 1), line.height);
        continue;
      }
      if (width < 1) {
        const column = Math.max(LABELS, Math.floor(x));
        if (column !== pixel) { flush(); pixel = column; worst = level; } else if (level > worst) { worst = level; }
        continue;
      }
      flush();
      const left = Math.max(x, LABELS), stop = Math.min(x + width, right);
      const ownStart = Math.min(Math.max(x + spans.wait[index] * scale, left), stop);
      if (ownStart > left) batch.add(WAIT, left, y, ownStart - left, line.height);
      // A gap separates neighbours; the part of an op after its wait is at least a pixel wide.
      const ownWidth = Math.max(stop - ownStart - (stop - ownStart > 4 ? 0.75 : 0), 1);
      batch.add(FIRST + level, Math.min(ownStart, right - 1), y, ownWidth, line.height);
      if (stop - ownStart > 22 && line.height >= 12) labelled.push(index, ownStart, stop, y + line.height / 2 + 0.5, level);
    }
    flush();
  }

  // Adds a track of several workers: each pixel shows the slowest of their ops, waiting, or nothing.
  function pooled(batch, view, spans, begin, end, line, y, { bounds, matches }) {
    const scale = view.width / (view.to - view.from), levels = new Uint8Array(Math.ceil(view.width) + 1);
    for (let index = begin; index < end; index += 1) {
      const x = (spans.start[index] - view.from) * scale, stop = x + spans.duration[index] * scale;
      if (x > view.width) break;
      if (stop < 0 || (matches && !matches(spans, index))) continue;
      const level = 2 + classOf(spans.ratio[index], bounds), ownStart = x + spans.wait[index] * scale;
      const last = Math.min(Math.max(stop, ownStart + 1), view.width);
      for (let pixel = Math.max(0, Math.floor(x)); pixel < last; pixel += 1) {
        const value = pixel < Math.floor(ownStart) ? 1 : level;
        if (levels[pixel] < value) levels[pixel] = value;
      }
    }
    for (let pixel = 0; pixel < levels.length; ) {
      let stop = pixel + 1;
      while (stop < levels.length && levels[stop] === levels[pixel]) stop += 1;
      if (levels[pixel]) batch.add(levels[pixel] - 1, LABELS + pixel, y, stop - pixel, line.height);
      pixel = stop;
    }
  }

  function labelSpans(context, spans, labelled, scene) {
    const { kinds, names, colours } = scene;
    context.font = FONT;
    context.textBaseline = "middle";
    for (let i = 0; i < labelled.length; i += 5) {
      const index = labelled[i], room = labelled[i + 2] - labelled[i + 1] - 6;
      const letter = LETTERS[kinds[spans.kind[index]]] || kinds[spans.kind[index]];
      const label = names ? names[spans.name[index]] : letter + (spans.microbatch[index] >= 0 ? ` ${spans.microbatch[index]}` : "");
      const text = names ? label.replace(/^void (at::native::)?/, "").slice(0, Math.floor(room / 6.6)) : label;
      if (text.length * 6.2 > room) continue;
      context.fillStyle = colours.on_classes[labelled[i + 4]];
      context.fillText(text, labelled[i + 1] + 4, labelled[i + 3]);
    }
  }

  // Names have room for ten characters at least.
  function fitLabels(width) {
    [LABELS, STREAM_AT] = width < 480 ? [130, 78] : width < 1000 ? [140, 80] : [216, 132];
  }

  // Text that is too wide ends in an ellipsis: `fillText` would squeeze it.
  function cut(context, text, width) {
    let start = text;
    while (start.length > 2 && context.measureText(start).width > width) start = `${start.slice(0, -2)}\u2026`;
    return start;
  }

  function labels(context, scene, row, y) {
    const { colours, hosts } = scene, block = scene.blocks[row];
    const dp = scene.dp_rank[row], pp = scene.pp_rank[row], host = hosts[scene.host[row]];
    const group = scene.groups[scene.group[row]], base = y + Math.min(16, block.height / 2 + 5);
    context.textBaseline = "alphabetic";
    context.font = `600 12px ${FONT.slice(5)}`;
    context.fillStyle = colours.text;
    const place = `dp ${dp} stage ${pp}`, ranked = scene.rank[row] >= 0;
    const rowName = scene.roles?.[dp] ?? (ranked ? `rank ${scene.rank[row]}` : place);
    const name = group ? `${rowsOf().isOpen(scene, row) ? "\u25be" : "\u25b8"} ${group}` : row < scene.pinned ? `\u2022 ${rowName}` : rowName;
    context.fillText(name, EDGE, base, (scene.names && !group ? STREAM_AT : LABELS) - 2 * EDGE);
    const after = EDGE + context.measureText(name).width + 10;
    context.font = FONT;
    context.fillStyle = colours.dimmed;
    const ofWorker = scene.names ? [] : [ranked && place, `alone costs ${(100 * (1 - 1 / scene.slowdown[row])).toFixed(1)}%`];
    const noun = scene.names ? "rank" : "worker", members = scene.members[row];
    const facts = group ? [`${members} ${noun}${members === 1 ? "" : "s"}`] : [host, ...ofWorker].filter(Boolean);
    const lineCount = Math.max(0, Math.floor((block.height - 20) / 14));
    const width = (scene.names || block.lines.length > 2 ? STREAM_AT : LABELS) - 2 * EDGE;
    while (lineCount === 1 && facts.length > 1 && context.measureText(facts.join(" ")).width > width) facts.pop();
    const lines = lineCount >= facts.length ? facts : lineCount === 2 ? [facts.slice(0, -1).join(" "), facts.at(-1)] : [facts.join(" ")];
    const sameLine = group || facts.length === 1 ? facts : facts.slice(0, -1);
    const free = block.lines.length > 2 ? STREAM_AT - 8 - after : LABELS - after - 10;
    if (lineCount < 1 && free > 40) context.fillText(sameLine.join(" "), after, base, free);
    lines.slice(0, lineCount).forEach((text, index) => context.fillText(cut(context, text, width), EDGE, y + 30 + index * 14));
    block.lines.forEach((line) => {
      context.fillStyle = colours[line.replay];
      context.fillRect(LABELS - 6, y + line.y, 3, line.height);
      if (line.first && (scene.names || block.lines.length > 2) && line.height >= 9) {
        context.fillStyle = colours.dimmed;
        context.fillText(STREAM_NAMES[line.stream] || line.stream, STREAM_AT, y + line.y + Math.min(line.height, 14) - 2, LABELS - STREAM_AT - EDGE);
      }
    });
  }

  function axis(context, scene, view, height) {
    const { colours } = scene, scale = view.width / (view.to - view.from);
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, LABELS + view.width, AXIS);
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = colours.dimmed;
    const when = scene.started_at ? `   ${scene.started_at}` : "";
    context.fillText(`${scene.names ? "recording" : `step ${scene.step}`}${LABELS > 200 ? when : ""}`, EDGE, AXIS / 2, LABELS - 2 * EDGE);
    for (const tick of ticks(view.from, view.to, view.width)) {
      const x = Math.round(LABELS + (tick.time - view.from) * scale);
      context.fillStyle = colours.grid;
      context.fillRect(x, AXIS - 6, 1, 6);
      context.fillStyle = colours.dimmed;
      if (x + 4 + tick.text.length * 6.5 < LABELS + view.width) context.fillText(tick.text, x + 4, AXIS / 2);
    }
    context.fillStyle = colours.grid;
    context.fillRect(0, AXIS - 1, LABELS + view.width, 1);
    context.fillRect(LABELS - 1, 0, 1, height);
  }

  // Draws a line at the end of each replay through the tracks, with its name in the strip below. The first to end is on
  // top, so that no line crosses a name.
  function endings(context, scene, view, height) {
    const top = height - footHeight(scene);
    context.fillStyle = scene.colours.paper;
    context.fillRect(0, top, LABELS + view.width, height - top);
    context.fillStyle = scene.colours.grid;
    context.fillRect(0, top, LABELS + view.width, 1);
    const replays = [...scene.replays].sort((a, b) => scene.ends[a] - scene.ends[b]);
    replays.forEach((replay, index) => {
      const x = LABELS + ((scene.ends[replay] - view.from) / (view.to - view.from)) * view.width;
      if (x < LABELS || x > LABELS + view.width) return;
      const text = `${replay} ends`, y = top + 3 + index * FLAG;
      context.font = FONT;
      context.textBaseline = "middle";
      const room = context.measureText(text).width + 8;
      const left = x - room > LABELS ? x - room : x + 1.5;
      context.fillStyle = scene.colours[replay];
      context.fillRect(Math.round(x), AXIS, 1.5, y + FLAG - 2 - AXIS);
      context.fillRect(left, y, room, FLAG - 2);
      context.fillStyle = scene.colours.paper;
      context.fillText(text, left + 4, y + 8.5);
    });
  }

  function outline(context, scene, view, mark) {
    const line = scene.block.lines[mark.line], y = rowTop(scene, view, mark.row) + line.y;
    const scale = view.width / (view.to - view.from);
    const x = LABELS + (mark.start - view.from) * scale, stop = x + Math.max(mark.duration * scale, 2);
    const left = Math.max(x, LABELS), right = Math.min(stop, LABELS + view.width);
    if (right < left || y < (mark.row < scene.pinned ? AXIS : scrollingTop(scene))) return;
    context.lineWidth = 2;
    context.strokeStyle = scene.colours.outline;
    context.strokeRect(left - 1, y - 1, right - left + 2, line.height + 2);
  }

  function paintRows(context, scene, view, spans, first, last) {
    const { colours } = scene, batch = Batch([colours.wait, ...colours.classes]), labelled = [];
    for (let row = first; row < last; row += 1) {
      const y = rowTop(scene, view, row), block = scene.blocks[row];
      context.fillStyle = colours.grid;
      context.fillRect(0, y + block.height - 1, LABELS + view.width, 1);
      labels(context, scene, row, y);
      block.lines.forEach((line, index) => {
        const [begin, end] = spans ? window.tracekitTimelineSpans.range(scene, spans, row, index) : [0, 0];
        if (rowsOf().isGroup(scene, row)) pooled(batch, view, spans, begin, end, line, y + line.y, scene);
        else track(batch, labelled, view, spans, begin, end, line, y + line.y, scene);
      });
    }
    batch.paint(context);
    if (spans) labelSpans(context, spans, labelled, scene);
  }

  // The selected range, over everything that is between its ends.
  function selection(context, scene, view, height) {
    if (!view.range) return;
    const [left, right] = view.range.map((time) => {
      const x = LABELS + ((time - view.from) / (view.to - view.from)) * view.width;
      return Math.min(Math.max(x, LABELS), LABELS + view.width);
    });
    if (right <= left) return;
    context.fillStyle = scene.colours.outline;
    context.globalAlpha = 0.16;
    context.fillRect(left, 0, right - left, height - footHeight(scene));
    context.globalAlpha = 1;
    for (const x of [left, right]) context.fillRect(Math.min(x, LABELS + view.width - 1), 0, 1.5, height - footHeight(scene));
  }

  // An arrow of a dependency. `ends`: [[row, line, seconds], [row, line, seconds]].
  function arrow(context, scene, view, ends) {
    const scale = view.width / (view.to - view.from), [from, to] = ends.map(([row, line, time]) => {
      const { y, height } = scene.block.lines[line];
      return [LABELS + (time - view.from) * scale, rowTop(scene, view, row) + y + height / 2];
    });
    const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(...to);
    for (const turn of [0.45, -0.45]) {
      context.moveTo(...to);
      context.lineTo(to[0] - 8 * Math.cos(angle + turn), to[1] - 8 * Math.sin(angle + turn));
    }
    context.stroke();
  }

  function arrows(context, scene, view, edges) {
    context.save();
    context.beginPath();
    context.rect(LABELS, AXIS, view.width, view.height - AXIS - footHeight(scene));
    context.clip();
    for (const [width, colour] of [[4, scene.colours.paper], [1.75, scene.colours.text]]) {
      context.lineWidth = width;
      context.strokeStyle = colour;
      edges.forEach((ends) => arrow(context, scene, view, ends));
    }
    context.restore();
  }

  // Draws everything. `view`: {from, to, width, height, top, range}; `spans`: those loaded, or null; `marks`: spans to
  // outline; `edges`: dependencies of the selected op.
  function draw(context, scene, view, spans, marks, edges) {
    const { colours } = scene, height = view.height;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, LABELS + view.width, height);
    paintRows(context, scene, view, spans, ...inView(scene, view.top, height));
    if (scene.pinned) {
      context.fillStyle = colours.paper;
      context.fillRect(0, AXIS, LABELS + view.width, scrollingTop(scene) - AXIS);
      paintRows(context, scene, view, spans, 0, scene.pinned);
      context.fillStyle = colours.dimmed;
      context.fillRect(0, scrollingTop(scene) - 2, LABELS + view.width, 2);
    }
    marks.forEach((mark) => outline(context, scene, view, mark));
    arrows(context, scene, view, edges);
    endings(context, scene, view, height);
    axis(context, scene, view, height);
    selection(context, scene, view, height);
  }

  // The overview: pooled workers down, the step across, the slowest compute of each cell.
  function overview(context, scene, width, height, view) {
    const { colours, bounds } = scene, [rows, columns] = scene.overview, picture = scene.picture;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    const batch = Batch([colours.wait, ...colours.classes]), cellWidth = (width - LABELS) / columns, cellHeight = height / rows;
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; ) {
        const value = picture[row * columns + column];
        const level = value ? 1 + classOf(value / 50 - 1e-6, bounds) : 0;
        let stop = column + 1;
        while (stop < columns) {
          const next = picture[row * columns + stop];
          if ((next ? 1 + classOf(next / 50 - 1e-6, bounds) : 0) !== level) break;
          stop += 1;
        }
        if (level) batch.add(level, LABELS + column * cellWidth, row * cellHeight, Math.max((stop - column) * cellWidth, level > 1 ? 2 : 1), Math.max(cellHeight - (cellHeight > 3 ? 0.5 : 0), 1));
        column = stop;
      }
    }
    batch.paint(context);
    const { begins } = scene, scale = (width - LABELS) / (scene.ends[scene.overview[2]] - begins), total = scene.tops[scene.rows];
    const x = LABELS + Math.max(0, (view.from - begins) * scale), stop = Math.min(width, LABELS + (view.to - begins) * scale);
    const y = (view.top / total) * height, visibleHeight = Math.min(1, (view.height - AXIS - footHeight(scene)) / total) * height;
    context.strokeStyle = colours.outline;
    context.lineWidth = 1.5;
    const boxHeight = Math.max(visibleHeight, 7);
    context.strokeRect(x + 1, Math.min(y + 1, height - boxHeight - 1), Math.max(stop - x - 2, 3), boxHeight - 2);
    context.font = FONT;
    context.fillStyle = colours.dimmed;
    context.textBaseline = "alphabetic";
    const noun = `${scene.names ? "rank" : "worker"}${scene.workers === 1 ? "" : "s"}`;
    context.fillText(`${scene.workers.toLocaleString("en")} ${noun}, ${scene.overview[2]}`, EDGE, 16, LABELS - 2 * EDGE);
    context.fillText(`${scene.spans.toLocaleString("en")} ops drawn`, EDGE, 32, LABELS - 2 * EDGE);
  }

  window.tracekitTimelineDraw = {
    AXIS, get LABELS() { return LABELS; }, fitLabels, fittedBlock, placeRows, rowAt, footHeight, rowTop, scrollingTop, inView, draw, overview,
  };
})();
