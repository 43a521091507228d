"""What the GPU of each rank spent its time on.

In: the GPU ops of a recording. Out: a `Breakdown` per rank. Times are lengths of unions of intervals, so ops that run
concurrently count once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Floats
from tracekit.trace.gpu_activity import Activity, KernelClass
from tracekit.trace.gpu_recording import GpuRecording


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One rank, from the start of its first GPU op to the end of its last; seconds.

    `exposed_communication_s`: communication while no compute kernel ran. `memory_s`: copies and fills, overlapped or
    not. `idle_s`: nothing ran.
    """

    rank: int
    span_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    memory_s: float
    idle_s: float


def breakdowns(recording: GpuRecording) -> tuple[Breakdown, ...]:
    """A breakdown for each rank, ascending."""
    ops = recording.gpu_ops.select("rank", "start", "duration", "activity", "kernel_class")
    return tuple(_breakdown(rank, ops.filter(rank=rank)) for rank in recording.ranks)


def _breakdown(rank: int, ops: pl.DataFrame) -> Breakdown:
    kernel = ops["activity"] == str(Activity.KERNEL)
    communicates = kernel & (ops["kernel_class"] == str(KernelClass.COMMUNICATION))
    compute, communication, memory = (
        union(ops.filter(mask)) for mask in (kernel & ~communicates, communicates, ~kernel)
    )
    busy = union(ops)
    span = float(busy[-1, 1] - busy[0, 0]) if len(busy) else 0.0
    overlap = both(compute, communication)
    return Breakdown(
        rank=rank,
        span_s=span,
        compute_s=length(compute),
        communication_s=length(communication),
        exposed_communication_s=length(communication) - overlap,
        memory_s=length(memory),
        idle_s=span - length(busy),
    )


def grid_blocks() -> pl.Expr:
    """The number of blocks of a kernel, from its column `shape` such as "20x1x1/256x1x1"; null if not recorded."""
    grid = pl.col("shape").cast(pl.String).str.extract(r"^(\d[\dx]*)").str.split("x").cast(pl.List(pl.Int64))
    return grid.list.eval(pl.element().product()).list.first()


def union(ops: pl.DataFrame) -> Floats:
    """When any of the ops ran: begin and end of disjoint intervals, ascending, seconds, [intervals, 2]."""
    return _merged(ops.select("start", end=pl.col("start") + pl.col("duration")).to_numpy())


def _merged(intervals: Floats) -> Floats:
    if not len(intervals):
        return np.empty((0, 2))
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.concatenate([[True], ordered[1:, 0] > reached[:-1]])
    ends = np.append(np.flatnonzero(begins)[1:] - 1, len(ordered) - 1)
    return np.column_stack([ordered[begins, 0], reached[ends]])


def both(first: Floats, second: Floats) -> float:
    """How long intervals of two unions run at once, seconds."""
    return length(first) + length(second) - length(_merged(np.concatenate([first, second])))


def length(intervals: Floats) -> float:
    """The sum of disjoint intervals, [intervals, 2]; seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())
