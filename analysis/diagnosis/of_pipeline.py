"""How a pipeline is assessed: its losses are added up, as fixes of all causes together would show.

In: a `PipelineSubject` and its causes. Out: its `Assessment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import VERDICT, Parts, ReplayTrust
from tracekit.analysis.attribution.patterns import Stall, some_stand_apart, space_pattern, time_pattern
from tracekit.analysis.detectors.any_job import LateData
from tracekit.analysis.detectors.detector import FINDINGS, Candidate, Treatment, detector_of, loss_of
from tracekit.analysis.diagnosis.diagnosis import (
    Assessment,
    LossWithCauses,
    NamedLoss,
    cause_words,
    changes_of,
    doubts_of,
)
from tracekit.analysis.diagnosis.find import DIAGNOSIS, acting, can_conclude, is_run, steps_words
from tracekit.analysis.diagnosis.price import PricedFix, paying_first
from tracekit.analysis.evidence.host_code import data_waits_of, delay_share_without
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import undecided
from tracekit.analysis.evidence.subject import Cause, Plan
from tracekit.analysis.fixes import balance_plans, general_plans, layer_plans, worker_plans
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay import Method
from tracekit.analysis.whatif.interventions import (
    IDEAL,
    ORIGINAL,
    Intervention,
    NoDelays,
    NoOverlap,
    SetCost,
    mean_step_time,
)
from tracekit.analysis.whatif.selection import communication
from tracekit.analysis.whatif.selection import kind as kind_of
from tracekit.base.text import main_clause, seconds
from tracekit.report.conclusions import Patterns, shared_s
from tracekit.report.finding import LossKind
from tracekit.trace.facts import Fact

#: The job as S sees it.
_PLAIN: tuple[Intervention, ...] = (NoDelays(), NoOverlap())
#: Kinds of loss share time if it is more than this share of what all cost. Chosen: more than rounding leaves.
LEAST_SHARED = 1e-9
#: How a sentence names the time of a loss that all ranks share, unless its leading finding does.
_WENT_TO = {
    LossKind.INPUT: "are spent waiting for data",
    LossKind.HOST: "go to launches and host work",
    LossKind.COMMUNICATION: "go to communication",
    LossKind.STALLS: "are lost to pauses and stalls",
    LossKind.EVALUATION: "go to evaluation",
}


class PipelineAssessment(Assessment, frozen=True, eq=False):
    """How a pipeline is assessed. `stalls`: its single slow steps. `layers`: transformer layers per stage; by default
    those of the trace's metadata; if neither is known, fixes give the amount of work to move and no split. `method`:
    with the published one, no cause explains launch delays.
    """

    job: PipelineSubject
    stalls: tuple[Stall, ...] = ()
    layers: tuple[int, ...] | None = None
    method: Method = Method.TRACEKIT

    @property
    def smallest_cost_s(self) -> float:
        return FINDINGS.smallest_cost_share * self.job.unchanged_s

    @property
    def undecided(self) -> str | None:
        return undecided(self.job)

    def one_offs(self, candidates: Sequence[Candidate]) -> Iterable[Candidate]:
        if not some_stand_apart(self.job.unchanged):
            return ()
        from tracekit.analysis.detectors.one_offs import one_off_stalls  # most jobs need none

        return one_off_stalls(self.job, candidates)

    def ordered(self, causes: tuple[Cause, ...], fixes: Sequence[PricedFix]) -> tuple[Cause, ...]:
        return paying_first(causes, fixes)

    def plans(self, causes: Sequence[Cause]) -> Iterable[Plan]:
        """See `Assessment.plans`. Raises SelectionError if the number of `layers` differs from that of the stages."""
        lasting = [cause for cause in causes if not cause.one_off]
        treated = {
            treatment: [cause for cause in lasting if detector_of(cause.kind).treatment is treatment]
            for treatment in Treatment
        }
        machines = treated[Treatment.REPLACE_MACHINES]
        return (
            *balance_plans(self.job, treated[Treatment.BALANCE_DATA]),
            *worker_plans(self.job, machines),
            *self._layer_plans(treated[Treatment.MOVE_LAYERS], machines),
            *general_plans(self.job),
        )

    def _layer_plans(self, uneven_stages: Sequence[Cause], machines: Sequence[Cause]) -> Iterable[Plan]:
        if self.job.stages < 2 or not (uneven_stages or machines):
            return ()
        return layer_plans(self.job, uneven_stages, machines, self.layers)

    def withheld(self, causes: Sequence[Cause]) -> str | None:
        """See `Assessment.withheld`; launch delays that a cause explains do not count against the replay."""
        delay_share = delay_share_without(self.job, changes_of(causes))
        if delay_share > VERDICT.largest_discrepancy:
            return (
                f"launch delays that no cause explains make up {delay_share:.1%} of the step (at most"
                f" {VERDICT.largest_discrepancy:.0%}): the replay explains too little"
            )
        slower = -self.job.attribution.discrepancy
        if slower > VERDICT.largest_discrepancy:
            return f"the replay is {slower:.1%} slower than the recording: ops overlapped that the graph orders"
        if self.job.attribution.contradicted:
            return "too many ops contradict the replay"
        return next(iter(self._doubts(causes)), None)

    def _doubts(self, causes: Sequence[Cause]) -> tuple[str, ...]:
        """Why a report with these causes cannot be trusted, however well the replay fits."""
        return *doubts_of(causes), *_unclear(self.job, causes)

    def headline(self, causes: Sequence[Cause]) -> NamedLoss:
        job, attribution = self.job, self.job.attribution
        recovered_s, parts = _recovered_s(job, causes), parts_of(job, causes)
        losses = _losses(job, causes, recovered_s, parts)
        lost_s = _lost_s(losses, recovered_s)
        if not attribution.straggling and lost_s < VERDICT.headline_share * attribution.recorded_s:
            losses = [*_exposed_communication(job), *losses]
            lost_s = _lost_s(losses, recovered_s)
        kind, headline_s, sentence = _named(job, losses, lost_s, float(recovered_s.mean()), parts)
        losses = _sharing(losses, lost_s)
        of_kind = losses[:1] if kind is LossKind.MINOR else losses
        rest = rest_words(job, parts) or ""
        one_offs = [cause for cause in causes if cause.one_off]  # they may hide each other
        once_s = sum((1 - cause.returning_share) * cause.saved_s for cause in causes if not cause.one_off)
        once_s += float(_recovered_s(job, one_offs).mean())
        return NamedLoss(
            kind=kind,
            sentence=sentence if rest in sentence else f"{sentence}; {rest}",
            headline_s=headline_s,
            lost_s=lost_s,
            whole_s=job.recorded_s,
            returning_s=max(lost_s - once_s, 0.0),
            step_lost_s=_step_lost_s(job, recovered_s, lost_s),
            leading=next((loss.causes for loss in of_kind if kind in {loss.kind, LossKind.MINOR}), ()),
            losses=tuple(losses),
            parts=parts,
            of_mean_ops=lost_s == straggling_s(job, causes, parts),
        )

    def trust(self, causes: Sequence[Cause]) -> ReplayTrust:
        job, trust = self.job, self.job.attribution.trust
        if self.method is Method.TRACEKIT:
            gaps_are_the_host = job.trace.timed_on_gpus
            explain = (
                cause
                for cause in causes
                if gaps_are_the_host or cause.one_off or detector_of(cause.kind).explains_delays
            )
            trust = job.attribution.trust_given(delay_share_without(job, changes_of(explain)))
        if doubts := self._doubts(causes):
            return structs.replace(trust, trustworthy=False, reasons=(*trust.reasons, *doubts))
        return trust

    def fit(self, trust: ReplayTrust) -> str:
        explained = f"gaps between ops add {trust.discrepancy:.1%}"
        if trust.discrepancy > VERDICT.largest_discrepancy:
            explained += f", all but {trust.unexplained:.1%} explained"
        layout = self.job.replay.graph.layout
        ranks, inside = layout.tp * layout.cp, ""
        if ranks > 1 and self.job.lockstep is None:
            inside = f"; one rank in {ranks} recorded, standing for its worker"
        few = "; one step does not show what returns" if len(self.job.steps) == 1 else ""
        return f"replay within {trust.replay_error:.1%} of the recording; {explained}{inside}{few}"

    def seen(self, finding: Cause) -> str:
        workers = finding.where.workers
        return f"{f' ({workers[0].coordinates})' if len(workers) == 1 else ''}, {finding.when}"

    @property
    def patterns(self) -> Patterns:
        attribution = self.job.attribution
        return Patterns(time_pattern(attribution), space_pattern(attribution, self.job.hosts))


def _unclear(job: PipelineSubject, causes: Sequence[Cause]) -> Iterator[str]:
    """Yield what the recording shows to be slow without showing what it is, in words."""
    hiding = [cause for cause in causes if cause.hidden]
    late = [cause for cause in hiding if cause.kind == LateData.kind and not data_waits_of(job).recorded]
    if len(hiding) > 1 and any(cause.one_off or len(cause.where.dp_ranks) == len(job.dp_ranks) - 1 for cause in late):
        yield "all ranks but one wait while that one works: for data, or for that rank, if they meet unrecorded"
    profile = job.profile
    if profile is None:
        if job.shows(Fact.COMPUTE):
            yield "neither forwards nor backwards were recorded: nothing shows what the steps consist of"
        return
    workers = " and ".join(map(str, job.workers_where(profile.unclear_workers)))
    if workers and job.stages > 1:
        yield f"one of the workers {workers} computes slower, and microbatches of unequal cost hide which one"
    elif workers:
        yield f"the computes of {workers} take longer, the optimizer does not: longer sequences or a slower machine"
    if profile.unclear_stages.any():
        where = f" of stage {int(np.flatnonzero(profile.unclear_stages)[0])}" if job.stages > 1 else ""
        yield f"workers{where} are slow in turn, and nearly always: too few steps show how fast they are; record more"
    if profile.unclear_steps.any():
        steps = steps_words([int(job.steps[index]) for index in np.flatnonzero(profile.unclear_steps)])
        yield f"in {steps} all computes take longer: longer sequences or slower machines"


def parts_of(job: PipelineSubject, causes: Sequence[Cause]) -> Parts:
    """What the loss that S measures consists of."""
    noise, attribution = job.noise, job.attribution
    small = noise.unexplained_s < VERDICT.unexplained * noise.step_s
    if small and noise.noise_s < VERDICT.headline_share * noise.step_s:  # there is nothing for causes to explain
        return noise
    return Parts.of(attribution.original, attribution.ideal, job.noisy, _recovered_s(job, causes, _PLAIN))


def _recovered_s(job: PipelineSubject, causes: Iterable[Cause], plain: Sequence[Intervention] = ()) -> Floats:
    """Seconds of each step that go when all causes go together, [steps], after the changes of `plain`.

    S ignores launch delays and overlap between steps (`_PLAIN`): a cause that hides behind either costs less in the job
    as it is. What returns costs what it does after all that stands apart in one or two steps has gone.
    """
    if not (changes := changes_of(causes)):
        return np.zeros(len(job.unchanged))
    before = job.step_times(plain) if plain else job.unchanged
    return np.asarray(before - job.step_times((*plain, *changes)))


def _losses(job: PipelineSubject, causes: Sequence[Cause], recovered_s: Floats, parts: Parts) -> list[LossWithCauses]:
    """The cost of each kind of loss; the kind whose fix saves most in the job as it is comes first."""
    by_kind: dict[LossKind, list[Cause]] = {}
    for cause in causes:
        if cause.change is not None:
            by_kind.setdefault(loss_of(cause), []).append(cause)
    losses, one_offs = [], changes_of(cause for cause in causes if cause.one_off)
    for kind, members in by_kind.items():
        without = () if any(cause.one_off for cause in members) else one_offs
        of_kind = recovered_s if len(by_kind) == 1 else _recovered_s(job, members, without)
        gone_s = max(float(of_kind.mean()), 0.0)
        losses.append(LossWithCauses(kind, gone_s, tuple(members), gone_s))
    by_s = straggling_s(job, causes, parts)
    no_loss = LossWithCauses(LossKind.STRAGGLER, 0.0, (), 0.0)
    stragglers = next((loss for loss in losses if loss.kind is LossKind.STRAGGLER), no_loss)
    others = [loss for loss in losses if loss.kind is not LossKind.STRAGGLER]
    if by_s and (stragglers.causes or not _explained(job, others, by_s)):
        # S compares with a mean that includes the slow ranks, so with few ranks one slow rank loses more than S says.
        left_s = max(by_s - float(_recovered_s(job, stragglers.causes, _PLAIN).mean()), 0.0)
        if stragglers.causes and left_s < VERDICT.headline_share * job.recorded_s:
            left_s = 0.0  # as in a healthy job, whose ops differ from their mean, too
        lost_s = stragglers.explained_s + left_s
        if others and stragglers.causes:
            lost_s = min(lost_s, _in_addition_s(job, stragglers, others))
        losses = [*others, replace(stragglers, lost_s=lost_s)]
    # A loss with a known cause outweighs one without.
    weight_s = {
        loss.kind: loss.explained_s if loss.causes else DIAGNOSIS.explained_share * loss.lost_s for loss in losses
    }
    least_s = VERDICT.headline_share * job.recorded_s
    returns = any(not _seen_in_few_steps(loss) and weight_s[loss.kind] >= least_s for loss in losses)
    return sorted(
        losses,
        key=lambda loss: (returns and _seen_in_few_steps(loss), -weight_s[loss.kind], -loss.lost_s),
    )


def _sharing(losses: Sequence[LossWithCauses], lost_s: float) -> list[LossWithCauses]:
    """The losses with their shares of the time that several kinds of them cost."""
    causes = [(loss.kind, cause.saved_s, cause.alone_s) for loss in losses for cause in loss.causes]
    shares_s, rests_s = shared_s(lost_s, {loss.kind: loss.lost_s for loss in losses}, causes)
    shared = []
    for loss in losses:
        of_kind_s = sum(share for share, (of, *_) in zip(shares_s, causes, strict=True) if of is loss.kind)
        of_kind_s += rests_s[loss.kind]
        shares = len(losses) > 1 and abs(of_kind_s - loss.lost_s) > LEAST_SHARED * lost_s
        shared.append(replace(loss, lost_s=of_kind_s, alone_s=loss.lost_s) if shares else loss)
    return shared


def _seen_in_few_steps(loss: LossWithCauses) -> bool:
    """Whether nothing of a loss is known to return."""
    return bool(loss.causes) and all(cause.one_off for cause in loss.causes)


def _explained(job: PipelineSubject, others: Sequence[LossWithCauses], by_s: float) -> bool:
    """Whether losses of other kinds, alone or together, explain most of what S says is lost."""
    may_explain = [loss for loss in others if not any(_done_for_all(cause) for cause in loss.causes)]
    if max((loss.lost_s for loss in may_explain), default=0.0) >= DIAGNOSIS.explained_share * by_s:
        return True
    causes = (cause for loss in may_explain for cause in loss.causes)
    return float(_recovered_s(job, causes, _PLAIN).mean()) >= DIAGNOSIS.explained_share * by_s


def _done_for_all(cause: Cause) -> bool:
    """Whether a cause is planned work of the training loop, done by one rank for all or by every rank."""
    return cause.change is not None and not cause.where.workers and detector_of(cause.kind).planned is not None


def _in_addition_s(job: PipelineSubject, stragglers: LossWithCauses, losses: Sequence[LossWithCauses]) -> float:
    """Seconds of the mean step that stragglers cost in addition to other losses, which S counts too if ops take longer.

    The larger of their cost in the job as it is and their cost once the other causes are gone.
    """
    others = changes_of(cause for loss in losses for cause in loss.causes)
    alone_s = job.step_times(others).mean() - job.step_times([*others, *changes_of(stragglers.causes)]).mean()
    return max(stragglers.lost_s, float(alone_s))


def straggling_s(job: PipelineSubject, causes: Sequence[Cause], parts: Parts) -> float:
    """Seconds of a step that stragglers cost by S, compared with mean ops and without launch delays; 0 below S = 1.1 if
    causes and noise explain it.

    S also counts the time that the others wait for the checkpoint or evaluation of one rank. If `causes` names it, it
    is subtracted.
    """
    attribution = job.attribution
    if not attribution.straggling and not parts.headline:
        return 0.0
    planned = [detector_of(cause.kind).planned for cause in causes if _done_for_all(cause)]
    if not planned:
        return attribution.original_s - attribution.ideal_s
    without = SetCost(kind_of(*filter(None, planned)), 0.0)
    original_s, ideal_s = (mean_step_time(job.replay, (*base, without)) for base in (ORIGINAL, IDEAL))
    straggling = original_s >= VERDICT.straggling * ideal_s or parts.headline
    return original_s - ideal_s if straggling else 0.0


def _lost_s(losses: Sequence[LossWithCauses], recovered_s: Floats) -> float:
    """Total loss, seconds of a step: what goes when all causes go, but at least the largest single loss."""
    if len(losses) <= 1:
        return losses[0].lost_s if losses else 0.0
    return max(float(recovered_s.mean()), *(loss.lost_s for loss in losses))


def _step_lost_s(job: PipelineSubject, recovered_s: Floats, lost_s: float) -> Floats:
    """What each step loses, [steps]: what goes with the causes; the rest as S, or if S sees none, as the steps last."""
    attribution, recovered_s = job.attribution, recovered_s.clip(min=0)
    if recovered_s.mean() > lost_s:
        return np.asarray(recovered_s * (lost_s / recovered_s.mean()))
    rest = (attribution.original - attribution.ideal).clip(min=0)
    if not rest.any():
        rest = attribution.recorded
    return np.asarray(recovered_s + (lost_s - recovered_s.mean()) * rest / rest.mean())


def _named(
    job: PipelineSubject, losses: Sequence[LossWithCauses], lost_s: float, gone_s: float, parts: Parts
) -> tuple[LossKind, float, str]:
    """The kind of loss to name, its cost in seconds of the mean step, and the sentence about it. `gone_s`: what goes
    with all causes, seconds of the mean step.
    """
    attribution = job.attribution
    if losses and not losses[0].causes and losses[0].kind is LossKind.COMMUNICATION:
        step, exposed = seconds(attribution.recorded_s), seconds(losses[0].lost_s)
        said = f"{exposed} of every {step} step are communication that no compute hides"
        return LossKind.COMMUNICATION, losses[0].lost_s, said
    if losses and (losses[0].lost_s >= VERDICT.headline_share * attribution.recorded_s or attribution.straggling):
        costliest_s = max((cause.saved_s for cause in losses[0].causes), default=0.0)
        hiding = losses[0].causes and losses[0].causes[0].hidden
        alone = sum(len(loss.causes) for loss in losses) == 1
        if not hiding or alone or costliest_s >= VERDICT.headline_share * attribution.recorded_s:
            return losses[0].kind, losses[0].lost_s, loss_sentence(job, parts, losses, min(lost_s, gone_s))
    if losses and (lost_s >= VERDICT.headline_share * attribution.recorded_s or attribution.straggling):
        return losses[0].kind, lost_s, _together(job, losses, min(lost_s, gone_s))
    if attribution.slowdown < VERDICT.smallest_slowdown:
        slower = f"{1 / attribution.slowdown - 1:.0%} slower than it is"
        return LossKind.CONTRADICTION, 0.0, f"without stragglers the job would be {slower}, which cannot be"
    kind, of_kind_s = LossKind.BALANCED, 0.0
    sentence = "no straggler" if job.all_workers_traced else "no straggler among the ranks that were recorded"
    if job.shows(Fact.COMPUTE):
        sentence += f", and nothing costs {VERDICT.headline_share:.0%} of the step"
    little = (
        f"; no cause costs {VERDICT.headline_share:.0%} or more of the mean step" if job.shows(Fact.COMPUTE) else ""
    )
    if rest := rest_words(job, parts):
        sentence = f"{rest}{little}"
    if losses and losses[0].causes and not losses[0].causes[0].hidden:
        kind, of_kind_s = LossKind.MINOR, losses[0].lost_s
        sentence = f"{loss_sentence(job, parts, losses[:1], min(lost_s, gone_s))}{little}"
    delay_share = delay_share_without(job, changes_of(cause for loss in losses for cause in loss.causes))
    if delay_share > VERDICT.largest_discrepancy and job.shows(Fact.COMPUTE):
        sentence += f"; launch delays that no cause explains add {delay_share:.0%} to the step"
    return kind, of_kind_s, sentence


def _together(job: PipelineSubject, losses: Sequence[LossWithCauses], cost_s: float) -> str:
    """The sentence on causes that each cost little, often because they hide behind each other, but much together."""
    causes = [cause for loss in losses for cause in loss.causes]
    named = "; ".join(cause_words(job, cause) for cause in causes[:2])
    more = f"; and {len(causes) - 2} more" if len(causes) > 2 else ""
    cost = part_of_step(job, cost_s)
    return f"{len(causes)} causes cost {cost} of each step together, each alone little: {named}{more}"


def _exposed_communication(job: PipelineSubject) -> list[LossWithCauses]:
    """What the mean step would save if communication took no time, if the job is communication-bound; else nothing."""
    if job.attribution.slowdown < VERDICT.smallest_slowdown or not can_conclude(job, LossKind.COMMUNICATION):
        return []
    silent = (*ORIGINAL, SetCost(communication(), 0.0))
    exposed_s = job.attribution.original_s - mean_step_time(job.replay, silent)
    if exposed_s < DIAGNOSIS.communication_bound * job.attribution.recorded_s:
        return []
    return [LossWithCauses(LossKind.COMMUNICATION, exposed_s, (), 0.0)]


def loss_sentence(job: PipelineSubject, parts: Parts, losses: Sequence[LossWithCauses], gone_s: float) -> str:
    """What costs how much: named ranks, or for a loss that all ranks share, what the time goes to. Then the other
    causes.

    `losses`: those after the first are named if they or the first have no known cause. `gone_s`: what goes with all
    causes, seconds of the mean step.
    """
    loss, causes = losses[0], [cause for each in losses for cause in each.causes]
    beside = [other for other in losses[1:] if not loss.causes or not other.causes][:1]
    return "; ".join(_loss_words(job, parts, each, len(causes) - 1, gone_s) for each in (loss, *beside))


def _loss_words(job: PipelineSubject, parts: Parts, loss: LossWithCauses, further: int, gone_s: float) -> str:
    """What one loss costs, and what its first cause and `further` ones cost together, if that is more."""
    if not loss.causes:
        return rest_words(job, parts) or f"stragglers cost {part_of_step(job, loss.lost_s)} of each step"
    first = loss.causes[0]
    place, effect = job.names.place(first.where), main_clause(first.effect)
    in_seconds = loss.kind is not LossKind.STRAGGLER and not first.one_off
    alone, all_of_them = (
        (seconds(cost_s) if in_seconds else part_of_step(job, cost_s)) for cost_s in (first.saved_s, gone_s)
    )
    more = further and gone_s > first.saved_s and alone != all_of_them
    said = f"{alone} of the recording" if first.one_off else _share_of_step(job, first)
    if in_seconds:
        on = f" on {place.words}" if place else ""
        went_to = detector_of(first.kind).lost_to or _WENT_TO.get(loss.kind, "are lost")
        said = f"{alone} of every {seconds(job.recorded_s)} step {went_to}{on}: {effect}"
    elif place is not None:
        said = f"{place.words} {place.verb('costs', 'cost')} {said}: {effect}"
    else:
        said = f"{effect}, {said}" if first.one_off else f"{effect}, which costs {said}"
    return f"{said}; {all_of_them} together with {_others(further)}" if more else said


def _share_of_step(job: PipelineSubject, cause: Cause) -> str:
    """What a cause costs, over the steps since it began, or between its begin and its end: no step loses the mean over
    those with and without it, so where it comes and goes that is a share of the mean step.
    """
    time, acts = cause.time, acting(job, cause.time)
    if time is None or acts is None or cause.saved_when_acting_s is None:
        return f"{part_of_step(job, cause.saved_s)} of each step"
    step_s = max(job.attribution.recorded[acts].mean(), job.unchanged[acts].mean())
    if time.since_step is not None:
        return f"{part_of_step(job, cause.saved_when_acting_s, step_s)} of each step since step {time.since_step}"
    if time.period is None and is_run(time.slow_steps):
        return f"{part_of_step(job, cause.saved_when_acting_s, step_s)} of {steps_words(time.slow_steps)}"
    return f"{part_of_step(job, cause.saved_s)} of the mean step"


def part_of_step(job: PipelineSubject, lost_s: float, step_s: float | None = None) -> str:
    """A loss as a share of the step, of the mean one by default; in seconds, if it is not known what a step has."""
    if not job.shows(Fact.COMPUTE):
        return seconds(lost_s)
    return f"{lost_s / (step_s or job.recorded_s):.0%}"


def rest_words(job: PipelineSubject, parts: Parts) -> str | None:
    """What noise leaves of S, in words; None if there is nothing to say."""
    return parts.words(job.recorded_s, shares=job.shows(Fact.COMPUTE))


def _others(count: int) -> str:
    return f"{count} other causes" if count > 1 else "another cause"
