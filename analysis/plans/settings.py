"""A plan in the terms of frameworks: settings to copy.

In: a `PlanModel` and a `TimedPlan`. Out: `PlanSettings`. DistributedDataParallel and its kind have one size for all
buckets, not a list of layers, so the size whose buckets are best is found and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.analysis.plans.model import Plan, PlanModel
from tracekit.analysis.plans.replay import last_backwards
from tracekit.analysis.plans.search import TimedPlan, cells_of
from tracekit.report.plans import PlanSettings
from tracekit.trace.compute_order import Schedule

#: Sizes that are tried.
_SIZES = 64
#: Megatron-LM counts a bucket in gradients of full precision, bytes each.
_BYTES = 4
#: DistributedDataParallel closes its first bucket at this size, so that communication begins early, MB.
FIRST_BUCKET_MB = 1.0


def buckets_of_size(gradients_mb: Sequence[float], size_mb: float) -> tuple[int, ...]:
    """How many layers each bucket holds if it is closed once it has `size_mb`. `gradients_mb`: of the layers, in order
    of the model; buckets begin with the last.
    """
    buckets, layers, held, limit = [], 0, 0.0, min(FIRST_BUCKET_MB, size_mb)
    for gradient in reversed(gradients_mb):
        layers, held = layers + 1, held + gradient
        if held >= limit:
            buckets.append(layers)
            layers, held, limit = 0, 0.0, size_mb
    return (*buckets, layers) if layers else tuple(buckets)


def settings_of(model: PlanModel, plan: TimedPlan) -> PlanSettings:
    """The settings of a plan."""
    split, microbatches = plan.plan.split, plan.plan.microbatches
    ends = np.cumsum(split)
    again = [
        layer
        for end, count, recompute in zip(ends.tolist(), split, plan.plan.recompute, strict=True)
        for layer in range(end - count, end)
        if recompute
    ]
    size_mb, step_s = None, plan.step_time_s
    if model.replicas > 1 and model.space.buckets == "free":
        size_mb, step_s = _best_size(model, plan)
    return PlanSettings(size_mb, step_s, list(split), microbatches, again, _paste(model, plan, size_mb, again))


def _best_size(model: PlanModel, plan: TimedPlan) -> tuple[float, float]:
    """The size of buckets with the shortest step, the largest of equals, and that step, seconds."""
    sizes = model.of_layers("gradient_mb")
    least, whole = max(float(sizes.max(initial=0.0)) / 8, 0.1), max(float(sizes.sum()), 0.2)
    tried = sorted({float(f"{size:.3g}") for size in np.geomspace(least, whole, _SIZES)} | {25.0}, reverse=True)
    step_s = steps_with_sizes(model, plan.plan, tried)
    return min(zip(tried, step_s, strict=True), key=lambda each: each[1])


def steps_with_sizes(model: PlanModel, plan: Plan, sizes_mb: Sequence[float]) -> list[float]:
    """What a step of the plan takes with buckets of each size instead of its own, seconds."""
    cells, gradients = cells_of(model, plan), model.of_layers("gradient_mb")
    starts_s = last_backwards(cells, np.array([plan.split]))[:, 0]
    ends = np.cumsum(plan.split).tolist()
    stages = list(zip(starts_s.tolist(), plan.split, ends, plan.recompute, strict=True))
    return [
        model.optimizer_s
        + max(
            start_s
            + cells.tail_of(
                stage, end - count, end, buckets_of_size(gradients[end - count : end].tolist(), size), again
            )
            for stage, (start_s, count, end, again) in enumerate(stages)
        )
        for size in sizes_mb
    ]


def _paste(model: PlanModel, plan: TimedPlan, size_mb: float | None, again: list[int]) -> dict[str, str]:
    chosen = plan.plan
    counted = f"# {chosen.microbatches} microbatches"
    recomputed = f"; activation checkpointing of layers {again}" if again else ""
    megatron, torchtitan = [f"--pipeline-model-parallel-size {model.stages}"], []
    if model.stages > 1:
        schedule = "GPipe" if chosen.schedule is Schedule.GPIPE else "1F1B"
        torchtitan.append(f'--parallelism.pipeline_parallel_schedule "{schedule}"')
    if model.space.split == "free":
        megatron.append(f"--pipeline-model-parallel-layout 'E{'|'.join('t' * count for count in chosen.split)}L'")
        torchtitan.append(f"stages begin at layers {[0, *np.cumsum(chosen.split)[:-1].tolist()]}")
    if size_mb is not None:
        megatron.append(f"--ddp-bucket-size {round(size_mb * (1 << 20) / _BYTES)}")
    wrapped = "DistributedDataParallel(model)" if size_mb is None else f"bucket_cap_mb={size_mb:g}"
    runs = [list(each) for each in chosen.buckets]
    return {
        "DDP": f"{wrapped}  {counted}{recomputed}",
        "FSDP2": f"fully_shard() for each run of layers {runs}, last first  {counted}",
        "Megatron": f"{' '.join(megatron)}  {counted}{recomputed}",
        "torchtitan": f"{'; '.join(torchtitan)}  {counted}{recomputed}",
    }
