// The spans of a timeline as the server sends them: taking the answer apart, and finding ops in it.
(function () {
  "use strict";

  // A binary answer: uint32 length, JSON, arrays (dashboards/web/timeline_requests.py).
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

  // Which row the worker of a name (DP,PP or DP,PP,KIND,SEQ) is in; -1 where it is not shown.
  function position(scene, name) {
    const [dp, pp] = name.split(",").map(Number);
    return scene.dp_rank.findIndex((value, at) => value === dp && scene.pp_rank[at] === pp);
  }

  // Where the spans of a line of a worker are; an empty range where they are not loaded.
  function range(scene, spans, worker, line) {
    const number = (worker - spans.first_worker) * scene.lines.length + line;
    return number < 0 || number + 1 >= spans.first.length ? [0, 0] : [spans.first[number], spans.first[number + 1]];
  }

  function mark(scene, spans, worker, line, at) {
    const kind = scene.kinds[spans.kind[at]];
    return {
      worker: worker, line: line, at: at, kind: kind, start: spans.start[at], duration: spans.duration[at],
      name: `${scene.dp_rank[worker]},${scene.pp_rank[worker]},${kind},${spans.seq[at]}`,
    };
  }

  // The op at a time on the line at a depth, `near` seconds off at most; of several the nearest, then the shortest.
  function under(scene, spans, time, near, down) {
    const { block } = scene, worker = Math.floor(down / block.height), inside = down - worker * block.height;
    const line = block.lines.findIndex((one) => inside >= one.y - 1 && inside <= one.y + one.height);
    if (line < 0 || worker >= scene.workers) return null;
    const [begin, end] = range(scene, spans, worker, line);
    let found = -1, nearest = Infinity;
    for (let at = begin; at < end; at += 1) {
      const off = Math.max(spans.start[at] - time, time - spans.start[at] - spans.duration[at], 0);
      if (off <= near && off * 1e6 + spans.duration[at] < nearest) {
        nearest = off * 1e6 + spans.duration[at];
        found = at;
      }
    }
    return found < 0 ? null : mark(scene, spans, worker, line, found);
  }

  // All loaded spans of the op of that name: as recorded and as replayed.
  function named(scene, spans, name) {
    const [, , kind, seq] = name.split(","), code = scene.kinds.indexOf(kind), found = [];
    const worker = position(scene, name);
    if (worker < 0) return found;
    scene.lines.forEach((_, line) => {
      const [begin, end] = range(scene, spans, worker, line);
      for (let at = begin; at < end; at += 1) {
        if (spans.kind[at] === code && spans.seq[at] === Number(seq)) found.push(mark(scene, spans, worker, line, at));
      }
    });
    return found;
  }

  window.tracekitTimelineSpans = { unpack: unpack, position: position, range: range, mark: mark, under: under, named: named };
})();
