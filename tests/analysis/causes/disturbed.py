"""Jobs whose computes are scaled at will, where the synthetic causes are too regular."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.graph.op_grid import ComputeTable
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Scale, changed


def table_of(replay: JobReplay) -> ComputeTable:
    """The computes of a job as recorded."""
    return ComputeTable.of(replay.graph, replay.durations.cost)


def disturbed(replay: JobReplay, factor: np.ndarray) -> JobReplay:
    """The job with its computes times `factor`, which broadcasts to the grid of its `ComputeTable`."""
    blocks = changed(replay, (Scale(table_of(replay), factor),)).cost
    return replace(replay, durations=replace(replay.durations, cost=tuple(block.matrix() for block in blocks)))


def one_worker(replay: JobReplay, kinds: list[int], stage: int, dp_index: int, factor: float) -> np.ndarray:
    """`factor` for the computes of these kinds on one worker, 1 elsewhere."""
    shape = table_of(replay).shape
    slow = np.ones(shape)
    slow[kinds, stage, ..., dp_index] = factor
    return slow


def real_noise(replay: JobReplay, seed: int) -> np.ndarray:
    """As machines disturb: each worker wanders over the steps by 1.5 %, and one op in fifty takes up to five times."""
    shape = table_of(replay).shape
    _, stages, _, _, steps, dp_ranks = shape
    rng = np.random.default_rng(seed)
    wander = np.stack(list(_wandering(rng, steps, (stages, dp_ranks))))  # [steps, stages, dp_ranks]
    tails = np.where(rng.random(shape) < 0.02, 1 + rng.pareto(1.5, shape).clip(max=4), 1.0)
    return tails * np.exp(0.015 * wander.transpose(1, 0, 2))[None, :, None, None]


def _wandering(rng: np.random.Generator, steps: int, shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Unit normals, each correlated by 0.7 with the one before."""
    now = rng.normal(size=shape)
    for _ in range(steps):
        yield now
        now = 0.7 * now + np.sqrt(1 - 0.7**2) * rng.normal(size=shape)
