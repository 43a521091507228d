"""How many layers each pipeline stage should have.

In: the current cost and layers of each stage. Out: the cost of a layer, the extra cost of the first and the last stage
(embedding, loss), and the integer split of the layers with the shortest replayed step.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.plans.best_plans import search
from tracekit.analysis.plans.model import PlanModel, Reduction, Space, TrainingPlan, layers_of
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import Costs, replay_lanes
from tracekit.trace.compute_order import Schedule
from tracekit.trace.model import OpKind

#: Extra cost of an end stage below this share of the stage is noise.
SMALLEST_EXTRA = 0.02
#: First stages of plans that a search for a split keeps at most: a report must not wait for the last percent.
_PARTS = 1 << 12


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

    @property
    def of_layers_s(self) -> Floats:
        """Seconds of each layer of the model, with embedding and loss on the first and the last, [kinds, layers]."""
        seconds: Floats = np.repeat(self.layer_s[:, None], sum(self.layers), axis=1)
        seconds[:, 0] += self.extra_s[:, 0]
        if len(self.layers) > 1:
            seconds[:, -1] += self.extra_s[:, -1]
        return seconds

    def plan_model(self, microbatches: int, schedule: Schedule) -> PlanModel:
        """A search for the best split, all else as it is. A sample is a microbatch."""
        stages, takes_s = len(self.layers), self.of_layers_s[[0, -1]]
        whole = tuple((count,) for count in self.layers)
        return PlanModel(
            layers=layers_of(takes_s, np.zeros(2), np.zeros(takes_s.shape[1])),
            stages=stages,
            replicas=1,
            samples=microbatches,
            transfer_s=(0.0, 0.0),
            reduce=Reduction(0.0, 0.0),
            optimizer_s=0.0,
            slowness=tuple(self.slowness.tolist()),
            now=TrainingPlan(self.layers, schedule, microbatches, (False,) * stages, whole),
            space=Space(split="free", buckets="one"),
        )

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

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        _, kind, stage, chunk = self._cells
        return max(int(((kind == 0) & (stage == 0) & (chunk == 0)).sum()), 1)

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

    Of the best splits of a plain pipeline, the one with the shortest replayed step: the job itself may be interleaved,
    and exchanges more than activations.
    """
    plain = model.plan_model(lane.microbatches, Schedule.ONE_F_ONE_B)
    candidates = [] if plain.problem else search(plain, None, most_parts=_PARTS).plans
    splits = [model.layers, *(each.plan.split for each in candidates)]
    return min(splits, key=lambda layers: lane.step_s(model.chunk_s(layers) * model.slowness[None, :, None]))
