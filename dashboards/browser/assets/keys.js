// Keys of all pages: / finds a job, worker or host, ? tells the keys. Both are also buttons in the header.
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
    const dialog = make("dialog", { id: id, className: "dialog" }, ...children);
    dialog.setAttribute("aria-label", label);
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    (document.querySelector(".frame") || document.body).append(dialog);
    dialog.showModal();
    return dialog;
  }

  function help() {
    const rows = KEYS.map(([key, words]) =>
      make("div", {}, make("dt", {}, make("kbd", { textContent: key })), make("dd", { textContent: words })),
    );
    const close = make("button", { textContent: "Close" });
    const dialog = open("help", "Keys", make("h2", { textContent: "Keys" }), make("dl", {}, ...rows), close);
    close.addEventListener("click", () => dialog.close());
  }

  window.tracekit_dialog = open;

  // ---- finding

  let waiting = 0, asked = 0;

  function find() {
    const field = make("input", { type: "search", placeholder: "job, rank 9, worker 1,2, host", autocomplete: "off" });
    field.setAttribute("aria-label", "Find a job, rank, worker or host");
    const list = make("ul", { id: "found" }), said = make("p", { className: "note" });
    said.setAttribute("role", "status");
    const dialog = open("finder", "Find", field, said, list);
    const ask = async function () {
      const mine = ++asked, job = new URLSearchParams(window.location.search).get("job");
      const query = new URLSearchParams({ q: field.value, ...(job ? { job: job } : {}) });
      const answer = await fetch(window.tracekit.at(`/search?${query}`));
      if (mine !== asked || !dialog.open) return;
      const found = answer.ok ? await answer.json() : [];
      const none = answer.ok ? "Nothing has this name." : "The search does not answer.";
      said.textContent = found.length || !field.value ? "" : none;
      list.replaceChildren(...found.map(entry));
    };
    field.addEventListener("input", function () {
      clearTimeout(waiting);
      waiting = setTimeout(ask, PAUSE_MS);
    });
    dialog.addEventListener("keydown", (event) => move(event, field, list));
    dialog.addEventListener("click", (event) => event.target.closest("a") && dialog.close());
    ask();
  }

  function entry({ text, kind, href }) {
    const link = make("a", { href: href }, make("bdi", { textContent: text }), make("span", { textContent: kind }));
    link.dataset.follow = "yes";
    return make("li", {}, link);
  }

  function move(event, field, list) {
    const links = [...list.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    if (event.key === "Enter" && at < 0 && links.length) {
      event.preventDefault();
      links[0].click();
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const next = at + (event.key === "ArrowDown" ? 1 : -1);
      (links[Math.min(next, links.length - 1)] || field).focus();
    }
  }

  // ---- keys and buttons

  let before = null;

  function row(by) {
    const links = [...document.querySelectorAll("#jobs a.job, a.incident")], at = links.indexOf(document.activeElement);
    if (links.length) links[Math.min(Math.max(at + by, 0), links.length - 1)].focus();
  }

  document.addEventListener("keydown", function (event) {
    const writes = event.target.closest("input, textarea, select, [contenteditable]");
    if (writes || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const all = () => document.querySelector(".brand").click();
    const act = {
      "/": find, "?": help, j: before === "g" ? all : () => row(1), k: () => row(-1), a: window.tracekit_incidents.open,
    }[event.key];
    before = event.key;
    if (!act) return;
    event.preventDefault();
    act();
  });
  document.addEventListener("click", function (event) {
    const button = event.target.closest("button");
    if (button && button.id === "find") find();
    if (button && button.id === "keys") help();
  });
})();
