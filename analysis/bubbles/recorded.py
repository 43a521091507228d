"""The pipeline as recorded: computes and transfers of the lanes that compute in the same order.

In: a `JobReplay`, with clocks corrected. Out: `RecordedPipeline`s, one for each order, and the lanes that are in none.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.bubbles.order import BACKWARD, FORWARD, KINDS_OF_COMPUTE, ComputeOrder
from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.graph.op_grid import paired_rows
from tracekit.analysis.graph.rules.megatron import BACKWARD as BACKWARDS
from tracekit.analysis.graph.rules.megatron import FORWARD as FORWARDS
from tracekit.analysis.graph.rules.megatron import in_order_of_computes, merged_order
from tracekit.analysis.graph.rules.posting import RECVS, SENDS
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.trace.model import KINDS, OpKind

Lane = tuple[int, int]


class RecordedPipeline(Struct, frozen=True, eq=False, dict=True):
    """Lanes whose stages compute in the same order, with recorded seconds.

    `dp_rank`: [lanes]. `start`, `end`: of computes, [computes, lanes]. `arrived`: when the receive of a compute's input
    ended, `gathered`: when the gathering of its parameters did, -inf if there is none, [computes, lanes]. `transfer`:
    own cost of each transfer in `order.received`, [transfers, lanes].
    """

    order: ComputeOrder
    dp_rank: Int32s
    start: Floats
    end: Floats
    arrived: Floats
    gathered: Floats
    transfer: Floats

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.dp_rank)

    @cached_property
    def window_s(self) -> Floats:
        """From the first start to the last end of any compute, seconds, [lanes]."""
        window: Floats = self.end.max(axis=0) - self.start.min(axis=0)
        return window

    @cached_property
    def kinds(self) -> int:
        """The number of kinds of compute: 3 if weight gradients are computed apart, else 2."""
        return int(self.order.kind.max()) + 1

    def of_cells(self, values: Floats) -> Floats:
        """Values of the computes, [computes, lanes], by [kinds, virtual stages, microbatches, lanes]."""
        shape = (self.kinds, self.order.virtual_stages, self.order.microbatches, self.lanes)
        return values[np.argsort(self.order.cell)].reshape(shape)

    @cached_property
    def duration(self) -> Floats:
        """Recorded seconds of each compute, [kinds, virtual stages, microbatches, lanes]."""
        return self.of_cells(self.end - self.start)

    @cached_property
    def delay(self) -> Floats:
        """Launch delays: how long each compute could have begun before it did, seconds, likewise."""
        ready = self.arrived.copy()
        follows = np.flatnonzero(np.diff(self.order.stage) == 0)
        ready[follows + 1] = np.maximum(ready[follows + 1], self.end[follows])
        first = self.start.min(axis=0)
        return self.of_cells(self.start - np.where(np.isfinite(ready), ready, first))

    @cached_property
    def usual_transfer(self) -> Floats:
        """The median transfer of each direction and sending stage, seconds, [directions, stages].

        Stages that send nothing in that direction, as the last one of 1F1B, have the median of the direction.
        """
        order, medians = self.order, np.zeros((2, self.order.stages))
        kind, sender = order.kind[order.received], order.stage[order.needs[order.received]]
        for direction in range(2):
            if (kind == direction).any():
                medians[direction] = np.median(self.transfer[kind == direction])
            for stage in np.unique(sender[kind == direction]):
                medians[direction, stage] = np.median(self.transfer[(kind == direction) & (sender == stage)])
        return medians

    def joined(self, other: RecordedPipeline) -> RecordedPipeline:
        """The lanes of both, of the same order."""
        names = ("dp_rank", "start", "end", "arrived", "gathered", "transfer")
        both = {name: np.concatenate([getattr(self, name), getattr(other, name)], axis=-1) for name in names}
        return RecordedPipeline(self.order, **both)


def recorded_pipelines(replay: JobReplay) -> tuple[list[RecordedPipeline], list[Lane]]:
    """The pipelines of a job, and (step, dp_rank) of the lanes whose computes or transfers are not all recorded."""
    by_order: dict[bytes, RecordedPipeline] = {}
    left_out: list[Lane] = []
    for number, block in enumerate(replay.graph.blocks):
        pipeline = _pipeline(block, replay.durations.cost[number], replay.graph.virtual)
        if pipeline is None:
            left_out += zip(replay.graph.steps[block.step].tolist(), block.dp_rank.tolist(), strict=True)
            continue
        order = pipeline.order
        key = np.stack([order.stage, order.kind, order.virtual, order.microbatch]).tobytes()
        by_order[key] = by_order[key].joined(pipeline) if key in by_order else pipeline
    return list(by_order.values()), left_out


def _pipeline(block: Block, cost: Floats, virtual_of: Ints) -> RecordedPipeline | None:
    """The pipeline of a block; None if its lanes lack computes or transfers. `cost`: of its ops, [rows, lanes].
    `virtual_of`: the `virtual_stages` of the job.
    """
    template, (chunks, stages) = block.template, virtual_of.shape
    kind_of = np.full(len(KINDS), -1)
    kind_of[[kind.code for kind in KINDS_OF_COMPUTE]] = range(len(KINDS_OF_COMPUTE))
    kind, begin = kind_of[template.kind], block.start[:, 0]
    # A compute that takes no time precedes another one that begins at the same moment.
    begin = np.where(block.duration[:, 0] > 0, begin, np.nextafter(begin, -np.inf))
    rows = np.concatenate(
        [
            merged_order(begin, [np.flatnonzero((template.pp_rank == stage) & (kind == each)) for each in range(3)])
            for stage in range(stages)
        ]
    )
    kind, stage, chunk = kind[rows], template.pp_rank[rows].astype(np.int64), np.maximum(template.chunk[rows], 0)
    counts = np.zeros((3, chunks, stages), np.int64)
    np.add.at(counts, (kind, chunk, stage), 1)
    microbatches = int(counts[0, 0, 0])
    if not microbatches or (counts[:2] != microbatches).any() or not np.isin(counts[2], counts[2, 0, 0]).all():
        return None
    if counts[2, 0, 0] not in (0, microbatches):
        return None
    virtual = virtual_of[chunk, stage]
    microbatch = _microbatches(block, rows, (kind * chunks + chunk) * stages + stage, microbatches)
    order = ComputeOrder(stage, kind, virtual, microbatch, stages, stages * chunks, microbatches)
    recv = _receives(block, order, virtual_of)
    if recv is None:
        return None
    start, end = block.start[rows], block.start[rows] + block.duration[rows]
    arrived = np.full_like(start, -np.inf)
    arrived[order.received] = block.start[recv] + block.duration[recv]
    return RecordedPipeline(order, block.dp_rank, start, end, arrived, _gathered(block, rows), cost[recv])


def _microbatches(block: Block, rows: Ints, group: Ints, microbatches: int) -> Ints:
    """The microbatch of each compute, from 0, [computes]: as recorded or, if that cannot be, in order. `group`: a
    number for each kind, chunk and stage.
    """
    by_group = np.lexsort((np.arange(len(rows)), group))
    numbers = np.empty(len(rows), np.int64)
    numbers[by_group] = np.tile(np.arange(microbatches), len(rows) // microbatches)
    if block.microbatch.shape[1] == 1:
        _, recorded = np.unique(block.microbatch[rows, 0], return_inverse=True)
        if (np.sort(recorded[by_group].reshape(-1, microbatches), axis=1) == np.arange(microbatches)).all():
            return recorded.astype(np.int64)
    return numbers


def _receives(block: Block, order: ComputeOrder, virtual_of: Ints) -> Ints | None:
    """The row of the receive of each of `order.received`, [transfers]; None if they do not match."""
    template = block.template
    real = np.sort(paired_rows(template)[1])
    if not np.isin(template.kind, SENDS).any():  # inferred receives
        real = np.flatnonzero(np.isin(template.kind, RECVS))
    received = np.empty(len(order.received), np.int64)
    for kind, recv in ((FORWARD, FORWARDS.recv), (BACKWARD, BACKWARDS.recv)):
        rows, these = real[template.kind[real] == recv.code], order.kind[order.received] == kind
        stage, virtual = order.stage[order.received[these]], order.virtual[order.received[these]]
        if not np.array_equal(template.pp_rank[rows], stage):
            return None
        if order.v_shaped:
            rows = in_order_of_computes(rows, virtual_of[np.maximum(template.chunk[rows], 0), stage], virtual)
        received[these] = rows
    return received


def _gathered(block: Block, rows: Ints) -> Floats:
    """When the parameters that each compute waits for were gathered, seconds, -inf for none, [computes, lanes]."""
    template = block.template
    gathered_s = np.full((len(rows), block.lanes), -np.inf)
    compute_of = np.full(template.rows, -1)
    compute_of[rows] = np.arange(len(rows))
    after = np.repeat(np.arange(template.rows), np.diff(template.first_wait))
    gather = template.kind[template.waits_for] == OpKind.PARAMS_ALL_GATHER.code
    for before, compute in zip(template.waits_for[gather], compute_of[after[gather]], strict=True):
        if compute >= 0:
            gathered_s[compute] = np.maximum(gathered_s[compute], block.start[before] + block.duration[before])
    return gathered_s
