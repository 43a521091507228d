"""The account of a post-training run: plain data, whose keys are those of the JSON object.

All times are seconds of the mean step. docs/report-schema.md explains the keys.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tracekit.analysis.rl.differing import Unlike
from tracekit.base.text import percent, ranks_text, seconds

Loss = Literal["queueing", "tail", "engines", "tools", "reward", "sync"]
#: Losses below this share of the step do not lead, and a replay further off than this is not trusted.
WORTH = UNEXPLAINED = 0.05
#: Sides of a job whose idle shares differ by less do not wait for each other.
IDLE = 0.1


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
