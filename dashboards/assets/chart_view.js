// The component Chart (ui/drawn.py): a Plotly figure, its words where the mouse is, zoom, and the file of the picture.
(function () {
  "use strict";

  const { unpack, words, lines, draw, make } = window.tracekitChart;
  const NEAR_PX = 24, DRAG_PX = 8, SCALE = 2;

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
    if (bars.length) return [bars.find((one) => within(at.x, one.box.x) && within(at.y, one.box.y)) || bars[0]];
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

  const said = (points) => [...new Set(points.flatMap(({ trace, point }) => (trace.hovertemplate ? lines(words(trace.hovertemplate, point)) : [])))];

  // ---- one chart on the page

  class Chart {
    constructor(host, click) {
      this.host = host;
      this.click = click;
      this.zoomed = null;
      this.tip = Object.assign(document.createElement("div"), { className: "chart-tip", hidden: true });
      this.picture = document.createElement("div");
      this.rubber = Object.assign(document.createElement("div"), { className: "chart-rubber", hidden: true });
      this.host.append(this.picture, this.rubber, this.tip, this.buttons());
      const hear = (name, act) => this.picture.addEventListener(name, act.bind(this));
      hear("pointermove", this.move);
      hear("pointerleave", () => this.hide());
      hear("pointerdown", this.press);
      hear("pointerup", this.release);
      hear("dblclick", () => this.zoom(null));
      this.watching = new ResizeObserver(() => this.draw());
      this.watching.observe(host);
    }

    buttons() {
      const button = (words, title, act) => {
        const made = Object.assign(document.createElement("button"), { type: "button", textContent: words, title });
        made.addEventListener("click", act);
        return made;
      };
      this.whole = button("Whole", "Show all of the figure again (double click)", () => this.zoom(null));
      this.whole.hidden = true;
      const bar = Object.assign(document.createElement("div"), { className: "chart-buttons" });
      bar.append(this.whole, button("PNG", "Save the figure as an image", () => this.save()));
      return bar;
    }

    show(figure) {
      const same = this.figure && this.figure.layout.uirevision && this.figure.layout.uirevision === figure.layout.uirevision;
      this.figure = figure;
      this.width = 0;
      if (!same) this.zoomed = null;
      this.host.figure = figure;
      this.draw();
    }

    draw() {
      const width = Math.floor(this.host.clientWidth);
      if (!this.figure || !width || width === this.width) return;
      this.width = width;
      this.shown = draw(this.figure, width, this.zoomed);
      this.picture.replaceChildren(this.shown.root);
    }

    zoom(ranges) {
      this.zoomed = ranges;
      this.whole.hidden = ranges === null;
      this.width = 0;
      this.hide();
      this.draw();
    }

    at(event) {
      const { left, top } = this.picture.getBoundingClientRect();
      return [event.clientX - left, event.clientY - top];
    }

    move(event) {
      const at = this.at(event);
      if (this.pressed) this.stretch(at);
      const points = this.shown && !this.dragging ? found(this.shown, at) : [], texts = said(points);
      if (!texts.length) return this.hide();
      this.tip.replaceChildren(...texts.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
      this.tip.hidden = false;
      const across = at[0] + 14 + this.tip.offsetWidth > this.width ? at[0] - 14 - this.tip.offsetWidth : at[0] + 14;
      this.tip.style.transform = `translate(${Math.max(0, across)}px, ${at[1] + 14}px)`;
      this.picture.style.cursor = this.figure.data.some((trace) => trace.customdata) ? "pointer" : "";
    }

    hide() {
      this.tip.hidden = true;
    }

    press(event) {
      if (event.button || event.pointerType === "touch") return;
      this.pressed = this.at(event);
      this.picture.setPointerCapture(event.pointerId);
    }

    // The part that a drag chooses: of an axis of numbers where it is long enough along it.
    chosen(at) {
      const { axes } = this.shown, part = {};
      ["x", "y"].forEach((letter, which) => {
        if (axes[letter].names || Math.abs(at[which] - this.pressed[which]) < DRAG_PX) return;
        const [low, high] = [this.pressed[which], at[which]].map(axes[letter].from).sort((one, other) => one - other);
        const [first, last] = axes[letter].range;
        part[letter] = first < last ? [low, high] : [high, low];
      });
      return part;
    }

    stretch(at) {
      const { area } = this.shown, part = this.chosen(at);
      this.dragging = Boolean(part.x || part.y);
      this.rubber.hidden = !this.dragging;
      const side = (letter, which, begin, end) => (part[letter] ? [this.pressed[which], at[which]].sort((one, other) => one - other) : [begin, end]);
      const [left, right] = side("x", 0, area.left, area.right), [top, bottom] = side("y", 1, area.top, area.bottom);
      Object.assign(this.rubber.style, { left: `${left}px`, top: `${top}px`, width: `${right - left}px`, height: `${bottom - top}px` });
    }

    release(event) {
      const at = this.at(event), dragged = this.pressed && this.dragging;
      const part = dragged ? this.chosen(at) : null;
      this.pressed = null;
      this.dragging = false;
      this.rubber.hidden = true;
      if (part) return this.zoom({ ...this.zoomed, ...part });
      const points = event.button ? [] : found(this.shown, at).map(({ point }) => point);
      if (points.length) this.click({ points, at: event.timeStamp });
    }

    save() {
      const source = new XMLSerializer().serializeToString(this.shown.root), image = new Image();
      image.onload = () => {
        const canvas = Object.assign(document.createElement("canvas"), { width: SCALE * this.width, height: SCALE * this.figure.layout.height });
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        const link = Object.assign(document.createElement("a"), { href: canvas.toDataURL("image/png"), download: "tracekit.png" });
        link.click();
      };
      image.src = `data:image/svg+xml,${encodeURIComponent(source)}`;
    }

    end() {
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
