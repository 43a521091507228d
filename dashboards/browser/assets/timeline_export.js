// "Open in Perfetto": shows progress until the download starts, because the server takes a while for a large step.
(function () {
  "use strict";

  const SECOND = 1000;

  // Shows `text` and the seconds so far, which screen readers skip; returns a function that stops the clock.
  function progress(status, text) {
    const began = Date.now(), clock = document.createElement("span");
    clock.setAttribute("aria-hidden", "true");
    const tick = () => (clock.textContent = ` ${Math.round((Date.now() - began) / SECOND)} s`);
    tick();
    status.replaceChildren(`${text} ...`, clock);
    const ticking = setInterval(tick, SECOND);
    return () => clearInterval(ticking);
  }

  async function fetched(address) {
    const answer = await window.tracekit.answer(address);
    const named = /filename="?([^";]+)/.exec(answer.headers.get("Content-Disposition") || "");
    return [await answer.blob(), named ? named[1] : "timeline.json.gz"];
  }

  async function write(link) {
    const status = document.getElementById("timeline-export-said");
    const stop = progress(status, "Writing the file for Perfetto");
    link.setAttribute("aria-busy", "true");
    try {
      window.tracekit.save(...(await fetched(link.href)));
      status.textContent = "";
    } catch (error) {
      const why = error instanceof TypeError ? "The server does not answer; try again." : error.message;
      status.textContent = `No file for Perfetto: ${why}`;
    } finally {
      stop();
      link.removeAttribute("aria-busy");
    }
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("#timeline-perfetto");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (!link.hasAttribute("aria-busy")) write(link);
  });
})();
