"""How many layers each pipeline stage should have.

In: what each stage costs now and how many layers it has. Out: the cost of a layer, of what the first and the last
stage do besides (embedding, loss), and the integer split of the layers with the shortest replayed step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace

import numpy as np

from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import Costs, replay_lanes
from tracekit.model import OpKind

#: Extra cost of an end stage below this share of a stage is noise.
SMALLEST_EXTRA = 0.02
#: No model has more layers on a stage; dealing out more would take for ever.
MOST_LAYERS = 1000
MOVES = 200


@dataclass(frozen=True, eq=False)
class StageModel:
    """Costs of stages, seconds per microbatch.

    `layer_s`: forward and backward of one layer, [kinds]. `extra_s`: what a stage's last chunk (first stage: first
    chunk) costs beyond its layers, [kinds, stages]. `layers`: now, per stage. `slowness`: how much slower the slowest
    worker of each stage is than its peers, [stages].
    """

    layers: tuple[int, ...]
    layer_s: Floats
    extra_s: Floats
    chunks: int
    slowness: Floats

    def chunk_s(self, layers: tuple[int, ...]) -> Floats:
        """Cost of each chunk with that split, [kinds, stages, chunks]."""
        share = np.array(layers) / self.chunks
        cost = np.repeat((self.layer_s[:, None] * share)[:, :, None], self.chunks, axis=2)
        cost[:, 0, 0] += self.extra_s[:, 0]
        if len(layers) > 1:
            cost[:, -1, -1] += self.extra_s[:, -1]
        return cost

    def factor(self, layers: tuple[int, ...]) -> Floats:
        """Cost with that split over cost now, [kinds, stages, chunks]."""
        return self.chunk_s(layers) / self.chunk_s(self.layers)


def stage_model(base_s: Floats, layers: tuple[int, ...], slowness: Floats | None = None) -> StageModel:
    """Fit the model to `base_s`, seconds per chunk [kinds, stages, chunks].

    The cost of a layer is the median over the inner stages (over all but the last with fewer than three stages); what
    the ends cost beyond it is embedding and loss.
    """
    total = base_s.sum(axis=2)
    per_layer = total / np.array(layers)
    inner = per_layer[:, 1:-1] if len(layers) >= 3 else per_layer[:, :1]
    layer_s = np.median(inner, axis=1)
    extra = total - layer_s[:, None] * np.array(layers)
    extra[:, 1:-1] = 0.0
    extra[np.abs(extra) < SMALLEST_EXTRA * total] = 0.0
    stages = len(layers)
    return StageModel(
        layers, layer_s, np.maximum(extra, 0.0), base_s.shape[2], np.ones(stages) if slowness is None else slowness
    )


@dataclass(frozen=True, eq=False)
class OneLane:
    """One DP rank's step replayed with one cost per (kind, stage, chunk): a thousandth of the job's replay."""

    template: Template
    rows: Floats

    @classmethod
    def of(cls, replay: JobReplay) -> OneLane:
        """The structure most lanes of the job have, every op at its ideal cost."""
        blocks = replay.graph.blocks
        number = max(range(len(blocks)), key=lambda number: blocks[number].start.size)
        ideal = replay.durations.ideal[number]
        return cls(blocks[number].template, ideal if ideal.ndim == 1 else ideal[:, 0])

    @cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        kinds = [OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code]
        rows = np.flatnonzero(np.isin(self.template.kind, kinds))
        kind = (self.template.kind[rows] == kinds[1]).astype(np.int64)
        return rows, kind, self.template.pp_rank[rows].astype(np.int64), np.maximum(self.template.chunk[rows], 0)

    def step_s(self, chunk_s: Floats) -> float:
        """Step time with forwards and backwards of `chunk_s` [kinds, stages, chunks] seconds."""
        rows, kind, stage, chunk = self._cells
        costs = self.rows.copy()
        costs[rows] = chunk_s[kind, stage, np.minimum(chunk, chunk_s.shape[2] - 1)]
        return float(replay_lanes(self.template, np.array([0, 1]), Costs.of_constant(costs))[0])


def work_shares(work_s: Floats, slowness: Floats) -> Floats:
    """The same work over stages so that all take as long, seconds [stages].

    `work_s`: a microbatch's work of each stage on a healthy worker, seconds [stages]; `slowness`: how much longer its
    slowest worker takes, [stages].
    """
    speed = 1 / slowness
    shares: Floats = work_s.sum() * speed / speed.sum()
    return shares


def best_split(model: StageModel, lane: OneLane, *, smallest: int = 1) -> tuple[int, ...]:
    """The integer split with the shortest step, each stage with at least `smallest` layers.

    Starts from the split whose costliest stage is cheapest, then moves single layers while the replayed step shortens.
    """

    def step_s(layers: tuple[int, ...]) -> float:
        return lane.step_s(model.chunk_s(layers) * model.slowness[None, :, None])

    best = min((model.layers, _even(model, smallest)), key=step_s)
    best_s = step_s(best)
    for _ in range(MOVES):
        options = [(step_s(moved), moved) for moved in _moves(best, smallest)]
        if not options or min(options)[0] >= best_s * (1 - 1e-9):
            break
        best_s, best = min(options)
    return best


def _even(model: StageModel, smallest: int) -> tuple[int, ...]:
    """Layers dealt one by one to the stage that is then cheapest."""
    layer = float(model.layer_s.sum())
    cost = model.extra_s.sum(axis=0)
    layers = [smallest] * len(model.layers)
    cheapest = [((cost[at] + (smallest + 1) * layer) * model.slowness[at], at) for at in range(len(layers))]
    heapify(cheapest)
    for _ in range(sum(model.layers) - sum(layers)):
        at = cheapest[0][1]
        layers[at] += 1
        heapreplace(cheapest, ((cost[at] + (layers[at] + 1) * layer) * model.slowness[at], at))
    return tuple(layers)


def _moves(layers: tuple[int, ...], smallest: int) -> list[tuple[int, ...]]:
    """Every split one layer away."""
    moves = []
    for giver in range(len(layers)):
        if layers[giver] <= smallest:
            continue
        for taker in range(len(layers)):
            if taker != giver:
                moved = list(layers)
                moved[giver] -= 1
                moved[taker] += 1
                moves.append(tuple(moved))
    return moves


def with_slowness(model: StageModel, slowness: Floats) -> StageModel:
    """The model of a job whose stages wait for a slow worker."""
    return replace(model, slowness=slowness)
