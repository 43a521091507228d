"""What logged phases tell: the account of a step, and prices that need no times of requests.

In: a `PhaseLog`. Out: `LoggedRun`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import numpy as np

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.rl.account import Loss, LossTime, PhaseTime, Price, RlAccount, Run, leading
from tracekit.analysis.rl.run import SIDE_BY_SIDE, RlRun, contradiction, no_price
from tracekit.analysis.rl.scenario import Scenario
from tracekit.trace.rl import PhaseLog, StepTime


class LoggedRun(RlRun):
    """All logged `steps`. `low_s` of a price leaves out the unaccounted time, `high_s` includes it."""

    def __init__(self, log: PhaseLog, steps: Ints) -> None:
        self.log, self.recorded, self.phases = log, log.step_s, log.phases
        self.steps = steps
        self.step_s = float(log.step_s.mean())
        mean = {phase: float(seconds.mean()) for phase, seconds in log.phases.items()}
        self.mean, self.generate_s = mean, mean.get("generate", 0.0)
        self.others_s = math.fsum(mean.values()) - self.generate_s
        self.beside = log.step_time is StepTime.OVERLAPPED
        accounted_s = self._step_s(self.generate_s, self.others_s, beside=self.beside)
        self.unaccounted_s = None if log.step_time is StepTime.SUMMED else self.step_s - accounted_s
        self.flagged = contradiction(accounted_s, self.step_s)

    def step_times(self, without: Set[Loss] = frozenset(), one: Scenario | None = None) -> Floats:
        """See `RlRun.step_times`: an alternative saves as much in every step as in the mean one."""
        gone = [self.phases[loss] for loss in without if loss in self.phases]
        saved_s = 0.0 if one is None else self.price(one).saved_s or 0.0
        return np.asarray(self.recorded - sum(gone, np.zeros_like(self.recorded)) - saved_s)

    def account(self, scenarios: Sequence[Scenario]) -> RlAccount:
        losses: list[LossTime] = []
        if not self.flagged and not self.beside:
            losses = [LossTime(loss, self.mean[loss]) for loss in ("reward", "sync") if loss in self.mean]
        return RlAccount(
            Run(self.log.format, len(self.steps), 0, 0, "phases"),
            self.step_s,
            None,
            self.mean.get("generate"),
            None,
            None if self.beside or "generate" not in self.mean else 0,
            [PhaseTime(phase, seconds) for phase, seconds in sorted(self.mean.items(), key=lambda one: -one[1])],
            self.unaccounted_s,
            self.flagged,
            losses,
            leading(losses, self.step_s),
            None,
            [self.price(one) for one in scenarios],
        )

    def price(self, one: Scenario) -> Price:
        if self.flagged:
            return no_price(one, self.flagged)
        if one.regenerates and (one.generate_s is None or (one.rollout and one.train_s is None)):
            return no_price(one, "needs trajectories, or generate=S and train=S: phases do not show what requests take")
        if "generate" not in self.mean and one.generate_s is None:
            return no_price(one, "the log lacks the time of the generation, or has only what no training hides")
        beside = bool(one.staleness) if one.staleness is not None else self.beside
        low_s = self._step_s(one.generate_s or self.generate_s, one.train_s or self.others_s, beside=beside)
        high_s = low_s + max(self.unaccounted_s or 0.0, 0.0)
        unknown = "no time is spent outside phases" if self.unaccounted_s is None else None
        assumes = "; ".join(filter(None, (SIDE_BY_SIDE if beside else None, unknown)))
        price_s = low_s + (self.unaccounted_s or 0.0)
        saved_s = self.step_s - price_s
        return Price(one.text, price_s, min(low_s, price_s), high_s, saved_s, one.staleness or None, assumes or None)

    @staticmethod
    def _step_s(generate_s: float, others_s: float, *, beside: bool) -> float:
        return max(generate_s, others_s) if beside else generate_s + others_s
