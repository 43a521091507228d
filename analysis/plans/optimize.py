"""The answer of `tracekit optimize`: the best plans of a model, the front, and what they rest on.

In: a `PlanModel`. Out: an `Optimum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from tracekit.analysis.plans.best_plans import ROUNDING, SearchResult, TimedPlan, search, space_size, timed
from tracekit.analysis.plans.front import front, least_memory_gb
from tracekit.analysis.plans.model import PlanModel
from tracekit.analysis.plans.settings import settings_of
from tracekit.analysis.plans.stages import ROUNDING as OF_MEMORY
from tracekit.base.errors import SelectionError
from tracekit.report.plans import FrontPlan, OptimizedPlan, Optimum, PlanTimes, Searched

#: A search ends after this time, the last share of which is for the front of time against memory.
TIME_LIMIT_S, _OF_FRONT = 60.0, 1 / 3
NO_MEMORY = "no figures of memory: plans are compared by time only, and may not fit"


def optimize(
    model: PlanModel,
    *,
    error: float = 0.0,
    notes: tuple[str, ...] = (),
    time_limit_s: float = TIME_LIMIT_S,
    beyond_s: Callable[[tuple[int, ...]], float] = lambda _split: 0.0,
) -> Optimum:
    """Find the best plans of a model. `error`: plans whose times differ by less, relative, are one group.

    After `time_limit_s`, the best plans so far are the answer. `beyond_s`: seconds that the replay of a recorded job
    takes with a split beyond what the model says; its differences are part of the error. Raises SelectionError for a
    space that contradicts itself.
    """
    if (problem := model.problem) is not None:
        raise SelectionError(f"{model.name or 'the model'}: {problem}")
    begun = monotonic()
    result = search(model, model.memory_gb, until=begun + time_limit_s * (1 - _OF_FRONT * model.knows_memory))
    now = timed(model, model.now)
    off_s = {split: beyond_s(split) for split in {model.now.split, *(each.plan.split for each in result.plans)}}
    now_s = now.step_time_s + off_s[model.now.split]
    error = max(error, (max(off_s.values()) - min(off_s.values())) / now_s)
    plans = _plans(model, result, off_s, now_s, error)
    best_s = plans[0].step_time_s if plans else None
    return Optimum(
        step_time_s=PlanTimes(now_s, best_s),
        plans=plans,
        nothing_to_gain=best_s is not None and _fits(model, now) and best_s >= now_s * (1 - error - ROUNDING),
        searched=Searched(space_size(model), result.replayed),
        reason=None if plans else _reason(model),
        gap=0.0 if result.bound_s is None else max(1 - result.bound_s / result.plans[0].step_time_s, 0.0),
        front=[FrontPlan(**_columns(each)) for each in front(model, result, begun + time_limit_s)],
        limit_gb=model.memory_gb,
        now=FrontPlan(**_columns(now, off_s[model.now.split])),
        error=error,
        notes=[*notes, *([] if model.knows_memory else [NO_MEMORY])],
    )


def _plans(
    model: PlanModel, result: SearchResult, off_s: Mapping[tuple[int, ...], float], now_s: float, error: float
) -> list[OptimizedPlan]:
    """The plans of a search, best first. `off_s`: seconds that the replay of each split takes beyond the model."""
    if result.bound_s is None:
        return []
    best_s = min(plan.step_time_s + off_s[plan.plan.split] for plan in result.plans)
    bound_s = min(best_s, result.bound_s + min(off_s.values()))
    plans = []
    for plan in result.plans:
        columns = _columns(plan, off_s[plan.plan.split])
        step_s = columns["step_time_s"]
        plans.append(
            OptimizedPlan(
                **columns,
                saved_s=now_s - step_s,
                bound_s=bound_s,
                buckets=[list(buckets) for buckets in plan.plan.buckets],
                settings=settings_of(model, plan, off_s[plan.plan.split]),
                tied=step_s <= best_s * (1 + max(error, ROUNDING)),
            )
        )
    return sorted(plans, key=lambda plan: plan.step_time_s)


def _fits(model: PlanModel, plan: TimedPlan) -> bool:
    limit = model.memory_gb
    return limit is None or plan.memory_gb is None or plan.memory_gb <= limit * (1 + OF_MEMORY)


def _columns(plan: TimedPlan, off_s: float = 0.0) -> dict[str, Any]:
    of = plan.plan
    return {"memory_gb": plan.memory_gb, "step_time_s": plan.step_time_s + off_s, "split": list(of.split),
            "schedule": str(of.schedule), "microbatches": of.microbatches, "recompute": list(of.recompute)}  # fmt: skip


def _reason(model: PlanModel) -> str:
    return f"no plan fits into {model.memory_gb:g} GB; the smallest needs {least_memory_gb(model):.4g} GB"
