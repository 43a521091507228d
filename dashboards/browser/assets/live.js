// Pages of what goes on refresh by themselves: once the store has changed, the page is asked for again and React puts
// what differs into the document, so that the reader stays where they are.
(function () {
  "use strict";

  const POLL_MS = 3000;
  const REFRESHED = ["/", "/job", "/time", "/incidents", "/hosts"];
  let asked = null;

  const path = () => (document.getElementById("page") || { dataset: {} }).dataset.page;
  const chosen = () => new URLSearchParams(window.location.search).has("window");

  // Of a window that was chosen nothing changes, and nothing is taken from under a person who writes.
  function wanted() {
    const busy = document.activeElement && document.activeElement.matches("input, textarea, select");
    return !document.hidden && REFRESHED.includes(path()) && !chosen() && !busy;
  }

  async function look() {
    if (wanted()) {
      try {
        const answer = await window.fetch(window.tracekit.at("/state"), { cache: "no-store" });
        const found = answer.ok ? await answer.text() : null;
        const drawn = document.getElementById("page").dataset.state; // the store as it was when the page was made
        if (found !== null && drawn && found !== drawn && found !== asked && wanted()) {
          asked = found;
          window.tracekit.redraw();
        }
      } catch (error) {
        // the server is away: the age of what is shown tells
      }
    }
    window.setTimeout(look, POLL_MS);
  }

  // As pages/job.py writes it.
  function span(seconds) {
    const [unit, each] = [["days", 86400], ["h", 3600], ["min", 60]].find(([, one]) => seconds >= 2 * one) || ["s", 1];
    return `${Math.floor(seconds / each)} ${unit}`;
  }

  function age() {
    for (const badge of document.querySelectorAll("[data-added-at]")) {
      const seconds = Date.now() / 1000 - Number(badge.dataset.addedAt);
      const stale = seconds > Number(badge.dataset.staleAfter);
      badge.textContent = `${stale ? "stale" : "live"}: newest window ${span(Math.max(0, seconds))} ago`;
      badge.className = stale ? "badge slow loud" : "badge fine";
    }
  }

  window.setInterval(age, 1000);
  window.setTimeout(look, POLL_MS);
})();
