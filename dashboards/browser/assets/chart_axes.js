// Numbers of a Plotly figure, where they lie on a chart, and how they are written: no element is made here.
(function () {
  "use strict";

  const TYPES = {
    i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array,
    f4: Float32Array, f8: Float64Array,
  };
  const STEPS = [1, 2, 2.5, 5, 10];

  // ---- reading

  // Plotly for Python packs numeric arrays; rows of rows where they have a shape. Numbers that are none become null.
  function unpack(value) {
    if (Array.isArray(value)) return value.map(unpack);
    if (value === null || typeof value !== "object") return value;
    if (!("bdata" in value)) return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, unpack(one)]));
    const bytes = Uint8Array.from(atob(value.bdata), (letter) => letter.charCodeAt(0));
    const flat = Array.from(new TYPES[value.dtype](bytes.buffer), (number) => (Number.isFinite(number) ? number : null));
    const shape = value.shape ? String(value.shape).split(",").map(Number) : [flat.length];
    return shape.slice(1).reduceRight(fold, flat);
  }

  function fold(flat, size) {
    return Array.from({ length: flat.length / size }, (_, row) => flat.slice(row * size, (row + 1) * size));
  }

  // ---- writing

  // The formats that the figures use, in the language of d3: `.3f`, `.4g`, `.0%`, with `,` and `+` before them.
  function format(value, spec) {
    if (typeof value !== "number") return value === null || value === undefined ? "-" : String(value);
    const [, sign, digits, kind] = /^(\+?),?(?:\.(\d+))?([fg%]?)$/.exec(spec || "") || [];
    const before = sign && value > 0 ? "+" : "", places = digits === undefined ? 6 : Number(digits);
    if (kind === "%") return `${before}${(100 * value).toFixed(places).replace(/^-(?=0\.?0*$)/, "")}%`;
    if (kind === "f") return before + value.toFixed(places);
    const rounded = Number(value.toPrecision(Math.max(places, 1)));
    if (Math.abs(rounded) >= 1e15) return before + rounded.toExponential(); // in full, it fits on no axis
    return before + ((spec || "").includes(",") ? rounded.toLocaleString("en-US") : String(rounded));
  }

  // `%{customdata[0]}` and the like in a template, from the names in `point`; <extra> is Plotly's box beside the words.
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

  // The share of its largest value that an axis of lines spans at least: noise does not fill a chart.
  const LEAST_SPAN = 0.1;
  // Steps between the ticks of an axis of time, seconds.
  const SPANS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

  // An axis without its place in pixels. `names`: what stands on it, where these are no numbers; `reach`: the ends of
  // what is drawn. Around them is air, but none beyond the 0 that bars stand on, and none around maps.
  function axis(spec, names, { ends, exact, grounded, least = 0 }) {
    if (names) {
      const range = [-0.5, names.length - 0.5];
      return { spec, names, range: spec.autorange === "reversed" ? range.reverse() : range };
    }
    if (spec.range) return { spec, names, range: [...spec.range] };
    let [low, high] = ends;
    const lacks = least * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
    if (lacks > 0) [low, high] = [low - lacks / 2, high + lacks / 2];
    if (spec.rangemode === "tozero") [low, high] = [Math.min(0, low), Math.max(0, high)];
    if (grounded && low === high) high = 1; // bars of nothing
    const air = exact ? 0 : 0.05 * (high - low || Math.abs(high) || 1), stands = (end) => grounded && end === 0;
    low = stands(low) || (spec.rangemode === "tozero" && low === 0) ? low : low - air;
    high = stands(high) ? high : high + air;
    return { spec, names, range: spec.autorange === "reversed" ? [high, low] : [low, high] };
  }

  // Positions of ticks and their texts; at most about `most` of them.
  function ticks({ spec, names, range, zone }, most) {
    const [low, high] = [Math.min(...range), Math.max(...range)];
    const inside = ([at]) => at >= low && at <= high;
    if (spec.tickvals) return thinned(spec.tickvals.map((at, number) => [at, spec.ticktext[number]]).filter(inside), most);
    if (names) return thinned(names.map((name, at) => [at, String(name)]).filter(inside), Math.min(most, spec.nticks || most));
    if (spec.type === "date") return moments(low, high, most, zone);
    const power = 10 ** Math.floor(Math.log10((high - low) / Math.max(most, 1)));
    const step = power * STEPS.find((one) => (high - low) / (one * power) <= most);
    const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: count }, (_, number) => {
      const at = Number(((first + number) * step).toPrecision(12));
      return [at, format(at, spec.tickformat || "")];
    });
  }

  // Ticks of an axis of time, in milliseconds since 1970.
  function moments(low, high, most, zone) {
    const seconds = (high - low) / 1000, span = SPANS_S.find((one) => seconds / one <= most);
    const step = 1000 * (seconds < 1 ? 10 ** Math.ceil(Math.log10(seconds / most)) : span || 604800 * Math.ceil(seconds / most / 604800));
    const parts = step < 1000 ? { second: "2-digit", fractionalSecondDigits: 3 } : step < 60000 ? { second: "2-digit" } : {};
    const day = step >= 43200000 ? { month: "short", day: "numeric" } : {};
    const clock = new Intl.DateTimeFormat("en-GB", { timeZone: zone, hour: "2-digit", minute: "2-digit", ...parts, ...day });
    const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
    return Array.from({ length: Math.max(count, 0) }, (_, number) => [(first + number) * step, clock.format((first + number) * step)]);
  }

  function thinned(all, most) {
    const every = Math.max(1, Math.ceil(all.length / Math.max(most, 1)));
    return all.filter((_, number) => number % every === 0);
  }

  window.tracekitChart = { unpack, format, words, lines, axis, bounds, ticks, LEAST_SPAN };
})();
