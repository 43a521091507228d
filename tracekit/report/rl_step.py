"""Post-training in a report: phases and losses of the mean step, what alternatives would take, steps that differ.

In: what `analysis/rl/` found. Out: plain data, and its words. All times are seconds; docs/report-schema.md explains the
keys.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tracekit.base.quantities import Amount, Count, Finite, Number, Ordinal, Proportion, Seconds
from tracekit.base.text import percent, ranks_text, ratio, seconds, three_digits

Loss = Literal["queueing", "tail", "engines", "tools", "reward", "sync"]
#: Sides of a job whose idle shares differ by less do not wait for each other.
IDLE = 0.1
#: Steps whose excess is less than this share of the run are not worth the first line.
_WORTH = 0.02


class PhaseTime(Struct, frozen=True):
    """What a phase takes in the mean step, and in that of the steps that do not differ (`Unlike`)."""

    phase: str
    seconds: Seconds
    usual_s: Seconds


class LossTime(Struct, frozen=True):
    """What a loss costs: the step minus the replayed step without it."""

    loss: Loss
    lost_s: Finite


class Generation(Struct, frozen=True):
    """How engines decode: a step takes `base_s` + `per_request_s` x running requests at the median speed.

    `speeds`: of each engine, relative to the median. `slots`: most requests that an engine runs at once, None if
    unknown. `reproduced_s`: the replayed generation; `error`: its difference from the recorded one, relative.
    `engine_error`: the same of the median request of an engine, for the engine that is furthest off.
    """

    base_s: Finite
    per_request_s: Finite
    speeds: dict[str, Amount]
    slots: Count | None
    reproduced_s: Seconds
    error: Finite
    engine_error: Finite


class Price(Struct, frozen=True):
    """What the step would take in a scenario, None with the reason in `assumes` if it cannot be told.

    `low_s`, `high_s`: bounds of `step_s`. `oldest_sample_steps`: how many updates the weights of the oldest tokens of a
    training batch lag behind, None if the algorithm stays as it is.
    """

    scenario: str
    step_s: Seconds | None
    low_s: Number
    high_s: Number
    saved_s: Number
    oldest_sample_steps: Count | None
    assumes: str | None


class Sides(Struct, frozen=True):
    """What shares of the time the two sides of a job idle that generates while it trains; None: unknown."""

    trainer_idle: Amount | None
    rollout_idle: Amount | None

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

    steps: list[Ordinal]
    most_s: Seconds | None
    share: Proportion | None
    calls_s: Seconds | None

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


class DifferingSteps(Struct, frozen=True):
    """Steps that differ from the others in the same way.

    `extra_s`: what each takes beyond the usual step, in the mean; `times`: each over the usual one; `share`: of the
    run, what they take beyond it. `phase`: the one that differs most, by `phase_extra_s`. `every`: they return after so
    many steps. `cold`: they are the first of the run.
    """

    steps: list[Ordinal]
    extra_s: Finite
    times: Amount
    share: Finite
    phase: str
    phase_extra_s: Finite
    every: Count | None
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
        share = f"{percent(abs(self.share))} of the run"
        return f"{which} take{'s' * (not several)} {ratio(self.times)}x the others ({extra}, {share}): {self.phase}"


class Trend(Struct, frozen=True):
    """How usual steps change: from `before_s` to `after_s`, at step `since`, or steadily if that is None; `per_step`:
    the share of the mean step by which it grows. `phase`: the one that changes most.
    """

    since: Ordinal | None
    before_s: Finite
    after_s: Finite
    per_step: Finite
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
    usual_s: Seconds

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
