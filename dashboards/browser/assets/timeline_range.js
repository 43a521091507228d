// A range of time selected in a timeline, and the sums by kind in the side panel.
(function () {
  "use strict";

  // The range in seconds, [from, to]; null for none.
  function of(state) {
    const found = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(state.range || "");
    return found ? [Number(found[1]) / 1e3, Number(found[2]) / 1e3] : null;
  }

  // Selects what is between two times, in seconds; nothing where they are equal. `done`: the person let go.
  function select(timeline, from, to, done) {
    const inside = (time) => Math.min(Math.max(time, timeline.earliest), timeline.longest);
    const [first, last] = [from, to].map((time) => Math.round(inside(time) * 1e6) / 1e3).sort((one, other) => one - other);
    timeline.state.range = first < last ? `${first}-${last}` : null;
    timeline.frame();
    if (!done) return;
    timeline.unpin();
    window.tracekit.remember({ range: timeline.state.range });
    timeline.guarded(() => sum(timeline));
  }

  // The sums of the range, or of what the search finds in view, where the panel does not show them; not of a range
  // that is still being drawn.
  async function sum(timeline) {
    if (timeline.held && timeline.held.selects) return;
    const { state } = timeline, aside = document.getElementById("timeline-details");
    const asked = timeline.query({ op: "", at: "", ...(state.range ? { from: "", to: "" } : {}) });
    if ((!state.range && !state.find) || asked === aside.dataset.sums) return;
    const told = (timeline.told = (timeline.told || 0) + 1);
    const found = await (await timeline.ask("sums", { op: "", at: "" })).json();
    if (told !== timeline.told || !aside.isConnected) return;
    window.tracekitTimelinePanel.sums(aside, found);
    delete aside.dataset.op;
    Object.assign(aside.dataset, { kept: "true", sums: asked });
  }

  window.tracekitTimelineRange = { of: of, select: select, sum: sum };
})();
