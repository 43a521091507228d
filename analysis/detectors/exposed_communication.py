"""Transfers that no compute hides, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE
from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.evidence.gpu_losses import exposed_communication_s, leads
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.whatif.interventions import AddTime
from tracekit.report.finding import Figure, Place, Unit, confidence_from
from tracekit.report.verdict import LossKind


class ExposedCommunication(Detector):
    """Transfers take time that no compute hides, although all ranks are there.

    Paper: no signature; communication at its median is ideal. In pipelines the verdict names it where nothing else
    costs time; in recordings of GPUs it competes with the other losses.
    """

    kind = "exposed-communication"
    title = "Transfers that no compute hides"
    signature = "the recording gets shorter if transfers take no time once all ranks have arrived"
    refuted_by = "the same recording with the transfers overlapped takes as long"
    next_check = "bytes and bus bandwidth of the collectives (NCCL Inspector, nccl-tests); what could run meanwhile"
    suggested_fix = "overlap communication with compute, or send less (larger buckets, lower precision)"
    loss = LossKind.COMMUNICATION
    repair = Repair(
        "overlap-communication", "Hide all transfers behind compute", assumes="all transfers hidden behind compute"
    )

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        if not leads(job, self.loss):
            return
        exposed_s = exposed_communication_s(job)
        figure = Figure("exposed, over the recording", exposed_s / job.recorded_s, SMALLEST_HEADLINE_SHARE, Unit.SHARE)
        yield Candidate(
            self.kind,
            Place(),
            f"transfers that no compute hides cost {figure.value:.0%} of the recording, with all ranks there",
            (figure,),
            confidence_from((figure,)),
            AddTime(-exposed_s),
            bound=True,
        )
