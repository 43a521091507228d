// The page What-if. Its controls write the selection, in the language of `tracekit whatif --fix`; what a person asks,
// keeps or removes changes the state of the page.
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

  function open() {
    const form = document.getElementById("whatif-own"); // only a form that is folded has it
    if (form) form.open = true;
  }

  const DRAWN_MS = 50;
  let unseen = false; // whether the answer to a question just asked may lie above the screen

  // With each answer. The field says that it is wrong also to who cannot see the words below it.
  function doubt(wrong) {
    const field = document.getElementById("whatif-select");
    field.setAttribute("aria-invalid", String(Boolean(wrong)));
    field.setAttribute("aria-describedby", "whatif-wrong");
    if (wrong) open();
    if (unseen) setTimeout(() => document.getElementById("whatif-answer")?.scrollIntoView({ block: "nearest" }), DRAWN_MS);
    unseen = false;
    return window.dash_clientside.no_update;
  }

  // ---- the state of the page

  const property = (id, name) => window.dash_component_api.getLayout(id).props[name];
  const give = (id, name, value) => window.dash_clientside.set_props(id, { [name]: value });

  // Here and at once, not by an answer of the server: buttons that come with the answer to a running replay would make
  // Dash drop a click that is still on its way (it answers the last of several calls of one callback).
  function change(changes, shortens) {
    const limit = property("whatif-limit", "data"), state = property("whatif-state", "data");
    const { remarks, ...next } = { ...state, ...changes };
    const texts = Object.entries(next).filter(([, value]) => value);
    const tooLong = `/whatif?${new URLSearchParams(texts)}`.length > limit.characters && !shortens;
    give("whatif-state", "data", tooLong ? { ...state, remarks: [limit.said] } : { ...next, remarks: [] });
  }

  // ---- answers that are not there yet

  const POLL_MS = 400, LOST_MS = 10000;
  let asking;

  // The page asks again once it was answered, never at fixed times: Dash drops the answer to a question that was asked
  // once more meanwhile, and a busy server would never be heard. An answer that does not come is asked for again, too.
  function askAgain(at, { pending }) {
    clearTimeout(asking);
    if (pending) askAfter(POLL_MS);
    return window.dash_clientside.no_update;
  }

  function askAfter(pause) {
    asking = setTimeout(() => {
      if (!document.getElementById("whatif-answer")) return; // another page by now
      give("whatif-asked", "data", property("whatif-asked", "data") + 1);
      askAfter(LOST_MS);
    }, pause);
  }

  function run() {
    unseen = true;
    const action = property("whatif-action", "value");
    change({
      select: (property("whatif-select", "value") || "").split(/\s+/).filter(Boolean).join(" ") || null,
      action: action,
      factor: action === "scale" ? property("whatif-factor", "value") : null,
    });
  }

  function suggest({ select, action, factor }) {
    unseen = true;
    give("whatif-select", "value", select);
    give("whatif-action", "value", action);
    if (factor) give("whatif-factor", "value", factor);
    change({ select: select, action: action, factor: factor || null });
  }

  const beside = () => property("whatif-state", "data").beside.split(";").filter(Boolean);

  const actions = {
    run: run,
    suggest: suggest,
    edit: (question) => { open(); suggest(question); },
    keep: ({ asked }) => change({ beside: [...beside().filter((other) => other !== asked), asked].join(";") }),
    remove: ({ asked }) => change({ beside: beside().filter((other) => other !== asked).join(";") }, true),
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-whatif]");
    if (button) actions[button.dataset.whatif](button.dataset);
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing && event.target.matches("#whatif-select, #whatif-factor")) run();
  });

  window.dash_clientside = Object.assign({}, window.dash_clientside, { whatif: { write, doubt, askAgain } });
})();
