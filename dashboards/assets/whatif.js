// The controls of the page What-if write the selection, in the language of `tracekit whatif --fix`.
(function () {
  "use strict";

  function part(name, value) {
    const text = (value || "").replace(/\s+/g, "");
    return text ? [`${name}=${text}`] : [];
  }

  function workers(value) {
    const named = (value || "")
      .replace(/\s*,\s*/g, ",")
      .split(/[\s;()]+/)
      .filter(Boolean)
      .map((worker) => `worker=${worker}`);
    return named.length > 1 ? [`(${named.join(" or ")})`] : named;
  }

  let written = null;

  // Empty controls only take away what controls wrote: they are empty too beside a selection that they cannot show.
  function write(kinds, stages, dpRanks, places, steps, microbatches, slowest, current) {
    const text = [
      ...part("kind", (kinds || []).join(",")),
      ...part("stage", stages),
      ...part("dp_rank", dpRanks),
      ...workers(places),
      ...part("step", steps),
      ...part("microbatch", microbatches),
      ...part("slowest", slowest ? `${slowest.replace(/%/g, "")}%` : ""),
    ].join(" and ");
    if (!text && current !== written) {
      return window.dash_clientside.no_update;
    }
    written = text;
    return text;
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, { whatif: { write: write } });
})();
