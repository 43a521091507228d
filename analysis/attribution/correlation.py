"""The sequence-length signature: do forward and backward of the same microbatch vary together?

In: a `JobReplay`. Out: for each stage, the Pearson correlation of forward and backward durations of the same microbatch
and chunk, over all steps and DP ranks. Long sequences slow down both, so it is close to 1 (>= 0.9 in the OSDI'25
paper). A single slow worker has the same effect, so a high correlation alone proves nothing.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.graph.compute_rows import compute_rows
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.engine import JobReplay
from tracekit.trace.model import OpKind


def forward_backward_correlation(replay: JobReplay) -> dict[int, float | None]:
    """Stage -> r; None if a stage has no forwards or no backwards, or if one of them does not vary."""
    return {stage: _correlation(*_pairs(replay, stage)) for stage in range(replay.graph.layout.pp)}


def _correlation(forward: Floats, backward: Floats) -> float | None:
    if len(forward) < 2 or np.ptp(forward) == 0 or np.ptp(backward) == 0:
        return None
    return float(np.corrcoef(forward, backward)[0, 1])


def _pairs(replay: JobReplay, stage: int) -> tuple[Floats, Floats]:
    """Durations of forwards, and of the backwards of the same microbatch and chunk, seconds, [pairs] each."""
    forward, backward = [np.empty(0)], [np.empty(0)]
    for block, cost in zip(replay.graph.blocks, replay.durations.cost, strict=True):
        both = [
            compute_rows(block, stage, kind).seconds(cost) for kind in (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE)
        ]
        if len(both[0]) == len(both[1]):
            forward.append(both[0].ravel())
            backward.append(both[1].ravel())
    return np.concatenate(forward), np.concatenate(backward)
