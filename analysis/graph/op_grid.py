"""Ops of some kinds as a grid [slots, ops, steps, dp_ranks], and back; forwards and backwards as a table.

In: a `DependencyGraph`. Out: `OpGrid`s and a `ComputeTable`, which map ops to the cost matrices, so that costs can be
read and changed by place. A slot is a stage, or a link between stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import product

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.compiled import GridPart
from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph, Template
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.trace.model import KINDS, OpKind

COMPUTE_KINDS = (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE)


class _Place(Struct, frozen=True, eq=False):
    """Rows of one slot in one block, and where its lanes are among all steps x dp_ranks; all in order for a slice.

    `rows`: [ops], or [ops, lanes] if lanes differ; then `present`, [ops, lanes], is true where a lane has that op.
    """

    block: int
    slot: int
    rows: Ints
    lanes: Ints | slice
    present: Bools | None = None


class OpGrid(Struct, frozen=True, eq=False):
    """Places of the ops of a grid [slots, ops, steps, dp_ranks] in the blocks. Cells without an op are nan."""

    shape: tuple[int, int, int, int]
    places: tuple[_Place, ...]

    @property
    def empty(self) -> bool:
        """True if the job has none of the ops."""
        return not self.places

    def gather(self, matrices: Sequence[Floats]) -> Floats:
        """The ops' values in `matrices` (one [rows, lanes] matrix per block)."""
        whole = len(self.places) == self.shape[0] and all(
            isinstance(place.lanes, slice) and len(place.rows) == self.shape[1] for place in self.places
        )
        grid = np.empty(self.shape) if whole else np.full(self.shape, np.nan)

        def run(place: _Place) -> None:
            cells, matrix = self._cells(grid, place), matrices[place.block]
            if place.present is not None:
                cells[:, place.lanes] = np.where(place.present, np.take_along_axis(matrix, place.rows, axis=0), np.nan)
            elif isinstance(place.lanes, slice):
                np.take(matrix, place.rows, axis=0, out=cells, mode="clip")  # any other mode makes a copy first
            else:
                cells[:, place.lanes] = matrix[place.rows]

        parallel.each(run, self.places, numbers=grid.size)
        return grid

    def ends(self, blocks: Sequence[Block]) -> Floats:
        """Ends of the ops as recorded, seconds after the step began."""
        return self.gather([block.start for block in blocks]) + self.gather([block.duration for block in blocks])

    def only(self, slot: int) -> OpGrid:
        """The grid of one slot, [1, ops, steps, dp_ranks]."""
        of_slot = (replace(place, slot=0) for place in self.places if place.slot == slot)
        return OpGrid((1, *self.shape[1:]), tuple(of_slot))

    def parts(self, values: Floats) -> Iterator[GridPart]:
        """`values`, which broadcast to the grid's shape, as parts of the blocks."""
        full = np.broadcast_to(values, self.shape)
        for place in self.places:
            of_place = self._cells(full, place)[:, place.lanes]
            yield GridPart(
                place.block, place.rows, of_place if place.present is None else np.where(place.present, of_place, 1.0)
            )

    def _cells(self, grid: Floats, place: _Place) -> Floats:
        """The cells of a place's ops in all steps and DP ranks, [ops, steps x dp_ranks]."""
        cells: Floats = grid[place.slot, : len(place.rows)].reshape(len(place.rows), -1)
        return cells


class TransferGrid(Struct, frozen=True, eq=False):
    """Transfers between stages: slot 2 x link + direction; link s joins stages s and s + 1 (the last wraps to 0).

    Direction 0 is from s to s + 1: forwards and, in a V-shaped pipeline, the backwards of odd chunks.
    """

    sends: OpGrid
    recvs: OpGrid

    @property
    def empty(self) -> bool:
        """True if the job has no transfers between stages."""
        return self.sends.empty

    def gather(self, costs: Sequence[Floats]) -> Floats:
        """Seconds per transfer: the shorter time of its two sides, so that no clock can lengthen it."""
        seconds = self.sends.gather(costs)
        return np.fmin(seconds, self.recvs.gather(costs), out=seconds)

    def parts(self, values: Floats) -> Iterator[GridPart]:
        """`values`, which broadcast to the grid's shape, for both sides of each transfer."""
        yield from self.sends.parts(values)
        yield from self.recvs.parts(values)


def op_grid(graph: DependencyGraph, kinds: Collection[OpKind], *, most: int | None = None) -> OpGrid:
    """Ops of `kinds` by stage, in row order; at most the first `most` of each stage."""
    wanted = np.zeros(len(KINDS), np.bool_)
    wanted[[kind.code for kind in kinds]] = True
    places = []
    for number, block in enumerate(graph.blocks):
        rows = np.flatnonzero(wanted[block.template.kind])
        stage_of = block.template.pp_rank[rows]
        for stage in np.unique(stage_of).tolist():
            places.append(_place(graph, number, stage, rows[stage_of == stage], most))
    return _grid(graph, places, graph.layout.pp)


def transfer_grid(graph: DependencyGraph, *, most: int | None = None) -> TransferGrid:
    """Sends with their recvs, at most the first `most` of each link and direction."""
    sends, recvs = [], []
    stages = graph.layout.pp
    for number, block in enumerate(graph.blocks):
        for slot, send, recv in _pairs(block, stages):
            sends.append(_place(graph, number, slot, send, most))
            recvs.append(_place(graph, number, slot, recv, most))
    return TransferGrid(_grid(graph, sends, 2 * stages), _grid(graph, recvs, 2 * stages))


def _pairs(block: Block, stages: int) -> Iterator[tuple[int, Ints, Ints]]:
    """(slot, rows of sends, rows of their recvs) of each slot in use."""
    template = block.template
    send, recv = paired_rows(template)
    sender, receiver = template.pp_rank[send].astype(np.int64), template.pp_rank[recv]
    # Between two stages, both directions lead to the next stage.
    onwards = template.kind[send] == OpKind.FORWARD_SEND.code if stages == 2 else (sender + 1) % stages == receiver
    slots = 2 * np.where(onwards, sender, receiver) + ~onwards
    for slot in range(2 * stages):
        of_slot = slots == slot
        if of_slot.any():
            yield slot, send[of_slot], recv[of_slot]


def paired_rows(template: Template) -> tuple[Ints, Ints]:
    """Rows of sends and of their recvs, [pairs] each, ordered by the send's row."""
    sizes = np.diff(template.first_of_group)
    first = template.first_of_group[:-1][sizes == 2]
    earlier, later = template.order[first], template.order[first + 1]
    sends = [OpKind.FORWARD_SEND.code, OpKind.BACKWARD_SEND.code]
    swapped = np.isin(template.kind[later], sends)
    send, recv = np.where(swapped, later, earlier), np.where(swapped, earlier, later)
    real = np.isin(template.kind[send], sends)
    order = np.argsort(send[real], kind="stable")
    return send[real][order], recv[real][order]


def _place(graph: DependencyGraph, number: int, slot: int, rows: Ints, most: int | None) -> _Place:
    """The place of at most the first `most` of the rows; counted per lane if some ops are absent."""
    block = graph.blocks[number]
    lanes = graph.places_of_lanes[number]
    if block.present is None or block.present[rows].all():
        return _Place(number, slot, rows[:most], lanes)
    present = block.present[rows]
    first = np.argsort(~present, axis=0, kind="stable")[: int(present.sum(axis=0).max())][:most]
    return _Place(number, slot, rows[first], lanes, np.take_along_axis(present, first, axis=0))


def _grid(graph: DependencyGraph, places: list[_Place], slots: int) -> OpGrid:
    ops = max((len(place.rows) for place in places), default=0)
    return OpGrid((slots, ops, len(graph.steps), len(graph.dp_ranks)), tuple(places))


class ComputeRows(Struct, frozen=True, eq=False):
    """`rows` of a block in order of (chunk, microbatch), [computes x parts, 1], or [.., lanes] if lanes differ.

    A compute that waited for a collective in its middle is recorded in parts that share their microbatch. Here it is
    one compute again, because the cause of a long one (its sequences, its worker) affects all its parts.
    """

    rows: Ints
    parts: int

    def __len__(self) -> int:
        return len(self.rows) // self.parts

    def seconds(self, cost: Floats) -> Floats:
        """Duration of each compute, seconds, [computes, lanes]; `cost`: costs of the block, [rows, lanes]."""
        alike = self.rows.shape[1] == 1
        seconds: Floats = cost[self.rows[:, 0]] if alike else np.take_along_axis(cost, self.rows, axis=0)
        return seconds if self.parts == 1 else seconds.reshape(len(self), self.parts, -1).sum(axis=1)


def compute_rows(block: Block, stage: int, kind: OpKind) -> ComputeRows:
    """The computes of that kind on that stage; in order of seq if microbatches were not recorded."""
    template = block.template
    rows = np.flatnonzero((template.pp_rank == stage) & (template.kind == kind.code))
    microbatch = block.microbatch[rows].astype(np.int64)
    labels = template.chunk[rows].astype(np.int64)[:, None] * (int(microbatch.max(initial=0)) + 2) + microbatch
    order = np.argsort(labels, axis=0, kind="stable")
    ordered: Ints = rows[order]
    return ComputeRows(ordered, _parts(np.take_along_axis(labels, order, axis=0), microbatch))


def _parts(labels: Ints, microbatch: Ints) -> int:
    """The number of parts in which each compute was recorded; 1 if it varies. `labels` in order, [rows, lanes]."""
    if not len(labels) or (microbatch < 0).any():
        return 1
    parts = int((labels[:, 0] == labels[0, 0]).sum())
    if parts == 1 or len(labels) % parts:
        return 1
    by_part = labels.reshape(-1, parts, labels.shape[1])
    one_label = (by_part == by_part[:, :1]).all() and (np.diff(by_part[:, 0], axis=0) > 0).all()
    return parts if one_label else 1


class _Placement(Struct, frozen=True, eq=False):
    """Ops of one kind and stage in one block.

    `step`, `dp_index`: positions of the block's lanes in the grid, [lanes].
    """

    block: int
    kind: int
    stage: int
    computes: ComputeRows
    step: Int32s
    dp_index: Ints


class ComputeTable(Struct, frozen=True, eq=False, dict=True):
    """Costs of computes as a grid [kinds, stages, chunks, microbatches, steps, dp_ranks]; kinds: forward, backward, or
    the only one that the job has.

    Cells that were not recorded are nan. If stages differ in their number of computes, the grid has one chunk, and
    "microbatch" counts the computes of a stage.
    """

    shape: tuple[int, int, int, int, int, int]
    placements: tuple[_Placement, ...]
    costs: tuple[Floats, ...]

    @classmethod
    def of(cls, graph: DependencyGraph, costs: tuple[Floats, ...]) -> ComputeTable:
        """Find every forward and backward of the job. `costs`: seconds, one [rows, lanes] matrix per block."""
        kinds = [kind for kind in COMPUTE_KINDS if any(kind.code in block.template.kind for block in graph.blocks)]
        stages, chunks, placements = graph.layout.pp, graph.layout.vpp, list[_Placement]()
        for number, block in enumerate(graph.blocks):
            for stage, (kind_index, kind) in product(range(stages), enumerate(kinds)):
                if len(computes := compute_rows(block, stage, kind)):
                    lanes = block.step, graph.dp_index(block)
                    placements.append(_Placement(number, kind_index, stage, computes, *lanes))
        cells = {len(part.computes) for part in placements}
        regular = len(cells) == 1 and not next(iter(cells)) % chunks
        split = (chunks, next(iter(cells)) // chunks) if regular else (1, max(cells, default=0))
        shape = (len(kinds), stages, *split, len(graph.steps), len(graph.dp_ranks))
        return cls(shape, tuple(placements), costs)

    @cached_property
    def grid(self) -> Floats:
        """Own costs, seconds, read-only."""
        return self.gather(self.costs)

    @property
    def empty(self) -> bool:
        """True if the job has neither forward nor backward computes."""
        return not self.placements

    def gather(self, costs: Sequence[Floats]) -> Floats:
        """`costs` (one [rows, lanes] matrix per block) as a grid."""
        kinds, stages, chunks, microbatches, steps, dp_ranks = self.shape
        grid = np.full((kinds, stages, chunks * microbatches, steps, dp_ranks), np.nan)
        for part in self.placements:
            seconds = part.computes.seconds(costs[part.block])
            grid[part.kind, part.stage, : len(part.computes), part.step, part.dp_index] = seconds.T
        return grid.reshape(self.shape)

    def parts(self, values: Floats) -> Iterator[GridPart]:
        """Factors, which broadcast to the grid's shape, as parts of the blocks; skips factors of 1."""
        _, _, chunks, microbatches, steps, dp_ranks = self.shape
        values = values[(None,) * (len(self.shape) - values.ndim)]
        by_stage = np.broadcast_to(values, (*self.shape[:2], *values.shape[2:]))
        for part in self.placements:
            of_stage = by_stage[part.kind, part.stage]
            if (of_stage == 1).all():
                continue
            # Chunks and microbatches share one axis of rows, steps and DP ranks one of lanes.
            full = np.broadcast_to(of_stage, self.shape[2:]).reshape(chunks * microbatches, steps * dp_ranks)
            computes, lane = part.computes, part.step * dp_ranks + part.dp_index
            factor = full[: len(computes)]
            if not np.array_equal(lane, np.arange(steps * dp_ranks)):
                factor = factor[:, lane]
            if computes.parts > 1:
                factor = np.repeat(factor, computes.parts, axis=0)
            rows = computes.rows[:, 0] if computes.rows.shape[1] == 1 else computes.rows
            yield GridPart(part.block, rows, factor)
