// Sets the theme in the head of the document, so that no page flashes in the wrong one: that of the system until a person
// chooses. A cookie tells the server, which colours the figures.
(function () {
  "use strict";

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => /(?:^|; )theme=(light|dark)(?:;|$)/.exec(document.cookie);

  function follow() {
    const systemTheme = system.matches ? "dark" : "light";
    document.cookie = `system_theme=${systemTheme}; path=${document.documentElement.dataset.prefix}; samesite=lax`;
    document.documentElement.className = (chosen() || [null, systemTheme])[1];
  }

  follow();
  system.addEventListener("change", () => {
    follow();
    if (!chosen()) window.location.reload();
  });
})();
