// The component Chart of ui/components.py: a Plotly figure with hover text, zoom and an image to save.
(function () {
  "use strict";

  const { unpack, words, lines, draw, make } = window.tracekitChart;
  const NEAR_PX = 24, DRAG_PX = 8, SCALE = 2, LEGEND_PX = 8, DOUBLE_MS = 250, SETTLED_MS = 300;

  // ---- what is under the mouse

  // The points at a pixel, each with its trace: the cell or bar there, else the nearest point of a line. Where the figure
  // hovers by x, all points at the nearest x, however far away.
  function pointsAt({ marks, axes, area, layout }, [x, y]) {
    if (x < area.left || x > area.right || y < area.top || y > area.bottom) return [];
    const position = { x: axes.x.toValue(x), y: axes.y.toValue(y) };
    for (const { trace } of marks.maps) {
      const row = Math.round(position.y), column = Math.round(position.x), z = (trace.z[row] || [])[column];
      const cell = (values) => (Array.isArray(values) ? values[row][column] : undefined);
      if (typeof z === "number") return [{ trace, point: { z, x: column, y: row, customdata: cell(trace.customdata), text: cell(trace.text) } }];
    }
    const outside = (value, [low, high]) => Math.max(Math.min(low, high) - value, value - Math.max(low, high), 0);
    const bars = marks.bars.filter(({ box, base }) => outside(position[base], box[base]) === 0);
    const distance = ({ box }) => outside(position.x, box.x) + outside(position.y, box.y); // one of the terms is 0
    if (bars.length) return [bars.reduce((best, bar) => (distance(bar) < distance(best) ? bar : best))];
    return nearest(marks.paths.filter(({ trace }) => trace.hoverinfo !== "skip"), axes, layout.hovermode === "x", [x, y]);
  }

  function nearest(paths, axes, sameX, [x, y]) {
    const candidates = paths.flatMap(function ({ trace, points }) {
      const distance = (point) => (sameX ? Math.abs(axes.x.toPixel(point.x) - x) : Math.hypot(axes.x.toPixel(point.x) - x, axes.y.toPixel(point.y) - y));
      const best = points.reduce((closest, point) => (!closest || distance(point) < distance(closest) ? point : closest), null);
      return best ? [{ trace, point: best.point, distance: distance(best) }] : [];
    }).sort((a, b) => a.distance - b.distance);
    if (!candidates.length || (!sameX && candidates[0].distance > NEAR_PX)) return [];
    return sameX ? candidates.filter(({ distance }) => distance === candidates[0].distance) : candidates.slice(0, 1);
  }

  // The entry of the legend at a pixel.
  const legendAt = ({ legend }, [x, y]) => legend.find((entry) => x >= entry.left && x < entry.right && Math.abs(y - entry.y) <= LEGEND_PX);

  // The visible marks, in pixels.
  function markPositions({ marks, axes, area }) {
    const middle = ([low, high]) => (low + high) / 2;
    const cells = marks.maps.flatMap(({ trace }) => trace.z.flatMap((row, y) => row.flatMap((z, x) => (z === null ? [] : [[x, y]]))));
    const bars = marks.bars.map(({ box }) => [middle(box.x), middle(box.y)]);
    const points = marks.paths.flatMap(({ trace, points }) => (trace.hoverinfo === "skip" ? [] : points.map(({ x, y }) => [x, y])));
    return [...cells, ...bars, ...points].map(([x, y]) => [axes.x.toPixel(x), axes.y.toPixel(y)])
      .filter(([x, y]) => x >= area.left && x <= area.right && y >= area.top && y <= area.bottom);
  }

  // The next mark in a direction: sideways the next x, up and down the next mark at the same x.
  function nextMark(view, start, [across, down]) {
    const [x, y] = start || [across < 0 ? view.area.right + 1 : view.area.left - 1, view.area.top];
    const candidates = markPositions(view).map(function (mark) {
      const ahead = across ? (mark[0] - x) * across : (mark[1] - y) * down, sideways = Math.abs(across ? mark[1] - y : mark[0] - x);
      return { mark, ahead, order: across ? [Math.round(ahead), sideways] : [Math.round(sideways), ahead] };
    }).filter(({ ahead }) => ahead > 0.5);
    candidates.sort((a, b) => a.order[0] - b.order[0] || a.order[1] - b.order[1]);
    return candidates.length ? candidates[0].mark : null;
  }

  const tipLines = (points) => [...new Set(points.flatMap(({ trace, point }) => (trace.hovertemplate ? lines(words(trace.hovertemplate, point)) : [])))];

  // ---- one chart on the page

  // Charts whose figures name the same `layout.meta.axis` share a range and a cursor, in units of that axis. `meta.at`:
  // the values of that axis at positions 0, 1, ... of the chart, if its own axis has positions.
  const charts = new Set();

  class Chart {
    constructor(host, click) {
      this.host = host;
      this.click = click;
      this.range = null;
      this.hiddenTraces = new Set();
      const hiddenPart = (name) => window.tracekit.make("div", { className: `chart-${name}`, hidden: true });
      [this.tip, this.rubber, this.cursor] = [hiddenPart("tip"), hiddenPart("rubber"), hiddenPart("cursor")];
      this.tip.setAttribute("role", "status");
      this.picture = window.tracekit.make("div", { tabIndex: 0, className: "chart-picture" });
      this.picture.setAttribute("role", "application");
      this.picture.setAttribute("aria-label", "Figure: arrow keys go from point to point, Enter chooses one, Escape shows the whole");
      this.host.append(this.picture, this.rubber, this.cursor, this.tip, this.buttons());
      const on = (name, handler, options) => this.picture.addEventListener(name, handler.bind(this), options);
      on("pointermove", this.move);
      on("pointerleave", () => this.hide());
      on("blur", () => this.hide());
      on("pointerdown", this.press);
      on("pointerup", this.release);
      on("dblclick", this.reset);
      on("wheel", this.wheel, { passive: false });
      on("keydown", this.key);
      this.watching = new ResizeObserver(() => this.draw());
      this.watching.observe(host);
      charts.add(this);
    }

    buttons() {
      const button = (words, title, act) => window.tracekit.make("button", { type: "button", textContent: words, title, onclick: act });
      this.whole = button("Whole", "Show all of the figure again (double click)", () => this.reset());
      const png = button("PNG", "Save the figure as an image", () => this.save());
      return window.tracekit.make("div", { className: "chart-buttons" }, this.whole, png);
    }

    show(figure) {
      const revision = figure.layout.uirevision, unchanged = this.figure && revision && this.figure.layout.uirevision === revision;
      this.figure = figure;
      this.meta = figure.layout.meta || {};
      if (!unchanged) this.range = this.meta.range ? this.fromShared(this.meta.range) : null;
      this.host.figure = figure;
      this.redraw();
    }

    draw() {
      const width = Math.floor(this.host.clientWidth);
      if (!this.figure || !width || width === this.width) return;
      this.width = width;
      this.whole.hidden = !this.range;
      this.view = draw(this.figure, width, this.range, this.hiddenTraces);
      this.picture.replaceChildren(this.view.root);
    }

    redraw() {
      this.width = 0;
      this.hide();
      this.draw();
    }

    // ---- the range

    linked() {
      return this.meta.axis ? [...charts].filter(({ meta }) => meta && meta.axis === this.meta.axis) : [this];
    }

    // A position of this chart as a value of the shared axis, and values of the shared axis as positions.
    toShared(position) {
      const values = this.meta.at;
      if (!values || values.length < 2) return position;
      const before = Math.min(Math.max(Math.floor(position), 0), values.length - 2);
      return values[before] + (position - before) * (values[before + 1] - values[before]);
    }

    fromShared([low, high]) {
      const values = this.meta.at;
      if (!values || values.length < 2) return [low, high];
      const toPosition = function (value) {
        const next = values.findIndex((other) => other > value), previous = Math.max((next < 0 ? values.length : next) - 1, 0);
        const first = Math.min(previous, values.length - 2);
        return Math.min(Math.max(first + (value - values[first]) / (values[first + 1] - values[first] || 1), -0.5), values.length - 0.5);
      };
      return [toPosition(low), toPosition(high)];
    }

    // Zooms in x only, so that heights in parts of a figure stay comparable.
    zoom(range) {
      if (range && !(Math.abs(range[1] - range[0]) > 0)) return;
      const values = range && range.map((end) => this.toShared(end));
      for (const chart of this.linked()) {
        chart.range = values && chart.fromShared(values);
        chart.redraw();
      }
      clearTimeout(this.announcing);
      if (this.meta.axis === "time") this.announcing = setTimeout(() => window.tracekit.range(values), SETTLED_MS);
    }

    reset() {
      clearTimeout(this.clicking); // the first half of a double click is no click
      if (this.range) this.zoom(null);
    }

    wheel(event) {
      const { axes } = this.view;
      if (!event.ctrlKey || axes.x.names) return;
      event.preventDefault();
      const middle = axes.x.toValue(this.pixel(event)[0]), factor = event.deltaY > 0 ? 1.25 : 0.8;
      this.zoom(axes.x.range.map((end) => middle + (end - middle) * factor));
    }

    // ---- the mouse

    pixel(event) {
      const { left, top } = this.picture.getBoundingClientRect();
      return [event.clientX - left, event.clientY - top];
    }

    move(event) {
      const pixel = this.pixel(event);
      if (this.pressed && this.pressed.pan) return this.pan(pixel);
      if (this.pressed) this.stretch(pixel);
      if (this.view) this.hover(this.dragging ? null : pixel);
      this.picture.style.cursor = legendAt(this.view, pixel) || this.figure.data.some((trace) => trace.customdata) ? "pointer" : "";
    }

    // The tip of the points at a pixel, and a cursor there on all charts that share the axis.
    hover(pixel) {
      const points = pixel ? pointsAt(this.view, pixel) : [], texts = tipLines(points);
      if (!texts.length) return this.hide();
      this.tip.replaceChildren(...texts.map((text) => window.tracekit.make("div", { textContent: text })));
      this.tip.hidden = false;
      const left = pixel[0] + 14 + this.tip.offsetWidth > this.width ? pixel[0] - 14 - this.tip.offsetWidth : pixel[0] + 14;
      this.tip.style.transform = `translate(${Math.max(0, left)}px, ${pixel[1] + 14}px)`;
      const value = this.toShared(this.view.axes.x.toValue(pixel[0]));
      if (this.meta.axis) this.linked().forEach((chart) => chart.showCursor(value));
    }

    showCursor(value) {
      const { axes, area } = this.view, px = axes.x.toPixel(this.fromShared([value, value])[0]);
      this.cursor.hidden = px < area.left || px > area.right;
      Object.assign(this.cursor.style, { left: `${px}px`, top: `${area.top}px`, height: `${area.bottom - area.top}px` });
    }

    hide() {
      this.tip.hidden = true;
      if (this.meta) this.linked().forEach((chart) => (chart.cursor.hidden = true));
    }

    press(event) {
      if (event.button || event.pointerType === "touch") return;
      const { axes } = this.view, pixel = this.pixel(event);
      this.pressed = { x: pixel[0], y: pixel[1], pan: event.shiftKey && !axes.x.names, range: axes.x.range, value: axes.x.toValue(pixel[0]) };
      this.picture.setPointerCapture(event.pointerId);
    }

    pan([x]) {
      const [low, high] = this.pressed.range, { left, right } = this.view.area;
      if (Math.abs(x - this.pressed.x) < DRAG_PX && !this.dragging) return;
      this.dragging = true;
      const by = ((x - this.pressed.x) / (right - left)) * (high - low);
      this.zoom([low - by, high - by]);
    }

    // Over a figure with `meta.box`, a drag chooses the cells in a box; over others, a range of x.
    stretch([x, y]) {
      const { axes, area } = this.view, { pressed } = this, box = this.meta.box;
      const distance = box ? Math.hypot(x - pressed.x, y - pressed.y) : axes.x.names ? 0 : Math.abs(x - pressed.x);
      this.dragging = distance >= DRAG_PX;
      this.rubber.hidden = !this.dragging;
      const span = (begin, end, low, high) => [begin, Math.min(Math.max(end, low), high)].sort((a, b) => a - b);
      const [left, right] = span(pressed.x, x, area.left, area.right);
      const [top, bottom] = box ? span(pressed.y, y, area.top, area.bottom) : [area.top, area.bottom];
      Object.assign(this.rubber.style, { left: `${left}px`, top: `${top}px`, width: `${right - left}px`, height: `${bottom - top}px` });
    }

    // Chooses the cells between two pixels.
    chooseBox(corner, opposite, when) {
      const { axes, area } = this.view, inside = (px, low, high) => Math.min(Math.max(px, low + 1), high - 1);
      const ends = (axis, index, low, high) => [corner, opposite].map((pixel) => Math.round(axis.toValue(inside(pixel[index], low, high)))).sort((a, b) => a - b);
      this.click({ points: [], box: [ends(axes.x, 0, area.left, area.right), ends(axes.y, 1, area.top, area.bottom)], at: when });
    }

    release(event) {
      const pixel = this.pixel(event), { pressed, dragging } = this;
      this.pressed = null;
      this.dragging = false;
      this.rubber.hidden = true;
      if (dragging && pressed.pan) return;
      if (dragging && this.meta.box) return this.chooseBox([pressed.x, pressed.y], pixel, event.timeStamp);
      if (dragging) {
        const { axes, area } = this.view, end = axes.x.toValue(Math.min(Math.max(pixel[0], area.left), area.right));
        return this.zoom([Math.min(pressed.value, end), Math.max(pressed.value, end)]);
      }
      const entry = legendAt(this.view, pixel);
      if (entry) return this.toggle(entry.trace.name);
      if (!event.button) this.choose(pixel, event.timeStamp, DOUBLE_MS);
    }

    choose(pixel, when, wait) {
      const points = pointsAt(this.view, pixel).map(({ point }) => point);
      clearTimeout(this.clicking);
      if (points.length) this.clicking = setTimeout(() => this.click({ points, at: when }), wait);
    }

    toggle(name) {
      if (!this.hiddenTraces.delete(name)) this.hiddenTraces.add(name);
      this.redraw();
    }

    // ---- the keyboard

    key(event) {
      const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      const entry = this.view.legend[Number(event.key) - 1];
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (direction) this.focus = nextMark(this.view, this.focus, direction) || this.focus;
      else if (event.key === "Escape") this.reset();
      else if (event.key === "Enter" && event.shiftKey && this.meta.box && this.corner && this.focus) this.chooseBox(this.corner, this.focus, event.timeStamp);
      else if (event.key === "Enter" && this.focus) this.choose((this.corner = this.focus), event.timeStamp, 0);
      else if (entry) this.toggle(entry.trace.name);
      else return;
      event.preventDefault();
      if (direction && this.focus) this.hover(this.focus);
    }

    save() {
      const source = new XMLSerializer().serializeToString(this.view.root), image = new Image();
      image.onload = () => {
        const canvas = window.tracekit.make("canvas", { width: SCALE * this.width, height: SCALE * this.figure.layout.height });
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        window.tracekit.save(canvas.toDataURL("image/png"), "tracekit.png");
      };
      image.src = `data:image/svg+xml,${encodeURIComponent(source)}`;
    }

    end() {
      charts.delete(this);
      this.watching.disconnect();
    }
  }

  // ---- the component for Dash

  function Component({ id, figure, setProps }) {
    const element = React.useRef(null), chart = React.useRef(null);
    React.useEffect(function () {
      const created = (chart.current = new Chart(element.current, (clicked) => setProps({ clickData: clicked })));
      return () => created.end();
    }, []);
    React.useEffect(() => chart.current.show(unpack(figure)), [figure]);
    return React.createElement("div", { id, ref: element, className: "chart", style: { height: `${figure.layout.height}px` } });
  }

  window.tracekit_chart = { Chart: Component };
})();
