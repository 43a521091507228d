"""A plan in the terms of frameworks: settings to copy.

In: a `PlanModel` and a `TimedPlan`. Out: `PlanSettings`. DistributedDataParallel and its kind have one size for all
buckets, not a list of layers, so the size whose buckets are best is found and replayed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from operator import add

import numpy as np

from tracekit.analysis.plans.best_plans import TimedPlan, cells_of
from tracekit.analysis.plans.buckets import buckets_of_size, sizes_of
from tracekit.analysis.plans.model import PlanModel, TrainingPlan
from tracekit.analysis.plans.replay import last_backwards
from tracekit.report.plans import PlanSettings
from tracekit.trace.compute_order import Schedule

#: Megatron-LM counts a bucket in gradients of full precision, bytes each.
_BYTES = 4


def settings_of(model: PlanModel, plan: TimedPlan, off_s: float) -> PlanSettings:
    """The settings of a plan. `off_s`: seconds that it takes beyond what the model says."""
    chosen, size_mb, step_s = plan.plan, model.bucket_cap_mb, plan.step_time_s
    changes = model.replicas > 1 and model.space.buckets in ("free", "size")
    if changes:
        size_mb, step_s = _best_size(model, chosen)
    again = np.flatnonzero(np.repeat(chosen.recompute, chosen.split)).tolist()
    count = chosen.microbatches
    words = f"  # {count} microbatch{'es' * (count > 1)}" + (f", recompute layers {again}" if again else "")
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
    return PlanSettings(size_mb, step_s + off_s, list(chosen.split), chosen.microbatches, again,
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
    cells, gradients = cells_of(model, plan), model.of_layers("gradient_mb")
    starts_s, ends = last_backwards(cells, np.array([plan.split]))[:, 0].tolist(), np.cumsum(plan.split)
    of_stages = [part.tolist() for part in np.split(gradients, ends[:-1])]

    def step_s(size_mb: float) -> float:
        tails = (
            cells.tail_of(stage, end, buckets_of_size(of_stages[stage], size_mb, size_mb), plan.recompute[stage])
            for stage, end in enumerate(ends.tolist())
        )
        return float(max(map(add, starts_s, tails)) + model.optimizer_s)

    return min(((size, step_s(size)) for size in sizes_of(gradients.tolist())), key=lambda each: each[1])
