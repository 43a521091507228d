// The component Folded (ui/drawn.py): details whose content is drawn when they are opened first. Pages of recordings fold
// hundreds of rows, which would take the browser longer than all that it shows.
(function () {
  "use strict";

  function Folded({ children, className, open }) {
    const [drawn, draw] = React.useState(Boolean(open));
    const [summary, ...content] = children;
    const opened = (event) => { if (event.currentTarget.open) draw(true); };
    return React.createElement("details", { className: className, open: open, onToggle: opened }, summary, drawn && content);
  }

  window.tracekit_folded = { Folded: Folded };
})();
