"""Forward ops that the backward repeats: activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import polars as pl

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, on_each, share_of
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.gpu.roofline import work_of
from tracekit.analysis.numeric.arrays import Ints
from tracekit.analysis.whatif.interventions import LessTime
from tracekit.base.text import code_name, three_digits
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind

#: The operator of the reentrant kind, whose backward both repeats the forward and computes gradients.
_REENTRANT = "CheckpointFunctionBackward"
_MOST_NAMES = 8


class Recompute(Detector):
    """The backward repeats a part of the forward to save memory.

    Paper: not seen. tracekit replays the recording without the ops that Python launched from inside the recomputation
    of `torch.utils.checkpoint`, on GPU and host, and adds up the outputs that would have to be kept.
    """

    kind = "recompute"
    title = "The backward repeats the forward"
    signature = "ops launched from inside the recomputation of torch.utils.checkpoint"
    refuted_by = "memory does not suffice without it, at any smaller batch"
    next_check = "torch.cuda.max_memory_allocated(): how much memory is left?"
    suggested_fix = "keep activations where memory allows, or repeat only what is cheap (selective checkpointing)"
    loss = LossKind.COMPUTE
    repair = Repair("no-recompute", "Keep activations instead of computing them again", assumes="memory for them")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        ops = job.ops
        if idle_gpu(job) is None or "operator" not in ops.columns:
            return
        on_gpu = ops["role"].eq("gpu").fill_null(value=False).to_numpy()
        if "recomputed" not in ops.columns:
            yield from self._unseen(job, on_gpu)
            return
        again = ops["recomputed"].fill_null(value=False).to_numpy()
        rows = np.flatnonzero(again & on_gpu)
        taken_s = float(ops["duration"].gather(rows).sum())
        if share_of(job, taken_s) < SMALLEST_SHARE:
            return
        names = _longest(job, rows)
        saved_bytes = _kept_bytes(job, rows)
        memory = (
            "record_shapes=True shows how much memory that takes"
            if saved_bytes is None
            else f"that takes at most {three_digits(saved_bytes / 1e9)} GB more"
        )
        delay_s = np.maximum(job.replay.delay_of_ops, 0.0)
        yield candidate(
            self.kind,
            job,
            Spent(self.kind, names[0], "", names, len(rows), taken_s),
            f"the backward repeats {len(rows):,} kernels of the forward, longest of {code_name(names[0])}:"
            f" {on_each(job, taken_s)}",
            LessTime(np.where(again, job.pace.cost, 0.0), np.where(again & on_gpu, delay_s, 0.0)),
            suggested_fix=f"{self.suggested_fix}: {memory}",
        )

    def _unseen(self, job: RecordingSubject, on_gpu: np.ndarray) -> Iterator[Candidate]:
        """Checkpointing of which the recording shows only that there is some."""
        ops, launched_by = job.ops, host_time(job).launched_by
        if "outer" not in ops.columns:
            return
        within = np.append(
            ops["outer"].cast(pl.String).fill_null("").str.contains(_REENTRANT, literal=True).to_numpy(), [False]
        )
        rows = np.flatnonzero(on_gpu & within[launched_by])
        taken_s = float(ops["duration"].gather(rows).sum())
        if share_of(job, taken_s) < SMALLEST_SHARE:
            return
        tell = "no stack was recorded: record with_stack=True to tell what is repeated from gradients"
        yield candidate(
            self.kind,
            job,
            Spent(self.kind, _REENTRANT, "", (_REENTRANT,), len(rows), taken_s, tell),
            f"the backward repeats a part of the forward: {on_each(job, taken_s)} are that and its gradients",
            None,
            suggested_fix="record with_stack=True (torch.profiler) to see what the backward repeats",
        )


def _longest(job: RecordingSubject, rows: Ints) -> tuple[str, ...]:
    """The operators, or kernels without one, that launched these GPU ops, longest first."""
    named = job.ops.select("operator", "name", "duration")[rows]
    named = named.select(pl.coalesce("operator", "name").alias("operator"), "duration")
    totals = named.group_by("operator").agg(pl.col("duration").sum())
    return tuple(totals.sort("duration", "operator", descending=[True, False])["operator"].head(_MOST_NAMES).to_list())


def _kept_bytes(job: RecordingSubject, rows: Ints) -> float | None:
    """The bytes of what these ops write, of the step that writes most; None if no sizes were recorded.

    An operator that launches several kernels writes once; one whose name ends with _ writes into its input.
    """
    ops = job.ops
    if "inputs" not in ops.columns:
        return None
    steps = ops["profiler_step"].gather(rows).to_list() if "profiler_step" in ops.columns else [None] * len(rows)
    written: dict[int | None, float] = {}
    before: tuple[object, ...] = ()
    columns = (steps, rows.tolist(), ops["operator"].gather(rows), ops["inputs"].gather(rows))
    for step, row, op, inputs in zip(*columns, strict=True):
        same, before = (row, op, inputs) == before, (row + 1, op, inputs)
        if inputs and op and not same and not op.endswith("_"):
            written[step] = written.get(step, 0.0) + (work_of(op, *msgspec.json.decode(inputs))[2] or 0.0)
    return max(written.values(), default=None)
