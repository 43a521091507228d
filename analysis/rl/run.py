"""A run of post-training that can be replayed, whatever was recorded of it.

In: nothing. Out: `RlRun`, the interface of `LoggedRun` (phases as logged) and `TimedRun` (recorded times).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.rl.account import Loss, Price, RlAccount
from tracekit.analysis.rl.scenario import Scenario

if TYPE_CHECKING:
    from tracekit.analysis.rl.generation import Generations

#: Phases that exceed the step by this share contradict it.
CONTRADICTION = 0.01
#: An assumption of prices with staleness.
SIDE_BY_SIDE = "generation and training take as long side by side"


class RlRun(ABC):
    """A run. `steps`: numbers of the steps that count, [steps]; `recorded`: seconds of each; `phases`: seconds of each
    phase in each of them. `flagged`: why the times contradict each other, so that nothing has a price; None if they do
    not. `made`: its generations, None without trajectories.
    """

    steps: Ints
    recorded: Floats
    phases: Mapping[str, Floats]
    flagged: str | None
    made: Generations | None = None

    @abstractmethod
    def step_times(self, without: Set[Loss] = frozenset(), one: Scenario | None = None) -> Floats:
        """Return the seconds of each replayed step without some losses and under an alternative, [steps]."""

    @abstractmethod
    def price(self, one: Scenario) -> Price:
        """Return what the step would take. Raises SelectionError for a scenario without the GPUs that it needs."""

    @abstractmethod
    def account(self, scenarios: Sequence[Scenario]) -> RlAccount:
        """Return where the mean step went, and what these alternatives save. Raises SelectionError, see `price`."""


def contradiction(phases_s: float, step_s: float) -> str | None:
    """A sentence if phases take longer than the step that contains them."""
    if phases_s <= step_s * (1 + CONTRADICTION):
        return None
    return (
        f"the phases of a step take {phases_s:.2f} s, {phases_s / step_s - 1:.1%} more than the step itself:"
        " they overlap, or the timers are of different steps"
    )


def no_price(scenario: Scenario, why: str) -> Price:
    """A scenario that cannot be priced."""
    return Price(scenario.text, None, None, None, None, scenario.staleness, why)
