// The theme before anything is drawn: runs in the head of the document, so that no page flashes in the wrong one. Until a
// person chooses, it is that of the system; the server is told by a cookie, since it colours the figures.
(function () {
  "use strict";

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => /(?:^|; )theme=(light|dark)(?:;|$)/.exec(document.cookie);

  function follow() {
    const own = system.matches ? "dark" : "light";
    document.cookie = `system_theme=${own}; path=${document.documentElement.dataset.prefix}; samesite=lax`;
    document.documentElement.className = (chosen() || [null, own])[1];
  }

  follow();
  system.addEventListener("change", () => {
    follow();
    if (!chosen()) window.location.reload();
  });
})();
