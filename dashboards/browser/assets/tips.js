// Shows the meaning of a term while the pointer or the focus is on it, until Escape.
(function () {
  "use strict";

  const GAP_PX = 6;
  let tip = null, term = null;

  function show(target) {
    if (target === term) return;
    hide();
    term = target;
    tip = window.tracekit.make("div", { id: "tip", role: "tooltip", textContent: term.dataset.tip });
    (document.querySelector(".frame") || document.body).append(tip);
    term.setAttribute("aria-describedby", "tip");
    const termBox = term.getBoundingClientRect(), tipBox = tip.getBoundingClientRect();
    const above = termBox.top - tipBox.height - GAP_PX;
    tip.style.left = `${Math.max(GAP_PX, Math.min(termBox.left, window.innerWidth - tipBox.width - GAP_PX))}px`;
    tip.style.top = `${above > 0 ? above : termBox.bottom + GAP_PX}px`;
  }

  function hide() {
    if (!term) return;
    term.removeAttribute("aria-describedby");
    tip.remove();
    term = tip = null;
  }

  const termOf = (event) => event.target instanceof Element && event.target.closest("[data-tip]");
  for (const kind of ["pointerover", "focusin"]) {
    document.addEventListener(kind, (event) => (termOf(event) ? show(termOf(event)) : event.target === tip || hide()));
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
})();
