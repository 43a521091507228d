"""The pictures of a run of post-training: phases over steps, requests of the longest generation.

In: a `PostTrainingRun`. Out: pictures of a report, with few enough bars for a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracekit.analysis.rl.generation import Generations
from tracekit.analysis.rl.rl_run import PostTrainingRun
from tracekit.base.text import seconds, short
from tracekit.report.section import TONES, BarTimeline, LegendEntry, Picture, Series, SeriesLine, TimelineBar

#: The most steps and requests in a picture.
_MOST_STEPS, _MOST_REQUESTS = 200, 600
#: What a bar of a request is: the engines take turns, so that neighbours differ.
_LEGEND = [
    LegendEntry("decoding, even engines", 0),
    LegendEntry("decoding, odd engines", 1),
    LegendEntry("decoding, of the longest 5%", 5),
    LegendEntry("waiting to start", 3),
]


def pictures_of(run: PostTrainingRun, phases: Sequence[str]) -> list[Picture]:
    """The pictures of a run. `phases`: their names, the longest first."""
    steps = len(run.recorded)
    drawn = np.unique(np.linspace(0, steps - 1, min(steps, _MOST_STEPS)).astype(int))
    lines = [
        SeriesLine(short(name, 30), number % len(TONES), run.phases[name][drawn].tolist())
        for number, name in enumerate(phases)
    ]
    few = f"{len(drawn)} of {steps} steps" if len(drawn) < steps else None
    places = run.steps[drawn].astype(float).tolist()
    over_steps = [Series("Phases over steps", "step", "s", places, lines, stacked=True, note=few)] if lines else []
    return [*over_steps, *([] if run.generations is None else [_requests(run.generations)])]


def _requests(generations: Generations) -> BarTimeline:
    """The requests of the longest generation, by engine and start."""
    ran, longest = generations.ran, int(generations.recorded.argmax())
    own, tail = np.flatnonzero(ran.step == longest), generations.longest()[longest]
    own = own[np.lexsort((ran.start[own], ran.engine[own]))]
    drawn = own[np.unique(np.linspace(0, len(own) - 1, min(len(own), _MOST_REQUESTS)).astype(int))].tolist()
    first = float(ran.submit[own].min())

    def bars() -> Iterator[TimelineBar]:
        for row, request in enumerate(drawn):
            submit_s, start_s, end_s = (float(times[request]) - first for times in (ran.submit, ran.start, ran.end))
            engine, tokens = int(ran.engine[request]), float(ran.tokens[request])
            words = f"{short(generations.names[engine])}: {tokens:,.0f} tokens, {{}}"
            what = 2 if tokens > tail else engine % 2
            yield TimelineBar(row, 3, submit_s, start_s, words.format(seconds(start_s - submit_s)))
            yield TimelineBar(row, what, start_s, end_s, words.format(seconds(end_s - start_s)))

    title, axis = "Requests of the longest generation", "since the first was submitted"
    return BarTimeline(title, axis, [""] * len(drawn), _LEGEND, list(bars()), [])
