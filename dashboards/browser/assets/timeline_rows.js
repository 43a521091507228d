// The rows of a timeline: which one is at a height, and what a click on its name does.
(function () {
  "use strict";

  const paint = () => window.tracekitTimelineDraw;
  const words = (text) => (text || "").split(" ").filter(Boolean);
  const isGroup = (scene, row) => Boolean(scene.groups[scene.group[row]]);

  // The worker of a row, or the first of its group, as the address names it.
  const worker = (scene, row) => `${scene.dp_rank[row]},${scene.pp_rank[row]}`;

  // Whether the workers of a group have rows of their own, below it.
  const isOpen = (scene, row) => row + 1 < scene.rows && !isGroup(scene, row + 1);

  // The row at a height of the canvas, and how far down in it that is; null where there is none.
  function at(timeline, y) {
    const { scene } = timeline, fixed = y < paint().scrolls(scene);
    const down = y - paint().AXIS + (fixed ? 0 : timeline.scroll.scrollTop), row = paint().rowAt(scene, down);
    if (y < paint().AXIS || y > timeline.height - paint().foot(scene) || down >= scene.tops[scene.rows]) return null;
    return { row: row, inside: down - scene.tops[row] };
  }

  function arrange(timeline, name, workers) {
    timeline.state[name] = workers.join(" ") || null;
    window.tracekit.remember({ [name]: timeline.state[name] });
    return timeline.load(true);
  }

  // Pins a worker on top, or no longer; of too many, the first one goes.
  function pin(timeline, name) {
    const one = name.split(",").slice(0, 2).join(","), pins = words(timeline.state.pin), others = pins.filter((each) => each !== one);
    return arrange(timeline, "pin", others.length < pins.length ? others : [...others, one].slice(-timeline.config.most_pinned));
  }

  // Opens the group of a worker, or of a row that is closed; closes one that is open.
  const open = (timeline, name) => arrange(timeline, "open", [...words(timeline.state.open), name.split(",").slice(0, 2).join(",")]);

  function close(timeline, row) {
    const { scene } = timeline, members = new Set();
    for (let below = row + 1; below < scene.rows && !isGroup(scene, below); below += 1) members.add(worker(scene, below));
    return arrange(timeline, "open", words(timeline.state.open).filter((one) => !members.has(one)));
  }

  function toggle(timeline, row) {
    const { scene } = timeline, name = worker(scene, row);
    if (!isGroup(scene, row)) return pin(timeline, name);
    return isOpen(scene, row) ? close(timeline, row) : open(timeline, name);
  }

  // What a click on the name of a row does, in words.
  function hint(scene, row) {
    if (!isGroup(scene, row)) return row < scene.pinned ? "Click to unpin this row" : "Click to pin this row on top";
    const what = `${scene.groups[scene.group[row]]}: the slowest op at each moment of ${scene.members[row]}`;
    return `${what}. Click to ${isOpen(scene, row) ? "close" : "open"}`;
  }

  window.tracekitTimelineRows = { isGroup, isOpen, worker, at, pin, open, toggle, hint };
})();
