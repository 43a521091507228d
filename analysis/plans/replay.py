"""The replay of plans: exact step times of many splits of a job side by side.

In: `Stages` and the layers of the stages of each plan. Out: seconds. Microbatches of a stage take equally long, so an
array of plans passes through every compute of the schedule once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.plans.stages import Stages
from tracekit.trace.compute_order import Schedule, compute_order
from tracekit.trace.model import Layout

#: Plans of one pass over the schedule: their times fit into the cache.
_AT_ONCE = 4096


def step_times(stages: Stages, splits: Ints) -> Floats:
    """Step times of the plans with these splits, seconds, [plans]; `splits`: layers of each stage, [plans, stages]."""
    ends = np.cumsum(splits, axis=1)
    tail_s = stages.tail_s[np.arange(splits.shape[1]), ends - splits, ends].T
    return np.asarray((last_backwards(stages, splits) + tail_s).max(axis=0) + stages.model.optimizer_s)


def last_backwards(stages: Stages, splits: Ints) -> Floats:
    """When the last backward of each stage of these plans starts, seconds, [stages, plans]."""
    ends, stage = np.cumsum(splits, axis=1), np.arange(splits.shape[1])
    forward_s, backward_s = (takes[stage, ends - splits, ends].T for takes in (stages.forward_s, stages.backward_s))
    start_s: Floats = np.empty(forward_s.shape)
    for begin in range(0, len(splits), _AT_ONCE):
        chunk = slice(begin, begin + _AT_ONCE)
        start_s[:, chunk] = _last_backwards(stages, forward_s[:, chunk], backward_s[:, chunk])
    return start_s


def _last_backwards(stages: Stages, forward_s: Floats, backward_s: Floats) -> Floats:
    """`last_backwards`, by what a forward and a backward of each stage take, seconds, [stages, plans]."""
    count, transfer_s = len(forward_s), stages.transfer_s
    free, start = np.zeros_like(forward_s), np.zeros_like(forward_s)
    arrives: dict[tuple[int, bool, int], Floats] = {}
    for stage, is_forward, microbatch in _computes(stages.schedule, count, stages.microbatches):
        begin, end = start[stage], free[stage]
        needed = arrives.pop((stage, is_forward, microbatch), None)
        np.copyto(begin, end) if needed is None else np.maximum(end, needed, out=begin)
        np.add(begin, (forward_s if is_forward else backward_s)[stage], out=end)
        follower = stage + 1 if is_forward else stage - 1
        if 0 <= follower < count:
            arrives[follower, is_forward, microbatch] = end + transfer_s
    return start


@lru_cache(64)
def _computes(schedule: Schedule, stages: int, microbatches: int) -> tuple[tuple[int, bool, int], ...]:
    """The computes (stage, forward or backward, microbatch) of a schedule, each after what it needs."""
    return tuple(_in_order(schedule, stages, microbatches))


def _in_order(schedule: Schedule, stages: int, microbatches: int) -> Iterator[tuple[int, bool, int]]:
    layout = Layout(dp=1, pp=stages, tp=1)
    waiting = [deque(compute_order(schedule, layout, microbatches, stage)) for stage in range(stages)]
    done: set[tuple[int, bool, int]] = set()
    while any(waiting):
        for stage, computes in enumerate(waiting):
            while computes:
                forward, microbatch = computes[0].forward, computes[0].microbatch
                before = stage - 1 if forward else stage + 1
                if 0 <= before < stages and (before, forward, microbatch) not in done:
                    break
                computes.popleft()
                done.add((stage, forward, microbatch))
                yield stage, forward, microbatch
