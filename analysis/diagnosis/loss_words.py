"""What a kind of loss of a pipeline costs, in one sentence.

In: a pipeline and its losses. Out: sentences for the headline.
"""

from __future__ import annotations

from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.detectors.all_detectors import detector_of
from tracekit.analysis.diagnosis.assessment import LossWithCauses
from tracekit.analysis.diagnosis.course import is_run, steps_words
from tracekit.analysis.diagnosis.find import acting
from tracekit.analysis.evidence.cause import Cause
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.base.text import main_clause, seconds
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import Fact

#: How a sentence names the time of a loss that all ranks share, unless its leading finding does.
_WENT_TO = {
    LossKind.INPUT: "are spent waiting for data",
    LossKind.HOST: "go to launches and host work",
    LossKind.COMMUNICATION: "go to communication",
    LossKind.STALLS: "are lost to pauses and stalls",
    LossKind.EVALUATION: "go to evaluation",
}


def loss_sentence(job: PipelineSubject, parts: Parts, loss: LossWithCauses, *others: LossWithCauses) -> str:
    """What costs how much: named ranks, or for a loss that all ranks share, what the time goes to. Then the other
    causes.

    `others`: further losses, named if they or `loss` have no known cause.
    """
    step_s = job.recorded_s
    beside = [other for other in others if not loss.causes or not other.causes][:1]
    if beside:
        return f"{loss_sentence(job, parts, loss)}; {loss_sentence(job, parts, *beside)}"
    if not loss.causes:
        return rest_words(job, parts) or f"stragglers cost {part_of_step(job, loss.lost_s)} of each step"
    first, more = loss.causes[0], len(loss.causes) - 1
    place, effect = job.names.place(first.where), main_clause(first.effect)
    if loss.kind is not LossKind.STRAGGLER:
        on = f" on {place.words}" if place else ""
        went_to = detector_of(first.kind).lost_to or _WENT_TO.get(loss.kind, "are lost")
        with_others = f"; {seconds(loss.explained_s)} together with {_others(more)}" if more else ""
        return f"{seconds(first.saved_s)} of every {seconds(step_s)} step {went_to}{on}: {effect}{with_others}"
    share = _share_of_step(job, first)
    said = f"{effect}, which costs {share}"
    if place is not None:
        said = f"{place.words} {place.verb('costs', 'cost')} {share}: {effect}"
    if more:
        said += f"; {part_of_step(job, loss.explained_s)} together with {_others(more)}"
    return said


def _share_of_step(job: PipelineSubject, cause: Cause) -> str:
    """What a cause costs, over the steps since it began, or between its begin and its end: no step loses the mean over
    those with and without it.
    """
    time, acts = cause.time, acting(job, cause.time)
    if time is None or acts is None or cause.saved_when_acting_s is None:
        return f"{part_of_step(job, cause.saved_s)} of each step"
    step_s = max(job.attribution.recorded[acts].mean(), job.unchanged[acts].mean())
    if time.since_step is not None:
        return f"{part_of_step(job, cause.saved_when_acting_s, step_s)} of each step since step {time.since_step}"
    if time.period is None and is_run(time.slow_steps):
        return f"{part_of_step(job, cause.saved_when_acting_s, step_s)} of {steps_words(time.slow_steps)}"
    return f"{part_of_step(job, cause.saved_s)} of each step"


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
