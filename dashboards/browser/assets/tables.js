// Tables that fit: a column whose cells wrap is at least LEAST_PX wide, one of sentences READABLE_PX, one with a heading
// of several words HEAD_PX. Where a table has no room for that, panels side by side come below each other (`data-single`
// in tracekit.css). A table that still has none, and any on a phone, becomes blocks (`data-stacked`): one for each row,
// in which every cell but the first names its column, and cells without a value are left out.
(function () {
  "use strict";

  const LEAST_PX = 120, READABLE_PX = 360, HEAD_PX = 100, PHONE_PX = 700;
  const LONG_PX = 300, SENTENCE_PX = 480, HEAD_LETTERS = 12;

  // The widths of the columns if no cell wrapped; none if every row has a cell that spans columns.
  function naturalWidths(table) {
    const row = [...table.tBodies[0].rows].find((other) => other.cells.length === table.tHead.rows[0].cells.length);
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
    const widths = naturalWidths(table), heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const least = Math.min(widths[column] || 0, widths[column] > SENTENCE_PX ? READABLE_PX : LEAST_PX);
      head.style.minWidth = `${Math.max(least, head.textContent.length > HEAD_LETTERS ? HEAD_PX : 0)}px`;
    });
    if (window.innerWidth >= PHONE_PX && frame.scrollWidth <= frame.clientWidth) return;
    const row = frame.closest(".row:not([data-single])");
    if (window.innerWidth >= PHONE_PX && row) {
      row.dataset.single = "";
      row.querySelectorAll(".stacked").forEach(fit);
      return;
    }
    frame.dataset.stacked = "";
    for (const row of table.tBodies[0].rows) {
      for (const [column, cell] of [...row.cells].entries()) {
        cell.toggleAttribute("data-long", widths[column] > LONG_PX);
        cell.toggleAttribute("data-empty", cell.textContent.trim() === "-");
      }
    }
  }

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
  // Shows the kernels and operators of the page Job that contain a text, and says how many these are.
  function filterNames(text) {
    const wanted = (text || "").toLowerCase(), rows = [...document.querySelectorAll("#names tbody tr")];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    window.tracekit.remember({ q: text });
    return wanted ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
  }

  window.dash_clientside = { ...window.dash_clientside, tables: { filterNames } };
  window.addEventListener("resize", () => {
    document.querySelectorAll(".row[data-single]").forEach((row) => delete row.dataset.single);
    document.querySelectorAll(".stacked").forEach(fit);
  });
})();
