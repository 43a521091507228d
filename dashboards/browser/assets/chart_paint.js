// A Plotly figure as SVG, as wide as there is room. Draws what chart_marks.js knows; all texts are text nodes.
(function () {
  "use strict";

  const { axis, ticks, lines, words, format, marks, colourOf, LEAST_SPAN } = window.tracekitChart;
  const TEXT_PX = 13, LINE_PX = 17, TICK_PX = 6, GAP_PX = 8, TITLE_PX = 24, BAR_PX = 14, EVENT_PX = 3, SCALE_PX = 70, MOST_LABEL = 0.4, MOST_TICKS = 12;
  const DASHES = { dot: "2 4", dash: "7 5" };
  const ANCHORS = { left: "start", center: "middle", right: "end" };
  const pen = document.createElement("canvas").getContext("2d");

  function make(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function wide(text, px = TEXT_PX) {
    pen.font = `${px}px system-ui, sans-serif`;
    return pen.measureText(text).width;
  }

  function cut(text, room) {
    if (wide(text) <= room) return text;
    let kept = text;
    while (kept.length > 1 && wide(`${kept}…`) > room) kept = kept.slice(0, -1);
    return `${kept}…`;
  }

  // ---- where everything goes

  // `range`: of x, null for all of it; `off`: names of traces that are not drawn.
  function frame(figure, width, range, off) {
    const { layout } = figure, hidden = layout.yaxis.visible === false;
    const made = marks({ layout, data: figure.data.filter((trace) => !off.has(trace.name)) });
    const axes = {};
    for (const letter of ["x", "y"]) {
      const least = letter === "y" && made.paths.length ? LEAST_SPAN : 0;
      axes[letter] = axis(layout[`${letter}axis`], made.named[letter], { ...made.reach[letter], least });
    }
    if (range) axes.x.range = range;
    axes.x.zone = (layout.meta || {}).zone;
    const legend = legendOf(figure, width, off), colours = made.maps.length && made.maps[0].trace.colorbar ? SCALE_PX : 0;
    const top = legend.length ? legend[legend.length - 1].y + LINE_PX / 2 + GAP_PX : GAP_PX;
    const bottom = layout.height - GAP_PX - (hidden ? 0 : LINE_PX + TICK_PX + (layout.xaxis.title.text ? LINE_PX : 0));
    const down = ticks(axes.y, (bottom - top) / (made.named.y || axes.y.spec.tickvals ? LINE_PX : 40));
    const labels = hidden ? 0 : Math.max(0, ...down.map(([, text]) => wide(text)));
    const needed = GAP_PX + Math.min(labels, MOST_LABEL * width) + (hidden ? 0 : TICK_PX + (layout.yaxis.title.text ? TITLE_PX : 0));
    const left = Math.max(needed, Math.min((layout.meta || {}).left || 0, MOST_LABEL * width));
    const area = { left, right: width - GAP_PX - colours, top, bottom };
    const run = (letter, begin, end) => {
      const [low, high] = axes[letter].range;
      axes[letter].at = (value) => begin + ((value - low) / (high - low)) * (end - begin);
      axes[letter].from = (px) => low + ((px - begin) / (end - begin)) * (high - low);
    };
    run("x", area.left, area.right);
    run("y", area.bottom, area.top);
    const widest = Math.max(24, ...ticks(axes.x, 12).map(([, text]) => wide(text)));
    const fitting = (area.right - area.left) / (widest + 16);
    const across = ticks(axes.x, Math.max(2, axes.x.names ? fitting : Math.min(fitting, MOST_TICKS)));
    return { made, axes, area, across, down, legend, width, hidden, layout };
  }

  // The entries of the legend, each with its place.
  function legendOf({ data, layout }, width, off) {
    let right = GAP_PX, y = GAP_PX + LINE_PX / 2;
    return (layout.showlegend ? data : []).filter((one) => one.showlegend !== false && one.name).map(function (trace) {
      const takes = wide(trace.name) + 44;
      if (right > GAP_PX && right + takes > width - GAP_PX) [right, y] = [GAP_PX, y + LINE_PX];
      right += takes;
      return { trace, left: right - takes, right, y, off: off.has(trace.name) };
    });
  }

  // ---- parts

  function text(at, said, { anchor = "start", colour, size = TEXT_PX, bold, kind } = {}) {
    return make("text", {
      x: at[0], y: at[1], "text-anchor": anchor, fill: colour, "font-size": size, "font-weight": bold ? 600 : undefined,
      "dominant-baseline": "central", class: kind,
    }, said);
  }

  function line(x1, y1, x2, y2, { color, width = 1, dash }) {
    return make("line", { x1, y1, x2, y2, stroke: color, "stroke-width": width, "stroke-dasharray": DASHES[dash] });
  }

  function grid({ made, axes, area, across, down, hidden, layout, width }) {
    if (hidden) return [];
    const drawn = [], ink = layout.font.color, { left, right, top, bottom } = area;
    let taken = -Infinity;
    for (const [at, said] of across) {
      const px = axes.x.at(at);
      if (axes.x.spec.showgrid !== false && !axes.x.names) drawn.push(line(px, top, px, bottom, { color: axes.x.spec.gridcolor }));
      const inside = Math.min(px, width - wide(said) / 2);
      if (inside - wide(said) / 2 < taken) continue;
      taken = inside + wide(said) / 2 + GAP_PX / 2;
      drawn.push(text([inside, bottom + TICK_PX + LINE_PX / 2], said, { anchor: "middle", colour: ink, kind: "across" }));
    }
    for (const [at, said] of down) {
      const px = axes.y.at(at), shown = cut(said, left - GAP_PX - TICK_PX);
      if (axes.y.spec.showgrid !== false && !axes.y.names) drawn.push(line(left, px, right, px, { color: axes.y.spec.gridcolor }));
      drawn.push(text([left - TICK_PX, px], shown, { anchor: "end", colour: ink, kind: "down" }));
    }
    const lowest = Math.min(...axes.y.range), cropped = made.paths.length && !axes.y.names && !axes.y.spec.tickvals && lowest > 0;
    const from = cropped ? `axis from ${format(lowest, ".3g")}` : "", room = from ? wide(from) + 2 * GAP_PX : 0;
    if (cropped) drawn.push(text([GAP_PX, layout.height - GAP_PX - LINE_PX / 2], from, { colour: ink, size: 12 }));
    const title = axes.y.spec.title.text, middle = (top + bottom) / 2;
    const below = cut(axes.x.spec.title.text || "", width - GAP_PX - room);
    const centre = Math.max(Math.min((left + right) / 2, width - GAP_PX - wide(below) / 2), room + wide(below) / 2);
    drawn.push(text([centre, layout.height - GAP_PX - LINE_PX / 2], below, { anchor: "middle", colour: ink }));
    if (title) {
      const turned = text([0, 0], title, { anchor: "middle", colour: ink });
      turned.setAttribute("transform", `translate(${GAP_PX + LINE_PX / 2} ${middle}) rotate(-90)`);
      drawn.push(turned);
    }
    return drawn;
  }

  function legend({ legend: entries, layout }) {
    return entries.map(function ({ trace, left, y, off }) {
      const words = text([left + 28, y], trace.name, { colour: layout.font.color });
      const sign = trace.type === "bar" ? make("rect", { x: left + 6, y: y - 6, width: 14, height: 12, fill: trace.marker.color })
        : trace.fill ? make("rect", { x: left, y: y - 5, width: 22, height: 10, fill: trace.line.color, "fill-opacity": 0.35 })
          : trace.mode === "markers" ? marker(trace, left + 12, y) : line(left, y, left + 22, y, trace.line);
      return make("g", { opacity: off ? 0.35 : undefined, "text-decoration": off ? "line-through" : undefined, class: "entry" }, sign, words);
    });
  }

  function box({ axes }, { x, y }) {
    const [left, right] = [axes.x.at(x[0]), axes.x.at(x[1])].sort((one, other) => one - other);
    const [top, bottom] = [axes.y.at(y[0]), axes.y.at(y[1])].sort((one, other) => one - other);
    return { x: left, y: top, width: right - left, height: bottom - top };
  }

  function bar(shown, one) {
    const place = box(shown, one.box), width = place.width || EVENT_PX;
    const drawn = [make("rect", { ...place, width, fill: one.colour, class: "bar" })];
    const middle = place.y + place.height / 2, end = place.x + place.width;
    if (one.error && one.error.size) {
      const reach = shown.axes.x.at(one.box.x[1] + one.error.size) - end;
      drawn.push(line(end - reach, middle, end + reach, middle, { color: one.error.colour, width: 1.2 }));
    }
    if (one.text) {
      const fits = wide(one.text.words) + 12 <= place.width, ink = fits ? one.text.colour : shown.layout.font.color;
      drawn.push(text([fits ? place.x + 6 : end + 6, middle], one.text.words, { colour: ink }));
    }
    return drawn;
  }

  // A line is broken where it has no value.
  function path(shown, { trace, corners, points }, before) {
    const { x, y } = shown.axes, drawn = [], style = trace.line || {};
    const run = (all) => all.filter(([, down]) => down !== null).map(([across, down]) => `${x.at(across)} ${y.at(down)}`).join("L");
    if (trace.fill) {
      const around = `M${run(before.corners)}L${run([...corners].reverse())}Z`;
      drawn.push(make("path", { d: around, fill: style.color, "fill-opacity": 0.35 }));
    }
    if (trace.mode.includes("lines") && style.width !== 0 && corners.length) {
      const parts = corners.reduce((all, corner) => (corner[1] === null ? all.push([]) : all[all.length - 1].push(corner), all), [[]]);
      const [d, dash] = [parts.filter((part) => part.length).map((part) => `M${run(part)}`).join(""), DASHES[style.dash]];
      drawn.push(make("path", { d, fill: "none", stroke: style.color, "stroke-width": style.width, "stroke-dasharray": dash, "stroke-linejoin": "round", class: "line" }));
    }
    if (trace.mode.includes("markers")) drawn.push(...points.map((one) => marker(trace, x.at(one.x), y.at(one.y))));
    return drawn;
  }

  function marker({ marker: style, line: stroke }, x, y) {
    const colour = style.color || (stroke || {}).color, half = style.size / 2, open = (style.symbol || "").endsWith("-open");
    const look = open ? { fill: "none", stroke: colour, "stroke-width": style.line.width } : { fill: colour };
    if ((style.symbol || "").startsWith("square")) return make("rect", { x: x - half, y: y - half, width: 2 * half, height: 2 * half, class: "marker", ...look });
    return make("circle", { cx: x, cy: y, r: half, class: "marker", ...look });
  }

  // A map is an image of a pixel for each cell, stretched; of few cells there is a gap between them, and a figure inside.
  function map(shown, { trace, rows, columns }) {
    const colour = colourOf(trace), { x, y } = shown.axes, gap = trace.xgap || 0;
    if (!gap) return [image(shown, trace, rows, columns, colour)];
    return trace.z.flatMap((row, down) => row.flatMap(function (value, across) {
      if (value === null) return [];
      const place = box(shown, { x: [across - 0.5, across + 0.5], y: [down - 0.5, down + 0.5] }), shade = colour(value);
      const low = (trace.ygap || 0) / 2, side = gap / 2;
      const cell = make("rect", {
        x: place.x + side, y: place.y + low, width: Math.max(place.width - gap, 0.5), height: Math.max(place.height - 2 * low, 0.5),
        fill: `rgb(${shade})`,
      });
      if (!trace.texttemplate) return [cell];
      const dark = 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] < 140;
      const said = words(trace.texttemplate, { z: value });
      return wide(said) > place.width ? [cell] : [cell, text([x.at(across), y.at(down)], said, { anchor: "middle", colour: dark ? "#ffffff" : "#1f2328" })];
    }));
  }

  function image(shown, trace, rows, columns, colour) {
    const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
    const context = canvas.getContext("2d"), pixels = context.createImageData(columns, rows);
    trace.z.forEach((row, down) => row.forEach(function (value, across) {
      if (value !== null) pixels.data.set([...colour(value), 255], 4 * (down * columns + across));
    }));
    context.putImageData(pixels, 0, 0);
    const place = box(shown, { x: [-0.5, columns - 0.5], y: [-0.5, rows - 0.5] });
    return make("image", { ...place, href: canvas.toDataURL(), preserveAspectRatio: "none", style: "image-rendering: pixelated" });
  }

  function colourScale({ made, area, layout }) {
    return made.maps.filter((one) => one.trace.colorbar).flatMap(function ({ trace }) {
      const { colorbar, zmin, zmax } = trace, x = area.right + 16, top = area.top + LINE_PX, height = area.bottom - top;
      const colour = colourOf(trace), ends = [zmin, ...colorbar.tickvals, zmax], block = height / (ends.length - 1), ink = layout.font.color;
      // Levels as blocks of one height: on a linear scale the lowest ones were too thin for their numbers.
      const parts = ends.slice(1).map((end, at) => make("rect", {
        x, y: area.bottom - (at + 1) * block, width: BAR_PX, height: block + 0.5, fill: `rgb(${colour((ends[at] + end) / 2)})`,
      }));
      const labels = colorbar.tickvals.map((value, at) => text([x + BAR_PX + 4, area.bottom - (at + 1) * block], format(value, colorbar.tickformat || ".2f"), { colour: ink, size: 12 }));
      const title = colorbar.title ? [text([x, area.top + 4], colorbar.title.text, { colour: ink })] : [];
      return [...parts, ...labels, ...title];
    });
  }

  // ---- lines and words of the layout

  // A position of a shape or annotation: of an axis, or a share of the whole chart.
  function position({ axes, area }, letter, value, reference) {
    const [begin, end] = letter === "x" ? [area.left, area.right] : [area.bottom, area.top];
    return /paper|domain/.test(reference || "") ? begin + value * (end - begin) : axes[letter].at(value);
  }

  function shape(shown, one) {
    const x = [one.x0, one.x1].map((value) => position(shown, "x", value, one.xref));
    const y = [one.y0, one.y1].map((value) => position(shown, "y", value, one.yref));
    if (one.type === "line") return line(x[0], y[0], x[1], y[1], one.line);
    const [left, top] = [Math.min(...x), Math.min(...y)];
    return make("rect", {
      x: left, y: top, width: Math.abs(x[1] - x[0]), height: Math.abs(y[1] - y[0]), fill: one.fillcolor || "none",
      "fill-opacity": one.opacity, stroke: (one.line || {}).color, "stroke-width": (one.line || {}).width,
    });
  }

  function annotation(shown, one) {
    const x = position(shown, "x", one.x, one.xref) + (one.xshift || 0), y = position(shown, "y", one.y, one.yref);
    if (one.showarrow) return arrow(shown, one, [x, y]);
    const said = lines(one.text), { color, size = TEXT_PX } = one.font || {}, pad = (one.borderpad || 0) + 2;
    const high = said.length * LINE_PX, broad = Math.max(...said.map((each) => wide(each, size)));
    const top = { top: y, bottom: y - high }[one.yanchor] ?? y - high / 2, bold = one.text.includes("<b>");
    const drawn = said.map((each, at) => text([x, top + (at + 0.5) * LINE_PX], each, {
      anchor: ANCHORS[one.xanchor] || "middle", colour: color, size, bold: bold && at === 0,
    }));
    if (!one.bordercolor) return drawn;
    return [make("rect", {
      x: x - broad / 2 - pad, y: top - pad, width: broad + 2 * pad, height: high + 2 * pad, rx: 4, fill: one.bgcolor,
      stroke: one.bordercolor, "stroke-width": one.borderwidth,
    }), ...drawn];
  }

  function arrow(shown, one, [x, y]) {
    const from = [position(shown, "x", one.ax, one.axref), position(shown, "y", one.ay, one.ayref)];
    const way = Math.atan2(y - from[1], x - from[0]), size = 8;
    const corner = (turn) => `${x - size * Math.cos(way + turn)} ${y - size * Math.sin(way + turn)}`;
    return [
      line(...from, x, y, { color: one.arrowcolor, width: one.arrowwidth }),
      make("path", { d: `M${x} ${y}L${corner(0.4)}L${corner(-0.4)}Z`, fill: one.arrowcolor }),
    ];
  }

  // ---- all of it

  let charts = 0;

  function draw(figure, width, range, off) {
    const shown = frame(figure, width, range, off), { layout } = figure, { area, made } = shown, id = `chart-${charts++}`;
    const inside = make("g", { "clip-path": `url(#${id})` });
    inside.append(
      ...made.maps.flatMap((one) => map(shown, one)),
      ...made.bars.flatMap((one) => bar(shown, one)),
      ...made.paths.flatMap((one, at) => path(shown, one, made.paths[at - 1])),
      ...(layout.shapes || []).map((one) => shape(shown, one)),
    );
    const size = { width: Math.max(area.right - area.left, 0), height: Math.max(area.bottom - area.top, 0) };
    const room = make("rect", { x: area.left, y: area.top, ...size, fill: "none", class: "area" });
    const clip = make("clipPath", { id }, make("rect", { x: area.left - 1, y: area.top - 6, width: size.width + 2, height: size.height + 7 }));
    const root = make("svg", {
      xmlns: "http://www.w3.org/2000/svg", width, height: layout.height, viewBox: `0 0 ${width} ${layout.height}`, "font-family": layout.font.family, "aria-hidden": "true",
    });
    root.append(
      make("rect", { width, height: layout.height, fill: layout.paper_bgcolor }), clip, room, ...grid(shown), inside,
      ...(layout.annotations || []).flatMap((one) => annotation(shown, one)), ...legend(shown), ...colourScale(shown),
    );
    return { ...shown, root };
  }

  Object.assign(window.tracekitChart, { draw, make });
})();
