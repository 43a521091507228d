// The page Attribution: a click on a bar opens the what-if of its set of ops.
(function () {
  "use strict";

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.attribution = {
    open: function (kind, stage, dpRank, job) {
      const [triggered] = dash_clientside.callback_context.triggered;
      if (!triggered || !triggered.value) {
        return;
      }
      const state = window.tracekit.query({ job: job, select: triggered.value.points[0].customdata });
      window.location.assign(window.tracekit.at(`/whatif?${state}`));
    },
  };
})();
