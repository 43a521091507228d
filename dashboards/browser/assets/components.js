// React components of ui/components.py: native lists, radio buttons and checkboxes; details; named views of a table.
(function () {
  "use strict";

  const make = React.createElement;

  function Menu({ id, options, value, setProps }) {
    const items = options.map((option) => make("option", { key: option.value, value: option.value }, option.label));
    const choose = (event) => setProps({ value: event.target.value });
    return make("select", { id, value, onChange: choose, className: "field" }, items);
  }

  // Radio buttons, or checkboxes if `value` is a list, which is in the order of the options.
  function Choice({ id, options, value, setProps }) {
    const several = Array.isArray(value);
    const isChosen = (option) => (several ? value.includes(option) : value === option);
    function choose(option) {
      const chosenValues = options.map((other) => other.value).filter((other) => (other === option) !== isChosen(other));
      setProps({ value: several ? chosenValues : option });
    }
    const items = options.map((option) =>
      make("label", { key: option.value }, [
        make("input", {
          key: "box", type: several ? "checkbox" : "radio", name: id, value: option.value, checked: isChosen(option.value),
          onChange: () => choose(option.value),
        }),
        make("span", { key: "words" }, option.label),
      ]),
    );
    return make("div", { id, className: "options" }, items);
  }

  // Details that render their content once they are opened: pages of recordings fold hundreds of rows, which take the
  // browser longer than everything visible.
  function Folded({ children, className, open }) {
    const [wasOpened, setOpened] = React.useState(Boolean(open));
    const [summary, ...content] = children;
    const onToggle = (event) => { if (event.currentTarget.open) setOpened(true); };
    return make("details", { className, open, onToggle }, summary, wasOpened && content);
  }

  // Named views of the table of jobs, stored in this browser. The address has the name too, so that its recipients can
  // store the view.

  const KEY = "tracekit.views";

  // [name, query] of each view; none if the storage is not accessible or holds something else.
  function storedViews() {
    try {
      return JSON.parse(localStorage.getItem(KEY)).filter((view) => view.length === 2 && view.every((text) => typeof text === "string"));
    } catch {
      return [];
    }
  }

  function Views({ id, query, name }) {
    const [views, setViews] = React.useState(storedViews), [problem, setProblem] = React.useState("");
    function store(all) {
      try {
        localStorage.setItem(KEY, JSON.stringify(all));
        setViews(all);
      } catch (error) {
        setProblem(`Not kept: ${error.message}`);
      }
    }
    function save(event) {
      event.preventDefault();
      const newName = new FormData(event.target).get("name").trim();
      if (!newName) return;
      store([...storedViews().filter((view) => view[0] !== newName), [newName, query]]);
      window.tracekit.remember({ view: newName });
    }
    const links = views.map(([viewName, viewQuery]) => make("span", { key: viewName }, [
      make("a", { key: "go", className: viewQuery === query ? "facet chosen" : "facet", "data-follow": "yes", href: `?${viewQuery}&${new URLSearchParams({ view: viewName })}` }, viewName),
      make("button", { key: "drop", type: "button", className: "chip-button", "aria-label": `Delete the view ${viewName}`, onClick: () => store(storedViews().filter((view) => view[0] !== viewName)) }, "\u00d7"),
    ]));
    const form = query && !views.some(([, viewQuery]) => viewQuery === query) && make("form", { key: "form", onSubmit: save }, [
      make("input", { key: `name of ${name}`, name: "name", defaultValue: name, placeholder: "name of this view", "aria-label": "Name of this view", maxLength: 60, autoComplete: "off", className: "field" }),
      make("button", { key: "keep", className: "chip-button" }, "Keep"),
    ]);
    if (!links.length && !form) return make("div", { id, hidden: true });
    const label = make("span", { key: "label", className: "label" }, "Views");
    return make("div", { id, className: "views" }, [label, ...links, form, make("span", { key: "said", role: "status" }, problem)]);
  }

  window.tracekit_components = { Menu, Choice, Folded, Views };
})();
