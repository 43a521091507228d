// The component Chart (ui/drawn.py): a Plotly figure, its words where the mouse is, zoom, and the file of the picture.
(function () {
  "use strict";

  const { unpack, words, lines, draw, make } = window.tracekitChart;
  const NEAR_PX = 24, DRAG_PX = 8, SCALE = 2, LEGEND_PX = 8, DOUBLE_MS = 250, SETTLED_MS = 300;

  // ---- what is under the mouse

  // The points there, each with its trace: of a bar or cell that one; of lines the nearest point, or where the figure
  // says so all of the nearest step, however far away.
  function found({ made, axes, area, layout }, [x, y]) {
    if (x < area.left || x > area.right || y < area.top || y > area.bottom) return [];
    const at = { x: axes.x.from(x), y: axes.y.from(y) };
    for (const one of made.maps) {
      const row = Math.round(at.y), column = Math.round(at.x), z = (one.trace.z[row] || [])[column];
      const cell = (values) => (Array.isArray(values) ? values[row][column] : undefined);
      if (typeof z === "number") return [{ trace: one.trace, point: { z, x: column, y: row, customdata: cell(one.trace.customdata), text: cell(one.trace.text) } }];
    }
    const within = (value, [low, high]) => value >= Math.min(low, high) && value <= Math.max(low, high);
    const bars = made.bars.filter((one) => within(at[one.lies ? "y" : "x"], one.box[one.lies ? "y" : "x"]));
    const away = (value, [low, high]) => Math.max(Math.min(low, high) - value, value - Math.max(low, high), 0);
    const off = ({ box }) => away(at.x, box.x) + away(at.y, box.y); // one of them is 0
    if (bars.length) return [bars.reduce((best, one) => (off(one) < off(best) ? one : best))];
    return nearest(made.paths.filter((one) => one.trace.hoverinfo !== "skip"), axes, layout.hovermode === "x", [x, y]);
  }

  function nearest(paths, axes, abreast, [x, y]) {
    const near = paths.flatMap(function ({ trace, points }) {
      const far = (one) => (abreast ? Math.abs(axes.x.at(one.x) - x) : Math.hypot(axes.x.at(one.x) - x, axes.y.at(one.y) - y));
      const best = points.reduce((least, one) => (!least || far(one) < far(least) ? one : least), null);
      return best ? [{ trace, point: best.point, far: far(best) }] : [];
    }).sort((one, other) => one.far - other.far);
    if (!near.length || (!abreast && near[0].far > NEAR_PX)) return [];
    return abreast ? near.filter((one) => one.far === near[0].far) : near.slice(0, 1);
  }

  // The name in the legend at that place.
  const legendAt = ({ legend }, [x, y]) => legend.find((one) => x >= one.left && x < one.right && Math.abs(y - one.y) <= LEGEND_PX);

  // Where the marks in sight are, in pixels.
  function spots({ made, axes, area }) {
    const middle = ([low, high]) => (low + high) / 2;
    const cells = made.maps.flatMap(({ trace }) => trace.z.flatMap((row, y) => row.flatMap((z, x) => (z === null ? [] : [[x, y]]))));
    const bars = made.bars.map(({ box }) => [middle(box.x), middle(box.y)]);
    const points = made.paths.flatMap((one) => (one.trace.hoverinfo === "skip" ? [] : one.points.map(({ x, y }) => [x, y])));
    return [...cells, ...bars, ...points].map(([x, y]) => [axes.x.at(x), axes.y.at(y)])
      .filter(([x, y]) => x >= area.left && x <= area.right && y >= area.top && y <= area.bottom);
  }

  // The next mark in a direction: to the side the next place across, up and down the next one at the same place.
  function beside(shown, from, [across, down]) {
    const [x, y] = from || [across < 0 ? shown.area.right + 1 : shown.area.left - 1, shown.area.top];
    const ways = spots(shown).map(function (spot) {
      const ahead = across ? (spot[0] - x) * across : (spot[1] - y) * down, aside = Math.abs(across ? spot[1] - y : spot[0] - x);
      return { spot, ahead, order: across ? [Math.round(ahead), aside] : [Math.round(aside), ahead] };
    }).filter(({ ahead }) => ahead > 0.5);
    ways.sort((one, other) => one.order[0] - other.order[0] || one.order[1] - other.order[1]);
    return ways.length ? ways[0].spot : null;
  }

  const said = (points) => [...new Set(points.flatMap(({ trace, point }) => (trace.hovertemplate ? lines(words(trace.hovertemplate, point)) : [])))];

  // ---- one chart on the page

  // Charts whose figures name the same `layout.meta.axis` share a range and a cursor, in units of that axis. `meta.at`:
  // what stands at positions 0, 1, ... of the chart's own axis, if that is one of positions.
  const charts = new Set();

  class Chart {
    constructor(host, click) {
      this.host = host;
      this.click = click;
      this.range = null;
      this.off = new Set();
      const part = (name) => window.tracekit.make("div", { className: `chart-${name}`, hidden: true });
      [this.tip, this.rubber, this.cursor] = [part("tip"), part("rubber"), part("cursor")];
      this.tip.setAttribute("role", "status");
      this.picture = window.tracekit.make("div", { tabIndex: 0, className: "chart-picture" });
      this.picture.setAttribute("role", "application");
      this.picture.setAttribute("aria-label", "Figure: arrow keys go from point to point, Enter chooses one, Escape shows the whole");
      this.host.append(this.picture, this.rubber, this.cursor, this.tip, this.buttons());
      const hear = (name, act, how) => this.picture.addEventListener(name, act.bind(this), how);
      hear("pointermove", this.move);
      hear("pointerleave", () => this.hide());
      hear("blur", () => this.hide());
      hear("pointerdown", this.press);
      hear("pointerup", this.release);
      hear("dblclick", this.reset);
      hear("wheel", this.wheel, { passive: false });
      hear("keydown", this.key);
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
      const revision = figure.layout.uirevision, same = this.figure && revision && this.figure.layout.uirevision === revision;
      this.figure = figure;
      this.meta = figure.layout.meta || {};
      if (!same) this.range = this.meta.range ? this.own(this.meta.range) : null;
      this.host.figure = figure;
      this.redraw();
    }

    draw() {
      const width = Math.floor(this.host.clientWidth);
      if (!this.figure || !width || width === this.width) return;
      this.width = width;
      this.whole.hidden = !this.range;
      this.shown = draw(this.figure, width, this.range, this.off);
      this.picture.replaceChildren(this.shown.root);
    }

    redraw() {
      this.width = 0;
      this.hide();
      this.draw();
    }

    // ---- the range

    together() {
      return this.meta.axis ? [...charts].filter((one) => one.meta && one.meta.axis === this.meta.axis) : [this];
    }

    // Between positions of this chart and values of the axis that it shares.
    shared(position) {
      const at = this.meta.at;
      if (!at || at.length < 2) return position;
      const before = Math.min(Math.max(Math.floor(position), 0), at.length - 2);
      return at[before] + (position - before) * (at[before + 1] - at[before]);
    }

    own([low, high]) {
      const at = this.meta.at;
      if (!at || at.length < 2) return [low, high];
      const place = function (value) {
        const above = at.findIndex((one) => one > value), before = Math.max((above < 0 ? at.length : above) - 1, 0);
        const left = Math.min(before, at.length - 2);
        return Math.min(Math.max(left + (value - at[left]) / (at[left + 1] - at[left] || 1), -0.5), at.length - 0.5);
      };
      return [place(low), place(high)];
    }

    // Only x is chosen: the heights of two parts of a figure stay comparable.
    zoom(range) {
      if (range && !(Math.abs(range[1] - range[0]) > 0)) return;
      const values = range && range.map((one) => this.shared(one));
      for (const chart of this.together()) {
        chart.range = values && chart.own(values);
        chart.redraw();
      }
      clearTimeout(this.telling);
      if (this.meta.axis === "time") this.telling = setTimeout(() => window.tracekit.range(values), SETTLED_MS);
    }

    reset() {
      clearTimeout(this.clicking); // the first half of a double click is no click
      if (this.range) this.zoom(null);
    }

    wheel(event) {
      const { axes } = this.shown;
      if (!event.ctrlKey || axes.x.names) return;
      event.preventDefault();
      const middle = axes.x.from(this.at(event)[0]), factor = event.deltaY > 0 ? 1.25 : 0.8;
      this.zoom(axes.x.range.map((end) => middle + (end - middle) * factor));
    }

    // ---- the mouse

    at(event) {
      const { left, top } = this.picture.getBoundingClientRect();
      return [event.clientX - left, event.clientY - top];
    }

    move(event) {
      const at = this.at(event);
      if (this.pressed && this.pressed.pan) return this.pan(at);
      if (this.pressed) this.stretch(at);
      if (this.shown) this.point(this.dragging ? null : at);
      this.picture.style.cursor = legendAt(this.shown, at) || this.figure.data.some((trace) => trace.customdata) ? "pointer" : "";
    }

    // The words of what is there, and a line through it on all charts that share the axis.
    point(at) {
      const points = at ? found(this.shown, at) : [], texts = said(points);
      if (!texts.length) return this.hide();
      this.tip.replaceChildren(...texts.map((text) => window.tracekit.make("div", { textContent: text })));
      this.tip.hidden = false;
      const across = at[0] + 14 + this.tip.offsetWidth > this.width ? at[0] - 14 - this.tip.offsetWidth : at[0] + 14;
      this.tip.style.transform = `translate(${Math.max(0, across)}px, ${at[1] + 14}px)`;
      const value = this.shared(this.shown.axes.x.from(at[0]));
      if (this.meta.axis) this.together().forEach((chart) => chart.line(value));
    }

    line(value) {
      const { axes, area } = this.shown, px = axes.x.at(this.own([value, value])[0]);
      this.cursor.hidden = px < area.left || px > area.right;
      Object.assign(this.cursor.style, { left: `${px}px`, top: `${area.top}px`, height: `${area.bottom - area.top}px` });
    }

    hide() {
      this.tip.hidden = true;
      if (this.meta) this.together().forEach((chart) => (chart.cursor.hidden = true));
    }

    press(event) {
      if (event.button || event.pointerType === "touch") return;
      const { axes } = this.shown, at = this.at(event);
      this.pressed = { x: at[0], y: at[1], pan: event.shiftKey && !axes.x.names, range: axes.x.range, value: axes.x.from(at[0]) };
      this.picture.setPointerCapture(event.pointerId);
    }

    pan([x]) {
      const [low, high] = this.pressed.range, { left, right } = this.shown.area;
      if (Math.abs(x - this.pressed.x) < DRAG_PX && !this.dragging) return;
      this.dragging = true;
      const by = ((x - this.pressed.x) / (right - left)) * (high - low);
      this.zoom([low - by, high - by]);
    }

    // Over a figure with `meta.box`, a drag chooses the cells in a box; over others, a range of x.
    stretch([x, y]) {
      const { axes, area } = this.shown, { pressed } = this, box = this.meta.box;
      const far = box ? Math.hypot(x - pressed.x, y - pressed.y) : axes.x.names ? 0 : Math.abs(x - pressed.x);
      this.dragging = far >= DRAG_PX;
      this.rubber.hidden = !this.dragging;
      const span = (begin, end, low, high) => [begin, Math.min(Math.max(end, low), high)].sort((one, other) => one - other);
      const [left, right] = span(pressed.x, x, area.left, area.right);
      const [top, bottom] = box ? span(pressed.y, y, area.top, area.bottom) : [area.top, area.bottom];
      Object.assign(this.rubber.style, { left: `${left}px`, top: `${top}px`, width: `${right - left}px`, height: `${bottom - top}px` });
    }

    // The cells between two places.
    boxed(one, other, when) {
      const { axes, area } = this.shown, within = (px, low, high) => Math.min(Math.max(px, low + 1), high - 1);
      const ends = (axis, at, low, high) => [one, other].map((place) => Math.round(axis.from(within(place[at], low, high)))).sort((a, b) => a - b);
      this.click({ points: [], box: [ends(axes.x, 0, area.left, area.right), ends(axes.y, 1, area.top, area.bottom)], at: when });
    }

    release(event) {
      const at = this.at(event), { pressed, dragging } = this;
      this.pressed = null;
      this.dragging = false;
      this.rubber.hidden = true;
      if (dragging && pressed.pan) return;
      if (dragging && this.meta.box) return this.boxed([pressed.x, pressed.y], at, event.timeStamp);
      if (dragging) {
        const { axes, area } = this.shown, end = axes.x.from(Math.min(Math.max(at[0], area.left), area.right));
        return this.zoom([Math.min(pressed.value, end), Math.max(pressed.value, end)]);
      }
      const entry = legendAt(this.shown, at);
      if (entry) return this.toggle(entry.trace.name);
      if (!event.button) this.choose(at, event.timeStamp, DOUBLE_MS);
    }

    choose(at, when, wait) {
      const points = found(this.shown, at).map(({ point }) => point);
      clearTimeout(this.clicking);
      if (points.length) this.clicking = setTimeout(() => this.click({ points, at: when }), wait);
    }

    toggle(name) {
      if (!this.off.delete(name)) this.off.add(name);
      this.redraw();
    }

    // ---- the keyboard

    key(event) {
      const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      const named = this.shown.legend[Number(event.key) - 1];
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (steps) this.focus = beside(this.shown, this.focus, steps) || this.focus;
      else if (event.key === "Escape") this.reset();
      else if (event.key === "Enter" && event.shiftKey && this.meta.box && this.corner && this.focus) this.boxed(this.corner, this.focus, event.timeStamp);
      else if (event.key === "Enter" && this.focus) this.choose((this.corner = this.focus), event.timeStamp, 0);
      else if (named) this.toggle(named.trace.name);
      else return;
      event.preventDefault();
      if (steps && this.focus) this.point(this.focus);
    }

    save() {
      const source = new XMLSerializer().serializeToString(this.shown.root), image = new Image();
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

  // ---- in Dash's eyes

  function Component({ id, figure, setProps }) {
    const place = React.useRef(null), chart = React.useRef(null);
    React.useEffect(function () {
      const made = (chart.current = new Chart(place.current, (clicked) => setProps({ clickData: clicked })));
      return () => made.end();
    }, []);
    React.useEffect(() => chart.current.show(unpack(figure)), [figure]);
    return React.createElement("div", { id: id, ref: place, className: "chart", style: { height: `${figure.layout.height}px` } });
  }

  window.tracekit_chart = { Chart: Component };
})();
