"""The account of a post-training run: plain data, whose keys are those of the JSON object; and its first line.

All times are seconds of the mean step. docs/report-schema.md explains the keys. A mean over steps that differ from the
others is that of no step: which they are, and which phase does it, is the finding (`Unlike`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.base.text import percent, ranks_text, ratio, seconds, three_digits
from tracekit.trace.post_training import TRAINER_WAIT

Loss = Literal["queueing", "tail", "engines", "tools", "reward", "sync"]
#: Losses below this share of the step do not lead, and a replay further off than this is not trusted.
WORTH = UNEXPLAINED = 0.05
#: Sides of a job whose idle shares differ by less do not wait for each other.
IDLE = 0.1
#: A step differs if it is off the median by so many standard deviations, as the median deviation shows them, and by
#: this share of it: the prompts of healthy steps differ, too.
_DEVIATIONS, _LEAST = 5.0, 0.2
_OF_MEDIAN_DEVIATION = 1.4826
#: Fewer steps do not show what is usual. The first one, which starts everything, needs fewer to be compared with.
_FEWEST, _FEWEST_WITH_FIRST = 4, 3
#: A trend is certain beyond so many standard errors, and matters from this share of the step on over the whole run.
_ERRORS, _SMALLEST_TREND = 5.0, 0.1
#: The fewest steps on each side of a change.
_SIDE = 3
#: A change explains the steps better than a steady trend if it leaves less than this share of its squares.
_BETTER = 0.7
#: Steps whose excess is less than this share of the run are not worth the first line.
_WORTH = 0.02
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


class Run(Struct, frozen=True):
    """Which run, and what its report rests on."""

    format: str
    steps: int
    trajectories: int
    engines: int
    basis: Literal["trajectories", "phases"]


class PhaseTime(Struct, frozen=True):
    """What a phase takes in the mean step, and in that of the steps that do not differ (`Unlike`)."""

    phase: str
    seconds: float
    usual_s: float


class LossTime(Struct, frozen=True):
    """What a loss costs: the step minus the replayed step without it."""

    loss: Loss
    lost_s: float


class Generation(Struct, frozen=True):
    """How engines decode: a step takes `base_s` + `per_request_s` x running requests at the median speed.

    `speeds`: of each engine, relative to the median. `slots`: most requests that an engine runs at once, None if
    unknown. `reproduced_s`: the replayed generation; `error`: its difference from the recorded one, relative.
    `engine_error`: the same of the median request of an engine, for the engine that is furthest off.
    """

    base_s: float
    per_request_s: float
    speeds: dict[str, float]
    slots: int | None
    reproduced_s: float
    error: float
    engine_error: float


class Price(Struct, frozen=True):
    """What the step would take in a scenario, None with the reason in `assumes` if it cannot be told.

    `low_s`, `high_s`: bounds of `step_s`. `oldest_sample_steps`: how many updates the weights of the oldest tokens of a
    training batch lag behind, None if the algorithm stays as it is.
    """

    scenario: str
    step_s: float | None
    low_s: float | None
    high_s: float | None
    saved_s: float | None
    oldest_sample_steps: int | None
    assumes: str | None


class Sides(Struct, frozen=True):
    """What shares of the time the two sides of a job idle that generates while it trains; None: unknown."""

    trainer_idle: float | None
    rollout_idle: float | None

    @property
    def words(self) -> str:
        """Both shares, and which side is short of GPUs."""
        shares = {"trainer": self.trainer_idle, "rollout": self.rollout_idle}
        idle = ", ".join(
            f"the {side} side idles {percent(share)}" for side, share in shares.items() if share is not None
        )
        return f"{idle} of the time{'' if self.short_of_gpus is None else f': {self.short_of_gpus}'}"

    @property
    def short_of_gpus(self) -> str | None:
        """The side for which the other one waits, in words; None if neither does, or both do."""
        trainer, rollout = self.trainer_idle or 0.0, self.rollout_idle or 0.0
        if abs(trainer - rollout) < IDLE:
            return None
        return f"the {'rollout' if trainer > rollout else 'trainer'} side is short of GPUs"


class ToolsBound(Struct, frozen=True):
    """At most how much tools cost, from a log without trajectories: in `steps`, the trajectory that took longest spent
    longer in tools than it was sampled. `most_s`: generation beyond the longest sampling there, per mean step; `share`:
    of the run; None if the log does not tell. `calls_s`: tool calls of the mean trajectory, None if not logged.
    """

    steps: list[int]
    most_s: float | None
    share: float | None
    calls_s: float | None

    @property
    def words(self) -> str:
        """In which steps, and at most how much."""
        calls = "" if self.calls_s is None else f"the mean trajectory spends {seconds(self.calls_s)} in tool calls"
        if self.most_s is None or self.share is None:
            return f"{calls}; whether they hold up the step needs the slowest one, or trajectories"
        if not self.steps:
            return "; ".join([*filter(None, [calls]), "in no step was the slowest one longer in tools than sampled"])
        bound = (
            f"in {ranks_text(self.steps, name='step')} the slowest trajectory spent longer in tools than it was"
            f" sampled: they cost at most {percent(self.share)} of the run ({seconds(self.most_s)} a step)"
        )
        return "; ".join([*filter(None, [calls]), bound])


class RlAccount(Struct, frozen=True):
    """Where a step went. `replayed_s`: the step as replayed, None for a log without times. `flagged`: why the times
    contradict each other; such a run has no losses. `doubt`: why there are no prices, None if there are.

    `length_s`: all steps of the run together, those that warm up included.
    `unaccounted_s`: the part of the step in no phase, None if the log has the sum of the phases as the step.
    `trainer_wait_s`: from the end of a weight sync to the start of the training, None if the log lacks times.
    `left_out`: numbers of steps that lack the time of the step or of a phase that others have. `restarts`: steps that a
    later attempt logged again; from each on, that one counts. `unlike`: steps of a log that differ, and its trend, None
    with times. `sides`: of a job that generates while it trains. `tools`: a bound, None if the log has no tool calls.
    """

    job: Run
    step_s: float
    length_s: float
    replayed_s: float | None
    generation_s: float | None
    trainer_wait_s: float | None
    staleness: int | None
    phases: list[PhaseTime]
    unaccounted_s: float | None
    flagged: str | None
    doubt: str | None
    losses: list[LossTime]
    leading: Loss | None
    generation: Generation | None
    what_if: list[Price]
    left_out: list[int]
    restarts: list[int]
    unlike: Unlike | None
    sides: Sides | None
    tools: ToolsBound | None


def leading(losses: list[LossTime], step_s: float) -> Loss | None:
    """The largest loss, if it is worth mentioning."""
    most = max(losses, key=lambda loss: loss.lost_s, default=None)
    return most.loss if most is not None and most.lost_s >= WORTH * step_s else None


class DifferingSteps(Struct, frozen=True):
    """Steps that differ from the others in the same way.

    `extra_s`: what each takes beyond the usual step, in the mean; `times`: each over the usual one; `share`: of the
    run, what they take beyond it. `phase`: the one that differs most, by `phase_extra_s`. `every`: they return after so
    many steps. `cold`: they are the first of the run.
    """

    steps: list[int]
    extra_s: float
    times: float
    share: float
    phase: str
    phase_extra_s: float
    every: int | None
    cold: bool

    @property
    def words(self) -> str:
        """Which steps, how they differ, and how much of the run that is."""
        several = len(self.steps) > 1
        which = ranks_text(self.steps, name="step") + " (cold)" * self.cold
        if self.every is not None:
            which = f"{which}, every {self.every} steps,"
        if abs(self.phase_extra_s) > 2 * abs(self.extra_s):
            more = "more" if self.phase_extra_s > 0 else "less"
            return f"{which} spend{'s' * (not several)} {seconds(abs(self.phase_extra_s))} {more} in {self.phase}"
        each = " each" * several
        extra = f"{'+' if self.extra_s >= 0 else '-'}{seconds(abs(self.extra_s))}{each}"
        of_run = f"{percent(abs(self.share))} of the run"
        return f"{which} take{'s' * (not several)} {ratio(self.times)}x the others ({extra}, {of_run}): {self.phase}"


class Trend(Struct, frozen=True):
    """How usual steps change: from `before_s` to `after_s`, at step `since`, or steadily if that is None; `per_step`:
    the share of the mean step by which it grows. `phase`: the one that changes most.
    """

    since: int | None
    before_s: float
    after_s: float
    per_step: float
    phase: str

    @property
    def words(self) -> str:
        """How the steps change."""
        grows = self.after_s > self.before_s
        if self.since is not None:
            change_s = abs(self.after_s - self.before_s)
            return (
                f"since step {self.since}, a step takes {seconds(change_s)} {'more' if grows else 'less'}"
                f" ({seconds(self.before_s)} before): {self.phase}"
            )
        return (
            f"the step {'grows' if grows else 'shrinks'} {three_digits(abs(self.per_step) * 100)}% a step, from"
            f" {seconds(self.before_s)} to {seconds(self.after_s)}: {self.phase}"
        )


class Unlike(Struct, frozen=True):
    """What is unlike the rest of a run. `usual_s`: the mean of all other steps."""

    steps: list[DifferingSteps]
    trend: Trend | None
    usual_s: float

    @property
    def worst(self) -> str | None:
        """The words for what costs most of the run, if it is worth the first line."""
        slow = [group for group in self.steps if group.share >= _WORTH]
        if slow:
            return max(slow, key=lambda group: group.share).words
        return None if self.trend is None else self.trend.words

    @property
    def words(self) -> list[str]:
        """All of it."""
        return [*(group.words for group in self.steps), *([] if self.trend is None else [self.trend.words])]

    @property
    def numbers(self) -> list[int]:
        """The steps that differ."""
        return sorted(number for group in self.steps for number in group.steps)


def unlike(numbers: Ints, step_s: Floats, phases: Mapping[str, Floats]) -> Unlike:
    """Find the steps that differ, and the trend of the others. All arrays are [steps]."""
    parts = dict(phases)
    parts[_NO_PHASE] = step_s - sum(phases.values(), np.zeros_like(step_s))
    cold = _cold(step_s, parts)
    odd = cold | _slow(step_s, ~cold) | _apart(step_s, ~cold)
    cold[:1] |= odd[:1]
    blocks = np.flatnonzero(np.diff(np.concatenate(([False], odd & ~cold, [False])))).reshape(-1, 2)
    if len(blocks) == 1 and np.diff(blocks[0]) >= _SIDE and (blocks[0][1] == len(odd) or blocks[0][0] == cold.sum()):
        odd = cold.copy()  # no steps that differ, but a change for all that follow
    usual, groups = ~odd, list[DifferingSteps]()
    by_phase: dict[str, list[int]] = {}
    for place in np.flatnonzero(odd).tolist():
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
    if len(step_s) < _FEWEST_WITH_FIRST:
        return cold
    usual_s = float(np.median(step_s[1:]))
    cold[0] = any(
        abs(took[0] - np.median(took[1:])) > _far(took[1:], usual_s) and not took[1:].min() <= took[0] <= took[1:].max()
        for took in (step_s, *parts.values())
    )
    return cold


def _far(took: Floats, usual_s: float) -> float:
    """How far from their median these seconds are unlike them. `usual_s`: of a step."""
    deviation = _OF_MEDIAN_DEVIATION * float(np.median(abs(took - np.median(took))))
    return max(_DEVIATIONS * deviation, _LEAST * usual_s)


def _slow(step_s: Floats, asked: Bools) -> Bools:
    """Mask of the steps that take far longer than most of those asked about, [steps]."""
    if asked.sum() < _FEWEST:
        return np.zeros(len(step_s), np.bool_)
    usual_s = float(np.median(step_s[asked]))
    return asked & (step_s > usual_s + _far(step_s[asked], usual_s))


def _apart(step_s: Floats, asked: Bools) -> Bools:
    """Mask of the longer steps where steps are of two kinds, with a gap that is wider than either, [steps]."""
    ordered = np.sort(step_s[asked])
    if len(ordered) < _FEWEST:
        return np.zeros(len(step_s), np.bool_)
    split = int(np.argmax(np.diff(ordered))) + 1
    low, high = ordered[:split], ordered[split:]
    apart = float(high[0] - low[-1]) > max(_LEAST * float(np.median(low)), float(max(np.ptp(low), np.ptp(high))))
    longer: Bools = asked & (step_s > low[-1])
    return longer if apart and len(high) <= len(low) else np.zeros_like(longer)


def _leading(parts: Mapping[str, Floats], place: int, usual: Bools) -> str:
    """The part of a step that exceeds that of the usual steps most."""
    return max(parts, key=lambda name: parts[name][place] - np.median(parts[name][usual]))


def _group(
    numbers: Ints, step_s: Floats, took: Floats, places: list[int], usual: Bools, phase: str, *, cold: bool
) -> DifferingSteps:
    usual_s, steps = float(np.median(step_s[usual])), numbers[places].tolist()
    extra_s, apart = float(step_s[places].mean()) - usual_s, np.unique(np.diff(steps))
    returns = len(apart) == 1 and apart[0] > 1 and (len(steps) > 2 or steps[0] == apart[0])
    return DifferingSteps(
        steps=steps,
        extra_s=extra_s,
        times=float(step_s[places].mean()) / usual_s,
        share=extra_s * len(steps) / float(step_s.sum()),
        phase=phase,
        phase_extra_s=float(took[places].mean() - np.median(took[usual])),
        every=int(apart[0]) if returns else None,
        cold=cold,
    )


def _trend(numbers: Ints, step_s: Floats, parts: Mapping[str, Floats], usual: Bools) -> Trend | None:
    """The trend of the usual steps, None if there is none that is certain and matters."""
    steps, took = numbers[usual].astype(np.float64), step_s[usual]
    count, mean_s = len(took), float(took.mean())
    if count < _FEWEST + 1:
        return None
    slope, level = np.polyfit(steps - steps.mean(), took, 1)
    off_line = float(((took - level - slope * (steps - steps.mean())) ** 2).sum())
    splits = range(_SIDE, count - _SIDE + 1)
    squares = [
        float(sum(((side - side.mean()) ** 2).sum() for side in (took[:place], took[place:]))) for place in splits
    ]
    split = splits[int(np.argmin(squares))] if squares else 0
    changes = min(squares, default=math.inf) < _BETTER * off_line
    if changes:
        before_s, after_s = float(took[:split].mean()), float(took[split:].mean())
        spread = (min(squares) / (count - 2) * (1 / split + 1 / (count - split))) ** 0.5
    else:
        span = float(steps[-1] - steps[0])
        before_s, after_s = level + slope * (steps[[0, -1]] - steps.mean())
        spread = span * (off_line / (count - 2) / float(((steps - steps.mean()) ** 2).sum())) ** 0.5
    change_s = after_s - before_s
    if abs(change_s) < max(_ERRORS * spread, _SMALLEST_TREND * mean_s):
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
    kind, lost_s, words = "balanced", 0.0, f"no loss costs {percent(WORTH)} of the step"
    if account.leading is not None:
        kind, lost_s = account.leading, max(one.lost_s for one in account.losses)
        words = f"{_LOSSES[account.leading]} costs {percent(lost_s / account.step_s)} of the step"
    elif account.job.basis == "phases" and account.phases:
        kind, lost_s = "phases", account.phases[0].seconds
        words = _phase_words(account.phases[0].phase, lost_s / account.step_s)
    unknown_s = account.unaccounted_s or 0.0
    if unknown_s > lost_s and unknown_s >= WORTH * account.step_s:
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
    if account.tools is not None and (account.tools.share or 0.0) >= WORTH:
        yield f"tools cost at most {percent(account.tools.share or 0.0)} of the run"


def _saves(account: RlAccount) -> str:
    """The alternative that saves most, if that is certain to save time, and worth mentioning."""
    certain = [one for one in account.what_if if one.high_s is not None and one.high_s < account.step_s]
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
