"""The fastest plan at each size of memory.

In: a `PlanModel`. Out: plans, smallest first; each is faster than all that need less. Each is the best within
some limit that a search of limited size finds. Limits are spread evenly between the least memory of any plan and that
of the fastest one.
"""

from __future__ import annotations

from time import monotonic

import numpy as np

from tracekit.analysis.plans.best_plans import SearchResult, TimedPlan, search
from tracekit.analysis.plans.model import PlanModel
from tracekit.analysis.plans.stages import Stages

#: Sizes of memory that are tried.
LIMITS = 12
#: First stages of plans that each search keeps at most: a front need not be proven to the last percent.
_PARTS = 1 << 14


def least_memory_gb(model: PlanModel) -> float:
    """The least memory that any plan of the space needs in its fullest stage, GB."""
    kinds = [Stages(model, schedule, count, None) for schedule in model.schedules for count in model.microbatches]
    return min(_least_of_kind(cells) for cells in kinds)


def _least_of_kind(cells: Stages) -> float:
    if cells.model.space.recompute == "fixed":
        needed = np.where(cells.recompute, cells.memory[1], cells.memory[0])
    else:
        needed = cells.memory.min(axis=0)
    needed = np.where(cells.allowed, needed, np.inf)
    least = np.full(needed.shape[1], np.inf)  # of the stages from here on, by first layer
    least[-1] = 0.0
    for stage in range(len(needed) - 1, -1, -1):
        least = np.maximum(needed[stage], least).min(axis=1)
    return float(least[0])


def front(model: PlanModel, best: SearchResult, until: float) -> list[TimedPlan]:
    """The fastest plans by memory; none if memory is unknown. `best`: what was found within the limit of the model.

    `until`: when to end, as `time.monotonic`; the searches have equal shares of what is left.
    """
    if not model.knows_memory:
        return []
    fastest = best.plans[:1] if model.memory_gb is None else _fastest(model, None, until, LIMITS + 1)
    candidates = [*fastest, *best.plans[:1]]
    most_gb = max((plan.memory_gb or 0.0 for plan in candidates), default=0.0)
    limits = np.linspace(least_memory_gb(model), most_gb, LIMITS, endpoint=False).tolist() if candidates else []
    for number, limit in enumerate(limits):
        candidates += _fastest(model, limit, until, LIMITS - number)
    points: list[TimedPlan] = []
    for plan in sorted(candidates, key=lambda plan: (plan.memory_gb or 0.0, plan.step_time_s)):
        if not points or plan.step_time_s < points[-1].step_time_s:
            points.append(plan)
    return points


def _fastest(model: PlanModel, limit_gb: float | None, until: float, searches: int) -> list[TimedPlan]:
    """The fastest plan within a limit, by the first of so many searches; none if none fits or time is up."""
    left_s = until - monotonic()
    if left_s <= 0:
        return []
    return search(model, limit_gb, most_parts=_PARTS, until=monotonic() + left_s / searches).plans[:1]
