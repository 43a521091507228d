"""The model of a recorded pipeline, for a search for better plans.

In: a pipeline under diagnosis, and the figures of its gradients in its metadata. Out: a `RecordedModel`. What a
recording does not show stays as it is, and a note says so: without sizes of gradients, buckets are not changed; without
the cost of reductions of several sizes, neither; without layers, nothing moves between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.bubbles.asked import AskedSchedule
from tracekit.analysis.bubbles.recorded import RecordedPipeline, recorded_pipelines
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.plans.model import Layer, PlanModel, Reduction, Space
from tracekit.analysis.plans.partition import stage_model
from tracekit.analysis.plans.search import timed
from tracekit.analysis.plans.settings import buckets_of_size
from tracekit.base.errors import TraceError
from tracekit.base.text import seconds
from tracekit.trace.compute_order import Schedule

#: Sizes of gradients are in MiB, as DistributedDataParallel counts.
MB = 1 << 20
#: Reductions show what a byte costs if their sizes differ by this factor.
SIZES_APART = 1.5
FOLLOWS_SIZE = "computes follow the size of microbatches; launches and transfers do not"
FOLLOWS_GRADIENTS = "the backward of a layer takes as long as its share of the gradients"
NO_LAYERS = "layers of stages are not known (--layers), so no layer moves"
NO_SIZES = "sizes of gradients were not recorded (`collect` does), so buckets stay as they are"
ONE_SIZE = "reductions of one size: their fixed cost is unknown, so buckets stay as they are"
#: A model that takes longer than the recording by more than this does not describe the job.
MOST_BEYOND = 0.02


class Gradients(Struct, frozen=True):
    """What `collect` records of gradients. `bytes`: of each layer, by stage; `reductions`: bytes and mean seconds of
    each size of bucket; `bucket_cap_mb`: of DistributedDataParallel.
    """

    bytes: list[list[int]]
    reductions: list[tuple[float, float]] = []
    bucket_cap_mb: float = 25.0


class RecordedModel(Struct, frozen=True):
    """A model with the relative `error` of its step times, and what it rests on."""

    model: PlanModel
    error: float
    notes: tuple[str, ...]


def recorded_model(job: PipelineSubject, split: tuple[int, ...] | None, slowness: Floats) -> RecordedModel:
    """The model of a job. `split`: the layers of each stage, None if unknown; `slowness`: of the slowest worker
    of each stage.

    Raises TraceError for a job whose schedule or steps it does not describe.
    """
    assert job.profile is not None, "the job computes"
    pipeline = _pipeline(job)
    costs = replace(stage_model(job.profile.base_s, split or (1,) * job.stages), slowness=slowness)
    plain = costs.plan_model(pipeline.order.microbatches, _schedule(pipeline))
    if split is None:  # a stage is one layer
        of_stages = zip(*job.profile.base_s.sum(axis=2)[[FORWARD, BACKWARD]].tolist(), strict=True)
        plain = replace(plain, layers=tuple(_layer(*times) for times in of_stages))
    plain = replace(plain, layers=_with_launches(plain, pipeline))
    notes = [FOLLOWS_SIZE, *([] if split else [NO_LAYERS])]
    pipelined, count = job.stages > 1, plain.now.microbatches
    space = Space(
        schedule=[plain.now.schedule, Schedule.ONE_F_ONE_B] if pipelined else "fixed",
        microbatches=_counts(count) if pipelined else "fixed",
        split="free" if split and pipelined else "fixed",
        buckets="one",
    )
    transfer_s = float(np.median(pipeline.transfer)) if pipeline.transfer.size else 0.0
    plain = replace(plain, name=job.trace.name, transfer_s=(transfer_s, 0.0), space=space)
    return _calibrated(job, *_with_reductions(job, plain, notes))


def _with_reductions(job: PipelineSubject, model: PlanModel, notes: list[str]) -> tuple[PlanModel, float, list[str]]:
    """The model with its gradients and their reductions, the relative error of these, and notes on them."""
    replicas, gradients = len(job.dp_ranks), _gradients(job)
    if replicas == 1:
        return model, 0.0, [*notes, "one data-parallel rank: no gradients are reduced"]
    rings = traffic_of(job).rings
    ring_s = float(np.nanmedian(np.nansum(rings, axis=1))) if np.isfinite(rings).any() else 0.0
    measured = replace(model, replicas=replicas, reduce=Reduction(ring_s, 0.0))
    sizes_mb = [size / MB for stage in gradients.bytes for size in stage] if gradients else []
    if not gradients or (len(sizes_mb) != len(model.layers) and len(model.layers) > 1):
        return measured, 0.0, [*notes, NO_SIZES]
    layers = [replace(one, gradient_mb=size) for one, size in zip(model.layers, sizes_mb, strict=False)]
    if len(model.layers) == 1:
        layers = [_shared(model.layers[0], size, sum(sizes_mb)) for size in sizes_mb]
        notes = [*notes, FOLLOWS_GRADIENTS]
    now = replace(model.now, split=(len(layers),), buckets=((len(layers),),)) if job.stages == 1 else model.now
    measured = replace(measured, layers=tuple(layers), now=now)
    fitted = fitted_reduction(gradients.reductions)
    if fitted is None:
        return measured, 0.0, [*notes, ONE_SIZE]
    reduction, error = fitted
    parts = np.split(np.array(sizes_mb), np.cumsum(now.split)[:-1])
    buckets = tuple(buckets_of_size(part.tolist(), gradients.bucket_cap_mb) for part in parts)
    cost = f"a reduction takes {seconds(reduction.fixed_s)} and {seconds(reduction.per_mb_s)} a MiB, within {error:.1%}"
    space = replace(model.space, buckets="free")
    return replace(measured, reduce=reduction, now=replace(now, buckets=buckets), space=space), error, [*notes, cost]


def _calibrated(job: PipelineSubject, model: PlanModel, fit_error: float, notes: list[str]) -> RecordedModel:
    """The model with what the recording takes beyond it as the optimizer's time. Raises TraceError if it takes less."""
    modelled_s, recorded_s = timed(model, model.now).step_time_s, job.measured_s
    beyond = modelled_s / recorded_s - 1
    if beyond > MOST_BEYOND:
        raise TraceError(
            f"{job.trace.name}: plans cannot be compared: by its computes, transfers and reductions, a step takes"
            f" {beyond:.1%} longer than recorded"
        )
    contention = _contention(job) if model.space.buckets == "free" else 0.0
    if contention > 0:
        notes = [*notes, f"a backward takes {contention:.1%} longer while gradients are reduced"]
    error = max(job.replay_error, fit_error, beyond, contention * _backward_share(model, recorded_s))
    return RecordedModel(replace(model, optimizer_s=max(recorded_s - modelled_s, 0.0)), error, tuple(notes))


def _pipeline(job: PipelineSubject) -> RecordedPipeline:
    pipelines, _ = recorded_pipelines(job.replay)
    if not pipelines:
        raise TraceError(f"{job.trace.name}: no step has all computes of every microbatch; plans cannot be compared")
    return max(pipelines, key=lambda pipeline: pipeline.lanes)


def _schedule(pipeline: RecordedPipeline) -> Schedule:
    order = pipeline.order
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
        asked = AskedSchedule.parse(schedule).order(order.stages, order.microbatches)
        if order.virtual_stages == order.stages and np.array_equal(asked.kind, order.kind):
            return schedule
    raise TraceError("plans are compared with 1F1B and GPipe; this pipeline computes in another order")


def _counts(count: int) -> list[int]:
    return [each for each in (count // 2, count, 2 * count) if each >= 1 and (2 * count) % each == 0]


def _with_launches(model: PlanModel, pipeline: RecordedPipeline) -> tuple[Layer, ...]:
    """The layers, each with its part of the usual launch delay of a compute, which does not depend on sizes."""
    delays = np.median(pipeline.delay, axis=(1, 2, 3)).clip(0.0) * model.stages / len(model.layers)
    forward_s, backward_s = float(delays[FORWARD]), float(delays[BACKWARD])
    return tuple(
        replace(one, forward_s=(forward_s, one.forward_s[1]), backward_s=(backward_s, one.backward_s[1]))
        for one in model.layers
    )


def _layer(forward_s: float, backward_s: float) -> Layer:
    """A layer that takes so long for a microbatch of the recording, which is one sample."""
    return Layer(forward_s=(0.0, forward_s), backward_s=(0.0, backward_s), gradient_mb=0.0)


def _shared(whole: Layer, size_mb: float, all_mb: float) -> Layer:
    """The part of all layers that has so much of the gradients."""
    share = size_mb / all_mb
    return replace(_layer(whole.forward_s[1] * share, whole.backward_s[1] * share), gradient_mb=size_mb)


def _gradients(job: PipelineSubject) -> Gradients | None:
    recorded: Any = job.metadata.get("gradients")
    try:
        return msgspec.convert(recorded, Gradients) if recorded else None
    except msgspec.ValidationError:
        return None


def fitted_reduction(reductions: Sequence[tuple[float, float]]) -> tuple[Reduction, float] | None:
    """The line a + b x MiB through reductions, and its relative error; None if their sizes are too close."""
    sizes, times = np.array([(size / MB, taken_s) for size, taken_s in reductions if taken_s > 0]).reshape(-1, 2).T
    if not len(sizes) or sizes.max() < SIZES_APART * sizes.min():
        return None
    rows = np.stack([np.ones(len(sizes)), sizes], axis=1) / times[:, None]
    fixed_s, per_mb_s = np.maximum(np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0], 0.0)
    error = float(np.abs((fixed_s + per_mb_s * sizes) / times - 1).mean())
    return Reduction(float(fixed_s), float(per_mb_s)), error


def _contention(job: PipelineSubject) -> float:
    """How much longer the last backward of a step takes, in which gradients are reduced, than the others, relative."""
    profile = job.profile
    position = profile.position[BACKWARD] if profile is not None else np.ones(1)
    return max(float(position[-1] / np.median(position[:-1])) - 1, 0.0) if len(position) > 1 else 0.0


def _backward_share(model: PlanModel, recorded_s: float) -> float:
    backward_s = float(model.of_layers("backward_s", model.samples / model.now.microbatches).sum())
    return backward_s / model.stages / recorded_s
