// Components of ui/components.py: the browser's own lists, radio buttons and boxes to tick; details; views of a table.
(function () {
  "use strict";

  const make = React.createElement;

  function Menu({ id, options, value, setProps }) {
    const items = options.map((one) => make("option", { key: one.value, value: one.value }, one.label));
    const choose = (event) => setProps({ value: event.target.value });
    return make("select", { id: id, value: value, onChange: choose, className: "field" }, items);
  }

  // `value` is a list where several can be chosen: in the order of the options, whatever was ticked first.
  function Choice({ id, options, value, setProps }) {
    const several = Array.isArray(value);
    const chosen = (one) => (several ? value.includes(one) : value === one);
    function choose(one) {
      const now = options.map((each) => each.value).filter((each) => (each === one) !== chosen(each));
      setProps({ value: several ? now : one });
    }
    const items = options.map((one) =>
      make("label", { key: one.value }, [
        make("input", {
          key: "box", type: several ? "checkbox" : "radio", name: id, value: one.value, checked: chosen(one.value),
          onChange: () => choose(one.value),
        }),
        make("span", { key: "words" }, one.label),
      ]),
    );
    return make("div", { id: id, className: "options" }, items);
  }

  // Details whose content is drawn when they are opened first. Pages of recordings fold hundreds of rows, which would take
  // the browser longer than all that it shows.
  function Folded({ children, className, open }) {
    const [drawn, draw] = React.useState(Boolean(open));
    const [summary, ...content] = children;
    const opened = (event) => { if (event.currentTarget.open) draw(true); };
    return make("details", { className: className, open: open, onToggle: opened }, summary, drawn && content);
  }

  // Views of the table of jobs that somebody gave a name, kept in this browser. The name is in the address too, so whoever
  // is sent it can keep the view.

  const KEY = "tracekit.views";

  // [name, query] of each; the storage may be closed, or hold anything.
  function kept() {
    try {
      return JSON.parse(localStorage.getItem(KEY)).filter((one) => one.length === 2 && one.every((text) => typeof text === "string"));
    } catch {
      return [];
    }
  }

  function Views({ id, query, name }) {
    const [views, show] = React.useState(kept), [problem, tell] = React.useState("");
    function keep(all) {
      try {
        localStorage.setItem(KEY, JSON.stringify(all));
        show(all);
      } catch (error) {
        tell(`Not kept: ${error.message}`);
      }
    }
    function save(event) {
      event.preventDefault();
      const named = new FormData(event.target).get("name").trim();
      if (!named) return;
      keep([...kept().filter((one) => one[0] !== named), [named, query]]);
      window.tracekit.remember({ view: named });
    }
    const links = views.map(([own, of]) => make("span", { key: own }, [
      make("a", { key: "go", className: of === query ? "facet chosen" : "facet", "data-follow": "yes", href: `?${of}&${new URLSearchParams({ view: own })}` }, own),
      make("button", { key: "drop", type: "button", className: "chip-button", "aria-label": `Delete the view ${own}`, onClick: () => keep(kept().filter((one) => one[0] !== own)) }, "\u00d7"),
    ]));
    const form = query && !views.some(([, of]) => of === query) && make("form", { key: "form", onSubmit: save }, [
      make("input", { key: `name of ${name}`, name: "name", defaultValue: name, placeholder: "name of this view", "aria-label": "Name of this view", maxLength: 60, autoComplete: "off", className: "field" }),
      make("button", { key: "keep", className: "chip-button" }, "Keep"),
    ]);
    if (!links.length && !form) return make("div", { id: id, hidden: true });
    const label = make("span", { key: "label", className: "label" }, "Views");
    return make("div", { id: id, className: "views" }, [label, ...links, form, make("span", { key: "said", role: "status" }, problem)]);
  }

  window.tracekit_components = { Menu, Choice, Folded, Views };
})();
