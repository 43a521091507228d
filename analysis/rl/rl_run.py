"""A run of post-training that can be replayed, whatever was recorded of it.

In: nothing. Out: `PostTrainingRun`, the interface of `LoggedRun` (phases as logged) and `TimedRun` (recorded times).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.means import saving_error_s
from tracekit.analysis.rl.account import UNEXPLAINED, Loss, LossTime, PhaseTime, Price, RlAccount, leading
from tracekit.analysis.rl.scenario import Scenario

if TYPE_CHECKING:
    from tracekit.analysis.rl.generation import Generations

#: Phases that exceed the step by this share contradict it.
CONTRADICTION = 0.01
#: An assumption of prices with staleness.
SIDE_BY_SIDE = "generation and training take as long side by side"
#: Why nothing that goes on beside the training has a price.
NO_TRAINING = "the time of the training is not known; state it with train=S"
#: Why nothing has a price after too few measured steps.
_FEW_STEPS = "{} measured, which {} not show how steps differ; record more"
_COUNTS = {1: ("one step was", "does"), 2: ("two steps were", "do")}


class Assumed(Struct, frozen=True):
    """What the price of a scenario rests on. `missing`: why it has none. `error_s`: how far the step can be off because
    of `assumes`. `oldest_sample_steps`: as of `Price`.
    """

    missing: str | None = None
    assumes: tuple[str, ...] = ()
    error_s: float = 0.0
    oldest_sample_steps: int | None = None


class PostTrainingRun(ABC):
    """A run. `steps`: numbers of the steps that count, [steps]; `recorded`: seconds of each, `step_s` in the mean;
    `phases`: seconds of each phase in each of them. `flagged`: why the times contradict each other, None if they do
    not. `generations`: its generations, None without trajectories. `stale`: it generates while it trains. `fewest`:
    fewer steps are no sample of a run; a log shows nothing of what is within them, and needs more.
    """

    steps: Ints
    recorded: Floats
    step_s: float
    phases: Mapping[str, Floats]
    flagged: str | None
    generations: Generations | None = None
    stale: bool = False
    fewest: ClassVar[int] = 2

    @abstractmethod
    def step_times(self, without: Set[Loss] = frozenset(), scenario: Scenario | None = None) -> Floats:
        """Return the seconds of each replayed step without some losses and under an alternative, [steps]."""

    @abstractmethod
    def assumed(self, scenario: Scenario) -> Assumed:
        """Return what a price rests on. Raises SelectionError for a scenario without the GPUs that it needs."""

    @abstractmethod
    def account(self, scenarios: Sequence[Scenario]) -> RlAccount:
        """Return where the mean step went, and what these alternatives save. Raises SelectionError, see `assumed`."""

    def _account(self, scenarios: Sequence[Scenario], losses: list[LossTime], **own: Any) -> RlAccount:
        """The account with these losses. `own`: its fields that depend on what was recorded."""
        usual = self.usual
        spent = [
            PhaseTime(name, float(seconds.mean()), float(seconds[usual].mean()))
            for name, seconds in self.phases.items()
        ]
        return RlAccount(
            step_s=self.step_s,
            phases=sorted(spent, key=lambda phase: -phase.seconds),
            flagged=self.flagged,
            doubt=self.doubt,
            losses=losses,
            leading=leading(losses, self.step_s),
            what_if=[self.price(one) for one in scenarios],
            **own,
        )

    @property
    def usual(self) -> Bools:
        """Mask of the steps that are like the others, [steps]."""
        return np.ones(len(self.steps), np.bool_)

    @cached_property
    def unchanged(self) -> Floats:
        """Seconds of each replayed step, [steps]."""
        return self.step_times()

    @property
    def replay_error_s(self) -> float:
        """By how much the replay misses the mean step."""
        return abs(float((self.unchanged - self.recorded).mean()))

    @property
    def replayed_words(self) -> str:
        """How far the replay is off."""
        words = f"the replayed step is off by {self.replay_error_s / self.step_s:.1%}"
        if self.generations is None:
            return words
        error, engine_error = abs(self.generations.error), self.generations.engine_error
        return f"{words}, its generation by {error:.1%}, engines' requests by up to {engine_error:.1%}"

    @property
    def doubt(self) -> str | None:
        """Why nothing has a price: times contradict each other, the replay misses the step or the requests of an
        engine, or no interval is known. None if there are prices.
        """
        engine_error = 0.0 if self.generations is None else self.generations.engine_error
        if self.flagged:
            return self.flagged
        if max(self.replay_error_s / self.step_s, engine_error) > UNEXPLAINED:
            return f"{self.replayed_words}, more than {UNEXPLAINED:.0%}"
        return _FEW_STEPS.format(*_COUNTS[len(self.recorded)]) if len(self.recorded) < self.fewest else None

    def error_s(self, saving: Floats, scenarios: Sequence[Scenario] = ()) -> float:
        """How far a mean saving, of [steps], can be off under these alternatives: by what the replay misses, by what
        they assume, and by the scatter of steps, each of which has its own prompts.
        """
        replay_s = max(self.replay_error_s, 0.0 if self.generations is None else self.generations.error_s)
        return saving_error_s(saving, replay_s, 1) + sum(self.assumed(one).error_s for one in scenarios)

    def price(self, scenario: Scenario) -> Price:
        """Return what the step would take. Raises SelectionError, see `assumed`."""
        assumed = Assumed(self.doubt) if self.doubt else self.assumed(scenario)
        if assumed.missing:
            return Price(scenario.text, None, None, None, None, None, assumed.missing)
        saving = self.unchanged - self.step_times(scenario=scenario)
        saved_s, error_s = float(saving.mean()), self.error_s(saving, [scenario])
        step_s = self.step_s - saved_s
        bounds = max(step_s - error_s, 0.0), step_s + error_s
        return Price(
            scenario.text, step_s, *bounds, saved_s, assumed.oldest_sample_steps, "; ".join(assumed.assumes) or None
        )


def contradiction(phases_s: float, step_s: float) -> str | None:
    """A sentence if phases take longer than the step that contains them."""
    if phases_s <= step_s * (1 + CONTRADICTION):
        return None
    return (
        f"the phases of a step take {phases_s:.2f} s, {phases_s / step_s - 1:.1%} more than the step itself:"
        " they overlap, or the timers are of different steps"
    )
