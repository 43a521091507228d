"""Clock offsets of the workers, and the trace with the offsets removed.

In: a `DependencyGraph` as recorded. Out: `Clocks`, and the trace without the offsets. A wrong clock makes transfers
look long and workers late, so this comes before all measurements.

All ties are fitted at once (`estimate_offsets`), in each of up to `MOST_RUNS` runs of steps, and the course of each
clock is fitted over the runs (`fit_courses`). Most clocks agree and are taken as correct. Before another clock is
corrected, the evidence of each tie is weighed (`question`): a tie speaks for an offset that it satisfies if it would
contradict a correct clock, and against an offset that it does not satisfy. If there is too little evidence, the doubt
is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.lanes import StructureKey
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.analysis.numeric.statistics import MEDIAN_ERROR, median
from tracekit.analysis.replay.clock_offsets import (
    ERRORS,
    FEWEST_FOR_SCATTER,
    Courses,
    Ties,
    TieSource,
    estimate_offsets,
    fit_courses,
    scatter,
)
from tracekit.base.text import seconds
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Worker
from tracekit.trace.schema import step_positions

#: Offsets below this share of the step change no result, even if a step waits for dozens of transfers in a row; nor do
#: offsets below the resolution of the recordings. Chosen.
SMALLEST_SHARE = 0.0002
#: Offsets are precise to this share of the smallest one that counts. Chosen.
EXACTNESS = 0.1
#: The unknown part of a clock may move the step by this share. Chosen.
LARGEST_UNKNOWN = 0.0025
#: The largest number of runs of steps to measure separately, and the smaller one used above this many values.
MOST_RUNS, FEWEST_RUNS, MOST_VALUES = 48, 8, 100_000
#: A run whose ties scatter by more than this many times the usual may contain a clock that was stepped. Benchmark
#: `clocks`.
RUN_ERRORS = 8.0
#: Compare suspects with this many DP ranks that are not suspicious. Chosen.
FEWEST_OTHERS = 32
#: If more than this share of the clocks is off, the others need not be correct. Definition.
MAJORITY = 0.5
#: The length of a step is that of the first lanes of each structure.
LANES_FOR_LENGTH = 8
#: Compare clocks with this many others to find the most common time, and name so many in a message.
MOST_CANDIDATES = 256
MOST_NAMED = 3
#: The resolution of the recordings, seconds. Chosen.
RESOLUTION_S = 20e-6
#: A few steps do not show how much ends scatter: assume this share of the transfer's duration, or the resolution.
#: Chosen.
SCATTER_SHARE = 0.05


class Clocks(Struct, frozen=True, eq=False):
    """Offsets of the workers' clocks. Arrays are [stages, dp_ranks].

    `offset_s`: seconds that a clock is ahead of most others, the mean over the trace; 0 if it does not stand out.
    `drift`: seconds that the offset grows per second. `jump_s`, `jump_step`: the step of a clock during the trace,
    seconds ahead, and the first step number after that, -1 if it was not. `error_s`: standard error of the offset, nan
    for a worker that no op ties to another, or if nothing is suspicious. `linked`: workers whose clocks can be compared
    share a number. `doubts`: reasons why the offsets may be wrong. `steps`, `ahead_s`: the offsets in each step,
    [steps] and [steps, stages, dp_ranks]. `early_s`: time before zero at which steps would then begin if most clocks
    are off; subtracted too.
    """

    offset_s: Floats
    drift: Floats
    jump_s: Floats
    jump_step: Ints
    error_s: Floats
    linked: Ints
    doubts: tuple[str, ...]
    steps: Int32s
    ahead_s: Floats
    early_s: float = 0.0

    @property
    def any_off(self) -> bool:
        """True if any clock is off."""
        return bool(self.off.any())

    @property
    def moves(self) -> bool:
        """True if a clock drifts or was stepped during the trace."""
        return bool((self.ahead_s != self.ahead_s[:1]).any())

    @property
    def off(self) -> Bools:
        """Mask of the clocks that are off, [stages, dp_ranks]."""
        off: Bools = (self.ahead_s != 0).any(axis=0)
        return off

    def untied(self, dp_ranks: tuple[int, ...]) -> str | None:
        """The workers whose clocks cannot be compared with the others', in words; None if all can."""
        numbers = self.linked
        if (numbers == numbers[0, 0]).all():
            return None
        if (numbers == numbers[:1]).all() and len(np.unique(numbers)) == numbers.shape[1]:
            return "the clocks of DP ranks"
        if (numbers == numbers[:, :1]).all() and len(np.unique(numbers)) == len(numbers):
            return "the clocks of stages"
        others = numbers != np.bincount(numbers.ravel()).argmax()
        return f"the clocks of {workers_text(others, dp_ranks)}"

    @classmethod
    def right(cls, graph: DependencyGraph) -> Clocks:
        """Clocks of a graph that were not compared."""
        return cls.correct(graph.steps, np.arange(graph.layout.pp * len(graph.dp_ranks)).reshape(graph.layout.pp, -1))

    @classmethod
    def correct(cls, steps: Int32s, linked: Ints) -> Clocks:
        """Clocks that are correct. `steps`, `linked`: as in `Clocks`."""
        zero = np.zeros(linked.shape)
        return cls(
            offset_s=zero,
            drift=zero,
            jump_s=zero,
            jump_step=np.full(zero.shape, -1),
            error_s=np.full(zero.shape, np.nan),
            linked=linked,
            doubts=(),
            steps=steps[:1],
            ahead_s=zero[None],
        )


def measure_clocks(graph: DependencyGraph, step_starts: Mapping[int, float], whole: Whole = UNDIVIDED) -> Clocks:
    """Compare the clocks of all workers. `step_starts`: start of each step, seconds, as far as known. `whole`: the job
    of which the graph may be some steps.
    """
    workers = graph.layout.pp * len(graph.dp_ranks)
    if workers < 2:
        return Clocks.right(graph)
    return whole.combined(lambda: _Observed.of(graph, step_starts), _compared)


def _compared(parts: Sequence[_Observed]) -> Clocks:
    return _Measurement(_Observed.joined(parts)).clocks()


def with_clocks_set(trace: Trace, graph: DependencyGraph, clocks: Clocks) -> Trace:
    """The trace with the offsets subtracted from every start."""
    ops = trace.ops
    dp_ranks = np.array(graph.dp_ranks)
    dp_rank = ops["dp_rank"].to_numpy()
    dp_index = np.minimum(np.searchsorted(dp_ranks, dp_rank), len(dp_ranks) - 1)
    step = trace.steps
    # A step outside the graph is not replayed, so any nearby step will do.
    of_step = np.minimum(np.searchsorted(clocks.steps, step), len(clocks.steps) - 1)
    ahead = clocks.ahead_s[of_step[step_positions(ops["step"].to_numpy(), step)], ops["pp_rank"].to_numpy(), dp_index]
    ahead[dp_ranks[dp_index] != dp_rank] = 0.0
    ahead -= clocks.early_s
    return replace(trace, ops=ops.with_columns(start=pl.col("start") - pl.Series(ahead)))


class _Observed(Struct, frozen=True, eq=False):
    """What some steps show of the clocks. `steps`: their numbers; `starts`: of each step, nan if unknown, seconds;
    [steps]. `spans`: of each stage in the first lanes of each structure, seconds, [stages, lanes]. `firsts`: start of
    each worker's first op of each step, seconds, [steps, stages, dp_ranks]; nan if it has none.
    """

    steps: Int32s
    dp_ranks: tuple[int, ...]
    starts: Floats
    spans: Mapping[StructureKey, Floats]
    firsts: Floats
    ties: TieSource

    @classmethod
    def of(cls, graph: DependencyGraph, step_starts: Mapping[int, float]) -> _Observed:
        stages = graph.layout.pp
        firsts = np.full((len(graph.steps), stages, len(graph.dp_ranks)), np.nan)
        for block in graph.blocks:
            leading = (block.template.seq == 0) | block.occasional_rows
            for stage in range(stages):
                rows = np.flatnonzero((block.template.pp_rank == stage) & leading)
                firsts[block.step, stage, graph.dp_index(block)] = block.start[rows].min(axis=0)
        return cls(
            graph.steps,
            graph.dp_ranks,
            np.array([step_starts.get(step, np.nan) for step in graph.steps.tolist()]),
            {block.key: _spans(block, stages) for block in graph.blocks},
            firsts,
            TieSource.of(graph),
        )

    @classmethod
    def joined(cls, parts: Sequence[_Observed]) -> _Observed:
        """The steps of several batches, one after the other."""
        spans = by_name([part.spans for part in parts])
        return cls(
            np.concatenate([part.steps for part in parts]),
            parts[0].dp_ranks,
            np.concatenate([part.starts for part in parts]),
            {key: np.concatenate(of_batches, axis=1)[:, :LANES_FOR_LENGTH] for key, of_batches in spans.items()},
            np.concatenate([part.firsts for part in parts]),
            TieSource.joined([part.ties for part in parts], [len(part.steps) for part in parts]),
        )

    @property
    def step_s(self) -> float:
        """The approximate length of a step, seconds: from the first start to the latest end on any of a few lanes."""
        return max(float(np.median(np.concatenate(list(self.spans.values()), axis=1))), RESOLUTION_S)

    @property
    def times(self) -> Floats:
        """Start of each step, seconds: as recorded, else as if all steps of the job had the length of these."""
        if np.isfinite(self.starts).all() and (np.diff(self.starts) > 0).all():
            return np.asarray(self.starts - self.starts[0], np.float64)
        return np.asarray((self.steps - self.steps[0]) * self.step_s, np.float64)


def _spans(block: Block, stages: int) -> Floats:
    """From the first start to the latest end of each stage in the first lanes, seconds, [stages, lanes].

    By the clock of each stage, which may be off.
    """
    start, duration = block.start[:, :LANES_FOR_LENGTH], block.duration[:, :LANES_FOR_LENGTH]
    of_stages = [block.template.pp_rank == stage for stage in range(stages)]
    return np.stack([(start[rows] + duration[rows]).max(axis=0) - start[rows].min(axis=0) for rows in of_stages])


class _Measurement:
    """One comparison of all clocks of a job."""

    def __init__(self, seen: _Observed) -> None:
        self.seen = seen
        self.steps = len(seen.steps)
        self.times = seen.times
        self.step_s = seen.step_s
        self.floor_s = max(RESOLUTION_S, SMALLEST_SHARE * self.step_s)
        self.source = seen.ties
        self.lanes = np.arange(len(seen.dp_ranks))
        workers = seen.firsts[0].size
        self.most_runs = int(np.clip(MOST_VALUES // workers, FEWEST_RUNS, MOST_RUNS))

    def clocks(self) -> Clocks:
        runs = _runs(np.arange(self.steps), self.most_runs)
        ties = self.source.ties(runs)
        linked = ties.linked()
        suspects = _suspects(ties, self.floor_s)
        if not suspects.any():
            return Clocks.correct(self.seen.steps, linked)
        self.lanes = _with_company(suspects)
        ties, linked_lanes = ties.only(self.lanes), linked[:, self.lanes]
        offsets = estimate_offsets(ties, EXACTNESS * self.floor_s)
        reference = self._in_step(offsets, linked_lanes)
        offsets = _relative(offsets, reference, linked_lanes)
        witnesses = question(ties, offsets, self.floor_s)
        flat = offsets.reshape(len(runs), -1)
        times = np.array([self.times[run].mean() for run in runs])
        courses = fit_courses(flat, times, witnesses.scatter_s.ravel(), self.floor_s)
        off = np.abs(courses.ahead_s).max(axis=0) > np.maximum(self.floor_s, ERRORS * courses.error_s)
        first = self._first_after_jump(runs, courses, off, reference, linked_lanes)
        ahead = self._by_step(runs, courses, off, first)
        alone = np.bincount(linked_lanes.ravel(), minlength=linked.size)[linked_lanes.ravel()] < 2
        return Clocks(
            offset_s=self._everywhere(ahead.mean(axis=0)),
            drift=self._everywhere(np.where(off, courses.drift, 0.0)),
            jump_s=self._everywhere(np.where(off, courses.jump_s, 0.0)),
            jump_step=self._everywhere(np.where(first >= 0, self.seen.steps[np.maximum(first, 0)], -1), rest=-1),
            error_s=self._everywhere(np.where(alone, np.nan, courses.error_s), rest=np.nan),
            linked=linked,
            doubts=self._doubts(courses, off, witnesses),
            steps=self.seen.steps,
            ahead_s=self._everywhere(ahead),
            early_s=self._early_s(ahead) if off.mean() > MAJORITY else 0.0,
        )

    def _early_s(self, ahead: Floats) -> float:
        """Time before zero at which steps would begin: even the clocks taken as correct may be off."""
        begins = float(np.nanmedian(np.nanmin(self._firsts - ahead, axis=1)))
        return max(-begins, 0.0) if -begins > self.floor_s else 0.0

    def _everywhere(self, values: np.ndarray, rest: float = 0) -> np.ndarray:
        """Values of the compared workers, [..., workers], as [..., stages, dp_ranks]; `rest` for the others."""
        full = np.full((*values.shape[:-1], *self.seen.firsts.shape[1:]), rest, values.dtype)
        full[..., self.lanes] = values.reshape(*values.shape[:-1], self.seen.firsts.shape[1], -1)
        return full

    def _in_step(self, offsets: Floats, linked: Ints) -> Bools:
        """Mask of clocks taken as correct: the most common time among those that can be compared, [workers]."""
        runs = len(offsets)
        flat = offsets.reshape(runs, -1)
        parts = np.stack([np.median(flat[part], axis=0) for part in _runs(np.arange(runs), min(3, runs))])
        tolerance_s = max(self.floor_s, ERRORS * MEDIAN_ERROR * scatter(flat) / np.sqrt(max(runs // 3, 1)))
        chosen = np.zeros(flat.shape[1], np.bool_)
        for number in np.unique(linked):
            members = np.flatnonzero(linked.ravel() == number)
            candidates = members[np.unique(np.linspace(0, len(members) - 1, MOST_CANDIDATES).astype(np.int64))]
            distance = np.abs(parts[:, candidates, None] - parts[:, None, members]).max(axis=0)
            agreeing = (distance <= tolerance_s).sum(axis=1)
            best = candidates[agreeing == agreeing.max()]
            usual = np.median(flat, axis=0)
            # If equally many clocks show one time as another, steps begin closer to zero with the correct one.
            middle = (
                best[0]
                if np.ptp(usual[best]) <= tolerance_s
                else min(best, key=lambda right: self._begins_s(usual, members, right))
            )
            chosen[members[np.abs(parts[:, members] - parts[:, [middle]]).max(axis=0) <= tolerance_s]] = True
        return chosen

    def _begins_s(self, usual: Floats, members: Ints, right: int) -> float:
        """Distance from zero at which steps begin if the clock `right` is correct, seconds."""
        firsts = self._firsts[:, members] - usual[members] + usual[right]
        return abs(float(np.nanmedian(np.nanmin(firsts, axis=1))))

    @cached_property
    def _firsts(self) -> Floats:
        """Start of each compared worker's first op of each step, seconds, [steps, compared workers]."""
        return self.seen.firsts[:, :, self.lanes].reshape(self.steps, -1)

    def _first_after_jump(self, runs: list[Ints], courses: Courses, off: Bools, reference: Bools, linked: Ints) -> Ints:
        """The index of the first step after each clock was stepped, -1 if it was not, [workers]."""
        first = np.full(len(off), -1)
        for worker in np.flatnonzero(off & (courses.jump_run >= 0)):
            before, after = courses.ahead_s[0, worker], courses.ahead_s[-1, worker]
            run, inside = int(courses.jump_run[worker]), runs
            while len(inside[run - 1]) > 1 or len(inside[run]) > 1:
                inside = _runs(np.concatenate([inside[run - 1], inside[run]]), self.most_runs)
                ties = self.source.ties(inside).only(self.lanes)
                offsets = _relative(estimate_offsets(ties, EXACTNESS * self.floor_s), reference, linked)
                of_worker = offsets.reshape(len(inside), -1)[:, worker]
                costs = [
                    np.abs(of_worker[:cut] - before).sum() + np.abs(of_worker[cut:] - after).sum()
                    for cut in range(1, len(of_worker))
                ]
                run = int(np.argmin(costs)) + 1
            first[worker] = inside[run][0]
        return first

    def _by_step(self, runs: list[Ints], courses: Courses, off: Bools, first: Ints) -> Floats:
        """Offset of each clock in each step, seconds ahead, [steps, workers]; 0 if it is not off."""
        since = self.times - self.times[runs[0]].mean()
        ahead = courses.ahead_s[0] + courses.drift * since[:, None]
        jumped = (first >= 0) & (np.arange(self.steps)[:, None] >= first)
        return np.where(off, np.where(jumped, courses.ahead_s[-1], ahead), 0.0)

    def _doubts(self, courses: Courses, off: Bools, witnesses: Witnesses) -> tuple[str, ...]:
        """Reasons why the measured clocks may be wrong."""
        limit_s = max(LARGEST_UNKNOWN * self.step_s, RESOLUTION_S)
        size = np.abs(courses.ahead_s).max(axis=0)
        matters = off & (size > limit_s)
        irregular = courses.irregular_s > limit_s
        speak, against = witnesses.for_it.ravel(), witnesses.against.ravel()
        contested = matters & (speak <= against)
        alone = matters & ~contested & (witnesses.kinds.ravel() * self.steps < 2)
        vague = (
            (size > limit_s)
            & (~off | (courses.error_s > limit_s))
            & ((size > courses.error_s) | np.isinf(courses.error_s))
        )
        reasons = [
            (irregular, "moved irregularly during the trace", courses.irregular_s),
            (contested, "may be off, but as many of its ops contradict that as say so", size),
            (alone, "may be off, but a single collective in a single step is all that says so", size),
            (vague & ~contested & ~alone & ~irregular, "may be off, and is not known well enough", size),
        ]
        return tuple(
            f"the clock of {self._named(mask)} {problem} (by up to {seconds(float(how_much[mask].max()))})"
            for mask, problem, how_much in reasons
            if mask.any()
        )

    def _named(self, mask: Bools) -> str:
        return workers_text(self._everywhere(mask), self.seen.dp_ranks)


def workers_text(mask: Bools, dp_ranks: tuple[int, ...]) -> str:
    """Names of workers; only a few of many. `mask`: [stages, dp_ranks]."""
    cells = np.argwhere(mask.T)
    named = ", ".join(str(Worker(dp_ranks[dp_index], int(stage))) for dp_index, stage in cells[:MOST_NAMED])
    more = f" and {len(cells) - MOST_NAMED} more" if len(cells) > MOST_NAMED else ""
    return f"worker{'s' if len(cells) > 1 else ''} {named}{more}"


def _suspects(ties: Ties, floor_s: float) -> Bools:
    """DP ranks with a tie that suggests a wrong clock, [dp_ranks]: none in most jobs."""
    low, high = np.maximum(ties.low, 0.0), np.maximum(-ties.high, 0.0)
    values = [group.left_s for group in ties.groups] + [low, high, ties.ends]
    return np.asarray(np.any([_off_zero(value, floor_s) for value in values], axis=0))


def _off_zero(value: Floats, floor_s: float) -> Bools:
    """Mask of ties whose values, [runs, ..., dp_ranks], differ significantly from zero, over the trace or in a run."""
    axes = tuple(range(value.ndim - 1))
    size = np.nan_to_num(np.abs(value))
    if len(value) < FEWEST_FOR_SCATTER or size.max() <= floor_s:
        return np.asarray((size > floor_s).any(axis=axes))
    usual, spread = np.nan_to_num(median(value, (0,))), scatter(value)
    steady = np.abs(usual) > max(floor_s, ERRORS * MEDIAN_ERROR * spread / np.sqrt(len(value)))
    at_times = np.nan_to_num(np.abs(value - usual)) > max(floor_s, RUN_ERRORS * spread)
    return np.asarray(steady.any(axis=axes[:-1]) | at_times.any(axis=axes))


def _with_company(suspects: Bools) -> Ints:
    """The DP ranks to look at: the suspects, and as many others for comparison, at least `FEWEST_OTHERS`."""
    others = np.flatnonzero(~suspects)
    wanted = max(int(suspects.sum()), FEWEST_OTHERS)
    sample = others[np.unique(np.linspace(0, len(others) - 1, wanted).astype(np.int64))] if len(others) else others
    return np.sort(np.concatenate([np.flatnonzero(suspects), sample]))


def _relative(offsets: Floats, reference: Bools, linked: Ints) -> Floats:
    """Offsets relative to the clocks that are taken as correct, [runs, stages, dp_ranks]."""
    flat = offsets.reshape(len(offsets), -1).copy()
    numbers = linked.ravel()
    for number in np.unique(numbers):
        linked_together = numbers == number
        flat[:, linked_together] -= np.median(flat[:, linked_together & reference], axis=1)[:, None]
    return flat.reshape(offsets.shape)


def _runs(steps: Ints, most: int) -> list[Ints]:
    """Split steps into at most `most` runs of neighbours."""
    return np.array_split(steps, max(1, min(most, len(steps))))


class Witnesses(Struct, frozen=True, eq=False):
    """The evidence of each worker's ties about its offset, [stages, dp_ranks] each.

    `for_it`, `against`: weight of the ties that the offset satisfies but a correct clock would not, and of those that
    it does not satisfy. `kinds`: number of ties. `scatter_s`: scatter of the best agreeing tie from run to run,
    seconds; infinite if none agrees.
    """

    for_it: Floats
    against: Floats
    kinds: Ints
    scatter_s: Floats


class _Misfit(Struct, frozen=True, eq=False):
    """Misfit of one tie per run and worker, seconds, nan if there is none: at the offset, and with a correct clock."""

    weight: float
    took_s: float
    now: Floats
    if_right: Floats


def question(ties: Ties, offsets: Floats, floor_s: float) -> Witnesses:
    """Collect the evidence. `offsets`: seconds, [runs, stages, dp_ranks]. Misfits up to `floor_s` count as 0."""
    _, stages, dp_ranks = ties.shape
    for_it, against = np.zeros((2, stages, dp_ranks))
    kinds = np.zeros((stages, dp_ranks), np.int64)
    scatter_s = np.full((stages, dp_ranks), np.inf)
    # For a clock stepped during the trace, look at the runs in which it is off.
    off = np.abs(offsets) > floor_s
    asked = off | ~off.any(axis=0)
    for misfit in _misfits(ties, offsets):
        both = np.stack([misfit.now, misfit.if_right])
        now, if_right = np.abs(median(np.where(asked, both, np.nan), (1,)))
        compared = np.isfinite(now)
        scatter_of_tie = _scatter(misfit)
        tolerance = np.maximum(floor_s, ERRORS * MEDIAN_ERROR * scatter_of_tie / np.sqrt(len(offsets)))
        agrees = compared & (now <= tolerance)
        for_it += misfit.weight * (agrees & (if_right > tolerance))
        against += misfit.weight * (compared & ~agrees)
        kinds += compared
        scatter_s = np.where(agrees, np.minimum(scatter_s, scatter_of_tie), scatter_s)
    return Witnesses(for_it, against, kinds, scatter_s)


def _misfits(ties: Ties, offsets: Floats) -> Iterator[_Misfit]:
    for group in ties.groups:
        axes = (1, 2) if group.all_stages else (2,)
        late = group.left_s - offsets
        late = late - np.expand_dims(median(late, axes), axes)
        yield _Misfit(group.weight, group.took_s, late, late + offsets)
    following = np.roll(offsets, -1, axis=1)
    low, high = np.where(np.isinf(ties.low), np.nan, ties.low), np.where(np.isinf(ties.high), np.nan, ties.high)
    if ties.shape[1] > 1:
        yield _Misfit(1.0, ties.link_took_s, _outside(following - offsets, low, high), _outside(following, low, high))
        before = np.roll(offsets, 1, axis=1)
        low, high = np.roll(low, 1, axis=1), np.roll(high, 1, axis=1)
        yield _Misfit(1.0, ties.link_took_s, _outside(offsets - before, low, high), _outside(-before, low, high))


def _outside(value: Floats, low: Floats, high: Floats) -> Floats:
    """Distance of a value from its bounds, 0 inside; nan if there are none."""
    bounded = np.isfinite(low) | np.isfinite(high)
    return np.where(
        bounded, value - np.clip(value, np.nan_to_num(low, nan=-np.inf), np.nan_to_num(high, nan=np.inf)), np.nan
    )


def _scatter(misfit: _Misfit) -> float:
    """The spread of a tie's evidence about a clock in one run of steps, seconds."""
    if len(misfit.now) < FEWEST_FOR_SCATTER:
        return max(SCATTER_SHARE * misfit.took_s, RESOLUTION_S)
    return scatter(misfit.now)
