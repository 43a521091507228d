"""What a job takes on other GPUs: its kernels scaled, and its graph replayed with them.

In: a recording of GPUs, an op trace or a pipeline, and a `HardwareQuestion`. Out: `OnGpu`s. Hosts, launches and
transfers stay as they are, so a GPU that is faster than the host shows the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from math import hypot
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, structs

from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.evidence.gpu_losses import arrives_s, host_time
from tracekit.analysis.evidence.graph_subject import (
    GraphSubject,
    RecordingSubject,
    marked_steps,
    profiled_steps_s,
    unprofiled_after,
)
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.gpu.pace import Part, parts_of
from tracekit.analysis.hardware.passport import HardwareQuestion, OtherGpu, Passport, known_passport
from tracekit.analysis.hardware.scaling import (
    PRODUCTS,
    UNCHANGED,
    WIDE_90,
    Scaled,
    Scaling,
    Tier,
    Work,
    Works,
    kernel_work,
    works_by_row,
    works_of,
)
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.interventions import Intervention, QueuedAhead, SetCosts, SetOps
from tracekit.analysis.whatif.selection import masks_of
from tracekit.analysis.whatif.selection_text import checked_selection
from tracekit.base.errors import SelectionError
from tracekit.base.text import listed, short
from tracekit.report.hardware import Balanced, Limit, MemoryOfGpu, OnGpu, OtherStep, OtherStepTime, ScaledKind
from tracekit.trace.gpu_activity import KernelClass, class_of
from tracekit.trace.model import COMMUNICATION, OpKind

_BYTES_PER_GB = 1e9
#: What a step waits for during work of a kind; for other kinds, compute.
_LIMITS: dict[str, Limit] = {"host": "host", "host copy": "host", "collective": "communication"}
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


def on_other_gpus(job: Subject, question: HardwareQuestion) -> list[OnGpu]:
    """Answer for each GPU. Raises SelectionError if the GPU of the trace or the precision is not known."""
    source, warnings = _source(job, question.source)
    gpus = question.gpus or (OtherGpu(source),)
    for gpu in gpus:
        Scaling(source, gpu.passport, question.precision).check()
    of_kind, ops_of = _OF_KIND[type(job)]
    hardware = of_kind(job, ops_of(job))
    recorded = max(hardware.types, key=lambda dtype: hardware.types[dtype], default=None)
    if question.precision is not None and recorded is None and hardware.types:
        raise SelectionError("--precision: the trace does not say in which type it computes; record_shapes=True does")
    other = None if question.precision == recorded else question.precision
    answers = [
        hardware.answer(
            gpu,
            Scaling(source, gpu.passport, other, recorded),
            question.precision,
            [*warnings, *(words for words in gpu.passport.warnings if words not in warnings)],
        )
        for gpu in gpus
    ]
    return [structs.replace(answer, ties=list(_ties(answers, number))) for number, answer in enumerate(answers)]


def _ties(answers: Sequence[OnGpu], number: int) -> Sequence[int]:
    """The answers whose intervals overlap with that of this one; -1 for the job as it is."""
    interval = answers[number].step_time_s.in_production
    others = [(-1, interval.now, interval.now)]
    steps = [answer.step_time_s.in_production for answer in answers]
    others += [(place, step.low, step.high) for place, step in enumerate(steps) if place != number]
    return [place for place, low, high in others if low <= interval.high and interval.low <= high]


def _source(job: Subject, stated: Passport | None) -> tuple[Passport, list[str]]:
    """The passport of the GPU that the trace is from, and what to know of it."""
    recorded = job.gpu_model
    passport = stated or known_passport(recorded)
    if passport is None:
        why = f"{short(recorded)} is not a known GPU" if recorded else "the trace does not name its GPU"
        raise SelectionError(f"{why}: name it with --gpu-from FILE; `tracekit passport --out FILE` measures one")
    warnings = list(passport.warnings)
    if recorded is not None and passport.head.gpu not in recorded:
        warnings.append(f"the trace is of {short(recorded)}, and its passport of {passport.head.gpu}")
    return passport, warnings


class Hardware(Struct, frozen=True, eq=False, dict=True):
    """A job whose kernels can be scaled."""

    job: GraphSubject | PipelineSubject
    ops: Ops

    @cached_property
    def types(self) -> dict[str | None, float]:
        """How long matrix products of each type take now, seconds; None: of a type that is not known."""
        total: dict[str | None, float] = defaultdict(float)
        spent = np.bincount(self.ops.works.of_op, self.ops.cost_s, len(self.ops.works.each))
        for work, seconds in zip(self.ops.works.each, spent.tolist(), strict=True):
            if work.kind in PRODUCTS:
                total[work.dtype] += seconds
        return total

    def answer(self, gpu: OtherGpu, scaling: Scaling, precision: str | None, warnings: list[str]) -> OnGpu:
        """Answer for one GPU. `precision`: as asked."""
        ops, chosen = self.ops, self.ops.chosen(gpu.selection)
        scaled = [scaling.of(work) for work in ops.works.each]
        cost_s = _costs(ops, scaled, chosen, 0.0)
        of_op, count = ops.works.of_op[chosen], len(scaled)
        now_s, then_s = (np.bincount(of_op, cost[chosen], count).tolist() for cost in (ops.cost_s, cost_s))
        error = WIDE_90 * _error(scaled, then_s)
        costs = [cost_s, *(_costs(ops, scaled, chosen, times * error) for times in (-1, 1))]
        step, limit = self._step(costs)
        needed, has = self._memory_gb, gpu.passport.head.memory_gb or None
        production = step.in_production
        return OnGpu(
            gpu=gpu.passport.head.gpu,
            selection=gpu.selection,
            precision=precision,
            step_time_s=step,
            speedup=production.now / production.value if production.value else 1.0,
            tiers=_tiers(ops.works.each, scaled, now_s, then_s, float(ops.cost_s[~chosen].sum())),
            fits=None if needed is None or has is None else needed <= has,
            memory_gb=MemoryOfGpu(needed, has),
            bottleneck=limit,
            balanced=None if gpu.selection is None else self._balanced(cost_s, step.value),
            ties=[],
            warnings=[*warnings, *self._lacks(scaled)],
        )

    @cached_property
    def _recorded_s(self) -> float:
        """The mean step as recorded, seconds."""
        return self.job.recorded_s

    @cached_property
    def _unchanged_s(self) -> float:
        """The mean step as replayed, seconds."""
        return self._replayed_s(())

    def _replayed_s(self, changes: tuple[Intervention, ...]) -> float:
        """The mean step after some changes, with the profiler that recorded it, seconds."""
        return float(self.job.step_times(changes).mean())

    def _step(self, costs: Sequence[Floats]) -> tuple[OtherStepTime, Limit]:
        """The step at the likely costs of ops, the lowest and the highest, [ops] each; and what limits it."""
        changes = [(self.ops.priced(cost),) for cost in costs]
        same = all(np.array_equal(cost, self.ops.cost_s) for cost in costs)
        now = self._recorded_s
        value, low, high = (now if same else self._replayed_step_s(change) for change in changes)
        unprofiled, without = self._unprofiled(changes, same=same)
        limit = self._bottleneck((*changes[0], *without))
        return OtherStepTime(now, value, min(low, value), max(high, value), unprofiled), limit

    def _replayed_step_s(self, changes: tuple[Intervention, ...]) -> float:
        """The mean step as recorded, longer or shorter by what the replay is after some changes, seconds."""
        return max(self._recorded_s + self._replayed_s(changes) - self._unchanged_s, 0.0)

    def _unprofiled(
        self, changes: Sequence[tuple[Intervention, ...]], *, same: bool
    ) -> tuple[OtherStep | None, tuple[Intervention, ...]]:
        """The same without the profiler, None if its cost is not known; and what takes the profiler away."""
        del changes, same
        return None, ()

    def _bottleneck(self, changes: tuple[Intervention, ...]) -> Limit:
        """What takes most of the critical path: the work of GPUs, communication, or hosts."""
        path, works = critical_path(self.ops.replay, changes), self.ops.works
        row = works.of_op[path.ops_of(self.ops.cells)]
        spent = np.bincount(row, path.cost_s, len(works.each)) / len(path.graph.steps)
        total: dict[Limit, float] = {"compute": 0.0, "communication": 0.0, "host": path.mean_delay_s}
        for work, seconds in zip(works.each, spent.tolist(), strict=True):
            total[_LIMITS.get(work.kind, "compute")] += seconds
        return max(total, key=lambda limit: total[limit])

    def _balanced(self, cost_s: Floats, step_s: float) -> Balanced | None:
        """The job with the batch shared out among its replicas by speed; None if that is no faster than `step_s`.

        A replica is as much faster as its busiest GPU.
        """
        ops = self.ops
        fixed = {*UNCHANGED, "collective", "optimizer"}
        of_batch = np.array([work.kind not in fixed for work in ops.works.each])[ops.works.of_op]
        replicas, replica = np.unique(ops.replica, return_inverse=True)
        busiest_s = np.zeros((2, len(replicas)))
        for row, cost in zip(busiest_s, (ops.cost_s, cost_s), strict=True):
            np.maximum.at(row, replica, np.bincount(ops.gpu[of_batch], cost[of_batch], len(replica)))
        if not busiest_s.all():
            return None
        speed = busiest_s[0] / busiest_s[1]
        share = speed / speed.mean()
        shared_s = np.where(of_batch, cost_s * share[replica][ops.gpu], cost_s)
        balanced_s = self._replayed_step_s((ops.priced(shared_s),))
        if balanced_s >= step_s:
            return None
        return Balanced(balanced_s, dict(zip(map(str, replicas.tolist()), share.tolist(), strict=True)))

    @property
    def _memory_gb(self) -> float | None:
        """What the job reserves on its fullest GPU, None if that is not known."""
        stated = self.job.metadata.get("memory_gb")
        return float(stated) if isinstance(stated, int | float) and stated > 0 else None

    def _lacks(self, scaled: Sequence[Scaled]) -> list[str]:
        """What makes the answer worse than it could be."""
        works, tiers = self.ops.works.each, {scaled_work.tier for scaled_work in scaled}
        products = [work for work in works if work.kind == "matmul"]
        stay = {work.kind for work, scaled_work in zip(works, scaled, strict=True) if scaled_work.tier == "unchanged"}
        lacks = []
        if unknown := sorted(stay - _LIMITS.keys()):
            lacks.append(f"neither kernels nor peaks of both cards tell how long {listed(unknown)} take: they stay")
        if any(work.kind == "compute" for work in works):
            lacks.append("its computes are not divided into kernels: all are scaled as matrix products in bf16")
        elif products and not any(work.shape for work in products) and "class" in tiers:
            lacks.append("recorded without shapes: products are scaled as a class; record with record_shapes=True")
        return lacks


class HardwareOfRecording(Hardware, frozen=True, eq=False):
    """A recording of GPUs, whose profiler can be taken away."""

    job: RecordingSubject

    @cached_property
    def _recorded_s(self) -> float:
        return float(profiled_steps_s(self.job).mean())

    def _replayed_s(self, changes: tuple[Intervention, ...]) -> float:
        queued = QueuedAhead(arrives_s(self.job), host_time(self.job).launched_by)
        return float(marked_steps(self.job).replayed_s(self.job.replay, (*changes, queued)).mean())

    def _unprofiled(
        self, changes: Sequence[tuple[Intervention, ...]], *, same: bool
    ) -> tuple[OtherStep | None, tuple[Intervention, ...]]:
        now = self.job.unprofiled_step
        if now is None:
            return None, ()
        likely, *others = (
            unprofiled_after(self.job, change, bounds=number == 0)
            for number, change in enumerate(changes[:1] if same else changes)
        )
        assert likely is not None, "the cost of recording does not depend on the GPU"
        step = likely.step_s
        low_s, high_s = [other.step_s.value for other in others if other is not None] or (step.value, step.value)
        return OtherStep(
            now.value,
            step.value,
            max(step.value - hypot(step.value - step.low, step.value - low_s), 0.0),
            step.value + hypot(step.high - step.value, high_s - step.value),
        ), likely.changes[:1]

    @property
    def _memory_gb(self) -> float | None:
        reserved = [times.memory.reserved_bytes for times in self.job.summary.gpus if times.memory is not None]
        return max(reserved) / _BYTES_PER_GB if reserved else super()._memory_gb


def _costs(ops: Ops, scaled: Sequence[Scaled], chosen: Bools, error: float) -> Floats:
    """The cost of each op on the other GPU, seconds, [ops]. `error`: of all that is scaled, in logarithms."""
    more = np.exp(error)
    factor = np.array([1.0 if work.tier == "unchanged" else work.factor * more for work in scaled])[ops.works.of_op]
    cast_s = np.array([work.cast_s for work in scaled])[ops.works.of_op]
    return np.where(chosen, ops.cost_s * factor + cast_s, ops.cost_s)


def _error(scaled: Sequence[Scaled], then_s: Sequence[float]) -> float:
    """The standard error of the logarithm of all that is scaled: works of a group err together, groups do not."""
    total = sum(seconds for scale, seconds in zip(scaled, then_s, strict=True) if scale.tier != "unchanged") or 1.0
    of_group: dict[tuple[str, ...], float] = defaultdict(float)
    for scale, seconds in zip(scaled, then_s, strict=True):
        of_group[scale.group] += seconds / total * scale.error
    return hypot(*of_group.values())


def _tiers(
    works: Sequence[Work], scaled: Sequence[Scaled], now_s: Sequence[float], then_s: Sequence[float], rest_s: float
) -> list[ScaledKind]:
    """The kinds of ops with their tiers, those that take most of the time first. `rest_s`: of ops that stay."""
    now: dict[tuple[str, Tier], float] = defaultdict(float, {("other ops", "unchanged"): rest_s})
    then = now.copy()
    for work, scale, before_s, after_s in zip(works, scaled, now_s, then_s, strict=True):
        now[work.kind, scale.tier] += before_s
        then[work.kind, scale.tier] += after_s
    total = sum(now.values())
    rows = [ScaledKind(*key, seconds / total, then[key] / seconds) for key, seconds in now.items() if seconds]
    return sorted(rows, key=lambda row: -row.share)


class Ops(Struct, frozen=True, eq=False):
    """`cost_s`: own cost, seconds; `gpu`: which GPU runs it, from 0; [ops]. `replica`: of each GPU, [gpus].

    The ops are those of an op graph, or the cells of all blocks of a pipeline. `cells`: the op in each cell of each
    block, [rows, lanes]. `priced`: returns the job with other costs, seconds, [ops].
    """

    replay: GraphReplay
    works: Works
    cost_s: Floats
    gpu: Ints
    replica: Ints
    cells: Sequence[Ints]
    priced: Callable[[Floats], Intervention]

    def chosen(self, text: str | None) -> Bools:
        """Which ops a selection chooses, [ops]; all without one. Raises SelectionError if it chooses none."""
        chosen = np.full(len(self.cost_s), text is None, np.bool_)
        if text is not None:
            graph, durations = self.replay.graph, self.replay.durations
            masks = masks_of(checked_selection(text, graph, durations), graph, durations)
            for ops, mask in zip(self.cells, masks, strict=True):
                chosen[ops] = mask
        return chosen


def _ops_of_graph(job: GraphSubject, works: Works) -> Ops:
    graph, cost_s = job.graph, job.replay.cost_of_ops
    mesh = graph.ops.mesh
    axes = list(mesh.axes)
    replica = mesh.coordinates[:, axes.index(_REPLICA)] if _REPLICA in axes else np.arange(len(mesh.ranks))
    gpu = np.searchsorted(mesh.ranks, graph.ops.rank).astype(np.int64)
    return Ops(job.replay, works, cost_s, gpu, replica.astype(np.int64), [block.op for block in graph.blocks], SetOps)


def _ops_of_trace(job: GraphSubject) -> Ops:
    """The ops of a trace: their work by the parts of a rank's time, their kinds, and the names of kernels."""
    part = np.full(job.ops.height, None, object)
    for name, chosen in parts_of(job.ops).items():
        part[chosen] = str(name)
    table = job.columns("kind", "name").cast(pl.String).with_columns(part=pl.Series(part, dtype=pl.String))
    return _ops_of_graph(job, works_by_row(table, _work_of_op, job.replay.cost_of_ops))


def _work_of_op(row: tuple[str | None, str | None, str | None]) -> Work:
    kind, name, part = row
    if kind in _KINDS:
        return _KINDS[kind]
    if part != Part.COMPUTE:
        return Work("collective" if part == Part.TRANSFERS else "host")
    of_class = kind if kind in _CLASSES else max(class_of(name or ""), class_of(kind or ""), key=_CLASSES.__contains__)
    return kernel_work(of_class, name or kind, None, None) if of_class in _CLASSES else _COMPUTE


def _ops_of_pipeline(job: PipelineSubject) -> Ops:
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
    firsts = np.cumsum([0, *(block.start.size for block in graph.blocks)]).tolist()
    cells = [
        np.arange(first, first + block.start.size).reshape(block.start.shape)
        for first, block in zip(firsts, graph.blocks, strict=False)
    ]

    def priced(other_s: Floats) -> Intervention:
        return SetCosts(tuple(other_s[ops] for ops in cells))

    return Ops(replay, works, cost_s, place.astype(np.int64), workers // graph.layout.pp, cells, priced)


#: How each kind of job is scaled, and how its ops are read.
_OF_KIND: dict[type[Subject], tuple[Callable[[Any, Ops], Hardware], Callable[[Any], Ops]]] = {
    GraphSubject: (Hardware, _ops_of_trace),
    RecordingSubject: (
        HardwareOfRecording,
        lambda job: _ops_of_graph(job, works_of(job.ops, job.replay.cost_of_ops)),
    ),
    PipelineSubject: (Hardware, _ops_of_pipeline),
}
