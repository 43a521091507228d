"""Workers that begin a step before others have ended the previous one.

In: a `DependencyGraph`. Out: the same graph, whose first ops begin when they usually did; and, given the costs of a
scenario, the graph whose first ops begin when they would in that scenario.

A recorded step begins when its last worker begins it. If the stages of a pipeline end a step one after the other, the
early ones have begun the next step by then, in every step. A replay in which all workers began at once would take
longer than the recording. A stage that ends a step earlier in a scenario also begins the next one earlier in it: its
lead over the last stage changes with the lead with which it ended the previous step. The same holds for the DP ranks of
a stage: while one of them still updates its weights, the others are in their next forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.lanes_of_job import StructureKey
from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.numeric.whole import UNDIVIDED, Whole, by_name
from tracekit.analysis.replay.kernel import Costs, LanesToReplay, replay_timelines
from tracekit.trace.model import KINDS, P2P

#: Look at this many steps at most, spread over the trace; at fewer if they had more than this many ops in all.
MOST_STEPS, MOST_OPS, FEWEST_STEPS = 32, 1 << 20, 4
#: Adjust beginnings to ends this many times at most, until none moves by more than this share of the step.
MOST_TURNS, SETTLED_SHARE = 8, 1e-4
#: DP ranks begin a step together unless one of them begins this share of it before the last rank of its stage.
SMALLEST_SHARE = 5e-3
_IS_TRANSFER = np.array([kind in P2P for kind in KINDS])


def with_early_beginnings(graph: DependencyGraph, whole: Whole = UNDIVIDED) -> DependencyGraph:
    """The graph in which ops that wait for nothing begin as early as they usually did, at the latest at 0. `whole`: the
    job of which the graph may be some steps.
    """
    if graph.job.first_s >= 0:
        return graph
    usual_s, rank_begin_s = whole.agreed(lambda: _recorded_begins(graph), _usual_begins)
    early = rank_begin_s is not None or any(begin_s.any() for begin_s in usual_s.values())
    blocks = tuple(_begun_early(block, usual_s[block.key]) for block in graph.blocks)
    return replace(graph, blocks=blocks, rank_begin_s=rank_begin_s, begins_early=early)


def sampled_steps(steps: Int32s, ops: int) -> Int32s:
    """Some of a job's steps, spread over it. `ops`: the number of ops of all `steps`."""
    most = max(FEWEST_STEPS, min(MOST_STEPS, MOST_OPS * len(steps) // max(ops, 1)))
    return steps[np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(np.int64))]


class EarlyBeginnings(Struct, frozen=True, eq=False):
    """Some steps of a graph whose workers begin early, as recorded.

    `sample`: the graph of these steps; a block may have no lane in it. `lanes`: the lanes of each block in these steps.
    `between_s`: loss of an op that waits for nothing from its lead over the last stage, between the end of a step and
    the next one, seconds, [rows that wait for nothing] per block; `rank_between_s`: the same for the lead of each rank
    over the last one of its stage, [stages, dp_ranks].
    """

    sample: DependencyGraph
    lanes: tuple[Ints, ...]
    between_s: tuple[Floats, ...]
    rank_between_s: Floats

    @classmethod
    def of(cls, graph: DependencyGraph, numbers: Int32s) -> EarlyBeginnings:
        """Of the steps with these `numbers`."""
        steps = np.flatnonzero(np.isin(graph.steps, numbers))
        lanes = [np.flatnonzero(np.isin(block.step, steps)) for block in graph.blocks]
        blocks = [
            block.only_lanes(here, np.searchsorted(steps, block.step[here]).astype(np.int32))
            for block, here in zip(graph.blocks, lanes, strict=True)
        ]
        sample = replace(graph, steps=graph.steps[steps], blocks=tuple(blocks))
        if graph.rank_begin_s is not None:
            sample = replace(
                sample, rank_begin_s=graph.rank_begin_s[:, np.searchsorted(graph.dp_ranks, sample.dp_ranks)]
            )
        recorded = _recorded_ends(sample)
        between = [
            block.template.begin[rows] - recorded.stage_s[block.template.pp_rank[rows]]
            for block in blocks
            for rows in (_firsts(block.template),)
        ]
        rank_begin_s = np.zeros_like(recorded.rank_s) if sample.rank_begin_s is None else sample.rank_begin_s
        return cls(sample, tuple(lanes), tuple(between), rank_begin_s - recorded.rank_s)

    def as_ended(self, costs: Sequence[Costs], graph: DependencyGraph) -> DependencyGraph:
        """The `graph`, of any steps of the job, with the beginnings that follow from the ends of each worker's steps.

        `costs`: of the graph of which this has some steps.
        """
        sample = self.sample
        costs = [cost.only_lanes(here) for cost, here in zip(costs, self.lanes, strict=True)]
        for _ in range(MOST_TURNS):
            ends = _replayed_ends(sample, costs)
            moved_s, blocks = 0.0, []
            for block, between_s in zip(sample.blocks, self.between_s, strict=True):
                rows, begin = _firsts(block.template), block.template.begin.copy()
                begin[rows] = np.minimum(between_s + ends.stage_s[block.template.pp_rank[rows]], 0.0)
                moved_s = max(moved_s, float(np.abs(begin - block.template.begin).max()))
                blocks.append(replace(block, template=replace(block.template, begin=begin)))
            sample = replace(sample, blocks=tuple(blocks))
            if sample.rank_begin_s is not None:
                rank_begin_s = self.rank_between_s + ends.rank_s
                rank_begin_s -= rank_begin_s.max(axis=1, keepdims=True)
                moved_s = max(moved_s, float(np.abs(rank_begin_s - sample.rank_begin_s).max()))
                sample = replace(sample, rank_begin_s=rank_begin_s)
            if moved_s <= SETTLED_SHARE * float(np.median(ends.step_s)):
                break
        return _begun_as_in(sample, graph)


def _begun_as_in(sample: DependencyGraph, graph: DependencyGraph) -> DependencyGraph:
    """The graph with the beginnings in `sample` steps of its job."""
    begin_of = {block.key: block.template.begin for block in sample.blocks}
    blocks = [replace(block, template=replace(block.template, begin=begin_of[block.key])) for block in graph.blocks]
    graph = replace(graph, blocks=tuple(blocks))
    if graph.rank_begin_s is None:
        return graph
    rank_begin_s = graph.rank_begin_s.copy()
    rank_begin_s[:, np.searchsorted(graph.dp_ranks, sample.dp_ranks)] = sample.rank_begin_s
    return replace(graph, rank_begin_s=rank_begin_s)


def with_beginnings(graph: DependencyGraph, costs: Sequence[Costs]) -> list[LanesToReplay]:
    """The lanes of each block with these costs; ops that wait for nothing begin as early as their ranks."""
    return [
        LanesToReplay(block.template, block.step, block.first_lane, _begun(graph, block, cost))
        for block, cost in zip(graph.blocks, costs, strict=True)
    ]


class _Ends(Struct, frozen=True):
    """Ends of the steps on each worker.

    `step_s`: end of the last worker, [steps]. `stage_s`: end of the last rank of each stage relative to it, [stages];
    `rank_s`: end of each rank relative to the last one of its stage, [stages, dp_ranks]; both medians over the steps,
    at most 0. Seconds.
    """

    step_s: Floats
    stage_s: Floats
    rank_s: Floats


def _firsts(template: Template) -> Ints:
    """The rows that wait for nothing."""
    return np.flatnonzero(np.diff(template.first_wait) == 0)


def _begun(graph: DependencyGraph, block: Block, costs: Costs) -> Costs:
    if graph.rank_begin_s is None:
        return costs
    firsts = _firsts(block.template)
    early = graph.rank_begins(block, firsts)
    delayed = np.flatnonzero(costs.delay_row[firsts] >= 0)
    early[delayed] += costs.delays_of(firsts[delayed])
    return costs.with_delays(firsts, early)


def _begin_s(graph: DependencyGraph) -> Floats:
    """Begin of each step on each worker, at the latest at 0, seconds, [stages, dp_ranks, steps]; -inf if it was not
    recorded.

    If steps count from the first worker instead of the last, no worker begins early: `step_edges` finds the late ones.
    """
    begin_s = np.full((graph.layout.pp, len(graph.dp_ranks), len(graph.steps)), -np.inf)
    for block in graph.blocks:
        firsts = _firsts(block.template)
        stages = block.template.pp_rank[firsts]
        for stage in np.unique(stages).tolist():
            first_s = block.start[firsts[stages == stage]].min(axis=0)
            begin_s[stage, graph.dp_index(block), block.step] = np.minimum(first_s, 0.0)
    return begin_s


def _before_last_s(times: Floats) -> Floats:
    """Time of each rank relative to the last one of its stage, median over the steps, at most 0, [stages, dp_ranks].

    `times`: [stages, dp_ranks, steps], -inf if there is none.
    """
    recorded = np.isfinite(times)
    before = np.where(recorded, times, np.nan) - times.max(axis=1, keepdims=True)
    before[~recorded.any(axis=2)] = 0.0
    median = np.median(before, axis=2) if recorded.all() else np.nanmedian(before, axis=2)
    return np.asarray(median - median.max(axis=1, keepdims=True))


_Begins = tuple[Mapping[StructureKey, Floats], Floats, Floats]


def _recorded_begins(graph: DependencyGraph) -> _Begins:
    """What some steps show of beginnings, in seconds: for each structure, the latest begin of each op that waits for
    nothing, [ops, steps]; the begin of each worker, see `_begin_s`; the end of each step, [steps].
    """
    begin_s = _begin_s(graph)
    last_begin_s = begin_s.max(axis=1)
    latest = {}
    for block in graph.blocks:
        firsts, first_lanes = _firsts(block.template), block.first_lane[:-1]
        # An absent op at the start of a lane has the start of the op after it.
        last = np.maximum.reduceat(block.start[firsts], first_lanes, axis=1)
        of_stage = last_begin_s[block.template.pp_rank[firsts]][:, block.step[first_lanes]]
        latest[block.key] = np.maximum(last, of_stage)
    return latest, begin_s, _recorded_ends(graph).step_s


def _usual_begins(parts: Sequence[_Begins]) -> tuple[dict[StructureKey, Floats], Floats | None]:
    """The usual begin of each op that waits for nothing, and of each worker, None if they begin together, in seconds.

    In: `_recorded_begins` of batches of steps.
    """
    latest, begin_s, step_s = zip(*parts, strict=True)
    usual_s = {
        key: np.minimum(np.median(np.concatenate(some, axis=1), axis=1), 0.0) for key, some in by_name(latest).items()
    }
    rank_begin_s = _before_last_s(np.concatenate(begin_s, axis=2))
    together = rank_begin_s.min() > -SMALLEST_SHARE * float(np.median(np.concatenate(step_s)))
    return usual_s, None if together else rank_begin_s


def _begun_early(block: Block, begin_s: Floats) -> Block:
    """The block whose ops that wait for nothing begin at `begin_s`, [such ops]."""
    template, begin = block.template, np.zeros(block.template.rows)
    begin[_firsts(template)] = begin_s
    for row in template.order.tolist():
        waits = template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]
        if len(waits):
            begin[row] = begin[waits].max()
    return replace(block, template=replace(template, begin=begin))


def _recorded_ends(graph: DependencyGraph) -> _Ends:
    return _ends(graph, [block.start + block.duration for block in graph.blocks])


def _replayed_ends(graph: DependencyGraph, costs: Sequence[Costs]) -> _Ends:
    parts = [part for part in with_beginnings(graph, costs) if len(part.step)]
    ends = iter(timeline.end for timeline in replay_timelines(parts, graph.rendezvous_count, meet=graph.blocks_meet))
    return _ends(graph, [next(ends) if block.lanes else block.start for block in graph.blocks])


def _ends(graph: DependencyGraph, ends: Sequence[Floats]) -> _Ends:
    """The ends of workers, given those of their ops, [rows, lanes] per block.

    Transfers do not count: a stage can continue without waiting for them.
    """
    end_s = np.full((graph.layout.pp, len(graph.dp_ranks), len(graph.steps)), -np.inf)
    for block, end in zip(graph.blocks, ends, strict=True):
        counts = ~_IS_TRANSFER[block.template.kind]
        for stage in range(len(end_s)):
            rows = np.flatnonzero(counts & (block.template.pp_rank == stage))
            if len(rows):
                end_s[stage, graph.dp_index(block), block.step] = end[rows].max(axis=0)
    last = end_s.max(axis=1)
    complete = np.isfinite(last).all(axis=0)
    last, end_s = last[:, complete], end_s[:, :, complete]
    step_s = last.max(axis=0)
    return _Ends(step_s, np.median(last - step_s, axis=1), _before_last_s(end_s))
