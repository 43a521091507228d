"""The ideal cost of every op: what it would take if no worker and no step were slower than the usual one.

In: the blocks of a graph and the own cost of each op. Out: the ideal cost of each row of each block.

A compute op's ideal is the mean of its kind over all steps, DP ranks and stages; a communication op's is the median
(OSDI'25). That compares ops with ops, so an op that one worker alone has is its own ideal and costs nothing by
definition: a rank that spends half of each step in the garbage collector would read as healthy. What some workers or
steps do and others do not is therefore compared as a total per worker and step, zero where the op is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.method import Method
from tracekit.model import KINDS, OpKind

#: Kinds that a worker need not have in every step. Any worker may: their peers are all workers.
OCCASIONAL = frozenset({OpKind.GC, OpKind.CHECKPOINT, OpKind.HOST_DELAY})
#: The same, but a matter of the stage (the first one loads tokens, the last one labels): peers share the stage.
OCCASIONAL_BY_STAGE = frozenset({OpKind.DATA_LOAD})


def ideal_rows(blocks: Sequence[Block], own: Sequence[Floats], stages: int, method: Method) -> tuple[Floats, ...]:
    """The ideal cost of each row, seconds, [rows] per block. `own`: what each op costs, [rows, lanes] per block."""
    ideal = []
    for block in blocks:
        ideal.append(np.zeros(block.template.rows))
    for kind in KINDS:
        rows = [np.flatnonzero(block.template.kind == kind.code) for block in blocks]
        if not any(len(part) for part in rows):
            continue
        if method is Method.TRACEKIT and kind in OCCASIONAL | OCCASIONAL_BY_STAGE:
            groups = [range(stages)] if kind in OCCASIONAL else [range(at, at + 1) for at in range(stages)]
            for group in groups:
                _compare_totals(blocks, own, kind, group, ideal)
            continue
        cost = _usual_cost(kind, [costs[part].ravel() for costs, part in zip(own, rows, strict=True) if len(part)])
        for part, costs in zip(rows, ideal, strict=True):
            costs[part] = cost
    return tuple(ideal)


def _usual_cost(kind: OpKind, parts: Sequence[Floats]) -> float:
    """Mean (compute) or median (communication) of a kind's own costs, seconds."""
    values = parts[0] if len(parts) == 1 else np.concatenate(parts)
    # Indexing has copied the values, so the median may sort them in place.
    return float(np.median(values, overwrite_input=True) if kind.is_communication else values.mean())


def _compare_totals(
    blocks: Sequence[Block], own: Sequence[Floats], kind: OpKind, stages: range, ideal: Sequence[Floats]
) -> None:
    """Fill `ideal` for `kind` on `stages`: the usual total of a worker and step, shared out over the ops it has."""
    workers = list(_workers_with(blocks, kind, stages))
    totals = [own[number][rows].sum(axis=0) for number, rows in workers]
    cells = len(stages) * sum(block.lanes for block in blocks)
    present = np.concatenate(totals) if totals else np.empty(0)
    # The lower median: where half of the workers do without, that is the usual way.
    absent = cells - len(present)
    at = (cells - 1) // 2 - absent
    usual_s = 0.0 if at < 0 else float(np.partition(present, at)[at])
    for number, rows in workers:
        ideal[number][rows] = usual_s / len(rows)


def _workers_with(blocks: Sequence[Block], kind: OpKind, stages: range) -> Iterator[tuple[int, np.ndarray]]:
    """(block, rows) of each stage of each block that has ops of `kind`."""
    for number, block in enumerate(blocks):
        template = block.template
        for stage in stages:
            rows = np.flatnonzero((template.kind == kind.code) & (template.pp_rank == stage))
            if len(rows):
                yield number, rows
