"""The ops of a job, whatever its kind, as the question about other GPUs reads and changes them.

In: a recording of GPUs, an op trace or a pipeline. Out: `Ops`: what each does, on which GPU, and for how long.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.critical_path import CriticalPath
from tracekit.analysis.evidence.graph_subject import GraphSubject, RecordingSubject
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.gpu.behind import parts_of
from tracekit.analysis.gpu.part import Part
from tracekit.analysis.graph.fold import FoldedGraph, FoldedSteps
from tracekit.analysis.hardware.work import Work, Works, kernel_work, works_by_row, works_of
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import Intervention, SetCosts, SetOps
from tracekit.analysis.whatif.selection import masks_of
from tracekit.analysis.whatif.selection_text import checked_selection
from tracekit.trace.gpu_activity import KernelClass, class_of
from tracekit.trace.model import COMMUNICATION, OpKind

#: The label of the replicas of a model.
_REPLICA = "dp_rank"
#: A compute that is not divided into kernels: large jobs train in bf16.
_COMPUTE = Work("compute", "bf16")
_CLASSES = {*KernelClass} - {KernelClass.OTHER}
_KINDS: dict[str, Work] = {
    **dict.fromkeys(OpKind, _COMPUTE),
    **dict.fromkeys(COMMUNICATION, Work("collective")),
    **dict.fromkeys((OpKind.DATA_LOAD, OpKind.GC, OpKind.CHECKPOINT, OpKind.HOST_DELAY), Work("host")),
    OpKind.OPTIMIZER: Work("optimizer", keeps_type=True),
}


class Ops(Struct, frozen=True, eq=False):
    """`cost_s`: own cost, seconds; `gpu`: which GPU runs it, from 0; [ops]. `replica`: of each GPU, [gpus].

    The ops are those of an op graph, or the cells of all blocks of a pipeline.
    """

    replay: GraphReplay
    works: Works
    cost_s: Floats
    gpu: Ints
    replica: Ints

    @classmethod
    def of(cls, job: GraphSubject | PipelineSubject) -> Ops:
        """Return the ops of a job."""
        return _of_graph(job) if isinstance(job, GraphSubject) else _of_pipeline(job)

    def chosen(self, text: str | None) -> Bools:
        """Which ops a selection chooses, [ops]; all without one. Raises SelectionError if it chooses none."""
        if text is None:
            return np.ones(len(self.cost_s), np.bool_)
        graph, durations = self.replay.graph, self.replay.durations
        masks = masks_of(checked_selection(text, graph, durations), graph, durations)
        shaped = [np.broadcast_to(mask, block.start.shape) for mask, block in zip(masks, graph.blocks, strict=True)]
        if isinstance(graph, FoldedGraph):
            return np.asarray(graph.of_ops(cast("list[Floats]", shaped)), np.bool_)
        return np.concatenate([mask.ravel() for mask in shaped])

    def on(self, path: CriticalPath) -> Ints:
        """The ops of a path, [ops on it]."""
        ops, cells = np.empty(len(path.row), np.int64), 0
        for number, block in enumerate(path.graph.blocks):
            inside, lanes = path.block == number, block.start.shape[1]
            row, lane = path.row[inside], path.lane[inside]
            ops[inside] = block.op[row, lane] if isinstance(block, FoldedSteps) else cells + row * lanes + lane
            cells += block.start.size
        return ops

    def at(self, cost_s: Floats) -> Intervention:
        """Return the job with other costs, seconds, [ops]."""
        graph = self.replay.graph
        if isinstance(graph, FoldedGraph):
            return SetOps(cost_s)
        shapes = [block.start.shape for block in graph.blocks]
        bounds = np.cumsum([rows * lanes for rows, lanes in shapes])[:-1]
        parts = zip(np.split(cost_s, bounds), shapes, strict=True)
        return SetCosts(tuple(part.reshape(shape) for part, shape in parts))


def _of_graph(job: GraphSubject) -> Ops:
    ops, cost_s = job.graph.ops, job.replay.cost_of_ops
    mesh = ops.mesh
    axes = list(mesh.axes)
    replica = mesh.coordinates[:, axes.index(_REPLICA)] if _REPLICA in axes else np.arange(len(mesh.ranks))
    gpu = np.searchsorted(mesh.ranks, ops.rank)
    works = works_of(job.ops, cost_s) if isinstance(job, RecordingSubject) else _works_of_op_trace(job, cost_s)
    return Ops(job.replay, works, cost_s, np.asarray(gpu, np.int64), np.asarray(replica, np.int64))


def _works_of_op_trace(job: GraphSubject, cost_s: Floats) -> Works:
    """The work of ops by the parts of a rank's time, their kinds, and the names of kernels."""
    part = np.full(job.ops.height, None, object)
    for name, chosen in parts_of(job.ops).items():
        part[chosen] = str(name)
    table = job.columns("kind", "name").cast(pl.String)
    return works_by_row(table.with_columns(part=pl.Series(part, dtype=pl.String)), _work_of_op, cost_s)


def _work_of_op(row: tuple[str | None, str | None, str | None]) -> Work:
    kind, name, part = row
    if kind in _KINDS:
        return _KINDS[kind]
    if part != Part.COMPUTE:
        return Work("collective" if part == Part.TRANSFERS else "host")
    of_class = kind if kind in _CLASSES else max(class_of(name or ""), class_of(kind or ""), key=_CLASSES.__contains__)
    return kernel_work(of_class, name or kind, None, None) if of_class in _CLASSES else _COMPUTE


def _of_pipeline(job: PipelineSubject) -> Ops:
    replay = job.replay
    graph, work, gpu = replay.graph, [], []
    for number, block in enumerate(graph.blocks):
        kind, stage, replica = (graph.label(number, name).codes for name in ("kind", "stage", _REPLICA))
        worker = replica.astype(np.int64) * graph.layout.pp + stage
        work.append(np.broadcast_to(kind, block.start.shape).ravel())
        gpu.append(np.broadcast_to(worker, block.start.shape).ravel())
    workers, place = np.unique(np.concatenate(gpu), return_inverse=True)
    works = Works(tuple(_KINDS[name] for name in graph.label(0, "kind").names or ()), np.concatenate(work))
    cost_s = np.concatenate([matrix.ravel() for matrix in replay.durations.cost])
    return Ops(replay, works, cost_s, place.astype(np.int64), workers // graph.layout.pp)
