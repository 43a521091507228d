"""The answer of `tracekit optimize`: the best plans of a model, the front, and what they rest on.

In: a `PlanModel`. Out: an `Optimum`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from tracekit.analysis.plans.best_plans import ROUNDING, TimedPlan, search, space_size, timed
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
    best_s = min((each.step_time_s + off_s[each.plan.split] for each in result.plans), default=None)
    bound_s = None
    if best_s is not None and result.bound_s is not None:
        bound_s = min(best_s, result.bound_s + min(off_s.values()))
    plans = [
        OptimizedPlan(
            **_columns(each, off_s[each.plan.split]),
            saved_s=now_s - each.step_time_s - off_s[each.plan.split],
            bound_s=bound_s,
            buckets=[list(buckets) for buckets in each.plan.buckets],
            settings=settings_of(model, each, off_s[each.plan.split]),
            tied=each.step_time_s + off_s[each.plan.split] <= best_s * (1 + max(error, ROUNDING)),
        )
        for each in result.plans
        if best_s is not None and bound_s is not None
    ]
    return Optimum(
        step_time_s=PlanTimes(now_s, best_s),
        plans=sorted(plans, key=lambda plan: plan.step_time_s),
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


def _fits(model: PlanModel, plan: TimedPlan) -> bool:
    limit = model.memory_gb
    return limit is None or plan.memory_gb is None or plan.memory_gb <= limit * (1 + OF_MEMORY)


def _columns(plan: TimedPlan, off_s: float = 0.0) -> dict[str, Any]:
    of = plan.plan
    return {"memory_gb": plan.memory_gb, "step_time_s": plan.step_time_s + off_s, "split": list(of.split),
            "schedule": str(of.schedule), "microbatches": of.microbatches, "recompute": list(of.recompute)}  # fmt: skip


def _reason(model: PlanModel) -> str:
    return f"no plan fits into {model.memory_gb:g} GB; the smallest needs {least_memory_gb(model):.4g} GB"
