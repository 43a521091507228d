// The menu Share of a job: copies the answer, with the address of the page as it is now.
(function () {
  "use strict";

  const ADDRESS = /\ue000/g;

  // Pages that are not served from this machine or by https have no clipboard of their own.
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = window.tracekit.make("textarea", { value: text });
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    if (!copied) throw new Error("this browser does not allow it");
  }

  document.addEventListener("click", async function (event) {
    const button = event.target.closest("button[data-copy]"), open = document.querySelector("details.share[open]");
    if (open && !open.contains(event.target)) open.open = false;
    if (!button) return;
    const said = button.parentElement.querySelector("[role=status]");
    const address = window.location.href.replace(/[()]/g, (one) => (one === "(" ? "%28" : "%29"));
    try {
      await copy(button.dataset.copy.replace(ADDRESS, address));
      said.textContent = "Copied";
    } catch (error) {
      said.textContent = `Not copied: ${error.message}`;
    }
  });

  document.addEventListener("keydown", function (event) {
    const open = document.querySelector("details.share[open]");
    if (event.key === "Escape" && open) open.open = false;
  });
})();
