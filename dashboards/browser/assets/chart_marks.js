// The marks of a Plotly figure at positions of its axes, each with the point behind it. Supports only the kinds and
// options that the figures of tracekit use.
(function () {
  "use strict";

  const { bounds } = window.tracekitChart;
  const elementOf = (value, index) => (Array.isArray(value) ? value[index] : value);

  // The categories of an axis, in the order of their first mention; null if the axis is numeric.
  function categoriesOf(traces, letter, spec) {
    const values = traces.flatMap((trace) => (trace.type === "heatmap" ? [] : trace[letter] || []));
    const categorical = spec.type === "category" || values.some((value) => typeof value === "string");
    return categorical ? [...new Set(values.map(String))] : null;
  }

  function positions(values, categories) {
    if (!categories) return values;
    const position = new Map(categories.map((name, index) => [name, index]));
    return values.map((value) => position.get(String(value)));
  }

  function pointOf(trace, index) {
    return { customdata: trace.customdata && trace.customdata[index], text: elementOf(trace.text, index), x: trace.x[index], y: trace.y[index] };
  }

  // ---- bars: side by side, stacked, or from their `base` on

  function bars(traces, layout, categories) {
    const all = traces.filter((trace) => trace.type === "bar"), stacked = layout.barmode === "stack";
    const grouped = !stacked && layout.barmode !== "overlay"; // side by side
    const group = (1 - (layout.bargap ?? 0.2)) / (grouped ? all.length : 1), innerGap = layout.bargroupgap ?? 0, tops = new Map();
    return all.flatMap(function (trace, number) {
      const [base, size] = trace.orientation === "h" ? ["y", "x"] : ["x", "y"], places = positions(trace[base], categories[base]);
      return trace[size].flatMap(function (value, index) {
        if (value === null) return [];
        const begin = stacked ? tops.get(places[index]) || 0 : trace.base ? trace.base[index] : 0, end = begin + value;
        tops.set(places[index], end);
        const width = trace.width ? trace.width[index] : group * (1 - innerGap);
        const middle = places[index] + (grouped ? (number - (all.length - 1) / 2) * group : 0), point = pointOf(trace, index);
        return {
          trace, point, base, box: { [base]: [middle - width / 2, middle + width / 2], [size]: [begin, end] },
          error: trace.error_x ? { size: trace.error_x.array[index], colour: trace.error_x.color } : null,
          colour: elementOf(trace.marker.color, index),
          text: trace.textposition === "inside" ? { words: point.text, colour: elementOf(trace.textfont.color, index) } : null,
        };
      });
    });
  }

  // ---- lines and points

  function path(trace, categories) {
    const x = positions(trace.x, categories.x), y = positions(trace.y, categories.y), shape = (trace.line || {}).shape, corners = [];
    x.forEach(function (xNow, index) {
      const before = index - 1;
      if (index && shape === "hv") corners.push([xNow, y[before]]);
      if (index && shape === "hvh") corners.push([(x[before] + xNow) / 2, y[before]], [(x[before] + xNow) / 2, y[index]]);
      corners.push([xNow, y[index]]);
    });
    const points = x.map((xNow, index) => ({ x: xNow, y: y[index], point: pointOf(trace, index) }));
    return { trace, corners, points: points.filter((point) => point.y !== null && point.x !== null) };
  }

  // ---- maps

  const map = (trace) => ({ trace, rows: trace.z.length, columns: trace.z.length ? trace.z[0].length : 0 });

  // A function from a value to its colour on the scale of a heat map, [red, green, blue].
  function colourOf(trace) {
    const stops = trace.colorscale.map(([share, colour]) => [share, [1, 3, 5].map((first) => parseInt(colour.slice(first, first + 2), 16))]);
    return function (value) {
      const share = Math.min(Math.max((value - trace.zmin) / (trace.zmax - trace.zmin), 0), 1);
      const above = Math.max(1, stops.findIndex(([end]) => end >= share)), [low, from] = stops[above - 1], [high, to] = stops[above];
      return from.map((channel, index) => Math.round(channel + ((to[index] - channel) * (share - low)) / (high - low)));
    };
  }

  // ---- all of a figure

  function marks(figure) {
    const { data, layout } = figure;
    const categories = { x: categoriesOf(data, "x", layout.xaxis), y: categoriesOf(data, "y", layout.yaxis) };
    const all = {
      categories,
      bars: bars(data, layout, categories),
      paths: data.filter((trace) => trace.type === "scatter").map((trace) => path(trace, categories)),
      maps: data.filter((trace) => trace.type === "heatmap").map(map),
    };
    all.extent = { x: extent(all, "x"), y: extent(all, "y") };
    return all;
  }

  // The ends of all marks along an axis, and the options of `axis` in chart_axes.js.
  function extent({ maps, bars, paths }, letter) {
    if (maps.length) {
      const [{ rows, columns }] = maps;
      return { ends: [-0.5, (letter === "x" ? columns : rows) - 0.5], exact: true };
    }
    const boxes = bars.flatMap((bar) => [...bar.box[letter], ...(bar.error && letter === "x" ? [bar.box.x[1] + bar.error.size] : [])]);
    const points = paths.flatMap((path) => path.points.map((point) => point[letter]));
    return { ends: bounds([...boxes, ...points]), grounded: boxes.length > 0 };
  }

  Object.assign(window.tracekitChart, { marks, colourOf });
})();
