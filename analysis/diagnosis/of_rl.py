"""The diagnosis of a run of post-training.

In: `RlEvidence`. Out: a `Diagnosis`, as for any job.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.analysis.attribution.attribution import Trust
from tracekit.analysis.detectors.detector import Detector
from tracekit.analysis.detectors.post_training import STALE, Tail, alternative
from tracekit.analysis.detectors.registry import detector_of
from tracekit.analysis.diagnosis.answer import answer_of
from tracekit.analysis.diagnosis.diagnose import with_plug_ins
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.price import priced
from tracekit.analysis.evidence.rl import RlEvidence
from tracekit.analysis.rl.account import RlAccount, first_line
from tracekit.report.diagnosis import Diagnosis
from tracekit.report.finding import Finding
from tracekit.report.fix import Fix
from tracekit.report.verdict import Loss, LossKind, Verdict


def diagnose_rl(evidence: RlEvidence, account: RlAccount) -> Diagnosis:
    """Return what the run loses, why, and what each fix would save. `account`: with the alternatives to name."""
    return with_plug_ins(lambda detectors: _diagnosed(evidence, account, detectors))


def _diagnosed(evidence: RlEvidence, account: RlAccount, detectors: Sequence[Detector]) -> Diagnosis:
    causes = tuple(cause for cause in causes_of(evidence, detectors) if cause.change is not None)
    doubts = tuple(filter(None, [account.doubt]))
    fixes: tuple[Fix, ...] = ()
    if not account.flagged:
        known = evidence.run.stale or any(cause.kind == Tail.kind for cause in causes)
        anyway = [] if known else [alternative(evidence, *STALE)]
        fixes = priced(evidence, causes, anyway, withheld=doubts[0] if doubts else None)
    trust = Trust(evidence.replay_error, 0.0, 0.0, not doubts, doubts)
    verdict = _verdict(evidence, account, causes)
    return Diagnosis(
        trust=trust,
        answer=answer_of(evidence, verdict, causes, fixes, (), trust),
        verdict=verdict,
        causes=causes,
        fixes=fixes,
        lacks=evidence.lacks,
    )


def _verdict(evidence: RlEvidence, account: RlAccount, causes: Sequence[Finding]) -> Verdict:
    """The leading loss of the account; what all named losses cost together."""
    label, sentence = first_line(account)
    leading = [cause for cause in causes if cause.kind == label]
    named = sorted(causes, key=lambda one: one not in leading)
    gone = evidence.unchanged - evidence.step_times([cause.change for cause in named])
    lost_s = max(float(gone.mean()), 0.0) if leading else 0.0
    losses = [Loss(detector_of(one.kind).loss, max(one.saved_s, 0.0), (one,), max(one.saved_s, 0.0)) for one in named]
    share, gpus = lost_s / evidence.recorded_s, evidence.gpus
    return Verdict(
        kind=LossKind(label),
        label=label,
        headline_s=leading[0].saved_s if leading else 0.0,
        lost_s=lost_s,
        share=share,
        step_lost_s=gone if leading else np.zeros_like(gone),
        lost_gpu_hours=lost_s * len(gone) * gpus / 3600,
        lost_gpu_hours_per_day=share * gpus * 24,
        sentence=sentence,
        confidence=leading[0].confidence if leading else None,
        losses=tuple(losses) if leading else (),
        parts=evidence.noise,
    )
