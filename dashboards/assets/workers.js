// The page Workers: playing the map step by step. The next step is asked for once the last one is drawn, so a slow
// connection plays slower and nothing queues up. Whether it plays is on the button, which goes when the page goes.
(function () {
  "use strict";

  const PAUSE_MS = 250;

  function button() {
    return document.getElementById("workers-play");
  }

  function stop() {
    button().dataset.playing = "no";
    dash_clientside.set_props("workers-play", { children: "Play" });
  }

  function advance(position, last) {
    if (Number(position) >= last) {
      stop();
    } else {
      dash_clientside.set_props("workers-step", { value: Number(position) + 1 });
    }
  }

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.workers = {
    play: function (clicks, position, last) {
      const playing = button().dataset.playing !== "yes";
      button().dataset.playing = playing ? "yes" : "no";
      if (playing) {
        window.setTimeout(() => advance(position >= last ? 0 : position, last), 0);
      }
      return playing ? "Pause" : "Play";
    },
    arrived: function (view, position, last) {
      window.tracekit.remember(view);
      window.setTimeout(function () {
        if (button() && button().dataset.playing === "yes") {
          advance(position, last);
        }
      }, PAUSE_MS);
    },
  };
})();
