// Libraries of components that only some pages need come with the first of their components that is seen: the first
// page of a visit costs no table and no form that it does not show. In Dash's eyes each is there from the start.
(function () {
  "use strict";

  const COMPONENTS = {
    dash_ag_grid: ["AgGrid"],
  };
  const addresses = JSON.parse(document.documentElement.dataset.libraries);

  function load(namespace) {
    return new Promise(function (done, failed) {
      const script = document.createElement("script");
      script.src = addresses[namespace];
      script.onload = done;
      script.onerror = () => failed(new Error(`${script.src} cannot be loaded`));
      document.head.append(script);
    });
  }

  function standIns(namespace, names) {
    const components = {};
    let loaded = null;

    // The library takes the name for itself; its components stay those that Dash knows, so that none is drawn anew.
    const library = () =>
      (loaded = loaded || load(namespace).then(function () {
        const own = window[namespace];
        window[namespace] = { ...own, ...components };
        return own;
      }));

    for (const name of names) {
      const Late = React.lazy(() => library().then((own) => ({ default: own[name] })));
      const StandIn = function (props) {
        const [seen, see] = React.useState(loaded !== null);
        const place = React.useRef(null);
        React.useEffect(function () {
          if (seen) return undefined;
          const near = (entries) => entries.some((one) => one.isIntersecting) && see(true);
          const observer = new IntersectionObserver(near, { rootMargin: "100%" });
          observer.observe(place.current);
          return () => observer.disconnect();
        }, [seen]);
        const waiting = React.createElement("div", { ref: place, className: "waiting" }, seen ? null : " ");
        return seen
          ? React.createElement(React.Suspense, { fallback: waiting }, React.createElement(Late, props))
          : waiting;
      };
      StandIn.dashRenderType = true; // AG Grid asks for it
      components[name] = StandIn;
    }
    window[namespace] = components;
  }

  for (const [namespace, names] of Object.entries(COMPONENTS)) standIns(namespace, names);
})();
