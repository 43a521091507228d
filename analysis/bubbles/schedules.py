"""What the stages of a pipeline compute and in which order: as a schedule gives it, and as recorded.

In: the name of a schedule, or a `JobReplay`. Out: `ComputeOrder`s, which give windows for any costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.compiled import NO_RENDEZVOUS, CompiledGraph, Wiring, compile_graphs
from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.graph.megatron import BACKWARD as BACKWARDS
from tracekit.analysis.graph.megatron import FORWARD as FORWARDS
from tracekit.analysis.graph.megatron import in_order_of_computes, merged_order
from tracekit.analysis.graph.op_grid import paired_rows
from tracekit.analysis.graph.posting import RECVS, SENDS
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, LanesToReplay, Timeline, replay_lanes, replay_timelines
from tracekit.base.errors import LayoutError, SelectionError
from tracekit.base.text import quoted
from tracekit.trace.compute_order import Schedule, check_schedule, compute_order
from tracekit.trace.model import KINDS, Layout, OpKind

ZB_H1 = "zb-h1"
_FORM = re.compile(r"(gpipe|1f1b|zb-h1|interleaved:chunks=(?P<chunks>\d{1,4}))(,weight=(?P<weight>0?\.\d{1,15}))?")
#: Chunks of fewer layers than one would only take memory.
_MOST_CHUNKS = 64
#: Kinds of compute, which have these numbers in arrays. A backward is whole if its weight gradients are not separate.
KINDS_OF_COMPUTE = (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT)
FORWARD, BACKWARD, WEIGHT = range(3)

Lane = tuple[int, int]


class AskedSchedule(Struct, frozen=True):
    """A schedule to price. `text`: as asked for; `chunks`: model chunks per stage; `weight`: the share of the weight
    gradients in the whole backward, None if not stated.
    """

    text: str
    name: str
    chunks: int = 1
    weight: float | None = None

    @classmethod
    def parse(cls, text: str) -> AskedSchedule:
        """Read "interleaved:chunks=2,weight=0.4". Raises SelectionError, with the schedules that exist."""
        read = _FORM.fullmatch(text.strip().lower())
        chunks = int(read["chunks"]) if read and read["chunks"] else None
        weight = float(read["weight"]) if read and read["weight"] else None
        if read is None or weight == 0 or not (chunks is None or 2 <= chunks <= _MOST_CHUNKS):
            raise SelectionError(
                f"--schedule {quoted(text)}: not a schedule; write gpipe, 1f1b, interleaved:chunks=V or zb-h1, with"
                f" ,weight=X behind it for the share of W in the whole backward; V: 2 to {_MOST_CHUNKS}, X: 0 to 1"
            )
        return cls(text, read[1].partition(":")[0], chunks or 1, weight)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from the rest of the backward."""
        return self.name == ZB_H1

    def order(self, stages: int, microbatches: int) -> ComputeOrder:
        """The order of that schedule. Raises LayoutError if it cannot run so many microbatches on so many stages."""
        if self.chunks > 1 and stages == 1:
            raise LayoutError(f"schedule {self.name} needs a pipeline of 2 stages or more; the job has 1")
        schedule = Schedule.ONE_F_ONE_B if self.splits_backward else Schedule(self.name)
        layout = Layout(dp=1, pp=stages, tp=1, vpp=self.chunks)
        check_schedule(schedule, layout, microbatches)
        ops = ((stage, *op) for stage in range(stages) for op in self._of_stage(schedule, layout, microbatches, stage))
        return ComputeOrder.of(ops, stages, self.chunks, microbatches)

    def _of_stage(
        self, schedule: Schedule, layout: Layout, microbatches: int, stage: int
    ) -> Iterator[tuple[int, int, int]]:
        """(kind, chunk, microbatch) of the computes of a stage, in order."""
        waiting: list[tuple[int, int, int]] = []
        for compute in compute_order(schedule, layout, microbatches, stage):
            yield FORWARD if compute.forward else BACKWARD, compute.chunk, compute.microbatch
            if self.splits_backward and not compute.forward:
                waiting.append((WEIGHT, compute.chunk, compute.microbatch))
                if len(waiting) > stage:  # of a later stage, more may wait: its backwards are needed sooner
                    yield waiting.pop(0)
        yield from waiting


class ComputeOrder(Struct, frozen=True, eq=False, dict=True):
    """The computes of a lane, sorted by stage, then in order: [computes] columns.

    `virtual`: the virtual stage, a model chunk on a stage, numbered in the order of the model; `microbatch`: from 0.
    """

    stage: Ints
    kind: Ints
    virtual: Ints
    microbatch: Ints
    stages: int
    virtual_stages: int
    microbatches: int

    @classmethod
    def of(
        cls, computes: Iterable[tuple[int, int, int, int]], stages: int, chunks: int, microbatches: int
    ) -> ComputeOrder:
        """The order of these (stage, kind, chunk, microbatch), stage by stage; virtual stages wrap around."""
        stage, kind, chunk, microbatch = np.array(list(computes), np.int64).T
        return cls(stage, kind, chunk * stages + stage, microbatch, stages, stages * chunks, microbatches)

    @cached_property
    def cell(self) -> Ints:
        """Position of each compute in an array [kinds, virtual stages, microbatches], [computes]."""
        return (self.kind * self.virtual_stages + self.virtual) * self.microbatches + self.microbatch

    @cached_property
    def needs(self) -> Ints:
        """The compute on another stage whose result each compute needs, [computes]; -1: none."""
        row_at = np.full((3, self.virtual_stages + 2, self.microbatches), -1, np.int64)
        row_at[self.kind, self.virtual + 1, self.microbatch] = np.arange(len(self.kind))
        step = np.where(self.kind == FORWARD, -1, 1)
        needs = row_at[self.kind, self.virtual + 1 + step, self.microbatch]
        waits = (needs >= 0) & (self.kind != WEIGHT)
        return np.where(waits & (self.stage[needs] != self.stage), needs, -1)

    @property
    def v_shaped(self) -> bool:
        """Whether chunks of a stage do not follow each other at equal distances in the model, as in ZBV."""
        return bool((self.virtual % self.stages != self.stage).any())

    @cached_property
    def received(self) -> Ints:
        """The computes that need the result of another stage, [transfers]."""
        return np.flatnonzero(self.needs >= 0)

    @cached_property
    def peak_microbatches(self) -> Floats:
        """The most microbatches that each stage holds, [stages]; a chunk counts as its share of the stage.

        A microbatch is held from the start of its forward to the end of its backward, and of its weight gradients.
        """
        last = WEIGHT if (self.kind == WEIGHT).any() else BACKWARD
        change = np.select([self.kind == FORWARD, self.kind == last], [1, -1], 0)
        held = [np.cumsum(change[self.stage == stage]).max(initial=0) for stage in range(self.stages)]
        return np.array(held) * self.stages / self.virtual_stages

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """Rows that run before others, and these others: computes of a stage in order, transfers between their sender
        and their receiver. Rows are the computes, then the transfers.
        """
        follows, transfer = np.flatnonzero(np.diff(self.stage) == 0), len(self.kind) + np.arange(len(self.received))
        before = np.concatenate([follows, self.needs[self.received], transfer])
        return before, np.concatenate([follows + 1, transfer, self.received])

    @cached_property
    def graph(self) -> CompiledGraph:
        """The computes, then the transfers, ready to be replayed. Raises GraphError if the order cannot run."""
        transfer = len(self.kind) + np.arange(len(self.received))
        # A link carries one transfer after the other, in the order of its sender's computes.
        kind, sender = self.kind[self.received], self.needs[self.received]
        queue = np.lexsort((sender, self.stage[sender], kind))
        behind = np.flatnonzero((np.diff(kind[queue]) == 0) & (np.diff(self.stage[sender[queue]]) == 0))
        before, after = self.edges
        before = np.concatenate([before, transfer[queue[behind]]])
        return compiled(before, np.concatenate([after, transfer[queue[behind + 1]]]), len(self.kind) + len(transfer))

    def windows(self, durations: Floats, transfers: Floats | None = None, delays: Floats | None = None) -> Floats:
        """From the first start to the last end of any compute, seconds, [lanes].

        `durations`: [cells, lanes], of which a compute takes row `cell`. `transfers`: [transfers, lanes], or
        [transfers] if lanes agree, none: no time. `delays`: launch delays, [computes, lanes].
        """
        costs = self._costs(durations, transfers, delays)
        return replay_lanes(self.graph, np.arange(durations.shape[1] + 1), costs)

    def timeline(self, durations: Floats, transfers: Floats, delays: Floats) -> Timeline:
        """Times of the computes, then of the transfers, of the same replay."""
        costs, lanes = self._costs(durations, transfers, delays), np.arange(durations.shape[1] + 1)
        parts = [LanesToReplay(self.graph, lanes[:-1].astype(np.int32), lanes, costs)]
        return replay_timelines(parts, 0, meet=False)[0]

    def _costs(self, durations: Floats, transfers: Floats | None, delays: Floats | None) -> Costs:
        count = len(self.received)
        constant, changed, of_transfer = np.zeros(len(self.cell) + count), NO_MATRIX, np.full(count, -1)
        if transfers is not None and transfers.ndim == 1:
            constant[len(self.cell) :] = transfers
        elif transfers is not None:
            changed, of_transfer = transfers, len(durations) + np.arange(count)
        delay_row = np.full(len(constant), -1)
        if delays is not None:
            delay_row[: len(delays)] = np.arange(len(delays))
        return Costs(
            matrix=durations,
            matrix_row=np.concatenate([self.cell, of_transfer]),
            constant=constant,
            delay=NO_MATRIX if delays is None else delays,
            delay_row=delay_row,
            changed=changed,
        )


def compiled(before: Ints, after: Ints, rows: int) -> CompiledGraph:
    """So many computes and transfers with these edges, ready to be replayed. Raises GraphError if they cannot run."""
    wiring = Wiring(
        before=before,
        after=after,
        group=np.arange(rows),
        rendezvous_key=np.full(rows, -1, np.int64),
        synchronises=np.zeros(rows, np.bool_),
        describe=lambda row: f"compute {row} of the pipeline",
    )
    return compile_graphs([wiring], NO_RENDEZVOUS)[0]


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
        return np.asarray(self.end.max(axis=0) - self.start.min(axis=0))

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
        joined = {name: np.concatenate([getattr(self, name), getattr(other, name)], axis=-1) for name in names}
        return RecordedPipeline(self.order, **joined)


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
            merged_order(begin, [np.flatnonzero((template.pp_rank == stage) & (kind == code)) for code in range(3)])
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
        rows, of_kind = real[template.kind[real] == recv.code], order.kind[order.received] == kind
        stage, virtual = order.stage[order.received[of_kind]], order.virtual[order.received[of_kind]]
        if not np.array_equal(template.pp_rank[rows], stage):
            return None
        if order.v_shaped:
            rows = in_order_of_computes(rows, virtual_of[np.maximum(template.chunk[rows], 0), stage], virtual)
        received[of_kind] = rows
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
