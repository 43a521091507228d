// Decodes the numbers of a Plotly figure, formats them, and computes axes and ticks. Creates no elements.
(function () {
  "use strict";

  const TYPES = {
    i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array,
    f4: Float32Array, f8: Float64Array,
  };
  const STEPS = [1, 2, 2.5, 5, 10];

  // ---- reading

  // Decodes the base64 arrays of Plotly for Python, nested if they have a shape. NaN and infinities become null.
  function unpack(value) {
    if (Array.isArray(value)) return value.map(unpack);
    if (value === null || typeof value !== "object") return value;
    if (!("bdata" in value)) return Object.fromEntries(Object.entries(value).map(([name, member]) => [name, unpack(member)]));
    const bytes = Uint8Array.from(atob(value.bdata), (char) => char.charCodeAt(0));
    const flat = Array.from(new TYPES[value.dtype](bytes.buffer), (number) => (Number.isFinite(number) ? number : null));
    const shape = value.shape ? String(value.shape).split(",").map(Number) : [flat.length];
    return shape.slice(1).reduceRight(fold, flat);
  }

  function fold(flat, size) {
    return Array.from({ length: flat.length / size }, (_, row) => flat.slice(row * size, (row + 1) * size));
  }

  // ---- writing

  // The d3 formats that the figures use: `.3f`, `.4g`, `.0%`, with `,` and `+` before them.
  function format(value, spec) {
    if (typeof value !== "number") return value === null || value === undefined ? "-" : String(value);
    const [, sign, digits, kind] = /^(\+?),?(?:\.(\d+))?([fg%]?)$/.exec(spec || "") || [];
    const plus = sign && value > 0 ? "+" : "", places = digits === undefined ? 6 : Number(digits);
    if (kind === "%") return `${plus}${(100 * value).toFixed(places).replace(/^-(?=0\.?0*$)/, "")}%`;
    if (kind === "f") return plus + value.toFixed(places);
    const rounded = Number(value.toPrecision(Math.max(places, 1)));
    if (Math.abs(rounded) >= 1e15) return plus + rounded.toExponential(); // in full, it fits on no axis
    return plus + ((spec || "").includes(",") ? rounded.toLocaleString("en-US") : String(rounded));
  }

  // Fills a hover template: `%{customdata[0]}` and the like are members of `point`. Drops <extra>, Plotly's second box.
  function words(template, point) {
    return template
      .replace(/<extra>.*<\/extra>/, "")
      .replace(/%\{(\w+)(?:\[(\d+)\])?(?::([^}]+))?\}/g, function (_, name, index, spec) {
        const value = point[name];
        return format(index === undefined || !Array.isArray(value) ? value : value[Number(index)], spec);
      });
  }

  const lines = (text) => text.split(/<br ?\/?>/).map((line) => line.replace(/<\/?b>/g, "").replace(/&lt;/g, "<")
    .replace(/&gt;/g, ">").replace(/&quot;/g, '"').replace(/&#x27;/g, "'").replace(/&amp;/g, "&"));

  // ---- axes

  const finite = (values) => values.filter((value) => typeof value === "number" && Number.isFinite(value));

  function bounds(values) {
    let low = Infinity, high = -Infinity;
    for (const value of finite(values)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return low > high ? [0, 1] : [low, high];
  }

  // An axis of lines spans at least this share of its largest value, so that noise does not fill a chart.
  const LEAST_SPAN = 0.1;
  // Steps between the ticks of an axis of time, seconds.
  const TIME_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

  // An axis, still without its place in pixels. `names`: of a categorical axis, else null; `ends`: of the marks. The
  // range has padding around them, except below the 0 that bars stand on (`grounded`) and around maps (`exact`).
  function axis(spec, names, { ends, exact, grounded, least = 0 }) {
    if (names) {
      const range = [-0.5, names.length - 0.5];
      return { spec, names, range: spec.autorange === "reversed" ? range.reverse() : range };
    }
    if (spec.range) return { spec, names, range: [...spec.range] };
    let [low, high] = ends;
    const missing = least * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
    if (missing > 0) [low, high] = [low - missing / 2, high + missing / 2];
    if (spec.rangemode === "tozero") [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (grounded && low === high) high = 1; // bars of nothing
    const padding = exact ? 0 : 0.05 * (high - low || Math.abs(high) || 1), isBase = (end) => grounded && end === 0;
    low = isBase(low) || (spec.rangemode === "tozero" && low === 0) ? low : low - padding;
    high = isBase(high) ? high : high + padding;
    return { spec, names, range: spec.autorange === "reversed" ? [high, low] : [low, high] };
  }

  // [position, text] of each tick, at most about `limit` of them.
  function ticks({ spec, names, range, zone }, limit) {
    const [low, high] = [Math.min(...range), Math.max(...range)];
    const inside = ([position]) => position >= low && position <= high;
    if (spec.tickvals) return thinned(spec.tickvals.map((position, index) => [position, spec.ticktext[index]]).filter(inside), limit);
    if (names) return thinned(names.map((name, position) => [position, String(name)]).filter(inside), Math.min(limit, spec.nticks || limit));
    if (spec.type === "date") return timeTicks(low, high, limit, zone);
    const power = 10 ** Math.floor(Math.log10((high - low) / Math.max(limit, 1)));
    const step = power * STEPS.find((multiple) => (high - low) / (multiple * power) <= limit);
    const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: count }, (_, index) => {
      const position = Number(((first + index) * step).toPrecision(12));
      return [position, format(position, spec.tickformat || "")];
    });
  }

  // Ticks of an axis of time, in milliseconds since 1970.
  function timeTicks(low, high, limit, zone) {
    const span = (high - low) / 1000, usual = TIME_STEPS_S.find((step) => span / step <= limit);
    const step = 1000 * (span < 1 ? 10 ** Math.ceil(Math.log10(span / limit)) : usual || 604800 * Math.ceil(span / limit / 604800));
    const parts = step < 1000 ? { second: "2-digit", fractionalSecondDigits: 3 } : step < 60000 ? { second: "2-digit" } : {};
    const day = step >= 43200000 ? { month: "short", day: "numeric" } : {};
    const clock = new Intl.DateTimeFormat("en-GB", { timeZone: zone, hour: "2-digit", minute: "2-digit", ...parts, ...day });
    const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
    return Array.from({ length: Math.max(count, 0) }, (_, index) => [(first + index) * step, clock.format((first + index) * step)]);
  }

  function thinned(all, limit) {
    const every = Math.max(1, Math.ceil(all.length / Math.max(limit, 1)));
    return all.filter((_, index) => index % every === 0);
  }

  window.tracekitChart = { unpack, format, words, lines, axis, bounds, ticks, LEAST_SPAN };
})();
