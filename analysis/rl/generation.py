"""The generations of a run, replayed: as recorded, without a loss, under an alternative.

In: recorded requests. Out: `Generations`, and from it the seconds of each generation.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import structs

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.rl.account import Generation, Loss
from tracekit.analysis.rl.decoding import NO_LIMIT, Engines, Requests, decode, generations, partial_generations
from tracekit.analysis.rl.latency import Ran, fit, queued, started
from tracekit.analysis.rl.loop import WARM_UP
from tracekit.analysis.rl.rl_run import CONTRADICTION
from tracekit.analysis.rl.scenario import Scenario
from tracekit.analysis.rl.steps import Steps
from tracekit.base.errors import FormatError
from tracekit.base.text import short
from tracekit.trace.post_training import Trajectories

#: A response is in the tail if it is longer than this percentile of its step.
TAIL = 95


class Generations:
    """The generations of a run as requests and engines; `late`: what a phase takes after its last request."""

    def __init__(self, steps: Steps, trajectories: Trajectories, slots: int | None) -> None:
        place = np.searchsorted(steps.numbers, trajectories.step)
        place[place == len(steps.numbers)] = 0
        chosen = steps.numbers[place] == trajectories.step
        begun = steps.generate_start[place]
        ran = Ran(
            place,
            trajectories.engine,
            trajectories.submit - begun,
            trajectories.start - begun,
            trajectories.end - begun,
            trajectories.tokens,
            trajectories.tool_s,
        ).only(chosen)
        if not np.array_equal(np.unique(ran.step), np.arange(len(steps.numbers))):
            raise FormatError("some steps have trajectories and others none; record all of them or leave them out")
        ran = ran if slots is None else started(ran, slots)
        self.ran, self.count, self.names = ran, int(chosen.sum()), trajectories.engines
        engines = fit(ran, len(trajectories.engines))
        waited, self.slots = queued(ran, engines)
        self.slots = slots or self.slots
        self.engines = structs.replace(engines, slots=self.slots or NO_LIMIT)
        self.recorded = steps.generate_end - steps.generate_start
        self.requests = Requests(
            ran.step,
            ran.engine,
            np.maximum(np.where(waited, ran.submit, ran.start), 0.0),
            ran.start,
            ran.tokens,
            ran.tool_s,
        )
        ends = np.zeros(len(self.recorded))
        np.maximum.at(ends, ran.step, ran.end)
        self.late = np.maximum(self.recorded - ends, 0.0)
        replayed_end = decode(self.requests, self.engines)[0]
        self.replayed = np.zeros(len(self.recorded))
        np.maximum.at(self.replayed, ran.step, replayed_end)
        self.replayed += self.late
        self.error = float(self.replayed[WARM_UP:].mean() / self.recorded[WARM_UP:].mean()) - 1
        self.error_s = abs(float((self.replayed - self.recorded)[WARM_UP:].mean()))
        # What one engine gets wrong is hidden in a generation that ends with another.
        replayed, took = (np.maximum(end - self.requests.arrives, 1e-9) for end in (replayed_end, ran.end))
        ratio = replayed / took
        usual = pl.DataFrame({"engine": ran.engine, "ratio": ratio}).group_by("engine").median()["ratio"]
        self.engine_error = float(np.abs(usual.to_numpy() - 1).max())

    def fitted(self) -> Generation:
        """How the engines decode, and how well that reproduces the recording."""
        speeds = dict(zip(self.names, self.engines.speeds.tolist(), strict=True))
        reproduced_s = float(self.replayed[WARM_UP:].mean())
        latency = self.engines.base_s, self.engines.per_request_s
        return Generation(*latency, speeds, self.slots, reproduced_s, self.error, self.engine_error)

    def longest(self) -> Floats:
        """The percentile of each step's tokens beyond which a response is in the tail, [steps]."""
        first = np.searchsorted(self.ran.step, np.arange(self.ran.step[-1] + 2))
        tokens = self.requests.tokens
        return np.array([np.percentile(tokens[start:stop], TAIL, method="higher") for start, stop in pairwise(first)])

    def without(self, losses: Set[Loss]) -> Floats:
        """Seconds of each generation without these losses, [steps]."""
        requests, engines = self.requests, self.engines
        if "queueing" in losses:
            requests = requests.replace(arrives=np.maximum(self.ran.submit, 0.0))
            engines = structs.replace(engines, slots=NO_LIMIT)
        if "tail" in losses:
            requests = requests.replace(tokens=np.minimum(requests.tokens, self.longest()[requests.step]))
        if "tools" in losses:
            requests = requests.replace(tool_s=np.zeros(self.count))
        if "engines" in losses:
            requests = requests.balanced(len(engines.speeds)).replace(turn=np.arange(self.count, dtype=np.float64))
            engines = structs.replace(engines, speeds=np.ones_like(engines.speeds))
        return self._seconds(requests, engines)

    def in_scenario(self, scenario: Scenario, engines: int | None) -> tuple[Floats, int]:
        """Seconds of each generation in a scenario, and the most steps that a request is carried over."""
        changed = self.engines.of_number(engines or len(self.engines.speeds))
        requests = self.requests.dealt(len(changed.speeds), longest_first=scenario.longest_first)
        if scenario.partial is None:
            return self._seconds(requests, changed), 0
        if scenario.longest_first:
            order = np.lexsort((requests.turn, requests.step))
            requests = Requests(*(getattr(requests, name)[order] for name in requests.__struct_fields__))
        took, oldest = partial_generations(requests, changed, scenario.partial)
        return took + self.late, oldest

    def _seconds(self, requests: Requests, engines: Engines) -> Floats:
        return np.asarray(generations(requests, engines) + self.late)

    def clock_off(self, step_s: float) -> str | None:
        """A sentence if an engine's times do not fit the phases, or are those of the others with an offset."""
        slack = CONTRADICTION * step_s
        ran, recorded_s = self.ran, self.recorded[self.ran.step]
        before = np.maximum(np.maximum(-ran.start, ran.submit - ran.start), ran.end - recorded_s)
        first = np.full((len(self.recorded), len(self.names)), np.nan)
        np.fmin.at(first, (ran.step, ran.engine), ran.start)
        used = ~np.isnan(first).all(axis=0)
        # Engines start together; one that is late by the same time in every step has another clock.
        late = np.nanmedian(first[:, used], axis=0)
        late -= late.min()
        late[np.nanmax(first[:, used], axis=0) - np.nanmin(first[:, used], axis=0) > slack] = 0.0
        if before.max() > slack:
            worst = int(before.argmax())
            name, by = self.names[ran.engine[worst]], float(before[worst])
        elif late.max() > slack:
            name, by = self.names[np.flatnonzero(used)[late.argmax()]], float(late.max())
        else:
            return None
        return (
            f"trajectories of {short(name)} lie {by:.2f} s outside their generations: its clock or their steps are off"
        )
