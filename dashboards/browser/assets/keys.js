// Keys of all pages: / finds a job, worker or host, ? lists the keys. Both are also buttons in the header.
(function () {
  "use strict";

  const PAUSE_MS = 120;
  const KEYS = [
    ["/", "find a job, rank, worker or host"],
    ["?", "show these keys"],
    ["g j", "all jobs"],
    ["j k", "next, previous row of jobs or incidents; Enter opens it"],
    ["a", "acknowledge the incident of the row"],
    ["Esc", "close, or let go of what is kept"],
    ["← →", "figure: previous, next point; Enter chooses it, 1 to 9 hide and show a series"],
    ["⇧ Enter", "map of workers: choose all from the last one chosen to this one"],
    ["w s", "timeline: zoom in, out (also + -)"],
    ["a d", "timeline: move left, right (also ← →)"],
    ["↑ ↓", "timeline: scroll the rows"],
    ["n p", "timeline: next, previous op"],
    ["r t f", "timeline: sums of what is shown, pin a row, full screen"],
    ["Home", "timeline: the whole step"],
  ];

  const make = (...element) => window.tracekit.make(...element);

  function open(id, label, ...children) {
    const old = document.getElementById(id);
    if (old) old.remove();
    const dialog = make("dialog", { id, className: "dialog" }, ...children);
    dialog.setAttribute("aria-label", label);
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    (document.querySelector(".frame") || document.body).append(dialog);
    dialog.showModal();
    return dialog;
  }

  function help() {
    const rows = KEYS.map(([key, meaning]) =>
      make("div", {}, make("dt", {}, make("kbd", { textContent: key })), make("dd", { textContent: meaning })),
    );
    const close = make("button", { textContent: "Close" });
    const dialog = open("help", "Keys", make("h2", { textContent: "Keys" }), make("dl", {}, ...rows), close);
    close.addEventListener("click", () => dialog.close());
  }

  window.tracekit_dialog = open;

  // ---- finding

  let searchTimer = 0, requests = 0;

  function find() {
    const field = make("input", { type: "search", placeholder: "job, rank 9, worker 1,2, host", autocomplete: "off" });
    field.setAttribute("aria-label", "Find a job, rank, worker or host");
    const list = make("ul", { id: "found" }), status = make("p", { className: "note" });
    status.setAttribute("role", "status");
    const dialog = open("finder", "Find", field, status, list);
    const search = async function () {
      const request = ++requests, job = new URLSearchParams(window.location.search).get("job");
      const query = new URLSearchParams({ q: field.value, ...(job ? { job } : {}) });
      const answer = await fetch(window.tracekit.at(`/search?${query}`));
      if (request !== requests || !dialog.open) return;
      const matches = answer.ok ? await answer.json() : [];
      const reason = answer.ok ? "Nothing has this name." : "The search does not answer.";
      status.textContent = matches.length || !field.value ? "" : reason;
      list.replaceChildren(...matches.map(entry));
    };
    field.addEventListener("input", function () {
      clearTimeout(searchTimer);
      searchTimer = setTimeout(search, PAUSE_MS);
    });
    dialog.addEventListener("keydown", (event) => moveFocus(event, field, list));
    dialog.addEventListener("click", (event) => event.target.closest("a") && dialog.close());
    search();
  }

  function entry({ text, kind, href }) {
    const link = make("a", { href }, make("bdi", { textContent: text }), make("span", { textContent: kind }));
    link.dataset.follow = "yes";
    return make("li", {}, link);
  }

  function moveFocus(event, field, list) {
    const links = [...list.querySelectorAll("a")], index = links.indexOf(document.activeElement);
    if (event.key === "Enter" && index < 0 && links.length) {
      event.preventDefault();
      links[0].click();
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const next = index + (event.key === "ArrowDown" ? 1 : -1);
      (links[Math.min(next, links.length - 1)] || field).focus();
    }
  }

  // ---- keys and buttons

  let lastKey = null;

  function focusRow(step) {
    const links = [...document.querySelectorAll("#jobs a.job, a.incident")], index = links.indexOf(document.activeElement);
    if (links.length) links[Math.min(Math.max(index + step, 0), links.length - 1)].focus();
  }

  document.addEventListener("keydown", function (event) {
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const allJobs = () => document.querySelector(".brand").click();
    const action = {
      "/": find, "?": help, j: lastKey === "g" ? allJobs : () => focusRow(1), k: () => focusRow(-1), a: window.tracekit_incidents.open,
    }[event.key];
    lastKey = event.key;
    if (!action) return;
    event.preventDefault();
    action();
  });
  document.addEventListener("click", function (event) {
    const button = event.target.closest("button");
    if (button && button.id === "find") find();
    if (button && button.id === "keys") help();
  });
})();
