"""The sequence-length signature: do forward and backward of the same microbatch vary together?

In: a `JobReplay`. Out: per stage the Pearson correlation of forward and backward durations of the same microbatch
and chunk, over all steps and DP ranks. Long sequences slow both, so it comes close to 1 (>= 0.9 in the OSDI'25
paper); but one slow worker alone brings it there too, so it is no proof by itself.
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.graph import Block
from tracekit.analysis.job_replay import JobReplay
from tracekit.analysis.structure import Floats, Ints
from tracekit.model import OpKind


def forward_backward_correlation(replay: JobReplay) -> dict[int, float | None]:
    """Stage -> r; None where a stage lacks either direction or one of them does not vary."""
    return {stage: _correlation(*_pairs(replay, stage)) for stage in range(replay.graph.layout.pp)}


def _correlation(forward: Floats, backward: Floats) -> float | None:
    if len(forward) < 2 or np.ptp(forward) == 0 or np.ptp(backward) == 0:
        return None
    return float(np.corrcoef(forward, backward)[0, 1])


def _pairs(replay: JobReplay, stage: int) -> tuple[Floats, Floats]:
    """Durations of forwards and of the backwards of the same microbatch and chunk, seconds, [pairs] each."""
    forward, backward = [np.empty(0)], [np.empty(0)]
    for block, own in zip(replay.graph.blocks, replay.durations.own, strict=True):
        parts = []
        for kind in (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE):
            rows = np.flatnonzero((block.template.pp_rank == stage) & (block.template.kind == kind.code))
            parts.append(np.take_along_axis(own[rows], _order(block, rows), axis=0))
        if len(parts[0]) == len(parts[1]):
            forward.append(parts[0].ravel())
            backward.append(parts[1].ravel())
    return np.concatenate(forward), np.concatenate(backward)


def _order(block: Block, rows: Ints) -> Ints:
    """Positions that put rows in order of (chunk, microbatch), [rows, 1] or [rows, lanes].

    Where microbatches were not recorded the k-th forward counts as the k-th backward's.
    """
    microbatch = block.microbatch[rows].astype(np.int64)
    key = block.template.chunk[rows].astype(np.int64)[:, None] * (int(microbatch.max(initial=0)) + 2) + microbatch
    order: Ints = np.argsort(key, axis=0, kind="stable")
    return order
