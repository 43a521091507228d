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

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.kernel import Costs, LanesToReplay, replay_timelines
from tracekit.trace.model import KINDS, P2P

#: Look at this many steps at most, spread over the trace; at fewer if they had more than this many ops in all.
MOST_STEPS, MOST_OPS, FEWEST_STEPS = 32, 1 << 20, 4
#: Adjust beginnings to ends this many times at most, until none moves by more than this share of the step.
MOST_TURNS, SETTLED_SHARE = 8, 1e-4
#: DP ranks begin a step together unless one of them begins this share of it before the last rank of its stage.
SMALLEST_SHARE = 5e-3
_IS_TRANSFER = np.array([kind in P2P for kind in KINDS])


def begins_early(graph: DependencyGraph) -> bool:
    """Whether an op that waits for nothing begins before its step."""
    return any((block.start[_firsts(block.template)] < 0).any() for block in graph.blocks)


def with_early_beginnings(graph: DependencyGraph) -> DependencyGraph:
    """The graph in which ops that wait for nothing begin as early as they usually did, at the latest at 0."""
    if not begins_early(graph):
        return graph
    begin_s = _begin_s(graph)
    last_s = begin_s.max(axis=1)
    graph = replace(graph, blocks=tuple(_begun_early(block, last_s) for block in graph.blocks))
    rank_begin_s = _before_last_s(begin_s)
    if rank_begin_s.min() > -SMALLEST_SHARE * float(np.median(_recorded_ends(graph).step_s)):
        return graph
    return replace(graph, rank_begin_s=rank_begin_s)


class EarlyBeginnings(Struct, frozen=True, eq=False):
    """Some steps of a graph whose workers begin early, as recorded.

    `some`: the graph of these steps; a block may have no lane in it. `lanes`: the lanes of each block of `graph` in
    these steps. `ranks`: the position of each of their DP ranks in `graph.dp_ranks`. `between_s`: loss of an op that
    waits for nothing from its lead over the last stage, between the end of a step and the next one, seconds, [rows that
    wait for nothing] per block; `rank_between_s`: the same for the lead of each rank over the last one of its stage,
    [stages, dp_ranks].
    """

    graph: DependencyGraph
    some: DependencyGraph
    lanes: tuple[Ints, ...]
    ranks: Ints
    between_s: tuple[Floats, ...]
    rank_between_s: Floats

    @classmethod
    def of(cls, graph: DependencyGraph) -> EarlyBeginnings | None:
        """None if no worker usually begins a step before the last one does."""
        if graph.rank_begin_s is None and not any(block.template.begin.any() for block in graph.blocks):
            return None
        steps = _some_steps(graph)
        lanes = [np.flatnonzero(np.isin(block.step, steps)) for block in graph.blocks]
        blocks = [
            block.only_lanes(here, np.searchsorted(steps, block.step[here]).astype(np.int32))
            for block, here in zip(graph.blocks, lanes, strict=True)
        ]
        some = replace(graph, steps=graph.steps[steps], blocks=tuple(blocks))
        ranks = np.searchsorted(graph.dp_ranks, some.dp_ranks)
        if graph.rank_begin_s is not None:
            some = replace(some, rank_begin_s=graph.rank_begin_s[:, ranks])
        recorded = _recorded_ends(some)
        between = [
            block.template.begin[rows] - recorded.stage_s[block.template.pp_rank[rows]]
            for block in blocks
            for rows in (_firsts(block.template),)
        ]
        rank_begin_s = np.zeros_like(recorded.rank_s) if some.rank_begin_s is None else some.rank_begin_s
        return cls(graph, some, tuple(lanes), ranks, tuple(between), rank_begin_s - recorded.rank_s)

    def as_ended(self, costs: Sequence[Costs]) -> DependencyGraph:
        """The graph with the beginnings that follow from the ends of each worker's steps under these costs."""
        some = self.some
        parts = zip(self.graph.blocks, costs, self.lanes, strict=True)
        costs = [_of_lanes(cost, here, block.lanes) for block, cost, here in parts]
        for _ in range(MOST_TURNS):
            ends = _replayed_ends(some, costs)
            moved_s, blocks = 0.0, []
            for block, between_s in zip(some.blocks, self.between_s, strict=True):
                rows, begin = _firsts(block.template), block.template.begin.copy()
                begin[rows] = np.minimum(between_s + ends.stage_s[block.template.pp_rank[rows]], 0.0)
                moved_s = max(moved_s, float(np.abs(begin - block.template.begin).max()))
                blocks.append(replace(block, template=replace(block.template, begin=begin)))
            some = replace(some, blocks=tuple(blocks))
            if some.rank_begin_s is not None:
                rank_begin_s = self.rank_between_s + ends.rank_s
                rank_begin_s -= rank_begin_s.max(axis=1, keepdims=True)
                moved_s = max(moved_s, float(np.abs(rank_begin_s - some.rank_begin_s).max()))
                some = replace(some, rank_begin_s=rank_begin_s)
            if moved_s <= SETTLED_SHARE * float(np.median(ends.step_s)):
                break
        return self._with_those_of(some)

    def _with_those_of(self, some: DependencyGraph) -> DependencyGraph:
        """The whole graph with the beginnings in `some`."""
        settled = zip(self.graph.blocks, some.blocks, strict=True)
        graph = replace(self.graph, blocks=tuple(replace(block, template=of.template) for block, of in settled))
        if graph.rank_begin_s is None:
            return graph
        rank_begin_s = graph.rank_begin_s.copy()
        rank_begin_s[:, self.ranks] = some.rank_begin_s
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
    known = np.isfinite(times)
    before = np.where(known, times, np.nan) - times.max(axis=1, keepdims=True)
    before[~known.any(axis=2)] = 0.0
    median = np.median(before, axis=2) if known.all() else np.nanmedian(before, axis=2)
    return np.asarray(median - median.max(axis=1, keepdims=True))


def _begun_early(block: Block, last_begin_s: Floats) -> Block:
    template, begin = block.template, np.zeros(block.template.rows)
    firsts, firsts_of_step = _firsts(template), block.first_lane[:-1]
    # An absent op at the start of a lane has the start of the op after it.
    last = np.maximum.reduceat(block.start[firsts], firsts_of_step, axis=1)
    of_stage = last_begin_s[template.pp_rank[firsts]][:, block.step[firsts_of_step]]
    begin[firsts] = np.minimum(np.median(np.maximum(last, of_stage), axis=1), 0.0)
    for row in template.order.tolist():
        waits = template.waits_for[template.first_wait[row] : template.first_wait[row + 1]]
        if len(waits):
            begin[row] = begin[waits].max()
    return replace(block, template=replace(template, begin=begin))


def _some_steps(graph: DependencyGraph) -> Ints:
    """Positions of steps spread over the trace."""
    steps = len(graph.steps)
    most = max(FEWEST_STEPS, min(MOST_STEPS, MOST_OPS * steps // max(graph.ops, 1)))
    return np.unique(np.linspace(0, steps - 1, min(most, steps)).round().astype(np.int64))


def _of_lanes(costs: Costs, lanes: Ints, count: int) -> Costs:
    """The costs of some of `count` lanes."""
    if len(lanes) == count:
        return costs
    names = ("matrix", "delay", "changed", "changed_delay")
    return replace(costs, **{name: part[:, lanes] for name in names if len(part := getattr(costs, name))})


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
