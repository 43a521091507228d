"""Time at the beginning of a step spent waiting for data.

In: recorded data loading or, without it, the launch delays of the first ops of a step, which can wait for data. Out:
`DataWaits`.
"""

from __future__ import annotations

from math import comb, log

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.grids import backwards, data_loads, first_forwards, first_gathers, forwards
from tracekit.analysis.evidence.launch_delays import launch_delays
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.graph.op_grid import OpGrid
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.robust import median, sampled

#: Waiting for data at least this long, seconds, means late data.
SMALLEST_DATA_DELAY_S = 5e-3
#: In short steps, so does recorded loading that takes this share of the step.
SMALLEST_DATA_SHARE = 0.05
#: A first op waits for data if its delay is at least this many times the worker's usual launch delay.
HOST_FACTOR = 2.0
#: Data is late on a rank in a step if its wait exceeds the shortest by this share of the longest excess; the longest
#: is this share of the mean of these.
SHARE_OF_WORST, SHARE_OF_USUAL = 0.5, 0.25
#: It is late on few ranks if they have this share of these waits, and each of them makes that so many times likelier
#: than chance does.
NEARLY_ALL_SHARE, LIKELIER = 0.9, 2.5


class DataWait(Struct, frozen=True, eq=False):
    """Ops in which, or before which, workers wait for data. `waits_s`: seconds; `late`: which are late; both like the
    grid.
    """

    ops: OpGrid
    waits_s: Floats
    late: Bools


class DataWaits(Struct, frozen=True, eq=False):
    """All data waits of a job. `recorded`: True if loading itself was recorded; `usual_s`: the usual delay; `least_s`:
    one that may be late.
    """

    recorded: bool
    usual_s: float
    least_s: float
    waits: tuple[DataWait, ...]


@evidence(PipelineSubject)
def data_waits_of(job: PipelineSubject) -> DataWaits:
    """Waits for data at the beginning of a step; none for a job without forwards and without recorded loading."""
    recorded = not data_loads(job).empty
    if recorded:
        sources = [(data_loads(job), data_loads(job).gather(job.replay.durations.cost))]
        smallest_s = min(SMALLEST_DATA_DELAY_S, SMALLEST_DATA_SHARE * job.unchanged_s)
        usual_s, least_s = 0.0, np.array(smallest_s)
    elif first_forwards(job).empty:
        return DataWaits(recorded, 0.0, SMALLEST_DATA_DELAY_S, ())
    else:
        # A training loop fetches data at its top, before it gathers parameters, or just before the first forward.
        grids = [grid for grid in (first_forwards(job), first_gathers(job)) if not grid.empty]
        sources = [(grid, np.nan_to_num(grid.gather(launch_delays(job)))) for grid in grids]
        usual_s = _typical_delay(job)
        smallest_s = SMALLEST_DATA_DELAY_S
        least_s = np.maximum(max(smallest_s, 10 * usual_s), HOST_FACTOR * _own_delay(job))
    return DataWaits(
        recorded, usual_s, smallest_s, tuple(DataWait(ops, waits_s, waits_s > least_s) for ops, waits_s in sources)
    )


def late_ranks(late_s: Floats) -> Bools:
    """The DP ranks on which data is late: the fewest with nearly all of it; all, if these could have it by chance,
    [dp_ranks]. `late_s`: seconds, [steps, dp_ranks].
    """
    beyond_s = late_s - late_s.min(axis=1, keepdims=True)
    most_s = beyond_s.max(axis=1)
    hit = most_s > SHARE_OF_WORST * late_s.max(axis=1)  # in other steps it is late on all
    hit &= most_s > SHARE_OF_USUAL * float(late_s.max(axis=1).mean())
    late = hit[:, None] & (beyond_s > SHARE_OF_WORST * most_s[:, None])
    everybody, count = np.ones(late.shape[1], np.bool_), late.sum(axis=0)
    if late_s[hit].max(axis=1).sum() < SHARE_OF_WORST * late_s.max(axis=1).sum():
        return everybody
    order = np.argsort(-count, kind="stable")
    few = int(np.searchsorted(np.cumsum(count[order]), NEARLY_ALL_SHARE * count.sum())) + 1
    chosen = np.isin(np.arange(len(count)), order[:few])
    inside = ~late[:, ~chosen].any(axis=1)[hit]
    # How many ways there are for as many ranks to be late in a step, over those among the chosen ones.
    ways = sum(log(comb(len(count), some)) - log(comb(few, some)) for some in late.sum(axis=1)[hit][inside].tolist())
    choices = log(comb(len(count), few)) + log(comb(len(inside), int(inside.sum())))
    return chosen if ways - choices > few * log(LIKELIER) else everybody


def _own_delay(job: PipelineSubject) -> Floats:
    """The usual launch delay of each worker's computes, seconds, [stages, 1, 1, dp_ranks].

    A host that is late with every launch is also late with the first one; that is not a wait for data.
    """
    delays = launch_delays(job)
    of_forwards, of_backwards = (median(grid.gather(delays), (2,)) for grid in (forwards(job), backwards(job)))
    later = np.nan_to_num(np.concatenate([of_forwards[:, 1:], of_backwards], axis=1))
    longest: Floats = later.max(axis=1, initial=0.0)
    return longest[:, None, None, :]


def _typical_delay(job: PipelineSubject) -> float:
    """Median launch delay, seconds."""
    blocks, delays_s = job.replay.graph.blocks, job.replay.durations.launch_delay
    delays = np.concatenate(
        [
            sampled(delay if block.present is None else delay[block.present])
            for block, delay in zip(blocks, delays_s, strict=True)
        ]
    )
    return max(float(np.median(delays)), 0.0)
