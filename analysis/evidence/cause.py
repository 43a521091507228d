"""Causes: findings with what prices them.

In: a candidate of a detector, priced by replays. Out: `Cause`, from which fixes follow; a report has its `Finding`.
"""

from __future__ import annotations

from typing import Any

from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.text import hidden
from tracekit.report.conclusions import Finding
from tracekit.report.metrics import MetricTest
from tracekit.trace.model import Worker


class Cause(Finding, frozen=True, kw_only=True, eq=False):
    """One cause of a job's slowness, with the replay that prices it.

    `change`: the job without the cause, None if the trace is at fault and not the job; `without_s`: its step times,
    seconds, [steps]. `every_step`: it shows in nearly all steps, though its kind acts by chance. `follows`: kinds of
    finding that have to be seen to first. `excess`, `slowest`: as for a candidate. `tests`: what metrics say of its
    machines; `hardware`: whether they, or else the recording, show these at fault.
    """

    change: Any = None
    without_s: Floats | None = None
    every_step: bool = False
    follows: tuple[str, ...] = ()
    excess: float | None = None
    slowest: Worker | None = None
    tests: tuple[MetricTest, ...] = ()
    hardware: bool = False

    @property
    def finding(self) -> Finding:
        """What a report has of it."""
        return Finding(*(getattr(self, name) for name in Finding.__struct_fields__))

    @property
    def worth_s(self) -> float:
        """By what causes are ordered: what a step saves without the profiler, if the job was recorded with one."""
        return self.saved_s if self.saves_step_s is None else self.saves_step_s.value

    @property
    def returning_share(self) -> float:
        """The share of what it costs that returns in other steps, from which a rate follows; 1 if all of it does."""
        if self.once is None:
            return 1.0
        lost_s, others_s = sum(self.once.lost_s), self.once.others_s * self.once.of_steps
        return others_s / (lost_s + others_s)

    @property
    def hidden(self) -> bool:
        """True if the cause costs little until other causes are gone."""
        return hidden(self.saved_s, self.alone_s)

    @property
    def cost_s(self) -> float:
        """Mean step seconds saved without it: in the job as it is or, if it hides behind others, once they are gone."""
        return self.alone_s if self.hidden else self.saved_s
