"""Compare two jobs, or two parts of one: did the change help, and how certain is that?

In: their reports and, if wanted, the exact S of their workers in each step. Out:
two `Side`s and their differences, with confidence intervals over the steps. Nothing is replayed.

The parts of one job are ranges of steps; both are measured against the ideal of the whole job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, field

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import FEWEST_STEPS, MeanDifference, difference_of_means
from tracekit.base.errors import SelectionError
from tracekit.base.text import counted, ranks_text, seconds, steps_text, three_digits
from tracekit.report.conclusions import Finding
from tracekit.report.findings import WorkerSlowdowns
from tracekit.report.report import Report
from tracekit.report.tables import Contribution, OfStep
from tracekit.trace.facts import tokens_per_s

#: Ignore a difference of less than this share, however clear it is.
NEGLIGIBLE = 0.001
#: Runs do not differ if the interval has no larger difference than this share, the default limit of `gate`.
_LARGEST_UNSEEN = 0.03
#: Two jobs whose ops per step differ by more than this share may not do the same work.
SAME_WORK = 0.01
_SIZES = ("dp", "pp", "tp", "cp", "ep", "vpp", "dsp")


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a comparison: the job `job` or a part of it, named by `title`.

    `recorded_s`, `original_s`, `ideal_s`: seconds, [steps]; `lost_s`: by the verdict, [steps]; `lost_share`: of the
    time; `lost_gpu_hours_per_day`: at this rate. `workers`: exact S_w over these steps, [dp_ranks, stages].
    `unlike`: steps of post-training that differ from the others and are not here, in words.
    `steps_each`: training steps in each of `steps`, several in a recording of GPUs; times are those of one. `whole`:
    what they are of, "step" or, if no steps are marked, "recording". `tokens_per_s`: None if the loop logs no tokens.
    """

    job: str
    title: str
    layout: Mapping[str, int]
    ops_per_step: float
    trustworthy: bool
    steps: npt.NDArray[np.int64]
    recorded_s: Floats
    original_s: Floats
    ideal_s: Floats
    lost_s: Floats
    lost_share: float
    lost_gpu_hours_per_day: float | None
    dp_ranks: npt.NDArray[np.int64]
    workers: Floats
    steps_each: int = 1
    whole: str = "step"
    tokens_per_s: float | None = None
    unlike: str = ""

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal) over these steps."""
        return float(self.original_s.mean() / self.ideal_s.mean())

    @property
    def sizes(self) -> str:
        """The layout in words."""
        if "engines" in self.layout:
            return counted(self.layout["engines"], "engine") if self.layout["engines"] else "phases alone"
        gpus = counted(self.layout["world_size"], "GPU")
        if ranks := self.layout.get("ranks"):
            return f"{counted(ranks, 'rank')} on {gpus}"
        sizes = " x ".join(f"{name} {self.layout[name]}" for name in _SIZES if self.layout[name] > 1)
        return f"{sizes or 'one worker'} on {gpus}"

    def lost_share_by_step(self) -> Floats:
        """Contribution of each step to the share that is lost, [steps]."""
        mean_s = float(self.lost_s.mean())
        return self.lost_s * (self.lost_share / mean_s if mean_s else 0.0)


class ChangeEffect(StrEnum):
    """The effect of the change."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference"
    UNKNOWN = "unknown"


#: How the sentence about each outcome begins.
_LEADS = {
    ChangeEffect.BETTER: "Yes, it helped",
    ChangeEffect.WORSE: "No, it got worse",
    ChangeEffect.NO_DIFFERENCE: "No difference",
    ChangeEffect.UNKNOWN: "Cannot tell",
}


@dataclass(frozen=True, slots=True)
class EffectInWords:
    """The effect of the change, and notes.

    `change`: the difference, as a clause; `certainty`: its interval, or the reason why there is none; None if the sides
    cannot be compared. `by_share`: the share that is lost decides, because the layouts differ.
    """

    outcome: ChangeEffect
    change: str
    certainty: str | None
    notes: tuple[str, ...]
    by_share: bool = False

    @property
    def sentence(self) -> str:
        """The verdict without the notes."""
        lead = "The layouts differ, so step times do not compare. By what is lost: " if self.by_share else ""
        if self.certainty is None:
            return f"{_LEADS[self.outcome]}: {self.change}"
        end = f", but {self.certainty}." if self.outcome is ChangeEffect.UNKNOWN else f" ({self.certainty})."
        return f"{lead}{_LEADS[self.outcome]}: {self.change}{end}"


@dataclass(frozen=True, slots=True, eq=False)
class CauseChange:
    """Causes that are gone, new or staying; `staying`: pairs of the same cause at the same place."""

    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
    staying: tuple[tuple[Finding, Finding], ...]


def whole(name: str, report: Report, workers: WorkerSlowdowns | None = None) -> Side:
    """All steps of a job. `workers`: None if nobody asks for them."""
    chosen = np.isin([row.step for row in report.by_step], _unlike_steps(report), invert=True)
    return _side(name, report, workers, chosen, name)


def _unlike_steps(report: Report) -> list[int]:
    """The steps of post-training that differ from the others."""
    return [step for group in report.unlike.steps for step in group.steps] if report.unlike else []


def parts(name: str, report: Report, workers: WorkerSlowdowns, first_after: int) -> tuple[Side, Side]:
    """The steps before `first_after`, and the steps from it on. Raises SelectionError if a part has no step."""
    later = workers.steps >= first_after
    if later.all() or not later.any():
        first, last = int(workers.steps[0]), int(workers.steps[-1])
        raise SelectionError(
            f"step {first_after} cannot split the job: it has {len(later)} steps from {first} to {last}; expected a"
            f" step from {first + 1} to {last}"
        )
    before, after = (
        _side(name, report, workers, chosen, steps_text(*workers.steps[chosen][[0, -1]].tolist()))
        for chosen in (~later, later)
    )
    return before, after


def _side(
    name: str, report: Report, workers: WorkerSlowdowns | None, chosen: npt.NDArray[np.bool_], title: str
) -> Side:
    rows = [row for row, wanted in zip(report.by_step, chosen, strict=True) if wanted]
    job, per_step, marked = report.job, report.steps_in_whole, report.marked_steps or []
    sizes = {"ranks" if job.engines is UNSET else "engines": job.ranks or 0}
    sizes |= {} if job.gpus is None else {"world_size": job.gpus}
    recorded, original, ideal = (
        np.array([getattr(row, f"{figure}_s") for row in rows]) / per_step
        for figure in ("recorded", "original", "ideal")
    )
    lost, scale = np.array([row.lost_s or 0.0 for row in rows]) / per_step, _lost_here(report, rows)
    steps = np.array([row.step for row in rows])
    if marked:  # steps of one recording, each with its own time: what `gate` judges
        original, ideal, lost = (np.full(len(marked), times.mean()) for times in (original, ideal, lost))
        recorded = np.array([step.recorded_s for step in marked])
        steps, per_step = np.array([step.step for step in marked]), 1
    none = np.zeros(0)
    slowdown = None if workers is None else workers.slowdown[chosen].astype(np.float64)
    return Side(
        job=name,
        title=title,
        layout=job.layout.to_dict() if job.layout else sizes,
        ops_per_step=(job.ops or job.gpu_ops or 0) / max(job.steps, 1),
        trustworthy=report.trust.trustworthy,
        steps=steps,
        recorded_s=recorded,
        original_s=original,
        ideal_s=ideal,
        lost_s=lost,
        lost_share=report.verdict.share * scale,
        lost_gpu_hours_per_day=None if (hours := report.verdict.lost_gpu_hours_per_day) is None else hours * scale,
        dp_ranks=none.astype(np.int64) if workers is None else workers.dp_ranks,
        workers=none if slowdown is None else np.tensordot(ideal / ideal.sum(), slowdown, axes=1),
        steps_each=per_step,
        whole=report.unit,
        tokens_per_s=tokens_per_s((row.tokens, row.recorded_s) for row in rows),
        unlike=ranks_text(unlike, name="step") if (unlike := _unlike_steps(report)) else "",
    )


def _lost_here(report: Report, rows: Sequence[OfStep]) -> float:
    """How many times as large a share these steps lose as all of them; 1 for all, 0 if nothing is lost."""

    def share(steps: Sequence[OfStep]) -> float:
        return sum(row.lost_s or 0.0 for row in steps) / (sum(row.recorded_s for row in steps) or 1.0)

    overall = share(report.by_step)
    return share(rows) / overall if overall else 0.0


def rates(before: float | None, after: float | None) -> str | None:
    """Tokens a second of both sides, in words; None if one is not known."""
    if not before or not after:
        return None
    return f"{three_digits(before)} tokens a second before, {three_digits(after)} after ({after / before - 1:+.1%})"


def verdict(before: Side, after: Side) -> EffectInWords:
    """Did the change help? Compares the recorded step time if the layouts are equal, else the share that is lost."""
    same_layout = dict(before.layout) == dict(after.layout) or "engines" in before.layout
    if same_layout:
        change = difference_of_means(before.recorded_s, after.recorded_s)
        subject = "the recording takes" if "recording" in (before.whole, after.whole) else "a recorded step takes"
        show: Callable[[float], str] = seconds
        size, spread = f"{seconds(abs(change.difference))} ({abs(change.share):.1%})", _interval_words(change, seconds)
    else:
        # Beside the whole step: of a loss of 0.1 %, no change is large.
        change = difference_of_means(*(1 + side.lost_share_by_step() for side in (before, after)))
        subject, show = "a step loses", lambda value: f"{value - 1:.1%}"
        size, spread = _points(abs(change.difference)), _interval_words(change, _points)
        if distrusted := _distrusted(before, after):
            unknown = f"the layouts differ, so only what is lost compares, and {distrusted}"
            return EffectInWords(ChangeEffect.UNKNOWN, unknown, None, _notes(before, after))
    later, earlier, word = show(change.after), show(change.before), "less" if change.difference <= 0 else "more"
    outcome = _outcome(change)
    if outcome is ChangeEffect.NO_DIFFERENCE:
        both = f"{later} on both sides" if later == earlier else f"{earlier} before and {later} after"
        subject = f"{subject} {both}; a difference larger than {max(change.largest_share, NEGLIGIBLE):.1%} is unlikely"
    elif not change.difference:
        subject = f"{subject} {later} on both sides"
    elif later == earlier:  # a clear difference, but smaller than the digits shown
        subject = f"{subject} {size} {word}, about {later}"
    else:
        subject = f"{subject} {later} instead of {earlier}, {size} {word}"
    basis = f"{spread}, bootstrap over {len(before.steps)} and {len(after.steps)} steps"
    several = "recordings" if max(before.steps_each, after.steps_each) > 1 else f"{before.whole}s"
    if change.low is None:
        basis = f"too few {several} show how much they differ by chance; record at least {FEWEST_STEPS} of both"
    elif outcome is ChangeEffect.UNKNOWN:
        basis = f"it may be chance: {basis}; record more steps"
    return EffectInWords(outcome, subject, basis, _notes(before, after), not same_layout)


def _outcome(change: MeanDifference) -> ChangeEffect:
    if not change.clear or abs(change.share) < NEGLIGIBLE:
        return ChangeEffect.NO_DIFFERENCE if change.largest_share <= _LARGEST_UNSEEN else ChangeEffect.UNKNOWN
    return ChangeEffect.BETTER if change.difference < 0 else ChangeEffect.WORSE


def _points(share: float) -> str:
    return f"{share * 100:.1f} points"


def _interval_words(change: MeanDifference, show: Any) -> str:
    if change.low is None or change.high is None:
        return "no interval"
    return f"95% interval of the change {show(change.low)} to {show(change.high)}"


def _notes(before: Side, after: Side) -> tuple[str, ...]:
    notes = []
    if dict(before.layout) != dict(after.layout):
        notes.append(f"Layouts: {before.sizes} before, {after.sizes} after.")
    elif abs(before.ops_per_step / after.ops_per_step - 1) > SAME_WORK:
        notes.append(
            f"A {before.whole} has {before.ops_per_step:,.0f} ops before and {after.ops_per_step:,.0f} after: it may"
            " not be the same work."
        )
    notes += [
        f"Left out of {side.title}, as unlike its other steps: {side.unlike} (`tracekit rl` says how)."
        for side in (before, after)
        if side.unlike
    ]
    if distrusted := _distrusted(before, after):
        notes.append(f"{distrusted[:1].upper()}{distrusted[1:]}")
    return tuple(notes)


def _distrusted(before: Side, after: Side) -> str:
    """A note that what a side loses is not reliable; empty if it is on both."""
    sides = " and ".join(name for name, side in (("before", before), ("after", after)) if not side.trustworthy)
    return f"what is lost is not to be trusted on the side {sides}." if sides else ""


def causes_of_jobs(before: Report, after: Report) -> CauseChange:
    """Causes that are gone, new or staying between two reports. The same cause has the same kind, place and name."""
    old, new = ({_identity(finding): finding for finding in _causes_of(report)} for report in (before, after))
    return CauseChange(
        gone=tuple(cause for key, cause in old.items() if key not in new),
        new=tuple(cause for key, cause in new.items() if key not in old),
        staying=tuple((cause, new[key]) for key, cause in old.items() if key in new),
    )


def _identity(cause: Finding) -> tuple[str, str, str]:
    """What two findings share that are the same; the name is that of what the time of a recording is spent on."""
    return cause.kind, cause.where_text, "" if cause.spent is None else cause.spent.name


def causes_of_parts(report: Report, before: Side, after: Side, first_after: int) -> CauseChange:
    """Causes of one job by the time at which they act: only before the step, only from it on, or undated (`staying`).

    A cause that changed at the step began there if the job got slower, and ended there if it got faster.
    """
    gone, new, staying = [], [], []
    for cause in _causes_of(report):
        steps, since = cause.where.steps, cause.since_step
        if steps and steps[-1] < first_after:
            gone.append(cause)
        elif steps and steps[0] >= first_after:
            new.append(cause)
        elif not steps and since is not None and since >= first_after:
            (new if after.lost_share >= before.lost_share else gone).append(cause)
        else:
            staying.append((cause, cause))
    return CauseChange(tuple(gone), tuple(new), tuple(staying))


def _causes_of(report: Report) -> list[Finding]:
    """The findings that cost time; one without a price names what time is spent on, or is about the recording."""
    return [cause for cause in report.findings if cause.priced or cause.spent is not None]


class CostChange(Struct, frozen=True):
    """Seconds of the mean step that a kind of op alone costs, (S alone - 1) x T(ideal); None if a side has none."""

    name: str = field(name="kind")
    before_s: float | None
    after_s: float | None

    @property
    def difference_s(self) -> float:
        """After minus before; None counts as 0."""
        return (self.after_s or 0.0) - (self.before_s or 0.0)


def cost_changes(before: Report, after: Report, table: str, column: str) -> tuple[CostChange, ...]:
    """One change per row of a table of the two reports (`by_kind`, `by_pp_rank`), in the order of the reports."""
    costs = [_costs(report, table, column) for report in (before, after)]
    if table == "by_pp_rank":
        names: list[str] = [str(stage) for stage in range(max(map(len, costs)))]
    else:
        names = sorted(costs[0] | costs[1], key=lambda name: -max(cost.get(name, 0.0) for cost in costs))
    return tuple(CostChange(name, costs[0].get(name), costs[1].get(name)) for name in names)


def _costs(report: Report, table: str, column: str) -> dict[str, float]:
    """What each row of a table costs alone, seconds a step, by the value of its column."""
    ideal_s = report.step_time_s.ideal / report.steps_in_whole
    rows: Sequence[Contribution] = getattr(report, table)
    ordered = sorted((getattr(row, column), row.slowdown) for row in rows)
    return {str(name): ((slowdown or 1.0) - 1) * ideal_s for name, slowdown in ordered}


def phase_changes(before: Report, after: Report) -> tuple[CostChange, ...]:
    """Seconds a step of each phase of post-training, on each side."""
    earlier, later = ({row.phase: row.usual_s for row in report.phases or ()} for report in (before, after))
    return tuple(CostChange(name, earlier.get(name), later.get(name)) for name in earlier | later)


def first_split(report: Report) -> int | None:
    """The first step at which the job, or its costliest cause that began late, changed; None if nothing changed."""
    time = report.patterns.time
    since = [None if time is None else time.since_step, *(cause.since_step for cause in report.findings)]
    first = report.by_step[0].step
    return next((step for step in since if step is not None and step > first), None)
