"""The picture of a run of post-training: phases over steps, requests of the longest generation.

In: a `PostTrainingRun`. Out: `RlPicture`, few enough bars for a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.analysis.rl.generation import Generations
from tracekit.analysis.rl.rl_run import PostTrainingRun
from tracekit.report.pictures import PhaseBars, RequestBar, RlPicture

#: The most steps and requests in a picture.
_MOST_STEPS, _MOST_REQUESTS = 200, 600


def picture_of(run: PostTrainingRun, phases: Sequence[str]) -> RlPicture:
    """The picture of a run. `phases`: their names, the longest first."""
    steps = len(run.recorded)
    drawn = np.unique(np.linspace(0, steps - 1, min(steps, _MOST_STEPS)).astype(int))
    longest_s = float(np.sum([*run.phases.values()], axis=0).max()) if phases else 0.0
    bars = [PhaseBars(name, run.phases[name][drawn].tolist()) for name in phases]
    if run.generations is None:
        return RlPicture(steps, longest_s, bars, None, 0.0)
    requests, window_s = _requests(run.generations)
    return RlPicture(steps, longest_s, bars, requests, window_s)


def _requests(generations: Generations) -> tuple[list[RequestBar], float]:
    """The requests of the longest generation, by engine and start, and how long it took."""
    ran, longest = generations.ran, int(generations.recorded.argmax())
    own, tail = np.flatnonzero(ran.step == longest), generations.longest()[longest]
    own = own[np.lexsort((ran.start[own], ran.engine[own]))]
    drawn = own[np.unique(np.linspace(0, len(own) - 1, min(len(own), _MOST_REQUESTS)).astype(int))]
    first = float(ran.submit[own].min())
    bars = [
        RequestBar(
            engine=int(ran.engine[request]),
            engine_name=generations.names[ran.engine[request]],
            tokens=float(ran.tokens[request]),
            submit_s=float(ran.submit[request]) - first,
            start_s=float(ran.start[request]) - first,
            end_s=float(ran.end[request]) - first,
            long=bool(ran.tokens[request] > tail),
        )
        for request in drawn.tolist()
    ]
    return bars, float(ran.end[own].max()) - first
