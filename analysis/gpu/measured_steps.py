"""The job as it runs without a profiler: by replay, or as `tracekit collect` timed the same job.

In: the graph and replay of a recording, and what recording cost its hosts; a collected trace. Out: `WithoutProfiler`,
`MeasuredSteps`. A host-bound step becomes shorter until the GPU, a copy or another rank is the limit; kernels take as
long as recorded. What recording an event costs is known up to a factor that differs between machines; steps that
nothing but hooks slowed down say how long a step takes, and with it the factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import hypot
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, MEDIAN_ERROR, Estimate
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import Intervention, LessRecording, QueuedAhead, changed
from tracekit.base.errors import SelectionError
from tracekit.base.text import counted, seconds, short
from tracekit.trace.facts import COLLECTED
from tracekit.trace.model import TraceKind

if TYPE_CHECKING:
    from tracekit.analysis.graph.op_graph import FoldedGraph
    from tracekit.trace.canonical import Trace
    from tracekit.trace.op import OpTrace

#: Recording costs no more than this factor times what the gaps between events show; halvings of the range searched.
#: Chosen.
_MOST_TIMES, _HALVINGS = 3.0, 7
_INSTEAD = "give the same job as `tracekit collect` recorded it"
#: The cost of recording by what the recording shows of it: likely, and in 90 % of cases at most and at least; without
#: stacks, less of it shows. Chosen.
WITH_STACKS, WITHOUT_STACKS = (1.0, 1.2, 0.8), (1.0, 1.3, 0.7)
#: The 90 % interval of a median, as a multiple of the median absolute deviation over the root of the number.
_WIDE = 1.645 * MEDIAN_ERROR * MAD_TO_SIGMA
#: A step that a change makes no shorter than this is as long as before, seconds.
_ROUNDING_S = 1e-9


class MeasuredStepThresholds(Struct, frozen=True):
    """When steps measured without a profiler fit the recording."""

    #: A median of fewer steps tells nothing. Definition.
    fewest: int = 3
    #: Two runs of one job differ by no more than this share of a step. Chosen.
    of_one_job: float = 0.2
    #: Even where the GPU is the limit, steps with and without a profiler differ by this share. Chosen.
    same_share: float = 0.01
    #: No more than this share of a piece of host work is the profiler's. Chosen: some work remains.
    most_recording: float = 0.9


MEASURED = MeasuredStepThresholds()


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
        if trace.kind is TraceKind.OPS or trace.metadata.get("format") != COLLECTED:
            raise SelectionError(
                f"--unprofiled: {short(trace.name)} was not recorded by `tracekit collect`; {_INSTEAD}"
            )
        starts = trace.step_starts
        step_s = np.array([starts[step + 1] - start for step, start in starts.items() if step + 1 in starts])
        if len(step_s) < MEASURED.fewest:
            steps = counted(len(step_s), "whole step")
            raise SelectionError(
                f"--unprofiled: {short(trace.name)} has {steps}, too few for a median; record {MEASURED.fewest + 1}"
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
        for noun, measured, recorded in (("ranks", self.ranks, ranks), ("GPU", self.gpu, gpu)):
            if None not in (measured, recorded) and measured != recorded:
                raise self._of_another_job(name, f"{noun}: {measured} and {recorded}")

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
        for _ in range(_HALVINGS if off(first_s) > MEASURED.same_share * wanted else 0):
            middle = (near + far) / 2
            if ((middle_s := step_s(middle)) < wanted) == (first_s < wanted):
                near, near_s = middle, middle_s
            else:
                far = middle
        if (
            off(near_s) > off(first_s) - MEASURED.same_share * wanted
        ):  # something else limits the step, whatever recording costs
            near, near_s = 1.0, first_s
        if off(near_s) > MEASURED.of_one_job * wanted:
            ends_s = [seconds(step_s(end)) for end in (_MOST_TIMES, 0.0)]
            raise self._of_another_job(name, f"a step takes {seconds(wanted)}, not {ends_s[0]} to {ends_s[1]}")
        return near

    def _of_another_job(self, name: str, why: str) -> SelectionError:
        names = f"{short(self.name)} and {short(name)}"
        return SelectionError(f"--unprofiled: {names} are different jobs ({why}); {_INSTEAD}")


class StepsOfRecording(Struct, frozen=True, eq=False):
    """The training steps of a recording. `step`: of each op, -1 before the first and `count` after the last, [ops].
    `numbers`: of the steps.

    A step ends with the last op that it launched, and begins where the one before ends, the first with what was
    launched before: a GPU may lag behind by more than a step. `waited`: the first op of a GPU that was
    busy with what is not in the recording, -1 if none was. Without marked steps, the recording is one.
    """

    step: Ints
    numbers: tuple[int, ...]
    waited: int

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.numbers)

    @classmethod
    def of(cls, marked: pl.Series, start: Floats, on_gpu: Bools, arrives_s: Floats) -> Self:
        """The steps by their marks, null for none, and when ops began. `arrives_s`: as of `GraphSubject`."""
        first = int(np.where(on_gpu, start, np.inf).argmin())
        waited = first if np.isnan(arrives_s[first]) else -1
        numbers = np.unique(marked.drop_nulls().to_numpy())
        step = np.searchsorted(numbers, marked.fill_null(-1).to_numpy())
        unmarked = marked.is_null().to_numpy()
        if not len(numbers):
            return cls(np.zeros(len(start), np.int64), (0,), waited)
        # What a GPU still does from before the first step begins while the host is in that step.
        marked_s = [np.where(mask & ~unmarked, start, np.inf).min() for mask in (~on_gpu, on_gpu)]
        early = start < np.where(on_gpu, marked_s[1], marked_s[0])
        step = np.where(unmarked, np.where(early, -1, len(numbers)), step)
        return cls(step, tuple(numbers.tolist()), waited)

    def lengths_s(self, start: Floats, end: Floats) -> Floats:
        """How long each step takes if ops begin and end then, seconds, [steps]."""
        before = self.step < 0
        ends = np.full(self.count, -np.inf)
        inside = np.flatnonzero((self.step >= 0) & (self.step < self.count))
        np.maximum.at(ends, self.step[inside], end[inside])
        first = end[before].max() if before.any() else start[self.step == 0].min()
        if self.waited >= 0:
            first = max(first, start[self.waited])
        return np.diff(np.maximum.accumulate(ends), prepend=first)

    def replayed_s(self, replay: GraphReplay, changes: Sequence[Intervention]) -> Floats:
        """How long each step takes after these changes, seconds, [steps]."""
        overlay, graph = changed(replay, changes), cast("FoldedGraph", replay.graph)
        timelines = overlay.timelines()
        start, end = (graph.of_ops([getattr(line, name) for line in timelines]) for name in ("start", "end"))
        lengths_s = self.lengths_s(start, end)
        # Time in which no rank does anything, as far as it is not the profiler's.
        profiler_s = max(float(replay.recorded_step_times().sum()) - end.max(), 0.0)
        less_s = max(-float(overlay.stalled_s.sum()) - profiler_s, 0.0)
        return np.asarray(lengths_s * (1 - min(less_s / (float(lengths_s.sum()) or 1.0), 1.0)))


class OpLaunches(Struct, frozen=True, eq=False):
    """How ops were launched, [ops]. `recording_s`: what recording costs within a call that launches; the others as of
    `GraphSubject`; `in_queue_s`: between two ops of a GPU, the second of which was launched long before; seconds.
    """

    recording_s: Floats
    arrives_s: Floats
    latency_s: Floats
    launched_by: Ints
    in_queue_s: float


class WithoutProfiler(Struct, frozen=True, eq=False):
    """A job without its profiler. `changes`: for each cost of recording, the likely one first; `steps_s`: how long each
    step takes with each, seconds, [steps].
    """

    replay: GraphReplay
    steps: StepsOfRecording
    changes: tuple[LessRecording, ...]
    steps_s: tuple[Floats, ...]

    @classmethod
    def of(
        cls,
        replay: GraphReplay,
        steps: StepsOfRecording,
        recording_s: Floats,
        launches: OpLaunches,
        factors: Sequence[float],
        after: Sequence[Intervention] = (),
    ) -> Self:
        """Take `recording_s` off each op, seconds, [ops], times each of these factors, the likely one first.

        `after`: in the job after these changes.
        """
        cost, delay = replay.cost_of_ops, replay.delay_of_ops
        changes = []
        for factor in factors:
            recording_cost = np.minimum(factor * recording_s, MEASURED.most_recording * cost)
            remaining = 1 - np.divide(recording_cost, cost, out=np.zeros_like(cost), where=cost > 0)
            faster = np.minimum(factor * launches.recording_s, launches.latency_s)
            queued = QueuedAhead(launches.arrives_s - faster, launches.launched_by)
            overlay = changed(replay, (*after, LessRecording(remaining, delay - faster), queued))
            in_queue = np.minimum(delay, launches.in_queue_s)
            changes.append(LessRecording(remaining, np.maximum(overlay.delay_of_ops(), in_queue)))
        steps_s = tuple(steps.replayed_s(replay, (*after, change)) for change in changes)
        return cls(replay, steps, tuple(changes), steps_s)

    @property
    def step_s(self) -> Estimate:
        """The step without a profiler, seconds: the median, as a profiler records few steps, the first one cold."""
        step = typical(self.steps_s)
        same = MEASURED.same_share * step.value
        return Estimate(
            step.value, max(step.value - hypot(step.value - step.low, same), 0.0),
            step.value + hypot(step.high - step.value, same),
        )  # fmt: skip

    def saves(
        self, changes: Sequence[Intervention], *, bound: bool = False, after: Intervention | None = None
    ) -> Estimate:
        """Return what these changes save, seconds of a step. `bound`: they save at most so much. `after`: once this is
        done.

        What acts in less than half of the steps saves what it does on average.
        """
        given = () if after is None else (after,)
        now = (
            self.steps_s
            if after is None
            else tuple(self.steps.replayed_s(self.replay, (after, change)) for change in self.changes)
        )
        changed_s = [self.steps.replayed_s(self.replay, (*given, *changes, change)) for change in self.changes]
        saved = [before - then for before, then in zip(now, changed_s, strict=True)]
        if 2 * np.count_nonzero(saved[0] > _ROUNDING_S) < self.steps.count:
            saved = [np.full(1, of_steps.mean()) for of_steps in saved]
        saving = typical(saved)
        value = saving.value if saving.value > _ROUNDING_S else 0.0
        return Estimate(value, 0.0 if bound else max(saving.low, 0.0), max(saving.high, 0.0))


def typical(steps_s: Sequence[Floats]) -> Estimate:
    """The median step. Its interval covers the cost of recording and the small number of steps. `steps_s`: steps at the
    likely cost of recording, and at the highest and the lowest; with one entry, the interval covers only the number of
    steps.

    The second is 90 % of a normal distribution as wide as the steps, by their median absolute deviation.
    """
    medians = [float(np.median(times_s)) for times_s in steps_s]
    value = medians[0]
    half_width = _WIDE * float(np.median(np.abs(steps_s[0] - value))) / len(steps_s[0]) ** 0.5
    low, high = min(medians), max(medians)
    return Estimate(value, value - hypot(value - low, half_width), value + hypot(high - value, half_width))
