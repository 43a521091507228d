// The rows of a timeline, and what a click on their names does; the spans that the server sends, and lookups in them.
(function () {
  "use strict";

  const paint = () => window.tracekitTimelineDraw;
  const words = (text) => (text || "").split(" ").filter(Boolean);
  const isGroup = (scene, row) => Boolean(scene.groups[scene.group[row]]);

  // DP,PP of the worker of a row, or of the first of its group.
  const worker = (scene, row) => `${scene.dp_rank[row]},${scene.pp_rank[row]}`;

  // Whether the workers of a group have rows of their own, below it.
  const isOpen = (scene, row) => row + 1 < scene.rows && !isGroup(scene, row + 1);

  // The row at a y of the canvas, and the pixels below its top; null if none.
  function rowAtY(timeline, y) {
    const { scene } = timeline, pinned = y < paint().scrollingTop(scene);
    const down = y - paint().AXIS + (pinned ? 0 : timeline.scroll.scrollTop), row = paint().rowAt(scene, down);
    if (y < paint().AXIS || y > timeline.height - paint().footHeight(scene) || down >= scene.tops[scene.rows]) return null;
    return { row, inside: down - scene.tops[row] };
  }

  function arrange(timeline, name, workers) {
    timeline.state[name] = workers.join(" ") || null;
    window.tracekit.remember({ [name]: timeline.state[name] });
    return timeline.load(true);
  }

  // Pins a worker on top, or unpins it; beyond `most_pinned`, the oldest pin goes.
  function pin(timeline, name) {
    const toggled = name.split(",").slice(0, 2).join(","), pins = words(timeline.state.pin), others = pins.filter((other) => other !== toggled);
    return arrange(timeline, "pin", others.length < pins.length ? others : [...others, toggled].slice(-timeline.config.most_pinned));
  }

  // Opens the group of a worker.
  const open = (timeline, name) => arrange(timeline, "open", [...words(timeline.state.open), name.split(",").slice(0, 2).join(",")]);

  function close(timeline, row) {
    const { scene } = timeline, members = new Set();
    for (let below = row + 1; below < scene.rows && !isGroup(scene, below); below += 1) members.add(worker(scene, below));
    return arrange(timeline, "open", words(timeline.state.open).filter((name) => !members.has(name)));
  }

  function toggle(timeline, row) {
    const { scene } = timeline, name = worker(scene, row);
    if (!isGroup(scene, row)) return pin(timeline, name);
    return isOpen(scene, row) ? close(timeline, row) : open(timeline, name);
  }

  // What a click on the name of a row does, in words.
  function hint(scene, row) {
    if (!isGroup(scene, row)) return row < scene.pinned ? "Click to unpin this row" : "Click to pin this row on top";
    const what = `${scene.groups[scene.group[row]]}: the slowest op at each moment of ${scene.members[row]}`;
    return `${what}. Click to ${isOpen(scene, row) ? "close" : "open"}`;
  }

  window.tracekitTimelineRows = { isGroup, isOpen, worker, rowAtY, pin, open, toggle, hint };

  // ---- spans

  // A binary answer: uint32 length, JSON, arrays (dashboards/browser/web/timeline_requests.py).
  function unpack(buffer) {
    const length = new DataView(buffer).getUint32(0, true), types = {
      float64: Float64Array, float32: Float32Array, int32: Int32Array, uint32: Uint32Array, uint8: Uint8Array,
    };
    const content = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    for (const [name, [type, offset, items]] of Object.entries(content.arrays)) {
      content[name] = new types[type](buffer, 4 + length + offset, items);
    }
    return content;
  }

  // The rows of the worker of a name (DP,PP or DP,PP,KIND,SEQ): two if it is pinned, none if it is not shown.
  function rowsOf(scene, name) {
    const [dp, pp] = name.split(",").map(Number), rows = [];
    scene.dp_rank.forEach((value, row) => {
      if (value === dp && scene.pp_rank[row] === pp && !isGroup(scene, row)) rows.push(row);
    });
    return rows;
  }

  // The scrolling one of them; -1 if none.
  const position = (scene, name) => rowsOf(scene, name).at(-1) ?? -1;

  // The first span of a line of a row, and the one after its last; an empty range if they are not loaded.
  function range(scene, spans, row, line) {
    const place = row < scene.pinned ? row : row - spans.first_row + scene.pinned;
    if (row >= scene.pinned && (row < spans.first_row || row >= spans.first_row + spans.rows)) return [0, 0];
    const number = place * scene.lines.length + line;
    return [spans.first[number], spans.first[number + 1]];
  }

  function mark(scene, spans, row, line, index) {
    const kind = scene.kinds[spans.kind[index]];
    return {
      row, line, index, kind, start: spans.start[index], duration: spans.duration[index],
      name: `${scene.dp_rank[row]},${scene.pp_rank[row]},${kind},${spans.seq[index]}`,
    };
  }

  // A function that tells whether a span's name has all of the words, as `StepOps.named` does; null for no words.
  function finder(scene, text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean), names = scene.names || scene.kinds;
    if (!words.length) return null;
    const hitsOfWords = words.map((word) => names.map((name) => name.toLowerCase().includes(word)));
    const numbers = words.map((word) => (/^\d+$/.test(word) ? Number(word) : null));
    return (spans, index) => {
      const name = scene.names ? spans.name[index] : spans.kind[index];
      return hitsOfWords.every((hits, word) => hits[name] || (numbers[word] !== null && spans.microbatch[index] === numbers[word]));
    };
  }

  // The op within `tolerance` seconds of a time, on the line `inside` pixels below the top of a row: the nearest, then
  // the shortest.
  function spanAt(scene, spans, time, tolerance, row, inside) {
    const line = scene.block.lines.findIndex((candidate) => inside >= candidate.y - 1 && inside <= candidate.y + candidate.height);
    if (line < 0 || isGroup(scene, row)) return null;
    const [begin, end] = range(scene, spans, row, line);
    let best = -1, nearest = Infinity;
    for (let index = begin; index < end; index += 1) {
      const distance = Math.max(spans.start[index] - time, time - spans.start[index] - spans.duration[index], 0);
      if (distance <= tolerance && distance * 1e6 + spans.duration[index] < nearest) {
        nearest = distance * 1e6 + spans.duration[index];
        best = index;
      }
    }
    return best < 0 ? null : mark(scene, spans, row, line, best);
  }

  // All loaded spans of the op of that name: as recorded and as replayed.
  function named(scene, spans, name) {
    const [, , kind, seq] = name.split(","), code = scene.kinds.indexOf(kind), marks = [];
    for (const row of rowsOf(scene, name)) {
      scene.lines.forEach((_, line) => {
        const [begin, end] = range(scene, spans, row, line);
        for (let index = begin; index < end; index += 1) {
          if (spans.kind[index] === code && spans.seq[index] === Number(seq)) marks.push(mark(scene, spans, row, line, index));
        }
      });
    }
    return marks;
  }

  window.tracekitTimelineSpans = { unpack, position, range, mark, finder, spanAt, named };
})();
