"""The account of a post-training run: where its step went, which steps differ, and its first line.

In: times of steps and phases, and losses. Out: `RlAccount`, of the plain data of `tracekit/report/rl_step.py`. All
times are seconds of the mean step. docs/report-schema.md explains the keys. A mean over steps that differ from the
others is that of no step: which they are, and which phase does it, is the finding (`Unlike`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from msgspec import Struct

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA
from tracekit.base.text import percent
from tracekit.report.rl_step import (
    DifferingSteps,
    Generation,
    Loss,
    LossTime,
    PhaseTime,
    Price,
    Sides,
    ToolsBound,
    Trend,
    Unlike,
)
from tracekit.trace.post_training import TRAINER_WAIT

#: What happens in no phase.
_NO_PHASE = "no phase"
_LOSSES: dict[Loss, str] = {
    "queueing": "waiting for a free slot of an engine",
    "tail": "the tail",
    "engines": "the imbalance of engines",
    "tools": "waiting for tools",
    "reward": "the reward",
    "sync": "the weight sync",
}
#: What to say of a phase that is neither generation nor training, and what to do about it.
_PHASES = {
    TRAINER_WAIT: ("the trainer waits for rollouts", ""),
    "validation": ("validation takes", ": validate less often, or beside the training"),
    "checkpoint": ("saving checkpoints takes", ": save less often, or asynchronously"),
}


class AccountThresholds(Struct, frozen=True):
    """When a loss of post-training, a step or a trend is told."""

    #: A step differs if it is off the median by so many standard deviations, as the median deviation shows them ...
    #: Statistic: no normal step of a million.
    deviations: float = 5.0
    #: ... and by this share of it. Chosen: the prompts of healthy steps differ, too.
    least_share: float = 0.2
    #: Fewer steps do not show what is usual. Chosen: fewer are chance.
    fewest_steps: int = 4
    #: The first one, which starts everything, needs fewer to be compared with. Chosen.
    fewest_with_first: int = 3
    #: A trend is certain beyond so many standard errors ... Statistic: no normal value of a million.
    errors: float = 5.0
    #: ... and matters from this share of the step on over the whole run. Chosen.
    smallest_trend: float = 0.1
    #: The fewest steps on each side of a change. Chosen: fewer are chance.
    fewest_on_side: int = 3
    #: A change explains the steps better than a steady trend if it leaves less than this share of its squares. Chosen.
    better_share: float = 0.7


ACCOUNT = AccountThresholds()


class Run(Struct, frozen=True):
    """Which run, and what its report rests on."""

    format: str
    steps: int
    trajectories: int
    engines: int
    basis: Literal["trajectories", "phases"]


class RlAccount(Struct, frozen=True, kw_only=True):
    """Where a step went. `replayed_s`: the step as replayed, None for a log without times. `flagged`: why the times
    contradict each other; such a run has no losses. `doubt`: why there are no prices, None if there are.

    `length_s`: all steps of the run together, those that warm up included.
    `unaccounted_s`: the part of the step in no phase, None if the log has the sum of the phases as the step.
    `trainer_wait_s`: from the end of a weight sync to the start of the training, None if the log lacks times.
    `left_out`: numbers of steps that lack a record, the time of the step, or that of a phase that others have.
    `restarts`: steps that a later attempt logged again; from each on, that one counts. `unlike`: steps of a log that
    differ, and its trend, None with times. `sides`: of a job that generates while it trains. `tools`: a bound, None
    if the log has no tool calls.
    """

    job: Run
    step_s: float
    length_s: float
    replayed_s: float | None = None
    generation_s: float | None
    trainer_wait_s: float | None = None
    staleness: int | None
    phases: list[PhaseTime]
    unaccounted_s: float | None
    flagged: str | None
    doubt: str | None
    losses: list[LossTime]
    leading: Loss | None
    generation: Generation | None = None
    what_if: list[Price]
    left_out: list[int]
    restarts: list[int] = []
    unlike: Unlike | None = None
    sides: Sides | None = None
    tools: ToolsBound | None = None


def leading(losses: list[LossTime], step_s: float) -> Loss | None:
    """The largest loss, if it is worth mentioning."""
    most = max(losses, key=lambda loss: loss.lost_s, default=None)
    return most.loss if most is not None and most.lost_s >= VERDICT.headline_share * step_s else None


def unlike(numbers: Ints, step_s: Floats, phases: Mapping[str, Floats]) -> Unlike:
    """Find the steps that differ, and the trend of the others. All arrays are [steps]."""
    parts = dict(phases)
    parts[_NO_PHASE] = step_s - sum(phases.values(), np.zeros_like(step_s))
    cold = _cold(step_s, parts)
    differs = cold | _slow(step_s, ~cold) | _apart(step_s, ~cold)
    cold[:1] |= differs[:1]
    blocks = np.flatnonzero(np.diff(np.concatenate(([False], differs & ~cold, [False])))).reshape(-1, 2)
    at_an_end = len(blocks) == 1 and (blocks[0][1] == len(differs) or blocks[0][0] == cold.sum())
    if at_an_end and np.diff(blocks[0]) >= ACCOUNT.fewest_on_side:
        differs = cold.copy()  # no steps that differ, but a change for all that follow
    usual, groups = ~differs, list[DifferingSteps]()
    by_phase: dict[str, list[int]] = {}
    for place in np.flatnonzero(differs).tolist():
        by_phase.setdefault(_leading(parts, place, usual), []).append(place)
    for phase, places in by_phase.items():
        for chosen in ([place for place in places if cold[place]], [place for place in places if not cold[place]]):
            if chosen:
                groups.append(_group(numbers, step_s, parts[phase], chosen, usual, phase, cold=bool(cold[chosen[0]])))
    groups.sort(key=lambda group: group.steps)
    return Unlike(groups, _trend(numbers, step_s, parts, usual), float(step_s[usual].mean()))


def _cold(step_s: Floats, parts: Mapping[str, Floats]) -> Bools:
    """Mask of the first step, if it or one of its phases is unlike all that follow, [steps]."""
    cold = np.zeros(len(step_s), np.bool_)
    if len(step_s) < ACCOUNT.fewest_with_first:
        return cold
    usual_s = float(np.median(step_s[1:]))
    cold[0] = any(
        abs(took[0] - np.median(took[1:])) > _far(took[1:], usual_s) and not took[1:].min() <= took[0] <= took[1:].max()
        for took in (step_s, *parts.values())
    )
    return cold


def _far(took: Floats, usual_s: float) -> float:
    """How far from their median these seconds are unlike them. `usual_s`: of a step."""
    deviation = MAD_TO_SIGMA * float(np.median(abs(took - np.median(took))))
    return max(ACCOUNT.deviations * deviation, ACCOUNT.least_share * usual_s)


def _slow(step_s: Floats, asked: Bools) -> Bools:
    """Mask of the steps that take far longer than most of those asked about, [steps]."""
    if asked.sum() < ACCOUNT.fewest_steps:
        return np.zeros(len(step_s), np.bool_)
    usual_s = float(np.median(step_s[asked]))
    return asked & (step_s > usual_s + _far(step_s[asked], usual_s))


def _apart(step_s: Floats, asked: Bools) -> Bools:
    """Mask of the longer steps where steps are of two kinds, with a gap that is wider than either, [steps]."""
    ordered = np.sort(step_s[asked])
    if len(ordered) < ACCOUNT.fewest_steps:
        return np.zeros(len(step_s), np.bool_)
    split = int(np.argmax(np.diff(ordered))) + 1
    low, high = ordered[:split], ordered[split:]
    has_gap = float(high[0] - low[-1]) > max(
        ACCOUNT.least_share * float(np.median(low)), float(max(np.ptp(low), np.ptp(high)))
    )
    longer: Bools = asked & (step_s > low[-1])
    return longer if has_gap and len(high) <= len(low) else np.zeros_like(longer)


def _leading(parts: Mapping[str, Floats], place: int, usual: Bools) -> str:
    """The part of a step that exceeds that of the usual steps most."""
    return max(parts, key=lambda name: parts[name][place] - np.median(parts[name][usual]))


def _group(
    numbers: Ints, step_s: Floats, took: Floats, places: list[int], usual: Bools, phase: str, *, cold: bool
) -> DifferingSteps:
    usual_s, steps = float(np.median(step_s[usual])), numbers[places].tolist()
    extra_s, intervals = float(step_s[places].mean()) - usual_s, np.unique(np.diff(steps))
    returns = len(intervals) == 1 and intervals[0] > 1 and (len(steps) > 2 or steps[0] == intervals[0])
    return DifferingSteps(
        steps=steps,
        extra_s=extra_s,
        times=float(step_s[places].mean()) / usual_s,
        share=extra_s * len(steps) / float(step_s.sum()),
        phase=phase,
        phase_extra_s=float(took[places].mean() - np.median(took[usual])),
        every=int(intervals[0]) if returns else None,
        cold=cold,
    )


def _trend(numbers: Ints, step_s: Floats, parts: Mapping[str, Floats], usual: Bools) -> Trend | None:
    """The trend of the usual steps, None if there is none that is certain and matters."""
    steps, took = numbers[usual].astype(np.float64), step_s[usual]
    count, mean_s = len(took), float(took.mean())
    if count < ACCOUNT.fewest_steps + 1:
        return None
    slope, level = np.polyfit(steps - steps.mean(), took, 1)
    off_line = float(((took - level - slope * (steps - steps.mean())) ** 2).sum())
    splits = range(ACCOUNT.fewest_on_side, count - ACCOUNT.fewest_on_side + 1)
    squares = [
        float(sum(((side - side.mean()) ** 2).sum() for side in (took[:place], took[place:]))) for place in splits
    ]
    split = splits[int(np.argmin(squares))] if squares else 0
    changes = min(squares, default=math.inf) < ACCOUNT.better_share * off_line
    if changes:
        before_s, after_s = float(took[:split].mean()), float(took[split:].mean())
        spread = (min(squares) / (count - 2) * (1 / split + 1 / (count - split))) ** 0.5
    else:
        span = float(steps[-1] - steps[0])
        before_s, after_s = level + slope * (steps[[0, -1]] - steps.mean())
        spread = span * (off_line / (count - 2) / float(((steps - steps.mean()) ** 2).sum())) ** 0.5
    change_s = after_s - before_s
    if abs(change_s) < max(ACCOUNT.errors * spread, ACCOUNT.smallest_trend * mean_s):
        return None
    ends = (
        [slice(None, split), slice(split, None)] if changes else [slice(None, count // 3), slice(-(count // 3), None)]
    )
    moved = {name: float(part[usual][ends[1]].mean() - part[usual][ends[0]].mean()) for name, part in parts.items()}
    return Trend(
        since=int(steps[split]) if changes else None,
        before_s=float(before_s),
        after_s=float(after_s),
        per_step=float(slope / mean_s),
        phase=max(moved, key=lambda name: moved[name] * np.sign(change_s)),
    )


def first_line(account: RlAccount) -> tuple[str, str]:
    """The kind of the first line, that of a `Verdict`, and its sentence: the leading loss, else the longest phase of a
    log; or the time that is in no phase, if that is more.
    """
    if account.flagged:
        return "contradiction", account.flagged
    kind, lost_s, words = "balanced", 0.0, f"no loss costs {percent(VERDICT.headline_share)} of the step"
    if account.leading is not None:
        kind, lost_s = account.leading, max(row.lost_s for row in account.losses)
        words = f"{_LOSSES[account.leading]} costs {percent(lost_s / account.step_s)} of the step"
    elif account.job.basis == "phases" and account.phases:
        kind, lost_s = "phases", account.phases[0].seconds
        words = _phase_words(account.phases[0].phase, lost_s / account.step_s)
    unknown_s = account.unaccounted_s or 0.0
    if unknown_s > lost_s and unknown_s >= VERDICT.headline_share * account.step_s:
        kind, words = (
            "unaccounted",
            f"{percent(unknown_s / account.step_s)} of the step is in no phase; time what it does",
        )
    return kind, words + "".join(f"; {more}" for more in _more(account)) + _saves(account)


def _phase_words(phase: str, share: float) -> str:
    words, do = _PHASES.get(phase, (f"{phase} takes", ""))
    return f"{words} {percent(share)} of the step{do}"


def _more(account: RlAccount) -> Iterator[str]:
    """What else belongs into the first line: the side that is short of GPUs, what steps differ by, and tools."""
    if account.sides is not None and account.sides.short_of_gpus:
        yield account.sides.short_of_gpus
    if account.unlike is not None and account.unlike.worst:
        yield account.unlike.worst
    if account.tools is not None and (account.tools.share or 0.0) >= VERDICT.headline_share:
        yield f"tools cost at most {percent(account.tools.share or 0.0)} of the run"


def _saves(account: RlAccount) -> str:
    """The alternative that saves most, if that is certain to save time, and worth mentioning."""
    certain = [row for row in account.what_if if row.high_s is not None and row.high_s < account.step_s]
    best = max(certain, key=lambda price: price.saved_s or 0.0, default=None)
    if best is None or not best.saved_s or best.saved_s < account.step_s / 100:
        return ""
    least, most = ((account.step_s - (bound or 0.0)) / account.step_s for bound in (best.high_s, best.low_s))
    saves = percent(most) if percent(least) == percent(most) else f"{round(least * 100)} to {percent(most)}"
    age = best.oldest_sample_steps
    steps = "one step" if age == 1 else f"{age} steps"
    aged = "" if age is None else f", oldest sample {steps} old"
    name = "one step of staleness" if best.scenario == "staleness=1" else best.scenario
    return f"; {name} saves {saves}{aged}"
