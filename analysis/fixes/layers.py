"""Fixes that move layers between stages.

In: `Facts` and `Cause`s. Out: `Plan`s, with the best integer split and the one in which the loss layer is alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracekit.analysis.causes.changes import Scale
from tracekit.analysis.causes.facts import Facts
from tracekit.analysis.causes.model import Cause, CauseKind, Where
from tracekit.analysis.causes.workers import worker_factor
from tracekit.analysis.fixes.model import FixKind
from tracekit.analysis.fixes.partition import (
    ASSUMED_LAYERS,
    MOST_LAYERS,
    OneLane,
    StageModel,
    best_split,
    stage_model,
    with_slowness,
)
from tracekit.analysis.fixes.plan import Plan
from tracekit.errors import SelectionError, TraceError
from tracekit.text import short
from tracekit.trace import Trace


def layer_plans(facts: Facts, causes: Sequence[Cause], layers: tuple[int, ...] | None) -> Iterator[Plan]:
    """A better split of the layers where a stage has more work, and one that spares a slow worker's stage."""
    profile = facts.profile
    if profile is None or facts.stages < 2:
        return
    kinds = {cause.kind for cause in causes}
    if not kinds & {CauseKind.STAGE_IMBALANCE, CauseKind.BAD_WORKER}:
        return
    check_layers(facts.trace, layers)
    known = layers or _from_metadata(facts.trace)
    model = stage_model(profile.base_s, known or (ASSUMED_LAYERS,) * facts.stages)
    lane = OneLane.of(facts.replay)
    if CauseKind.STAGE_IMBALANCE in kinds:
        yield from _repartitioned(facts, model, lane, assumed=known is None)
    if CauseKind.BAD_WORKER in kinds:
        yield from _spared(facts, model, lane, assumed=known is None)


def _repartitioned(facts: Facts, model: StageModel, lane: OneLane, *, assumed: bool) -> Iterator[Plan]:
    best = best_split(model, lane)
    if best == model.layers:
        return
    details = _details(model, best, assumed=assumed)
    alone = _loss_alone(model, lane)
    if alone is not None:
        details["loss_alone"] = alone
    change = Scale(facts.table, model.factor(best)[:, :, :, None, None, None])
    title = f"Split the layers {','.join(map(str, best))} over the stages"
    yield Plan(FixKind.REPARTITION, title, Where(), change, details=details)


def _loss_alone(model: StageModel, lane: OneLane) -> dict[str, Any] | None:
    """The last stage without layers: only its loss, the layers on the other stages."""
    if model.extra_s[:, -1].sum() == 0 or len(model.layers) < 2:
        return None
    others = len(model.layers) - 1
    total = sum(model.layers)
    split = (*(total // others + (at < total % others) for at in range(others)), 0)
    now_s = lane.step_s(model.chunk_s(model.layers))
    return {"layers": list(split), "step_over_now": lane.step_s(model.chunk_s(split)) / now_s}


def _spared(facts: Facts, model: StageModel, lane: OneLane, *, assumed: bool) -> Iterator[Plan]:
    """Fewer layers for the stage of a slow worker that cannot be replaced."""
    profile = facts.profile
    assert profile is not None
    slowness = np.maximum(worker_factor(facts, profile).max(axis=1), 1.0)
    slow = with_slowness(model, slowness)
    best = best_split(slow, lane)
    if best == model.layers:
        return
    change = Scale(facts.table, model.factor(best)[:, :, :, None, None, None])
    title = f"Keep the slow worker, split the layers {','.join(map(str, best))} over the stages"
    yield Plan(FixKind.SHIFT_WORK, title, Where(), change, details=_details(model, best, assumed=assumed))


def _details(model: StageModel, best: tuple[int, ...], *, assumed: bool) -> dict[str, Any]:
    return {
        "layers_now": list(model.layers),
        "layers_then": list(best),
        "layers_assumed": assumed,
        "layer_s": float(model.layer_s.sum()),
        "embedding_s": float(model.extra_s[:, 0].sum()),
        "loss_s": float(model.extra_s[:, -1].sum()),
    }


def check_layers(trace: Trace, layers: tuple[int, ...] | None) -> None:
    """Raise SelectionError where stated `layers` do not fit the job, TraceError where those in its metadata cannot be.

    To be asked before the analysis: whether it needs the layers turns out late.
    """
    stages = trace.layout.pp
    if layers is not None and len(layers) != stages:
        raise SelectionError(f"layers {_shown(layers)}: expected {stages} counts, one per stage")
    if layers is not None and not all(1 <= count <= MOST_LAYERS for count in layers):
        raise SelectionError(f"layers {_shown(layers)}: expected 1 to {MOST_LAYERS} on each stage")
    recorded = trace.metadata.get("layers")
    if isinstance(recorded, list | tuple) and any(type(count) is int and count > MOST_LAYERS for count in recorded):
        raise TraceError(
            f"{short(trace.name)}: its metadata says layers {_shown(recorded)}; expected 1 to {MOST_LAYERS} on each"
            " stage: correct the metadata"
        )


def _shown(layers: Sequence[Any]) -> str:
    return f"{','.join(f'{count!s:.20}' for count in layers[:8])}{',...' if len(layers) > 8 else ''}"


def _from_metadata(trace: Trace) -> tuple[int, ...] | None:
    """The layers that the metadata says, where it says how many each stage has."""
    layers = trace.metadata.get("layers")
    if not isinstance(layers, list | tuple) or len(layers) != trace.layout.pp:
        return None
    return tuple(layers) if all(type(count) is int and 1 <= count <= MOST_LAYERS for count in layers) else None
