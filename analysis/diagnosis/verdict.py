"""The first line of a report: what kind of loss a job has, and how much.

In: the headline of a job. Out: a `Verdict`. S measures stragglers only: a job whose ranks all wait for data loses most
of its time but has S = 1. So the verdict names the kind of loss that costs most, whether one rank or all ranks have it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.analysis.detectors.all_detectors import detector_of
from tracekit.analysis.diagnosis.assessment import NamedLoss
from tracekit.analysis.diagnosis.first_fix import first_fix
from tracekit.analysis.diagnosis.priced_fix import PricedFix
from tracekit.analysis.evidence.cause import Cause
from tracekit.analysis.evidence.subject import Subject
from tracekit.report.answer import Answer
from tracekit.report.conclusions import Loss, LossParts, Verdict
from tracekit.report.verdict import LossKind


def verdict_of(
    job: Subject, headline: NamedLoss, causes: Sequence[Cause], fixes: Sequence[PricedFix], answer: Answer
) -> Verdict:
    """Return the verdict on a job with this headline."""
    leading = headline.leading[0] if headline.leading else None
    label = None if leading is None or headline.kind is not LossKind.STRAGGLER else detector_of(leading.kind).label
    parts = headline.parts
    return Verdict(
        kind=headline.kind,
        label=label or str(headline.kind),
        headline_s=headline.headline_s,
        lost_s=headline.lost_s,
        share=headline.share,
        lost_gpu_hours=headline.lost_s * len(job.steps) * job.gpus / 3600,
        lost_gpu_hours_per_day=headline.returning_share * job.gpus * 24,
        sentence=headline.sentence,
        confidence=None if leading is None else leading.confidence,
        losses=[
            Loss(loss.kind, loss.lost_s, [causes.index(cause) for cause in loss.causes], loss.explained_s)
            for loss in headline.losses
        ],
        parts=LossParts(parts.lost_s, parts.explained_s, parts.noise_s, parts.unexplained_s, parts.error_s),
        of_mean_ops=headline.of_mean_ops,
        first_fix=_place_of_first_fix(headline, fixes),
        who=answer.who,
        cost=answer.cost,
        action=answer.action,
    )


def _place_of_first_fix(headline: NamedLoss, fixes: Sequence[PricedFix]) -> int | None:
    """The place of the fix to begin with; None if no cause leads, or nothing is known to help."""
    leading = headline.first_cause
    fix = None if leading is None else first_fix(leading, fixes)
    return next((place for place, each in enumerate(fixes) if each is fix), None)
