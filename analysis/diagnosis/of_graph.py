"""How a job of any graph is assessed, an op trace or a recording of GPUs: its costliest loss counts.

In: a `GraphSubject` and its causes. Out: its `Assessment`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import VERDICT, ReplayTrust
from tracekit.analysis.detectors.detector import detector_of
from tracekit.analysis.diagnosis.diagnosis import Assessment, LossWithCauses, NamedLoss, doubts_of
from tracekit.analysis.diagnosis.find import DIAGNOSIS
from tracekit.analysis.diagnosis.price import PricedFix
from tracekit.analysis.evidence.gpu_losses import (
    discrepancy,
    exposed_communication_s,
    idles,
    leads,
    lost_in_production_s,
    parts_of_s,
    unseen_s,
)
from tracekit.analysis.evidence.graph_subject import (
    GraphSubject,
    RecordingSubject,
    culprit_of,
    in_production_s,
    profiled_steps_s,
    uneven_experts,
    unknown_loads,
    worth_s,
)
from tracekit.analysis.evidence.subject import Cause, JobKind
from tracekit.analysis.gpu.pace import BlamedRank, Part
from tracekit.analysis.gpu.recorded import unexplained_waits
from tracekit.base.text import code_name, counted, main_clause, ranks_text, seconds
from tracekit.report.finding import LossKind
from tracekit.trace.facts import Fact

#: The number of rendezvous with missing members to name.
_MOST_GAPS = 3


def graph_assessment(job: GraphSubject) -> GraphAssessment:
    """Return how a job of this graph is assessed."""
    return _ASSESSED[job.kind](job)


class GraphAssessment(Assessment, frozen=True, eq=False):
    """How a job of any graph is assessed."""

    job: GraphSubject

    @property
    def smallest_cost_s(self) -> float:
        """See `Assessment`; of several ranks, `pace.py` has weighed their parts."""
        return DIAGNOSIS.smallest_cost_alone * self.job.recorded_s if idles(self.job) else 0.0

    def withheld(self, causes: Sequence[Cause]) -> str | None:
        return next(self.doubts(causes), None)

    def headline(self, causes: Sequence[Cause]) -> NamedLoss:
        """See `Assessment.headline`. One kind of loss counts, the costliest: the time in which all GPUs are idle, or
        all transfer, may be the same time.
        """
        job = self.job
        kind, loss, lost_s, leading = _costliest(job, causes)
        whole_s = _whole_s(job, leading) or 1.0
        lost_s = self.lost_s(leading, lost_s, whole_s)
        explained_s = lost_s if leading else 0.0
        if lost_s > whole_s:  # it lies in few steps, and the usual one is shorter
            whole_s = job.recorded_s
        losses = (LossWithCauses(loss, lost_s, leading, explained_s),) if lost_s > 0 else ()
        return NamedLoss(
            kind=kind,
            sentence=self.sentence(kind, leading, lost_s),
            headline_s=lost_s,
            lost_s=lost_s,
            whole_s=whole_s,
            returning_s=lost_s * (leading[0].returning_share if leading else 1.0),
            step_lost_s=np.full(len(job.steps), lost_s),
            leading=leading,
            losses=losses,
            parts=parts_of_s(job),
            of_mean_ops=loss is LossKind.STRAGGLER and not leading,
        )

    def lost_s(self, leading: Sequence[Cause], lost_s: float, whole_s: float) -> float:
        """Return what is lost, by the costliest kind of loss `lost_s` of `whole_s`, and the findings that cause it."""
        del leading, whole_s
        return lost_s

    def sentence(self, kind: LossKind, leading: Sequence[Cause], lost_s: float) -> str:
        """Return what costs most, and what else nobody can explain, without the kind of loss."""
        job = self.job
        whole, step = "each step" if job.whole == "step" else f"the {job.whole}", job.unprofiled_step
        if step is not None:
            whole = "each step without the profiler"
        rest = parts_of_s(job).words(job.recorded_s, whole)
        if kind is LossKind.STRAGGLER and not leading:
            return rest or f"stragglers cost {lost_s / job.recorded_s:.0%} of {whole}"
        if kind is LossKind.BALANCED and rest and not parts_of_s(job).to_tell:
            return f"no {_recorded(job)}rank stands out; {rest}"
        said = [_costs_most(job, kind, leading, whole, lost_s), rest]
        if step is not None:
            profiled = seconds(float(np.median(profiled_steps_s(job))))
            said.insert(0, f"without the profiler, a step takes {job.unprofiled_step_words} ({profiled} as recorded)")
        return "; ".join(part for part in said if part)

    def trust(self, causes: Sequence[Cause]) -> ReplayTrust:
        job, doubts = self.job, tuple(self.doubts(causes))
        return ReplayTrust(job.replay_error, discrepancy(job), discrepancy(job), not doubts, doubts)

    def doubts(self, causes: Sequence[Cause]) -> Iterator[str]:
        """Yield why no number can be trusted."""
        yield from _of_replay(self.job)
        yield from doubts_of(causes)

    def fit(self, trust: ReplayTrust) -> str:
        job, gaps = self.job, f"gaps between ops add {trust.discrepancy:z.1%}"
        if unseen_s(job) >= 0.0005 * job.recorded_s:
            gaps += f" and {unseen_s(job) / job.recorded_s:.1%} that the recording does not show"
        return f"replay within {trust.replay_error:.1%} of the recording; {gaps}"


class RecordingAssessment(GraphAssessment, frozen=True, eq=False):
    """How a recording of GPUs is assessed. Of a rank alone, doubts about transfers concern only fixes of transfers."""

    job: RecordingSubject

    def promised(self, fix: PricedFix) -> PricedFix:
        doubt = _of_transfers(self.job)
        of_other_time = fix.cause is not None and detector_of(fix.cause).loss is not LossKind.COMMUNICATION
        if doubt is None or (of_other_time and not self.job.shows(Fact.RANKS)):
            return fix
        return replace(fix, withheld=fix.withheld or doubt)

    def lost_s(self, leading: Sequence[Cause], lost_s: float, whole_s: float) -> float:
        named_s = _cost_s(self.job, leading[0]) if leading else 0.0
        return named_s if leading and named_s >= VERDICT.headline_share * whole_s else lost_s

    def sentence(self, kind: LossKind, leading: Sequence[Cause], lost_s: float) -> str:
        if kind is LossKind.CONTRADICTION:
            return f"{self.job.summary.lost}: what costs time cannot be told"
        return super().sentence(kind, leading, lost_s)

    def doubts(self, causes: Sequence[Cause]) -> Iterator[str]:
        yield from _of_replay(self.job)
        yield from _of_recording(self.job)
        yield from doubts_of(causes)

    def trust(self, causes: Sequence[Cause]) -> ReplayTrust:
        trust, doubt = super().trust(causes), _of_transfers(self.job)
        first = next((cause for cause in causes if cause.change is not None), None)
        concerns = self.job.shows(Fact.RANKS) or first is None or _loss_of(first) is LossKind.COMMUNICATION
        if doubt is None or not concerns:
            return trust
        return replace(trust, trustworthy=False, reasons=(*trust.reasons, doubt))

    def fit(self, trust: ReplayTrust) -> str:
        job, fit = self.job, super().fit(trust)
        odd = (
            (job.unexplained.violations, "dependency", "contradicted"),
            (job.summary.unmatched * job.shows(Fact.RANKS), "communication kernel", "without a partner"),
            (job.summary.without_launch, "GPU op", "launched outside the recording"),
        )
        figures = [f"{counted(number, noun)} {what}" for number, noun, what in odd if number]
        return "; ".join([fit, *figures])

    def seen(self, finding: Cause) -> str:
        """See `Assessment.seen`: where in the code, or how long others wait for it."""
        culprit = culprit_of(self.job)
        if finding.spent is not None:
            return f", at {code_name(finding.spent.where)}" if finding.spent.where else ""
        if culprit is None or not finding.where.ranks:
            return ""
        return f": the others wait {seconds(culprit.waited_s)} for it in all"


#: How a job is assessed, by its kind.
_ASSESSED: dict[JobKind, type[GraphAssessment]] = {
    GraphSubject.kind: GraphAssessment,
    RecordingSubject.kind: RecordingAssessment,
}


def _costliest(job: GraphSubject, causes: Sequence[Cause]) -> tuple[LossKind, LossKind, float, tuple[Cause, ...]]:
    """The kind to name, the loss behind it, what that costs in seconds, and the findings that cause it."""
    whole_s, losses_s = in_production_s(job) or 1.0, dict(lost_in_production_s(job))
    costly = [cause for cause in causes if cause.change is not None and cause.once is None]
    once = [cause for cause in causes if cause.once is not None and cause.saved_s >= VERDICT.headline_share * whole_s]
    for cause in costly:
        losses_s[_loss_of(cause)] = max(losses_s.get(_loss_of(cause), 0.0), worth_s(job, cause))
    for cause in once:  # the rest of its kind is what returns
        losses_s[_loss_of(cause)] = max(losses_s.get(_loss_of(cause), 0.0) - cause.saved_s, 0.0)
    kind = loss = max(losses_s, key=lambda loss_kind: losses_s[loss_kind])
    if costly and not job.shows(Fact.RANKS) and worth_s(job, costly[0]) >= VERDICT.headline_share * whole_s:
        kind = loss = _loss_of(costly[0])  # of one rank, what saves most leads
    if not job.shows(Fact.COMPUTE):
        kind, loss, losses_s = LossKind.CONTRADICTION, LossKind.CONTRADICTION, {}
    elif losses_s[loss] < VERDICT.headline_share * whole_s:
        kind = loss = LossKind.BALANCED
        if costly or culprit_of(job) is not None:
            kind, loss = LossKind.MINOR, _loss_of(costly[0]) if costly else LossKind.STRAGGLER
    leading = tuple(cause for cause in causes if (cause.change or cause.spent) and _loss_of(cause) is loss)
    if once and (not leading or kind in {LossKind.BALANCED, LossKind.MINOR}):  # it is most of what was lost
        kind = loss = LossKind.STALLS
        leading, losses_s[loss] = tuple(once), once[0].saved_s
    if kind is LossKind.STRAGGLER and not leading and not parts_of_s(job).to_tell:
        kind = loss = LossKind.BALANCED  # the noise of its ops explains it
    lost_s = losses_s.get(loss, 0.0)
    if not leading and not job.shows(Fact.RANKS) and kind not in {LossKind.BALANCED, LossKind.CONTRADICTION}:
        kind = loss = LossKind.BALANCED  # idle in pieces too small to name
    if kind is LossKind.BALANCED and _one_of_many(job):
        kind = LossKind.MINOR  # what the other ranks lose is unknown
    return kind, loss, lost_s, leading


def _loss_of(cause: Cause) -> LossKind:
    return detector_of(cause.kind).loss_at(cause.where)


def _costs_most(job: GraphSubject, kind: LossKind, leading: Sequence[Cause], whole: str, lost_s: float) -> str:
    """What costs most, if that is known."""
    if kind is LossKind.BALANCED or not leading:
        nobody = f"no {_recorded(job)}rank stands out, and " if len(job.ranks) > 1 else ""
        shown = f" that {ranks_text(job.ranks)} alone shows" if _one_of_many(job) else ""
        if (share := lost_s / (in_production_s(job) or 1.0)) >= VERDICT.headline_share:
            single = f"{nobody}no single cause{shown} costs {VERDICT.headline_share:.0%} of {whole}"
            return f"{single}, all together {share:.0%}"
        return f"{nobody}nothing{shown} costs {VERDICT.headline_share:.0%} of {whole}"
    effect, place = main_clause(leading[0].effect), job.names.place(leading[0].where)
    if leading[0].once is not None:
        effect = f"{leading[0].once.words}: {effect}"
    if place is None:
        return effect
    share = _cost_s(job, leading[0]) / _whole_s(job, leading)
    return f"{place.words} {place.verb('costs', 'cost')} {share:.0%} of {whole}: {effect}"


def _one_of_many(job: GraphSubject) -> bool:
    """Whether one rank alone was recorded of a job that has others."""
    return not job.shows(Fact.RANKS) and not job.all_workers_traced


def _recorded(job: GraphSubject) -> str:
    """Qualifies ranks if others were not recorded."""
    return "" if job.all_workers_traced else "recorded "


def _whole_s(job: GraphSubject, leading: Sequence[Cause]) -> float:
    """What the cost of the leading finding is a part of, seconds: what was seen once is part of the recording."""
    return job.recorded_s if leading and leading[0].once is not None else in_production_s(job)


def _cost_s(job: GraphSubject, cause: Cause) -> float:
    """What a finding costs: of the rank that stands out, all that it does; of what has no price, the time it takes; of
    what was seen once, its time in the recording.
    """
    if cause.once is not None:
        return cause.saved_s
    if cause.change is None and cause.spent is not None:
        return cause.spent.seconds
    culprit = culprit_of(job)
    of_culprit = culprit is not None and cause.where.ranks == (culprit.rank,)
    return culprit.saved_s if culprit and of_culprit and cause.saves_step_s is None else worth_s(job, cause)


def _of_recording(job: RecordingSubject) -> Iterator[str]:
    """Yield what the recording lacks, or does not explain."""
    summary = job.summary
    yield from summary.doubts
    if summary.lost:
        yield f"{summary.lost}, so its idle time is not known"
    if uneven_experts(job) or unknown_loads(job):  # others wait for ranks with more tokens
        return
    culprit = culprit_of(job)
    yield from _of_stacks(culprit, summary.without_stacks)
    named = None if culprit is None else culprit.rank
    yield from unexplained_waits(summary.late, job.waits, named, job.recorded_s)


def _of_stacks(culprit: BlamedRank | None, without_stacks: Sequence[int]) -> Iterator[str]:
    """Yield that a host may be behind because it alone recorded stacks."""
    if culprit is None or not without_stacks or culprit.rank in without_stacks:
        return
    if culprit.behind and culprit.behind[0].part is Part.HOST:
        yield (
            f"rank {culprit.rank}, whose host is behind, recorded stacks, {ranks_text(without_stacks)} did not:"
            " recording stacks alone slows a host; record all ranks with the same options"
        )


def _of_transfers(job: RecordingSubject) -> str | None:
    """Why it is not known what transfers cost; None if it is."""
    summary = job.summary
    unseen = [rank for rank in summary.left_out if rank not in summary.late.accounted]
    if leads(job, LossKind.COMMUNICATION):
        recorded = {*job.ranks, *summary.left_out}
        unseen += [rank for rank in range(summary.world_size or 0) if rank not in recorded]
    exposed = exposed_communication_s(job) / (job.recorded_s or 1.0)
    if not unseen or exposed < VERDICT.headline_share:
        return None
    return (
        f"transfers cost {exposed:.0%} of the recording, and part of that may be waiting for {ranks_text(unseen)}, of"
        " which nothing is known"
    )


def _of_replay(job: GraphSubject) -> Iterator[str]:
    """Yield what the replay does not explain."""
    durations, doubts = job.replay.durations, list(_unexplained(job))
    yield from doubts
    clamped = durations.clamped_transfers + durations.clamped_delays
    if doubts and clamped:
        yield f"{clamped} transfers or launch delays lie more than 10 ms below zero (taken as 0)"


def _unexplained(job: GraphSubject) -> Iterator[str]:
    slowdown = job.slowdown
    compares = job.shows(Fact.RANKS)  # as S does
    if compares and np.isnan(slowdown):
        yield "the job without stragglers takes no time, so what stragglers cost is not known"
    elif compares and slowdown < VERDICT.smallest_slowdown:
        yield (
            f"the job without stragglers is {1 / slowdown - 1:.0%} slower than the job itself, so these ideal durations"
            " do not fit it"
        )
    if not job.replay_error <= VERDICT.largest_discrepancy:
        yield f"the replay with launch delays misses the recording by {job.replay_error:.1%}"
    if not abs(discrepancy(job)) <= VERDICT.largest_discrepancy:
        yield (
            f"launch delays add {discrepancy(job):.1%} to the step: time that the stated dependencies leave unexplained"
        )
    gaps = job.graph.ops.gaps
    if gaps:
        named = "; ".join(
            f"rendezvous {gap.rendezvous} of {gap.group} lacks rank {', '.join(map(str, gap.missing[:8]))}"
            + (" ..." if len(gap.missing) > 8 else "")
            for gap in gaps[:_MOST_GAPS]
        )
        more = f" and {len(gaps) - _MOST_GAPS} more" if len(gaps) > _MOST_GAPS else ""
        yield f"members were not recorded, so that nobody waits for them in the replay: {named}{more}"
