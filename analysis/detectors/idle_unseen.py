"""Idle time of which the recording does not show the reason."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.detectors.of_one_gpu import candidate, share_of
from tracekit.analysis.detectors.stream_waits import stream_waits_recorded
from tracekit.analysis.evidence.gpu_losses import gpu_alone, unseen_head_s
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.unprofiled_steps import unprofiled_step
from tracekit.base.text import code_name, seconds
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason

#: Idle time that the recording does not explain is worth a sentence from this share of it on. No experiment.
_SMALLEST_SHARE = 0.05


class IdleUnseen(Detector):
    """The GPU idles although work was launched, or what launched it is not in the recording.

    Paper: not seen. It has no price: nothing shows what to take away.
    """

    kind = "idle-unseen"
    title = "The GPU is idle, and the recording does not show why"
    signature = "gaps before GPU ops that were launched long before, arrive late, or have no recorded launch"
    refuted_by = "a longer recording shows the launch, or what the op waited for"
    next_check = "a recording that begins one step earlier, with the waits of streams"
    suggested_fix = "record one step earlier, and all processes that use the GPU"
    loss = LossKind.IDLE

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        yield from self._head(job)
        gpu = gpu_alone(job)
        for idle in gpu.idle_by_reason if gpu is not None else ():
            if idle.reason not in _SENTENCES or share_of(job, idle.seconds) < _SMALLEST_SHARE:
                continue
            why, then = _SENTENCES[IdleReason(idle.reason)]
            if idle.reason == IdleReason.QUEUED and stream_waits_recorded(job):
                then = "record all processes that use the GPU: no stream that it waited for was busy"
            names = tuple(row.name for row in idle.names if row.name)
            before = f" before {code_name(names[0])}" if names else ""
            yield candidate(
                self.kind,
                job,
                Spent(idle.reason, names[0] if names else "", "", names, idle.gaps, idle.seconds, f"{why}: {then}"),
                f"the GPU is idle for {share_of(job, idle.seconds):.0%} of the recording{before}: {why}",
                None,
                next_check=then,
                suggested_fix=then,
            )

    def _head(self, job: RecordingSubject) -> Iterator[Candidate]:
        """The time from the launch of the first op to its start, in which the GPU did something that is not seen. It
        lies before the step without the profiler, if that is known.
        """
        gpu, unseen_s = gpu_alone(job), unseen_head_s(job)
        if gpu is None or unprofiled_step(job) is not None or share_of(job, unseen_s) < _SMALLEST_SHARE:
            return
        why = "what the GPU did before the recording is not seen"
        began = "the launch" if gpu.before_first.by_reason else "the recording, and after its launch"
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.LAUNCH_LATENCY, "before the first op", "", (), 1, unseen_s, f"{why}: {_RECORD_EARLIER}"),
            f"the GPU began its first op {seconds(unseen_s)} after {began}: {why}",
            None,
            next_check=_RECORD_EARLIER,
            suggested_fix=_RECORD_EARLIER,
        )


_RECORD_WAITS = (
    "record the waits of streams (torch.profiler's experimental_config, enable_cuda_sync_events=True), and all"
    " processes that use the GPU"
)
_RECORD_EARLIER = "record one step earlier, to see what the GPU still did; compare the clocks of host and GPU"
#: Why nothing can be told, and what to record next.
_SENTENCES = {
    IdleReason.QUEUED: (
        "the work was launched long before, and what it waited for is not recorded",
        _RECORD_WAITS,
    ),
    IdleReason.LAUNCH_LATENCY: ("the host had launched the work, and the GPU began it late", _RECORD_EARLIER),
    IdleReason.UNKNOWN: (
        "the launches of the next ops are not recorded",
        "record with activities=[CPU, CUDA] from one step earlier, and the process that launches",
    ),
}
