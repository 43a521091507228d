// The timeline in the browser: asks the server for the ops of a step, lets a person move about in them, and keeps the
// address equal to what is shown. timeline_draw.js paints, timeline_panel.js says it in words, timeline_input.js hears
// pointer and keys, timeline_spans.js knows rows and spans, timeline_marks.js the range and the critical path.
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
      this.small = element("timeline-overview");
      this.tip = window.tracekit.make("div", { id: "timeline-tip", hidden: true });
      element("timeline-host").append(this.tip);
      this.scene = null;
      this.spans = null;
      this.marks = []; // spans of the op in the side panel
      this.handed = []; // arrows from and to it
      this.pinned = null;
      this.gone = new AbortController();
      window.tracekitTimelineInput.listen(this);
      this.resized = new ResizeObserver(() => this.scene && this.scroll.isConnected && this.resize());
      this.resized.observe(element("timeline-host"));
      this.load();
    }

    close() {
      this.gone.abort();
      this.resized.disconnect();
      clearTimeout(this.settling);
      clearTimeout(this.dwelling);
    }

    // ---- asking the server

    query(more) {
      const values = { job: this.config.job, ...this.state, ...more }, asked = window.tracekit.query({});
      for (const [name, value] of Object.entries(values)) {
        if (value !== null && value !== undefined && value !== "") asked.set(name, value);
      }
      return asked.toString();
    }

    ask(path, more) {
      return window.tracekit.answer(window.tracekit.at(`/timeline/${path}?${this.query(more)}`), { signal: this.gone.signal });
    }

    // Runs `work`; what goes wrong is said in place of the timeline, or over it.
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
      const asked = (this.asked = (this.asked || 0) + 1);
      this.say("Loading the step ...");
      return this.guarded(async () => {
        const { problem } = await (await this.ask("check", { op: "" })).json();
        if (problem) throw new Error(problem);
        const layout = data().unpack(await (await this.ask("layout", { op: "" })).arrayBuffer());
        if (asked !== this.asked) return;
        this.spans = this.coming = this.path = null;
        this.marks = [];
        this.scene = {
          ...layout, rows: layout.dp_rank.length, colours: this.config.colours, bounds: this.config.bounds,
          replays: [...new Set(layout.lines.map((line) => line[0]))],
        };
        this.scene.finds = data().finder(this.scene, this.state.find || "");
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

    // What is loaded reaches beyond the window on all sides, so that moving has something to show at once.
    async fetchSpans() {
      if (!this.scene || !this.scene.workers || (this.scene.whole && this.spans)) return;
      const [first, last] = this.visible(), room = last - first, wide = this.to - this.from;
      const reach = this.scene.whole ? {} : {
        first: Math.max(this.scene.pinned, first - room), last: Math.min(this.scene.rows, last + room),
        from: (this.from - wide / 2) * 1e3, to: (this.to + wide / 2) * 1e3, columns: Math.ceil(this.width * 2),
      };
      const asked = (this.coming = {
        first_row: reach.first, rows: reach.last - reach.first, window: [reach.from / 1e3, reach.to / 1e3, reach.columns],
      });
      try {
        const spans = data().unpack(await (await this.ask("spans", { op: "", at: "", ...reach })).arrayBuffer());
        if (asked !== this.coming) return;
        this.spans = spans;
      } finally {
        if (asked === this.coming) this.coming = null;
      }
      if (this.pinned) this.marks = data().named(this.scene, this.spans, this.pinned);
      this.frame();
    }

    // True where what is loaded, or on its way, does not cover the view as finely as it could be drawn.
    stale() {
      const best = this.coming || this.spans;
      if (this.scene.whole || !best) return !best;
      const [first, last] = this.visible(), { first_row: from, rows, window: loaded } = best;
      const fine = (loaded[1] - loaded[0]) / loaded[2] <= ((this.to - this.from) / this.width) * 1.02;
      const inside = this.from >= loaded[0] && this.to <= loaded[1];
      return !(first >= from && last <= from + rows && inside && fine);
    }

    // ---- drawing

    resize() {
      const ratio = window.devicePixelRatio || 1;
      element("timeline-host").dataset.ready = "true";
      paint().fit(this.scroll.clientWidth);
      const { scene } = this, over = document.fullscreenElement ? this.scroll.getBoundingClientRect().top + 24 : window.innerHeight * 0.2;
      const most = Math.max(360, window.innerHeight - over), around = paint().AXIS + paint().foot(scene);
      scene.block = paint().fitted(scene.lines, scene.rows, most - around, scene.names);
      paint().place(scene);
      const total = scene.tops[scene.rows] + around;
      this.height = Math.max(160, Math.min(total, most));
      this.scroll.style.height = `${this.height}px`;
      element("timeline-sizer").style.height = `${Math.max(0, total - this.height)}px`;
      this.width = Math.max(100, this.scroll.clientWidth - paint().LABELS);
      this.tall = Math.min(64, Math.max(36, this.scene.workers * 4));
      for (const [canvas, height] of [[this.canvas, this.height], [this.small, this.tall]]) {
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
        paint().draw(this.canvas.getContext("2d"), this.scene, view, this.spans, this.marks, this.handed);
        const room = { labels: paint().LABELS, top: paint().scrolls(this.scene), foot: paint().foot(this.scene) };
        if (this.path) path().draw(this.canvas.getContext("2d"), this.scene, view, this.path, room);
        paint().overview(this.small.getContext("2d"), this.scene, this.width + paint().LABELS, this.tall, view);
        this.frame_ms = performance.now() - began;
        if (this.spans) element("timeline-host").dataset.painted = String(this.spans.start.length);
      });
    }

    // ---- moving

    show(from, to) {
      const wide = Math.min(Math.max(to - from, SHORTEST), (this.longest - this.earliest) * 1.5);
      const middle = Math.min(Math.max((from + to) / 2, this.earliest), this.longest);
      this.from = middle - wide / 2;
      this.to = middle + wide / 2;
      this.moved();
    }

    // Something to show at once, finer spans while still moving (one request at a time), the rest once it stops.
    moved() {
      this.frame();
      if (this.scene && !this.coming && this.stale()) this.guarded(() => this.fetchSpans());
      this.settleSoon();
    }

    zoom(factor, x) {
      const share = x === undefined ? 0.5 : Math.min(Math.max((x - paint().LABELS) / this.width, 0), 1);
      const wide = Math.max((this.to - this.from) * factor, SHORTEST), at = this.from + share * (this.to - this.from);
      this.show(at - share * wide, at + (1 - share) * wide);
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

    // The slowest worker, where it is not in sight anyway: it is what people come for.
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

    // The view rests: the address follows, finer spans are fetched, the table lists what is shown.
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
        this.scene.finds = data().finder(this.scene, this.state.find || "");
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
    under(x, y) {
      const place = this.scene && this.spans && x >= paint().LABELS ? rows().at(this, y) : null;
      if (!place) return null;
      return data().under(this.scene, this.spans, this.time(x), (3 / this.width) * (this.to - this.from), place.row, place.inside);
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
      await this.tell(name, true);
    }

    // The op of the address, which the step need not have.
    async reopen(name) {
      if (!this.scene.whole || data().named(this.scene, this.spans, name).length) await this.pin(name);
      else this.say(`The op ${name} of the address is not in this view.`);
    }

    unpin() {
      this.pinned = null;
      this.state.op = null;
      this.marks = this.handed = [];
      this.frame();
      panel().clear();
      window.tracekit.remember({ op: null });
    }

    // The op, then the range.
    letGo() {
      if (this.pinned || !this.state.range) this.unpin();
      else range().select(this, 0, 0, true);
      this.settleSoon(); // the sums, where an op stood in their place
    }

    async tell(name, kept) {
      const told = (this.told = (this.told || 0) + 1);
      const found = await (await this.ask("op", { op: name, at: "", from: "", to: "" })).json();
      const aside = element("timeline-details");
      if (told !== this.told || !aside) return;
      if (kept) this.handed = found.arrows;
      this.frame();
      panel().details(aside, found);
      delete aside.dataset.sums;
      aside.dataset.op = name;
      aside.dataset.kept = String(kept);
    }

    // The op after or before the pinned one on its track; the first in the window where none is.
    async next(by) {
      let row = this.visible()[0], line = 0, at = -1;
      if (this.marks.length) ({ row, line, at } = this.marks[0]);
      const [begin, end] = data().range(this.scene, this.spans, row, line), { finds } = this.scene;
      if (at < 0) {
        for (at = begin; at < end && this.spans.start[at] < this.from; ) at += 1;
      } else {
        at += by;
      }
      while (finds && at >= begin && at < end && !finds(this.spans, at)) at += by;
      if (at < begin || at >= end) return;
      const mark = data().mark(this.scene, this.spans, row, line, at);
      if (mark.start < this.from || mark.start + mark.duration > this.to) {
        const wide = Math.max(this.to - this.from, mark.duration * 1.2), middle = mark.start + mark.duration / 2;
        this.show(middle - wide / 2, middle + wide / 2);
      }
      await this.pin(mark.name);
    }

    // ---- the table

    async list() {
      const query = this.query({ op: "", at: "" });
      if (query === this.listed) return;
      this.listed = query;
      const found = await (await this.ask("slowest", { op: "", at: "" })).json(), place = element("timeline-slowest");
      if (!place) return;
      element("timeline-csv").href = window.tracekit.at(`/timeline/slowest.csv?${query}`);
      this.found = found.rows.map((row) => row.name);
      place.replaceChildren(panel().table(found.heads, found.rows, (name) => this.guarded(() => this.goTo(name)), 4));
    }

    // The ops that the table lists, one after the other.
    nextFound() {
      const { found = [] } = this, at = found.indexOf(this.pinned);
      if (found.length) this.guarded(() => this.goTo(found[(at + 1) % found.length]));
    }

    // Goes to an op, which may be of a group that is closed.
    async goTo(name) {
      if (data().position(this.scene, name) < 0) {
        await rows().open(this, name);
      }
      this.scrollTo(name);
      if (this.stale()) await this.fetchSpans();
      await this.pin(name);
      this.settle();
      this.scroll.focus();
    }

    // What the canvas shows, with a line that says of what.
    png() {
      if (!this.scene) return;
      const when = this.scene.started_at ? `, ${this.scene.started_at}` : "", what = this.scene.replays.join(" and ");
      const title = `${this.config.job}, step ${this.scene.step}${when}: ${what}`;
      panel().save(this.canvas, title, this.scene.colours, `timeline-step-${this.scene.step}.png`);
    }
  }

  window.tracekitTimeline = {
    mount(config) {
      if (timeline) timeline.close();
      timeline = new Timeline(config);
    },
    change(values) {
      if (timeline) timeline.change(values);
    },
    // For measuring: the one on the page.
    current: () => timeline,
  };
})();
