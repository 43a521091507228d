"""The first line of a report: what kind of loss a job has, and how much.

In: `Evidence` of a job and its causes. Out: a `Verdict`. S measures stragglers only: a job whose ranks all wait for
data loses most of its time but has S = 1. So the verdict names the kind of loss that costs most, whether one rank or
all ranks have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.attribution.attribution import (
    LARGEST_DISCREPANCY,
    SMALLEST_HEADLINE_SHARE,
    SMALLEST_SLOWDOWN,
    STRAGGLING_SLOWDOWN,
)
from tracekit.analysis.attribution.chance import SMALLEST_UNEXPLAINED, Parts
from tracekit.analysis.detectors.registry import detector_of
from tracekit.analysis.diagnosis.find import can_conclude
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.whatif.interventions import (
    Intervention,
    NoDelays,
    NoOverlap,
    SetCost,
    mean_step_time,
    step_times,
)
from tracekit.analysis.whatif.paper import IDEAL, ORIGINAL
from tracekit.analysis.whatif.selection import communication
from tracekit.analysis.whatif.selection import kind as kind_of
from tracekit.base.text import main_clause, seconds
from tracekit.report.finding import Finding
from tracekit.report.verdict import Loss, LossKind, Verdict
from tracekit.trace.facts import Fact

#: A job that spends this share of its step in exposed communication is communication-bound.
COMMUNICATION_BOUND_SHARE = 0.3
#: Causes explain S if they cost at least this share of what stragglers cost.
EXPLAINED_SHARE = 0.5


#: How a sentence names the time of a loss that all ranks share, unless its leading finding does.
_WENT_TO = {
    LossKind.INPUT: "are spent waiting for data",
    LossKind.HOST: "go to launches and host work",
    LossKind.COMMUNICATION: "go to communication",
    LossKind.STALLS: "are lost to pauses and stalls",
    LossKind.EVALUATION: "go to evaluation",
}


class _Headline(Struct, frozen=True):
    """The kind of loss to name, its cost in seconds of the mean step, and the sentence about it."""

    kind: LossKind
    lost_s: float
    sentence: str


def verdict_of(evidence: Evidence, causes: Sequence[Finding]) -> Verdict:
    """The verdict on a job with these causes."""
    found = evidence.attribution
    gone, parts = _gone(evidence, causes), parts_of(evidence, causes)
    losses = _losses(evidence, causes, gone, parts)
    lost_s = _lost_s(losses, gone)
    if not found.straggling and lost_s < SMALLEST_HEADLINE_SHARE * found.recorded_s:
        losses = [*_exposed_communication(evidence), *losses]
        lost_s = _lost_s(losses, gone)
    share, headline = lost_s / evidence.recorded_s, _headline(evidence, losses, lost_s, float(gone.mean()), parts)
    of_kind = losses[:1] if headline.kind is LossKind.MINOR else losses
    leading = next((loss.causes for loss in of_kind if headline.kind in {loss.kind, LossKind.MINOR}), ())
    label = detector_of(leading[0].kind).label if headline.kind is LossKind.STRAGGLER and leading else None
    rest = _rest(evidence, parts) or ""
    once_s = sum((1 - cause.returning_share) * cause.saved_s for cause in causes)
    return Verdict(
        kind=headline.kind,
        label=label or str(headline.kind),
        headline_s=headline.lost_s,
        lost_s=lost_s,
        share=share,
        step_lost_s=_step_lost_s(evidence, gone, lost_s),
        lost_gpu_hours=lost_s * len(found.steps) * found.world_size / 3600,
        lost_gpu_hours_per_day=max(lost_s - once_s, 0.0) / evidence.recorded_s * found.world_size * 24,
        sentence=headline.sentence if rest in headline.sentence else f"{headline.sentence}; {rest}",
        confidence=leading[0].confidence if leading else None,
        losses=tuple(losses),
        parts=parts,
        of_mean_ops=lost_s == straggling_s(evidence, causes, parts),
    )


def parts_of(evidence: Evidence, causes: Sequence[Finding]) -> Parts:
    """What the loss that S measures consists of."""
    noise, found = evidence.noise, evidence.attribution
    if noise.unexplained_s < SMALLEST_UNEXPLAINED * noise.step_s:  # there is nothing for causes to explain
        return noise
    return Parts.of(found.original, found.ideal, evidence.noisy, _explained_of_s(evidence, causes))


def _gone(evidence: Evidence, causes: Sequence[Finding]) -> Floats:
    """Seconds of each step that go when all causes go together, [steps]."""
    changes = [cause.change for cause in causes if cause.change is not None]
    if not changes:
        return np.zeros(len(evidence.unchanged))
    return np.asarray(evidence.unchanged - step_times(evidence.replay, changes))


def _losses(evidence: Evidence, causes: Sequence[Finding], gone: Floats, parts: Parts) -> list[Loss]:
    """The cost of each kind of loss; the kind whose fix saves most in the job as it is comes first."""
    by_kind: dict[LossKind, list[Finding]] = {}
    for cause in causes:
        if cause.change is not None:
            by_kind.setdefault(detector_of(cause.kind).loss_at(cause.where), []).append(cause)
    losses = []
    for kind, members in by_kind.items():
        of_kind = gone if len(by_kind) == 1 else _gone(evidence, members)
        gone_s = max(float(of_kind.mean()), 0.0)
        losses.append(Loss(kind, gone_s, tuple(members), gone_s))
    by_s = straggling_s(evidence, causes, parts)
    none = Loss(LossKind.STRAGGLER, 0.0, (), 0.0)
    stragglers = next((loss for loss in losses if loss.kind is LossKind.STRAGGLER), none)
    others = [loss for loss in losses if loss.kind is not LossKind.STRAGGLER]
    if by_s and (stragglers.causes or not _explained(evidence, others, by_s)):
        # S compares with a mean that includes the slow ranks, so with few ranks one slow rank loses more than S says.
        left_s = max(by_s - float(_explained_of_s(evidence, stragglers.causes).mean()), 0.0)
        if stragglers.causes and left_s < SMALLEST_HEADLINE_SHARE * evidence.recorded_s:
            left_s = 0.0  # as in a healthy job, whose ops differ from their mean, too
        lost_s = stragglers.explained_s + left_s
        if others and stragglers.causes:
            lost_s = min(lost_s, _beside(evidence, losses))
        losses = [*others, replace(stragglers, lost_s=lost_s)]
    # A loss with a known cause outweighs one without.
    weight_s = {loss.kind: loss.explained_s if loss.causes else EXPLAINED_SHARE * loss.lost_s for loss in losses}
    return sorted(losses, key=lambda loss: (-weight_s[loss.kind], -loss.lost_s))


def _explained(evidence: Evidence, others: Sequence[Loss], by_s: float) -> bool:
    """Whether losses of other kinds, alone or together, explain most of what S says is lost."""
    may_explain = [loss for loss in others if not any(_done_for_all(cause) for cause in loss.causes)]
    if max((loss.lost_s for loss in may_explain), default=0.0) >= EXPLAINED_SHARE * by_s:
        return True
    causes = [cause for loss in may_explain for cause in loss.causes]
    return float(_explained_of_s(evidence, causes).mean()) >= EXPLAINED_SHARE * by_s


def _done_for_all(cause: Finding) -> bool:
    """Whether a cause is planned work of the training loop, done by one rank for all or by every rank."""
    return cause.change is not None and not cause.where.workers and detector_of(cause.kind).planned is not None


def _explained_of_s(evidence: Evidence, causes: Sequence[Finding]) -> Floats:
    """The seconds of S that go when the causes go, [steps].

    S ignores launch delays and overlap between steps: a cause that hides behind either costs less in the job as it is.
    """
    plain: list[Intervention] = [NoDelays(), NoOverlap()]
    changes = [cause.change for cause in causes if cause.change is not None]
    if not changes:
        return np.zeros(len(evidence.unchanged))
    with_s, without_s = (step_times(evidence.replay, some) for some in (plain, [*plain, *changes]))
    return np.asarray(with_s - without_s)


def _beside(evidence: Evidence, losses: Sequence[Loss]) -> float:
    """Seconds of the mean step that stragglers cost in addition to other losses, which S counts too if ops take longer.

    The larger of their cost in the job as it is and their cost once the other causes are gone.
    """
    changes = {loss.kind: [cause.change for cause in loss.causes if cause.change is not None] for loss in losses}
    others = [change for kind, mine in changes.items() if kind is not LossKind.STRAGGLER for change in mine]
    everything = [*others, *changes[LossKind.STRAGGLER]]
    alone_s = step_times(evidence.replay, others).mean() - step_times(evidence.replay, everything).mean()
    as_it_is_s = next(loss.lost_s for loss in losses if loss.kind is LossKind.STRAGGLER)
    return max(as_it_is_s, float(alone_s))


def straggling_s(evidence: Evidence, causes: Sequence[Finding], parts: Parts) -> float:
    """Seconds of a step that stragglers cost by S, compared with mean ops and without launch delays; 0 below S = 1.1 if
    causes and noise explain it.

    S also counts the time that the others wait for the checkpoint or evaluation of one rank. If `causes` names it, it
    is subtracted.
    """
    found = evidence.attribution
    if not found.straggling and not parts.headline:
        return 0.0
    planned = [detector_of(cause.kind).planned for cause in causes if _done_for_all(cause)]
    if not planned:
        return found.original_s - found.ideal_s
    without = SetCost(kind_of(*filter(None, planned)), 0.0)
    original_s, ideal_s = (mean_step_time(evidence.replay, (*base, without)) for base in (ORIGINAL, IDEAL))
    straggling = original_s >= STRAGGLING_SLOWDOWN * ideal_s or parts.headline
    return original_s - ideal_s if straggling else 0.0


def _lost_s(losses: Sequence[Loss], gone: Floats) -> float:
    """Total loss, seconds of a step: what goes when all causes go, but at least the largest single loss."""
    if len(losses) <= 1:
        return losses[0].lost_s if losses else 0.0
    return max(float(gone.mean()), *(loss.lost_s for loss in losses))


def _step_lost_s(evidence: Evidence, gone: Floats, lost_s: float) -> Floats:
    """What each step loses, [steps]: what goes with the causes; the rest as S, or if S sees none, as the steps last."""
    found, gone = evidence.attribution, gone.clip(min=0)
    if gone.mean() > lost_s:
        return np.asarray(gone * (lost_s / gone.mean()))
    rest = (found.original - found.ideal).clip(min=0)
    if not rest.any():
        rest = found.recorded
    return np.asarray(gone + (lost_s - gone.mean()) * rest / rest.mean())


def _headline(evidence: Evidence, losses: Sequence[Loss], lost_s: float, gone_s: float, parts: Parts) -> _Headline:
    """The kind of loss to name, its cost, and the sentence about it. `gone_s`: as in `_together`."""
    found = evidence.attribution
    if losses and not losses[0].causes and losses[0].kind is LossKind.COMMUNICATION:
        step, exposed = seconds(found.recorded_s), seconds(losses[0].lost_s)
        return _Headline(
            LossKind.COMMUNICATION,
            losses[0].lost_s,
            f"{exposed} of every {step} step are communication that no compute hides",
        )
    if losses and (losses[0].lost_s >= SMALLEST_HEADLINE_SHARE * found.recorded_s or found.straggling):
        costliest_s = max((cause.saved_s for cause in losses[0].causes), default=0.0)
        hiding = losses[0].causes and losses[0].causes[0].hidden
        alone = sum(len(loss.causes) for loss in losses) == 1
        if not hiding or alone or costliest_s >= SMALLEST_HEADLINE_SHARE * found.recorded_s:
            return _Headline(losses[0].kind, losses[0].lost_s, _loss_sentence(evidence, parts, *losses))
    if losses and (lost_s >= SMALLEST_HEADLINE_SHARE * found.recorded_s or found.straggling):
        return _together(evidence, losses, lost_s, gone_s)
    if found.slowdown < SMALLEST_SLOWDOWN:
        return _Headline(
            LossKind.CONTRADICTION,
            0.0,
            f"without stragglers the job would be slower than it is (slowdown {found.slowdown:.2f}), which cannot be",
        )
    kind, of_kind_s = LossKind.BALANCED, 0.0
    sentence = f"no straggler (slowdown {found.slowdown:.3f})"
    if evidence.shows(Fact.COMPUTE):
        sentence += f", and nothing costs {SMALLEST_HEADLINE_SHARE:.0%} of the step"
    little = f"; no cause costs {SMALLEST_HEADLINE_SHARE:.0%} or more" if evidence.shows(Fact.COMPUTE) else ""
    if rest := _rest(evidence, parts):
        sentence = f"slowdown {found.slowdown:.3f}: {rest}{little}"
    if losses and losses[0].causes and not losses[0].causes[0].hidden:
        kind, of_kind_s = LossKind.MINOR, losses[0].lost_s
        sentence = f"{_loss_sentence(evidence, parts, losses[0])}{little}"
    left = evidence.delay_share_without([cause.change for loss in losses for cause in loss.causes if cause.change])
    if left > LARGEST_DISCREPANCY and evidence.shows(Fact.COMPUTE):
        sentence += f"; launch delays that no cause explains add {left:.0%} to the step"
    return _Headline(kind, of_kind_s, sentence)


def _loss_sentence(evidence: Evidence, parts: Parts, loss: Loss, *others: Loss) -> str:
    """What costs how much: named ranks, or for a loss that all ranks share, what the time goes to. Then the other
    causes.

    `others`: further losses, named if they or `loss` have no known cause.
    """
    step_s = evidence.recorded_s
    beside = [other for other in others if not loss.causes or not other.causes][:1]
    if beside:
        return f"{_loss_sentence(evidence, parts, loss)}; {_loss_sentence(evidence, parts, *beside)}"
    if not loss.causes:
        return _rest(evidence, parts) or f"stragglers cost {_part(evidence, loss.lost_s)} of each step"
    first, more = loss.causes[0], len(loss.causes) - 1
    place, effect = evidence.names.place(first.where), main_clause(first.effect)
    if loss.kind is not LossKind.STRAGGLER:
        on = f" on {place.words}" if place else ""
        went_to = detector_of(first.kind).lost_to or _WENT_TO.get(loss.kind, "are lost")
        with_others = f"; with {_others(more)} {seconds(loss.explained_s)}" if more else ""
        return f"{seconds(first.saved_s)} of every {seconds(step_s)} step {went_to}{on}: {effect}{with_others}"
    share = _share_of_step(evidence, first)
    said = f"{effect}, which costs {share}"
    if place is not None:
        said = f"{place.words} {place.verb('costs', 'cost')} {share}: {effect}"
    if more:
        said += f"; with {_others(more)} {_part(evidence, loss.explained_s)}"
    return said


def _share_of_step(evidence: Evidence, cause: Finding) -> str:
    """What a cause costs, over the steps since it began: no step loses the mean over those before and after."""
    since = None if cause.time is None else cause.time.since_step
    if since is None or cause.saved_when_acting_s is None:
        return f"{_part(evidence, cause.saved_s)} of each step"
    acts = np.asarray(evidence.attribution.steps) >= since
    step_s = max(evidence.attribution.recorded[acts].mean(), evidence.unchanged[acts].mean())
    return f"{_part(evidence, cause.saved_when_acting_s, step_s)} of each step since step {since}"


def _part(evidence: Evidence, lost_s: float, step_s: float | None = None) -> str:
    """A loss as a share of the step, of the mean one by default; in seconds, if it is not known what a step has."""
    if not evidence.shows(Fact.COMPUTE):
        return seconds(lost_s)
    return f"{lost_s / (step_s or evidence.recorded_s):.0%}"


def _rest(evidence: Evidence, parts: Parts) -> str | None:
    return parts.words(evidence.recorded_s, shares=evidence.shows(Fact.COMPUTE))


def _others(count: int) -> str:
    return f"{count} other causes" if count > 1 else "another cause"


def _together(evidence: Evidence, losses: Sequence[Loss], lost_s: float, gone_s: float) -> _Headline:
    """The headline for causes that each cost little, often because they hide behind each other, but much together.

    `gone_s`: what goes with all of them, seconds of the mean step.
    """
    causes = [cause for loss in losses for cause in loss.causes]
    told = [(evidence.names.place(cause.where), main_clause(cause.effect)) for cause in causes[:2]]
    named = "; ".join(f"{place.words}: {effect}" if place else effect for place, effect in told)
    more = f"; and {len(causes) - 2} more" if len(causes) > 2 else ""
    cost = _part(evidence, min(lost_s, gone_s))
    sentence = f"{len(causes)} causes cost {cost} of each step together, each alone little: {named}{more}"
    return _Headline(losses[0].kind, lost_s, sentence)


def _exposed_communication(evidence: Evidence) -> list[Loss]:
    """What the mean step would save if communication took no time, if the job is communication-bound; else nothing."""
    if evidence.attribution.slowdown < SMALLEST_SLOWDOWN or not can_conclude(evidence, LossKind.COMMUNICATION):
        return []
    silent = (*ORIGINAL, SetCost(communication(), 0.0))
    exposed_s = evidence.attribution.original_s - mean_step_time(evidence.replay, silent)
    if exposed_s < COMMUNICATION_BOUND_SHARE * evidence.attribution.recorded_s:
        return []
    return [Loss(LossKind.COMMUNICATION, exposed_s, (), 0.0)]
