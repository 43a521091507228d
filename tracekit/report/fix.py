"""Fixes: what to do, how long the step takes afterwards, how certain the price is.

In: the replays of `price`. Out: `Fix`, one row of the table that `whatif` prints and that `--json` contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracekit.analysis.numeric.estimate import Estimate
from tracekit.report.finding import Place


@dataclass(frozen=True)
class Fix:
    """One fix and its price.

    `new_step_s`: mean recorded step with the fix, seconds; `saved_s`: mean seconds saved per step, +- `error_s` (replay
    error, and half the 95 % interval of the saving over the steps). `bound`: True if `saved_s` is an upper bound.
    `withheld`: why no saving is reported, None if one is; JSON and tables then leave the figures out. `cause`: the
    cause that the fix addresses, with `confidence` in that cause, 0 to 1; None for a fix that any job can try.
    `details`: the plan as plain data. `reached`: if the title gives a goal and not the way to it, the assumption that
    it is reached. `around`: it works around its cause, which stays. `excludes`: of all fixes with this name, a
    combination has one. `extra_s`: seconds that it adds to each step. `edit`: the fix as text that `whatif --fix` gives
    the same price, to be changed and asked again; None if it is no change of costs. `saves_step_s`:
    as of `Finding`; `unprofiled_step_s`: the step without the profiler, as it is. `saved_gpu_hours_per_day` is of that.
    """

    kind: str
    title: str
    where: Place
    new_step_s: float
    saved_s: float
    saved_gpu_hours_per_day: float
    error_s: float
    bound: bool = False
    withheld: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    change: Any = field(default=None, repr=False, compare=False)
    cause: str | None = None
    confidence: float | None = None
    reached: str | None = None
    around: bool = False
    excludes: str | None = None
    edit: str | None = None
    extra_s: float = 0.0
    saves_step_s: Estimate | None = None
    unprofiled_step_s: float | None = None

    @property
    def worth_s(self) -> float:
        """By what fixes are ordered: what a step saves without the profiler, if the job was recorded with one."""
        return self.saved_s if self.saves_step_s is None else self.saves_step_s.value

    @property
    def share(self) -> float:
        """What it saves, as a share of the step."""
        now_s = self.unprofiled_step_s if self.saves_step_s is not None else self.new_step_s + self.saved_s
        return self.worth_s / (now_s or float("inf"))

    @property
    def assumes(self) -> str | None:
        """What the price assumes but the trace does not show; None if nothing."""
        assumed = self.details.get("assumes")
        return None if assumed is None else str(assumed)

    @property
    def where_text(self) -> str:
        """Its place in words."""
        return str(self.where)
