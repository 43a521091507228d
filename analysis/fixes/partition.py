"""How many layers each pipeline stage should have.

In: the current cost and layers of each stage. Out: the cost of a layer, the extra cost of the first and the last stage
(embedding, loss), and the integer split of the layers with the shortest replayed step.
"""

from __future__ import annotations

from functools import cached_property
from heapq import heapify, heapreplace
from itertools import permutations

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import Costs, replay_lanes
from tracekit.trace.model import OpKind

#: Extra cost of an end stage below this share of the stage is noise.
SMALLEST_EXTRA = 0.02
#: No model has more layers on a stage, and the search for a split would take too long.
MOST_LAYERS = 1000
MOVES = 200


class StageModel(Struct, frozen=True, eq=False):
    """Cost of stages, seconds per microbatch.

    `layer_s`: forward and backward of one layer, [kinds]. `extra_s`: cost of a stage's last chunk (of the first stage:
    of its first chunk) beyond its layers, [kinds, stages]. `layers`: current layers per stage. `slowness`: how much
    slower the slowest worker of each stage is than its peers, [stages].
    """

    layers: tuple[int, ...]
    layer_s: Floats
    extra_s: Floats
    chunks: int
    slowness: Floats

    def chunk_s(self, layers: tuple[int, ...]) -> Floats:
        """Cost of each chunk with the split `layers`, seconds, [kinds, stages, chunks]."""
        share = np.array(layers) / self.chunks
        cost = np.repeat((self.layer_s[:, None] * share)[:, :, None], self.chunks, axis=2)
        cost[:, 0, 0] += self.extra_s[:, 0]
        if len(layers) > 1:
            cost[:, -1, -1] += self.extra_s[:, -1]
        return cost

    def factor(self, layers: tuple[int, ...]) -> Floats:
        """Cost with the split `layers` over current cost, [kinds, stages, chunks]."""
        return self.chunk_s(layers) / self.chunk_s(self.layers)


def stage_model(base_s: Floats, layers: tuple[int, ...]) -> StageModel:
    """Fit the model to `base_s`, seconds per chunk [kinds, stages, chunks].

    The cost of a layer is the median over the inner stages (with fewer than three stages: over all but the last). What
    the end stages cost beyond it is embedding and loss.
    """
    total = base_s.sum(axis=2)
    per_layer = total / np.array(layers)
    inner = per_layer[:, 1:-1] if len(layers) >= 3 else per_layer[:, :1]
    layer_s = np.median(inner, axis=1)
    extra = total - layer_s[:, None] * np.array(layers)
    extra[:, 1:-1] = 0.0
    extra[np.abs(extra) < SMALLEST_EXTRA * total] = 0.0
    return StageModel(layers, layer_s, np.maximum(extra, 0.0), base_s.shape[2], np.ones(len(layers)))


class OneLane(Struct, frozen=True, eq=False, dict=True):
    """Replays a step of one DP rank with one cost per (kind, stage, chunk), 1000 times faster than the whole job."""

    template: Template
    rows: Floats

    @classmethod
    def of(cls, replay: JobReplay) -> OneLane:
        """The structure that most lanes of the job share, with every op at its ideal cost."""
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
        """Step time, seconds, with forwards and backwards of `chunk_s` [kinds, stages, chunks] seconds."""
        rows, kind, stage, chunk = self._cells
        costs = self.rows.copy()
        costs[rows] = chunk_s[kind, stage, np.minimum(chunk, chunk_s.shape[2] - 1)]
        return float(replay_lanes(self.template, np.array([0, 1]), Costs.of_constant(costs))[0])


def work_shares(work_s: Floats, slowness: Floats) -> Floats:
    """Spread the same total work over the stages so that all take equally long, seconds [stages].

    `work_s`: work of each stage per microbatch on a healthy worker, seconds [stages]; `slowness`: how many times longer
    the slowest worker of each stage takes, [stages].
    """
    speed = 1 / slowness
    shares: Floats = work_s.sum() * speed / speed.sum()
    return shares


def best_split(model: StageModel, lane: OneLane) -> tuple[int, ...]:
    """The integer split with the shortest step, each stage with at least one layer.

    Starts from the split whose costliest stage is cheapest, then moves single layers while that shortens the replayed
    step.
    """

    def step_s(layers: tuple[int, ...]) -> float:
        return lane.step_s(model.chunk_s(layers) * model.slowness[None, :, None])

    best = min((model.layers, _even(model)), key=step_s)
    best_s = step_s(best)
    for _ in range(MOVES):
        options = [(step_s(moved), moved) for moved in _moves(best)]
        if not options or min(options)[0] >= best_s * (1 - 1e-9):
            break
        best_s, best = min(options)
    return best


def _even(model: StageModel) -> tuple[int, ...]:
    """Deal the layers one by one, each to the stage that is cheapest after taking it."""
    layer = float(model.layer_s.sum())
    cost = model.extra_s.sum(axis=0)
    layers = [1] * len(model.layers)
    cheapest = [((cost[at] + 2 * layer) * model.slowness[at], at) for at in range(len(layers))]
    heapify(cheapest)
    for _ in range(sum(model.layers) - sum(layers)):
        stage = cheapest[0][1]
        layers[stage] += 1
        heapreplace(cheapest, ((cost[stage] + (layers[stage] + 1) * layer) * model.slowness[stage], stage))
    return tuple(layers)


def _moves(layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every split that differs by one moved layer."""
    return [
        tuple(count - (at == giver) + (at == taker) for at, count in enumerate(layers))
        for giver, taker in permutations(range(len(layers)), 2)
        if layers[giver] > 1
    ]
