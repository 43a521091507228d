"""The ideal cost of every op: its duration if no worker and no step were slower than usual.

In: the blocks of a graph and the own cost of each op. Out: the ideal cost of each row of each block, or of each op if
some ops of a row are absent and the others have a cost.

A compute op's ideal is the mean of its kind over all steps, DP ranks and stages; a communication op's is the median
(OSDI'25). That compares ops with ops, so an op that only one worker has would be its own ideal and cost nothing by
definition: a rank that spends half of each step in the garbage collector would look healthy. So ops that only some
workers or steps have are compared as a total per worker and step, which is zero where the op is absent. Ops that the
loop schedules in some steps, a checkpoint or an evaluation, are compared only among the workers of the same step: their
absence from other steps makes no worker slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Floats, Ints, combinations
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.analysis.numeric.robust import lower_median_of
from tracekit.analysis.replay.method import Method
from tracekit.trace.model import KINDS, OpKind

if TYPE_CHECKING:
    from tracekit.analysis.graph.op_graph import FoldedGraph, Mesh

#: Kinds that a worker need not have in every step. Any worker may have them, so their peers are all workers.
OCCASIONAL = frozenset({OpKind.GC, OpKind.CHECKPOINT, OpKind.EVALUATION, OpKind.HOST_DELAY})
#: Of these, the ones that the loop runs every few steps: peers are the workers of the same step.
SCHEDULED = frozenset({OpKind.CHECKPOINT, OpKind.EVALUATION})
#: The same, but depending on the stage (the first one loads tokens, the last one labels): peers share the stage.
OCCASIONAL_BY_STAGE = frozenset({OpKind.DATA_LOAD})


def ideal_rows(
    blocks: Sequence[Block],
    costs: Sequence[Floats],
    stages: int,
    method: Method,
    by_other_method: Sequence[Floats] | None = None,
    whole: Whole = UNDIVIDED,
) -> tuple[Floats, ...]:
    """The ideal cost of each row, seconds, [rows] per block, or [rows, lanes] if some ops of a row are absent.

    `costs`: the cost of each op, seconds, [rows, lanes] per block. `by_other_method`: the ideal cost by another
    method. `whole`: the job of which the blocks may be some steps.
    """
    ideal = [np.zeros(block.template.rows) for block in blocks]
    rows_of = {kind: [np.flatnonzero(block.template.kind == kind.code) for block in blocks] for kind in KINDS}
    present_kinds = [kind for kind, rows in rows_of.items() if any(len(part) for part in rows)]
    by_total = [
        kind for kind in present_kinds if method is Method.TRACEKIT and kind in OCCASIONAL | OCCASIONAL_BY_STAGE
    ]
    if by_other_method is not None and all(
        one.ndim == 1 for one in by_other_method
    ):  # methods differ in occasional kinds only
        present_kinds = [kind for kind in present_kinds if kind in OCCASIONAL | OCCASIONAL_BY_STAGE]
        ideal = [
            np.where(np.isin(block.template.kind, [kind.code for kind in present_kinds]), 0.0, one)
            for block, one in zip(blocks, by_other_method, strict=True)
        ]
    usual: dict[OpKind, float] = {}
    by_op = [kind for kind in present_kinds if kind not in by_total]

    def compare(kind: OpKind) -> None:
        usual[kind] = _usual_cost(kind, [_costs_of(kind, blocks, costs, rows_of[kind])])

    if not whole.divided:  # the costs of all kinds at once would take as much memory as the matrices
        parallel.each(compare, by_op, numbers=sum(one.size for one in costs))
    totals = {
        (kind, group): _Totals.of(blocks, costs, kind, group)
        for kind in by_total
        for group in ([range(stages)] if kind in OCCASIONAL else [range(at, at + 1) for at in range(stages)])
    }

    def contribution() -> _Contribution:
        costs_of_kinds = {kind: _costs_of(kind, blocks, costs, rows_of[kind]) for kind in by_op if whole.divided}
        present = {name: found.present for name, found in totals.items() if name[0] not in SCHEDULED}
        return _Contribution(costs_of_kinds, present, sum(block.lanes for block in blocks))

    agreed, usual_totals = whole.agreed(contribution, _usual_costs)
    usual |= agreed
    for kind in by_op:
        for number, part in enumerate(rows_of[kind]):
            _set(blocks, ideal, number, part, usual[kind])
    for (kind, group), of_group in totals.items():
        by_step = of_group.by_step(blocks, len(group)) if kind in SCHEDULED else None
        for (number, rows), count in zip(of_group.workers, of_group.counts, strict=True):
            cost = usual_totals[kind, group] if by_step is None else by_step[blocks[number].step]
            same = (count == count[0]).all()
            _set(blocks, ideal, number, rows, cost / np.maximum(count[0] if same else count, 1))
    return tuple(ideal)


def _set(blocks: Sequence[Block], ideal: list[Floats], number: int, rows: np.ndarray, cost: float | Floats) -> None:
    """Set the ideal cost of some rows of a block, seconds, one value or [lanes]; absent ops keep 0."""
    block = blocks[number]
    partial = block.present is not None and not block.present[rows].all()
    if ideal[number].ndim == 1 and not partial and np.ndim(cost) == 0:
        ideal[number][rows] = cost
    elif np.any(cost):
        if ideal[number].ndim == 1:
            ideal[number] = np.repeat(ideal[number][:, None], block.lanes, axis=1)
        wide = np.broadcast_to(cost, (len(rows), block.lanes))
        ideal[number][rows] = wide if block.present is None else np.where(block.present[rows], wide, 0.0)


#: A kind of op and the stages whose workers are peers.
_Group = tuple[OpKind, range]
#: Of the ops of a kind: the cost of each transfer, or the sums over each lane, seconds, and how many there are.
_Costs = tuple[Sequence[Floats], int]


class _Contribution(Struct, frozen=True, eq=False):
    """What some steps contribute to the ideals of a job. `present`: `_Totals.present`. `lanes`: how many there are."""

    costs: Mapping[OpKind, _Costs]
    present: Mapping[_Group, Floats]
    lanes: int


def _usual_costs(parts: Sequence[_Contribution]) -> tuple[dict[OpKind, float], dict[_Group, float]]:
    """The usual cost of each kind, and the usual total of a worker and step, seconds."""
    lanes = sum(part.lanes for part in parts)
    usual = {kind: _usual_cost(kind, some) for kind, some in by_name([part.costs for part in parts]).items()}
    totals = {
        (kind, group): lower_median_of(np.concatenate(present), len(group) * lanes)
        for (kind, group), present in by_name([part.present for part in parts]).items()
    }
    return usual, totals


def _costs_of(kind: OpKind, blocks: Sequence[Block], costs: Sequence[Floats], rows: Sequence[Ints]) -> _Costs:
    parts, ops = [], 0
    for block, matrix, part in zip(blocks, costs, rows, strict=True):
        if len(part):
            cost, present = matrix[part], None if block.present is None else block.present[part]
            ops += cost.size if present is None else int(present.sum())
            if not kind.is_communication:
                cost = sum_of_rows(cost)
            elif present is not None:
                cost = cost[present]
            parts.append(cost.ravel())
    return parts, ops


def _usual_cost(kind: OpKind, parts: Sequence[_Costs]) -> float:
    """Mean (compute) or median (communication) of a kind's own costs, seconds."""
    arrays = [one for some, _ in parts for one in some]
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if kind.is_communication:  # indexing copied the values, so the median may sort them in place
        return float(np.median(values, overwrite_input=True))
    return math.fsum(values) / sum(ops for _, ops in parts)  # exact, so that it does not depend on the batches


def sum_of_rows(matrix: Floats) -> Floats:
    """The sum of each column, [columns]; one row after the other, however many columns there are."""
    return np.asarray(np.cumsum(matrix, axis=0)[-1] if matrix.shape[1] == 1 and len(matrix) else matrix.sum(axis=0))


class _Totals(Struct, frozen=True, eq=False):
    """The total cost of a kind on each worker and step. `workers`: (block, rows) of each stage of each block that has
    such ops; `counts`: the number of these that each lane has, [lanes] per worker. `present`: totals of workers and
    steps that have some, seconds, of all `workers` one after the other.
    """

    workers: Sequence[tuple[int, Ints]]
    counts: Sequence[Ints]
    present: Floats

    @classmethod
    def of(cls, blocks: Sequence[Block], costs: Sequence[Floats], kind: OpKind, stages: range) -> _Totals:
        workers = list(_workers_with(blocks, kind, stages))
        counts = [_ops_of_lanes(blocks[number], rows) for number, rows in workers]
        parts = zip(workers, counts, strict=True)
        totals = [sum_of_rows(costs[number][rows])[count > 0] for (number, rows), count in parts]
        return cls(workers, counts, np.concatenate(totals) if totals else np.empty(0))

    def by_step(self, blocks: Sequence[Block], stages: int) -> Floats:
        """The usual total of a worker in each step, seconds, [steps]."""
        parts = zip(self.workers, self.counts, strict=True)
        steps = [blocks[number].step[count > 0] for (number, _), count in parts]
        lanes = np.bincount(np.concatenate([block.step for block in blocks]))
        return _usual_by_step(self.present, np.concatenate([np.empty(0, np.int64), *steps]), stages * lanes)


def _usual_by_step(present: Floats, step: np.ndarray, cells: np.ndarray) -> Floats:
    """The lower median of each step's workers, seconds, [steps]. `present`: totals that are not zero, with the `step`
    of each; `cells`: the number of workers in each step.
    """
    order = np.lexsort((present, step))
    count = np.bincount(step, minlength=len(cells))
    first = np.cumsum(count) - count
    place = (cells - 1) // 2 - (cells - count)
    usual = np.zeros(len(cells))
    nonzero = place >= 0
    usual[nonzero] = present[order][(first + place)[nonzero]]
    return usual


def _ops_of_lanes(block: Block, rows: np.ndarray) -> np.ndarray:
    """Number of the rows that each lane has, [lanes]."""
    if block.present is None:
        return np.full(block.lanes, len(rows))
    count: np.ndarray = block.present[rows].sum(axis=0)
    return count


def _workers_with(blocks: Sequence[Block], kind: OpKind, stages: range) -> Iterator[tuple[int, np.ndarray]]:
    """(block, rows) of each stage of each block that has ops of `kind`."""
    for number, block in enumerate(blocks):
        template = block.template
        for stage in stages:
            rows = np.flatnonzero((template.kind == kind.code) & (template.pp_rank == stage))
            if len(rows):
                yield number, rows


def ideals_of_peers(graph: FoldedGraph, costs: Sequence[Floats]) -> tuple[Floats, ...]:
    """The ideal cost of each row, seconds, [rows] per block, or [rows, lanes] if that of some ops is their own cost.

    `costs`: cost of each op, seconds, [rows, lanes] per block.
    """
    ops = graph.ops
    cost = graph.of_ops(costs)
    ranks, steps = ops.mesh.ranks, len(graph.steps)
    # A cell is all ops of a class on one rank in one step.
    cells, cell = combinations([ops.peer, ops.rank, ops.step])
    ops_in_cell = np.bincount(cell)
    total = np.bincount(cell, weights=cost).astype(np.float64)
    peer_of_cell, rank_of_cell = cells[:, 0], np.searchsorted(ranks, cells[:, 1])
    ideal = _usual_of_ops(ops.peer, ops.rendezvous >= 0, cost, len(ops.peer_names))[ops.peer]
    bounds = np.searchsorted(peer_of_cell, np.arange(len(ops.peer_names) + 1))
    usual_total = np.full(len(cells), np.nan)
    for peer in range(len(ops.peer_names)):
        of_peer = slice(bounds[peer], bounds[peer + 1])
        holders = np.unique(rank_of_cell[of_peer])
        expected = len(holders) if fill_an_axis(ops.mesh, holders) else len(ranks)
        present = bounds[peer + 1] - bounds[peer]
        if present == expected * steps and (ops_in_cell[of_peer] == ops_in_cell[bounds[peer]]).all():
            continue
        usual_total[of_peer] = lower_median_of(total[of_peer], expected * steps)
    occasional = ~np.isnan(usual_total[cell])
    ideal[occasional] = (usual_total / ops_in_cell)[cell[occasional]]
    if ops.comparable is not None:
        ideal[~ops.comparable] = cost[~ops.comparable]
        return tuple(ideal[block.op] for block in graph.blocks)
    return tuple(ideal[block.op[:, 0]] for block in graph.blocks)


def _usual_of_ops(peer: npt.NDArray[np.int32], transfers: npt.NDArray[np.bool_], cost: Floats, classes: int) -> Floats:
    """Mean, or median if the ops of the class are transfers, seconds, [classes]."""
    counts = np.bincount(peer, minlength=classes)
    usual: Floats = np.bincount(peer, weights=cost, minlength=classes) / np.maximum(counts, 1)
    synchronises = np.bincount(peer[transfers], minlength=classes) > 0
    transferred = np.flatnonzero(synchronises[peer])
    order, count = transferred[np.lexsort((cost[transferred], peer[transferred]))], counts[synchronises]
    first = np.cumsum(count) - count
    low, high = cost[order[first + (count - 1) // 2]], cost[order[first + count // 2]]
    usual[synchronises] = (low + high) / 2
    return usual


def fill_an_axis(mesh: Mesh, holders: Ints) -> bool:
    """True if, along some axis, all ranks next to a holder are holders too. `holders`: indices into `mesh.ranks`."""
    if len(holders) == len(mesh.ranks):
        return True
    for axis, size in enumerate(mesh.axes.values()):
        if size == 1:
            continue
        line = np.zeros(len(mesh.ranks), np.int64)
        for other, width in enumerate(mesh.axes.values()):
            if other != axis:
                line = line * width + mesh.coordinates[:, other]
        if np.isin(line, line[holders]).sum() == len(holders):
            return True
    return False
