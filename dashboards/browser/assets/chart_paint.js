// Draws the marks of chart_marks.js as SVG, in the width of the page. All texts are text nodes, never markup.
(function () {
  "use strict";

  const { axis, ticks, lines, words, format, marks, colourOf, LEAST_SPAN } = window.tracekitChart;
  const TEXT_PX = 13, LINE_PX = 17, TICK_PX = 6, GAP_PX = 8, TITLE_PX = 24, BAR_PX = 14, EVENT_PX = 3, SCALE_PX = 70, MOST_LABEL = 0.4, MOST_TICKS = 12;
  const DASHES = { dot: "2 4", dash: "7 5" };
  const ANCHORS = { left: "start", center: "middle", right: "end" };
  const pen = document.createElement("canvas").getContext("2d");

  function make(name, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function textWidth(text, px = TEXT_PX) {
    pen.font = `${px}px system-ui, sans-serif`;
    return pen.measureText(text).width;
  }

  // `text`, with an ellipsis for its end if it is wider than `width` pixels.
  function cut(text, width) {
    if (textWidth(text) <= width) return text;
    let start = text;
    while (start.length > 1 && textWidth(`${start}…`) > width) start = start.slice(0, -1);
    return `${start}…`;
  }

  // ---- the layout

  // Marks, axes with ticks, legend and the area of the plot, in pixels. `range`: of x, null for all of it;
  // `hiddenTraces`: their names.
  function arranged(figure, width, range, hiddenTraces) {
    const { layout } = figure, hidden = layout.yaxis.visible === false;
    const shown = marks({ layout, data: figure.data.filter((trace) => !hiddenTraces.has(trace.name)) });
    const axes = {};
    for (const letter of ["x", "y"]) {
      const least = letter === "y" && shown.paths.length ? LEAST_SPAN : 0;
      axes[letter] = axis(layout[`${letter}axis`], shown.categories[letter], { ...shown.extent[letter], least });
    }
    if (range) axes.x.range = range;
    axes.x.zone = (layout.meta || {}).zone;
    const legend = legendOf(figure, width, hiddenTraces), scaleWidth = shown.maps.length && shown.maps[0].trace.colorbar ? SCALE_PX : 0;
    const top = legend.length ? legend[legend.length - 1].y + LINE_PX / 2 + GAP_PX : GAP_PX;
    const bottom = layout.height - GAP_PX - (hidden ? 0 : LINE_PX + TICK_PX + (layout.xaxis.title.text ? LINE_PX : 0));
    const yTicks = ticks(axes.y, (bottom - top) / (shown.categories.y || axes.y.spec.tickvals ? LINE_PX : 40));
    const labels = hidden ? 0 : Math.max(0, ...yTicks.map(([, text]) => textWidth(text)));
    const needed = GAP_PX + Math.min(labels, MOST_LABEL * width) + (hidden ? 0 : TICK_PX + (layout.yaxis.title.text ? TITLE_PX : 0));
    const left = Math.max(needed, Math.min((layout.meta || {}).left || 0, MOST_LABEL * width));
    const area = { left, right: width - GAP_PX - scaleWidth, top, bottom };
    const place = (letter, begin, end) => {
      const [low, high] = axes[letter].range;
      axes[letter].toPixel = (value) => begin + ((value - low) / (high - low)) * (end - begin);
      axes[letter].toValue = (px) => low + ((px - begin) / (end - begin)) * (high - low);
    };
    place("x", area.left, area.right);
    place("y", area.bottom, area.top);
    const widest = Math.max(24, ...ticks(axes.x, 12).map(([, text]) => textWidth(text)));
    const fitting = (area.right - area.left) / (widest + 16);
    const xTicks = ticks(axes.x, Math.max(2, axes.x.names ? fitting : Math.min(fitting, MOST_TICKS)));
    return { marks: shown, axes, area, xTicks, yTicks, legend, width, hidden, layout };
  }

  // The entries of the legend, each with its place.
  function legendOf({ data, layout }, width, hiddenTraces) {
    let right = GAP_PX, y = GAP_PX + LINE_PX / 2;
    return (layout.showlegend ? data : []).filter((trace) => trace.showlegend !== false && trace.name).map(function (trace) {
      const entryWidth = textWidth(trace.name) + 44;
      if (right > GAP_PX && right + entryWidth > width - GAP_PX) [right, y] = [GAP_PX, y + LINE_PX];
      right += entryWidth;
      return { trace, left: right - entryWidth, right, y, off: hiddenTraces.has(trace.name) };
    });
  }

  // ---- parts

  function text([x, y], content, { anchor = "start", colour, size = TEXT_PX, bold, kind } = {}) {
    return make("text", {
      x, y, "text-anchor": anchor, fill: colour, "font-size": size, "font-weight": bold ? 600 : undefined,
      "dominant-baseline": "central", class: kind,
    }, content);
  }

  function line(x1, y1, x2, y2, { color, width = 1, dash }) {
    return make("line", { x1, y1, x2, y2, stroke: color, "stroke-width": width, "stroke-dasharray": DASHES[dash] });
  }

  function grid({ marks: { paths }, axes, area, xTicks, yTicks, hidden, layout, width }) {
    if (hidden) return [];
    const drawn = [], ink = layout.font.color, { left, right, top, bottom } = area;
    let free = -Infinity; // where the next label may begin
    for (const [position, label] of xTicks) {
      const px = axes.x.toPixel(position), half = textWidth(label) / 2;
      if (axes.x.spec.showgrid !== false && !axes.x.names) drawn.push(line(px, top, px, bottom, { color: axes.x.spec.gridcolor }));
      const middle = Math.min(px, width - half);
      if (middle - half < free) continue;
      free = middle + half + GAP_PX / 2;
      drawn.push(text([middle, bottom + TICK_PX + LINE_PX / 2], label, { anchor: "middle", colour: ink, kind: "across" }));
    }
    for (const [position, label] of yTicks) {
      const px = axes.y.toPixel(position), shown = cut(label, left - GAP_PX - TICK_PX);
      if (axes.y.spec.showgrid !== false && !axes.y.names) drawn.push(line(left, px, right, px, { color: axes.y.spec.gridcolor }));
      drawn.push(text([left - TICK_PX, px], shown, { anchor: "end", colour: ink, kind: "down" }));
    }
    const lowest = Math.min(...axes.y.range), cropped = paths.length && !axes.y.names && !axes.y.spec.tickvals && lowest > 0;
    const remark = cropped ? `axis from ${format(lowest, ".3g")}` : "", room = remark ? textWidth(remark) + 2 * GAP_PX : 0;
    if (cropped) drawn.push(text([GAP_PX, layout.height - GAP_PX - LINE_PX / 2], remark, { colour: ink, size: 12 }));
    const yTitle = axes.y.spec.title.text;
    const xTitle = cut(axes.x.spec.title.text || "", width - GAP_PX - room);
    const centre = Math.max(Math.min((left + right) / 2, width - GAP_PX - textWidth(xTitle) / 2), room + textWidth(xTitle) / 2);
    drawn.push(text([centre, layout.height - GAP_PX - LINE_PX / 2], xTitle, { anchor: "middle", colour: ink }));
    if (yTitle) {
      const turned = text([0, 0], yTitle, { anchor: "middle", colour: ink });
      turned.setAttribute("transform", `translate(${GAP_PX + LINE_PX / 2} ${(top + bottom) / 2}) rotate(-90)`);
      drawn.push(turned);
    }
    return drawn;
  }

  function legend({ legend: entries, layout }) {
    return entries.map(function ({ trace, left, y, off }) {
      const label = text([left + 28, y], trace.name, { colour: layout.font.color });
      const sample = trace.type === "bar" ? make("rect", { x: left + 6, y: y - 6, width: 14, height: 12, fill: trace.marker.color })
        : trace.fill ? make("rect", { x: left, y: y - 5, width: 22, height: 10, fill: trace.line.color, "fill-opacity": 0.35 })
          : trace.mode === "markers" ? marker(trace, left + 12, y) : line(left, y, left + 22, y, trace.line);
      return make("g", { opacity: off ? 0.35 : undefined, "text-decoration": off ? "line-through" : undefined, class: "entry" }, sample, label);
    });
  }

  // A box in values of the axes, in pixels.
  function pixels({ axes }, { x, y }) {
    const [left, right] = x.map(axes.x.toPixel).sort((a, b) => a - b), [top, bottom] = y.map(axes.y.toPixel).sort((a, b) => a - b);
    return { x: left, y: top, width: right - left, height: bottom - top };
  }

  function bar(view, { box, colour, error, text: label }) {
    const place = pixels(view, box), middle = place.y + place.height / 2, end = place.x + place.width;
    const drawn = [make("rect", { ...place, width: place.width || EVENT_PX, fill: colour, class: "bar" })];
    if (error && error.size) {
      const length = view.axes.x.toPixel(box.x[1] + error.size) - end;
      drawn.push(line(end - length, middle, end + length, middle, { color: error.colour, width: 1.2 }));
    }
    if (label) {
      const fits = textWidth(label.words) + 12 <= place.width, ink = fits ? label.colour : view.layout.font.color;
      drawn.push(text([fits ? place.x + 6 : end + 6, middle], label.words, { colour: ink }));
    }
    return drawn;
  }

  // A line, with a gap at each point without a value.
  function path(view, { trace, corners, points }, before) {
    const { x, y } = view.axes, drawn = [], style = trace.line || {};
    const joined = (part) => part.filter(([, value]) => value !== null).map((corner) => `${x.toPixel(corner[0])} ${y.toPixel(corner[1])}`).join("L");
    if (trace.fill) {
      const outline = `M${joined(before.corners)}L${joined([...corners].reverse())}Z`;
      drawn.push(make("path", { d: outline, fill: style.color, "fill-opacity": 0.35 }));
    }
    if (trace.mode.includes("lines") && style.width !== 0 && corners.length) {
      const parts = corners.reduce((all, corner) => (corner[1] === null ? all.push([]) : all[all.length - 1].push(corner), all), [[]]);
      const d = parts.filter((part) => part.length).map((part) => `M${joined(part)}`).join(""), dash = DASHES[style.dash];
      drawn.push(make("path", { d, fill: "none", stroke: style.color, "stroke-width": style.width, "stroke-dasharray": dash, "stroke-linejoin": "round", class: "line" }));
    }
    if (trace.mode.includes("markers")) drawn.push(...points.map((point) => marker(trace, x.toPixel(point.x), y.toPixel(point.y))));
    return drawn;
  }

  function marker({ marker: style, line: stroke }, x, y) {
    const colour = style.color || (stroke || {}).color, half = style.size / 2, open = (style.symbol || "").endsWith("-open");
    const look = open ? { fill: "none", stroke: colour, "stroke-width": style.line.width } : { fill: colour };
    if ((style.symbol || "").startsWith("square")) return make("rect", { x: x - half, y: y - half, width: 2 * half, height: 2 * half, class: "marker", ...look });
    return make("circle", { cx: x, cy: y, r: half, class: "marker", ...look });
  }

  // A heat map: an image of one pixel a cell, stretched; or, with gaps, a rectangle for each cell and its value inside.
  function map(view, { trace, rows, columns }) {
    const colour = colourOf(trace), { x, y } = view.axes, xGap = trace.xgap || 0, yGap = trace.ygap || 0;
    if (!xGap) return [image(view, trace, rows, columns, colour)];
    return trace.z.flatMap((values, row) => values.flatMap(function (value, column) {
      if (value === null) return [];
      const place = pixels(view, { x: [column - 0.5, column + 0.5], y: [row - 0.5, row + 0.5] }), shade = colour(value);
      const cell = make("rect", {
        x: place.x + xGap / 2, y: place.y + yGap / 2, width: Math.max(place.width - xGap, 0.5), height: Math.max(place.height - yGap, 0.5),
        fill: `rgb(${shade})`,
      });
      const label = trace.texttemplate && words(trace.texttemplate, { z: value });
      if (!label || textWidth(label) > place.width) return [cell];
      const dark = 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] < 140;
      return [cell, text([x.toPixel(column), y.toPixel(row)], label, { anchor: "middle", colour: dark ? "#ffffff" : "#1f2328" })];
    }));
  }

  function image(view, trace, rows, columns, colour) {
    const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
    const context = canvas.getContext("2d"), content = context.createImageData(columns, rows);
    trace.z.forEach((values, row) => values.forEach(function (value, column) {
      if (value !== null) content.data.set([...colour(value), 255], 4 * (row * columns + column));
    }));
    context.putImageData(content, 0, 0);
    const place = pixels(view, { x: [-0.5, columns - 0.5], y: [-0.5, rows - 0.5] });
    return make("image", { ...place, href: canvas.toDataURL(), preserveAspectRatio: "none", style: "image-rendering: pixelated" });
  }

  function colourScale({ marks: { maps }, area, layout }) {
    return maps.filter(({ trace }) => trace.colorbar).flatMap(function ({ trace }) {
      const { colorbar, zmin, zmax } = trace, x = area.right + 16, top = area.top + LINE_PX, height = area.bottom - top;
      const colour = colourOf(trace), ends = [zmin, ...colorbar.tickvals, zmax], block = height / (ends.length - 1), ink = layout.font.color;
      // Levels as blocks of one height: on a linear scale the lowest would be too thin for their numbers.
      const parts = ends.slice(1).map((end, index) => make("rect", {
        x, y: area.bottom - (index + 1) * block, width: BAR_PX, height: block + 0.5, fill: `rgb(${colour((ends[index] + end) / 2)})`,
      }));
      const labels = colorbar.tickvals.map((value, index) => text([x + BAR_PX + 4, area.bottom - (index + 1) * block], format(value, colorbar.tickformat || ".2f"), { colour: ink, size: 12 }));
      const title = colorbar.title ? [text([x, area.top + 4], colorbar.title.text, { colour: ink })] : [];
      return [...parts, ...labels, ...title];
    });
  }

  // ---- shapes and annotations of the layout

  // The pixel of a value of an axis, or of a share of the plot.
  function pixel({ axes, area }, letter, value, reference) {
    const [begin, end] = letter === "x" ? [area.left, area.right] : [area.bottom, area.top];
    return /paper|domain/.test(reference || "") ? begin + value * (end - begin) : axes[letter].toPixel(value);
  }

  function shape(view, spec) {
    const x = [spec.x0, spec.x1].map((value) => pixel(view, "x", value, spec.xref));
    const y = [spec.y0, spec.y1].map((value) => pixel(view, "y", value, spec.yref));
    if (spec.type === "line") return line(x[0], y[0], x[1], y[1], spec.line);
    const [left, top] = [Math.min(...x), Math.min(...y)];
    return make("rect", {
      x: left, y: top, width: Math.abs(x[1] - x[0]), height: Math.abs(y[1] - y[0]), fill: spec.fillcolor || "none",
      "fill-opacity": spec.opacity, stroke: (spec.line || {}).color, "stroke-width": (spec.line || {}).width,
    });
  }

  function annotation(view, spec) {
    const x = pixel(view, "x", spec.x, spec.xref) + (spec.xshift || 0), y = pixel(view, "y", spec.y, spec.yref);
    if (spec.showarrow) return arrow(view, spec, [x, y]);
    const rows = lines(spec.text), { color, size = TEXT_PX } = spec.font || {}, padding = (spec.borderpad || 0) + 2;
    const height = rows.length * LINE_PX, width = Math.max(...rows.map((row) => textWidth(row, size)));
    const top = { top: y, bottom: y - height }[spec.yanchor] ?? y - height / 2, bold = spec.text.includes("<b>");
    const texts = rows.map((row, index) => text([x, top + (index + 0.5) * LINE_PX], row, {
      anchor: ANCHORS[spec.xanchor] || "middle", colour: color, size, bold: bold && index === 0,
    }));
    if (!spec.bordercolor) return texts;
    return [make("rect", {
      x: x - width / 2 - padding, y: top - padding, width: width + 2 * padding, height: height + 2 * padding, rx: 4,
      fill: spec.bgcolor, stroke: spec.bordercolor, "stroke-width": spec.borderwidth,
    }), ...texts];
  }

  function arrow(view, spec, [x, y]) {
    const tail = [pixel(view, "x", spec.ax, spec.axref), pixel(view, "y", spec.ay, spec.ayref)];
    const angle = Math.atan2(y - tail[1], x - tail[0]), size = 8;
    const corner = (turn) => `${x - size * Math.cos(angle + turn)} ${y - size * Math.sin(angle + turn)}`;
    return [
      line(...tail, x, y, { color: spec.arrowcolor, width: spec.arrowwidth }),
      make("path", { d: `M${x} ${y}L${corner(0.4)}L${corner(-0.4)}Z`, fill: spec.arrowcolor }),
    ];
  }

  // ---- all of it

  let charts = 0;

  function draw(figure, width, range, hiddenTraces) {
    const view = arranged(figure, width, range, hiddenTraces), { layout } = figure, { area } = view, { maps, bars, paths } = view.marks;
    const id = `chart-${charts++}`;
    const inside = make("g", { "clip-path": `url(#${id})` });
    inside.append(
      ...maps.flatMap((mark) => map(view, mark)),
      ...bars.flatMap((mark) => bar(view, mark)),
      ...paths.flatMap((mark, index) => path(view, mark, paths[index - 1])),
      ...(layout.shapes || []).map((spec) => shape(view, spec)),
    );
    const size = { width: Math.max(area.right - area.left, 0), height: Math.max(area.bottom - area.top, 0) };
    const room = make("rect", { x: area.left, y: area.top, ...size, fill: "none", class: "area" });
    const clip = make("clipPath", { id }, make("rect", { x: area.left - 1, y: area.top - 6, width: size.width + 2, height: size.height + 7 }));
    const root = make("svg", {
      xmlns: "http://www.w3.org/2000/svg", width, height: layout.height, viewBox: `0 0 ${width} ${layout.height}`, "font-family": layout.font.family, "aria-hidden": "true",
    });
    root.append(
      make("rect", { width, height: layout.height, fill: layout.paper_bgcolor }), clip, room, ...grid(view), inside,
      ...(layout.annotations || []).flatMap((spec) => annotation(view, spec)), ...legend(view), ...colourScale(view),
    );
    return { ...view, root };
  }

  Object.assign(window.tracekitChart, { draw, make });
})();
