// Draws a timeline: geometry and paint only, from data and a view to pixels of a 2D context. Nothing here listens,
// fetches or keeps state.
(function () {
  "use strict";

  const rowsOf = () => window.tracekitTimelineRows;
  const AXIS = 30, EDGE = 8;
  let LABELS = 216, STREAM_AT = 132;
  const TALL = 20, GAP = 8, FLAG = 18;
  // Rows get smaller until so many fit, down to these heights of a line; lines with names of their own stay readable.
  const FITTING = 40, LEAST = 6, LEAST_NAMED = 10;
  const STREAM_NAMES = {
    compute: "compute", "forward-send": "fwd send", "forward-recv": "fwd recv", "backward-send": "bwd send",
    "backward-recv": "bwd recv", "data-parallel": "data par.", "model-parallel": "model par.",
  };
  const LETTERS = { "forward-compute": "F", "backward-compute": "B", optimizer: "opt", gc: "gc", "data-load": "load",
    checkpoint: "ckpt", "host-delay": "host" };
  const FONT = '11px system-ui, "DejaVu Sans", sans-serif';

  // Where the lines of a row are: [{replay, stream, y, height, first}], `first` where a stream begins. `tall`: the height
  // of the line of a compute.
  function rows(lines, tall) {
    const small = tall < TALL, gap = small ? 3 : GAP;
    let y = gap / 2;
    const placed = lines.map(([replay, stream, computes], at) => {
      const first = at === 0 || lines[at - 1][1] !== stream;
      if (first && at > 0 && !small) y += 2;
      const height = Math.max(3, Math.round(tall * (computes ? 1 : 0.55) * (small && !first ? 0.6 : 1)));
      const line = { replay: replay, stream: stream, y: y, height: height, first: first };
      y += height + 1;
      return line;
    });
    return { lines: placed, height: Math.max(small ? 13 : 26, Math.ceil(y + gap / 2)) };
  }

  // The largest rows of which FITTING, or all that there are, fit into a height.
  function fitted(lines, count, room, named) {
    let tall = TALL, block = rows(lines, tall);
    while (tall > (named ? LEAST_NAMED : LEAST) && block.height * Math.min(FITTING, count) > room) block = rows(lines, (tall -= 1));
    return block;
  }

  // Gives each row its lines, down to the last that it uses, and where it begins below the first.
  function place(scene) {
    const { lines, height } = scene.block, all = lines.length;
    const blocks = lines.map((line, at) => (at + 1 === all ? scene.block : { lines: lines.slice(0, at + 1), height: Math.min(height, Math.max(26, line.y + line.height + GAP)) }));
    scene.blocks = Array.from({ length: scene.rows }, (_, row) => blocks[(scene.used ? scene.used[row] : all) - 1]);
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

  // Where a row is on the canvas: pinned rows stay on top.
  const rowTop = (scene, view, row) => AXIS + scene.tops[row] - (row < scene.pinned ? 0 : view.top);
  // Where the rows that scroll begin.
  const scrolls = (scene) => AXIS + scene.tops[scene.pinned];

  // The first scrolling row in view, and the one after the last.
  function inView(scene, top, height) {
    return [rowAt(scene, scene.tops[scene.pinned] + top), Math.min(scene.rows, rowAt(scene, top + height - AXIS - foot(scene)) + 1)];
  }

  // The height of the strip below the tracks that says where each replay ends: a row for each.
  function foot(scene) {
    return scene.replays.length * FLAG + 4;
  }

  // A step between ticks of 1, 2 or 5 x 10^n seconds, and the unit that reads best at it.
  function ticks(from, to, width) {
    const rough = ((to - from) / width) * 90;
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
    const unit = step >= 0.5 ? ["s", 1] : step >= 0.5e-3 ? ["ms", 1e3] : ["us", 1e6];
    const digits = Math.max(0, Math.ceil(-Math.log10(step * unit[1]) - 1e-9));
    const found = [];
    for (let at = Math.ceil(from / step); at * step <= to; at += 1) {
      found.push({ time: at * step, text: `${(at * step * unit[1]).toFixed(digits)} ${unit[0]}` });
    }
    return found;
  }

  function classOf(ratio, bounds) {
    let found = 0;
    while (found < bounds.length && ratio > bounds[found]) found += 1;
    return found;
  }

  // Rectangles by colour, painted a colour at a time: changing the colour is what costs.
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

  // One track into the batch. Spans that fall into one pixel are one rectangle in the colour of the slowest.
  function track(batch, words, view, spans, begin, end, line, y, { bounds, finds }) {
    const scale = view.width / (view.to - view.from), right = LABELS + view.width;
    const wait = 0, first = 1;
    let pixel = -1, worst = 0;
    const flush = () => {
      if (pixel >= 0) batch.add(first + worst, pixel, y, worst ? 2 : 1, line.height);
      pixel = -1;
    };
    for (let at = begin; at < end; at += 1) {
      const x = LABELS + (spans.start[at] - view.from) * scale;
      if (x > right) break;
      const shown = Math.max(spans.duration[at], spans.covers[at]) * scale;
      if (x + shown < LABELS && x + 1 < LABELS) continue;
      const level = classOf(spans.ratio[at], bounds);
      if (finds && !finds(spans, at)) {
        flush();
        const left = Math.max(x, LABELS);
        batch.add(wait, left, y, Math.max(Math.min(x + shown, right) - left, 1), line.height);
        continue;
      }
      if (shown < 1) {
        const column = Math.max(LABELS, Math.floor(x));
        if (column !== pixel) { flush(); pixel = column; worst = level; } else if (level > worst) { worst = level; }
        continue;
      }
      flush();
      const left = Math.max(x, LABELS), stop = Math.min(x + shown, right);
      const waited = Math.min(Math.max(x + spans.wait[at] * scale, left), stop);
      if (waited > left) batch.add(wait, left, y, waited - left, line.height);
      // A hair between neighbours tells them apart; the own part of a waiting op is at least a pixel.
      const own = Math.max(stop - waited - (stop - waited > 4 ? 0.75 : 0), 1);
      batch.add(first + level, Math.min(waited, right - 1), y, own, line.height);
      if (stop - waited > 22 && line.height >= 12) words.push(at, waited, stop, y + line.height / 2 + 0.5, level);
    }
    flush();
  }

  // A track of several workers: in every pixel the slowest of their ops, waiting, or nothing.
  function pooled(batch, view, spans, begin, end, line, y, { bounds, finds }) {
    const scale = view.width / (view.to - view.from), levels = new Uint8Array(Math.ceil(view.width) + 1);
    for (let at = begin; at < end; at += 1) {
      const x = (spans.start[at] - view.from) * scale, stop = x + spans.duration[at] * scale;
      if (x > view.width) break;
      if (stop < 0 || (finds && !finds(spans, at))) continue;
      const level = 2 + classOf(spans.ratio[at], bounds), own = x + spans.wait[at] * scale;
      const last = Math.min(Math.max(stop, own + 1), view.width);
      for (let pixel = Math.max(0, Math.floor(x)); pixel < last; pixel += 1) {
        const now = pixel < Math.floor(own) ? 1 : level;
        if (levels[pixel] < now) levels[pixel] = now;
      }
    }
    for (let pixel = 0; pixel < levels.length; ) {
      let stop = pixel + 1;
      while (stop < levels.length && levels[stop] === levels[pixel]) stop += 1;
      if (levels[pixel]) batch.add(levels[pixel] - 1, LABELS + pixel, y, stop - pixel, line.height);
      pixel = stop;
    }
  }

  function say(context, spans, words, scene) {
    const { kinds, names, colours } = scene;
    context.font = FONT;
    context.textBaseline = "middle";
    for (let i = 0; i < words.length; i += 5) {
      const at = words[i], room = words[i + 2] - words[i + 1] - 6;
      const letter = LETTERS[kinds[spans.kind[at]]] || kinds[spans.kind[at]];
      const whole = names ? names[spans.name[at]] : letter + (spans.microbatch[at] >= 0 ? ` ${spans.microbatch[at]}` : "");
      const text = names ? whole.replace(/^void (at::native::)?/, "").slice(0, Math.floor(room / 6.6)) : whole;
      if (text.length * 6.2 > room) continue;
      context.fillStyle = colours.on_classes[words[i + 4]];
      context.fillText(text, words[i + 1] + 4, words[i + 3]);
    }
  }

  // Names have room for ten characters at least.
  function fit(width) {
    [LABELS, STREAM_AT] = width < 480 ? [130, 78] : width < 1000 ? [140, 80] : [216, 132];
  }

  // Text that is too long ends in dots: squeezed, nobody could read it.
  function cut(context, text, most) {
    let shown = text;
    while (shown.length > 2 && context.measureText(shown).width > most) shown = `${shown.slice(0, -2)}\u2026`;
    return shown;
  }

  function labels(context, scene, row, y) {
    const { colours, hosts } = scene, block = scene.blocks[row];
    const dp = scene.dp_rank[row], pp = scene.pp_rank[row], host = hosts[scene.host[row]];
    const group = scene.groups[scene.group[row]], base = y + Math.min(16, block.height / 2 + 5);
    context.textBaseline = "alphabetic";
    context.font = `600 12px ${FONT.slice(5)}`;
    context.fillStyle = colours.text;
    const place = `dp ${dp} stage ${pp}`, known = scene.rank[row] >= 0;
    const own = scene.roles?.[dp] ?? (known ? `rank ${scene.rank[row]}` : place);
    const name = group ? `${rowsOf().isOpen(scene, row) ? "\u25be" : "\u25b8"} ${group}` : row < scene.pinned ? `\u2022 ${own}` : own;
    context.fillText(name, EDGE, base, (scene.names && !group ? STREAM_AT : LABELS) - 2 * EDGE);
    const after = EDGE + context.measureText(name).width + 10;
    context.font = FONT;
    context.fillStyle = colours.dimmed;
    const of = scene.names ? [] : [known && place, `alone costs ${(100 * (1 - 1 / scene.slowdown[row])).toFixed(1)}%`];
    const who = scene.names ? "rank" : "worker", members = scene.members[row];
    const facts = group ? [`${members} ${who}${members === 1 ? "" : "s"}`] : [host, ...of].filter(Boolean);
    const room = Math.max(0, Math.floor((block.height - 20) / 14));
    const most = (scene.names || block.lines.length > 2 ? STREAM_AT : LABELS) - 2 * EDGE;
    while (room === 1 && facts.length > 1 && context.measureText(facts.join(" ")).width > most) facts.pop();
    const lines = room >= facts.length ? facts : room === 2 ? [facts.slice(0, -1).join(" "), facts.at(-1)] : [facts.join(" ")];
    const beside = group || facts.length === 1 ? facts : facts.slice(0, -1), free = STREAM_AT - 8 - after;
    const wide = block.lines.length > 2 ? free : LABELS - after - 10;
    if (room < 1 && wide > 40) context.fillText(beside.join(" "), after, base, wide);
    lines.slice(0, room).forEach((text, at) => context.fillText(cut(context, text, most), EDGE, y + 30 + at * 14));
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

  // Where each replay of the view ends: a line in its colour through the tracks, named in the strip below them. The first
  // to end is named on top, so that no line runs through a name.
  function endings(context, scene, view, height) {
    const top = height - foot(scene);
    context.fillStyle = scene.colours.paper;
    context.fillRect(0, top, LABELS + view.width, height - top);
    context.fillStyle = scene.colours.grid;
    context.fillRect(0, top, LABELS + view.width, 1);
    const inOrder = [...scene.replays].sort((one, other) => scene.ends[one] - scene.ends[other]);
    inOrder.forEach((replay, at) => {
      const x = LABELS + ((scene.ends[replay] - view.from) / (view.to - view.from)) * view.width;
      if (x < LABELS || x > LABELS + view.width) return;
      const text = `${replay} ends`, y = top + 3 + at * FLAG;
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
    if (right < left || y < (mark.row < scene.pinned ? AXIS : scrolls(scene))) return;
    context.lineWidth = 2;
    context.strokeStyle = scene.colours.outline;
    context.strokeRect(left - 1, y - 1, right - left + 2, line.height + 2);
  }

  function paintRows(context, scene, view, spans, first, last) {
    const { colours } = scene, batch = Batch([colours.wait, ...colours.classes]), words = [];
    for (let row = first; row < last; row += 1) {
      const y = rowTop(scene, view, row), block = scene.blocks[row];
      context.fillStyle = colours.grid;
      context.fillRect(0, y + block.height - 1, LABELS + view.width, 1);
      labels(context, scene, row, y);
      block.lines.forEach((line, at) => {
        const [begin, end] = spans ? window.tracekitTimelineSpans.range(scene, spans, row, at) : [0, 0];
        if (rowsOf().isGroup(scene, row)) pooled(batch, view, spans, begin, end, line, y + line.y, scene);
        else track(batch, words, view, spans, begin, end, line, y + line.y, scene);
      });
    }
    batch.paint(context);
    if (spans) say(context, spans, words, scene);
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
    context.fillRect(left, 0, right - left, height - foot(scene));
    context.globalAlpha = 1;
    for (const x of [left, right]) context.fillRect(Math.min(x, LABELS + view.width - 1), 0, 1.5, height - foot(scene));
  }

  // From an op to those that it hands something over to: [[row, line, seconds], [row, line, seconds]].
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

  function arrows(context, scene, view, every) {
    context.save();
    context.beginPath();
    context.rect(LABELS, AXIS, view.width, view.height - AXIS - foot(scene));
    context.clip();
    for (const [width, colour] of [[4, scene.colours.paper], [1.75, scene.colours.text]]) {
      context.lineWidth = width;
      context.strokeStyle = colour;
      every.forEach((ends) => arrow(context, scene, view, ends));
    }
    context.restore();
  }

  // The whole picture. `view`: {from, to, width, height, top, range}; `spans`: what is loaded, or null; `marks`: ops
  // outlined; `handed`: arrows.
  function draw(context, scene, view, spans, marks, handed) {
    const { colours } = scene, height = view.height;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, LABELS + view.width, height);
    paintRows(context, scene, view, spans, ...inView(scene, view.top, height));
    if (scene.pinned) {
      context.fillStyle = colours.paper;
      context.fillRect(0, AXIS, LABELS + view.width, scrolls(scene) - AXIS);
      paintRows(context, scene, view, spans, 0, scene.pinned);
      context.fillStyle = colours.dimmed;
      context.fillRect(0, scrolls(scene) - 2, LABELS + view.width, 2);
    }
    marks.forEach((mark) => outline(context, scene, view, mark));
    arrows(context, scene, view, handed);
    endings(context, scene, view, height);
    axis(context, scene, view, height);
    selection(context, scene, view, height);
  }

  // The overview: pooled workers down, the step across, the slowest compute of each cell.
  function overview(context, scene, width, height, view) {
    const { colours, bounds } = scene, [rows, columns] = scene.overview, picture = scene.picture;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    const batch = Batch([colours.wait, ...colours.classes]), wide = (width - LABELS) / columns, tall = height / rows;
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
        if (level) batch.add(level, LABELS + column * wide, row * tall, Math.max((stop - column) * wide, level > 1 ? 2 : 1), Math.max(tall - (tall > 3 ? 0.5 : 0), 1));
        column = stop;
      }
    }
    batch.paint(context);
    const { begins } = scene, scale = (width - LABELS) / (scene.ends[scene.overview[2]] - begins), total = scene.tops[scene.rows];
    const x = LABELS + Math.max(0, (view.from - begins) * scale), stop = Math.min(width, LABELS + (view.to - begins) * scale);
    const y = (view.top / total) * height, shown = Math.min(1, (view.height - AXIS - foot(scene)) / total) * height;
    context.strokeStyle = colours.outline;
    context.lineWidth = 1.5;
    const high = Math.max(shown, 7);
    context.strokeRect(x + 1, Math.min(y + 1, height - high - 1), Math.max(stop - x - 2, 3), high - 2);
    context.font = FONT;
    context.fillStyle = colours.dimmed;
    context.textBaseline = "alphabetic";
    const what = `${scene.names ? "rank" : "worker"}${scene.workers === 1 ? "" : "s"}`;
    context.fillText(`${scene.workers.toLocaleString("en")} ${what}, ${scene.overview[2]}`, EDGE, 16, LABELS - 2 * EDGE);
    context.fillText(`${scene.spans.toLocaleString("en")} ops drawn`, EDGE, 32, LABELS - 2 * EDGE);
  }

  window.tracekitTimelineDraw = {
    AXIS, get LABELS() { return LABELS; }, fit, fitted, place, rowAt, foot, rowTop, scrolls, inView, draw, overview,
  };
})();
