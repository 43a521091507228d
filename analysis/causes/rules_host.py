"""Rules for causes on the host: data that is late, Python and launches that cannot keep up.

In: `Evidence`. Out: `Candidate`s. See `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.causes.model import Candidate, CauseKind, Figure, Where, confidence_from
from tracekit.analysis.causes.rule import Rule
from tracekit.analysis.evidence.changes import Change, NoDelays, NoOverlap, Scale, ScaleDelays, Together
from tracekit.analysis.evidence.evidence import Evidence
from tracekit.analysis.evidence.workers import slow_workers
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, lower_median, median, nan_mean, sampled
from tracekit.text import seconds

#: Waiting for data from here on (seconds) is late data.
SMALLEST_DATA_DELAY_S = 5e-3
#: Launch delays and other host work, waiting for data apart, that make up this share of the step.
HOST_BOUND_SHARE = 0.04
#: A worker stands out from here on: times what is usual.
HOST_FACTOR = 2.0
#: An optimizer that takes this many times as long as its peers' is slow, if by so many of its standard errors.
SMALLEST_OPTIMIZER_FACTOR = 1.5
OPTIMIZER_ERRORS = 6.0


class LateData(Rule):
    """A step waits for its data.

    Paper: excludes launch delays from the replay and discards jobs in which they exceed 5 % of the step. tracekit
    keeps them per op: those of the first forwards, and of the first gathering of parameters, are data loading, and are
    priced by replaying without them. Where the loading itself was recorded, what it takes is the wait, and a delay
    behind it is something else.
    """

    kind = CauseKind.LATE_DATA
    title = "Steps wait for their data"
    signature = "long data loading, or a launch delay before the first ops where loading was not recorded"
    refuted_by = "the delay stays when the loader's workers and prefetch depth are doubled"
    next_check = "the loader's queue depth at the start of a step; host: PSI io, page cache, storage latency"
    suggested_fix = "prefetch more, on more loader workers"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if not evidence.data_loads.empty:
            sources = [(evidence.data_loads, evidence.data_loads.gather(evidence.replay.durations.own))]
            usual = 0.0
        elif not evidence.first_forwards.empty:
            sources = list(_beginnings(evidence))
            usual = _typical_delay(evidence)
        else:
            return
        least_s = np.maximum(max(SMALLEST_DATA_DELAY_S, 10 * usual), HOST_FACTOR * _own_delay(evidence))
        late = [waits > least_s for _, waits in sources]
        if not any(hit.any() for hit in late):
            return
        waited = [np.where(hit, waits, 0.0).sum(axis=1) for hit, (_, waits) in zip(late, sources, strict=True)]
        worst = np.sum(waited, axis=0).max(axis=(0, 2))
        figures = (Figure(self._figure(evidence), float(worst.mean()), SMALLEST_DATA_DELAY_S, "s"),)
        dp_hit = np.logical_or.reduce([hit.any(axis=(0, 1)) for hit in late]).mean(axis=0) >= 0.5
        some = dp_hit.any() and (not dp_hit.all() or len(dp_hit) == 1)
        dp_ranks = tuple(evidence.dp_ranks[int(at)] for at in np.flatnonzero(dp_hit)) if some else ()
        scale = ScaleDelays if evidence.data_loads.empty else Scale
        change = Together(
            tuple(
                scale(grid, np.where(hit, usual / np.where(hit, waits, 1.0), 1.0))
                for hit, (grid, waits) in zip(late, sources, strict=True)
            )
        )
        series = 1 + worst / evidence.unchanged_s
        mean, longest = seconds(float(worst.mean())), seconds(float(worst.max()))
        effect = f"data comes {mean} late in the mean step, {longest} in the worst"
        yield Candidate(self.kind, Where(dp_ranks=dp_ranks), effect, figures, confidence_from(figures), change, series)

    def _figure(self, evidence: Evidence) -> str:
        return "delay before the first ops" if evidence.data_loads.empty else "data loading of the worst DP rank"


class SlowOptimizer(Rule):
    """The optimizer of a worker takes longer than those of its peers; its forwards and backwards do not.

    Paper: no signature; an optimizer is a compute op among others. tracekit compares the median optimizer of each
    worker with those of its stage: half as long again, and by six of its standard errors over the steps. Optimizers
    hold the same parameters on all DP ranks of a stage, so there is nothing that could make them differ by design. A
    worker that is slow in all it computes is a bad worker.
    """

    kind = CauseKind.SLOW_OPTIMIZER
    title = "Optimizer of a worker is slow"
    signature = "the optimizer of one worker takes longer in all steps, its forwards and backwards do not"
    refuted_by = "the worker's optimizer has more parameters than those of its peers"
    next_check = (
        "a profile of the optimizer step on this rank: offloading or swapping to the host, memory bandwidth, fused or"
        " foreach kernels; whether it also logs or writes there"
    )
    suggested_fix = "make the optimizer the same on all ranks: same kernels, no offloading on this one alone"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        if evidence.optimizers.empty or len(evidence.dp_ranks) < 2:
            return
        taken_s = evidence.optimizers.gather(evidence.replay.durations.own).sum(axis=1)
        level = median(taken_s, (1,))
        peers = np.maximum(lower_median(level, axis=-1)[:, None], 1e-9)
        scatter = MAD_TO_SIGMA * median(np.abs(taken_s - level[:, None]), (1,)) / np.sqrt(taken_s.shape[1])
        error = np.hypot(scatter, MAD_TO_SIGMA * lower_median(np.abs(level - peers), axis=-1)[:, None]) / peers
        factor = level / peers
        hit = (factor > SMALLEST_OPTIMIZER_FACTOR) & (factor - 1 > OPTIMIZER_ERRORS * error) & ~slow_workers(evidence)
        if not hit.any():
            return
        figures = (
            Figure("optimizer over that of its peers", float(factor[hit].max()), SMALLEST_OPTIMIZER_FACTOR),
            Figure("beyond its peers", float((level - peers)[hit].max()), 0.0, "s"),
        )
        as_peers = Scale(evidence.optimizers, 1 / np.where(hit, factor, 1.0)[:, None, None, :])
        change = Together((as_peers, NoOverlap()))
        series = np.where(hit[:, None], taken_s / peers[:, None], np.nan)
        yield Candidate(
            self.kind,
            Where(workers=evidence.workers_where(hit)),
            f"optimizer takes {figures[0].value:.3g} times as long as its peers', {seconds(figures[1].value)} more",
            figures,
            confidence_from(figures),
            change,
            nan_mean(series, (0, 2)),
            bound=not evidence.distances_seen,
        )


class HostBound(Rule):
    """Launch delays and host work between ops: Python or kernel launch cannot keep up with the GPUs.

    Paper: as for late data; above 5 % the job's replay is not trusted. tracekit names it from 4 % of the step on,
    waiting for data apart, and with it the workers whose hosts take at least twice the usual time.
    """

    kind = CauseKind.HOST_BOUND
    title = "The host cannot keep up: launch delays and host work between ops"
    signature = "launch delays and host work between ops that together make up a large share of the step"
    refuted_by = "CUDA graphs or larger microbatches leave the gaps as they are"
    next_check = "a CPU profile of the launching thread; host: run queue, steal, CPU frequency; gaps in a Kineto trace"
    suggested_fix = "CUDA graphs, fewer small kernels, no logging or evaluation between ops, pin the launching thread"

    def candidates(self, evidence: Evidence) -> Iterator[Candidate]:
        """See `Rule.candidates`."""
        share = _launch_share(evidence) + _host_work_share(evidence)
        if share < HOST_BOUND_SHARE:
            return
        figures = (Figure("launch delays and host work, over the step", share, HOST_BOUND_SHARE),)
        lost = _lost_s(evidence).mean(axis=1)
        hit = lost > max(
            HOST_FACTOR * float(lower_median(lost.ravel(), 0)), HOST_BOUND_SHARE * evidence.unchanged_s / 2
        )
        stopped = np.zeros_like(hit) if evidence.pauses is None else evidence.pauses.stopped
        if hit.any() and not (hit & ~stopped).any():
            return  # a process that is stopped again and again launches late, too: one trouble, one cause
        hit &= ~stopped
        if not hit.any() or 2 * hit.sum() > hit.size:
            change: Change = Together((NoDelays(), Scale(evidence.host_work, np.array(0.0))))
            effect = f"launch delays and host work between ops take {share:.0%} of the step"
            yield Candidate(self.kind, Where(), effect, figures, confidence_from(figures), change)
            return
        factor = np.where(hit, 0.0, 1.0)[:, None, None, :]
        change = Together((ScaleDelays(evidence.computing, factor), Scale(evidence.host_work, factor)))
        usual_s = float(lower_median(lost.ravel(), 0))
        effect = (
            f"takes {seconds(float(lost[hit].max()))} of each step for launch delays and host work, the usual worker"
            f" {seconds(usual_s)}"
        )
        where = Where(workers=evidence.workers_where(hit))
        yield Candidate(self.kind, where, effect, figures, confidence_from(figures), change)


def _beginnings(evidence: Evidence) -> Iterator[tuple[OpGrid, Floats]]:
    """The ops before which a worker can wait for data, and for how long it was late with each, seconds.

    A loop fetches its data at its top, before parameters are gathered, or just before the first forward.
    """
    for grid in (evidence.first_forwards, evidence.first_gathers):
        if not grid.empty:
            yield grid, np.nan_to_num(grid.gather(evidence.launch_delays))


def _own_delay(evidence: Evidence) -> Floats:
    """The usual launch delay of each worker's computes, seconds, [stages, 1, 1, dp_ranks].

    A host that is late with every launch is late with the first one, too: that is not its data.
    """
    if not evidence.data_loads.empty:
        return np.zeros((1, 1, 1, 1))
    delays = evidence.launch_delays
    forwards, backwards = (median(grid.gather(delays), (2,)) for grid in (evidence.forwards, evidence.backwards))
    later = np.nan_to_num(np.concatenate([forwards[:, 1:], backwards], axis=1))
    longest: Floats = later.max(axis=1, initial=0.0)
    return longest[:, None, None, :]


def _launch_share(evidence: Evidence) -> float:
    """Launch delays over the step, without those that count as waiting for data or as pauses of processes."""
    share = evidence.delay_share - evidence.pause_share
    if evidence.data_loads.empty and not evidence.first_forwards.empty:
        waits = sum(delay.max(axis=(0, 1, 3)) for _, delay in _beginnings(evidence))
        share -= float(np.mean(waits)) / evidence.attribution.original_s
    return max(share, 0.0)


def _host_work_share(evidence: Evidence) -> float:
    """Host work of the worker that has most of it in each step, over the step."""
    if evidence.host_work.empty:
        return 0.0
    taken_s = np.nan_to_num(evidence.host_work.gather(evidence.replay.durations.own)).sum(axis=1)
    return float(taken_s.max(axis=(0, 2)).mean()) / evidence.unchanged_s


def _lost_s(evidence: Evidence) -> Floats:
    """Launch delays of computing ops and host work, without waiting for data, seconds [stages, steps, dp_ranks]."""
    delay = np.nan_to_num(evidence.computing.gather(evidence.launch_delays))
    lost: Floats = np.maximum(delay, 0.0).sum(axis=1)
    if evidence.data_loads.empty and not evidence.first_forwards.empty:
        lost -= np.maximum(np.nan_to_num(evidence.first_forwards.gather(evidence.launch_delays)[:, 0]), 0.0)
    if not evidence.host_work.empty:
        lost += np.nan_to_num(evidence.host_work.gather(evidence.replay.durations.own)).sum(axis=1)
    return lost


def _typical_delay(evidence: Evidence) -> float:
    """Median launch delay, seconds."""
    blocks, delays_s = evidence.replay.graph.blocks, evidence.replay.durations.launch_delay
    delays = np.concatenate(
        [
            sampled(delay if block.present is None else delay[block.present])
            for block, delay in zip(blocks, delays_s, strict=True)
        ]
    )
    return max(float(np.median(delays)), 0.0)
