"""Fixes with what prices them.

In: the replays of `price`. Out: `PricedFix`; a report has its `Fix`.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tracekit.report.conclusions import Fix


class PricedFix(Fix, frozen=True, kw_only=True):
    """One fix, with the change that prices it; its figures are there, even if they are `withheld`.

    `reached`: if the title gives a goal and not the way to it, the assumption that it is reached. `around`: it works
    around its cause, which stays. `excludes`: of all fixes with this name, a combination has one. `extra_s`: seconds
    that it adds to each step.
    """

    new_step_s: float
    saved_s: float
    saved_gpu_hours_per_day: float
    change: Any = None
    reached: str | None = None
    around: bool = False
    excludes: str | None = None
    extra_s: float = 0.0

    @property
    def fix(self) -> Fix:
        """What a report has of it: no figures if they are withheld."""
        fix = Fix(**{name: getattr(self, name) for name in Fix.__struct_fields__})
        if self.withheld is None:
            return fix
        return replace(fix, new_step_s=None, saved_s=None, saved_gpu_hours_per_day=None)

    @property
    def share(self) -> float:
        """What it saves, as a share of the step."""
        now_s = self.unprofiled_step_s if self.saves_step_s is not None else self.new_step_s + self.saved_s
        return self.worth_s / (now_s or float("inf"))
