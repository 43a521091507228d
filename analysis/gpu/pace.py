"""What a recording would take if a rank went at the pace of its peers.

In: a replay of a GPU op trace. Out: step times. Unlike the ideal, which is the mean over all ranks and takes out launch
delays, this changes one rank alone, to the median of the others, and keeps the rest as recorded: what a repair of that
rank gives back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tracekit.analysis.graph.fold import FoldedGraph
from tracekit.analysis.graph.labels import LabelledGraph
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.replay.costs import Durations
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import Costs
from tracekit.records import dataclass


@dataclass(frozen=True)
class PaceOfPeers:
    """A job's ranks, each against the others."""

    graph: FoldedGraph
    replay: GraphReplay

    @cached_property
    def _cost(self) -> Floats:
        """What each op costs by itself, seconds, [ops]."""
        cost = np.empty(len(self.graph.ops.start))
        for block, own in zip(self.graph.blocks, self.replay.durations.own, strict=True):
            cost[block.op] = own
        return cost

    @cached_property
    def steps(self) -> Int32s:
        """A number for the step of the training loop of each op, -1 for none, [ops]."""
        labels = self.graph.ops.labels
        none = np.zeros(len(self.graph.ops.peer), np.int32)
        return labels["profiler_step"].codes if "profiler_step" in labels else none

    @cached_property
    def _class(self) -> Ints:
        """Comparable ops of one step of the training loop share a number, [ops]: steps differ for all ranks at once."""
        ops, step = self.graph.ops, self.steps
        _, number = np.unique(ops.peer.astype(np.int64) * (int(step.max()) + 2) + step + 1, return_inverse=True)
        return np.asarray(number, np.int64)

    @cached_property
    def _totals(self) -> Floats:
        """What each rank spends on each class, seconds, [classes, ranks]."""
        ops, ranks = self.graph.ops, self.graph.ops.mesh.ranks
        cell = self._class * len(ranks) + np.searchsorted(ranks, ops.rank)
        totals = np.bincount(cell, weights=self._cost, minlength=(int(self._class.max()) + 1) * len(ranks))
        return totals.reshape(-1, len(ranks)).astype(np.float64)

    def costs(self, rank: int, chosen: npt.NDArray[np.bool_] | None = None) -> Floats:
        """The cost of each op with those of `rank` (of them, the `chosen`) at the pace of the others, seconds, [ops].

        What the others do without is taken out.
        """
        ops, at = self.graph.ops, int(np.searchsorted(self.graph.ops.mesh.ranks, rank))
        mask = ops.rank == rank
        if chosen is not None:
            mask &= chosen
        if ops.comparable is not None:
            mask &= ops.comparable
        mine = np.flatnonzero(mask)
        classes, inverse, counts = np.unique(self._class[mine], return_inverse=True, return_counts=True)
        usual = np.median(np.delete(self._totals[classes], at, axis=1), axis=1)
        whole = np.bincount(self._class[ops.rank == rank], minlength=len(self._totals))[classes]
        cost = self._cost.copy()
        cost[mine] = (usual / np.maximum(whole, counts))[inverse]
        return cost

    def times(self, costs: Sequence[Floats]) -> Floats:
        """How long the recording takes at each of these costs, launch delays kept, seconds, [costs]."""
        times: Floats = self.replay.step_times_each([_At(self.graph, cost) for cost in costs]).mean(axis=1)
        return times

    @cached_property
    def recorded_s(self) -> float:
        """How long it takes as it was."""
        return float(self.times([self._cost])[0])


@dataclass(frozen=True, slots=True)
class _At:
    """These costs, [ops], with launch delays."""

    ops: FoldedGraph
    cost: Floats

    def costs(self, graph: LabelledGraph, durations: Durations, number: int) -> Costs:
        op: Ints = self.ops.blocks[number].op
        assert graph is self.ops
        return Costs.of_matrix(self.cost[op], durations.launch_delay[number])
