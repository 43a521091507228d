"""Fixes that move layers, or work, between stages.

In: a pipeline and `Cause`s. Out: `Plan`s. If the layers of each stage are known, a plan gives the best integer split,
and the split that leaves the loss layer alone on the last stage. If they are not, a split would be a guess: the plan
gives the amount of work that each stage should have, which is valid for any layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import SLOW_WORKERS, stage_slowness, usual_base_s
from tracekit.analysis.evidence.subject import LAYERS, MACHINE, Cause, Plan
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.plans.best_plans import OneLane, StageModel, best_split, stage_model
from tracekit.analysis.whatif.interventions import Scale
from tracekit.base.errors import SelectionError
from tracekit.report.finding import Place

SAME_LAYERS = "all layers cost the same"
ANY_AMOUNT = "work moves in any amount (whatif --layers 8,8,... says which layers)"


class LayerFixThresholds(Struct, frozen=True):
    """When work moves between stages."""

    #: Share of what the largest giver gives up that a stage gives up which is named. Chosen: only words follow.
    named_share: float = 0.5
    #: Share of the work of a stage that has to move. Chosen: as little as a fix has to save.
    smallest_move: float = 0.01


LAYER_FIXES = LayerFixThresholds()


def layer_plans(
    job: PipelineSubject, uneven_stages: Sequence[Cause], machines: Sequence[Cause], layers: tuple[int, ...] | None
) -> Iterator[Plan]:
    """Plans for a stage with too much work and for the stage of a slow worker."""
    profile = job.profile
    if profile is None or job.stages < 2:
        return
    uneven = next(iter(uneven_stages), None)
    slow = next((cause for cause in machines if cause.where.workers and cause.where.host is None), None)
    if uneven is None and slow is None:
        return
    job.trace.check_layers(layers)
    # Without the slowness of a worker, which is no work of its stage: a fix of the worker takes it away.
    split, base_s = job.trace.layers(layers), usual_base_s(job)
    for cause, around in ((uneven, False), (slow, True)):
        if cause is None:
            continue
        slowness = stage_slowness(job) if around else np.ones(job.stages)
        if split is None and cause.where.chunks:
            yield from _even_chunks(cause)
        elif split is None:
            yield from _shares(job, base_s.sum(axis=(0, 2)), slowness, cause, around=around)
        else:
            model = replace(stage_model(base_s, split), slowness=slowness)
            yield from _repartitioned(job, model, cause, around=around)


def _even_chunks(cause: Cause) -> Iterator[Plan]:
    """Give a chunk the speed of other chunks; if forwards and backwards both lack it, also those of one alone."""
    details, factor = {"assumes": "the speed of other chunks afterwards"}, cause.change.factor
    title = f"Make {cause.where} as fast as other chunks: fewer layers, or a faster head, loss or embedding"
    yield Plan("even-chunks", title, cause.where, cause.change, cause.without_s, details=details, cause=cause,
               excludes=("even-chunks",))  # fmt: skip
    slower = [kind for kind in (BACKWARD, FORWARD) if factor[kind].min() < 1 / (1 + SLOW_WORKERS.stage_excess)]
    for kind in slower if len(factor) > 1 and len(slower) > 1 else ():
        alone, name = np.ones_like(factor), "backward" if kind == BACKWARD else "forward"
        alone[kind] = factor[kind]
        yield Plan(f"even-chunk-{name}s", f"Make the {name}s of {cause.where} alone as fast as those of other chunks",
                   cause.where, Scale(cause.change.ops, alone), details=details, cause=cause,
                   excludes=("even-chunks",))  # fmt: skip


def _shares(job: PipelineSubject, work_s: Floats, slowness: Floats, cause: Cause, *, around: bool) -> Iterator[Plan]:
    """Move work, `work_s` of each stage on a usual worker, until all stages take equally long.

    Assumes that any part of the work can move, including embedding, loss and fractions of a layer.
    """
    speed = 1 / slowness
    factor = work_s.sum() * speed / speed.sum() / work_s
    less = 1 - factor
    if not np.isfinite(factor).all() or less.max() < LAYER_FIXES.smallest_move:
        return
    giving = np.flatnonzero(less >= LAYER_FIXES.named_share * less.max())
    named = f"stage{'s' if len(giving) > 1 else ''} {', '.join(map(str, giving))}"
    keeps = "Keep the slow worker, move" if around else "Move"
    last = ", the last" if giving.tolist() == [job.stages - 1] else ""
    title = f"{keeps} layers off {named}{last}: about {less[giving].mean():.0%} less work there, more on the others"
    details = {
        "work_now": (work_s / work_s.mean()).tolist(),
        "work_then": (work_s * factor / work_s.mean()).tolist(),
        "assumes": ANY_AMOUNT,
    }
    change = Scale(job.table, factor[None, :, None, None, None, None])
    edit = " + ".join(f"stage={stage} and kind=~compute * {share:.6g}" for stage, share in enumerate(factor.tolist()))
    yield _moved(title, change, details, cause, around=around, edit=edit)


def _repartitioned(job: PipelineSubject, model: StageModel, cause: Cause, *, around: bool) -> Iterator[Plan]:
    """Split the layers anew; `around`: fewer of them for a slow worker that cannot be replaced."""
    lane = OneLane.of(job.replay)
    best = best_split(model, lane)
    if best == model.layers:
        return
    details = _details(model, best)
    if not around and (alone := _loss_alone(model, lane)) is not None:
        details["loss_alone"] = alone
    title = f"{'Keep the slow worker, split' if around else 'Split'} the layers {_listed(best)} over the stages"
    edit = f"layers={_listed(model.layers)}>{_listed(best)}"
    yield _moved(title, _split(job, model, best), details, cause, around=around, edit=edit)


def _loss_alone(model: StageModel, lane: OneLane) -> dict[str, Any] | None:
    """A split that leaves only the loss on the last stage and its layers on the other stages."""
    if model.extra_s[:, -1].sum() == 0 or len(model.layers) < 2:
        return None
    others = len(model.layers) - 1
    total = sum(model.layers)
    split = (*(total // others + (at < total % others) for at in range(others)), 0)
    now_s = lane.step_s(model.chunk_s(model.layers))
    return {"layers": list(split), "step_over_now": lane.step_s(model.chunk_s(split)) / now_s}


def split_again(job: PipelineSubject, now: tuple[int, ...], then: tuple[int, ...]) -> Scale:
    """The layers of each stage `then` in place of `now`, as fixes split them. Raises SelectionError for splits that do
    not fit the job.
    """
    job.trace.check_layers(now)
    if len(then) != len(now) or sum(then) != sum(now):
        raise SelectionError(f"layers={_listed(now)}>{_listed(then)}: expected {sum(now)} layers on {len(now)} stages")
    if job.profile is None or job.stages < 2:
        raise SelectionError("layers move between the stages of a pipeline; this job has none")
    return _split(job, stage_model(usual_base_s(job), now), then)


def _split(job: PipelineSubject, model: StageModel, layers: tuple[int, ...]) -> Scale:
    return Scale(job.table, model.factor(layers)[:, :, :, None, None, None])


def _listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def _moved(title: str, change: Scale, details: dict[str, Any], cause: Cause, *, around: bool, edit: str) -> Plan:
    """Return the plan that moves layers; `around`: those of a slow worker, which stays slow."""
    kind, excludes = ("shift-work-from-slow-worker", MACHINE + LAYERS) if around else ("repartition-stages", LAYERS)
    return Plan(kind, title, Place(), change, details=details, cause=cause, around=around, excludes=excludes, edit=edit)


def _details(model: StageModel, best: tuple[int, ...]) -> dict[str, Any]:
    return {
        "layers_now": list(model.layers),
        "layers_then": list(best),
        "layers_assumed": False,
        "layer_s": float(model.layer_s.sum()),
        "embedding_s": float(model.extra_s[:, 0].sum()),
        "loss_s": float(model.extra_s[:, -1].sum()),
        "assumes": SAME_LAYERS,
    }
