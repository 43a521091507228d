"""Breaks: unrecorded work of the training loop before some of its steps, such as a checkpoint.

In: a `JobReplay` with the launch delays of each step itself. Out: `Breaks`, the part of these delays that is due to
breaks; the rest is data or host code.

In a break, all workers stand still: `step_edges` finds the part that is common to all. Or the first DP rank, or one of
its workers, writes for all of them: it begins every n-th step late, and the others wait for it. Data and host code do
not come late so regularly, except for a loader of which one process is slow; that may be on any rank.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.step_edges import stalls_in
from tracekit.analysis.graph.op_grid import OpGrid, op_grid
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s
from tracekit.analysis.numeric.robust import median, safe
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Intervention, ScaleDelays, Together, scaled
from tracekit.trace.model import DP_COLLECTIVES, OpKind

#: A step begins with the first of these; each chunk gathers its parameters.
_FIRST = (OpKind.DATA_LOAD, OpKind.PARAMS_ALL_GATHER, OpKind.FORWARD_COMPUTE)
#: A worker has a break if it is late by this share of the worst.
SHARE_OF_WORST = 0.5


class Breaks(Struct, frozen=True, eq=False):
    """`late_s`: delay of each worker due to breaks, beyond the time in which all stand still, seconds, [stages, steps,
    dp_ranks]. `alone`: the workers that have breaks for which the others wait, [stages, dp_ranks].

    `grids`: the ops before which they are late; `remaining`: the share of their launch delays that is not due to
    breaks.
    """

    late_s: Floats
    alone: Bools
    grids: tuple[OpGrid, ...]
    remaining: tuple[Floats, ...]

    @property
    def change(self) -> Intervention:
        """The job without these delays."""
        return Together(tuple(ScaleDelays(grid, share) for grid, share in zip(self.grids, self.remaining, strict=True)))

    def without(self, delays: tuple[Floats, ...]) -> tuple[Floats, ...]:
        """Launch delays, seconds, one [rows, lanes] matrix per block, without those due to breaks."""
        for grid, share in zip(self.grids, self.remaining, strict=True):
            delays = scaled(delays, grid.parts(share))
        return delays


def find_breaks(replay: JobReplay) -> Breaks | None:
    """The breaks of a job; None if it has none."""
    graph = replay.graph
    first = (op_grid(graph, (kind,), most=graph.layout.vpp if kind in DP_COLLECTIVES else 1) for kind in _FIRST)
    grids = tuple(grid for grid in first if not grid.empty)
    if not grids:
        return None
    delays = [np.maximum(np.nan_to_num(grid.gather(replay.durations.launch_delay)), 0.0) for grid in grids]
    late_s = np.max([delay.max(axis=1) for delay in delays], axis=0)
    still = np.zeros(late_s.shape[1], np.bool_) if replay.stalled_s is None else replay.stalled_s > 0
    step_s = float(median(replay.recorded_step_times(), (0,)))
    others_s = np.where(still[:, None], 0.0, late_s)
    together = _together(others_s.max(axis=0), graph.steps, step_s)
    alone = np.zeros(late_s.shape, np.bool_) if together.any() else _alone(others_s, graph.steps, step_s)
    hit = (still | together)[None, :, None] | alone
    if not hit.any():
        return None
    quiet = ~hit.any(axis=(0, 2))
    usual = [median(delay[:, :, quiet], (2,))[:, :, None] for delay in delays]
    remaining = tuple(
        np.where(hit[:, None] & (delay > often), often / safe(delay), 1.0)
        for delay, often in zip(delays, usual, strict=True)
    )
    due_s = np.max([((1 - kept) * delay).max(axis=1) for kept, delay in zip(remaining, delays, strict=True)], axis=0)
    return Breaks(due_s, np.asarray(alone.any(axis=1)), grids, remaining)


def _together(late_s: Floats, steps: Int32s, step_s: float) -> Bools:
    """The steps before which all have a break of about the same length, [steps]. `late_s`: [steps, dp_ranks]."""
    hit = stalls_in(late_s.min(axis=1), step_s) > 0
    alike = (late_s.min(axis=1) > SHARE_OF_WORST * late_s.max(axis=1))[hit].all()
    return hit if alike and (hit.sum() == 1 or _regular(steps[hit], steps)) else np.zeros_like(hit)


def _alone(late_s: Floats, steps: Int32s, step_s: float) -> Bools:
    """Mask of breaks of the first DP rank's workers for which the others wait, [stages, steps, dp_ranks]."""
    mask = np.zeros(late_s.shape, np.bool_)
    hit = stalls_in(late_s[:, :, 0].max(axis=0), step_s) > 0
    if late_s.shape[2] > 1 and _regular(steps[hit], steps):
        beyond_s = late_s - median(late_s[:, ~hit], (1,))[:, None]
        least_s = SHARE_OF_WORST * beyond_s[:, hit, 0].max(axis=0).min()
        if beyond_s[:, :, 1:].max() < least_s:  # others are never as late
            mask[:, :, 0] = (beyond_s[:, hit, 0].mean(axis=1) > least_s)[:, None] & hit
    return mask


def _regular(hit: Int32s, steps: Int32s) -> bool:
    """True if `hit` are all those of `steps` that are a multiple of some number of steps apart."""
    if len(hit) < 2:
        return False
    apart = int(hit[1] - hit[0])
    return apart > 1 and bool(np.array_equal(steps[(steps - hit[0]) % apart == 0], hit))
