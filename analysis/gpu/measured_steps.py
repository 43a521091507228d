"""Steps of the same job without a profiler, as `tracekit collect` timed them: they replace what a replay estimates.

In: a collected trace. Out: `MeasuredSteps`. A recording says what recording an event costs up to a factor that
differs between machines; steps that nothing but hooks slowed down say how long a step takes, and with it the factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import numpy as np
from msgspec import Struct

from tracekit.analysis.gpu.unprofiled import REPLAYED, typical
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.base.errors import SelectionError
from tracekit.base.text import counted, seconds, short
from tracekit.trace.canonical import COLLECTED, Trace
from tracekit.trace.op import OpTrace

#: A median of fewer steps tells nothing.
_FEWEST_STEPS = 3
#: Two runs of one job differ by no more than this share of a step.
_OF_ONE_JOB = 0.2
#: Recording costs no more than this factor times what the gaps between events show; halvings of the range searched.
_MOST_TIMES, _HALVINGS = 3.0, 7
_INSTEAD = "give the same job as `tracekit collect` recorded it"


class MeasuredSteps(Struct, frozen=True):
    """`step_s`: the median step of the trace `name`, seconds, from one start to the next; of so many `steps` and
    `ranks`. `gpu`: the model, None if unknown.
    """

    name: str
    step_s: Estimate
    steps: int
    ranks: int
    gpu: str | None

    @classmethod
    def of(cls, trace: Trace | OpTrace) -> Self:
        """Raises SelectionError for what `tracekit collect` did not record, and for too few steps."""
        if not isinstance(trace, Trace) or trace.metadata.get("format") != COLLECTED:
            raise SelectionError(
                f"--unprofiled: {short(trace.name)} was not recorded by `tracekit collect`; {_INSTEAD}"
            )
        starts = trace.step_starts
        step_s = np.array([starts[step + 1] - start for step, start in starts.items() if step + 1 in starts])
        if len(step_s) < _FEWEST_STEPS:
            steps = counted(len(step_s), "whole step")
            raise SelectionError(
                f"--unprofiled: {short(trace.name)} has {steps}, too few for a median; record {_FEWEST_STEPS + 1}"
            )
        gpu = trace.metadata.get("gpu_model")
        return cls(trace.name, typical([step_s]), len(step_s), trace.layout.world_size, gpu)

    @property
    def words(self) -> str:
        """How the step without the profiler was found out."""
        return (
            f"the median of {counted(self.steps, 'step')} of {short(self.name)}, recorded by `tracekit collect` without"
            " a profiler; what recording cost follows from it"
        )

    def check(self, name: str, ranks: int | None, gpu: str | None) -> None:
        """Raise SelectionError if the recording `name` is of another job, by ranks or model; None if unknown."""
        for what, measured, recorded in (("ranks", self.ranks, ranks), ("GPU", self.gpu, gpu)):
            if None not in (measured, recorded) and measured != recorded:
                raise self._of_another_job(name, f"{what}: {measured} and {recorded}")

    def factor(self, name: str, step_s: Callable[[float], float]) -> float:
        """Return how many times recording costs what the recording `name` shows of it, so that the replayed step is as
        long as these.

        `step_s`: the replayed step at such a factor, seconds, nan if nothing is known of the cost. Raises
        SelectionError if no factor gives such a step.
        """
        wanted, first_s = self.step_s.value, step_s(1.0)
        if math.isnan(first_s):
            raise SelectionError(
                f"--unprofiled: what recording cost the hosts of {short(name)} is not known (too few operators, or not"
                " made with torch.profiler), so nothing can be priced without it; leave it out"
            )

        def off(replayed_s: float) -> float:
            return abs(replayed_s - wanted)

        near, near_s, far = 1.0, first_s, 0.0 if first_s < wanted else _MOST_TIMES
        for _ in range(_HALVINGS if off(first_s) > REPLAYED * wanted else 0):
            middle = (near + far) / 2
            if ((middle_s := step_s(middle)) < wanted) == (first_s < wanted):
                near, near_s = middle, middle_s
            else:
                far = middle
        if off(near_s) > off(first_s) - REPLAYED * wanted:  # something else limits the step, whatever recording costs
            near, near_s = 1.0, first_s
        if off(near_s) > _OF_ONE_JOB * wanted:
            ends_s = [seconds(step_s(end)) for end in (_MOST_TIMES, 0.0)]
            raise self._of_another_job(name, f"a step takes {seconds(wanted)}, not {ends_s[0]} to {ends_s[1]}")
        return near

    def _of_another_job(self, name: str, why: str) -> SelectionError:
        names = f"{short(self.name)} and {short(name)}"
        return SelectionError(f"--unprofiled: {names} are different jobs ({why}); {_INSTEAD}")
