"""Post-training in a report: phases and losses of the mean step, what alternatives would take, steps that differ.

In: what `analysis/rl/` found. Out: plain data, and its words. All times are seconds; docs/report-schema.md explains the
keys.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tracekit.base.limits import Amount, Count, Finite, Number, Ordinal, Proportion, Seconds
from tracekit.base.text import percent, ranks_text, ratio, seconds, three_digits

Loss = Literal["queueing", "tail", "engines", "tools", "reward", "sync"]
#: Sides of a job whose idle shares differ by less do not wait for each other.
IDLE = 0.1
#: Steps whose excess is less than this share of the run are not worth the first line.
_WORTH = 0.02


class PhaseTime(Struct, frozen=True):
    """What a phase takes in the mean step, and in that of the steps that do not differ (`Unlike`)."""

    phase: str  #: its name
    seconds: Seconds  #: of the mean step
    usual_s: Seconds  #: of the mean of the steps that do not differ from the others (`Unlike`)


class LossTime(Struct, frozen=True):
    """What a loss costs: the step minus the replayed step without it."""

    loss: Loss  #: `queueing`, `tail`, `engines`, `tools`, `reward` or `sync`
    lost_s: Finite  #: the step minus the replayed step without it


class Generation(Struct, frozen=True):
    """How engines decode at the median speed."""

    base_s: Finite  #: a decoding step takes this,
    per_request_s: Finite  #: and this for each running request
    speeds: dict[str, Amount]  #: of engines, relative to the median
    slots: Count | None  #: most requests that an engine runs at once; null if no request waited for one
    reproduced_s: Seconds  #: the replayed generation
    error: Finite  #: its relative difference from the recorded one
    #: the relative difference of what the median request of an engine takes, for the engine that is furthest off
    engine_error: Finite


class Price(Struct, frozen=True):
    """What the step would take in a scenario."""

    scenario: str  #: as asked
    step_s: Seconds | None  #: the step then; null if it has no price
    #: `step_s` less its error: what the replay misses, the scatter of the steps (half the 95 % interval of their mean),
    #: what dealing requests to engines anew changes, and, of a log, the unaccounted time; a fix has the same `error_s`
    low_s: Number
    high_s: Number  #: `step_s` plus its error
    saved_s: Number  #: what a step saves
    #: updates that the oldest tokens of a batch lag behind; null if the algorithm stays as it is
    oldest_sample_steps: Count | None
    assumes: str | None  #: assumptions, or why there is no price


class Sides(Struct, frozen=True):
    """What shares of the time the two sides of a job idle that generates while it trains; None: unknown."""

    trainer_idle: Amount | None  #: the share of the time in which the trainer idles, or waits for samples
    rollout_idle: Amount | None  #: the same of the rollout side

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
    """At most how much tools cost, from a log without trajectories."""

    steps: list[Ordinal]  #: steps whose slowest trajectory spent longer in tools than it was sampled
    #: generation beyond the longest sampling in these steps, per mean step: at most what tools cost; null if the log
    #: does not tell
    most_s: Seconds | None
    share: Proportion | None  #: of the run
    calls_s: Seconds | None  #: tool calls of the mean trajectory; null if they are not logged

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
    """Steps that differ from the others in the same way."""

    steps: list[Ordinal]  #: their numbers
    extra_s: Finite  #: what each takes beyond the median of the others, in the mean
    times: Amount  #: each over that median, in the mean
    share: Finite  #: of the run, what they take beyond it
    phase: str  #: the phase that exceeds that of the others most; `no phase` for time in none
    phase_extra_s: Finite  #: by how much
    every: Count | None  #: they return after so many steps; null if they do not
    cold: bool  #: it is the first step of the run

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
    """How usual steps change."""

    since: Ordinal | None  #: the step from which on steps take longer or shorter; null if they do so steadily
    before_s: Finite  #: a step before, or at the beginning
    after_s: Finite  #: a step after, or at the end
    per_step: Finite  #: the share of the mean step by which a step exceeds the one before
    phase: str  #: the phase that changes most

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
    """What is unlike the rest of a run."""

    #: steps that differ, together with those that differ in the same way; `compare` and `gate` leave them out
    steps: list[DifferingSteps]
    trend: Trend | None  #: how the others change as the run goes on; null if they do not
    usual_s: Seconds  #: the mean of the others

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
