// The spans of a timeline as the server sends them: taking the answer apart, and finding ops in it.
(function () {
  "use strict";

  const isGroup = (scene, row) => window.tracekitTimelineRows.isGroup(scene, row);

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
