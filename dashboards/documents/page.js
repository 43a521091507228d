"use strict";
// The slowest steps on a canvas: each worker's recorded ops over its ideal ones. The address picks rank and step, as
// in #rank=9&step=105. In: the JSON of worst_steps.py. Everything from it is shown as text, never as markup.
(function () {
  const data = JSON.parse(document.getElementById("worst-steps").textContent);
  const byId = (id) => document.getElementById(id);
  const canvas = byId("timeline-canvas"), note = byId("timeline-note"), opNote = byId("timeline-op"), controls = byId("timeline-controls");
  const CLASSES = ["forward", "backward", "communication", "other"];
  const LEFT = 76, LANE = 12, ROW = 32, HEAD = 18, MOST_ZOOM = 2000;
  const state = { step: 0, rank: null, from: 0, to: 1, spans: [] };

  const seconds = (us) => Math.abs(us) >= 1e6 ? (us / 1e6).toFixed(2) + " s" : Math.abs(us) >= 1e3 ? (us / 1e3).toFixed(1) + " ms" : us + " us";
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  function button(text, press, pressed) {
    const element = document.createElement("button");
    element.type = "button";
    element.textContent = text;
    if (pressed !== undefined) element.setAttribute("aria-pressed", String(pressed));
    element.addEventListener("click", press);
    controls.append(element);
  }

  function remember() {
    const parts = state.rank === null ? [] : ["rank=" + state.rank];
    history.replaceState(null, "", "#" + parts.concat("step=" + data.steps[state.step].step).join("&"));
    show();
  }

  // Shows the step and rank of the address, and notes what this file lacks.
  function read() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    const missing = [];
    state.rank = null;
    if (parameters.has("step")) {
      const step = data.steps.findIndex((entry) => String(entry.step) === parameters.get("step"));
      if (step >= 0) choose(step);
      else missing.push("step " + parameters.get("step") + " is not in this file, which holds the slowest: " + data.steps.map((entry) => entry.step).join(", "));
    }
    if (parameters.has("rank")) {
      const wanted = parameters.get("rank");
      const hasRow = data.workers.some((entry) => String(entry.rank) === wanted);
      const hasCell = Array.from(document.querySelectorAll("[data-rank]")).some((entry) => entry.dataset.rank === wanted);
      if (hasRow || hasCell) state.rank = Number(wanted);
      if (!hasRow) missing.push("rank " + wanted + " has no row below");
    }
    note.textContent = missing.join("; ");
    show();
    if (parameters.has("rank") || parameters.has("step")) byId("timeline").scrollIntoView();
  }

  function choose(step) {
    const times = data.steps[step];
    state.step = step;
    state.from = Math.min(firstStart(times.recorded), firstStart(times.ideal));
    state.to = Math.max(times.recorded_us, times.ideal_us, 1);
  }

  const firstStart = (flat) => { let first = 0; for (let i = 2; i < flat.length; i += 4) first = Math.min(first, flat[i]); return first; };

  function show() {
    controls.replaceChildren();
    data.steps.forEach((entry, step) => button("step " + entry.step + ", " + seconds(entry.recorded_us), () => { choose(step); remember(); }, step === state.step));
    button("+", () => zoom(2));
    button("\u2212", () => zoom(0.5));
    button("whole step", () => { choose(state.step); draw(); });
    const legend = document.createElement("span");
    legend.className = "legend";
    CLASSES.forEach((name) => {
      const part = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = "var(--" + name + ")";
      part.append(mark, name);
      legend.append(part);
    });
    controls.append(legend);
    document.querySelectorAll("[data-rank]").forEach((entry) => entry.classList.toggle("picked", Number(entry.dataset.rank) === state.rank));
    document.querySelectorAll("[data-step]").forEach((entry) => {
      entry.classList.toggle("shown", data.steps.some((step) => String(step.step) === entry.dataset.step));
      entry.classList.toggle("picked", entry.dataset.step === String(data.steps[state.step].step));
    });
    draw();
  }

  function draw() {
    const width = canvas.clientWidth, height = HEAD + data.workers.length * ROW, scale = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = width * scale;
    canvas.height = height * scale;
    const paint = canvas.getContext("2d");
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.font = "12px system-ui, sans-serif";
    const x = (us) => LEFT + (us - state.from) / (state.to - state.from) * (width - LEFT);
    const colours = CLASSES.map(colour), text = colour("text"), dim = colour("dim"), pick = colour("pick");
    state.spans = [];
    ["recorded", "ideal"].forEach((replay, lane) => {
      const flat = data.steps[state.step][replay];
      paint.globalAlpha = lane ? 0.55 : 1;
      for (let i = 0; i < flat.length; i += 4) {
        const left = Math.max(x(flat[i + 2]), LEFT), right = Math.min(x(flat[i + 2] + flat[i + 3]), width);
        if (right < LEFT || left > width) continue;
        const top = HEAD + flat[i] * ROW + lane * (LANE + 1), size = Math.max(right - left - 0.5, 0.7);
        paint.fillStyle = colours[data.kinds[flat[i + 1]].class];
        paint.fillRect(left, top, size, LANE);
        state.spans.push([left, top, size, replay, i]);
      }
    });
    paint.globalAlpha = 1;
    paint.clearRect(0, 0, LEFT, height);
    data.workers.forEach((worker, row) => {
      const picked = worker.rank !== null && worker.rank === state.rank;
      paint.fillStyle = picked ? pick : text;
      paint.fillText(worker.rank === null ? "(" + worker.dp_rank + "," + worker.pp_rank + ")" : "rank " + worker.rank, 0, HEAD + row * ROW + 11);
      paint.fillStyle = dim;
      paint.fillText("alone costs " + Math.round(100 * (1 - 1 / worker.slowdown)) + "%", 0, HEAD + row * ROW + 24);
      if (picked) { paint.strokeStyle = pick; paint.lineWidth = 2; paint.strokeRect(LEFT - 1, HEAD + row * ROW - 2, width - LEFT, 2 * LANE + 5); }
    });
    paint.fillStyle = dim;
    paint.fillText(seconds(Math.round(state.from)), LEFT, 11);
    const end = seconds(Math.round(state.to));
    paint.fillText(end, width - paint.measureText(end).width, 11);
  }

  function zoom(factor) {
    const step_us = data.steps[state.step].recorded_us, middle = (state.from + state.to) / 2;
    const span = Math.min(Math.max((state.to - state.from) / factor, step_us / MOST_ZOOM), 2 * step_us);
    [state.from, state.to] = [middle - span / 2, middle + span / 2];
    draw();
  }

  function move(share) {
    const by = (state.to - state.from) * share;
    [state.from, state.to] = [state.from + by, state.to + by];
    draw();
  }

  function tell(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const hit = state.spans.findLast(([left, top, size]) => x >= left - 1 && x <= left + size + 1 && y >= top && y <= top + LANE);
    if (!hit) return;
    const flat = data.steps[state.step][hit[3]], i = hit[4], worker = data.workers[flat[i]];
    opNote.textContent = (worker.rank === null ? "worker" : "rank " + worker.rank) + " (dp " + worker.dp_rank + ", stage " + worker.pp_rank + "), " +
      hit[3] + ": " + data.kinds[flat[i + 1]].name + ", " + seconds(flat[i + 3]) + " from " + seconds(flat[i + 2]) + " on";
  }

  let drag = null;
  canvas.addEventListener("pointermove", (event) => {
    if (drag !== null && event.buttons) { move((drag - event.clientX) / (canvas.clientWidth - LEFT)); drag = event.clientX; } else tell(event);
  });
  canvas.addEventListener("pointerdown", (event) => { drag = event.clientX; tell(event); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: () => move(-0.2), a: () => move(-0.2), ArrowRight: () => move(0.2), d: () => move(0.2), "+": () => zoom(2), w: () => zoom(2), "-": () => zoom(0.5), s: () => zoom(0.5) };
    if (!event.ctrlKey && !event.metaKey && keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  document.querySelectorAll("[data-rank]").forEach((cell) => cell.addEventListener("click", () => { state.rank = Number(cell.dataset.rank); remember(); }));
  document.querySelectorAll("[data-step]").forEach((button) => button.addEventListener("click", () => {
    const step = data.steps.findIndex((entry) => String(entry.step) === button.dataset.step);
    if (step >= 0) { choose(step); remember(); }
  }));
  window.addEventListener("hashchange", read);
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  if (data.left_out) opNote.textContent = data.left_out.toLocaleString("en") + " of the shortest ops are left out.";
  choose(0);
  read();
})();
