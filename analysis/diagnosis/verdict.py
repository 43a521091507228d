"""The first line of a report: what kind of loss a job has, and how much.

In: the headline of a job. Out: a `Verdict`. S measures stragglers only: a job whose ranks all wait for data loses most
of its time but has S = 1. So the verdict names the kind of loss that costs most, whether one rank or all ranks have it.
"""

from __future__ import annotations

from tracekit.analysis.detectors.all_detectors import detector_of
from tracekit.analysis.diagnosis.assessment import Headline
from tracekit.analysis.evidence.subject import Subject
from tracekit.report.verdict import LossKind, Verdict


def verdict_of(job: Subject, headline: Headline) -> Verdict:
    """Return the verdict on a job with this headline."""
    leading = headline.leading[0] if headline.leading else None
    label = None if leading is None or headline.kind is not LossKind.STRAGGLER else detector_of(leading.kind).label
    return Verdict(
        kind=headline.kind,
        label=label or str(headline.kind),
        headline_s=headline.headline_s,
        lost_s=headline.lost_s,
        share=headline.lost_s / headline.whole_s,
        step_lost_s=headline.step_lost_s,
        lost_gpu_hours=headline.lost_s * len(job.steps) * job.gpus / 3600,
        lost_gpu_hours_per_day=headline.returning_s / headline.whole_s * job.gpus * 24,
        sentence=headline.sentence,
        confidence=None if leading is None else leading.confidence,
        losses=headline.losses,
        parts=headline.parts,
        of_mean_ops=headline.of_mean_ops,
    )
