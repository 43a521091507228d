"""Transfers that wait behind the job's own collectives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector
from tracekit.analysis.evidence.congestion import congestion_of
from tracekit.analysis.evidence.grids import transfers
from tracekit.analysis.evidence.network_repairs import HICCUP_FACTOR, shared_anyway_s
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.whatif.interventions import Scale, step_times
from tracekit.base.text import ratio
from tracekit.report.finding import SMALLEST_BLAMELESS_SHARE, Figure, Place, Unit, confidence_from
from tracekit.report.verdict import LossKind


class SharedCard(Detector):
    """Transfers between stages wait behind the job's own collectives, which pass the same cards at the same time.

    Paper: no signature; such waits increase S, because the ideal of transfers is the median. tracekit subtracts from
    each transfer the time in which a collective of one of its ends ran, and names what that saves. It blames nobody and
    promises nothing: the bytes have to be transferred at some time.
    """

    kind = "shared-network-card"
    title = "Transfers share the network with the job's own collectives"
    signature = "transfers are long while a data-parallel collective of one of their ends runs, and short otherwise"
    refuted_by = "the same transfers are as long without overlapped collectives"
    next_check = "a run without the overlap, or with collectives in smaller buckets: does the step get shorter?"
    suggested_fix = (
        "try smaller buckets (bucket_cap_mb) and fewer channels (NCCL_MAX_NCHANNELS) for the overlapped collectives, or"
        " another card for the pipeline"
    )
    loss = LossKind.COMMUNICATION

    def find(self, job: PipelineSubject) -> Iterator[Candidate]:
        if transfers(job).empty:
            return
        traffic = traffic_of(job)
        usual = np.fmax(traffic.link_s, traffic.usual_s)[:, None, None]
        congestion = congestion_of(job)
        shared_s = shared_anyway_s(traffic, congestion.rings if congestion.shows else np.ones(traffic.rings.shape))
        alone = np.maximum(traffic.seconds - shared_s, usual)
        long = (shared_s > 0) & (traffic.seconds > HICCUP_FACTOR * usual) & (alone < traffic.seconds)
        if not long.any():
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            factor = np.where(long, alone / traffic.seconds, 1.0)
        change = Scale(transfers(job), factor)
        share = 1 - float(step_times(job.replay, (change,)).mean()) / job.unchanged_s
        if share < SMALLEST_BLAMELESS_SHARE:
            return
        figures = (
            Figure("what goes without, over the step", share, SMALLEST_BLAMELESS_SHARE, Unit.SHARE),
            Figure("transfers that wait", int(long.sum()), 0.0),
        )
        longest = float(np.nanmax((traffic.seconds / traffic.usual_s[:, None, None])[long]))
        effect = (
            f"{long.sum():,} transfers take up to {ratio(longest)} times as long as usual while a collective of the job"
            " passes the same card"
        )
        yield Candidate(self.kind, Place(), effect, figures, confidence_from(figures[:1]), change)
