"""A diagnosis: its findings, its priced fixes, its verdict and its answer in words; and how those of pipelines, op
graphs and post-training differ.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct, structs

from tracekit.analysis.attribution.attribution import Parts, ReplayTrust
from tracekit.analysis.attribution.patterns import Stall
from tracekit.analysis.detectors.detector import (
    Candidate,
    Detector,
    PlugInError,
    detector_of,
    detectors,
    is_plug_in,
    left_out,
    own_detectors,
)
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.price import PricedFix, act_of, assumed_by, best_fix, first_fix, fixes_of
from tracekit.analysis.evidence.subject import Cause, JobKind, Plan, Subject
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.plug_ins import in_words, tell
from tracekit.base.text import code_name, main_clause, of_whole, seconds, sure, three_digits, with_error
from tracekit.report.conclusions import Answer, CauseInWords, Culprit, Finding, Loss, LossParts, Patterns, Verdict
from tracekit.report.finding import LossKind
from tracekit.report.hardware import MetricsInReport
from tracekit.report.tables import encoded
from tracekit.trace.facts import SAMPLED, Fact, gpu_uuids

if TYPE_CHECKING:
    from tracekit.analysis.metrics.samples import MetricSource


class Diagnosis(Struct, frozen=True, eq=False):
    """When, where and why a job is slow, what each fix would save, and whether to believe it.

    `headline`: what the verdict follows from. `answer`: all of it in a few sentences. `stalls`: isolated slow steps.
    `trust`: as that of the attribution, except that launch delays that a named cause explains do not count against the
    replay. `problems`: why plug-ins were left out; `failed`: the kinds of those that failed on this job.
    """

    trust: ReplayTrust
    answer: Answer
    headline: NamedLoss
    verdict: Verdict
    causes: tuple[Cause, ...]
    fixes: tuple[PricedFix, ...]
    patterns: Patterns
    stalls: tuple[Stall, ...] = ()
    problems: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    metrics: MetricsInReport | None = None


class LossWithCauses(Struct, frozen=True, eq=False):
    """The cost of one kind of loss, seconds of the mean step, and its causes in the order in which to address them.

    `explained_s`: the part of `lost_s` that goes when these causes go; the rest has no known cause. `alone_s`: what it
    costs by itself, None if it shares no time with other kinds.
    """

    kind: LossKind
    lost_s: float
    causes: tuple[Cause, ...]
    explained_s: float
    alone_s: float | None = None


class NamedLoss(Struct, frozen=True, eq=False):
    """The kind of loss to name, and the sentence about it.

    `headline_s`: what that kind costs; `lost_s`: what the job loses in all, of `whole_s`, of which `returning_s` will
    be lost again; seconds of the mean step, or of the recording. `step_lost_s`: what each step loses, seconds, [steps].
    `leading`: the findings that cause it, the costliest first. `losses`: each kind of loss, the one to name first.
    `parts`: what S consists of. `of_mean_ops`: whether the loss is relative to ops of mean duration.
    """

    kind: LossKind
    sentence: str
    headline_s: float
    lost_s: float
    whole_s: float
    returning_s: float
    step_lost_s: Floats
    leading: Sequence[Cause]
    losses: tuple[LossWithCauses, ...]
    parts: Parts
    of_mean_ops: bool = False

    @property
    def share(self) -> float:
        """The total loss, of the whole."""
        return self.lost_s / self.whole_s

    @property
    def returning_share(self) -> float:
        """The share of the whole that is lost again in other steps."""
        return self.returning_s / self.whole_s

    @property
    def first_cause(self) -> Cause | None:
        """The first cause of the largest loss that has one; None if no loss has a known cause."""
        return next((cause for loss in self.losses for cause in loss.causes), None)


def _formula(job: Subject, headline: NamedLoss) -> str:
    """What the total loss is the value of; without a cause, ranks run at the pace of their peers, but in pipelines."""
    losses, formula = headline.losses, "T(kept) - T(kept, without the named causes)"
    first, by_rank = next(iter(losses), None), job.kind is not JobKind.PIPELINE
    if headline.of_mean_ops or first is None:
        return "T(original) - T(ideal)"
    if first.kind is LossKind.COMMUNICATION and not first.causes:
        return "T(original) - T(original, communication takes no time)"
    if by_rank and first.causes and first.causes[0].where.ranks:
        return "T(kept) - T(kept, this rank at the pace of its peers)"
    if job.whole == "recording" and first.causes:
        return "what the first cause costs, see Cause"
    return formula if len(losses) == 1 else f"the most of {formula} and what one kind of loss costs"


class Assessment(Struct, frozen=True, eq=False):
    """A job, and how jobs of its shape are assessed."""

    job: Subject

    @property
    @abstractmethod
    def smallest_cost_s(self) -> float:
        """Findings that cost less, gone alone or with all others gone, are not reported, seconds."""

    def reported(self, findings: Sequence[Cause]) -> tuple[Cause, ...]:
        """Return the findings to report, in this order."""
        return tuple(findings)

    def one_offs(self, candidates: Sequence[Candidate]) -> Iterable[Candidate]:
        """Return what stands apart in one or two steps, but for what `candidates` explain."""
        del candidates
        return ()

    @property
    def undecided(self) -> str | None:
        """What looks slow, but no slower than chance explains, and what would tell."""
        return None

    def ordered(self, causes: tuple[Cause, ...], fixes: Sequence[PricedFix]) -> tuple[Cause, ...]:
        """Return the causes in the order in which to address them."""
        del fixes
        return causes

    def plans(self, causes: Sequence[Cause]) -> Iterable[Plan]:
        """Return plans besides those of each cause: for several causes together, and what any job can try."""
        del causes
        return ()

    @abstractmethod
    def withheld(self, causes: Sequence[Cause]) -> str | None:
        """Return why no saving can be reported; None if it can."""

    def promised(self, fix: PricedFix) -> PricedFix:
        """Return a fix with the saving that can be promised."""
        return fix

    @abstractmethod
    def headline(self, causes: Sequence[Cause]) -> NamedLoss:
        """Return what the job loses to these causes."""

    @abstractmethod
    def trust(self, causes: Sequence[Cause]) -> ReplayTrust:
        """Return whether the numbers can be trusted, given these causes."""

    @abstractmethod
    def fit(self, trust: ReplayTrust) -> str:
        """Return how well the replay fits the recording, if it is trusted, in words."""

    def seen(self, finding: Cause) -> str:
        """Return where exactly a finding is, and when it acts, in words that follow its place."""
        return f", {finding.when}"

    @property
    def stalls(self) -> tuple[Stall, ...]:
        """The single slow steps."""
        return ()

    @property
    def patterns(self) -> Patterns:
        """When and where the job loses time."""
        return Patterns(None, None)


def changes_of(causes: Iterable[Cause]) -> list[Any]:
    """Return the changes that undo these causes; a fault of the trace has none."""
    return [cause.change for cause in causes if cause.change is not None]


def doubts_of(causes: Iterable[Cause]) -> tuple[str, ...]:
    """Why a report with these causes cannot be trusted: loads of experts that are not known."""
    return tuple(cause.effect for cause in causes if cause.kind == "unknown-loads")


def diagnose(assessed: Assessment, metrics: MetricSource | None = None) -> Diagnosis:
    """Diagnose a job: what it loses, why, and what each fix would save. Plug-ins that fail are left out.

    `metrics`: what to ask about the machines of culprits.
    """
    used, problems = detectors(assessed.job.kind, assessed.job), left_out()
    failed: tuple[str, ...] = ()
    while True:
        plugged = [detector.kind for detector in used if is_plug_in(detector.kind)]
        try:
            diagnosis = _diagnosed(assessed, used, metrics)
            if plugged:
                _check(cause for cause in diagnosis.causes if cause.kind in plugged)
        except PlugInError as failure:
            plugged, problem = [failure.kind], str(failure)
        except Exception as failure:
            if not plugged:
                raise
            # Raises, too, unless a plug-in is to blame.
            _ = _diagnosed(assessed, own_detectors(assessed.job.kind, assessed.job), metrics)
            problem = f"a finding of detector {' or '.join(map(repr, plugged))} cannot be used ({in_words(failure)})"
        else:
            tell(problems)
            return structs.replace(diagnosis, problems=problems, failed=failed)
        used = tuple(detector for detector in used if detector.kind not in plugged)
        problems, failed = (*problems, f"{problem}; this report leaves it out"), (*failed, *plugged)


def _check(causes: Iterable[Cause]) -> None:
    """Raise an exception for a cause that no output can show."""
    for cause in causes:
        msgspec.json.decode(encoded(cause.finding), type=Finding)


def _diagnosed(assessed: Assessment, detectors: Sequence[Detector], metrics: MetricSource | None) -> Diagnosis:
    job = assessed.job
    _ = job.noise  # takes most memory, so it comes before the grids that detectors keep
    findings, tests_of_metrics = assessed.reported(causes_of(assessed, detectors)), None
    if metrics is not None or {SAMPLED, "gpus"} & job.metadata.keys():
        from tracekit.analysis.diagnosis.testimony import reviewed  # only if there is somebody to ask

        findings, tests_of_metrics = reviewed(job, findings, metrics)
    fixes = fixes_of(assessed, findings)
    causes = assessed.ordered(findings, fixes)
    trust, headline = assessed.trust(causes), assessed.headline(causes)
    leading = headline.first_cause
    best = None if leading is None else first_fix(leading, fixes)
    answer = answer_of(assessed, headline, causes, fixes, best, trust)
    begin = next((place for place, fix in enumerate(fixes) if fix is best), None)
    return Diagnosis(
        trust=trust,
        answer=answer,
        headline=headline,
        stalls=assessed.stalls,
        verdict=verdict_of(job, headline, causes, begin, answer),
        patterns=assessed.patterns,
        causes=causes,
        fixes=fixes,
        metrics=tests_of_metrics,
    )


def verdict_of(
    job: Subject, headline: NamedLoss, causes: Sequence[Cause], begin: int | None, answer: Answer
) -> Verdict:
    """Return the verdict on a job with this headline. `begin`: the place of the fix to begin with.

    S measures stragglers only: a job whose ranks all wait for data loses most of its time but has S = 1. So the verdict
    names the kind of loss that costs most, whether one rank or all ranks have it.
    """
    leading = headline.leading[0] if headline.leading else None
    label = None if leading is None or headline.kind is not LossKind.STRAGGLER else detector_of(leading.kind).label
    parts = headline.parts
    return Verdict(
        kind=headline.kind,
        label=label or str(headline.kind),
        headline_s=headline.headline_s,
        lost_s=headline.lost_s,
        share=headline.share,
        lost_gpu_hours=None if job.gpus is None else headline.lost_s * len(job.steps) * job.gpus / 3600,
        lost_gpu_hours_per_day=job.gpu_hours_per_day(headline.returning_share),
        sentence=headline.sentence,
        confidence=None if leading is None else leading.confidence,
        losses=[
            Loss(
                loss.kind,
                loss.lost_s,
                [causes.index(cause) for cause in loss.causes],
                loss.explained_s,
                UNSET if loss.alone_s is None else loss.alone_s,
            )
            for loss in headline.losses
        ],
        parts=LossParts(parts.lost_s, parts.explained_s, parts.noise_s, parts.unexplained_s, parts.error_s),
        of_mean_ops=headline.of_mean_ops,
        first_fix=begin,
        who=answer.who,
        cost=answer.cost,
        action=answer.action,
        formula=_formula(job, headline),
    )


def answer_of(
    assessed: Assessment,
    headline: NamedLoss,
    causes: Sequence[Cause],
    fixes: Sequence[PricedFix],
    best: PricedFix | None,
    trust: ReplayTrust,
) -> Answer:
    """Return the answer for a diagnosed job. `best`: the fix to begin with.

    All surfaces show these sentences; none of them interprets a figure itself.
    """
    job, leading = assessed.job, headline.first_cause
    return Answer(
        headline=headline.sentence,
        cost=_cost(job, headline, causes, leading) if headline.lost_s > 0 else None,
        who=None if leading is None else _who(assessed, leading, trusted=trust.trustworthy),
        why=None if leading is None else leading.effect,
        check=None if leading is None else leading.next_check,
        fix=None if leading is None else _fix(job, leading, best),
        action=None if leading is None else act_of(leading, best),
        saves=None if leading is None or best is None else _saves(job, leading, best),
        others=tuple(_other(job, cause) for cause in causes if cause is not leading and _costs(cause)),
        stalls=tuple(f"step {stall.step}: +{seconds(stall.extra_s)}, {stall.part}" for stall in assessed.stalls),
        causes=tuple(cause_words(job, cause) for cause in causes),
        places=tuple(_place(job, cause) for cause in causes),
        trust=assessed.fit(trust) if trust.trustworthy else "; ".join(trust.reasons),
        culprits=tuple(_culprits(assessed, causes)),
        accounts=tuple(_accounts(assessed, causes, leading, fixes)),
    )


def _costs(cause: Cause) -> bool:
    """Whether a cause costs time: without the profiler, another limit may hide all of it."""
    return cause.change is not None and (cause.saves_step_s is None or cause.saves_step_s.high > 0)


def _cost(job: Subject, headline: NamedLoss, causes: Sequence[Cause], leading: Cause | None) -> str:
    # The saving is another figure: compared with its peers, a slow rank loses more than compared with the mean that
    # includes it.
    than = ", compared with mean ops;" if headline.of_mean_ops else ","
    which = "the mean" if any(cause.saved_when_acting_s is not None for cause in causes[:1]) else "every"
    whole_s = seconds(headline.lost_s / headline.share)
    whole = f"{which} {whole_s} step" if job.whole == "step" else f"the {whole_s} recorded"
    if job.whole == "step" and len(job.steps) == 1:
        whole = f"the one {whole_s} step recorded"
    most = "at most " * (leading is not None and leading.bound)
    if leading is not None and leading.once is not None:
        recorded_s = seconds(job.recorded_s)
        recorded = f"the mean {recorded_s} step" if job.whole == "step" else f"the {recorded_s} recorded"
        return f"{most}{seconds(leading.saved_s)} of {recorded}, seen once"
    if not job.shows(Fact.COMPUTE):
        return f"{most}{seconds(headline.lost_s)} {of_whole(job.whole)}{than.rstrip(',;')}"
    step, lost = job.unprofiled_step, seconds(headline.lost_s)
    in_few_steps = step is not None and headline.lost_s > step.value * job.steps_in_whole
    if step is not None and not in_few_steps:
        lost = seconds(headline.lost_s / job.steps_in_whole)
        most, whole = most or "about ", f"every step of {job.unprofiled_step_words} without the profiler"
    if in_few_steps or not job.daily or job.gpus is None:
        return f"{most}{lost} of {whole}{than.rstrip(',;')}"
    return (
        f"{most}{lost} of {whole}{than}"
        f" {three_digits(headline.returning_share * job.gpus * 24)} of {job.gpus * 24:,} GPU-hours a day"
    )


def cause_words(job: Subject, cause: Cause) -> str:
    """Where a cause is, and what it does."""
    place = job.names.place(cause.where)
    return f"{place.words}: {main_clause(cause.effect)}" if place else main_clause(cause.effect)


def _place(job: Subject, cause: Cause) -> str:
    """Ranks and nodes of a cause."""
    place = job.names.place(cause.where)
    return job.where_else.get(cause.kind, job.everywhere) if place is None else place.words


def _other(job: Subject, cause: Cause) -> str:
    """One more cause, with its cost; of what the time of a recording is spent on, only the name."""
    spent, once = cause.spent, f", seen once: {cause.once.words}" if cause.once else ""
    if spent is None:
        return f"{cause_words(job, cause)} ({cause.costs}{once})"
    where = f" at {code_name(spent.where)}" if spent.where and spent.where != spent.name else ""
    return f"{spent.reason}: {code_name(spent.name)}{where} {cause.costs}{once}"


def _who(assessed: Assessment, cause: Cause, *, trusted: bool = True) -> str:
    """Ranks and nodes, then coordinates, since when and, for a `trusted` job, how sure: of what a recording shows the
    time of, there is no doubt.
    """
    confidence = f", {sure(cause.confidence)}" if trusted and cause.spent is None else ""
    return f"{_place(assessed.job, cause)}{assessed.seen(cause)}{confidence}"


def _fix(job: Subject, cause: Cause, best: PricedFix | None) -> str | None:
    """What to do about a cause and, if it has a price, what that saves."""
    act = act_of(cause, best)
    return act if act is None or best is None else f"{act}; {_saves(job, cause, best)}"


def _saves(job: Subject, cause: Cause, best: PricedFix) -> str:
    """What a fix saves, or why that is not reported."""
    if best.withheld is not None:
        return f"no saving promised, {best.withheld}"
    saved = with_error(best.saved_s, 0.0 if best.bound else best.error_s)
    assumed = assumed_by(cause, best)
    assumes = f"; assumes {assumed}" if assumed else ""
    hours = _saved_a_day(cause, best)
    a_day = "" if hours is None else f", {three_digits(hours)} GPU-hours a day"
    step, estimate = job.unprofiled_step, best.saves_step_s
    if step is not None and estimate is not None and cause.once is None:
        most = "at most" if best.bound else "about"
        between = f"; {estimate.interval}" if estimate.interval and not best.bound else ""
        return (
            f"saves {most} {seconds(estimate.value)} a step without the profiler ({job.unprofiled_step_words} to"
            f" {seconds(step.value - estimate.value)}, {best.share:.0%}{between}){a_day}{assumes}"
        )
    saves = f"saves {'at most ' if best.bound else ''}{saved} {of_whole(job.whole)}"
    if job.shows(Fact.COMPUTE):
        share = best.saved_s / job.recorded_s
        saves += f" ({seconds(job.recorded_s)} to {seconds(best.new_step_s)}, {share:.0%})"
    return f"{saves}{a_day}{assumes}"


def _saved_a_day(cause: Cause, best: PricedFix | None) -> float | None:
    """GPU-hours a day that a fix promises to save; None if it promises none, or its cause was seen once."""
    if best is None or best.withheld is not None or cause.once is not None:
        return None
    return best.saved_gpu_hours_per_day


def _culprits(assessed: Assessment, causes: Sequence[Cause]) -> Iterator[Culprit]:
    """The ranks that causes are on, costliest cause first."""
    job = assessed.job
    uuids, hosts = gpu_uuids(job.metadata), job.names.host_of_rank
    for cause in causes:
        part = detector_of(cause.kind).part
        if part is None or cause.change is None:
            continue
        for rank, worker in job.places(cause.where):
            yield Culprit(
                rank=rank,
                dp_rank=None if worker is None else worker.dp_rank,
                pp_rank=None if worker is None else worker.pp_rank,
                host=None if rank is None else hosts.get(rank),
                gpu_uuid=uuids.get(str(rank)),
                part=part,
                cost_s=cause.cost_s / job.steps_in_whole,
                confidence=cause.confidence,
                first_step=cause.since_step,
                hardware=cause.hardware,
            )


def _accounts(
    assessed: Assessment, causes: Sequence[Cause], leading: Cause | None, fixes: Sequence[PricedFix]
) -> Iterator[CauseInWords]:
    """Everything to say about each cause that costs time."""
    job = assessed.job
    uuids, hosts = gpu_uuids(job.metadata), job.names.host_of_rank
    for cause in sorted(causes, key=lambda cause: cause is not leading):
        if cause.change is None:
            continue
        ranks = tuple(dict.fromkeys(rank for rank, _ in job.places(cause.where) if rank is not None))
        named, best = [hosts.get(rank) for rank in ranks], best_fix(cause, fixes)
        yield CauseInWords(
            kind=str(cause.kind),
            part=detector_of(cause.kind).part,
            what=_other(job, cause),
            who=_who(assessed, cause),
            why=cause.effect,
            check=cause.next_check,
            fix=_fix(job, cause, best),
            ranks=ranks,
            hosts=tuple(dict.fromkeys(host for host in [cause.where.host, *named] if host)),
            gpu_uuids=tuple(uuids[str(rank)] for rank in ranks if str(rank) in uuids),
            cost_s=cause.cost_s / job.steps_in_whole,
            share=cause.cost_s / job.recorded_s,
            confidence=cause.confidence,
            first_step=cause.since_step,
            saved_gpu_hours_per_day=_saved_a_day(cause, best),
            metrics="; ".join(test.sentence for test in cause.tests) or UNSET,
        )
