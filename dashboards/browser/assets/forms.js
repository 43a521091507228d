// The components Menu and Choice (ui/drawn.py): the browser's own list, radio buttons and boxes to tick.
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

  window.tracekit_forms = { Menu: Menu, Choice: Choice };
})();
