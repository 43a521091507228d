// What all pages share in the browser: preferences, the state of a view in the address, requests and downloads.
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
      const localZone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
      prefer("zone", button.dataset.zone === "local" ? "UTC" : localZone);
    }
  });

  // Go to an address of the dashboard without a new document.
  function follow(address, top = 0) {
    window.history.pushState({}, "", address);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    window.scrollTo(0, top);
  }

  // Links in pictures are no Dash components: follows them as Dash does, without a new document.
  document.addEventListener("click", function (event) {
    const link = event.target.closest("a[data-follow]");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    follow(link.href);
  });

  // Dash calls this with the values of the controls: keeps the address equal to the view, so that it can be shared. Empty
  // values are removed from the address.
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

  // Makes a range chosen on a chart, in milliseconds since 1970, that of the page; null: all.
  function range(ends) {
    const [since, until] = (ends || [null, null]).map((end) => end && new Date(end).toISOString());
    follow(changed({ since, until, window: null }), window.scrollY);
  }

  // The query of another page of the job that is shown, at the window and the range of the address.
  function query(state) {
    const current = new URLSearchParams(window.location.search);
    const chosen = ["window", "since", "until"].filter((name) => current.has(name)).map((name) => [name, current.get(name)]);
    return new URLSearchParams({ ...state, ...Object.fromEntries(chosen) });
  }

  // An element with these properties, around these children.
  function make(name, properties, ...children) {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  }

  const FORGET_MS = 60000;

  // Saves a blob or the content of a data URL as a file.
  function save(content, name) {
    const link = make("a", { href: content instanceof Blob ? URL.createObjectURL(content) : content, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), FORGET_MS);
  }

  // The server's response. Throws an error with its text if it is not a success.
  async function answer(address, options) {
    const response = await fetch(address, options);
    if (!response.ok) throw new Error((await response.text()).trim().slice(0, 400));
    return response;
  }

  // Dash loads the page of the address whenever this is set, even to the same value.
  const redraw = () => window.dash_clientside.set_props("_pages_location", { search: window.location.search });

  // Follows the link of a clicked point, the first of its customdata.
  function open() {
    const [chart] = window.dash_clientside.callback_context.triggered, [point] = chart?.value?.points || [];
    if (point?.customdata?.[0]) follow(point.customdata[0]);
  }

  // What the page Compare compares a job with: another job, or itself from a step on.
  function rememberSides(mode, other, split, job) {
    remember({ job, with: mode === "job" ? other : null, split: mode === "split" ? split : null });
  }

  window.dash_clientside = { ...window.dash_clientside, tracekit: { open, remember, rememberSides } };
  window.tracekit = { remember, at, query, range, follow, make, save, answer, redraw };

  // Adds the window of the page to its requests: the callbacks know only their job.
  function ofWindow(options) {
    const current = new URLSearchParams(window.location.search), headers = new Headers((options || {}).headers);
    if (!["window", "since", "until"].some((name) => current.has(name))) return options;
    headers.set("X-Tracekit-Window", query(current.has("job") ? { job: current.get("job") } : {}).toString());
    return { ...options, headers: headers };
  }

  // Goes to the login once the session has ended: Dash would wait forever.
  const plainFetch = window.fetch;
  window.fetch = async function (address, options) {
    const response = await plainFetch.call(this, address, ofWindow(options));
    if (response.status === 401) {
      const page = window.location.pathname.slice(prefix.length - 1) + window.location.search;
      window.location.assign(at(`/login?${new URLSearchParams({ next: page })}`));
    }
    return response;
  };

  // The table of jobs: the button of a row selects its job, that of a second row compares the two.
  document.addEventListener("click", function (event) {
    const button = event.target.closest("button[data-compare]");
    if (!button) return;
    const first = document.querySelector("button[data-compare][aria-pressed=true]");
    for (const other of document.querySelectorAll("button[data-compare]")) {
      other.textContent = first || other === button ? "Compare" : "with this";
      other.setAttribute("aria-pressed", String(!first && other === button));
    }
    if (!first || first === button) return;
    const query = new URLSearchParams({ job: first.dataset.compare, with: button.dataset.compare });
    window.location.assign(at(`/compare?${query}`));
  });
})();
