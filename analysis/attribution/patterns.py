"""Patterns of a slow job over time and space, and isolated stalls.

In: an `Attribution`, the hosts of its ranks, and for stalls its replay. Out: `TimePattern`, the course of the slowdown
over the steps, with the statistic behind it; `SpacePattern`, the worker map of exact S_w over the job and step by step;
`Stall`s, the few steps that took much longer than the others. A recorded step consists of the ops on its critical path
and the gaps between them, so the parts that grew on the path of a slow step account for its extra time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints, number
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA
from tracekit.analysis.whatif.interventions import RECORDED
from tracekit.base.limits import Count, Finite, Number, Ordinal, Proportion
from tracekit.trace.model import KINDS, OpKind, Worker

if TYPE_CHECKING:
    from tracekit.analysis.replay.engine import JobReplay

#: Accept gaps in the step numbers until their range exceeds the number of steps by this factor.
_SPARSEST = 8
#: Above the rounding error of a share that a Fourier transform computes.
_ROUNDING = 1e-6


class PatternThresholds(Struct, frozen=True):
    """When step times and slowdowns of workers have a pattern."""

    #: A slowdown below this is not a pattern. Chosen: as much as a finding has to cost.
    smallest_slowdown: float = 1.02
    #: A change must exceed the scatter of step times by this many standard errors, wherever it is ... Chosen.
    change_errors: float = 5.0
    #: ... a trend by so many ... Statistic: one normal value of 30,000.
    trend_errors: float = 4.0
    #: ... a slow step by so many ... Statistic: no normal step of a million.
    slow_step_errors: float = 5.0
    #: ... and each by this share of the step. Chosen.
    smallest_change: float = 0.03
    #: A line that explains this share of the variance is a drift even if its last steps look like outliers. Chosen.
    clear_line_share: float = 0.8
    #: Slow steps below this share of all steps are transient; more are the normal state. Chosen.
    transient_share: float = 0.3
    #: A slowdown is persistent if the usual step loses at least this share of the loss of slow steps. Chosen.
    persistent_share: float = 0.3
    #: The phase within a period must explain this share of the variance, beyond chance. Chosen.
    periodic_share: float = 0.6
    #: Fewer steps have no pattern. Chosen: three on each side of a change.
    fewest_steps: int = 6
    #: Workers whose S_w - 1 reaches this share of the largest one are slow too. Chosen.
    hot_share: float = 0.4
    #: What is isolated is seen in this many steps at most, if they are fewer than half of all ... Definition.
    most_steps: int = 2
    #: ... and another step that has more than this share of what these have, has it, too. Chosen.
    share_of_another: float = 0.25
    #: What stands apart takes this share of the recording longer. Chosen: as much as a finding has to cost.
    longer_share: float = 0.02
    #: A stage (or DP rank) is slow as a whole if this share of its workers is slow. Chosen.
    whole_share: float = 0.7
    #: A pattern stays in place if the same worker is worst in this share of the steps. Definition: mostly.
    stays_share: float = 0.5


PATTERNS = PatternThresholds()


class StepTimes(Struct, frozen=True, eq=False):
    """Times of each step, seconds, [steps] each: as recorded; replayed without launch delays; without stragglers."""

    steps: Int32s
    recorded: Floats
    original: Floats
    ideal: Floats


class TimeShape(StrEnum):
    """The course of the slowdown over the steps."""

    NONE = "none"
    PERSISTENT = "persistent"
    TRANSIENT = "transient"
    PERIODIC = "periodic"
    DRIFTING = "drifting"
    CHANGED = "changed"


class SpaceShape(StrEnum):
    """The set of slow workers."""

    NONE = "none"
    ONE_WORKER = "one-worker"
    ONE_HOST = "one-host"
    ONE_STAGE = "one-stage"
    ONE_DP_RANK = "one-dp-rank"
    SEVERAL_WORKERS = "several-workers"
    DIFFUSE = "diffuse"


class TimePattern(Struct, frozen=True):
    """The slowdown over the steps."""

    shape: TimeShape  #: `none`, `persistent`, `transient`, `periodic`, `drifting` or `changed`
    statistic: Number  #: the figure that decided, in standard errors; of a period, a share of the variance
    needed: Finite  #: what it had to reach
    since_step: Ordinal | None  #: first step of a lasting change
    period: Count | None  #: steps from one slow step to the next
    slow_steps: tuple[Ordinal, ...]  #: single slow steps


class SpacePattern(Struct, frozen=True):
    """The worker map."""

    shape: SpaceShape  #: `none`, `one-worker`, `one-host`, `one-stage`, `one-dp-rank`, `several-workers` or `diffuse`
    workers: tuple[Worker, ...]  #: the workers of the pattern
    host: str | None  #: their host, where it is one
    stays: Proportion | None  #: share of the steps in which the usual worst worker is the worst


def time_pattern(attribution: Attribution) -> TimePattern:
    """The shape of the slowdown over the steps."""
    series = attribution.original / float(np.median(attribution.ideal))
    return pattern_of_series(series, [int(step) for step in attribution.steps])


def pattern_of_series(series: Floats, steps: list[int]) -> TimePattern:
    """The shape of a relative series, [steps]; 1 = ideal. Tests in order: drift, change, period, slow steps."""

    def pattern(shape: TimeShape, statistic: float, needed: float, **more: Any) -> TimePattern:
        fields = {"since_step": None, "period": None, "slow_steps": ()} | more
        return TimePattern(shape, number(statistic), needed, **fields)

    level = float(np.median(series))
    steady = TimeShape.PERSISTENT if level >= PATTERNS.smallest_slowdown else TimeShape.NONE
    if len(series) < PATTERNS.fewest_steps:
        return pattern(steady, level, PATTERNS.smallest_slowdown)
    # The standard deviation of a step, from differences of neighbours, which trends and jumps hardly affect.
    noise = max(float(MAD_TO_SIGMA * np.median(np.abs(np.diff(series))) / np.sqrt(2)), 1e-9)
    since, change = _change_point(series, noise)
    gap = abs(float(series[since:].mean() - series[:since].mean()))
    trend, rise = _trend(series)
    slow = np.flatnonzero(series > level + max(PATTERNS.slow_step_errors * noise, PATTERNS.smallest_change * level))
    slow_steps = tuple(steps[position] for position in slow)
    few = 0 < len(slow) <= PATTERNS.transient_share * len(series)
    at_all = np.arange(len(series))
    line = _explained_variance(series, np.polyval(np.polyfit(at_all, series, 1), at_all).astype(np.float64))
    jump = _explained_variance(series, np.where(at_all < since, series[:since].mean(), series[since:].mean()))
    drifts = line > jump and (line > PATTERNS.clear_line_share or not few)
    if trend > PATTERNS.trend_errors and rise > PATTERNS.smallest_change and drifts:
        return pattern(TimeShape.DRIFTING, trend, PATTERNS.trend_errors)
    if change > PATTERNS.change_errors and gap > PATTERNS.smallest_change and not few:
        return pattern(TimeShape.CHANGED, change, PATTERNS.change_errors, since_step=steps[since])
    period, share = _period(series, np.array(steps))
    if period is not None:
        return pattern(TimeShape.PERIODIC, share, PATTERNS.periodic_share, period=period, slow_steps=slow_steps)
    if few and level - 1 < PATTERNS.persistent_share * (float(series[slow].mean()) - 1):
        height = float((series[slow] - level).max() / noise)
        return pattern(TimeShape.TRANSIENT, height, PATTERNS.slow_step_errors, slow_steps=slow_steps)
    return pattern(steady, level, PATTERNS.smallest_slowdown)


def some_stand_apart(step_s: Floats) -> bool:
    """Whether a step is long enough for work that stands apart from that of all others. `step_s`: [steps]."""
    if len(step_s) < PATTERNS.fewest_steps:
        return False
    return float(step_s.max() - np.median(step_s)) >= PATTERNS.longer_share * float(step_s.sum()) / PATTERNS.most_steps


def isolated(values: Floats, count: int) -> tuple[Ints, Floats, float] | None:
    """Positions of the `count` largest of some values, ascending, by how much each exceeds what is usual among the
    others, and that, at least 0; None unless they stand far apart from all others, and are fewer than half of all.
    """
    if 2 * count >= len(values):
        return None
    largest = np.sort(np.argsort(-values, kind="stable")[:count])
    others = np.delete(values, largest)
    usual = max(float(np.median(others)), 0.0)
    beyond = values[largest] - usual
    return (largest, beyond, usual) if others.max() - usual <= PATTERNS.share_of_another * beyond.min() else None


def _change_point(series: Floats, noise: float) -> tuple[int, float]:
    """The split with the largest difference of means, and that in standard errors; >= 2 steps on each side."""
    count = len(series)
    ends = np.arange(2, count - 1)
    total = np.cumsum(series)
    before = total[ends - 1] / ends
    after = (total[-1] - total[ends - 1]) / (count - ends)
    errors = np.abs(after - before) / (noise * np.sqrt(1 / ends + 1 / (count - ends)))
    best = int(errors.argmax())
    return int(ends[best]), float(errors[best])


def _trend(series: Floats) -> tuple[float, float]:
    """Mann-Kendall's z for a rise, and the fitted rise over the series."""
    count = len(series)
    z = rising_pairs(series) / np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    slope = np.polyfit(np.arange(count), series, 1)[0]
    return float(z), float(slope * (count - 1))


def rising_pairs(series: Floats) -> int:
    """The number of rising pairs of values minus the falling ones: Mann-Kendall's S, exact, O(n log^2 n) time, O(n)
    memory.

    As in a merge sort, runs of doubling width meet their right neighbour; every value on the right counts the values on
    the left that are below and above it.
    """
    rank = np.unique(series, return_inverse=True)[1].astype(np.int64)
    position, beyond, total, width = np.arange(len(rank)), len(rank) + 1, 0, 1
    while width < len(rank):
        pair = position // (2 * width) * beyond
        on_right = position // width % 2 == 1
        lower_half, right, first = np.sort((pair + rank)[~on_right]), (pair + rank)[on_right], pair[on_right]
        below = np.searchsorted(lower_half, right) - np.searchsorted(lower_half, first)
        above = np.searchsorted(lower_half, first + beyond) - np.searchsorted(lower_half, right, side="right")
        total += int((below - above).sum())
        width *= 2
    return total


def _explained_variance(series: Floats, model: Floats) -> float:
    """The share of the variance that a model explains."""
    variance = float(((series - series.mean()) ** 2).sum())
    return 1 - float(((series - model) ** 2).sum()) / variance if variance else 0.0


def _period(series: Floats, steps: Any) -> tuple[int | None, float]:
    """The shortest period whose phases explain the variance (adjusted for their number), and the share that they
    explain.
    """
    variance = float(((series - series.mean()) ** 2).sum())
    count = len(series)
    if variance == 0 or float(np.ptp(series)) < PATTERNS.smallest_change:
        return None, 0.0
    for period in _possible_periods(series - series.mean(), steps).tolist():
        phase = steps % period
        sums = np.bincount(phase, series - series.mean(), minlength=period)
        sizes = np.bincount(phase, minlength=period)
        if (sizes < 2).any():
            continue
        explained = float((sums**2 / sizes).sum()) / variance
        share = 1 - (1 - explained) * (count - 1) / (count - period)
        if share >= PATTERNS.periodic_share:
            return period, share
    return None, 0.0


def _possible_periods(deviation: Floats, steps: Any) -> Ints:
    """The periods, ascending, that could explain enough variance; all others provably cannot.

    The squared sums of the phases add up to the autocorrelation at all multiples of the period, and a phase that counts
    has at least two steps (if no step is missing: all but one of the fullest). So a single Fourier transform bounds the
    share of every period, and thousands of steps need no pass for each period.
    """
    count, span = len(steps), int(steps[-1] - steps[0]) + 1
    periods = np.arange(2, count // 3 + 1)
    if span > _SPARSEST * count:
        return periods
    line = np.zeros(span)
    line[steps - steps[0]] = deviation
    spectrum = np.fft.rfft(line, 2 * span)
    correlation = np.fft.irfft(np.abs(spectrum) ** 2, 2 * span)[:span]
    squares = np.array([correlation[0] + 2 * correlation[period::period].sum() for period in periods])
    smallest = count // periods if span == count else 2
    explained = squares / smallest / correlation[0] + _ROUNDING
    possible: Ints = periods[1 - (1 - explained) * (count - 1) / (count - periods) >= PATTERNS.periodic_share]
    return possible


def space_pattern(attribution: Attribution, hosts: Mapping[Worker, str]) -> SpacePattern:
    """The shape of the map of exact S_w. `hosts`: the host of each worker, as far as known."""
    slowdown = attribution.worker_slowdown - 1
    per_step = (attribution.by_worker / attribution.ideal[:, None, None]).reshape(len(attribution.steps), -1)
    worst = per_step.argmax(axis=1)
    stays = float(np.bincount(worst).max() / len(worst))

    def pattern(shape: SpaceShape, cells: Any = (), host: str | None = None) -> SpacePattern:
        return SpacePattern(shape, tuple(_worker(attribution, int(cell)) for cell in cells), host, number(stays))

    largest = float(slowdown.max())
    usual = float(per_step.max(axis=1).mean()) - 1
    if largest < PATTERNS.smallest_slowdown - 1 and usual < 2 * (PATTERNS.smallest_slowdown - 1):
        return pattern(SpaceShape.NONE)
    slow = slowdown >= max(PATTERNS.hot_share * largest, PATTERNS.smallest_slowdown - 1)
    cells = np.flatnonzero(slow)
    shape, host = _shape(slow, [hosts.get(_worker(attribution, int(cell))) for cell in cells])
    if shape in {SpaceShape.SEVERAL_WORKERS, SpaceShape.ONE_HOST} and stays < PATTERNS.stays_share:
        return pattern(SpaceShape.DIFFUSE)
    if shape is SpaceShape.ONE_WORKER and stays < PATTERNS.stays_share and largest < usual / 2:
        return pattern(SpaceShape.DIFFUSE)
    return pattern(shape if len(cells) else SpaceShape.DIFFUSE, cells, host)


def _shape(slow: Any, hosts: list[str | None]) -> tuple[SpaceShape, str | None]:
    """The shape that slow workers form. `slow`: [dp_ranks, stages]; `hosts`: those of the slow workers."""
    dp_ranks, stages = np.flatnonzero(slow.any(axis=1)), np.flatnonzero(slow.any(axis=0))
    if slow.sum() <= 1:
        return SpaceShape.ONE_WORKER, hosts[0] if hosts else None
    if len(stages) == 1 < slow.shape[1] and len(dp_ranks) >= PATTERNS.whole_share * slow.shape[0]:
        return SpaceShape.ONE_STAGE, None
    if len(dp_ranks) == 1 < slow.shape[0] and len(stages) >= PATTERNS.whole_share * slow.shape[1]:
        return SpaceShape.ONE_DP_RANK, None
    if len(set(hosts)) == 1 and hosts[0] is not None:
        return SpaceShape.ONE_HOST, hosts[0]
    return SpaceShape.SEVERAL_WORKERS, None


def _worker(attribution: Attribution, cell: int) -> Worker:
    dp_index, stage = divmod(cell, attribution.stages)
    return Worker(attribution.dp_ranks[dp_index], stage)


class StallPart(StrEnum):
    """The part of a step that took longer."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    DATA = "data"
    GARBAGE_COLLECTION = "garbage collection"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    HOST = "host"


#: The part of each kind that is neither compute nor communication.
_PART = {
    OpKind.DATA_LOAD: StallPart.DATA,
    OpKind.GC: StallPart.GARBAGE_COLLECTION,
    OpKind.CHECKPOINT: StallPart.CHECKPOINT,
    OpKind.EVALUATION: StallPart.EVALUATION,
    OpKind.HOST_DELAY: StallPart.HOST,
}


def _part(kind: OpKind) -> StallPart:
    return _PART.get(kind, StallPart.COMMUNICATION if kind.is_communication else StallPart.COMPUTE)


_PARTS = tuple(StallPart)
#: Index into `_PARTS` for each op kind, by the kind's code.
_PART_OF_KIND = np.array([_PARTS.index(_part(kind)) for kind in KINDS])


class Stall(Struct, frozen=True, eq=False):
    """A step that took longer than the usual one."""

    step: Ordinal  #: an isolated slow step
    extra_s: Finite  #: by how much the recorded step exceeds the median one
    #: what most of that went to: `compute`, `communication`, `data`, `garbage collection`, `checkpoint`, `evaluation`
    #: or `host`
    part: StallPart


def stalls_of(replay: JobReplay, attribution: Attribution) -> tuple[Stall, ...]:
    """The isolated slow steps, longest first; empty if slow steps are common or the job only drifts."""
    recorded = attribution.recorded
    usual_s = float(np.median(recorded))
    pattern = pattern_of_series(recorded / usual_s, attribution.steps.tolist())
    if pattern.shape not in {TimeShape.TRANSIENT, TimeShape.PERIODIC} or not pattern.slow_steps:
        return ()
    slow = np.isin(attribution.steps, pattern.slow_steps)
    if slow.mean() > PATTERNS.transient_share:
        return ()
    of_slow = _seconds_by_part(replay.only_steps(pattern.slow_steps))
    # The parts of a usual step: the mean over all steps, without the slow ones.
    usual = (_mean_by_part(attribution) * len(recorded) - of_slow.sum(axis=0)) / (~slow).sum()
    longer = (of_slow - usual).argmax(axis=1)
    stalls = [
        Stall(int(step), float(recorded_s) - usual_s, _PARTS[part])
        for step, recorded_s, part in zip(attribution.steps[slow], recorded[slow], longer, strict=True)
    ]
    return tuple(sorted(stalls, key=lambda stall: -stall.extra_s))


def _seconds_by_part(replay: JobReplay) -> Floats:
    """Seconds of each part in each recorded step, [steps, parts]."""
    graph, path = replay.graph, critical_path(replay, RECORDED)
    totals = np.zeros((len(graph.steps), len(_PARTS)))
    for index, block in enumerate(graph.blocks):
        of_block = path.block == index
        part = _PART_OF_KIND[block.template.kind[path.row[of_block]]]
        np.add.at(totals, (path.step[of_block], part), path.cost_s[of_block])
    np.add.at(totals[:, _PARTS.index(StallPart.HOST)], path.step, path.delay_s)
    return totals


def _mean_by_part(attribution: Attribution) -> Floats:
    """Seconds of each part in the mean recorded step, [parts]; kinds that are reported together share a part."""
    path = attribution.critical["recorded"]
    totals = np.zeros(len(_PARTS))
    for name, seconds in path.by_kind.items():
        part = _part(OpKind(name)) if name in set(OpKind) else StallPart.COMMUNICATION
        totals[_PARTS.index(part)] += seconds
    totals[_PARTS.index(StallPart.HOST)] += path.delay_s
    return totals
