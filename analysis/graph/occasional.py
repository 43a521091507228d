"""Lanes that differ only in ops that some of them lack share one structure.

In: lanes placed without these ops, and the ops. Out: the same lanes with a row for every place between two computes at
which some lane has such an op, and a mask of the ops that each lane has. An absent op takes no time: the op after it
waits for the op before it. So a garbage collection at a random place does not need a structure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.megatron import (
    COMPUTE_STREAM,
    HOST_WORK,
    first_after_tail,
    merged_order,
    ops_ended,
    stage_rows,
    step_tail,
    with_late_work,
)
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import by_name
from tracekit.trace.model import DP_COLLECTIVES, KINDS, OpKind

if TYPE_CHECKING:
    from tracekit.analysis.graph.lanes import PlacedLanes, StructureHash

#: Lanes share a structure as long as it has at most this many times as many cells as they have ops.
MOST_CELLS_PER_OP = 3
_PLACE_IN_STREAM = np.array([COMPUTE_STREAM.index(kind) if kind in COMPUTE_STREAM else -1 for kind in KINDS])
_MEETS = np.array([kind in DP_COLLECTIVES for kind in KINDS])
_KIND_OF_PLACE = np.array([kind.code for kind in COMPUTE_STREAM])


class OccasionalOps(Struct, frozen=True, eq=False):
    """Ops of some placed lanes, [ops] each. `lane`: index among those lanes; `chunk`, `microbatch`: -1 for none."""

    lane: Ints
    stage: Ints
    kind: npt.NDArray[np.uint8]
    seq: Int32s
    start: Floats
    duration: Floats
    chunk: Int32s
    microbatch: Int32s


class Cells(Struct, frozen=True, eq=False):
    """Places between computes where some lane of a structure has an op, in order of stage and stream.

    `names`: stage, number of computes before it, of ops at the end of the step before it, section, layer, place of its
    kind in `COMPUTE_STREAM`, and chunk + 1, [cells, 7]. `cell_of_op`: [ops].
    """

    names: Ints
    cell_of_op: Ints

    @classmethod
    def of(cls, placed: PlacedLanes, ops: OccasionalOps) -> Cells:
        """Ops between the same two computes share a cell if they are of one kind and chunk.

        If a lane has several ops there, they take cells from first to last: cells of one layer as long as kinds come in
        the order of `COMPUTE_STREAM`, otherwise of the next layer. A collective in which the lanes meet is a section of
        its own, so that they share its cell, whatever else some of them have before it.
        """
        if not len(ops.lane):
            return cls(np.empty((0, 7), np.int64), np.empty(0, np.int64))
        begin = _latest_so_far(ops)
        gap, tail = _computes_before(placed, ops, begin), _tail_before(placed, ops, begin)
        place = _PLACE_IN_STREAM[ops.kind]
        order = np.lexsort((ops.seq, place, begin, gap, ops.stage, ops.lane))
        worker, code = ops.lane * (int(ops.stage.max()) + 1) + ops.stage, place * (int(ops.chunk.max()) + 2) + ops.chunk
        fresh = np.any(np.diff([worker[order], gap[order], tail[order]], prepend=-1), axis=0)
        meets = _MEETS[ops.kind[order]]
        section, layer = np.empty((2, len(order)), np.int64)
        section[order] = 2 * _count_since(fresh, meets) - meets
        fresh |= np.diff(section[order], prepend=-1) != 0
        layer[order] = _count_since(fresh, ~fresh & (np.diff(code[order], prepend=0) <= 0))
        columns = ops.stage, gap, tail, section, layer, place, ops.chunk + 1
        sizes = [int(column.max()) + 1 for column in columns]
        names, cell_of_op = np.unique(np.ravel_multi_index(columns, sizes), return_inverse=True)
        return cls(np.stack(np.unravel_index(names, sizes), axis=1), cell_of_op)

    def among(self, names: Ints) -> Cells:
        """The same ops in the cells `names`, which are all cells of the structure."""
        _, place = np.unique(np.concatenate([names, self.names]), axis=0, return_inverse=True)
        return replace(self, names=names, cell_of_op=place[len(names) :][self.cell_of_op])


def merged_names(
    parts: Sequence[Mapping[StructureHash, tuple[Ints, int, tuple[int, int]]]],
) -> tuple[dict[StructureHash, Ints], bool]:
    """`Cells.names` of each structure of a job, and whether the lanes of each have enough in common.

    In: those of its batches of steps, the number of ops in these cells, and of rows and lanes without them.
    """
    merged, fit = {}, True
    for key, of_batches in by_name(parts).items():
        names, ops, shapes = zip(*of_batches, strict=True)
        merged[key] = np.unique(np.concatenate(names), axis=0)
        rows, lanes = shapes[0][0], sum(shape[1] for shape in shapes)
        fit &= (rows + len(merged[key])) * lanes <= MOST_CELLS_PER_OP * (rows * lanes + sum(ops))
    return merged, fit


def with_occasional(placed: PlacedLanes, ops: OccasionalOps, cells: Cells) -> PlacedLanes:
    """The lanes, all of one structure, with the ops added in these cells."""
    if not len(cells.names):
        return placed
    stage_of_cell, gap, tail_of_cell, _, _, place, chunk = cells.names.T
    kind_of_cell = _KIND_OF_PLACE[place]
    counts = placed.by_stage.copy()
    np.add.at(counts, (stage_of_cell, kind_of_cell), 1)
    rows, lanes = int(counts.sum()), len(placed.step)
    is_cell = np.isin(np.repeat(np.arange(counts.size), counts.ravel()), stage_of_cell * len(KINDS) + kind_of_cell)
    common, cell_row = np.flatnonzero(~is_cell), np.empty(len(place), np.int64)
    in_order = np.lexsort((kind_of_cell, stage_of_cell))  # stable: keeps the order within a kind
    cell_row[in_order] = np.flatnonzero(is_cell)
    op_row = cell_row[cells.cell_of_op]
    present = np.ones((rows, lanes), np.bool_)
    present[cell_row] = False
    present[op_row, ops.lane] = True

    def times(old: Floats, values: Floats) -> Floats:
        new = np.empty((rows, lanes))
        new[common], new[cell_row] = old, 0.0
        new[op_row, ops.lane] = values
        return new

    def labels(old: Int32s, values: Int32s, usual: Ints | int = -1) -> Int32s:
        """[rows, 1] if all lanes with the op agree. `usual`: of cells without an op in these lanes."""
        of_cells = np.full(len(cell_row), usual, np.int32)
        of_cells[cells.cell_of_op] = values
        varies = old.shape[1] > 1 or bool((of_cells[cells.cell_of_op] != values).any())
        new = np.empty((rows, lanes if varies else 1), np.int32)
        new[common], new[cell_row] = old, of_cells[:, None]
        if varies:
            new[op_row, ops.lane] = values
        return new

    stream_order = np.empty(rows)
    stream_order[common] = _order_of_placed(placed)
    stream_order[cell_row] = 2 * gap + (np.arange(len(gap)) + 1) / (len(gap) + 1)
    after_tail = np.empty(rows, np.int64)
    after_tail[common], after_tail[cell_row] = first_after_tail(placed), tail_of_cell
    start, duration = times(placed.start, ops.start), times(placed.duration, ops.duration)
    if not present.all():
        of_stage = np.repeat(np.arange(counts.size) // len(KINDS), counts.ravel())
        for ranges in _streams(counts):
            stream = np.concatenate(ranges)
            chain, stage = stream[np.argsort(stream_order[stream])], int(of_stage[stream[0]])
            is_late = after_tail[chain] > 0
            tail = step_tail(partial(stage_rows, counts, stage), start[:, 0])
            chain = np.concatenate([chain[~is_late], with_late_work(tail, chain[is_late], after_tail)])
            _fill_absent(chain, np.flatnonzero(of_stage == stage), start, duration, present)
    return replace(
        placed,
        counts=counts.ravel(),
        start=start,
        duration=duration,
        chunk=labels(placed.chunk, ops.chunk, chunk - 1),
        microbatch=labels(placed.microbatch, ops.microbatch),
        seq=labels(placed.seq, ops.seq),
        posted=None if placed.posted is None else times(placed.posted, np.full(len(ops.lane), np.nan)),
        resumed=None if placed.resumed is None else times(placed.resumed, np.full(len(ops.lane), np.nan)),
        present=None if present.all() else present,
        stream_order=stream_order,
        after_tail=after_tail,
    )


def _count_since(fresh: Bools, counted: Bools) -> Ints:
    """The number of `counted` places so far, each included, since the last `fresh` one, [places]; the first is."""
    count = np.cumsum(counted)
    return count - np.maximum.accumulate(np.where(fresh, count - counted, 0))


def _latest_so_far(ops: OccasionalOps) -> Floats:
    """Begin of each op, or a later start of an earlier op of its kind, worker and step, seconds, [ops]."""
    order = np.lexsort((ops.seq, ops.kind, ops.stage, ops.lane))
    run = np.ravel_multi_index(
        (ops.lane, ops.stage, ops.kind), (int(ops.lane.max()) + 1, int(ops.stage.max()) + 1, 256)
    )
    number = np.cumsum(np.diff(run[order], prepend=-1) != 0)
    starts, rank = np.unique(ops.start[order], return_inverse=True)
    latest = np.maximum.accumulate(number * len(starts) + rank) - number * len(starts)
    begin = np.empty(len(order))
    begin[order] = starts[latest]
    return begin


def _computes_before(placed: PlacedLanes, ops: OccasionalOps, begin: Floats) -> Ints:
    """The number of placed ops of its compute stream before each op, in the order of `merged_order`, [ops]."""
    before = np.zeros(len(ops.lane), np.int64)
    for stage, kind, rows in _stream_rows(placed.by_stage):
        of_stage = np.flatnonzero(ops.stage == stage)
        starts = np.maximum.accumulate(placed.start[rows], axis=0)
        lane, time = ops.lane[of_stage], begin[of_stage]
        ties_first = COMPUTE_STREAM.index(kind) < _PLACE_IN_STREAM[ops.kind[of_stage]]
        low, high = np.zeros(len(of_stage), np.int64), np.full(len(of_stage), len(starts))
        while (low < high).any():
            middle = np.minimum((low + high) // 2, len(starts) - 1)
            value = starts[middle, lane]
            earlier = (low < high) & ((value < time) | (ties_first & (value == time)))
            high = np.where(earlier | (low >= high), high, middle)
            low = np.where(earlier, middle + 1, low)
        before[of_stage] += low
    return before


def _tail_before(placed: PlacedLanes, ops: OccasionalOps, begin: Floats) -> Ints:
    """The number of ops at the end of its step that each op follows, [ops]."""
    before = np.zeros(len(ops.lane), np.int64)
    works = np.isin(ops.kind, [kind.code for kind in HOST_WORK])
    for stage in np.unique(ops.stage[works]).tolist():
        of_stage = np.flatnonzero(works & (ops.stage == stage))
        before[of_stage] = ops_ended(placed, stage, begin[of_stage], ops.lane[of_stage])
    return before


def _order_of_placed(placed: PlacedLanes) -> Floats:
    """`PlacedLanes.stream_order` of lanes without occasional ops, with room between two computes."""
    start = placed.start[:, 0]
    order = start.copy()
    for ranges in _streams(placed.by_stage):
        stream = merged_order(start, ranges)
        order[stream] = 2 * np.arange(len(stream)) + 1
    return order


def _stream_rows(by_stage: Int32s) -> Iterator[tuple[int, OpKind, Ints]]:
    """(stage, kind, rows) of the kinds of each compute stream, in the order of `COMPUTE_STREAM`."""
    end = np.cumsum(by_stage.ravel()).reshape(by_stage.shape)
    for stage in range(len(by_stage)):
        for kind in COMPUTE_STREAM:
            if by_stage[stage, kind.code]:
                yield stage, kind, np.arange(end[stage, kind.code] - by_stage[stage, kind.code], end[stage, kind.code])


def _streams(by_stage: Int32s) -> list[list[Ints]]:
    """The rows of each kind of each compute stream."""
    streams: dict[int, list[Ints]] = {}
    for stage, _, rows in _stream_rows(by_stage):
        streams.setdefault(stage, []).append(rows)
    return list(streams.values())


def _fill_absent(chain: Ints, stage: Ints, start: Floats, duration: Floats, present: Bools) -> None:
    """Absent ops of a stage (`chain`, its rows in order) take no time and begin when the op before them ends.

    Absent ops at the beginning begin with the first op of `stage` (its rows): no op waits for them.
    """
    following = np.zeros(present.shape[1], np.bool_)
    for place, row in enumerate(chain):
        absent = ~present[row]
        after, leading = absent & following, np.flatnonzero(absent & ~following)
        start[row, after] = start[chain[place - 1], after] + duration[chain[place - 1], after]
        if len(leading):
            cells = np.ix_(stage, leading)
            start[row, leading] = np.where(present[cells], start[cells], np.inf).min(axis=0)
        following |= ~absent
