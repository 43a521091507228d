"""What threads wait for: a processor, the end of a stop of their process, the other ranks of their worker.

In: a `Trace`. Out: seconds of each op; changes that take them away; `Lockstep`, the ranks inside workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.significance import Episodes, episodes_of, kinds_and_all, most_telling, needed_nats
from tracekit.analysis.graph.compiled import GridPart
from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import (
    MAD_TO_SIGMA,
    lower_median,
    lower_quantile,
    median,
    nan_mean,
    of_peers,
    safe,
)
from tracekit.analysis.whatif.interventions import Intervention, Scale, ScaleParts
from tracekit.trace.canonical import Trace
from tracekit.trace.model import KINDS, OpKind, Worker
from tracekit.trace.schema import LASTED, OFF_CPU, QUEUED, WAITED

_FORWARD = (OpKind.FORWARD_COMPUTE,)
_BACKWARD = (OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT)


class WaitThresholds(Struct, frozen=True):
    """When a thread waits for more than its work. `frameworks`: the benchmark of trainings, also at high load."""

    #: A kind of work stands out from the others of a core by this many of their spreads. Statistic: by chance in one
    #: of twenty (Student's t of five kinds).
    kind_spreads: float = 2.3
    #: At most this share of an op can be waiting for a processor. Chosen: some work remains.
    share: float = 0.95
    #: This share of a worker's steps counts as quiet. If it is stopped even in these, those of its peers count.
    #: Benchmark `frameworks`.
    quiet_share: float = 0.25
    #: Time off the CPU is common up to this quantile of the steps of the usual member. Benchmark `frameworks`.
    high_share: float = 0.9
    #: A worker is stopped if time beyond that takes this share of the step ... Benchmark `frameworks`.
    stop_share: float = 0.02
    #: ... in at least this many steps. Chosen: fewer are chance.
    fewest_stops: int = 3
    #: If the usual member is off the CPU for more than this share of its computes, its thread waits for a device.
    #: Benchmark `frameworks`.
    usual_share: float = 0.25
    #: Stops of at least this share of the longest one are the usual ones. Benchmark `frameworks`.
    of_longest: float = 0.25
    #: A stop is no longer than so many times the longest one seen. Chosen: that is noise.
    of_seen: float = 1.25
    #: Times are alike if eight of ten are within this share of the middle one, and at one place if the share of one
    #: kind of compute in them varies by less. Benchmark `frameworks`.
    alike: float = 0.5


WAITS = WaitThresholds()


def queued_s(trace: Trace, graph: DependencyGraph) -> Floats | None:
    """Seconds that the training thread of each worker waited for a processor, [stages, steps, dp_ranks].

    Of several ranks of a worker, the first one's. None if the kernel did not count it.
    """
    if QUEUED not in trace.ops.columns:
        return None
    waits = np.zeros((graph.layout.pp, len(graph.steps), len(graph.dp_ranks)))
    ops, step, dp_index = replayed_ops(trace, graph, pl.col(QUEUED).list.len() > 0)
    waits[ops["pp_rank"].to_numpy(), step, dp_index] = ops[QUEUED].list.first().to_numpy()
    return waits


def without_core_waits(ops: OpGrid, cost: Sequence[Floats], waits_s: Floats) -> Intervention:
    """The job in which threads never waited for a processor. `ops`: everything that threads do; `waits_s`: [stages,
    steps, dp_ranks].

    The kernel counts over the whole step. A wait is where an op is longer than in quiet steps of its worker; what a
    worker waits in quiet steps, too, and its peers do not, is where it is longer than theirs; the rest is spread over
    all ops in proportion.

    Other work on a host delays and slows down whatever a thread does at that moment, so ranks that compute on its cores
    are compared without these waits.
    """
    recorded_s = np.nan_to_num(ops.gather(cost))
    quiet_s = lower_quantile(recorded_s, 2, WAITS.quiet_share)[:, :, None]
    seconds, rest_s = _shortened(recorded_s, quiet_s, waits_s)
    always_s = rest_s.mean(axis=1, keepdims=True)
    more_s = np.minimum(np.maximum(always_s - of_peers(always_s, 2), 0.0), rest_s)
    seconds, left_s = _shortened(seconds, np.minimum(quiet_s, of_peers(quiet_s, 3)), more_s)
    rest_s += left_s - more_s
    seconds = seconds * (1 - np.minimum(rest_s / safe(seconds.sum(axis=1)), 1.0))[:, None]
    return Scale(ops, np.where(recorded_s > 0, np.maximum(seconds / safe(recorded_s), 1 - WAITS.share), 1.0))


def _shortened(seconds: Floats, least_s: Floats, waits_s: Floats) -> tuple[Floats, Floats]:
    """Ops shortened by waits of their worker in the step, in proportion to what exceeds `least_s`; the waits left."""
    beyond_s = np.maximum(seconds - least_s, 0.0)
    total_s = beyond_s.sum(axis=1)
    shortened: Floats = seconds - beyond_s * np.minimum(waits_s / safe(total_s), 1.0)[:, None]
    return shortened, np.maximum(waits_s - total_s, 0.0)


def on_shared_cores(trace: Trace) -> bool:
    """True if all ranks compute on the cores of one host."""
    return QUEUED in trace.ops.columns and len(set(trace.hosts.values())) == 1


def core_pace(over_peers: Floats) -> Floats:
    """How slow the core of each worker is while it does each kind of work, logarithms, same shape.

    `over_peers`: work of each kind over that of peers, logarithms, [kinds, stages, steps, dp_ranks]; nan if it was not
    recorded. A slow core slows down everything. The median of the other kinds leaves out one that is slow for a reason
    of its own. A core that is fast on average does not make its worker's share look slow: peers may have been delayed
    in the other kinds.
    """
    others = [np.delete(over_peers, kind, axis=0) for kind in range(len(over_peers))]
    pace = np.stack([np.nan_to_num(median(series, (0,))) for series in others])
    return np.asarray(pace - np.minimum(pace.mean(axis=2, keepdims=True), 0.0))


def stands_out(over_peers: Floats, slow: Bools) -> Bools:
    """Workers in whose work each kind is slower than the others by more than these differ, [kinds, stages, dp_ranks].

    `over_peers`: as in `core_pace`. `slow`: the steps in question, [stages, steps, dp_ranks].
    """
    level = nan_mean(np.where(slow, over_peers, np.nan), (2,))
    out = np.zeros(level.shape, np.bool_)
    for kind in range(len(level)):
        others = np.delete(level, kind, axis=0)
        middle = median(others, (0,))
        scatter = MAD_TO_SIGMA * median(np.abs(others - middle), (0,))
        out[kind] = level[kind] - middle >= WAITS.kind_spreads * scatter
    return out


class Lockstep(Struct, frozen=True, eq=False, dict=True):
    """Waits inside workers. Covers the ops in which all ranks of their worker met.

    `workers`: [workers]; `ranks`: the numbers of their ranks, None if unknown. `step`, `worker`: indices, [ops]; `key`:
    which op of the graph it is, [ops], ascending; `duration_s`: seconds, [ops]; `waited_s`: seconds, [ops, ranks].
    `work_s`: how long each rank worked on the ops of a kind, without its waits for the others inside them, seconds,
    [workers, ranks, steps], nan for steps in which that is unknown; None if it was not recorded. `off_s`: how long each
    rank neither ran nor was ready to run within its own ops, seconds, [workers, ranks, steps]; 0 if unknown.

    Tensor- and context-parallel ranks meet many times in every compute, so each takes as long as the slowest. A rank's
    own computing is the op minus its waits; the others wait for the rank that waits least. `work_s` tells a rank that
    is late because of its host code, optimizer, data or garbage collector from one that computes slowly.
    """

    graph: DependencyGraph
    workers: tuple[Worker, ...]
    ranks: tuple[tuple[int, ...] | None, ...]
    step: Ints
    worker: Ints
    key: Ints
    duration_s: Floats
    waited_s: Floats
    work_s: Mapping[OpKind, Floats] | None
    off_s: Floats

    @classmethod
    def of(cls, trace: Trace, graph: DependencyGraph) -> Lockstep | None:
        """Gather the waits; None if the trace does not record waits inside workers."""
        if WAITED not in trace.ops.columns:
            return None
        ops, step, dp_index = replayed_ops(trace, graph, pl.col(WAITED).list.len() > 1)
        if ops.is_empty():
            return None
        stage, seq = (ops[name].to_numpy().astype(np.int64) for name in ("pp_rank", "seq"))
        key = _key(graph, step, dp_index, stage, ops["kind"].cat.physical().to_numpy().astype(np.int64), seq)
        order = np.argsort(key)
        cells, worker = np.unique(dp_index * graph.layout.pp + stage, return_inverse=True)
        workers = tuple(
            Worker(graph.dp_ranks[cell // graph.layout.pp], int(cell % graph.layout.pp)) for cell in cells.tolist()
        )
        ranks = graph.layout.tp * graph.layout.cp
        waited = ops[WAITED].list.to_array(ranks).to_numpy()
        return cls(
            graph,
            workers,
            _numbers(trace, workers, ranks),
            step[order],
            worker[order],
            key[order],
            ops["duration"].to_numpy()[order],
            waited[order],
            _work(trace, graph, cells, ranks),
            off_cpu_s(trace, graph).transpose(2, 0, 3, 1).reshape(-1, ranks, len(graph.steps))[cells],
        )

    @cached_property
    def computed_s(self) -> Floats:
        """Seconds that each rank computes itself, [workers, ranks, steps]; nan in steps without such ops."""
        if self.work_s is not None:
            return self.work_of((*_FORWARD, *_BACKWARD))
        shape = len(self.workers), self.waited_s.shape[1], len(self.graph.steps)
        total, seen = np.zeros(shape), np.zeros(shape, np.bool_)
        own_s = self.duration_s[:, None] - self.waited_s
        np.add.at(total, (self.worker[:, None], np.arange(shape[1])[None, :], self.step[:, None]), own_s)
        seen[self.worker, :, self.step] = True
        return np.where(seen, total, np.nan)

    @cached_property
    def _computed_by_kind_s(self) -> Floats:
        """As `computed_s`, forwards and backwards apart where they are known, [1 or 2, workers, ranks, steps]."""
        if self.work_s is None:
            return self.computed_s[None]
        return np.stack([self.work_of(kinds) for kinds in (_FORWARD, _BACKWARD)])

    @cached_property
    def episodes(self) -> Episodes:
        """When each rank computes longer than its peers, one member per (worker, rank)."""
        computed = self._computed_by_kind_s
        own = computed[computed.any(axis=(1, 2, 3))]
        ranks = own.shape[2]
        # The median, not the mean: the mean includes a slow rank, so all others would look fast whenever it is slow.
        peers = np.broadcast_to(of_peers(own, 2), own.shape)
        own, peers = (array.reshape(len(own), -1, own.shape[3]) for array in (own, peers))
        return most_telling([episodes_of(view, ranks) for view in kinds_and_all(own, peers)])

    def work_of(self, kinds: Collection[OpKind]) -> Floats:
        """Seconds that each rank works on ops of these kinds, [workers, ranks, steps]; nan where that is unknown."""
        assert self.work_s is not None, "checked by the caller"
        shape = len(self.workers), self.waited_s.shape[1], len(self.graph.steps)
        recorded = [work for kind, work in self.work_s.items() if kind in kinds]
        return np.asarray(np.sum(recorded, axis=0)) if recorded else np.zeros(shape)

    def beyond_s(self, kinds: Collection[OpKind]) -> Floats:
        """Seconds that each rank works longer on ops of these kinds than its peers, [workers, ranks, steps]."""
        own_s = self.work_of(kinds)
        return np.asarray(own_s - of_peers(own_s, 1))

    def late_by(self, kinds: Collection[OpKind], step_s: float, parts: int) -> Episodes:
        """When each rank is late because of ops of these kinds, one member per (worker, rank).

        `step_s`: what a step takes; `parts`: how many such sets of kinds are tested.
        """
        beyond = np.nan_to_num(self.beyond_s(kinds)) / step_s
        # As the logarithm of the step over the step without it.
        series = np.log1p(np.maximum(beyond, -0.5)).reshape(-1, beyond.shape[2])
        return replace(episodes_of(series, beyond.shape[1]), needed=needed_nats(len(series) * parts))

    def stopped(self, step_s: float) -> tuple[Bools, Floats]:
        """Which ranks are late because their processes are stopped, and for how long, [workers, ranks, steps] each.

        `step_s`: what a step takes, seconds.
        """
        by_kind_s = np.nan_to_num(self._computed_by_kind_s)
        if self.work_s is not None:  # a rank's own time in its optimizer is known, too
            by_kind_s = np.concatenate([by_kind_s, np.nan_to_num(self.work_of({OpKind.OPTIMIZER}))[None]])
        stopped_s, within_s = stops_of(self.off_s, by_kind_s, step_s)
        return stopped_s > 0, within_s

    def on_time(self, late: Bools, beyond_s: Floats) -> ScaleParts:
        """The job in which these ranks are late by `beyond_s` less, both [workers, ranks, steps]."""
        gained = self.held_up_s(late)
        shape = len(self.workers), len(self.graph.steps)
        held = np.zeros(shape)
        np.add.at(held, (self.worker, self.step), gained)
        most = np.where(late, np.maximum(beyond_s, 0.0), 0.0).max(axis=1)
        return self._shorter(gained * np.minimum(most / safe(held), 1.0)[self.worker, self.step])

    def slow(self, smallest: float) -> Bools:
        """Which ranks compute longer than their peers by at least `smallest`, and when, [workers, ranks, steps]."""
        hit = self.episodes.slow & self.episodes.significant(smallest)[:, None]
        return np.asarray(hit.reshape(self.computed_s.shape))

    def held_up_s(self, slow: Bools) -> Floats:
        """How much shorter each op is if these ranks are as fast as the slowest of the others, seconds, [ops].

        All others wait for the slow ranks at least as long as that slowest one does.
        """
        is_slow = slow[self.worker, :, self.step]
        least_of_others = np.where(is_slow, np.inf, self.waited_s).min(axis=1)
        least_of_slow = np.where(is_slow, self.waited_s, np.inf).min(axis=1)
        partly = is_slow.any(axis=1) & ~is_slow.all(axis=1)
        gained = np.maximum(np.where(partly, least_of_others, 0.0) - np.where(partly, least_of_slow, 0.0), 0.0)
        return np.asarray(np.minimum(gained, self.duration_s))

    def alike(self, workers: Bools) -> ScaleParts:
        """The job in which all ranks of these workers, [workers], compute for their average time."""
        gained = np.where(workers[self.worker], self.waited_s.mean(axis=1), 0.0)
        return self._shorter(gained)

    def as_fast_as_peers(self, slow: Bools) -> ScaleParts:
        """The job with these ranks, [workers, ranks, steps], as fast as their peers."""
        return self._shorter(self.held_up_s(slow))

    def _shorter(self, gained: Floats) -> ScaleParts:
        """The job with ops that are shorter by `gained` seconds, [ops]."""
        share = np.maximum(1 - gained / safe(self.duration_s), 0.0)
        return ScaleParts(tuple(self._parts(np.where(self.duration_s > 0, share, 1.0))))

    def _parts(self, factor: Floats) -> Iterator[GridPart]:
        """`factor` [ops] at the rows of the graph's blocks."""
        for number, block in enumerate(self.graph.blocks):
            keys = _keys_of(self.graph, block)
            index = np.minimum(np.searchsorted(self.key, keys), len(self.key) - 1)
            values = np.where(self.key[index] == keys, factor[index], 1.0)
            rows = np.flatnonzero((values != 1).any(axis=1))
            if len(rows):
                yield GridPart(number, rows, values[rows])


def _work(trace: Trace, graph: DependencyGraph, cells: Ints, ranks: int) -> dict[OpKind, Floats] | None:
    """See `Lockstep.work_s`. `cells`: the numbers of the workers."""
    if LASTED not in trace.ops.columns:
        return None
    several = (pl.col(LASTED).list.len() > 1) | (pl.col(WAITED).list.len() > 1)
    ops, step, dp_index = replayed_ops(trace, graph, several)
    cell = dp_index * graph.layout.pp + ops["pp_rank"].to_numpy().astype(np.int64)
    inside = np.isin(cell, cells)
    worker = np.minimum(np.searchsorted(cells, cell), len(cells) - 1)
    kind = ops["kind"].cat.physical().to_numpy()
    no_waits = pl.lit([0.0] * ranks)
    lasted, waited = (
        ops.select(pl.when(pl.col(name).list.len() > 1).then(name).otherwise(no_waits)).to_series().list.to_array(ranks)
        for name in (LASTED, WAITED)
    )
    own_s = lasted.to_numpy() - waited.to_numpy()
    timed = (ops[LASTED].list.len() > 1).fill_null(value=False).to_numpy() & inside
    recorded = np.zeros((len(cells), len(graph.steps)), np.bool_)
    recorded[worker[timed], step[timed]] = True
    work = {}
    for code in np.unique(kind[timed]).tolist():
        of_kind = inside & (kind == code)
        total = np.zeros((len(cells), ranks, len(graph.steps)))
        np.add.at(total, (worker[of_kind][:, None], np.arange(ranks)[None, :], step[of_kind][:, None]), own_s[of_kind])
        work[KINDS[code]] = np.where(recorded[:, None], np.maximum(total, 0.0), np.nan)
    return work or None


def _key(graph: DependencyGraph, step: Ints, dp_index: Ints, stage: Ints, kind: Ints, seq: Ints) -> Ints:
    """A unique number for each op of a job."""
    lane = (step * len(graph.dp_ranks) + dp_index) * graph.layout.pp + stage
    return np.asarray((lane * len(KINDS) + kind) * _MOST_SEQ + seq)


#: Upper bound of the ops of one kind in a worker's step.
_MOST_SEQ = 1 << 20


def _keys_of(graph: DependencyGraph, block: Block) -> Ints:
    """The keys of a block's ops, [rows, lanes]."""
    template = block.template
    dp_index = np.searchsorted(graph.dp_ranks, block.dp_rank)
    stage, kind = (column.astype(np.int64)[:, None] for column in (template.pp_rank, template.kind))
    return _key(graph, block.step.astype(np.int64)[None, :], dp_index[None, :], stage, kind, block.seq.astype(np.int64))


def _numbers(trace: Trace, workers: tuple[Worker, ...], ranks: int) -> tuple[tuple[int, ...] | None, ...]:
    """The rank numbers inside each worker, as far as the free metadata gives them."""
    stated = trace.metadata.get("ranks_of_workers")
    stands = trace.worker_ranks()
    by_rank = stated if isinstance(stated, dict) else {}
    numbers = (by_rank.get(str(stands.get(worker))) for worker in workers)
    return tuple(
        tuple(row) if isinstance(row, list) and len(row) == ranks and all(type(rank) is int for rank in row) else None
        for row in numbers
    )


def off_cpu_s(trace: Trace, graph: DependencyGraph) -> Floats:
    """Time in which the training thread of each rank of a worker neither ran nor was ready to run within its own ops,
    seconds, [stages, steps, dp_ranks, ranks]; 0 if that is unknown.
    """
    ranks = graph.layout.tp * graph.layout.cp
    off = np.zeros((graph.layout.pp, len(graph.steps), len(graph.dp_ranks), ranks))
    if OFF_CPU not in trace.ops.columns:
        return off
    ops, step, dp_index = replayed_ops(trace, graph, pl.col(OFF_CPU).list.len() == ranks)
    off[ops["pp_rank"].to_numpy(), step, dp_index] = ops[OFF_CPU].list.to_array(ranks).to_numpy()
    return off


def replayed_ops(trace: Trace, graph: DependencyGraph, chosen: pl.Expr) -> tuple[pl.DataFrame, Ints, Ints]:
    """The chosen ops of a trace that are in the graph, and the index of their step and of their DP rank, [ops]."""
    ops = trace.ops.filter(
        chosen & pl.col("step").is_in(graph.steps.tolist()) & pl.col("dp_rank").is_in(list(graph.dp_ranks))
    )
    step = np.searchsorted(graph.steps, ops["step"].to_numpy())
    return ops, step, np.searchsorted(graph.dp_ranks, ops["dp_rank"].to_numpy())


def within_computes(off_s: Floats, computes_s: Floats) -> Floats:
    """The part of `off_s` by which computes are longer than in quiet steps, seconds, [groups, peers, steps] each."""
    quiet_s = lower_quantile(computes_s, -1, WAITS.quiet_share)
    quiet_s = np.minimum(quiet_s, lower_median(quiet_s, -1)[..., None])
    return np.minimum(off_s, np.maximum(computes_s - quiet_s[..., None], 0.0))


def stops_of(off_s: Floats, by_kind_s: Floats, step_s: float) -> tuple[Floats, Floats]:
    """How long members are stopped in each step, 0 for those that others equal at times; and by how much that prolongs
    their computes; seconds, [groups, peers, steps] each.

    `off_s`: time off the CPU, [groups, peers, steps]; `by_kind_s`: duration of computes, [kinds, groups, peers, steps];
    `step_s`: duration of a step. Seconds.

    The kernel counts over the whole step, and waits of a thread between its computes, such as for a file, are host
    code. So a process counts as stopped only if its computes are longer than those of quiet steps.
    """
    within_s = within_computes(off_s, by_kind_s.sum(axis=0))
    members, within, *kinds = (array.reshape(-1, off_s.shape[-1]) for array in (off_s, within_s, *by_kind_s))
    return _stops_of_members(members, within, np.stack(kinds), step_s).reshape(off_s.shape), within_s


def _stops_of_members(off_s: Floats, stops_s: Floats, by_kind_s: Floats, step_s: float) -> Floats:
    """As `stops_of`, of [members, steps]. `stops_s`: the part of `off_s` within computes."""
    zeros = np.zeros(off_s.shape)
    computes_s = by_kind_s.sum(axis=0)
    usual_share = float(lower_median((off_s / safe(computes_s)).mean(axis=1), 0))
    if usual_share > WAITS.usual_share:  # threads wait for the devices that compute
        return zeros
    # What keeps all members off the CPU in one step, such as a first step that loads libraries, stops none of them.
    off_s = np.maximum(off_s - of_peers(off_s, 0), 0.0)
    stops_s = np.minimum(stops_s, off_s)
    # Any thread is off the CPU for a moment in any step: what happens to all members now and then is not a stop.
    usual_s = float(lower_median(lower_quantile(off_s, -1, WAITS.high_share), 0))
    beyond_s = np.maximum(stops_s - usual_s, 0.0)
    # Stops hit host code, too. But a thread that waits for a file does so there alone, however long its computes are.
    off_beyond_s = np.maximum(off_s - usual_s, 0.0)
    stopped = off_beyond_s > WAITS.of_longest * beyond_s.max(axis=1, keepdims=True)
    within = stopped & (beyond_s >= WAITS.alike * off_beyond_s)
    stopped = np.where(2 * within.sum(axis=1, keepdims=True) >= stopped.sum(axis=1, keepdims=True), stopped, within)
    costly = beyond_s.mean(axis=1) >= WAITS.stop_share * step_s
    longest_s = off_s.max(axis=1)
    costly &= longest_s > WAITS.alike * longest_s.max()  # next to longer stops of others, these are noise
    hit: Bools = costly & within.any(axis=1) & (stopped.sum(axis=1) >= WAITS.fewest_stops)
    first_s = np.maximum(by_kind_s[0] - lower_quantile(by_kind_s[0], -1, WAITS.quiet_share)[:, None], 0.0)
    for member in np.flatnonzero(hit):
        hit[member] = not _steady(off_s[member], beyond_s[member], first_s[member], stopped[member])
    if 2 * hit.sum() > hit.size:
        return zeros
    # Time off the CPU that a member also has in its other steps is not the stop.
    otherwise_s = median(np.where(stopped, np.nan, off_s), (1,))[:, None]
    lasts_s = np.maximum(stops_s, off_s - np.nan_to_num(otherwise_s))
    return np.where(stopped & hit[:, None], lasts_s, zeros)


def without_stops(seconds: Floats, taking_part: Bools, stop_s: tuple[float, float]) -> Floats:
    """The factor that makes ops as long, or as late, as they usually are where a process was stopped.

    A process that is stopped now and then is also stopped while it loads data or transfers it, where a thread has
    reason to wait, and between its ops: what lasts longer than in the middle step by about one of the stops seen
    elsewhere was one.

    `seconds`: [stages, ops, steps, dp_ranks], NaN where absent. `taking_part`: workers that are stopped or wait for one
    that is, [stages, dp_ranks]. `stop_s`: the usual stop and the longest one.
    """
    usual_s, longest_s = stop_s
    usually_s = median(seconds, (2,))[:, :, None]
    beyond_s = seconds - usually_s
    by_a_stop = (beyond_s > WAITS.alike * usual_s) & (beyond_s < WAITS.of_seen * longest_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        factor: Floats = np.where(taking_part[:, None, None] & by_a_stop, np.maximum(usually_s, 0.0) / seconds, 1.0)
    return factor


def _steady(off_s: Floats, beyond_s: Floats, first_s: Floats, stopped: Bools) -> bool:
    """True if a member is off the CPU for equally long in each step of a stretch, as if its code slept, [steps] each.

    Stops happen at any time, so some steps have none of them and others one or several, now in one kind of compute and
    now in another. `first_s`: by how much those of the first kind are longer than in quiet steps. `stopped`: the steps
    of the stretch.
    """
    low, middle, high = np.quantile(off_s[stopped], (0.1, 0.5, 0.9))
    runs = int((np.diff(stopped.astype(np.int8), prepend=0) > 0).sum())
    by_chance = stopped.sum() * (len(stopped) - stopped.sum() + 1) / len(stopped)
    least, most = np.quantile(np.minimum(first_s[stopped] / safe(beyond_s[stopped]), 1.0), (0.1, 0.9))
    return bool(high - low < WAITS.alike * middle and runs <= max(1.0, by_chance / 2) and most - least < WAITS.alike)
