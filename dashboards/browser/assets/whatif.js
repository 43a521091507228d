// The page What-if: its controls write a selection as `tracekit whatif --fix` takes it, its buttons change its state.
(function () {
  "use strict";

  function part(name, value) {
    const text = (value || "").replace(/\s+/g, "");
    return text ? [`${name}=${text}`] : [];
  }

  function workers(value) {
    const selections = (value || "")
      .replace(/\s*,\s*/g, ",")
      .split(/[\s;()]+/)
      .filter(Boolean)
      .map((worker) => `worker=${worker}`);
    return selections.length > 1 ? [`(${selections.join(" or ")})`] : selections;
  }

  let lastWritten = null;

  // Empty controls clear only a selection that controls wrote: for one that they cannot show, they are empty, too.
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
    if (!text && current !== lastWritten) {
      return window.dash_clientside.no_update;
    }
    lastWritten = text;
    return text;
  }

  function open() {
    const form = document.getElementById("whatif-own"); // only a form that is folded has it
    if (form) form.open = true;
  }

  const DRAWN_MS = 50;
  let scrollToAnswer = false; // whether the answer to a question just asked may lie above the screen

  // Runs with each answer. Marks the field as invalid for screen readers, too.
  function markInvalid(invalid) {
    const field = document.getElementById("whatif-select");
    field.setAttribute("aria-invalid", String(Boolean(invalid)));
    field.setAttribute("aria-describedby", "whatif-wrong");
    if (invalid) open();
    if (scrollToAnswer) setTimeout(() => document.getElementById("whatif-answer")?.scrollIntoView({ block: "nearest" }), DRAWN_MS);
    scrollToAnswer = false;
    return window.dash_clientside.no_update;
  }

  // ---- the state of the page

  const property = (id, name) => window.dash_component_api.getLayout(id).props[name];
  const setProperty = (id, name, value) => window.dash_clientside.set_props(id, { [name]: value });

  // Changes the state here, not on the server: Dash keeps only the last of several calls of a callback, so the buttons of
  // an answer that arrives would make it drop a click in flight.
  function change(changes, shortens) {
    const limit = property("whatif-limit", "data"), state = property("whatif-state", "data");
    const { remarks, ...next } = { ...state, ...changes };
    const texts = Object.entries(next).filter(([, value]) => value);
    const tooLong = `/whatif?${new URLSearchParams(texts)}`.length > limit.characters && !shortens;
    setProperty("whatif-state", "data", tooLong ? { ...state, remarks: [limit.said] } : { ...next, remarks: [] });
  }

  // ---- answers that are not there yet

  const POLL_MS = 400, LOST_MS = 10000;
  let pollTimer;

  // Polls after each answer, never at fixed times: Dash drops the answer to a request that is repeated meanwhile, so a
  // busy server would never get through. Repeats a request that gets no answer.
  function askAgain(_, { pending }) {
    clearTimeout(pollTimer);
    if (pending) pollAfter(POLL_MS);
    return window.dash_clientside.no_update;
  }

  function pollAfter(pauseMs) {
    pollTimer = setTimeout(() => {
      if (!document.getElementById("whatif-answer")) return; // another page by now
      setProperty("whatif-asked", "data", property("whatif-asked", "data") + 1);
      pollAfter(LOST_MS);
    }, pauseMs);
  }

  function run() {
    scrollToAnswer = true;
    const action = property("whatif-action", "value");
    change({
      select: (property("whatif-select", "value") || "").split(/\s+/).filter(Boolean).join(" ") || null,
      action: action,
      factor: action === "scale" ? property("whatif-factor", "value") : null,
    });
  }

  function suggest({ select, action, factor }) {
    scrollToAnswer = true;
    setProperty("whatif-select", "value", select);
    setProperty("whatif-action", "value", action);
    if (factor) setProperty("whatif-factor", "value", factor);
    change({ select, action, factor: factor || null });
  }

  const keptQuestions = () => property("whatif-state", "data").beside.split(";").filter(Boolean);

  const actions = {
    run: run,
    suggest: suggest,
    edit: (question) => { open(); suggest(question); },
    keep: ({ asked }) => change({ beside: [...keptQuestions().filter((other) => other !== asked), asked].join(";") }),
    remove: ({ asked }) => change({ beside: keptQuestions().filter((other) => other !== asked).join(";") }, true),
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-whatif]");
    if (button) actions[button.dataset.whatif](button.dataset);
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing && event.target.matches("#whatif-select, #whatif-factor")) run();
  });

  const needsNoFactor = (action) => action !== "scale";

  function remember({ job, select, action, factor, beside }) {
    window.tracekit.remember({ job, select, action, factor, kept: beside });
  }

  const callbacks = { write, markInvalid, askAgain, needsNoFactor, remember };
  window.dash_clientside = { ...window.dash_clientside, whatif: callbacks };
})();
