"""Calls in which a rank waits for its GPU and its peers do not."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.rank_behind import rank_behind, spent
from tracekit.analysis.evidence.ops import OpEvidence
from tracekit.analysis.gpu.part import Part


class SyncCalls(Detector):
    """A rank waits for its GPU in calls that its peers do not make, so it cannot launch ahead.

    Paper: not seen, because host calls are not traced. tracekit replays the recording without the extra calls: their
    host goes on at once, and the GPU finds the next kernels launched.
    """

    kind = "sync-calls"
    title = "A rank waits for its GPU more often than its peers"
    signature = "synchronising calls of one rank beyond those of its peers, after which its kernels are launched late"
    refuted_by = "the calls wait for what the peers wait for elsewhere"
    next_check = "which lines call .item(), .cpu() or print tensors on this rank (torch.cuda.set_sync_debug_mode)"
    suggested_fix = "remove the calls that wait for the GPU on {ranks}: .item(), .cpu(), printing of tensors"
    part = "host"
    repair = Repair("remove-sync-calls", "Remove the calls that wait for the GPU", "none that its peers do not make")

    def in_ops(self, evidence: OpEvidence) -> Iterator[Candidate]:
        """See `Detector.in_ops`."""
        behind = evidence.behind(Part.SYNC_CALLS)
        if behind is not None:
            took = spent(evidence, behind)
            effect = f"waits for its GPU in {took.mine:,} calls, its peers in {took.usual:,}"
            yield from rank_behind(self.kind, evidence, Part.SYNC_CALLS, effect, freed=True)
