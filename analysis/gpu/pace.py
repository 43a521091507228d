"""How long a recording would take if a rank worked at the pace of its peers; the rank that the others wait for.

In: a replay of a GPU op trace, and the waits if collectives were recorded on several ranks. Out: step times, what makes
a rank stand out, and `BlamedRank`, or None if no rank does. The ideal is the mean over all ranks, without launch
delays. Here, one rank only changes, to the median of the others, and the rest stays as recorded: what a repair of that
rank saves.

A rank is named if all of these agree: others wait for it; the job gets shorter when the rank works at the pace of its
peers; it gets shorter by more than the noise of the recording explains; and no other rank would save half as much. Two
limits are choices: `smallest_share` is the smallest saving worth somebody's time; `next_share` separates one culprit
from two. If no rank is slower at anything recorded, a rank may still have come late into the recording.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.graph.op_graph import FoldedGraph, fold
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, dense
from tracekit.analysis.numeric.statistics import student_tail
from tracekit.analysis.replay.graph_replay import Durations, GraphReplay
from tracekit.analysis.whatif.interventions import RECORDED, Restructure, SetOps, step_times_each
from tracekit.trace.gpu_activity import KernelClass

if TYPE_CHECKING:
    from tracekit.analysis.gpu.recorded import Waits

#: The number of parts of all steps together that are compared.
_PARTS = 24
#: Replay at most this many ranks at the pace of the others.
_MOST_RANKS = 64
#: Replay so many of them side by side.
_AT_ONCE = 8


class PaceThresholds(Struct, frozen=True):
    """When a rank is named. Judge `kinetosim`: no rank of a healthy job is."""

    #: A rank that would save less than this share of the recording is not named, even if it is certainly slower: ranks
    #: are never exactly equal. Chosen: the smallest saving worth somebody's time.
    smallest_share: float = 0.01
    #: Each test names a rank by mistake with at most this probability. Definition.
    largest_chance: float = 0.05
    #: Coming late costs time once, and nothing is left to fix: name such a rank only if it costs at least this share
    #: of the recording. Chosen: as much as a headline.
    late_share: float = 0.05
    #: No other rank may save more than this share of what the named one saves. Chosen: separates one culprit from two.
    next_share: float = 0.5
    #: Report a part if it costs at least this share of the costliest one. Chosen: only words follow.
    part_share: float = 0.25


PACE = PaceThresholds()


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
        critical_rank, saved = ops.rank[critical], np.zeros(len(ranks))
        for index, rank in enumerate(ranks.tolist()):
            own_ops = critical[critical_rank == rank]
            classes = self._class[own_ops]
            saved[index] = (self.cost[own_ops] - self._usual(classes, index) / self._counts[classes, index]).sum()
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
            excess = (self._totals[classes, index] - self._usual(classes, index)) * share
            behind[index] = np.bincount(cell, weights=excess, minlength=behind.shape[1])
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
            (ordered[rows, low + (place[:, index] <= low)] + ordered[rows, high + (place[:, index] <= high)]) / 2
            for index in range(ranks)
        )

    def with_cost(self, cost: Floats) -> PaceOfPeers:
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
        removed = np.zeros(len(ops.before), np.bool_)
        for rank in ranks if len(ranks) < len(ops.mesh.ranks) and self._calls.any() else ():
            waits, waited_s = self._extra_waits(rank, indices)
            removed |= waits & (waited_s >= PACE.smallest_share * self.recorded_s)
        return self.without_edges(removed) if removed.any() else None

    def without_edges(self, removed: npt.NDArray[np.bool_]) -> Restructure:
        """Return the same job in which ops do not wait for each other along these edges, [edges]."""
        ops = self.graph.ops
        graph = fold(replace(ops, before=ops.before[~removed], after=ops.after[~removed], why=ops.why[~removed]))
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
    parts, largest = -(-_PARTS // steps), PACE.largest_chance / (len(ranks) * len(causes))
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
    return len(behind) * min(repeated, _from_all_others(behind, index)) <= PACE.largest_chance


def stands_out_once(took: Floats, index: int) -> bool:
    """Whether rank `index` did something later than all others, beyond chance. `took`: seconds, [ranks]."""
    return len(took) * _from_all_others(took[:, None], index) <= PACE.largest_chance


def _in_step_after_step(behind: Floats, index: int) -> float:
    """The probability that rank `index` is this far `behind`, [ranks, steps, parts], in this many steps."""
    excess = behind[index] - np.median(np.delete(behind, index, axis=0), axis=0)
    excess = excess if len(excess) > 1 else excess.T
    return _chance(excess.sum(), len(excess) * _variances(excess), len(excess))


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


class Part(StrEnum):
    """The parts of a rank's time that are compared with those of its peers."""

    COMPUTE = "compute"
    HOST = "host"  #: between the calls of its host threads
    INPUT = "input"  #: waiting for its data loader
    GC = "gc"
    SYNC_CALLS = "sync-calls"  #: calls in which its host waits for the GPU
    TRANSFERS = "transfers"  #: once all ranks are there


#: The kinds of op that belong to a part, in recordings of GPUs and in op traces that people write; compute is the rest.
_KINDS: Mapping[Part, frozenset[str]] = {
    Part.HOST: frozenset({"host", "host-delay"}),
    Part.INPUT: frozenset({"input", "data-load"}),
    Part.GC: frozenset({"gc"}),
    Part.SYNC_CALLS: frozenset({"synchronise"}),
    Part.TRANSFERS: frozenset({str(KernelClass.COMMUNICATION)}),
}
#: Ops of this kind are no work: they stand for the time before a rank's first event.
_WINDOW = "window"


@dataclass(frozen=True, slots=True, eq=False)
class Behind:
    """A part of its time in which a rank is behind its peers.

    `saved_each_s`: what the job would save without it, seconds, [steps]. `ops`: the ops of that part, on all ranks,
    [ops].
    """

    part: Part
    saved_each_s: Floats
    ops: Bools

    @property
    def saved_s(self) -> float:
        """Seconds that the job would save without it, of the mean step."""
        return float(self.saved_each_s.mean())


@dataclass(frozen=True, slots=True)
class BlamedRank:
    """The rank that the others wait for. Seconds of the mean step; of a recording, in all.

    `saved_s`: what the job would save with this rank at the pace of its peers. `sole_delay_s`: how much later it begins
    collectives than the last but one; `waited_s`: how long all others wait for it; both nan if that is not recorded.
    `late_s`: how much later than on its peers its recording begins, None if that does not matter.
    """

    rank: int
    saved_s: float
    sole_delay_s: float
    waited_s: float
    behind: tuple[Behind, ...]
    late_s: float | None = None


def find_culprit(pace: PaceOfPeers, ops: pl.DataFrame, waits: Waits | None) -> BlamedRank | None:
    """Return the rank that stands out, if any. `ops`: of the op trace; `waits`: None if they were not recorded."""
    ranks = tuple(int(rank) for rank in pace.graph.ops.mesh.ranks)
    if len(ranks) < 2 or (waits is not None and not waits.sole_delay.sum() > 0):
        return None
    least = PACE.smallest_share * pace.recorded_s
    first, *others = sorted(_savings(pace, waits, least).items(), key=lambda item: -item[1]) or [(ranks[0], 0.0)]
    rank, saved_s = first
    others_wait = waits is None or waits.sole_delay[waits.ranks.index(rank)] > 0
    alone = all(seconds <= PACE.next_share * saved_s for _, seconds in others)
    if saved_s >= least and others_wait and alone:
        parts = parts_of(ops)
        if _beyond_noise(pace, rank, parts) >= least:
            return _culprit(waits, rank, saved_s, _behind(pace, rank, parts))
    return None if waits is None else _late_start(pace, ops, waits)


def _beyond_noise(pace: PaceOfPeers, rank: int, parts: Mapping[Part, Bools]) -> float:
    """Return the share of a rank's price that is due to parts beyond noise, seconds.

    Each part is tested separately: kernels that are certainly slower, by next to nothing, say nothing about the host.
    """
    proven = causes_that_stand_out(pace, rank, list(parts.values()))
    if not proven:
        return 0.0
    chosen = np.logical_or.reduce(proven)
    waits = parts.get(Part.SYNC_CALLS)
    freed = pace.without_extra_waits(rank) if waits is not None and chosen[waits].any() else None
    return pace.recorded_s - float((freed or pace).times([pace.costs(rank, chosen)])[0])


def _late_start(pace: PaceOfPeers, ops: pl.DataFrame, waits: Waits) -> BlamedRank | None:
    """Return the rank whose first recorded event is late, and with it the collectives in which others wait."""
    windows = ops.filter(kind=_WINDOW).sort("rank")["duration"].to_numpy()
    latest = int(windows.argmax())
    usual = float(np.median(np.delete(windows, latest)))
    saved_s = pace.recorded_s - float(pace.times([pace.with_window(waits.ranks[latest], usual)])[0])
    if (
        saved_s < PACE.late_share * pace.recorded_s
        or not waits.sole_delay[latest] > 0
        or not stands_out_once(windows, latest)
    ):
        return None
    return _culprit(waits, waits.ranks[latest], saved_s, (), float(windows[latest] - usual))


def _culprit(
    waits: Waits | None, rank: int, saved_s: float, behind: tuple[Behind, ...], late_s: float | None = None
) -> BlamedRank:
    if waits is None:
        return BlamedRank(rank, saved_s, float("nan"), float("nan"), behind, late_s)
    index = waits.ranks.index(rank)
    return BlamedRank(
        rank, saved_s, float(waits.sole_delay[index]), float(waits.waited_for[:, index].sum()), behind, late_s
    )


def exposed_s(pace: PaceOfPeers, ops: pl.DataFrame) -> float:
    """Return what the recording would save if transfers took no time once all ranks have arrived, seconds."""
    communicates = (ops["kind"] == str(KernelClass.COMMUNICATION)).to_numpy()
    return pace.recorded_s - float(pace.times([np.where(communicates, 0.0, pace.cost)])[0])


def _savings(pace: PaceOfPeers, waits: Waits | None, least_s: float) -> Mapping[int, float]:
    """Return what the job saves with a rank at the pace of the others, seconds, for each rank that may save `least_s`
    and enough to be compared with the best.

    Of many ranks, only those that delay the others most; without recorded waits, those that may save most.
    """
    ranks, most = pace.graph.ops.mesh.ranks.tolist(), pace.most_saved
    order = np.argsort(-(most if waits is None else waits.sole_delay), kind="stable")[:_MOST_RANKS].tolist()
    saved: dict[int, float] = {}
    for first in range(0, len(order), _AT_ONCE):
        floor_s = max(least_s, PACE.next_share * max(saved.values(), default=0.0))
        batch = order[first : first + _AT_ONCE]
        saved |= saved_by_rank(pace, [ranks[index] for index in batch if most[index] >= floor_s])
    return saved


def saved_by_rank(pace: PaceOfPeers, ranks: Sequence[int]) -> Mapping[int, float]:
    """Return what the job saves with each of these ranks at the pace of the others, seconds."""
    if not ranks:
        return {}
    times = pace.times([pace.costs(rank) for rank in ranks]).tolist()
    for number, rank in enumerate(ranks):
        if (freed := pace.without_extra_waits(rank)) is not None:
            times[number] = float(freed.times([pace.costs(rank)])[0])
    return {rank: pace.recorded_s - time for rank, time in zip(ranks, times, strict=True)}


def parts_of(ops: pl.DataFrame) -> Mapping[Part, Bools]:
    """Return the ops of each part that the trace has, [ops] each."""
    kind = ops["kind"].cast(pl.String) if "kind" in ops.columns else pl.repeat("", ops.height, eager=True)
    masks = {part: kind.is_in(list(kinds)).to_numpy() for part, kinds in _KINDS.items()}
    if "rendezvous" in ops.columns:  # an op that meets others transfers, whatever its kind is called
        masks[Part.TRANSFERS] = masks[Part.TRANSFERS] | ops["rendezvous"].is_not_null().to_numpy()
    rest = ~np.logical_or.reduce(list(masks.values())) & (kind != _WINDOW).fill_null(value=True).to_numpy()
    return {part: chosen for part, chosen in {Part.COMPUTE: rest, **masks}.items() if chosen.any()}


def _behind(pace: PaceOfPeers, rank: int, parts: Mapping[Part, Bools]) -> tuple[Behind, ...]:
    """Return the parts in which a rank is behind its peers, the costliest first."""
    costs = [pace.costs(rank, chosen) for chosen in parts.values()]
    unchanged = pace.step_times([pace.cost])[0]
    saved = unchanged - pace.step_times(costs)
    if Part.SYNC_CALLS in parts and (freed := pace.without_extra_waits(rank)) is not None:
        row = list(parts).index(Part.SYNC_CALLS)
        saved[row] = unchanged - freed.step_times([costs[row]])[0]
    parts_behind = [Behind(part, saved_s, ops) for (part, ops), saved_s in zip(parts.items(), saved, strict=True)]
    parts_behind.sort(key=lambda part: -part.saved_s)
    return tuple(
        part for part in parts_behind if part.saved_s > 0 and part.saved_s >= PACE.part_share * parts_behind[0].saved_s
    )
