// Behaviour of the pages that is the browser's own business: preferences, and the state of a view in the address.
(function () {
  "use strict";

  // The path under which this browser sees the dashboard: / or that of a reverse proxy.
  const prefix = document.documentElement.dataset.prefix;
  const at = (path) => prefix + path.replace(/^\//, "");

  function prefer(name, value) {
    document.cookie = `${name}=${encodeURIComponent(value)}; path=${prefix}; max-age=31536000; samesite=lax`;
    window.location.reload();
  }

  document.addEventListener("click", function (event) {
    const button = event.target.closest("button");
    if (button && button.dataset.close) window.dash_clientside.set_props(button.dataset.close, { children: null });
    if (button && button.id === "theme") {
      prefer("theme", button.dataset.theme === "dark" ? "light" : "dark");
    } else if (button && button.id === "zone") {
      const own = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
      prefer("zone", button.dataset.zone === "local" ? "UTC" : own);
    }
  });

  // Go to an address of the dashboard without a new document.
  function follow(address, top = 0) {
    window.history.pushState({}, "", address);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    window.scrollTo(0, top);
  }

  // Marks of pictures are links without a component of their own: followed as Dash's links are, without a new document.
  document.addEventListener("click", function (event) {
    const link = event.target.closest("a[data-follow]");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    follow(link.href);
  });

  // Dash calls these with the values of the controls: they keep the address equal to what is shown, so that it can be
  // sent to somebody. An empty value leaves the address.
  const remember = (state) => window.history.replaceState(window.history.state, "", changed(state));

  function changed(state) {
    const address = new URL(window.location.href);
    for (const [name, value] of Object.entries(state)) {
      if (value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length)) {
        address.searchParams.delete(name);
      } else {
        address.searchParams.set(name, Array.isArray(value) ? value.join(" ") : String(value));
      }
    }
    return address;
  }

  // A range of time that was chosen on a chart, in milliseconds since 1970, is that of the page; null: all.
  function range(ends) {
    const [since, until] = (ends || [null, null]).map((end) => end && new Date(end).toISOString());
    follow(changed({ since, until, window: null }), window.scrollY);
  }

  // The query of another page of the job that is shown, at the window and the range of the address.
  function query(state) {
    const shown = new URLSearchParams(window.location.search);
    const kept = ["window", "since", "until"].filter((name) => shown.has(name)).map((name) => [name, shown.get(name)]);
    return new URLSearchParams({ ...state, ...Object.fromEntries(kept) });
  }

  // An element with these properties, around these children.
  function make(name, properties, ...children) {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  }

  const FORGET_MS = 60000;

  // Saves an image, or what a data address holds, as a file.
  function save(content, name) {
    const link = make("a", { href: content instanceof Blob ? URL.createObjectURL(content) : content, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), FORGET_MS);
  }

  // What the server answers; an error in its words where it refuses.
  async function answer(address, options) {
    const response = await fetch(address, options);
    if (!response.ok) throw new Error((await response.text()).trim().slice(0, 400));
    return response;
  }

  // Dash asks for the page that the address names whenever this is set, also to what it was.
  const redraw = () => window.dash_clientside.set_props("_pages_location", { search: window.location.search });

  // For figures whose points have a link as the first of their customdata: a click follows it.
  function open() {
    const [chart] = window.dash_clientside.callback_context.triggered, [point] = chart?.value?.points || [];
    if (point?.customdata?.[0]) follow(point.customdata[0]);
  }

  window.dash_clientside = { ...window.dash_clientside, tracekit: { open, remember } };
  window.tracekit = { remember, at, query, range, follow, make, save, answer, redraw };

  // What a page of a window asks for is of that window: its callbacks know their job alone.
  function ofWindow(options) {
    const shown = new URLSearchParams(window.location.search), headers = new Headers((options || {}).headers);
    if (!["window", "since", "until"].some((name) => shown.has(name))) return options;
    headers.set("X-Tracekit-Window", query(shown.has("job") ? { job: shown.get("job") } : {}).toString());
    return { ...options, headers: headers };
  }

  // A session that has ended while a page was open: Dash would wait for answers that do not come.
  const ask = window.fetch;
  window.fetch = async function (address, options) {
    const answer = await ask.call(this, address, ofWindow(options));
    if (answer.status === 401) {
      const here = window.location.pathname.slice(prefix.length - 1) + window.location.search;
      window.location.assign(at(`/login?${new URLSearchParams({ next: here })}`));
    }
    return answer;
  };

  // The table of jobs: the first button of a row keeps its job, that of another row compares the two.
  document.addEventListener("click", function (event) {
    const button = event.target.closest("button[data-compare]");
    if (!button) return;
    const first = document.querySelector("button[data-compare][aria-pressed=true]");
    for (const one of document.querySelectorAll("button[data-compare]")) {
      one.textContent = first || one === button ? "Compare" : "with this";
      one.setAttribute("aria-pressed", String(!first && one === button));
    }
    if (!first || first === button) return;
    const query = new URLSearchParams({ job: first.dataset.compare, with: button.dataset.compare });
    window.location.assign(at(`/compare?${query}`));
  });
})();
