"""The answer of `tracekit optimize`: the best plans of a model, the front, and what they rest on.

In: a `PlanModel`. Out: an `Optimum`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import monotonic

import numpy as np
from msgspec import convert, to_builtins
from msgspec.structs import asdict, replace

from tracekit.analysis.plans.best_plans import (
    ROUNDING,
    SearchResult,
    TimedPlan,
    cells_of,
    kinds_of,
    search,
    space_size,
    step_times,
    timed,
)
from tracekit.analysis.plans.model import PlanModel, TrainingPlan
from tracekit.analysis.plans.stages import ROUNDING as OF_MEMORY
from tracekit.analysis.plans.stages import Stages, buckets_of_size, sizes_of
from tracekit.base.errors import SelectionError
from tracekit.report.questions import FrontPlan, OptimizedPlan, Optimum, PlanSettings, PlanTimes, Searched
from tracekit.trace.compute_order import Schedule

#: A search ends after this time, the last share of which is for the front of time against memory.
TIME_LIMIT_S, _OF_FRONT = 60.0, 1 / 3
NO_MEMORY = "no figures of memory: plans are compared by time only, and may not fit"
_UNKNOWN_FIT = (
    "its layers have no figures of memory, so whether a plan fits into {:g} GB is unknown; give a model file with"
    " state_gb, activation_gb and boundary_gb of each layer (docs/plans.md), or leave out the limit"
)
#: Sizes of memory that are tried.
LIMITS = 12
#: First stages of plans that each search keeps at most: a front need not be proven to the last percent.
_PARTS = 1 << 14
#: Megatron-LM counts a bucket in gradients of full precision, bytes each.
_BYTES = 4


def optimize(
    model: PlanModel,
    *,
    error: float = 0.0,
    notes: tuple[str, ...] = (),
    time_limit_s: float = TIME_LIMIT_S,
    beyond_s: Callable[[tuple[int, ...]], float] = lambda _split: 0.0,
) -> Optimum:
    """Find the best plans of a model. `error`: plans whose times differ by less, relative, are one group.

    After `time_limit_s`, the best plans so far are the answer; if there are none, the plan in use. `beyond_s`: seconds
    that the replay of a recorded job takes with a split beyond what the model says; its differences are part of the
    error. Raises SelectionError for a space that contradicts itself, or a limit of memory without figures of memory.
    """
    if (problem := model.problem) is not None:
        raise SelectionError(f"{model.name or 'the model'}: {problem}")
    if model.memory_gb is not None and not model.knows_memory:
        raise SelectionError(f"{model.name or 'the model'}: {_UNKNOWN_FIT.format(model.memory_gb)}")
    started_at = monotonic()
    result = search(model, model.memory_gb, time_limit_s=time_limit_s * (1 - _OF_FRONT * model.knows_memory))
    now = timed(model, model.now)
    in_time = bool(result.plans)
    if not in_time and result.bound_s is not None and _fits(model, now):  # time was up before any plan
        result = replace(result, plans=[now])
    off_s = {split: beyond_s(split) for split in {model.now.split, *(row.plan.split for row in result.plans)}}
    now = replace(now, step_time_s=now.step_time_s + off_s[model.now.split])
    error = max(error, (max(off_s.values()) - min(off_s.values())) / now.step_time_s)
    plans = _plans(model, result, off_s, now.step_time_s, error)
    best_s = plans[0].step_time_s if plans else None
    reason = "no plan that fits was found in time; let the search last longer (--time-limit)"
    if result.bound_s is None:
        reason = f"no plan fits into {model.memory_gb:g} GB; the smallest needs {least_memory_gb(model):.4g} GB"
    return Optimum(
        step_time_s=PlanTimes(now.step_time_s, best_s),
        plans=plans,
        nothing_to_gain=(
            best_s is not None and in_time and _fits(model, now) and best_s >= now.step_time_s * (1 - error - ROUNDING)
        ),
        searched=Searched(space_size(model), result.replayed),
        reason=None if plans else reason,
        gap=max(1 - (result.bound_s or 0.0) / result.plans[0].step_time_s, 0.0) if plans else 0.0,
        front=list(map(_front_plan, front(model, result, started_at + time_limit_s))),
        limit_gb=model.memory_gb,
        now=_front_plan(now),
        error=error,
        notes=[*notes, *([] if model.knows_memory else [NO_MEMORY])],
    )


def _plans(
    model: PlanModel, result: SearchResult, off_s: Mapping[tuple[int, ...], float], now_s: float, error: float
) -> list[OptimizedPlan]:
    """The plans of a search, best first. `off_s`: seconds that the replay of each split takes beyond the model."""
    plans = [replace(row, step_time_s=row.step_time_s + off_s[row.plan.split]) for row in result.plans]
    best_s = min((plan.step_time_s for plan in plans), default=np.inf)
    bound_s = min(best_s, (result.bound_s or 0.0) + min(off_s.values()))
    return [
        OptimizedPlan(
            **asdict(_front_plan(priced)),
            saved_s=now_s - priced.step_time_s,
            bound_s=bound_s,
            buckets=[list(buckets) for buckets in priced.plan.buckets],
            settings=settings_of(model, priced, off_s[priced.plan.split]),
            tied=priced.step_time_s <= best_s * (1 + max(error, ROUNDING)),
        )
        for priced in sorted(plans, key=lambda plan: plan.step_time_s)
    ]


def _fits(model: PlanModel, plan: TimedPlan) -> bool:
    limit = model.memory_gb
    return limit is None or plan.memory_gb is None or plan.memory_gb <= limit * (1 + OF_MEMORY)


def _front_plan(plan: TimedPlan) -> FrontPlan:
    columns = {**to_builtins(plan.plan), "memory_gb": plan.memory_gb, "step_time_s": plan.step_time_s}
    return convert(columns, FrontPlan)


def least_memory_gb(model: PlanModel) -> float:
    """The least memory that any plan of the space needs in its fullest stage, GB."""
    return min(map(_least_of_kind, kinds_of(model, None)))


def _least_of_kind(cells: Stages) -> float:
    needed = cells.memory.min(axis=0)
    if cells.model.space.recompute == "fixed":
        needed = np.where(cells.recompute, cells.memory[1], cells.memory[0])
    needed = np.where(cells.allowed, needed, np.inf)
    least = np.full(needed.shape[1], np.inf)  # of the stages from here on, by first layer
    least[-1] = 0.0
    for stage in range(len(needed) - 1, -1, -1):
        least = np.maximum(needed[stage], least).min(axis=1)
    return float(least[0])


def front(model: PlanModel, best: SearchResult, until: float) -> list[TimedPlan]:
    """The fastest plans by memory; none if memory is unknown. `best`: what was found within the limit of the model.

    `until`: when to end, as `time.monotonic`; the searches have equal shares of what is left.

    Each is the best within some limit that a search of limited size finds. Limits are spread evenly between the least
    memory of any plan and that of the fastest one.
    """
    if not model.knows_memory:
        return []

    def fastest(limit_gb: float | None, searches: int) -> list[TimedPlan]:
        """The fastest plan within a limit, by the first of so many searches; none if none fits or time is up."""
        left_s = until - monotonic()
        return (
            search(model, limit_gb, most_parts=_PARTS, time_limit_s=left_s / searches).plans[:1] if left_s > 0 else []
        )

    candidates = [*(best.plans[:1] if model.memory_gb is None else fastest(None, LIMITS + 1)), *best.plans[:1]]
    if candidates and monotonic() < until:
        most_gb = max(plan.memory_gb or 0.0 for plan in candidates)
        for number, limit_gb in enumerate(np.linspace(least_memory_gb(model), most_gb, LIMITS, endpoint=False)):
            candidates += fastest(float(limit_gb), LIMITS - number)
    points: list[TimedPlan] = []
    for plan in sorted(candidates, key=lambda plan: (plan.memory_gb or 0.0, plan.step_time_s)):
        if not points or plan.step_time_s < points[-1].step_time_s:
            points.append(plan)
    return points


def settings_of(model: PlanModel, plan: TimedPlan, off_s: float) -> PlanSettings:
    """The settings of a plan, which takes `off_s` seconds beyond what the model says.

    DistributedDataParallel and its kind have one size for all buckets, not a list of layers, so the size whose buckets
    are best is found and replayed.
    """
    chosen, size_mb, step_s = plan.plan, model.bucket_cap_mb, plan.step_time_s
    changes = model.replicas > 1 and model.space.buckets in ("free", "size")
    if changes:
        size_mb, model_s = _best_size(model, chosen)
        step_s = model_s + off_s
    recomputed = np.flatnonzero(np.repeat(chosen.recompute, chosen.split)).tolist()
    count = chosen.microbatches
    words = f"  # {count} microbatch{'es' * (count > 1)}" + (f", recompute layers {recomputed}" if recomputed else "")
    paste = {"DDP": "DistributedDataParallel(model)", "FSDP2": "", "Megatron": "", "torchtitan": ""}
    if model.stages > 1:
        name = "GPipe" if chosen.schedule is Schedule.GPIPE else "1F1B"
        paste["torchtitan"] = f'parallelism.pipeline_parallel_schedule = "{name}"'
        paste["Megatron"] = f"--pipeline-model-parallel-size {model.stages} "
        if model.space.split == "free":
            layout = "|".join("t" * layers for layers in chosen.split)
            paste["Megatron"] += f"--pipeline-model-parallel-layout 'E{layout}L' "
            paste["torchtitan"] += f"; parallelism.module_fqns_per_model_part = {json.dumps(_modules(chosen.split))}"
    if changes and size_mb is not None:  # today's size needs no setting: its first bucket may be smaller
        paste["Megatron"] += f"--overlap-grad-reduce --ddp-bucket-size {round(size_mb * (1 << 20) / _BYTES)}"
        paste["DDP"] = f"bucket_cap_mb={size_mb:g}"
        runs = [_runs(buckets) for buckets in chosen.buckets]
        of_stage = f"{runs}[stage]" if model.stages > 1 else str(runs[0])
        paste["FSDP2"] = f"for run in {of_stage}: fully_shard([layers[i] for i in run])"
    if chosen.schedule is Schedule.GPIPE and model.stages > 1:
        del paste["Megatron"]  # which has no GPipe
    return PlanSettings(size_mb, step_s, list(chosen.split), chosen.microbatches, recomputed,
                        {name: text.rstrip() + words for name, text in paste.items() if text})  # fmt: skip


def _runs(buckets: Sequence[int]) -> list[list[int]]:
    """The layers of each bucket of a stage, counted from the first layer of the stage."""
    ends = (sum(buckets) - np.cumsum([0, *buckets])).tolist()
    return [list(range(first, end)) for end, first in pairwise(ends)]


def _modules(split: Sequence[int]) -> list[list[str]]:
    """The modules of each stage of a model of torchtitan."""
    ends = np.cumsum(split).tolist()
    stages = [[f"layers.{layer}" for layer in range(end - count, end)] for count, end in zip(split, ends, strict=True)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _best_size(model: PlanModel, plan: TrainingPlan) -> tuple[float, float]:
    """The size of buckets with the shortest step, the largest of equals, MB, and that step, seconds."""
    cells, gradients, ends = cells_of(model, plan), model.of_layers("gradient_mb"), np.cumsum(plan.split)
    of_stages, sizes = [part.tolist() for part in np.split(gradients, ends[:-1])], sizes_of(gradients.tolist())
    tail_s = [
        [cells.tail_of(stage, end, buckets_of_size(of_stages[stage], size, size), recomputes) for size in sizes]
        for stage, (end, recomputes) in enumerate(zip(ends.tolist(), plan.recompute, strict=True))
    ]
    times = step_times(cells, np.tile(plan.split, (len(sizes), 1)), np.array(tail_s))
    return sizes[int(times.argmin())], float(times.min())
