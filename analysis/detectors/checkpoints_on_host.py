"""Checkpoints that the training thread writes, in recordings of GPUs.

In: a recording. Out: candidates of `checkpoint_stalls.Checkpoints`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, costly, on_each, share_of
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.evidence.launches import unnamed_saves
from tracekit.analysis.whatif.interventions import Intervention
from tracekit.base.text import code_name
from tracekit.report.finding import Spent
from tracekit.trace.gpu_activity import IdleReason


def checkpoints_on_host(kind: str, job: RecordingSubject) -> Iterator[Candidate]:
    """Yield checkpoints that the training thread writes, by the functions around its work. `kind`: of the findings."""
    work = host_time(job)
    if idle_gpu(job) is None:
        return
    for part in costly(job, work.by_name(IdleReason.CHECKPOINT, key=lambda what: what.where or what.name)):
        line = f" at {code_name(part.where)}" if part.where else ""
        yield _written(
            kind,
            job,
            Spent(IdleReason.CHECKPOINT, part.name, part.where, part.names, part.count, part.seconds),
            work.less(part.parts),
            f"the host writes checkpoints in {code_name(part.name)}{line}: {on_each(job, part.seconds)}",
        )
    unnamed = unnamed_saves(job) & work.mask(IdleReason.PYTHON)
    taken_s = float(work.seconds[unnamed].sum())
    if share_of(job, taken_s) >= SMALLEST_SHARE:
        tell = "no stack was recorded: record with_stack=True to see whether it is a checkpoint"
        yield _written(
            kind,
            job,
            Spent(IdleReason.CHECKPOINT, "copies to the host", "", (), int(unnamed.sum()), taken_s, tell),
            work.less(unnamed),
            f"tensors are copied to the host in a row, which then works {on_each(job, taken_s)} outside of any"
            " operator, as it does to write a checkpoint",
            bound=True,
        )


def _written(
    kind: str, job: RecordingSubject, spent: Spent, change: Intervention, effect: str, *, bound: bool = False
) -> Candidate:
    """The candidate of checkpoints that the training thread writes; copies from the GPU stay."""
    return candidate(
        kind, job, spent, effect, change,
        bound=bound,
        title="The GPU waits for checkpoints",
        next_check="how long the write takes, and to which storage",
        suggested_fix=(
            "write checkpoints in the background: torch.distributed.checkpoint.async_save, or copy to pinned memory"
            " and let a thread write; and write them less often"
        ),
    )  # fmt: skip
