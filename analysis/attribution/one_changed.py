"""Step times of a job with one DP rank changed, for each DP rank, without one replay per rank.

In: a `JobReplay` and a change. Out: step times, [steps, dp_ranks].

Lanes of a step meet in collectives only. Between two collectives, a lane takes the longest path of its own graph,
regardless of other lanes; a collective starts when the longest of these paths over all lanes has ended. So a step is a
small graph whose nodes are its start, its collectives and its end, and whose edges are the longest paths, maximised
over lanes. Changing one DP rank replaces its part of that maximum: the longest and the second longest lane of each edge
are enough to do so for every rank. The paths take one pass over the trace per collective, before and after the change;
replays would take one pass per DP rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import Costs, path_lengths, without_starts
from tracekit.analysis.whatif.interventions import changed, step_times
from tracekit.analysis.whatif.paper import ORIGINAL, Changes
from tracekit.analysis.whatif.selection import Everything, Selection, dp_rank

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
