"""What workers did in one or two steps only, and far beyond anything in all others: a freeze, a burst, a late batch.

In: a pipeline. Out: `OneOff`s, and the job without them. What is seen once says nothing about the other steps, so the
evidence for causes that return is that of the job without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property, partial

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.attribution.patterns import PATTERNS, isolated, some_stand_apart
from tracekit.analysis.evidence.computes import Computes, find_paused_starts
from tracekit.analysis.evidence.host_code import launch_delays
from tracekit.analysis.evidence.pipeline_subject import (
    PipelineSubject,
    backwards,
    checkpoints,
    collections,
    data_loads,
    evaluations,
    find_breaks,
    first_forwards,
    first_gathers,
    forwards,
    host_work,
    optimizers,
    transfers,
)
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.graph.op_grid import OpGrid, TransferGrid, op_grid
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, NOTHING, median, safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleDelays, Together, changed, scaled
from tracekit.trace.model import COMMUNICATION, P2P, OpKind


class OneOffThresholds(Struct, frozen=True):
    """When work stands apart from that of all other steps; in how many steps: `analysis.attribution.patterns`."""

    #: It is longer than usual by so many spreads of the other steps. Statistic: no normal step of a million.
    spreads: float = 8.0
    #: The computes of a worker are all slow, not held up one by one, if the usual one is longer by this share of what
    #: all of them are. Definition: nearer to all than to one.
    of_all: float = 0.5


ONE_OFFS = OneOffThresholds()
#: The largest factor that is told.
MOST_TIMES = 1000.0
#: Without recorded data loading, a delay before the first of these in a step is a wait for data.
_FIRST = frozenset({OpKind.FORWARD_COMPUTE, OpKind.PARAMS_ALL_GATHER})


class WorkPart(StrEnum):
    """A part of what a worker does itself, or of what it shares with others."""

    COMPUTE = "compute"
    DATA = "data"
    OPTIMIZER = "optimizer"
    HOST = "host"
    COLLECTION = "collection"
    NETWORK = "network"


class _OpsOfPart(Struct, frozen=True, eq=False, dict=True):
    """Ops of one kind and part: `seconds`, like the grid, in them or, for `delays`, before them. `raw_s`: what the
    replay has for these, which may contain time that belongs to something else. `steady`: they belong to every step.
    """

    grid: OpGrid | TransferGrid
    seconds: Floats
    raw_s: Floats
    delays: bool = False
    steady: bool = False

    @cached_property
    def usual_s(self) -> Floats:
        """What each takes in the usual step, seconds, [slots, ops, 1, dp_ranks]."""
        seconds = self.seconds if self.steady else np.nan_to_num(self.seconds)
        return np.nan_to_num(median(seconds, (2,)))[:, :, None]

    @cached_property
    def beyond_s(self) -> Floats:
        """How much longer each takes than in the usual step, seconds, like the grid; of steps of different length, only
        what most of them have counts.
        """
        beyond = np.nan_to_num(self.seconds) - self.usual_s
        if not self.steady:
            return beyond
        recorded = np.isfinite(self.seconds)
        return np.where(recorded & (2 * recorded.sum(axis=2, keepdims=True) > recorded.shape[2]), beyond, 0.0)

    def as_usual(self, cells: Bools) -> Intervention:
        """The job in which these take as long as usual where `cells`, [slots, steps, dp_ranks], are true."""
        share = np.clip(1 - self.beyond_s / safe(self.raw_s), 0.0, 1.0 if self.delays else None)
        factor = np.where(cells[:, None] & (np.nan_to_num(self.raw_s) > 0), share, 1.0)
        return (ScaleDelays if self.delays else Scale)(self.grid, factor)


class _PartOfWork(Struct, frozen=True, eq=False, dict=True):
    """All ops of a part. `planned_s`: what of it goes with planned work in the same step, seconds, [steps]."""

    part: WorkPart
    ops: tuple[_OpsOfPart, ...]
    planned_s: Floats | float = 0.0

    @cached_property
    def beyond_s(self) -> Floats:
        """How much longer each worker takes than in its usual step, seconds, [slots, steps, dp_ranks]."""
        total = np.sum([ops.beyond_s.sum(axis=1) for ops in self.ops], axis=0)
        planned_s = np.asarray(self.planned_s).reshape(-1, 1)
        return np.asarray(np.maximum(total - planned_s, np.minimum(total, 0.0)))


class OneOff(Struct, frozen=True, eq=False):
    """Work that took longer in few steps, and in no other one. `part`: most of it; `parts`: all of it, in this order.

    `workers`: which ones, [stages, dp_ranks]; `everywhere`: more than half of them, or nobody in particular. `steps`:
    places of the steps; `extra_s`: by how much the longest worker exceeds its usual step in each of these, seconds.
    `factor`: times what any other step has beyond the usual, at least. `ops`: how many ops make up most of it;
    `all_slow`: nearly all computes of its steps take longer, by one factor. `change`: the job without it.
    """

    part: WorkPart
    parts: tuple[WorkPart, ...]
    workers: Bools
    everywhere: bool
    steps: tuple[int, ...]
    extra_s: Floats
    factor: float
    ops: int
    all_slow: bool
    change: Intervention


@evidence(PipelineSubject)
def one_offs_of(job: PipelineSubject) -> tuple[OneOff, ...]:
    """What stands apart in one or two steps; of workers whose ranks are recorded one by one, nothing."""
    if not some_stand_apart(job.unchanged) or job.lockstep is not None:
        return ()
    least_s = PATTERNS.longer_share * float(job.unchanged.sum())
    works = _works(job)
    own = [work for work in works if work.part is not WorkPart.NETWORK]
    shared = [work for work in works if work.part is WorkPart.NETWORK]
    return (*_of_workers(own, least_s), *(stall for work in shared for stall in _of_network(work, least_s)))


@evidence(PipelineSubject)
def without_one_offs(job: PipelineSubject) -> PipelineSubject:
    """The job in which all that workers did themselves took as long as usual; the job itself if nothing stands apart.

    Long transfers stay: whoever compares transfers expects a few of these.
    """
    changes = tuple(one_off.change for one_off in one_offs_of(job) if one_off.part is not WorkPart.NETWORK)
    if not changes:
        return job
    cost = tuple(block.matrix() for block in changed(job.replay, changes).cost)
    durations = job.replay.durations
    delay, kept_delay = durations.launch_delay, job.replay.kept_delay
    for change in _each(changes):
        if isinstance(change, ScaleDelays):
            delay = scaled(delay, change.ops.parts(change.factor))
            kept_delay = kept_delay if kept_delay is None else scaled(kept_delay, change.ops.parts(change.factor))
    replay = structs.replace(
        job.replay, durations=structs.replace(durations, cost=cost, launch_delay=delay), kept_delay=kept_delay
    )
    computes = Computes(replay, job.lockstep, job.computes.queued_s, job.computes.on_shared_cores)
    paused = find_paused_starts(replay, computes.pauses)
    plain = structs.replace(job.plain, durations=structs.replace(job.plain.durations, cost=cost))
    attributed = partial(attribute, plain)
    return PipelineSubject(
        job.trace, replay, job.plain, attributed, computes, paused, find_breaks(replay), job.expert_loads
    )


def _each(changes: Sequence[Intervention]) -> Iterator[Intervention]:
    for change in changes:
        if isinstance(change, Together):
            yield from _each(change.interventions)
        else:
            yield change


def _works(job: PipelineSubject) -> list[_PartOfWork]:
    """The ops of each part that the job has."""
    cost, delay, raw_delay = job.replay.durations.cost, launch_delays(job), job.replay.durations.launch_delay
    graph, recorded = job.replay.graph, not data_loads(job).empty

    def grid_of(kind: OpKind) -> OpGrid:
        return op_grid(graph, (kind,))

    def took(grid: OpGrid | TransferGrid, *, steady: bool = False) -> _OpsOfPart:
        seconds = grid.gather(cost)
        return _OpsOfPart(grid, seconds, seconds, steady=steady)

    def before(grid: OpGrid) -> _OpsOfPart:
        return _OpsOfPart(grid, grid.gather(delay), grid.gather(raw_delay), delays=True)

    def host(kind: OpKind) -> _OpsOfPart:
        ops = before(grid_of(kind))
        if not recorded and kind in _FIRST:  # late data
            ops.seconds[:, :1] = 0.0
        return ops

    first = () if recorded else (before(first_forwards(job)), before(first_gathers(job)))
    parts = {
        WorkPart.COMPUTE: [
            took(grid, steady=True) for grid in (forwards(job), backwards(job), grid_of(OpKind.BACKWARD_WEIGHT))
        ],
        WorkPart.DATA: [took(data_loads(job)), *first],
        WorkPart.OPTIMIZER: [took(optimizers(job))],
        WorkPart.COLLECTION: [took(collections(job))],
        WorkPart.HOST: [
            took(host_work(job)),
            took(grid_of(OpKind.LOSS)),
            *(host(kind) for kind in OpKind if kind not in P2P),
        ],
    }
    works = [
        _PartOfWork(
            part,
            tuple(ops for ops in all_ops if not ops.grid.empty),
            _planned_s(job) if part is WorkPart.HOST else 0.0,  # others may wait for it without a recorded wait
        )
        for part, all_ops in parts.items()
    ]
    shared = (op_grid(graph, COMMUNICATION - P2P), transfers(job))
    works += [_PartOfWork(WorkPart.NETWORK, (took(grid),)) for grid in shared if not grid.empty]
    return [work for work in works if work.ops]


def _planned_s(job: PipelineSubject) -> Floats:
    """The longest recorded checkpoint and evaluation of each step, seconds, [steps]."""
    cost = job.replay.durations.cost
    grids = [grid for grid in (checkpoints(job), evaluations(job)) if not grid.empty]
    longest = [np.nan_to_num(grid.gather(cost)).sum(axis=1).max(axis=(0, 2)) for grid in grids]
    return np.asarray(np.sum([np.zeros(len(job.steps)), *longest], axis=0))


def _stands_apart(beyond_s: Floats, least_s: float) -> Bools:
    """Where work stands apart from that of all other steps, [slots, steps, dp_ranks]. `beyond_s`: seconds beyond the
    usual, in this shape; `least_s`: what it has to be in all.
    """
    worst = beyond_s.max(axis=(0, 2))
    for count in range(1, PATTERNS.most_steps + 1):
        alone = isolated(worst, count)
        if alone is None or alone[1].sum() < least_s:
            continue
        in_steps = np.isin(np.arange(len(worst)), alone[0])
        floor_s = max(_most_elsewhere_s(beyond_s, in_steps) / PATTERNS.share_of_another, _spread_s(beyond_s, in_steps))
        if worst[alone[0]].min() > floor_s:
            # A quarter of the worst is it, too; where the usual worker has that, no other one is chosen.
            shares = beyond_s >= PATTERNS.share_of_another * worst[:, None]
            of_all = 2 * shares.sum(axis=(0, 2)) > beyond_s[:, 0].size
            return np.asarray(((beyond_s > floor_s) | (shares & of_all[:, None])) & in_steps[:, None])
    return np.zeros(beyond_s.shape, np.bool_)


def _most_elsewhere_s(beyond_s: Floats, in_steps: Bools) -> float:
    """The most that any worker has beyond the usual in other steps, seconds."""
    return max(float(beyond_s[:, ~in_steps].max()), 0.0)


def _spread_s(beyond_s: Floats, in_steps: Bools) -> float:
    """What no noise of the other steps reaches, seconds."""
    return ONE_OFFS.spreads * MAD_TO_SIGMA * float(np.median(np.abs(beyond_s[:, ~in_steps])))


def _times(beyond_s: Floats, in_steps: Bools) -> Floats:
    """How many times as much as anything in other steps, or their noise, this is, [slots, steps, dp_ranks]."""
    other_s = max(_most_elsewhere_s(beyond_s, in_steps), PATTERNS.share_of_another * _spread_s(beyond_s, in_steps))
    return np.minimum(beyond_s / max(other_s, NOTHING), MOST_TIMES)


def _of_network(work: _PartOfWork, least_s: float) -> Iterator[OneOff]:
    """Transfers that stand apart, of whoever takes part."""
    cells = _stands_apart(work.beyond_s, least_s)
    if cells.any():
        steps = np.flatnonzero(cells.any(axis=(0, 2)))
        times = _times(work.beyond_s, np.asarray(cells.any(axis=(0, 2))))
        yield _one_off([work], [cells], steps.tolist(), float(times[cells].min()), everywhere=True)


def _of_workers(works: Sequence[_PartOfWork], least_s: float) -> Iterator[OneOff]:
    """What stands apart of what workers do themselves, by the workers that do it in the same steps."""
    if not works:
        return
    total_s = np.sum([work.beyond_s for work in works], axis=0)
    by_part = [_stands_apart(work.beyond_s, least_s) for work in works]
    apart = np.logical_or.reduce([*by_part, _stands_apart(total_s, least_s)])
    in_steps = np.asarray(apart.any(axis=(0, 2)))
    if not in_steps.any():
        return
    # Other parts of the same workers and steps belong to it where they are longer than in any other step.
    belongs = []
    for work, cells in zip(works, by_part, strict=True):
        floor_s = max(_most_elsewhere_s(work.beyond_s, in_steps), _spread_s(work.beyond_s, in_steps))
        belongs.append(cells | (apart & (work.beyond_s > floor_s)))
    most = np.argmax([np.where(mask, work.beyond_s, 0.0) for mask, work in zip(belongs, works, strict=True)], axis=0)
    unusual = np.logical_or.reduce(belongs)
    times = np.max([_times(beyond_s, in_steps) for beyond_s in (total_s, *(work.beyond_s for work in works))], axis=0)
    for part, steps, cells in _alike(unusual, most):
        everywhere = _everywhere(np.asarray(cells.any(axis=1)))
        longest = np.where(cells, times, 0.0).max(axis=(0, 2))[steps]
        of_parts = sorted(
            ((work, mask & cells) for work, mask in zip(works, belongs, strict=True) if (mask & cells).any()),
            key=lambda pair: (pair[0] is not works[part], -pair[0].beyond_s[pair[1]].max()),
        )
        chosen, masks = zip(*of_parts, strict=True)
        factor = longest.min() if everywhere else times[cells].min()
        yield _one_off(chosen, masks, steps, float(factor), everywhere=everywhere)


def _alike(unusual: Bools, most: Ints) -> Iterator[tuple[int, list[int], Bools]]:
    """The part that is most of it, the steps and the cells of what the same workers do; more than half are all.

    `unusual`: where anything stands apart; `most`: which part, both [stages, steps, dp_ranks].
    """
    groups: dict[tuple[int, bytes], list[int]] = {}
    for step in np.flatnonzero(unusual.any(axis=(0, 2))).tolist():
        for part in np.unique(most[:, step][unusual[:, step]]).tolist():
            workers = unusual[:, step] & (most[:, step] == part)
            groups.setdefault((part, b"" if _everywhere(workers) else workers.tobytes()), []).append(step)
    for (part, _), steps in groups.items():
        in_steps = np.isin(np.arange(unusual.shape[1]), steps)[:, None]
        yield part, steps, unusual & (most == part) & in_steps


def _everywhere(workers: Bools) -> bool:
    return bool(2 * workers.sum() > workers.size > 1)


def _one_off(
    works: Sequence[_PartOfWork], masks: Sequence[Bools], steps: Sequence[int], factor: float, *, everywhere: bool
) -> OneOff:
    """What stands apart in `steps` at these cells, `masks` [slots, steps, dp_ranks], of these parts, most of it first.

    `factor`: as of `OneOff`.
    """
    first, cells = works[0], masks[0]
    beyond_s = np.sum([np.where(mask, work.beyond_s, 0.0) for mask, work in zip(masks, works, strict=True)], axis=0)
    extra_s = beyond_s[:, list(steps)].max(axis=(0, 2))
    worst = np.unravel_index(int(np.where(cells, first.beyond_s, -np.inf).argmax()), cells.shape)
    single = [
        (ops.beyond_s[worst[0], :, worst[1], worst[2]], ops.usual_s[worst[0], :, 0, worst[2]]) for ops in first.ops
    ]
    beyond, usual = (np.concatenate(column) for column in zip(*single, strict=True))
    real = usual > 0
    factors = beyond[real] / usual[real]
    mean = float(beyond[real].sum() / usual[real].sum()) if real.any() else 0.0
    return OneOff(
        first.part,
        tuple(work.part for work in works),
        np.logical_or.reduce(masks).any(axis=1),
        everywhere,
        tuple(steps),
        extra_s,
        factor,
        int((beyond > beyond.max() / 2).sum()),
        bool(real.any() and float(np.median(factors)) >= ONE_OFFS.of_all * mean),
        Together(
            tuple(ops.as_usual(mask) for work, mask in zip(works, masks, strict=True) for ops in work.ops if mask.any())
        ),
    )
