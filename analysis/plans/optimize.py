"""The answer of `tracekit optimize`: the best plans of a model, the front, and what they rest on.

In: a `PlanModel`. Out: an `Optimum`.
"""

from __future__ import annotations

from tracekit.analysis.plans.front import front, least_memory_gb
from tracekit.analysis.plans.model import PlanModel
from tracekit.analysis.plans.search import ROUNDING, Found, TimedPlan, search, space_size, timed
from tracekit.analysis.plans.settings import settings_of
from tracekit.analysis.plans.stages import ROUNDING as OF_MEMORY
from tracekit.report.plans import FrontPlan, OptimizedPlan, Optimum, Searched, StepTimes

NO_MEMORY = "no figures of memory: plans are compared by time only, and may not fit"


def optimize(model: PlanModel, *, error: float = 0.0, notes: tuple[str, ...] = ()) -> Optimum:
    """Find the best plans of a model. `error`: plans whose times differ by less, relative, are one group."""
    now, found = timed(model, model.now), search(model, model.memory_gb)
    plans = [_plan(model, each, now, found, error) for each in found.plans]
    best_s = plans[0].step_time_s if plans else None
    points = [
        FrontPlan(each.memory_gb or 0.0, each.step_time_s, list(each.plan.split), each.plan.schedule,
                  each.plan.microbatches, list(each.plan.recompute))
        for each in front(model, found)
    ]  # fmt: skip
    return Optimum(
        step_time_s=StepTimes(now.step_time_s, best_s),
        plans=plans,
        nothing_to_gain=best_s is not None and _fits(model, now) and best_s >= now.step_time_s * (1 - error - ROUNDING),
        searched=Searched(space_size(model), found.replayed),
        reason=None if plans else _reason(model),
        front=points,
        limit_gb=model.memory_gb,
        now_gb=now.memory_gb,
        error=error,
        notes=[*notes, *([] if model.knows_memory else [NO_MEMORY])],
    )


def _fits(model: PlanModel, plan: TimedPlan) -> bool:
    limit = model.memory_gb
    return limit is None or plan.memory_gb is None or plan.memory_gb <= limit * (1 + OF_MEMORY)


def _reason(model: PlanModel) -> str:
    return f"no plan fits into {model.memory_gb:g} GB; the smallest needs {least_memory_gb(model):.4g} GB"


def _plan(model: PlanModel, plan: TimedPlan, now: TimedPlan, found: Found, error: float) -> OptimizedPlan:
    assert found.bound_s is not None, "there are plans"
    best_s = found.plans[0].step_time_s
    return OptimizedPlan(
        step_time_s=plan.step_time_s,
        saved_s=now.step_time_s - plan.step_time_s,
        memory_gb=plan.memory_gb,
        bound_s=found.bound_s,
        split=list(plan.plan.split),
        schedule=plan.plan.schedule,
        microbatches=plan.plan.microbatches,
        recompute=list(plan.plan.recompute),
        buckets=[list(each) for each in plan.plan.buckets],
        settings=settings_of(model, plan),
        tied=plan.step_time_s <= best_s * (1 + max(error, ROUNDING)),
    )
