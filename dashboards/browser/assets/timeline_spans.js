// The data of a timeline: its rows, which one is at a height, and what a click on its name does; the spans as the server
// sends them, and finding ops in them.
(function () {
  "use strict";

  const paint = () => window.tracekitTimelineDraw;
  const words = (text) => (text || "").split(" ").filter(Boolean);
  const isGroup = (scene, row) => Boolean(scene.groups[scene.group[row]]);

  // The worker of a row, or the first of its group, as the address names it.
  const worker = (scene, row) => `${scene.dp_rank[row]},${scene.pp_rank[row]}`;

  // Whether the workers of a group have rows of their own, below it.
  const isOpen = (scene, row) => row + 1 < scene.rows && !isGroup(scene, row + 1);

  // The row at a height of the canvas, and how far down in it that is; null where there is none.
  function at(timeline, y) {
    const { scene } = timeline, fixed = y < paint().scrolls(scene);
    const down = y - paint().AXIS + (fixed ? 0 : timeline.scroll.scrollTop), row = paint().rowAt(scene, down);
    if (y < paint().AXIS || y > timeline.height - paint().foot(scene) || down >= scene.tops[scene.rows]) return null;
    return { row: row, inside: down - scene.tops[row] };
  }

  function arrange(timeline, name, workers) {
    timeline.state[name] = workers.join(" ") || null;
    window.tracekit.remember({ [name]: timeline.state[name] });
    return timeline.load(true);
  }

  // Pins a worker on top, or no longer; of too many, the first one goes.
  function pin(timeline, name) {
    const one = name.split(",").slice(0, 2).join(","), pins = words(timeline.state.pin), others = pins.filter((each) => each !== one);
    return arrange(timeline, "pin", others.length < pins.length ? others : [...others, one].slice(-timeline.config.most_pinned));
  }

  // Opens the group of a worker, or of a row that is closed; closes one that is open.
  const open = (timeline, name) => arrange(timeline, "open", [...words(timeline.state.open), name.split(",").slice(0, 2).join(",")]);

  function close(timeline, row) {
    const { scene } = timeline, members = new Set();
    for (let below = row + 1; below < scene.rows && !isGroup(scene, below); below += 1) members.add(worker(scene, below));
    return arrange(timeline, "open", words(timeline.state.open).filter((one) => !members.has(one)));
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

  window.tracekitTimelineRows = { isGroup, isOpen, worker, at, pin, open, toggle, hint };

  // ---- spans

  // A binary answer: uint32 length, JSON, arrays (dashboards/browser/web/timeline_requests.py).
  function unpack(buffer) {
    const length = new DataView(buffer).getUint32(0, true), types = {
      float64: Float64Array, float32: Float32Array, int32: Int32Array, uint32: Uint32Array, uint8: Uint8Array,
    };
    const found = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    for (const [name, [type, offset, items]] of Object.entries(found.arrays)) {
      found[name] = new types[type](buffer, 4 + length + offset, items);
    }
    return found;
  }

  // The rows of the worker of a name (DP,PP or DP,PP,KIND,SEQ) alone: two where it is pinned, none where it is not shown.
  function rowsOf(scene, name) {
    const [dp, pp] = name.split(",").map(Number), found = [];
    scene.dp_rank.forEach((value, row) => {
      if (value === dp && scene.pp_rank[row] === pp && !isGroup(scene, row)) found.push(row);
    });
    return found;
  }

  // The last of them, which scrolls; -1 where there is none.
  const position = (scene, name) => rowsOf(scene, name).at(-1) ?? -1;

  // Where the spans of a line of a row are; an empty range where they are not loaded.
  function range(scene, spans, row, line) {
    const place = row < scene.pinned ? row : row - spans.first_row + scene.pinned;
    if (row >= scene.pinned && (row < spans.first_row || row >= spans.first_row + spans.rows)) return [0, 0];
    const number = place * scene.lines.length + line;
    return [spans.first[number], spans.first[number + 1]];
  }

  function mark(scene, spans, row, line, at) {
    const kind = scene.kinds[spans.kind[at]];
    return {
      row: row, line: line, at: at, kind: kind, start: spans.start[at], duration: spans.duration[at],
      name: `${scene.dp_rank[row]},${scene.pp_rank[row]},${kind},${spans.seq[at]}`,
    };
  }

  // Tells which spans have all of the words in their name, as `StepOps.named` does; null for no words.
  function finder(scene, text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean), names = scene.names || scene.kinds;
    if (!words.length) return null;
    const fits = words.map((word) => names.map((name) => name.toLowerCase().includes(word)));
    const numbers = words.map((word) => (/^\d+$/.test(word) ? Number(word) : null));
    return (spans, at) => {
      const name = scene.names ? spans.name[at] : spans.kind[at];
      return fits.every((of, word) => of[name] || (numbers[word] !== null && spans.microbatch[at] === numbers[word]));
    };
  }

  // The op at a time, `near` seconds off at most, on the line `inside` pixels down a row; of several the nearest, then the
  // shortest.
  function under(scene, spans, time, near, row, inside) {
    const line = scene.block.lines.findIndex((one) => inside >= one.y - 1 && inside <= one.y + one.height);
    if (line < 0 || isGroup(scene, row)) return null;
    const [begin, end] = range(scene, spans, row, line);
    let found = -1, nearest = Infinity;
    for (let at = begin; at < end; at += 1) {
      const off = Math.max(spans.start[at] - time, time - spans.start[at] - spans.duration[at], 0);
      if (off <= near && off * 1e6 + spans.duration[at] < nearest) {
        nearest = off * 1e6 + spans.duration[at];
        found = at;
      }
    }
    return found < 0 ? null : mark(scene, spans, row, line, found);
  }

  // All loaded spans of the op of that name: as recorded and as replayed.
  function named(scene, spans, name) {
    const [, , kind, seq] = name.split(","), code = scene.kinds.indexOf(kind), found = [];
    for (const row of rowsOf(scene, name)) {
      scene.lines.forEach((_, line) => {
        const [begin, end] = range(scene, spans, row, line);
        for (let at = begin; at < end; at += 1) {
          if (spans.kind[at] === code && spans.seq[at] === Number(seq)) found.push(mark(scene, spans, row, line, at));
        }
      });
    }
    return found;
  }

  window.tracekitTimelineSpans = { unpack, position, range, mark, finder, under, named };
})();
