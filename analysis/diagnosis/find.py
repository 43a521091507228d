"""Why a job is slow: every cause whose signature shows and that costs time.

In: the assessment of a job. Out: `Cause`s, costliest first. Several may be true at the same time
and hide behind each other. So each candidate is priced by two replays: with only this cause gone (what fixing it
first saves), and with all others gone (what it still costs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.attribution.patterns import PATTERNS, TimePattern, isolated, pattern_of_series
from tracekit.analysis.detectors.detector import (
    FINDINGS,
    Advice,
    Candidate,
    Detector,
    Healthy,
    Unexplained,
    advice_text,
    detector_of,
    guarded,
    is_plug_in,
    loss_of,
    own_detectors,
    remedy_for,
)
from tracekit.analysis.evidence.subject import Cause, Subject
from tracekit.analysis.numeric.arrays import Bools, Floats, number
from tracekit.analysis.numeric.statistics import Estimate
from tracekit.base.text import cost, hidden, quoted, seconds, steps_text
from tracekit.report import conclusions
from tracekit.report.finding import NEEDS, Figure, LossKind, Place, SeenOnce, Unit, as_confidence
from tracekit.trace.facts import Fact

if TYPE_CHECKING:
    from tracekit.analysis.diagnosis.diagnosis import Assessment


class DiagnosisThresholds(Struct, frozen=True):
    """When causes hold, and which fixes are told. When candidates are reported: `FindingThresholds`."""

    #: A time pattern holds only if its steps have at least this share of what the cause costs. Definition: mostly.
    smallest_share_in_time: float = 0.5
    #: A loss was seen once if more than this share of it lies in one or two steps, beyond the others. Definition: most.
    most_of_it: float = 0.5
    #: Findings on a rank alone that cost a smaller share are not reported. Chosen: half of what `one-gpu` demands.
    smallest_cost_alone: float = 0.005
    #: A job that spends this share of its step in exposed communication is communication-bound. Chosen.
    communication_bound: float = 0.3
    #: Causes explain S if they cost at least this share of what stragglers cost. Definition: most.
    explained_share: float = 0.5
    #: Leave out fixes that save less than this share of the step. Chosen.
    smallest_saving: float = 0.01


DIAGNOSIS = DiagnosisThresholds()


def causes_of(assessed: Assessment, detectors: Sequence[Detector] | None = None) -> tuple[Cause, ...]:
    """The causes of the job's slowness, costliest first; one of kind `healthy` or `unexplained` if there is none.

    `detectors`: by default those of tracekit. Raises PlugInError for one of a plug-in that raises.
    """
    job, least_s = assessed.job, assessed.smallest_cost_s
    used = own_detectors(job.kind, job) if detectors is None else detectors
    usual = job.beyond_one_offs  # one or two steps show nothing that returns
    candidates: Sequence[Candidate] = []
    for detector in used:
        with guarded(detector.kind):
            looked_at = usual if detector.beyond_one_offs else job
            new = detector.find(looked_at.beyond_experts if detector.beyond_experts else looked_at)
            candidates = [*candidates, *(_of_plug_in(job, detector.kind, new) if is_plug_in(detector.kind) else new)]
    for detector in used:
        with guarded(detector.kind):
            candidates = list(detector.review(usual, candidates))
    candidates = [*candidates, *assessed.one_offs(candidates)]
    candidates = [each for each in candidates if can_conclude(job, loss_of(each))]
    candidates = one_at_a_place(job, candidates)
    named = [
        cause
        for cause in _priced(job, candidates)
        if cause.change is None or max(cause.saved_s, cause.alone_s) >= least_s
    ]
    # Causes that save time in the job as it is come before those that save time only once others are gone; what nobody
    # can act upon, because its name or price is not known, comes last unless it is more than all others together. What
    # was seen once comes behind what returns.
    told_s = sum(cause.worth_s for cause in named if not _untold(cause))
    named.sort(
        key=lambda cause: (
            _untold(cause) and cause.worth_s < told_s,
            cause.once is not None,
            -cause.worth_s if cause.saved_s >= least_s else 0.0,
            -cause.alone_s,
        )
    )
    if not any(cause.change for cause in named) and can_conclude(job, LossKind.STRAGGLER):
        named.append(_nothing_found(assessed))
    return tuple(_prerequisites_first(job, named))


def _prerequisites_first(job: Subject, named: Sequence[Cause]) -> Iterator[Cause]:
    """Yield findings in order, except that a costly finding that others depend on precedes them."""
    step, remaining = job.unprofiled_step, list(named)
    least_s = VERDICT.headline_share * (job.unchanged_s if step is None else step.value)
    while remaining:
        kinds = remaining[0].follows
        first = next((cause for cause in remaining if cause.kind in kinds and cause.worth_s >= least_s), remaining[0])
        remaining.remove(first)
        yield first


def one_at_a_place(job: Subject, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out candidates whose price a costlier one on the same ranks explains: signatures of one trouble overlap."""
    remaining = list(candidates)
    on_ranks = [
        each for each in candidates if each.change is not None and _ranks_of(each) and not is_plug_in(each.kind)
    ]
    alone = {_ranks_of(candidate) for candidate in on_ranks}
    if len(alone) == len(on_ranks) and not any(ranks < others for ranks in alone for others in alone):
        return remaining

    def on_other_ranks(ranks: frozenset[Any]) -> list[Any]:
        return [candidate.change for candidate in on_ranks if not _ranks_of(candidate) & ranks]

    def price_s(candidate: Candidate) -> float:
        others = on_other_ranks(_ranks_of(candidate))
        return float((job.step_times(others) - job.step_times((*others, candidate.change))).mean())

    costliest_first = sorted(on_ranks, key=lambda candidate: -price_s(candidate))
    for place, candidate in enumerate(costliest_first):
        ranks = _ranks_of(candidate)
        costlier = [other for other in costliest_first[:place] if other in remaining and ranks <= _ranks_of(other)]
        shares = (job.explained(candidate.change, other.change, on_other_ranks(_ranks_of(other))) for other in costlier)
        if not detector_of(candidate.kind).counted and any(share >= FINDINGS.most_of_price for share in shares):
            remaining.remove(candidate)
    return remaining


def _ranks_of(candidate: Candidate) -> frozenset[Any]:
    """The workers or ranks that a candidate is on; empty for the whole job, stages and links."""
    return frozenset(candidate.where.workers or candidate.where.ranks)


def can_conclude(job: Subject, kind: LossKind) -> bool:
    """Whether the source shows what a loss of this kind rests on."""
    return kind not in NEEDS or job.shows(NEEDS[kind])


def _untold(cause: Cause) -> bool:
    return cause.spent is not None and cause.spent.cannot_tell is not None


def _of_plug_in(job: Subject, kind: str, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates of a plug-in. Raises TypeError or ValueError for anything that no report can show."""
    for candidate in candidates:
        if not isinstance(candidate, Candidate) or candidate.kind != kind:
            raise TypeError(f"it found {quoted(candidate, 80)}; expected a Candidate of kind {kind!r}")
        words = (candidate.effect, candidate.title or "")
        advised = all(isinstance(said or "", str | Advice) for said in (candidate.next_check, candidate.suggested_fix))
        if not (isinstance(candidate.where, Place) and advised and all(isinstance(text, str) for text in words)):
            raise TypeError(f"expected a Place, and texts, in {quoted(candidate, 120)}")
        if not job.has(candidate.where):
            raise ValueError(f"it found something at {candidate.where}; the job has no such place")
        if not 0 <= candidate.confidence <= 1:
            raise ValueError(f"confidence {candidate.confidence}; expected a number from 0 to 1")
        if not all(isfinite(figure.value) for figure in candidate.evidence):
            raise ValueError("one of its figures is no number")
        yield candidate


def _priced(job: Subject, candidates: Sequence[Candidate]) -> list[Cause]:
    """Price each candidate."""
    costly = [candidate for candidate in candidates if candidate.change is not None]
    changes = [candidate.change for candidate in costly if candidate.change is not None]
    one_offs = [candidate.change for candidate in candidates if candidate.one_off]
    without_each = [_without(job, candidate, one_offs) for candidate in candidates]
    floor_s = float(job.step_times(changes).mean()) if len(changes) > 1 else 0.0
    causes = []
    for candidate, without in zip(candidates, without_each, strict=True):
        saved_s = alone_s = 0.0
        if without is not None:
            saved_s = job.unchanged_s - float(without.mean())
            others = [change for change in changes if change is not candidate.change]
            alone_s = float(job.step_times(others).mean()) - floor_s if others else saved_s
        causes.append(_cause(job, candidate, saved_s, alone_s, without))
    return causes


def _saves_step(job: Subject, candidate: Candidate) -> Estimate | None:
    """What the end of a candidate saves of a step without the profiler, and at most, seconds."""
    saves = job.saves_step((candidate.change,), bound=candidate.bound, after=candidate.after)
    most = None if candidate.most is None else job.saves_step((candidate.most,), after=candidate.after)
    return saves if saves is None or most is None else Estimate(saves.value, saves.low, max(saves.high, most.high))


def _without(job: Subject, candidate: Candidate, one_offs: Sequence[Any]) -> Floats | None:
    """Step times without a candidate, seconds, [steps]; None if the job has it whatever changes.

    What returns saves as much as in the job without `one_offs`, changes that end these: it did not make them longer.
    """
    if candidate.change is None:
        return None
    with guarded(candidate.kind):
        others = () if candidate.one_off else one_offs
        without = job.step_times((*others, candidate.change))
        if others:
            without = without + (job.unchanged - job.step_times(others))
        if is_plug_in(candidate.kind) and not (np.isfinite(without) & (without >= 0)).all():
            raise ValueError("after its change, some step time is negative or no number")
    return without


def acting(job: Subject, time: TimePattern | None) -> Bools | None:
    """The steps in which a cause with this time pattern acts, [steps]; None if that is all of them, or unknown."""
    if time is None:
        return None
    steps = np.asarray(job.steps)
    acts: Bools = np.isin(steps, time.slow_steps) if time.since_step is None else steps >= time.since_step
    return None if not acts.any() or acts.all() else acts


def _cause(
    job: Subject, candidate: Candidate, saved_s: float, alone_s: float, without_s: Floats | None = None
) -> Cause:
    """Return a candidate with its price, in words. `without_s`: as of `Cause`."""
    detector, where, on_cpus = detector_of(candidate.kind), candidate.where, not job.shows(Fact.GPUS)
    steps = [int(step) for step in job.steps]
    time = candidate.time or (None if candidate.series is None else _time_of(candidate.series, steps))
    saves = once = when_acting_s = None
    if without_s is not None:
        saves = _saves_step(job, candidate)
        if not hidden(saved_s, alone_s):  # what others hide shows in few steps, whenever it acts
            once = seen_once(*job.lost_by_step(candidate.change, without_s))
        acts, saved = acting(job, time), job.unchanged - without_s
        if acts is not None:
            gained = saved.clip(min=0)
            if gained[acts].sum() >= DIAGNOSIS.smallest_share_in_time * gained.sum():
                when_acting_s = float(saved[acts].mean())
            else:  # it costs most in other steps, as where a few are only the longest
                time = None
    most = "at most" if candidate.bound else "about"
    by_chance = detector.by_chance and not candidate.every_step
    return Cause(
        kind=candidate.kind,
        title=candidate.title or detector.title,
        where=where,
        where_text=str(where),
        since_step=since_step(where, time),
        when=f"in {steps_words(once.steps)}"
        if once is not None and job.whole == "step"
        else when(where, time, job.whole, by_chance=by_chance, of_one=len(steps) == 1),
        time=time,
        signature=candidate.signature or detector.signature,
        effect=candidate.effect,
        evidence=tuple(
            conclusions.EvidenceFigure(row.name, number(row.value), float(row.needed), row.unit, row.words)
            for row in candidate.evidence
        ),
        confidence=as_confidence(candidate.confidence),
        saved_s=saved_s,
        alone_s=alone_s,
        bound=candidate.bound,
        saved_when_acting_s=when_acting_s,
        refuted_by=candidate.refuted_by or detector.refuted_by,
        next_check=advice_text(candidate.next_check or detector.next_check, on_cpus=on_cpus),
        suggested_fix=remedy_for(candidate.suggested_fix or detector.suggested_fix, job.names, where, on_cpus=on_cpus),
        spent=candidate.spent,
        saves_step_s=saves,
        once=once,
        costs=cost(saved_s, alone_s, job.whole, bound=candidate.bound, on_average=when_acting_s is not None)
        if saves is None
        else f"costs {most} {seconds(saves.value)} a step without the profiler",
        priced=candidate.change is not None,
        change=candidate.change,
        without_s=without_s,
        one_off=candidate.one_off,
        every_step=candidate.every_step,
        follows=candidate.follows,
        excess=candidate.excess,
        slowest=candidate.slowest,
    )


def _time_of(series: Floats, steps: list[int]) -> TimePattern:
    """When a cause of this strength acts; one that becomes weaker at some step does not act since then."""
    pattern = pattern_of_series(series, steps)
    if pattern.since_step is None:
        return pattern
    since = steps.index(pattern.since_step)
    before, after = float(series[:since].mean()), float(series[since:].mean())
    if after > before:
        return pattern
    strong = tuple(steps[position] for position in np.flatnonzero(series > (before + after) / 2).tolist())
    return structs.replace(pattern, since_step=None, slow_steps=strong)


def _nothing_found(assessed: Assessment) -> Cause:
    """Return the finding to report if there is no other: healthy or unexplained."""
    job = assessed.job
    noise, share = job.noise, 1 - 1 / job.slowdown
    unexplained = job.straggling or noise.headline
    effect = f"ops that last longer than their ideal cost {max(share, 0.0):.1%} of the {job.whole}"
    if unexplained:
        effect = f"stragglers cost {share:.1%} of the {job.whole} and show none of the known signatures"
    candidate = Candidate(
        kind=Unexplained.kind if unexplained else Healthy.kind,
        where=Place(),
        effect=effect,
        evidence=(Figure("lost, compared with mean ops", max(share, 0.0), 1 - 1 / VERDICT.straggling, Unit.SHARE),),
        confidence=0.0 if unexplained else 1.0,
        change=None,
        next_check=assessed.undecided,
        title=None if unexplained or job.all_workers_traced else f"{Healthy.title} among the ranks that were recorded",
    )
    lost_s = noise.lost_s if unexplained else 0.0
    return structs.replace(_cause(job, candidate, lost_s, lost_s), confidence=candidate.confidence)


def seen_once(steps: Sequence[int], lost_s: Floats) -> SeenOnce | None:
    """The few steps that hold most of a loss; None if it recurs. `lost_s`: of each of `steps`, seconds, [steps]."""
    total_s = float(lost_s.clip(min=0).sum())
    for count in range(1, PATTERNS.most_steps + 1):
        alone = isolated(lost_s, count)
        if alone is not None and alone[1].sum() > DIAGNOSIS.most_of_it * total_s:
            largest, beyond_s, others_s = alone
            in_steps = tuple(int(steps[index]) for index in largest)
            return SeenOnce(in_steps, tuple(beyond_s.tolist()), others_s, len(steps))
    return None


def since_step(where: Place, time: TimePattern | None) -> int | None:
    """First step of a lasting change or of a run of slow steps; None: from the beginning."""
    if time is not None and time.since_step is not None:
        return time.since_step
    return where.steps[0] if where.steps else None


def is_run(steps: Sequence[int]) -> bool:
    """Whether these are several steps in a row."""
    return len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1


def steps_words(steps: Sequence[int]) -> str:
    """Ascending steps: "step 7", "steps 7 to 12", "steps 4 and 9", or "6 steps, 7 the first"."""
    if len(steps) == 2 and not is_run(steps):
        return f"steps {steps[0]} and {steps[1]}"
    in_a_row = len(steps) == 1 or is_run(steps)
    return steps_text(steps[0], steps[-1]) if in_a_row else f"{len(steps)} steps, {steps[0]} the first"


def when(where: Place, time: TimePattern | None, whole: str, *, by_chance: bool, of_one: bool) -> str:
    """When it acts. `whole`: what seconds are of, "step" or "recording"; `by_chance`: no step is certain to have it;
    `of_one`: one step was recorded.
    """
    if time is not None and time.period is not None:
        return f"every {time.period} steps"
    if time is not None and time.since_step is not None:
        return f"since step {time.since_step}"
    steps = where.steps or (() if time is None else time.slow_steps)
    if steps:
        return f"in {steps_words(steps)}"
    if whole != "step":
        return f"over the {whole}"
    if of_one:
        return "in the one step recorded"
    return "again and again" if by_chance else "in every step"
