"""What logged phases tell: the account of a step, and prices that need no times of requests.

In: a `PhaseLog`. Out: `LoggedRun`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import ClassVar

import numpy as np

from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.rl.account import Loss, LossTime, RlAccount, Run, Sides, ToolsBound, unlike
from tracekit.analysis.rl.rl_run import NO_TRAINING, SIDE_BY_SIDE, Assumed, PostTrainingRun, Scenario, contradiction
from tracekit.trace.post_training import ROLLOUT_IDLE, TOOL_CALLS, TOOLS, TRAINER_IDLE, TRAINER_WAIT, PhaseLog, StepTime


class LoggedRun(PostTrainingRun):
    """All logged `steps`. With other durations, or in another order, the unaccounted time may go or double."""

    fewest: ClassVar[int] = 3

    def __init__(self, log: PhaseLog) -> None:
        self.log, self.steps, self.recorded, self.phases = log, log.steps, log.step_s, log.phases
        self.step_s = float(log.step_s.mean())
        self.mean = {phase: float(seconds.mean()) for phase, seconds in log.phases.items()}
        accounted_s = float(self._accounted().mean())
        self.unaccounted_s = None if log.step_time is StepTime.SUMMED else self.step_s - accounted_s
        self.flagged = contradiction(accounted_s, self.step_s) or log.contradiction
        self.stale = log.stale or log.step_time is StepTime.OVERLAPPED
        self.unlike = unlike(log.steps, log.step_s, log.phases)

    @property
    def usual(self) -> Bools:
        return np.isin(self.steps, self.unlike.numbers, invert=True)

    def step_times(self, without: Set[Loss] = frozenset(), scenario: Scenario | None = None) -> Floats:
        return np.asarray(self.recorded - self._accounted() + self._accounted(without, scenario))

    def account(self, scenarios: Sequence[Scenario]) -> RlAccount:
        losses: list[LossTime] = []
        if not self.flagged and not self._beside(None):
            losses = [LossTime(loss, self.mean[loss]) for loss in ("reward", "sync") if loss in self.mean]
        return self._account(
            scenarios,
            losses,
            job=Run(self.log.format, len(self.steps), 0, 0, "phases"),
            length_s=float(self.recorded.sum()),
            replayed_s=None,
            generation_s=self.mean.get("generate"),
            trainer_wait_s=None,
            staleness=None if self._beside(None) or "generate" not in self.mean else 0,
            unaccounted_s=self.unaccounted_s,
            generation=None,
            left_out=list(self.log.left_out),
            restarts=list(self.log.restarts),
            unlike=self.unlike,
            sides=self._sides(),
            tools=self._tools(),
        )

    def _sides(self) -> Sides | None:
        """How much each side idles, as logged, or while the trainer waits for samples; None if neither is known."""
        idle = {
            name: float(np.nanmean(self.log.measures[name]))
            for name in (TRAINER_IDLE, ROLLOUT_IDLE)
            if name in self.log.measures
        }
        if self.log.stale and TRAINER_WAIT in self.mean:
            idle.setdefault(TRAINER_IDLE, self.mean[TRAINER_WAIT] / self.step_s)
        return Sides(idle.get(TRAINER_IDLE), idle.get(ROLLOUT_IDLE)) if idle else None

    def _tools(self) -> ToolsBound | None:
        """What tools cost at most; None if the log has no tool calls."""
        most_s, calls_s = self.log.measures.get(TOOLS), self.log.measures.get(TOOL_CALLS)
        mean_s = None if calls_s is None else float(np.nanmean(calls_s))
        if most_s is None:
            return ToolsBound([], None, None, mean_s) if mean_s else None
        most_s = np.minimum(np.nan_to_num(most_s), self.recorded)
        steps, share = self.steps[most_s > 0].tolist(), float(most_s.sum() / self.recorded.sum())
        return ToolsBound(steps, float(most_s.mean()), share, mean_s)

    def assumed(self, scenario: Scenario) -> Assumed:
        if scenario.regenerates and (scenario.generate_s is None or (scenario.rollout and scenario.train_s is None)):
            return Assumed("needs trajectories, or generate=S and train=S: phases do not show what requests take")
        if scenario.staleness is not None and self.log.stale:
            return Assumed("the job trains on stale samples already")
        if "generate" not in self.mean and scenario.generate_s is None:
            return Assumed("the log lacks the time of the generation, or has only what no training hides")
        if scenario.staleness is not None and "train" not in self.mean and scenario.train_s is None:
            return Assumed(NO_TRAINING)
        assumes = [SIDE_BY_SIDE] * self._beside(scenario) + ["no time is spent outside phases"] * (
            self.unaccounted_s is None
        )
        return Assumed(None, tuple(assumes), abs(self.unaccounted_s or 0.0), scenario.staleness or None)

    def _accounted(self, without: Set[Loss] = frozenset(), scenario: Scenario | None = None) -> Floats:
        """Seconds of each step that phases make up, [steps]. Side by side, it is what is longer in the mean step."""
        nothing = np.zeros_like(self.recorded)
        phases = {phase: took for phase, took in self.phases.items() if phase not in without}
        generate = phases.pop("generate", nothing)
        others = sum(phases.values(), nothing)
        if scenario is not None:
            generate = generate if scenario.generate_s is None else np.full_like(nothing, scenario.generate_s)
            others = others if scenario.train_s is None else np.full_like(nothing, scenario.train_s)
        if self._beside(scenario):
            return generate if generate.mean() >= others.mean() else others
        return np.asarray(generate + others)

    def _beside(self, scenario: Scenario | None) -> bool:
        """Whether generation and training go side by side."""
        recorded = self.log.step_time is StepTime.OVERLAPPED
        return recorded if scenario is None or scenario.staleness is None else scenario.staleness > 0
