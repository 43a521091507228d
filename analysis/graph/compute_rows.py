"""Forwards and backwards of one worker in order of chunk and microbatch.

In: a block of lanes. Out: `ComputeRows`: their rows, and the duration of each compute. A compute that waited for a
collective in its middle is recorded in parts that share their microbatch. Here it is one compute again, because the
cause of a long compute (its sequences, its worker) affects all its parts.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.trace.model import OpKind


class ComputeRows(Struct, frozen=True, eq=False):
    """`rows` of a block in order of (chunk, microbatch), [computes x parts, 1], or [.., lanes] if lanes differ."""

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
    apart = labels.reshape(-1, parts, labels.shape[1])
    one_label = (apart == apart[:, :1]).all() and (np.diff(apart[:, 0], axis=0) > 0).all()
    return parts if one_label else 1
