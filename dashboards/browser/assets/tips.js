// What a word means, beside the word: while it is pointed at or has the focus, until Escape.
(function () {
  "use strict";

  const GAP_PX = 6;
  let tip = null, word = null;

  function show(target) {
    if (target === word) return;
    hide();
    word = target;
    tip = window.tracekit.make("div", { id: "tip", role: "tooltip", textContent: word.dataset.tip });
    (document.querySelector(".frame") || document.body).append(tip);
    word.setAttribute("aria-describedby", "tip");
    const at = word.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const above = at.top - own.height - GAP_PX;
    tip.style.left = `${Math.max(GAP_PX, Math.min(at.left, window.innerWidth - own.width - GAP_PX))}px`;
    tip.style.top = `${above > 0 ? above : at.bottom + GAP_PX}px`;
  }

  function hide() {
    if (!word) return;
    word.removeAttribute("aria-describedby");
    tip.remove();
    word = tip = null;
  }

  const under = (event) => event.target instanceof Element && event.target.closest("[data-tip]");
  for (const kind of ["pointerover", "focusin"]) {
    document.addEventListener(kind, (event) => (under(event) ? show(under(event)) : event.target === tip || hide()));
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
})();
