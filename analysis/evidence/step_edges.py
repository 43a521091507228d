"""Connections between steps: time in which no rank does anything, and ranks that are late from the previous step.

In: a trace and its `JobReplay`. Out: a `JobReplay` with only the launch delays that belong to each step.

A recorded step begins when the first rank begins it. Two delays at its beginning are no op's launch delay. A rank that
ended the previous step late begins this one late; the cause was counted there. And if all ranks are idle for a while,
before the first one begins a step or between two steps, no op of the graph is late: the job stalls.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, median
from tracekit.analysis.replay.engine import JobReplay

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
