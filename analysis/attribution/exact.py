"""Exact cost of each DP rank or worker alone, without one replay per rank.

In: a `JobReplay` and the rows to add back. Out: step times [steps, dp_ranks].

In "ideal except DP rank d" all other DP ranks are identical. So two lanes replay the whole job: d and one stand-in for
all others. All DP ranks together cost two passes over the trace, all workers two passes per stage. Only if ideal lanes
differ (for example, if most workers collect garbage, at different places) does every DP rank take a replay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.dependency_graph import Template, build_coupled_template
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, path_lengths, replay_lanes, without_starts
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, Changes, addition, changed, step_times
from tracekit.analysis.whatif.selection import Everything, Selection, dp_rank, labelled


class RepresentativeLanes(Struct, frozen=True, eq=False):
    """Lanes of one structure, each coupled with ideal stand-ins for the other lanes of its step.

    Member 0 of `template` is the lane itself; `cost`: its costs, [rows of member 0, lanes]. `ideal`: ideal costs of all
    members, [rows of the template]. `step`, `dp_index` (position in `graph.dp_ranks`): [lanes].
    """

    template: Template
    cost: Floats
    ideal: Floats
    step: Int32s
    dp_index: npt.NDArray[np.int64]


def representative_lanes(replay: JobReplay) -> tuple[RepresentativeLanes, ...]:
    """Every lane of the job with its stand-ins: one for each structure that the other lanes of its step have.

    Empty if the ideal lanes of a structure differ.
    """
    if any(ideal.ndim > 1 for ideal in replay.durations.ideal):
        return ()
    ideal = changed(replay, IDEAL)
    graph = replay.graph_begun(ideal.costs(), ideal.sampled_costs())
    lanes_here = np.zeros((len(graph.blocks), len(graph.steps)), np.int64)
    for number, block in enumerate(graph.blocks):
        lanes_here[number] = np.bincount(block.step, minlength=len(graph.steps))
    dp_ranks = np.array(graph.dp_ranks)
    represented = []
    for number, block in enumerate(graph.blocks):
        others = lanes_here[:, block.step].T > 0
        others[:, number] = lanes_here[number, block.step] > 1
        for company in np.unique(others, axis=0):
            lanes = np.flatnonzero((others == company).all(axis=1))
            members = [number, *np.flatnonzero(company).tolist()]
            coupled = build_coupled_template([graph.blocks[member].structure for member in members])
            begin = np.concatenate([graph.blocks[member].template.begin for member in members])
            cost = replay.durations.cost[number]
            represented.append(
                RepresentativeLanes(
                    template=replace(coupled, begin=begin),
                    ideal=np.concatenate([replay.durations.ideal[member] for member in members]),
                    cost=cost if len(lanes) == block.lanes else np.ascontiguousarray(cost[:, lanes]),
                    step=block.step[lanes],
                    dp_index=np.searchsorted(dp_ranks, block.dp_rank[lanes]),
                )
            )
    return tuple(represented)


def add_back_lanes(replay: JobReplay, represented: tuple[RepresentativeLanes, ...], stage: int | None = None) -> Floats:
    """Step times, seconds, [steps, dp_ranks], with everything ideal except that DP rank, or its worker on `stage`."""
    if not represented:
        return _one_by_one(replay, stage)
    graph = replay.graph
    times = np.repeat(step_times(replay, IDEAL)[:, None], len(graph.dp_ranks), axis=1)
    for part in represented:
        template = part.template
        chosen = template.member == 0 if stage is None else (template.member == 0) & (template.pp_rank == stage)
        rows = np.where(chosen, np.arange(template.rows), -1)
        none = np.full(template.rows, -1)
        costs = Costs(part.cost, rows, part.ideal, NO_MATRIX, none)
        times[part.step, part.dp_index] = replay_lanes(template, np.arange(len(part.step) + 1), costs)
    return times


def _one_by_one(replay: JobReplay, stage: int | None) -> Floats:
    """The result of `add_back_lanes`, from one replay per DP rank."""
    ranks = (dp_rank(rank) for rank in replay.graph.dp_ranks)
    chosen = ranks if stage is None else (rank & labelled("stage", stage) for rank in ranks)
    return np.stack([step_times(replay, addition(of)) for of in chosen], axis=1)


#: Largest number of path lengths in memory at a time.
_LENGTHS_AT_ONCE = 1 << 20


def step_times_each_changed(
    replay: JobReplay, change: Callable[[Selection], Changes], most_op_replays: int
) -> Floats | None:
    """Step times, seconds, [steps, dp_ranks]: the original job with `change` applied to all ops of one DP rank.

    None if that takes more than `most_op_replays` op evaluations.
    """
    graph = replay.graph
    passes = 2 * (graph.rendezvous_count + 1)
    if min(passes, len(graph.dp_ranks)) * graph.job.ops > most_op_replays:
        return None
    if len(graph.dp_ranks) <= passes:
        return np.stack([step_times(replay, change(dp_rank(rank))) for rank in graph.dp_ranks], axis=1)
    return step_times_by_paths(replay, change(Everything()))


def step_times_by_paths(replay: JobReplay, changes: Changes) -> Floats:
    """Step times, seconds, [steps, dp_ranks]: the original job with one DP rank after `changes`, by longest paths."""
    graph = replay.graph
    before, after = _Lanes.after(replay, ORIGINAL), _Lanes.after(replay, changes)
    order = _collectives_in_order(replay)
    together = max(1, _LENGTHS_AT_ONCE // ((graph.rendezvous_count + 1) ** 2 * len(graph.dp_ranks)))
    times = np.empty((len(graph.steps), len(graph.dp_ranks)))
    for first in range(0, len(times), together):
        last = min(first + together, len(times))
        edges = np.maximum(_of_the_others(before.paths(first, last)), after.paths(first, last))
        times[first:last] = _longest(edges, order)
    return times


class _Lanes(Struct, frozen=True, eq=False):
    """All lanes of a job after changes: `costs` of each block, and the same without what precedes a collective."""

    replay: JobReplay
    costs: tuple[Costs, ...]
    behind_collective: tuple[Costs, ...]

    @classmethod
    def after(cls, replay: JobReplay, changes: Changes) -> _Lanes:
        blocks, costs = replay.graph.blocks, tuple(changed(replay, changes).costs())
        behind = (without_starts(block.template, cost, block.lanes) for block, cost in zip(blocks, costs, strict=True))
        return cls(replay, costs, tuple(behind))

    def paths(self, first: int, last: int) -> Floats:
        """The edges in steps `first` to `last` - 1, [rendezvous and start, rendezvous and end, steps, dp_ranks].

        The last source is the start of the step, the last target its end; -inf if a DP rank has no such path.
        """
        graph, count = self.replay.graph, self.replay.graph.rendezvous_count
        lengths = np.full((count + 1, count + 1, last - first, len(graph.dp_ranks)), -np.inf)
        for number, block in enumerate(graph.blocks):
            low, high = np.searchsorted(block.step, (first, last)).tolist()
            dp_index = np.searchsorted(graph.dp_ranks, block.dp_rank[low:high])
            for source in range(count + 1):
                costs = self.costs[number] if source == count else self.behind_collective[number]
                of_block = path_lengths(block.template, costs, count, source, (low, high))
                lengths[source][:, block.step[low:high] - first, dp_index] = of_block
        return lengths


def _collectives_in_order(replay: JobReplay) -> Ints:
    """The numbers of the collectives in topological order, [rendezvous]."""
    rounds = np.zeros(replay.graph.rendezvous_count, np.int64)
    for block in replay.graph.blocks:
        groups = np.flatnonzero(block.template.rendezvous >= 0)
        rounds[block.template.rendezvous[groups]] = np.searchsorted(block.template.first_of_round, groups, side="right")
    return np.argsort(rounds, kind="stable")


def _of_the_others(lengths: Floats) -> Floats:
    """For each entry along the last axis, the greatest of the other entries; -inf if there is none."""
    greatest = lengths.argmax(axis=-1)[..., None]
    top = np.take_along_axis(lengths, greatest, axis=-1)
    rest = lengths.copy()
    np.put_along_axis(rest, greatest, -np.inf, axis=-1)
    others = np.broadcast_to(top, lengths.shape).copy()
    np.put_along_axis(others, greatest, rest.max(axis=-1, keepdims=True), axis=-1)
    return others


def _longest(edges: Floats, order: Ints) -> Floats:
    """The longest path from start to end of each step, seconds, [steps, dp_ranks]. `edges`: as `_Lanes.paths`."""
    end = len(order)
    reached: Floats = edges[end].copy()  # longest path to each target that meets no collective
    for collective in order.tolist():
        np.maximum(reached, reached[collective] + edges[collective], out=reached)
    latest: Floats = np.maximum(reached[end], 0.0)
    return latest
