"""How a run of post-training is assessed: the leading loss of its account, and what all named losses cost together.

In: an `RlSubject` and its causes. Out: its `Assessment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracekit.analysis.attribution.attribution import ReplayTrust
from tracekit.analysis.detectors.detector import FINDINGS, detector_of
from tracekit.analysis.detectors.rl_losses import STALE, Tail, alternative
from tracekit.analysis.diagnosis.diagnosis import Assessment, LossWithCauses, NamedLoss, changes_of
from tracekit.analysis.evidence.rl_subject import RlSubject
from tracekit.analysis.evidence.subject import Cause, Plan
from tracekit.analysis.rl.account import RlAccount, first_line
from tracekit.base.text import ranks_text
from tracekit.report.finding import LossKind


class RlAssessment(Assessment, frozen=True, eq=False):
    """How a run of post-training is assessed. `account`: with the alternatives to name."""

    job: RlSubject
    account: RlAccount

    @property
    def smallest_cost_s(self) -> float:
        return FINDINGS.smallest_cost_share * self.job.recorded_s

    def reported(self, findings: Sequence[Cause]) -> tuple[Cause, ...]:
        return tuple(finding for finding in findings if finding.change is not None)

    def plans(self, causes: Sequence[Cause]) -> Iterable[Plan]:
        """See `Assessment.plans`: to generate ahead of training, unless the run does, or its tail proposes that."""
        if self.account.flagged or self.job.run.stale or any(cause.kind == Tail.kind for cause in causes):
            return ()
        return (alternative(self.job, *STALE),)

    def withheld(self, causes: Sequence[Cause]) -> str | None:
        return self.account.doubt or None

    def headline(self, causes: Sequence[Cause]) -> NamedLoss:
        job, (label, sentence) = self.job, first_line(self.account)
        leading = [cause for cause in causes if cause.kind == label]
        named = sorted(causes, key=lambda cause: cause not in leading) if leading else []
        recovered_s = job.unchanged - job.step_times(changes_of(named))
        lost_s = max(float(recovered_s.mean()), 0.0)
        costs_s = [(cause, max(cause.saved_s, 0.0)) for cause in named]
        return NamedLoss(
            kind=LossKind(label),
            sentence=sentence,
            headline_s=sum((cause.saved_s for cause in leading), 0.0),
            lost_s=lost_s,
            whole_s=job.recorded_s,
            returning_s=lost_s,
            step_lost_s=recovered_s,
            leading=leading,
            losses=tuple(LossWithCauses(detector_of(cause.kind).loss, s, (cause,), s) for cause, s in costs_s),
            parts=job.noise,
        )

    def trust(self, causes: Sequence[Cause]) -> ReplayTrust:
        doubts = tuple(filter(None, [self.account.doubt]))
        return ReplayTrust(self.job.replay_error, 0.0, 0.0, not doubts, doubts)

    def fit(self, trust: ReplayTrust) -> str:
        if self.account.replayed_s is None:
            lost = self.account.left_out
            without = f", but for {ranks_text(lost, name='step')}" if lost else ""
            return f"seconds as the framework logged them{without}; nothing was replayed"
        return self.job.run.replayed_words
