"""Host work among the collectives and the optimizer at the end of a step, or after them.

In: placed lanes. Out: how many of those ops each row of host work follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tracekit.analysis.graph.megatron import COMPUTE_STREAM, HOST_WORK, is_held, step_tail
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.trace.model import KINDS, OpKind

if TYPE_CHECKING:
    from tracekit.analysis.graph.lanes import PlacedLanes


def stage_rows(by_stage: Int32s, stage: int, kind: OpKind) -> Ints:
    """The rows of a kind on a stage. `by_stage`: their numbers, [stages, kinds]."""
    end = int(by_stage.reshape(-1)[: stage * len(KINDS) + kind.code + 1].sum())
    return np.arange(end - by_stage[stage, kind.code], end)


def ops_ended(placed: PlacedLanes, stage: int, begin: Floats, lanes: Ints) -> Ints:
    """How many ops at the end of a stage's step had ended when host work began at `begin`, seconds, in these `lanes`,
    [ops] each; 0 if a compute began later.
    """
    count = np.zeros(len(begin), np.int64)
    computes = [stage_rows(placed.by_stage, stage, kind) for kind in COMPUTE_STREAM if kind not in HOST_WORK]
    last_s = placed.start[np.concatenate(computes)].max(axis=0, initial=-np.inf)
    behind = np.flatnonzero(begin > last_s[lanes])
    for row in step_tail(partial(stage_rows, placed.by_stage, stage), placed.start[:, 0]) if len(behind) else ():
        start = placed.start[row, lanes[behind]]
        count[behind] += is_held(begin[behind], start, start + placed.duration[row, lanes[behind]])
    return count


def first_after_tail(placed: PlacedLanes) -> Ints:
    """`LaneOps.after_tail` in the first lane, [rows]."""
    after_tail = np.zeros(len(placed.start), np.int64)
    for rows, of_lanes in after_tails(placed.only(np.arange(1))):
        after_tail[rows] = of_lanes[:, 0]
    return after_tail


def after_tails(placed: PlacedLanes) -> Iterator[tuple[Ints, Ints]]:
    """The rows of each stage's host work, and how many ops at the end of the step they follow, [rows, lanes]."""
    for stage in range(len(placed.by_stage)):
        rows = np.concatenate([stage_rows(placed.by_stage, stage, kind) for kind in HOST_WORK])
        if not len(rows):
            continue
        lanes = np.tile(np.arange(len(placed.step)), len(rows))
        yield rows, ops_ended(placed, stage, placed.start[rows].ravel(), lanes).reshape(len(rows), len(placed.step))
