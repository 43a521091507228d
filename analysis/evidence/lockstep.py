"""The ranks inside a worker: which of them the others wait for, when, and how long.

In: a trace whose ops record how long each rank of their worker waited inside them. Out: `Lockstep`. Tensor- and
context-parallel ranks meet many times in every compute, so each of them takes as long as the slowest. A rank's own
computing is the op minus its waits, and the others wait for the rank that waits least.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.evidence.changes import CostOverlay
from tracekit.analysis.evidence.significance import Bools, Episodes, episodes_of
from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.graph.op_grid import Part
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.model import KINDS, Worker
from tracekit.schema import WAITED
from tracekit.trace import Trace


class Lockstep(Struct, frozen=True, eq=False, dict=True):
    """Waits inside workers. Covers the ops in which all ranks of their worker met.

    `workers`: [workers]; `ranks`: the numbers of their ranks, None if unknown. `step`, `worker`: indices, [ops]; `key`:
    which op of the graph it is, [ops], ascending; `duration_s`: seconds, [ops]; `waited_s`: seconds, [ops, ranks].
    """

    graph: DependencyGraph
    workers: tuple[Worker, ...]
    ranks: tuple[tuple[int, ...] | None, ...]
    step: Ints
    worker: Ints
    key: Ints
    duration_s: Floats
    waited_s: Floats

    @classmethod
    def of(cls, trace: Trace, graph: DependencyGraph) -> Lockstep | None:
        """Gather the waits; None if the trace does not record waits inside workers."""
        if WAITED not in trace.ops.columns:
            return None
        ops = trace.ops.filter(
            (pl.col(WAITED).list.len() > 1)
            & pl.col("step").is_in(graph.steps.tolist())
            & pl.col("dp_rank").is_in(list(graph.dp_ranks))
        )
        if ops.is_empty():
            return None
        names = ("step", "dp_rank", "pp_rank", "seq")
        step, dp_rank, stage, seq = (ops[name].to_numpy().astype(np.int64) for name in names)
        step, dp_index = np.searchsorted(graph.steps, step), np.searchsorted(graph.dp_ranks, dp_rank)
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
        )

    @cached_property
    def computed_s(self) -> Floats:
        """Seconds that each rank computes itself, [workers, ranks, steps]; nan in steps without such ops."""
        shape = len(self.workers), self.waited_s.shape[1], len(self.graph.steps)
        total, seen = np.zeros(shape), np.zeros(shape, np.bool_)
        own = self.duration_s[:, None] - self.waited_s
        np.add.at(total, (self.worker[:, None], np.arange(shape[1])[None, :], self.step[:, None]), own)
        seen[self.worker, :, self.step] = True
        return np.where(seen, total, np.nan)

    @cached_property
    def episodes(self) -> Episodes:
        """When each rank computes longer than its peers, one member per (worker, rank)."""
        own = self.computed_s
        ranks = own.shape[1]
        # The median, not the mean: the mean includes a slow rank, so all others would look fast whenever it is slow.
        peers = own[:, ::-1] if ranks == 2 else lower_median(own, axis=1)[:, None]
        series = np.log(safe(own)) - np.log(safe(peers))
        return episodes_of(series.reshape(-1, own.shape[2]), ranks)

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
        some = is_slow.any(axis=1) & ~is_slow.all(axis=1)
        gained = np.maximum(np.where(some, least_of_others, 0.0) - np.where(some, least_of_slow, 0.0), 0.0)
        return np.asarray(np.minimum(gained, self.duration_s))

    def alike(self, workers: Bools) -> LockstepRepair:
        """The job in which all ranks of these workers, [workers], compute for their average time."""
        gained = np.where(workers[self.worker], self.waited_s.mean(axis=1), 0.0)
        return self._shorter(gained)

    def as_fast_as_peers(self, slow: Bools) -> LockstepRepair:
        """The job with these ranks, [workers, ranks, steps], as fast as their peers."""
        return self._shorter(self.held_up_s(slow))

    def _shorter(self, gained: Floats) -> LockstepRepair:
        """The job with ops that are shorter by `gained` seconds, [ops]."""
        left = np.maximum(1 - gained / safe(self.duration_s), 0.0)
        return LockstepRepair(tuple(self._parts(np.where(self.duration_s > 0, left, 1.0))))

    def _parts(self, factor: Floats) -> Iterator[Part]:
        """`factor` [ops] at the rows of the graph's blocks."""
        for number, block in enumerate(self.graph.blocks):
            keys = _keys_of(self.graph, block)
            at = np.minimum(np.searchsorted(self.key, keys), len(self.key) - 1)
            values = np.where(self.key[at] == keys, factor[at], 1.0)
            rows = np.flatnonzero((values != 1).any(axis=1))
            if len(rows):
                yield Part(number, rows, values[rows])


class LockstepRepair(Struct, frozen=True, eq=False):
    """Makes the ops of workers as long as they are when the slow ranks inside are as fast as the others."""

    parts: tuple[Part, ...]

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.scale_costs(self.parts)


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
    known = stated if isinstance(stated, dict) else {}
    found = (known.get(str(stands.get(worker))) for worker in workers)
    return tuple(
        tuple(one) if isinstance(one, list) and len(one) == ranks and all(type(rank) is int for rank in one) else None
        for one in found
    )
