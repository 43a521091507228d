// Refreshes pages about running jobs: once the store has changed, React updates what differs, so the reader keeps their
// place.
(function () {
  "use strict";

  const POLL_MS = 3000;
  const REFRESHED = ["/", "/job", "/time", "/incidents", "/hosts"];
  let redrawnFor = null;

  const path = () => (document.getElementById("page") || { dataset: {} }).dataset.page;
  const windowChosen = () => new URLSearchParams(window.location.search).has("window");

  // A chosen window does not change, and a page is not refreshed while somebody types in it.
  function refreshable() {
    const busy = document.activeElement && document.activeElement.matches("input, textarea, select");
    return !document.hidden && REFRESHED.includes(path()) && !windowChosen() && !busy;
  }

  async function poll() {
    if (refreshable()) {
      try {
        const answer = await window.fetch(window.tracekit.at("/state"), { cache: "no-store" });
        const state = answer.ok ? await answer.text() : null;
        const shownState = document.getElementById("page").dataset.state; // the store as it was when the page was made
        if (state !== null && shownState && state !== shownState && state !== redrawnFor && refreshable()) {
          redrawnFor = state;
          window.tracekit.redraw();
        }
      } catch (error) {
        // the server does not answer: the badges show the age
      }
    }
    window.setTimeout(poll, POLL_MS);
  }

  // The text of a duration, as pages/job.py writes it.
  function durationText(seconds) {
    const [unit, length] = [["days", 86400], ["h", 3600], ["min", 60]].find(([, unitSeconds]) => seconds >= 2 * unitSeconds) || ["s", 1];
    return `${Math.floor(seconds / length)} ${unit}`;
  }

  function updateAges() {
    for (const badge of document.querySelectorAll("[data-added-at]")) {
      const seconds = Date.now() / 1000 - Number(badge.dataset.addedAt);
      const stale = seconds > Number(badge.dataset.staleAfter);
      badge.textContent = `${stale ? "stale" : "live"}: newest window ${durationText(Math.max(0, seconds))} ago`;
      badge.className = stale ? "badge slow loud" : "badge fine";
    }
  }

  window.setInterval(updateAges, 1000);
  window.setTimeout(poll, POLL_MS);
})();
