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

from collections.abc import Iterator, Sequence

import numpy as np

from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median_of
from tracekit.analysis.replay.method import Method
from tracekit.trace.model import KINDS, OpKind

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
    known: Sequence[Floats] | None = None,
) -> tuple[Floats, ...]:
    """The ideal cost of each row, seconds, [rows] per block, or [rows, lanes] if some ops of a row are absent.

    `costs`: the cost of each op, seconds, [rows, lanes] per block. `known`: the ideal cost by another method.
    """
    ideal = [np.zeros(block.template.rows) for block in blocks]
    rows_of = {kind: [np.flatnonzero(block.template.kind == kind.code) for block in blocks] for kind in KINDS}
    here = [kind for kind, rows in rows_of.items() if any(len(part) for part in rows)]
    by_total = [kind for kind in here if method is Method.TRACEKIT and kind in OCCASIONAL | OCCASIONAL_BY_STAGE]
    if known is not None and all(one.ndim == 1 for one in known):  # methods differ in occasional kinds only
        here = [kind for kind in here if kind in OCCASIONAL | OCCASIONAL_BY_STAGE]
        ideal = [
            np.where(np.isin(block.template.kind, [kind.code for kind in here]), 0.0, one)
            for block, one in zip(blocks, known, strict=True)
        ]
    usual: dict[OpKind, float] = {}

    def compare(kind: OpKind) -> None:
        usual[kind] = _usual_cost(
            kind,
            [
                matrix[part].ravel() if block.present is None else matrix[part][block.present[part]]
                for block, matrix, part in zip(blocks, costs, rows_of[kind], strict=True)
                if len(part)
            ],
        )

    parallel.each(compare, [kind for kind in here if kind not in by_total], numbers=sum(one.size for one in costs))
    for kind in here:
        for number, part in enumerate(rows_of[kind] if kind in usual else ()):
            _set(blocks, ideal, number, part, usual[kind])
        if kind in by_total:
            groups = [range(stages)] if kind in OCCASIONAL else [range(at, at + 1) for at in range(stages)]
            for group in groups:
                _compare_totals(blocks, costs, kind, group, ideal)
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
        here = np.broadcast_to(cost, (len(rows), block.lanes))
        ideal[number][rows] = here if block.present is None else np.where(block.present[rows], here, 0.0)


def _usual_cost(kind: OpKind, parts: Sequence[Floats]) -> float:
    """Mean (compute) or median (communication) of a kind's own costs, seconds."""
    values = parts[0] if len(parts) == 1 else np.concatenate(parts)
    # Indexing copied the values, so the median may sort them in place.
    return float(np.median(values, overwrite_input=True) if kind.is_communication else values.mean())


def _compare_totals(
    blocks: Sequence[Block], costs: Sequence[Floats], kind: OpKind, stages: range, ideal: list[Floats]
) -> None:
    """Fill `ideal` for `kind` on `stages`: the usual total of a worker and step, distributed over its ops."""
    workers = list(_workers_with(blocks, kind, stages))
    counts = [_ops_of_lanes(blocks[number], rows) for number, rows in workers]
    totals = [costs[number][rows].sum(axis=0)[count > 0] for (number, rows), count in zip(workers, counts, strict=True)]
    present = np.concatenate(totals) if totals else np.empty(0)
    by_step = np.zeros(0)
    if kind in SCHEDULED:
        steps = [blocks[number].step[count > 0] for (number, _), count in zip(workers, counts, strict=True)]
        lanes = np.bincount(np.concatenate([block.step for block in blocks]))
        by_step = _usual_by_step(present, np.concatenate([np.empty(0, np.int64), *steps]), len(stages) * lanes)
    cells = len(stages) * sum(block.lanes for block in blocks)
    usual_s = lower_median_of(present, cells)
    for (number, rows), count in zip(workers, counts, strict=True):
        usual = by_step[blocks[number].step] if kind in SCHEDULED else usual_s
        same = (count == count[0]).all()
        _set(blocks, ideal, number, rows, usual / count[0] if same else usual / np.maximum(count, 1))


def _usual_by_step(present: Floats, step: np.ndarray, cells: np.ndarray) -> Floats:
    """The lower median of each step's workers, seconds, [steps]. `present`: totals that are not zero, with the `step`
    of each; `cells`: the number of workers in each step.
    """
    order = np.lexsort((present, step))
    count = np.bincount(step, minlength=len(cells))
    first = np.cumsum(count) - count
    at = (cells - 1) // 2 - (cells - count)
    usual = np.zeros(len(cells))
    some = at >= 0
    usual[some] = present[order][(first + at)[some]]
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
