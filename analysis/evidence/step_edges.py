"""Connections between steps: time in which no rank does anything, ranks late from the previous step, and breaks.

In: a trace and its `JobReplay`. Out: a `JobReplay` with only the launch delays that belong to each step; and `Breaks`,
the part of these delays that is due to unrecorded work of the training loop; the rest is data or host code.

A recorded step begins when the first rank begins it. Two delays at its beginning are no op's launch delay. A rank that
ended the previous step late begins this one late; the cause was counted there. And if all ranks are idle for a while,
before the first one begins a step or between two steps, no op of the graph is late: the job stalls.

In a break, such as a checkpoint, all workers stand still. Or the first DP rank, or one of its workers, writes for all
of them: it begins every n-th step late, and the others wait for it. Data and host code do not come late so regularly,
except for a loader of which one process is slow; that may be on any rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.op_grid import OpGrid, op_grid
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, median, safe
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Intervention, ScaleDelays, Together, scaled
from tracekit.trace.model import DP_COLLECTIVES, OpKind

#: Idle time of this share of the usual step, beyond the usual time between steps, is a stall.
SMALLEST_STALL_SHARE = 0.1
#: ... if it also exceeds the usual by this many spreads.
STALL_SPREADS = 8.0
#: Stalls in every other step must have happened this many times.
FEWEST_TURNS = 3
#: Steps that overlap by less than this share on average run one after the other.
SMALLEST_OVERLAP_SHARE = 0.005
#: Clocks and rounding make a worker's steps overlap by less than this share of a step.
LARGEST_OVERLAP_SHARE = 0.01
#: Idle time in more than this share of the steps is how the job works, not a stall.
MOST_STEPS_SHARE = 0.5


def with_step_delays(replay: JobReplay, step_starts: Mapping[int, float]) -> JobReplay:
    """The job without stalls and late beginnings in its launch delays; its stalls are in `JobReplay.stalled_s`.

    `step_starts`: absolute starts of steps, seconds, if known.
    """
    graph = replay.graph
    begins, ends = _of_workers(replay)
    since = _distances(graph.steps, step_starts, begins, ends)
    if _contradict(begins, ends, since):
        since = np.full_like(since, np.nan)
    first = np.nanmin(begins, axis=(0, 2))
    last = np.r_[np.nan, np.nanmax(ends, axis=(0, 2))[:-1]]
    step_s = float(median(replay.recorded_step_times(), (0,)))
    stalls = stalls_in(first, step_s)
    late = _late(begins, ends, since)
    delays = []
    for number, block in enumerate(graph.blocks):
        template = block.template
        delay = replay.durations.launch_delay[number]
        first = block.begins()
        rows = np.flatnonzero(first.any(axis=1))
        lanes = graph.dp_index(block)
        excess = np.where(first[rows], stalls[block.step] + late[template.pp_rank[rows]][:, block.step, lanes], 0.0)
        if (excess > 0).any():
            delay = delay.copy()
            delay[rows] = np.where(delay[rows] > 0, np.maximum(delay[rows] - excess, 0.0), delay[rows])
        delays.append(delay)
    stalled = stalls + stalls_in(since - last, step_s)
    return replace(
        replay,
        durations=replace(replay.durations, launch_delay=tuple(delays)),
        stalled_s=stalled if (stalled > 0).any() else None,
    )


def _distances(steps: Int32s, step_starts: Mapping[int, float], begins: Floats, ends: Floats) -> Floats:
    """Seconds from the start of the step before, nan if that was not traced, [steps].

    If starts are relative to their step, uses the least distance that lets every worker end one step before it begins
    the next: nearly always, some worker goes on at once, and how late the others begin shows how late they ended. A
    step starts when the first worker has ended the one before, since from then on it may wait for data.
    """
    following = np.diff(steps) == 1
    starts = np.array([step_starts.get(int(step), np.nan) for step in steps])
    apart = np.diff(starts)
    if not step_starts:
        gone = ends[:, :-1] - begins[:, 1:]
        apart = np.where(np.isfinite(gone), gone, -np.inf).max(axis=(0, 2), initial=-np.inf)
        first_done = np.where(np.isfinite(ends), ends, np.inf).min(axis=(0, 2))[:-1]
        apart = np.maximum(apart, np.where(np.isfinite(first_done), first_done, -np.inf))
    since: Floats = np.r_[np.nan, np.where(following & np.isfinite(apart), apart, np.nan)]
    return since


def _contradict(begins: Floats, ends: Floats, since: Floats) -> bool:
    """True if a step begins, on all workers, before the previous one has ended: such starts were not measured.

    A worker runs its ops of a step before those of the next; only a single worker may still have a collective under
    way.
    """
    overlap = ends[:, :-1] - since[None, 1:, None] - begins[:, 1:]
    finite = np.isfinite(overlap)
    least = np.where(finite, overlap, np.inf).min(axis=(0, 2))
    step_s = np.nanmax(ends, axis=(0, 2))[:-1]
    return bool((np.isfinite(least) & (least > LARGEST_OVERLAP_SHARE * step_s)).any())


def with_overlap(replay: JobReplay, step_starts: Mapping[int, float], replayed_s: Floats) -> JobReplay:
    """The job with `JobReplay.overlap_s`: the excess of replayed steps, `replayed_s` [steps], over their distance.

    A worker that ends late may begin the next step late without harm, while the pipeline fills. So work that one worker
    alone does at the end of a step costs less than it lengthens the step.
    """
    since = _distances(replay.graph.steps, step_starts, *_of_workers(replay))
    apart = np.r_[since[1:], np.nan]
    overlap = np.maximum(replayed_s - apart, 0.0)
    if not np.isfinite(overlap).any() or np.nanmean(overlap) < SMALLEST_OVERLAP_SHARE * replayed_s.mean():
        return replay
    usual = float(median(overlap, (0,)))
    return replace(replay, overlap_s=np.where(np.isfinite(overlap), overlap, usual))


def _of_workers(replay: JobReplay) -> tuple[Floats, Floats]:
    """Begin and end of each worker's ops of a step, seconds, [stages, steps, dp_ranks] each; nan: no op."""
    graph = replay.graph
    shape = (graph.layout.pp, len(graph.steps), len(graph.dp_ranks))
    begins, ends = np.full(shape, np.nan), np.full(shape, np.nan)
    for block in graph.blocks:
        lanes = graph.dp_index(block)
        # Rows are ordered by stage.
        bounds = np.searchsorted(block.template.pp_rank, np.arange(shape[0] + 1))
        for stage, (first, last) in enumerate(pairwise(bounds)):
            if last > first:
                start = block.start[first:last]
                begins[stage, block.step, lanes] = start.min(axis=0)
                ends[stage, block.step, lanes] = (start + block.duration[first:last]).max(axis=0)
    return begins, ends


def stalls_in(idle: Floats, step_s: float) -> Floats:
    """The part of the idle seconds that is stalls; 0 elsewhere, [steps].

    `step_s`: usual length of a step.
    """
    finite = np.isfinite(idle)
    if finite.sum() < 2:
        return np.zeros(len(idle))
    ordered = np.sort(idle[finite])
    stalled = _beyond(idle, ordered, float(np.median(ordered)), step_s)
    hit = np.flatnonzero(stalled)
    if len(hit) and len(hit) <= MOST_STEPS_SHARE * len(idle):
        return stalled
    # If the job stalls in every other step, the usual step is one of the shorter half.
    shorter = ordered[: len(ordered) // 2]
    stalled = _beyond(idle, shorter, float(shorter[-1]), step_s)
    hit = np.flatnonzero(stalled)
    return stalled if len(hit) >= FEWEST_TURNS and (np.diff(hit) == 2).all() else np.zeros(len(idle))


def _beyond(idle: Floats, among: Floats, usual: float, step_s: float) -> Floats:
    """Idle seconds beyond the usual where they exceed it by far, else 0, [steps]. `among`: what scatters around it."""
    spread = MAD_TO_SIGMA * float(np.median(np.abs(among - usual)))
    far = np.isfinite(idle) & (idle - usual > max(SMALLEST_STALL_SHARE * step_s, STALL_SPREADS * spread))
    return np.where(far, idle - usual, 0.0)


def _late(begins: Floats, ends: Floats, since: Floats) -> Floats:
    """Delay with which each worker begins because it ended the previous step late, seconds, [stages, steps, dp_ranks].

    If the previous step was not traced: the usual delay.
    """
    before = np.concatenate([np.full_like(ends[:, :1], np.nan), ends[:, :-1]], axis=1)
    overlap = before - since[None, :, None]  # seconds into this step
    late = np.clip(np.where(np.isfinite(overlap), overlap, np.nan), 0.0, np.fmax(begins, 0.0))
    usual = np.nan_to_num(median(late, (1,)))[:, None, :]
    return np.nan_to_num(np.where(np.isfinite(late), late, np.minimum(usual, np.maximum(begins, 0.0))))


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
