"""The ranks inside a worker: which of them the others wait for, when, and how long.

In: a trace whose ops record how long each rank of their worker waited inside them. Out: `Lockstep`. Tensor- and
context-parallel ranks meet many times in every compute, so each of them takes as long as the slowest. A rank's own
computing is the op minus its waits, and the others wait for the rank that waits least. If the trace says how long each
rank took for each kind of op, a rank that is late because of its host code, optimizer, data or garbage collector can be
told from one that computes slowly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.off_cpu import off_cpu_s, replayed_ops, stops_of
from tracekit.analysis.evidence.significance import Episodes, episodes_of, kinds_and_all, most_telling, needed_nats
from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.op_grid import GridPart
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.robust import of_peers, safe
from tracekit.analysis.whatif.interventions import ScaleParts
from tracekit.trace.canonical import Trace
from tracekit.trace.model import KINDS, OpKind, Worker
from tracekit.trace.schema import LASTED, WAITED

_FORWARD = (OpKind.FORWARD_COMPUTE,)
_BACKWARD = (OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT)


class Lockstep(Struct, frozen=True, eq=False, dict=True):
    """Waits inside workers. Covers the ops in which all ranks of their worker met.

    `workers`: [workers]; `ranks`: the numbers of their ranks, None if unknown. `step`, `worker`: indices, [ops]; `key`:
    which op of the graph it is, [ops], ascending; `duration_s`: seconds, [ops]; `waited_s`: seconds, [ops, ranks].
    `work_s`: how long each rank worked on the ops of a kind, without its waits for the others inside them, seconds,
    [workers, ranks, steps], nan for steps in which that is unknown; None if it was not recorded. `off_s`: how long each
    rank neither ran nor was ready to run within its own ops, seconds, [workers, ranks, steps]; 0 if unknown.
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
        own = self.duration_s[:, None] - self.waited_s
        np.add.at(total, (self.worker[:, None], np.arange(shape[1])[None, :], self.step[:, None]), own)
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
        own, peers = (each.reshape(len(own), -1, own.shape[3]) for each in (own, peers))
        return most_telling([episodes_of(view, ranks) for view in kinds_and_all(own, peers)])

    def work_of(self, kinds: Collection[OpKind]) -> Floats:
        """Seconds that each rank works on ops of these kinds, [workers, ranks, steps]; nan where that is unknown."""
        assert self.work_s is not None, "checked by the caller"
        shape = len(self.workers), self.waited_s.shape[1], len(self.graph.steps)
        recorded = [work for kind, work in self.work_s.items() if kind in kinds]
        return np.asarray(np.sum(recorded, axis=0)) if recorded else np.zeros(shape)

    def beyond_s(self, kinds: Collection[OpKind]) -> Floats:
        """Seconds that each rank works longer on ops of these kinds than its peers, [workers, ranks, steps]."""
        own = self.work_of(kinds)
        return np.asarray(own - of_peers(own, 1))

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
        hit = self.episodes.on & self.episodes.significant(smallest)[:, None]
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
    nobody = pl.lit([0.0] * ranks)
    lasted, waited = (
        ops.select(pl.when(pl.col(name).list.len() > 1).then(name).otherwise(nobody)).to_series().list.to_array(ranks)
        for name in (LASTED, WAITED)
    )
    own = lasted.to_numpy() - waited.to_numpy()
    timed = (ops[LASTED].list.len() > 1).fill_null(value=False).to_numpy() & inside
    recorded = np.zeros((len(cells), len(graph.steps)), np.bool_)
    recorded[worker[timed], step[timed]] = True
    work = {}
    for code in np.unique(kind[timed]).tolist():
        of_kind = inside & (kind == code)
        total = np.zeros((len(cells), ranks, len(graph.steps)))
        np.add.at(total, (worker[of_kind][:, None], np.arange(ranks)[None, :], step[of_kind][:, None]), own[of_kind])
        work[KINDS[code]] = np.where(recorded[:, None], np.maximum(total, 0.0), np.nan)
    return work or None


def _key(graph: DependencyGraph, step: Ints, dp_index: Ints, stage: Ints, kind: Ints, seq: Ints) -> Ints:
    """A unique number for each op of a job."""
    lane = (step * len(graph.dp_ranks) + dp_index) * graph.layout.pp + stage
    key: Ints = (lane * len(KINDS) + kind) * _MOST_SEQ + seq
    return key


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
        tuple(one) if isinstance(one, list) and len(one) == ranks and all(type(rank) is int for rank in one) else None
        for one in numbers
    )
