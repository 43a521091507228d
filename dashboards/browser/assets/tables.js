// Tables that fit: a column whose cells wrap is at least LEAST_PX wide. A table without room for that, and any on a
// phone, becomes blocks (`data-stacked` in tracekit.css): one for each row, in which every cell names its column.
(function () {
  "use strict";

  const LEAST_PX = 120, LONG_PX = 300, PHONE_PX = 700;

  // The widths of the columns if no cell wrapped; none if some cell spans several in every row.
  function natural(table) {
    const row = [...table.tBodies[0].rows].find((one) => one.cells.length === table.tHead.rows[0].cells.length);
    if (!row) return [];
    table.classList.add("measured");
    const widths = [...row.cells].map((cell) => cell.getBoundingClientRect().width);
    table.classList.remove("measured");
    return widths;
  }

  function fit(frame) {
    const table = frame.querySelector("table");
    if (!table || !table.tHead || !table.tBodies.length || !frame.clientWidth) return;
    delete frame.dataset.stacked;
    const widths = natural(table), heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, at) => { head.style.minWidth = `${Math.min(widths[at] || 0, LEAST_PX)}px`; });
    if (window.innerWidth >= PHONE_PX && frame.scrollWidth <= frame.clientWidth) return;
    frame.dataset.stacked = "";
    for (const row of table.tBodies[0].rows) {
      for (const [at, cell] of [...row.cells].entries()) cell.toggleAttribute("data-long", widths[at] > LONG_PX);
    }
  }

  const fitAll = (within) => within.querySelectorAll(".stacked").forEach(fit);
  new MutationObserver((changes) => {
    const frames = new Set();
    for (const { target, addedNodes } of changes) {
      if (target.closest(".stacked")) frames.add(target.closest(".stacked"));
      for (const node of target.matches("details") ? [target] : addedNodes) {
        if (node.matches?.(".stacked")) frames.add(node);
        node.querySelectorAll?.(".stacked").forEach((frame) => frames.add(frame));
      }
    }
    frames.forEach(fit);
  }).observe(document.documentElement, { childList: true, subtree: true, attributeFilter: ["open"] });
  window.addEventListener("resize", () => fitAll(document));
})();
