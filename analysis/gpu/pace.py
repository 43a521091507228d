"""How long a recording would take if a rank worked at the pace of its peers, and whether that is beyond noise.

In: a replay of a GPU op trace and a rank. Out: step times, and what makes the rank stand out. The ideal is the mean
over all ranks, without launch delays. Here, one rank only changes, to the median of the others, and the rest stays as
recorded: what a repair of that rank saves.

The tests compare how far ranks are behind the pace of their peers, step by step, at the ops on the critical path of
this rank: noise elsewhere does not lengthen the recording. There are three tests, for three ways to stand out:

- *In every step.* How much further behind the rank is in a part of a step than ranks usually are, compared between
  steps (paired t-test): a rank that is behind in one step and ahead in the next is behind by chance. For a single step,
  its parts are compared.
- *Far from all others.* The rank against the others in the same step, as an outlier among all other samples (externally
  studentised residual). One bad step suffices if no other rank has one like it. Needs three ranks.
- *At one place of the step.* One part of all steps, against all other ranks there (two-sample t-test with the combined
  variance). Proves only that part. Finds a pause that is small compared with the noise of whole steps. Needs three
  ranks, too, and two steps.

Steps, and parts of a step, have different variances, which Satterthwaite's degrees of freedom combine. The ops of each
cause are tested separately, because host noise differs from kernel noise. Some rank is always the slowest at something,
so probabilities are multiplied by the number of ranks and causes (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.graph.op_graph import FoldedGraph, fold
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints, dense
from tracekit.analysis.numeric.means import student_tail
from tracekit.analysis.replay.graph_replay import Durations, GraphReplay
from tracekit.analysis.whatif.interventions import RECORDED, Restructure, SetOps, step_times_each
from tracekit.trace.gpu_activity import KernelClass

#: A rank that would save less than this share of the recording is not named, even if it is certainly slower: ranks are
#: never exactly equal, and a healthy job names nobody.
SMALLEST_SHARE = 0.01
#: Each test names a rank by mistake with at most this probability.
LARGEST_CHANCE = 0.05
#: The number of parts of all steps together that are compared.
_PARTS = 24


@dataclass(frozen=True, eq=False)
class PaceOfPeers:
    """The ranks of a job, each compared with the others."""

    graph: FoldedGraph
    replay: GraphReplay

    @property
    def cost(self) -> Floats:
        """Own cost of each op, seconds, [ops]."""
        return self.replay.cost_of_ops

    @cached_property
    def steps(self) -> Int32s:
        """The number of the training step of each op, -1 for none, [ops]."""
        labels = self.graph.ops.labels
        return labels["profiler_step"].codes if "profiler_step" in labels else self.graph.ops.step

    @cached_property
    def marked_steps(self) -> Int32s:
        """The training steps, ascending; for a recording without marks, one step with all ops."""
        numbers = np.unique(self.steps)
        return numbers[numbers >= 0] if numbers[-1] >= 0 else numbers

    @cached_property
    def _critical(self) -> Ints:
        """The ops on the critical path of the recording."""
        return critical_path(self.replay, RECORDED).ops_of([block.op for block in self.graph.blocks])

    @cached_property
    def most_saved(self) -> Floats:
        """The most that the job can save with each rank at the pace of its peers, seconds of the mean step, [ranks].

        However fast a rank becomes, the ops of the critical path still wait for each other. Infinite for ranks with
        calls that wait for the GPU, because ops may then wait for less.
        """
        ops, ranks = self.graph.ops, self.graph.ops.mesh.ranks
        critical = self._critical if ops.comparable is None else self._critical[ops.comparable[self._critical]]
        on, saved = ops.rank[critical], np.zeros(len(ranks))
        for index, rank in enumerate(ranks.tolist()):
            own = critical[on == rank]
            classes = self._class[own]
            saved[index] = (self.cost[own] - self._usual(classes, index) / self._counts[classes, index]).sum()
        saved /= len(self.graph.steps)
        saved[np.isin(ranks, ops.rank[self._calls])] = np.inf
        return saved

    @cached_property
    def _calls(self) -> npt.NDArray[np.bool_]:
        """Which ops are calls that wait for the GPU, [ops]."""
        return self._of_kind("synchronise")

    def part_of_step(self, count: int) -> Ints:
        """Which of `count` parts of a step each op is in, [ops]; the same for comparable ops, so that steps align."""
        return np.minimum((self._share_of_step * count).astype(np.int64), count - 1)

    @cached_property
    def _share_of_step(self) -> Floats:
        """How far into its step each op starts, as a share of the step, the mean of comparable ops, [ops]."""
        ops, step = self.graph.ops, dense(self.steps.astype(np.int64))
        begin, end = np.full(int(step.max()) + 1, np.inf), np.full(int(step.max()) + 1, -np.inf)
        np.minimum.at(begin, step, ops.start)
        np.maximum.at(end, step, ops.start)
        share = (ops.start - begin[step]) / np.maximum(end - begin, np.finfo(float).tiny)[step]
        peer = dense(ops.peer.astype(np.int64))
        return np.asarray((np.bincount(peer, weights=share) / np.bincount(peer))[peer])

    @cached_property
    def _class(self) -> Ints:
        """Comparable ops of one training step share a number, [ops]: a step that differs does so for all ranks."""
        ops, step = self.graph.ops, self.steps
        return dense(ops.peer.astype(np.int64) * (int(step.max()) + 2) + step + 1)

    @cached_property
    def _totals(self) -> Floats:
        """The time of each rank in each class, seconds, [classes, ranks]."""
        ranks = self.graph.ops.mesh.ranks
        totals = np.bincount(self._cell, weights=self.cost, minlength=(int(self._class.max()) + 1) * len(ranks))
        return totals.reshape(-1, len(ranks)).astype(np.float64)

    @cached_property
    def _counts(self) -> Ints:
        """The number of ops of each class on each rank, [classes, ranks]."""
        return np.bincount(self._cell, minlength=self._totals.size).reshape(self._totals.shape)

    @cached_property
    def _cell(self) -> Ints:
        """The class and the rank of each op as one number, [ops]."""
        ranks = self.graph.ops.mesh.ranks
        return np.asarray(self._class * len(ranks) + np.searchsorted(ranks, self.graph.ops.rank), np.int64)

    def _of_kind(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Which ops are of one of these kinds, [ops]; none if kinds are numbers."""
        kind = self.graph.ops.labels.get("kind")
        if kind is None or kind.names is None:
            return np.zeros(len(self.graph.ops.peer), np.bool_)
        wanted = np.array([*(name in kinds for name in kind.names), False], np.bool_)  # the last: without a kind
        return np.asarray(wanted[kind.codes])

    def behind(self, rank: int, chosen: npt.NDArray[np.bool_], parts: int = 1) -> Floats:
        """How far each rank is behind the pace of its peers at the critical ops of `rank` that are `chosen`, seconds.

        [ranks, steps, parts], for each marked step, split into `parts`.
        """
        ops, steps = self.graph.ops, self.marked_steps
        critical = np.unique(self._critical[ops.rank[self._critical] == rank])
        critical = critical[chosen[critical] & np.isin(self.steps[critical], steps)]
        if ops.comparable is not None:
            critical = critical[ops.comparable[critical]]
        classes, first, count = np.unique(self._class[critical], return_index=True, return_counts=True)
        # If only part of a class's ops is critical, count that part.
        share = count / self._counts[classes, np.searchsorted(ops.mesh.ranks, rank)]
        cell = np.searchsorted(steps, self.steps[critical[first]]) * parts + self.part_of_step(parts)[critical[first]]
        behind = np.zeros((len(ops.mesh.ranks), len(steps) * parts))
        for index in range(len(behind)):
            more = (self._totals[classes, index] - self._usual(classes, index)) * share
            behind[index] = np.bincount(cell, weights=more, minlength=behind.shape[1])
        return behind.reshape(-1, len(steps), parts)

    def costs(self, rank: int, chosen: npt.NDArray[np.bool_] | None = None) -> Floats:
        """The cost of each op with the (`chosen`) ops of `rank` at the pace of the others, seconds, [ops].

        Removes work that the others do not have.
        """
        ops, index = self.graph.ops, int(np.searchsorted(self.graph.ops.mesh.ranks, rank))
        mask = ops.rank == rank
        if chosen is not None:
            mask &= chosen
        if ops.comparable is not None:
            mask &= ops.comparable
        changed = np.flatnonzero(mask)
        classes, inverse, counts = np.unique(self._class[changed], return_inverse=True, return_counts=True)
        usual = self._usual(classes, index)
        cost = self.cost.copy()
        cost[changed] = (usual / np.maximum(self._counts[classes, index], counts))[inverse]
        return cost

    def _usual(self, classes: Ints, index: int) -> Floats:
        """The usual time for each of these classes, the median over all ranks except index `index`, seconds."""
        return self._usual_without[index][classes]

    @cached_property
    def _usual_without(self) -> tuple[Floats, ...]:
        """For each rank index, the median time of all other ranks for each class, seconds, [classes] each."""
        order = np.argsort(self._totals, axis=1, kind="stable")
        ordered = np.take_along_axis(self._totals, order, axis=1)
        ranks, rows = self._totals.shape[1], np.arange(len(order))
        place = np.argsort(order, axis=1, kind="stable")
        low, high = (ranks - 2) // 2, (ranks - 1) // 2
        return tuple(
            (ordered[rows, low + (place[:, at] <= low)] + ordered[rows, high + (place[:, at] <= high)]) / 2
            for at in range(ranks)
        )

    def at(self, cost: Floats) -> PaceOfPeers:
        """Return the same job with ops of this cost, seconds, [ops]."""
        costs = tuple(cost.take(block.op) for block in self.graph.blocks)
        durations = Durations(costs, self.replay.durations.launch_delay, costs, 0, 0)
        return PaceOfPeers(self.graph, GraphReplay(self.graph, durations))

    def without_extra_waits(self, rank: int) -> PaceOfPeers | None:
        """The same job, with `rank` continuing at once in calls that wait for its GPU and that most peers do not make.

        None if all of them together take too little time.
        """
        freed = self.freed((rank,))
        return None if freed is None else PaceOfPeers(cast("FoldedGraph", freed.replay.graph), freed.replay)

    def ranks_with_all_calls(self, chosen: npt.NDArray[np.bool_]) -> list[int]:
        """The ranks all of whose calls that wait for the GPU are among the `chosen` ops, [ops]."""
        calls, rank = self._calls, self.graph.ops.rank
        return sorted(set(rank[calls].tolist()) - set(rank[calls & ~chosen].tolist()))

    def freed(self, ranks: Sequence[int]) -> Restructure | None:
        """`without_extra_waits` for several ranks, each compared with all others but these."""
        ops, indices = self.graph.ops, np.searchsorted(self.graph.ops.mesh.ranks, ranks)
        gone = np.zeros(len(ops.before), np.bool_)
        for rank in ranks if len(ranks) < len(ops.mesh.ranks) and self._calls.any() else ():
            waits, waited_s = self._extra_waits(rank, indices)
            gone |= waits & (waited_s >= SMALLEST_SHARE * self.recorded_s)
        return self.without_edges(gone) if gone.any() else None

    def without_edges(self, gone: npt.NDArray[np.bool_]) -> Restructure:
        """Return the same job in which ops do not wait for each other along these edges, [edges]."""
        ops = self.graph.ops
        graph = fold(replace(ops, before=ops.before[~gone], after=ops.after[~gone], why=ops.why[~gone]))
        return Restructure(GraphReplay(graph, self._durations_of(graph)))

    def _extra_waits(self, rank: int, without: Ints) -> tuple[npt.NDArray[np.bool_], float]:
        """The edges by which calls of `rank` wait for its GPU though most peers, all but ranks `without`, make none;
        and how long it waits, seconds.
        """
        ops, on_gpu = self.graph.ops, self._of_kind(*KernelClass)
        calls = np.flatnonzero(self._calls & (ops.rank == rank))
        calls = calls[np.median(np.delete(self._counts[self._class[calls]], without, axis=1), axis=1) == 0]
        if not len(calls):
            return np.zeros(len(ops.before), np.bool_), 0.0
        extra = np.zeros(len(ops.start), np.bool_)
        extra[calls] = True
        end = ops.start + ops.duration
        waits = extra[ops.after] & on_gpu[ops.before]
        called = np.full(len(extra), np.inf)
        host = extra[ops.after] & ~on_gpu[ops.before]
        np.minimum.at(called, ops.after[host], end[ops.before[host]])
        return waits, float(np.maximum(end[ops.before[waits]] - called[ops.after[waits]], 0.0).sum())

    def _durations_of(self, graph: FoldedGraph) -> Durations:
        """The costs of the ops, with launch delays, in the layout of another graph of the same ops."""
        cost, delay = (
            tuple(of_ops.take(block.op) for block in graph.blocks) for of_ops in (self.cost, self.replay.delay_of_ops)
        )
        return Durations(cost, delay, cost, 0, 0)

    def with_window(self, rank: int, begin_s: float) -> Floats:
        """Return the cost of each op if the window of a rank begins `begin_s` after the recording, seconds, [ops]."""
        cost = self.cost.copy()
        cost[self._of_kind("window") & (self.graph.ops.rank == rank)] = begin_s
        return cost

    def times(self, costs: Sequence[Floats]) -> Floats:
        """How long the recording takes at each of these costs, with launch delays, seconds, [costs]."""
        return np.asarray(self.step_times(costs).mean(axis=1))

    def step_times(self, costs: Sequence[Floats]) -> Floats:
        """Return the duration of each step at each of these costs, with launch delays, seconds, [costs, steps]."""
        return step_times_each(self.replay, [(SetOps(cost),) for cost in costs])

    @cached_property
    def recorded_s(self) -> float:
        """How long the recording takes as it was."""
        return float(self.times([self.cost])[0])


def causes_that_stand_out(
    pace: PaceOfPeers, rank: int, causes: Sequence[npt.NDArray[np.bool_]]
) -> list[npt.NDArray[np.bool_]]:
    """The causes that a test confirms, each reduced to the ops for which it does.

    `causes`: the ops that each of them covers, [ops].
    """
    ranks = pace.graph.ops.mesh.ranks
    index, steps = int(np.searchsorted(ranks, rank)), len(pace.marked_steps)
    parts, largest = -(-_PARTS // steps), LARGEST_CHANCE / (len(ranks) * len(causes))
    confirmed = []
    for chosen in causes:
        behind = pace.behind(rank, chosen, parts)
        if min(_in_step_after_step(behind, index), _from_all_others(behind.sum(axis=2), index)) <= largest:
            confirmed.append(chosen)
        elif (proven := np.flatnonzero(_at_one_place(behind, index) * parts <= largest)).size:
            confirmed.append(chosen & np.isin(pace.part_of_step(parts), proven))
    return confirmed


def is_behind(behind: Floats, index: int) -> bool:
    """Whether rank `index` is further `behind` than the others, [ranks, samples], by more than chance."""
    repeated = _in_step_after_step(behind[:, :, None], index) if behind.shape[1] > 1 else 1.0
    return len(behind) * min(repeated, _from_all_others(behind, index)) <= LARGEST_CHANCE


def stands_out_once(took: Floats, index: int) -> bool:
    """Whether rank `index` did something that happens once later than all others did, seconds, [ranks]."""
    return len(took) * _from_all_others(took[:, None], index) <= LARGEST_CHANCE


def _in_step_after_step(behind: Floats, index: int) -> float:
    """The probability that rank `index` is this far `behind`, [ranks, steps, parts], in this many steps."""
    more = behind[index] - np.median(np.delete(behind, index, axis=0), axis=0)
    more = more if len(more) > 1 else more.T
    return _chance(more.sum(), len(more) * _variances(more), len(more))


def _from_all_others(behind: Floats, index: int) -> float:
    """The probability that rank `index` is this far `behind`, [ranks, steps], all others; 1 for two ranks."""
    others = np.delete(behind, index, axis=0)
    if len(others) < 2:
        return 1.0
    excess = behind[index].sum() - others.sum(axis=1).mean()
    return _chance(excess, (1 + 1 / len(others)) * _variances(others), len(others))


def _at_one_place(behind: Floats, index: int) -> Floats:
    """The probability that rank `index` is this far `behind`, [ranks, steps, parts], in each part; [parts]."""
    own, others = behind[index], np.delete(behind, index, axis=0).reshape(-1, behind.shape[2])
    if len(behind) < 3 or len(own) < 2:
        return np.ones(behind.shape[2])
    freedom = len(own) + len(others) - 2
    squares = len(own) * own.var(axis=0) + len(others) * others.var(axis=0)
    error = np.sqrt(squares / freedom * (1 / len(own) + 1 / len(others)))
    excess = own.mean(axis=0) - others.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = [student_tail(t, freedom) for t in (excess / error).tolist()]
    return np.where(error > 0, chance, np.where(excess > 0, 0.0, 1.0))


def _variances(samples: Floats) -> Floats:
    """The variance of each column of [samples, columns]."""
    return np.asarray(samples.var(axis=0, ddof=1))


def _chance(excess: float, variances: Floats, samples: int) -> float:
    """The probability of such an excess by chance; its variance is the sum of `variances` of `samples`."""
    variance = float(variances.sum())
    if not variance > 0:
        return 0.0 if excess > 0 else 1.0
    freedom = variance**2 / float((variances**2).sum()) * (samples - 1)
    return student_tail(excess / math.sqrt(variance), freedom)
