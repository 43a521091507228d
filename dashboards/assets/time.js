// The page Time: a click on a step opens its timeline, on a cell of the map that of the worker in the step.
(function () {
  "use strict";

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.time = {
    remember: function (rows) {
      window.tracekit.remember({ rows: rows === "worst" ? null : rows });
    },
    open: function (slowdown, times, workers, job) {
      const [triggered] = dash_clientside.callback_context.triggered;
      if (!triggered || !triggered.value) {
        return;
      }
      const who = triggered.value.points[0].customdata;
      const state = window.tracekit.query({ job: job, step: who[0] });
      if (triggered.prop_id.startsWith("time-workers")) {
        state.set("worker", `${who[1]},${who[2]}`);
      }
      window.location.assign(window.tracekit.at(`/timeline?${state}`));
    },
  };
})();
