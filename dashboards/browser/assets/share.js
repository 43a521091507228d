// The menu Share of a job: copies the answer, with the address of the page as it is now.
(function () {
  "use strict";

  const ADDRESS = /\ue000/g;

  // Only pages from this machine or over https have `navigator.clipboard`.
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const textarea = window.tracekit.make("textarea", { value: text });
    document.body.append(textarea);
    textarea.select();
    const copied = document.execCommand("copy");
    textarea.remove();
    if (!copied) throw new Error("this browser does not allow it");
  }

  document.addEventListener("click", async function (event) {
    const button = event.target.closest("button[data-copy]"), menu = document.querySelector("details.share[open]");
    if (menu && !menu.contains(event.target)) menu.open = false;
    if (!button) return;
    const status = button.parentElement.querySelector("[role=status]");
    const address = window.location.href.replace(/[()]/g, (bracket) => (bracket === "(" ? "%28" : "%29"));
    try {
      await copy(button.dataset.copy.replace(ADDRESS, address));
      status.textContent = "Copied";
    } catch (error) {
      status.textContent = `Not copied: ${error.message}`;
    }
  });

  document.addEventListener("keydown", function (event) {
    const menu = document.querySelector("details.share[open]");
    if (event.key === "Escape" && menu) menu.open = false;
  });
})();
