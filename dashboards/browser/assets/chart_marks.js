// What the traces of a Plotly figure put on a chart: marks at positions of the axes, each with the point behind it. The
// kinds and options that the figures of tracekit use, and no others.
(function () {
  "use strict";

  const { bounds } = window.tracekitChart;
  const each = (value, at) => (Array.isArray(value) ? value[at] : value);
  const indices = (values) => values.map((_, at) => at);

  // The values on an axis where these are names, in the order of their first mention; else null.
  function names(traces, letter, spec) {
    const values = traces.flatMap((trace) => (trace.type === "heatmap" ? [] : trace[letter] || []));
    const named = spec.type === "category" || values.some((value) => typeof value === "string");
    return named ? [...new Set(values.map(String))] : null;
  }

  function placed(values, named) {
    if (!named) return values;
    const at = new Map(named.map((name, position) => [name, position]));
    return values.map((value) => at.get(String(value)));
  }

  function point(trace, at, own) {
    return { customdata: trace.customdata && trace.customdata[at], text: each(trace.text, at), ...own };
  }

  // ---- bars, side by side, one on the other, or from their `base` on; along the axis `across` of names, as long as their values

  function bars(traces, layout, named) {
    const all = traces.filter((trace) => trace.type === "bar"), stacks = layout.barmode === "stack";
    const alone = !stacks && layout.barmode !== "overlay"; // each trace has its part of the width
    const gap = layout.bargap ?? 0.2, between = layout.bargroupgap ?? 0, reached = new Map(), made = [];
    all.forEach(function (trace, number) {
      const lies = trace.orientation === "h", [base, size] = lies ? ["y", "x"] : ["x", "y"];
      const group = (1 - gap) / (alone ? all.length : 1);
      const places = placed(trace[base], named[base]);
      trace[size].forEach(function (value, at) {
        if (value === null) return;
        const from = stacks ? reached.get(places[at]) || 0 : trace.base ? trace.base[at] : 0, to = from + value;
        reached.set(places[at], to);
        const width = trace.width ? trace.width[at] : group * (1 - between), middle = places[at] + (alone ? (number - (all.length - 1) / 2) * group : 0);
        const own = point(trace, at, { x: trace.x[at], y: trace.y[at] });
        const error = trace.error_x ? { size: trace.error_x.array[at], colour: trace.error_x.color } : null;
        const box = { [base]: [middle - width / 2, middle + width / 2], [size]: [from, to] };
        made.push({
          trace, point: own, box, error, lies, colour: each(trace.marker.color, at),
          text: trace.textposition === "inside" ? { words: own.text, colour: each(trace.textfont.color, at) } : null,
        });
      });
    });
    return made;
  }

  // ---- lines and points

  function path(trace, named) {
    const x = placed(trace.x, named.x), y = placed(trace.y, named.y), shape = (trace.line || {}).shape;
    const corners = [];
    x.forEach(function (across, at) {
      const before = at - 1;
      if (at && shape === "hv") corners.push([across, y[before]]);
      if (at && shape === "hvh") corners.push([(x[before] + across) / 2, y[before]], [(x[before] + across) / 2, y[at]]);
      corners.push([across, y[at]]);
    });
    const points = indices(x).map((at) => ({ x: x[at], y: y[at], point: point(trace, at, { x: trace.x[at], y: trace.y[at] }) }));
    return { trace, corners, points: points.filter((one) => one.y !== null && one.x !== null) };
  }

  // ---- maps

  const map = (trace) => ({ trace, rows: trace.z.length, columns: trace.z.length ? trace.z[0].length : 0 });

  function colourOf(trace) {
    const stops = trace.colorscale.map(([at, colour]) => [at, [1, 3, 5].map((from) => parseInt(colour.slice(from, from + 2), 16))]);
    return function (value) {
      const share = Math.min(Math.max((value - trace.zmin) / (trace.zmax - trace.zmin), 0), 1);
      const above = Math.max(1, stops.findIndex(([at]) => at >= share)), [low, first] = stops[above - 1], [high, last] = stops[above];
      return first.map((part, at) => Math.round(part + ((last[at] - part) * (share - low)) / (high - low)));
    };
  }

  // ---- all of a figure

  function marks(figure) {
    const { data, layout } = figure;
    const named = { x: names(data, "x", layout.xaxis), y: names(data, "y", layout.yaxis) };
    const made = {
      named,
      bars: bars(data, layout, named),
      paths: data.filter((trace) => trace.type === "scatter").map((trace) => path(trace, named)),
      maps: data.filter((trace) => trace.type === "heatmap").map(map),
    };
    made.reach = { x: reach(made, "x"), y: reach(made, "y") };
    return made;
  }

  // The ends of all marks along an axis, and what may touch the edge of the chart (chart_axes.js).
  function reach(made, letter) {
    if (made.maps.length) {
      const [{ rows, columns }] = made.maps;
      return { ends: [-0.5, (letter === "x" ? columns : rows) - 0.5], exact: true };
    }
    const boxes = made.bars.flatMap((bar) => [...bar.box[letter], ...(bar.error && letter === "x" ? [bar.box.x[1] + bar.error.size] : [])]);
    const points = made.paths.flatMap((one) => one.points.map((at) => at[letter]));
    return { ends: bounds([...boxes, ...points]), grounded: boxes.length > 0 };
  }

  Object.assign(window.tracekitChart, { marks, colourOf });
})();
