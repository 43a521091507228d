// "Open in Perfetto": the file of a large step takes the server a while, so the page says that it is being written, until
// the download starts, or why it does not.
(function () {
  "use strict";

  const SECOND = 1000;

  // Says `text` and how long it takes, counting for the eye only; returns what ends that.
  function progress(said, text) {
    const began = Date.now(), clock = document.createElement("span");
    clock.setAttribute("aria-hidden", "true");
    const tick = () => (clock.textContent = ` ${Math.round((Date.now() - began) / SECOND)} s`);
    tick();
    said.replaceChildren(`${text} ...`, clock);
    const ticking = setInterval(tick, SECOND);
    return () => clearInterval(ticking);
  }

  async function fetched(address) {
    const answer = await window.tracekit.answer(address);
    const named = /filename="?([^";]+)/.exec(answer.headers.get("Content-Disposition") || "");
    return [await answer.blob(), named ? named[1] : "timeline.json.gz"];
  }

  async function write(link) {
    const said = document.getElementById("timeline-export-said");
    const stop = progress(said, "Writing the file for Perfetto");
    link.setAttribute("aria-busy", "true");
    try {
      window.tracekit.save(...(await fetched(link.href)));
      said.textContent = "";
    } catch (error) {
      const why = error instanceof TypeError ? "The server does not answer; try again." : error.message;
      said.textContent = `No file for Perfetto: ${why}`;
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
