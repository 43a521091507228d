// The timeline: fetches the ops of a step, moves and zooms the view, and keeps the address equal to it. timeline_draw.js
// draws, timeline_panel.js writes the texts around the canvas, timeline_input.js handles pointer and keys,
// timeline_spans.js looks up rows and spans, timeline_marks.js has the range and the critical path.
(function () {
  "use strict";

  const SHORTEST = 1e-5;
  const paint = () => window.tracekitTimelineDraw, panel = () => window.tracekitTimelinePanel;
  const data = () => window.tracekitTimelineSpans, path = () => window.tracekitTimelinePath;
  const rows = () => window.tracekitTimelineRows, range = () => window.tracekitTimelineRange;
  const element = (id) => document.getElementById(id);
  let timeline = null;

  class Timeline {
    constructor(config) {
      this.config = config;
      this.state = config.state;
      this.scroll = element("timeline-scroll");
      this.canvas = element("timeline-canvas");
      this.overview = element("timeline-overview");
      this.tip = window.tracekit.make("div", { id: "timeline-tip", hidden: true });
      element("timeline-host").append(this.tip);
      this.scene = null;
      this.spans = null;
      this.marks = []; // spans of the op in the side panel
      this.edges = []; // its dependencies
      this.pinned = null;
      this.closing = new AbortController();
      window.tracekitTimelineInput.listen(this);
      this.resized = new ResizeObserver(() => this.scene && this.scroll.isConnected && this.resize());
      this.resized.observe(element("timeline-host"));
      this.load();
    }

    close() {
      this.closing.abort();
      this.resized.disconnect();
      clearTimeout(this.settling);
      clearTimeout(this.dwelling);
    }

    // ---- asking the server

    query(more) {
      const values = { job: this.config.job, ...this.state, ...more }, parameters = window.tracekit.query({});
      for (const [name, value] of Object.entries(values)) {
        if (value !== null && value !== undefined && value !== "") parameters.set(name, value);
      }
      return parameters.toString();
    }

    ask(path, more) {
      return window.tracekit.answer(window.tracekit.at(`/timeline/${path}?${this.query(more)}`), { signal: this.closing.signal });
    }

    // Runs `work` and shows its error in place of the timeline, or over it.
    async guarded(work) {
      try {
        await work();
      } catch (error) {
        if (error.name === "AbortError") return;
        this.say(error instanceof TypeError ? "The server does not answer; reload the page to try again." : error.message);
      }
    }

    say(text) {
      const status = element("timeline-status");
      if (!status) return;
      status.textContent = text;
      status.hidden = !text;
    }

    // `keep`: stay at the same height of the rows.
    load(keep) {
      const request = (this.loads = (this.loads || 0) + 1);
      this.say("Loading the step ...");
      return this.guarded(async () => {
        const { problem } = await (await this.ask("check", { op: "" })).json();
        if (problem) throw new Error(problem);
        const layout = data().unpack(await (await this.ask("layout", { op: "" })).arrayBuffer());
        if (request !== this.loads) return;
        this.spans = this.requested = this.path = null;
        this.marks = [];
        this.scene = {
          ...layout, rows: layout.dp_rank.length, colours: this.config.colours, bounds: this.config.bounds,
          replays: [...new Set(layout.lines.map((line) => line[0]))],
        };
        this.scene.matches = data().finder(this.scene, this.state.find || "");
        this.longest = Math.max(...this.scene.replays.map((replay) => layout.ends[replay])) * 1.01;
        this.earliest = layout.begins;
        const { from, to } = this.state;
        this.from = from !== null ? from / 1e3 : this.earliest;
        this.to = from !== null ? to / 1e3 : this.longest;
        this.scene.workers ? this.say("") : this.say("None of the chosen workers has ops in this step.");
        this.resize();
        if (!keep) this.scrollTo(this.state.at || this.slowestHidden());
        await this.fetchSpans();
        await path().load(this);
        this.settle();
        if (this.state.op) await this.reopen(this.state.op);
      });
    }

    visible() {
      return paint().inView(this.scene, this.scroll.scrollTop, this.height);
    }

    // Loads beyond the window on all sides, so that moving shows something at once.
    async fetchSpans() {
      if (!this.scene || !this.scene.workers || (this.scene.whole && this.spans)) return;
      const [first, last] = this.visible(), rowCount = last - first, duration = this.to - this.from;
      const reach = this.scene.whole ? {} : {
        first: Math.max(this.scene.pinned, first - rowCount), last: Math.min(this.scene.rows, last + rowCount),
        from: (this.from - duration / 2) * 1e3, to: (this.to + duration / 2) * 1e3, columns: Math.ceil(this.width * 2),
      };
      const request = (this.requested = {
        first_row: reach.first, rows: reach.last - reach.first, window: [reach.from / 1e3, reach.to / 1e3, reach.columns],
      });
      try {
        const spans = data().unpack(await (await this.ask("spans", { op: "", at: "", ...reach })).arrayBuffer());
        if (request !== this.requested) return;
        this.spans = spans;
      } finally {
        if (request === this.requested) this.requested = null;
      }
      if (this.pinned) this.marks = data().named(this.scene, this.spans, this.pinned);
      this.frame();
    }

    // Whether the spans loaded or requested do not cover the view, or not as finely as it could be drawn.
    stale() {
      const spans = this.requested || this.spans;
      if (this.scene.whole || !spans) return !spans;
      const [first, last] = this.visible(), { first_row: from, rows, window: loaded } = spans;
      const fineEnough = (loaded[1] - loaded[0]) / loaded[2] <= ((this.to - this.from) / this.width) * 1.02;
      const inside = this.from >= loaded[0] && this.to <= loaded[1];
      return !(first >= from && last <= from + rows && inside && fineEnough);
    }

    // ---- drawing

    resize() {
      const ratio = window.devicePixelRatio || 1;
      element("timeline-host").dataset.ready = "true";
      paint().fitLabels(this.scroll.clientWidth);
      const { scene } = this, above = document.fullscreenElement ? this.scroll.getBoundingClientRect().top + 24 : window.innerHeight * 0.2;
      const available = Math.max(360, window.innerHeight - above), fixedHeight = paint().AXIS + paint().footHeight(scene);
      scene.block = paint().fittedBlock(scene.lines, scene.rows, available - fixedHeight, scene.names);
      paint().placeRows(scene);
      const total = scene.tops[scene.rows] + fixedHeight;
      this.height = Math.max(160, Math.min(total, available));
      this.scroll.style.height = `${this.height}px`;
      element("timeline-sizer").style.height = `${Math.max(0, total - this.height)}px`;
      this.width = Math.max(100, this.scroll.clientWidth - paint().LABELS);
      this.overviewHeight = Math.min(64, Math.max(36, this.scene.workers * 4));
      for (const [canvas, height] of [[this.canvas, this.height], [this.overview, this.overviewHeight]]) {
        canvas.width = Math.round((this.width + paint().LABELS) * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.width = `${this.width + paint().LABELS}px`;
        canvas.style.height = `${height}px`;
        canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      }
      this.frame();
    }

    frame() {
      if (this.pending || !this.scene) return;
      this.pending = true;
      requestAnimationFrame(() => {
        this.pending = false;
        if (!this.canvas.isConnected) return;
        const began = performance.now();
        const view = {
          from: this.from, to: this.to, width: this.width, height: this.height, top: this.scroll.scrollTop, range: range().of(this.state),
        };
        paint().draw(this.canvas.getContext("2d"), this.scene, view, this.spans, this.marks, this.edges);
        const room = { labels: paint().LABELS, top: paint().scrollingTop(this.scene), foot: paint().footHeight(this.scene) };
        if (this.path) path().draw(this.canvas.getContext("2d"), this.scene, view, this.path, room);
        paint().overview(this.overview.getContext("2d"), this.scene, this.width + paint().LABELS, this.overviewHeight, view);
        this.frame_ms = performance.now() - began;
        if (this.spans) element("timeline-host").dataset.painted = String(this.spans.start.length);
      });
    }

    // ---- moving

    show(from, to) {
      const duration = Math.min(Math.max(to - from, SHORTEST), (this.longest - this.earliest) * 1.5);
      const middle = Math.min(Math.max((from + to) / 2, this.earliest), this.longest);
      this.from = middle - duration / 2;
      this.to = middle + duration / 2;
      this.moved();
    }

    // Draws at once, requests finer spans while still moving (one request at a time), and the rest once it stops.
    moved() {
      this.frame();
      if (this.scene && !this.requested && this.stale()) this.guarded(() => this.fetchSpans());
      this.settleSoon();
    }

    zoom(factor, x) {
      const share = x === undefined ? 0.5 : Math.min(Math.max((x - paint().LABELS) / this.width, 0), 1);
      const duration = Math.max((this.to - this.from) * factor, SHORTEST), centre = this.from + share * (this.to - this.from);
      this.show(centre - share * duration, centre + (1 - share) * duration);
    }

    home() {
      this.from = this.earliest;
      this.to = this.longest;
      this.moved();
    }

    pan(share) {
      const by = share * (this.to - this.from);
      this.show(this.from + by, this.to + by);
    }

    scrollTo(worker) {
      if (!worker) return;
      const row = data().position(this.scene, worker);
      if (row >= 0) this.scroll.scrollTop = this.scene.tops[row] - this.scene.tops[this.scene.pinned];
    }

    // The row above the slowest worker, to scroll to if that is out of sight: it is what people come for.
    slowestHidden() {
      const { slowdown, dp_rank, pp_rank, pinned } = this.scene;
      const worst = slowdown.indexOf(slowdown.reduce((a, b) => Math.max(a, b), 0));
      if (this.state.order !== "slowest" || pinned || worst < this.visible()[1] - 2) return null;
      const above = Math.max(0, worst - 1);
      return `${dp_rank[above]},${pp_rank[above]}`;
    }

    settleSoon() {
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.settle(), 160);
    }

    // Once the view rests: updates the address, finer spans and the table.
    settle() {
      if (!this.scene || !this.scene.workers || !this.canvas.isConnected) return;
      const whole = this.from === this.earliest && this.to === this.longest;
      this.state.from = whole ? null : Math.round(this.from * 1e6) / 1e3;
      this.state.to = whole ? null : Math.round(this.to * 1e6) / 1e3;
      const { pinned, tops, block } = this.scene, row = paint().rowAt(this.scene, tops[pinned] + this.scroll.scrollTop + block.height / 2);
      this.state.at = row > pinned ? rows().worker(this.scene, row) : null;
      window.tracekit.remember({ job: this.config.job, ...this.state });
      this.guarded(async () => {
        if (this.stale()) await this.fetchSpans();
        await this.list();
        if (!this.pinned) await range().sum(this);
      });
    }

    full() {
      if (document.fullscreenElement) document.exitFullscreen();
      else this.scroll.closest(".panel").requestFullscreen();
    }

    change(values) {
      const differs = ([name, value]) => String(this.state[name] ?? "") !== String(value ?? "");
      const changed = Object.entries(values).filter(differs);
      if (!changed.length) return;
      Object.assign(this.state, Object.fromEntries(changed));
      if (changed.every(([name]) => name === "critical")) {
        window.tracekit.remember({ critical: this.state.critical });
        this.guarded(() => path().load(this));
        return;
      }
      if (changed.every(([name]) => name === "find")) {
        this.scene.matches = data().finder(this.scene, this.state.find || "");
        window.tracekit.remember({ find: this.state.find });
        this.unpin();
        this.settle();
        return;
      }
      this.state.at = null;
      if (changed.some(([name]) => name === "step")) {
        Object.assign(this.state, { from: null, to: null, range: null });
        const link = element("timeline-perfetto") || {};
        const query = window.tracekit.query({ job: this.config.job, step: this.state.step });
        link.href = window.tracekit.at(`/timeline/export.json.gz?${query}`);
      }
      this.unpin();
      this.scroll.scrollTop = 0;
      this.load();
    }

    // ---- one op

    // The op under a point of the canvas: the nearest within 3 pixels.
    spanAt(x, y) {
      const place = this.scene && this.spans && x >= paint().LABELS ? rows().rowAtY(this, y) : null;
      if (!place) return null;
      return data().spanAt(this.scene, this.spans, this.time(x), (3 / this.width) * (this.to - this.from), place.row, place.inside);
    }

    time(x) {
      return this.from + ((x - paint().LABELS) / this.width) * (this.to - this.from);
    }

    async pin(name) {
      this.pinned = name;
      this.state.op = name;
      this.marks = this.spans ? data().named(this.scene, this.spans, name) : [];
      this.frame();
      window.tracekit.remember({ op: name });
      await this.showDetails(name, true);
    }

    // Pins the op of the address, which this step may not have.
    async reopen(name) {
      if (!this.scene.whole || data().named(this.scene, this.spans, name).length) await this.pin(name);
      else this.say(`The op ${name} of the address is not in this view.`);
    }

    unpin() {
      this.pinned = null;
      this.state.op = null;
      this.marks = this.edges = [];
      this.frame();
      panel().clear();
      window.tracekit.remember({ op: null });
    }

    // Unpins the op, else clears the range.
    deselect() {
      if (this.pinned || !this.state.range) this.unpin();
      else range().select(this, 0, 0, true);
      this.settleSoon(); // shows the sums again that the op replaced
    }

    async showDetails(name, kept) {
      const request = (this.detailRequests = (this.detailRequests || 0) + 1);
      const details = await (await this.ask("op", { op: name, at: "", from: "", to: "" })).json();
      const aside = element("timeline-details");
      if (request !== this.detailRequests || !aside) return;
      if (kept) this.edges = details.arrows;
      this.frame();
      panel().details(aside, details);
      delete aside.dataset.sums;
      aside.dataset.op = name;
      aside.dataset.kept = String(kept);
    }

    // Pins the op after or before the pinned one on its track, else the first in the window.
    async next(by) {
      let row = this.visible()[0], line = 0, index = -1;
      if (this.marks.length) ({ row, line, index } = this.marks[0]);
      const [begin, end] = data().range(this.scene, this.spans, row, line), { matches } = this.scene;
      if (index < 0) {
        for (index = begin; index < end && this.spans.start[index] < this.from; ) index += 1;
      } else {
        index += by;
      }
      while (matches && index >= begin && index < end && !matches(this.spans, index)) index += by;
      if (index < begin || index >= end) return;
      const mark = data().mark(this.scene, this.spans, row, line, index);
      if (mark.start < this.from || mark.start + mark.duration > this.to) {
        const duration = Math.max(this.to - this.from, mark.duration * 1.2), middle = mark.start + mark.duration / 2;
        this.show(middle - duration / 2, middle + duration / 2);
      }
      await this.pin(mark.name);
    }

    // ---- the table

    async list() {
      const query = this.query({ op: "", at: "" });
      if (query === this.listed) return;
      this.listed = query;
      const table = await (await this.ask("slowest", { op: "", at: "" })).json(), place = element("timeline-slowest");
      if (!place) return;
      element("timeline-csv").href = window.tracekit.at(`/timeline/slowest.csv?${query}`);
      this.slowestOps = table.rows.map((row) => row.name);
      place.replaceChildren(panel().table(table.heads, table.rows, (name) => this.guarded(() => this.goTo(name)), 4));
    }

    // Goes to the next op of the table.
    nextFound() {
      const { slowestOps: names = [] } = this, index = names.indexOf(this.pinned);
      if (names.length) this.guarded(() => this.goTo(names[(index + 1) % names.length]));
    }

    // Goes to an op, and opens its group if that is closed.
    async goTo(name) {
      if (data().position(this.scene, name) < 0) await rows().open(this, name);
      this.scrollTo(name);
      if (this.stale()) await this.fetchSpans();
      await this.pin(name);
      this.settle();
      this.scroll.focus();
    }

    // Saves the canvas as an image with a title.
    png() {
      if (!this.scene) return;
      const when = this.scene.started_at ? `, ${this.scene.started_at}` : "", what = this.scene.replays.join(" and ");
      const title = `${this.config.job}, step ${this.scene.step}${when}: ${what}`;
      panel().save(this.canvas, title, this.scene.colours, `timeline-step-${this.scene.step}.png`);
    }
  }

  function mount(config) {
    if (timeline) timeline.close();
    timeline = new Timeline(config);
    return true;
  }

  // The values of the controls, of which the usual ones are not in the address.
  function change(step, view, streams, order, critical, group, worker, dp_rank, stage, find) {
    const choices = { critical: critical === "yes" ? critical : null, group: group === "worker" ? null : group };
    timeline?.change({ step, view, streams, order, ...choices, worker, dp_rank, stage, find });
  }

  // The step before or after one of those in the menu, by the button that was clicked.
  function neighbour(previous, next, step, options) {
    const steps = options.map((option) => option.value), by = window.dash_clientside.callback_context.triggered_id;
    const place = steps.indexOf(step) + (by === "timeline-next" ? 1 : -1);
    return steps[Math.min(Math.max(place, 0), steps.length - 1)];
  }

  window.dash_clientside = { ...window.dash_clientside, timeline: { mount, change, neighbour } };
  // The timeline on the page, for tests and benchmarks.
  window.tracekitTimeline = { current: () => timeline };
})();
