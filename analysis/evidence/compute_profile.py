"""What makes computes differ: stage, worker, DP rank, step, microbatch, pauses.

In: a `ComputeTable`. Out: a `ComputeProfile`, the cost of a compute as the product
    stage and chunk x worker x DP rank x step x microbatch, plus a pause.
Each factor is a median over all others, so that one cause does not pass for another: a slow worker moves no stage,
a long microbatch no worker, a pause no microbatch. Workers have a factor for forwards and one for backwards: what
slows a worker need not slow both, and the median of a mixture of fast and slow ops is neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, SAMPLE, lower_median, median, nan_mean, sampled

FORWARD, BACKWARD = 0, 1
#: A median of n values scatters by this much x their spread / sqrt(n).
MEDIAN_ERROR = 1.2533
#: Which quantile of microbatches stands for a DP rank or a step.
QUARTILE = 0.25
#: A pause is at least this share of the compute it interrupts, and this many spreads long.
SMALLEST_PAUSE = 0.5
PAUSE_SPREADS = 8.0
#: A factor differs from 1 when it exceeds it by this much and by this many of its standard errors.
SMALLEST_FACTOR = 0.04
FACTOR_ERRORS = 6.0
STEP_ERRORS = 6.0
#: Seconds, and factors, below this are none: no clock shows them, and dividing by them overflows.
NOTHING = 1e-12
#: How far runs of steps lie apart says how much a factor scatters; so many runs, of at least one step each.
RUNS = 8
FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """Factors of compute costs. All but the seconds are relative, 1 = as the others.

    `base_s`: seconds, [kinds, stages, chunks]. `worker_by_kind`: [kinds, stages, dp_ranks] beyond `dp_rank`
    [dp_ranks], which all kinds and stages of a DP rank share.
    `step`: [steps]. `microbatch`: [microbatches, steps, dp_ranks], mean 1 per job. `*_error`: standard errors.
    `pause_s`: seconds beyond what the factors explain, 0 for no pause, [kinds, stages, chunks, microbatches, steps,
    dp_ranks]. `length_correlation`: of forwards and backwards over the microbatches of one DP rank and step;
    `length_spread`: standard deviation of those backwards, relative.
    """

    base_s: Floats
    worker_by_kind: Floats
    worker_by_kind_error: Floats
    dp_rank: Floats
    dp_rank_error: Floats
    step: Floats
    step_error: Floats
    microbatch: Floats
    pause_s: Floats
    length_correlation: float
    length_spread: float

    @property
    def stage_s(self) -> Floats:
        """Forward plus backward seconds of each chunk, [stages, chunks]."""
        total: Floats = self.base_s.sum(axis=0)
        return total

    @property
    def worker(self) -> Floats:
        """Forwards and backwards of each worker together, as they weigh on its stage: [stages, dp_ranks]."""
        return self._both_kinds(self.worker_by_kind)

    @property
    def worker_error(self) -> Floats:
        """Standard error of `worker`; what disturbs a host disturbs both kinds, so that the errors add up."""
        return self._both_kinds(self.worker_by_kind_error)

    def _both_kinds(self, by_kind: Floats) -> Floats:
        seconds = self.base_s.sum(axis=2)[:, :, None]
        both: Floats = (by_kind * seconds).sum(axis=0) / safe(seconds.sum(axis=0))
        return both


def profile_computes(table: ComputeTable) -> ComputeProfile:
    """Take the costs of `table` apart. The table must not be empty."""
    grid = table.grid
    base = lower_median(median(grid, (3, 4)), axis=-1)
    relative = grid / safe(base)[:, :, :, None, None, None]
    cells = relative[BACKWARD].reshape(-1, *grid.shape[3:])
    chunks = grid.shape[2]
    # What all stages of a DP rank share; backwards only: pauses of Python do not reach them. The lower median keeps a
    # slow worker out of it but lies below the middle, so a second pass takes the plain one without worker factors.
    first = _own_factor(relative[BACKWARD] / safe(lower_median(cells, axis=0)))
    shared = median(cells / safe(np.repeat(first, chunks, axis=0))[:, None, None, :], (0,))
    raw, worker_error = _worker_levels(relative / safe(shared))
    dp_rank_raw, dp_rank_error = _typical(shared, (0, 1))
    dp_rank = dp_rank_raw / safe(lower_median(dp_rank_raw, axis=-1))
    if (grid.shape[1], grid.shape[-1]) == (2, 2):
        # Of two stages on two DP ranks, that one worker is slow looks like the worker across being slow, except for
        # what their microbatches cost: who it is, and how much each, is no surer than that.
        worker_error = np.hypot(worker_error, np.hypot(*dp_rank_error))
    # A factor that does not stand out is the microbatches' own: taking it out would bend their costs.
    slow_ranks = np.where(is_significant(dp_rank, dp_rank_error, FACTOR_ERRORS), dp_rank, 1.0)
    # Workers are compared with their peers of the same stage and kind before anything is called the DP rank's:
    # where only its backwards are slow, what backwards share would make its forwards look fast, and the peers' slow.
    beyond_peers = raw * slow_ranks
    beyond_peers = beyond_peers / safe(lower_median(beyond_peers, axis=-1))[..., None]
    all_share = lower_median(beyond_peers.reshape(-1, beyond_peers.shape[-1]), axis=0)
    all_share = np.where(np.abs(all_share / slow_ranks - 1) > SMALLEST_FACTOR, all_share, slow_ranks)
    step, step_error = _typical(shared / safe(dp_rank_raw), (0, 2))
    step = step / safe(median(step, (0,)))
    slow_steps = np.where(is_significant(step, step_error, STEP_ERRORS), step, 1.0)
    microbatch = shared / slow_ranks / slow_steps[:, None]
    pause = _pauses(grid, base, raw, shared)
    correlation, spread = _length_signature(relative, pause)
    return ComputeProfile(
        base_s=base * median(shared, (0, 1, 2)),
        worker_by_kind=beyond_peers / safe(all_share),
        worker_by_kind_error=worker_error,
        dp_rank=dp_rank / slow_ranks * all_share,
        dp_rank_error=dp_rank_error,
        step=step,
        step_error=step_error,
        microbatch=microbatch / safe(np.nanmean(microbatch)),
        pause_s=pause,
        length_correlation=correlation,
        length_spread=spread,
    )


def is_significant(factor: Floats, error: Floats, errors: float) -> np.ndarray:
    """Where a factor is above 1 by more than the smallest worth naming and by `errors` standard errors.

    No two GPUs and no two steps are alike: how much the factors differ usually counts as error, too.
    """
    usual = MAD_TO_SIGMA * float(lower_median(np.abs(factor - 1).ravel(), 0))
    high: np.ndarray = factor - 1 > np.maximum(SMALLEST_FACTOR, errors * np.maximum(error, usual))
    return high


def _typical(values: Floats, axes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """The typical value over `axes` and its standard error, relative.

    It is the lower quartile: costs of packed microbatches have a floor (the part that grows with tokens, which all
    have alike) and a long tail, so the quartile scatters less than the median. Its error follows from how far apart
    the quantiles around it lie.
    """
    quantile = np.nanquantile if np.isnan(values).any() else np.quantile
    count = np.isfinite(values).sum(axis=axes)
    values = np.where(np.expand_dims(count, axes) > 0, values, 1.0)  # a step without computes is as the others
    low, typical, high = quantile(values, (QUARTILE - 0.1, QUARTILE, QUARTILE + 0.1), axis=axes)
    error = np.sqrt(QUARTILE * (1 - QUARTILE) / np.maximum(count, 1)) * (high - low) / 0.2
    return typical, error / safe(typical)


def safe(values: Any) -> Floats:
    """`values` to divide by: 1 where there is nothing to compare with, because ops took no time."""
    return np.where(values > NOTHING, values, 1.0)


def _spread(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Robust standard deviation of log values over `axes`."""
    logs = np.log(np.maximum(values, 1e-12))
    centre = median(logs, axes)
    deviation = np.abs(logs - np.expand_dims(centre, axes))
    return MAD_TO_SIGMA * median(deviation, axes)


def _own_factor(backwards: Floats) -> Floats:
    """How much slower each worker is than its peers and its DP rank's other stages, [stages, dp_ranks]."""
    raw = median(backwards, (1, 2, 3))
    factor = raw / safe(lower_median(raw, axis=-1))[:, None]
    return factor / safe(lower_median(factor, axis=0))


def _worker_levels(beyond: Floats) -> tuple[Floats, Floats]:
    """What each worker's computes of a kind take beyond what its DP rank shares, and the standard error.

    [kinds, stages, dp_ranks] each.
    """
    axes = (2, 3, 4)
    raw = median(beyond, axes)
    count = np.prod([beyond.shape[axis] for axis in axes])
    few = beyond[:, :, :, : max(1, SAMPLE // beyond[:, :, :, 0].size)]
    scattered = _spread(few, axes) * MEDIAN_ERROR / np.sqrt(count)
    return raw, _beside_peers(np.fmax(scattered, _wander(median(few, (2, 3))) / safe(raw)))


def _wander(of_step: Floats) -> Floats:
    """Standard error of levels from how they wander over the steps: [..., steps, dp_ranks] to [..., dp_ranks].

    Real workers are disturbed for seconds at a time: ops next to each other are no independent witnesses, runs of
    steps nearly are. Each is compared with the run before it, as a worker that slows down once and for all is no noise.
    """
    steps = of_step.shape[-2]
    if steps < FEWEST_STEPS:
        return np.zeros((*of_step.shape[:-2], of_step.shape[-1]))
    runs = np.stack([nan_mean(run, (-2,)) for run in np.array_split(of_step, min(RUNS, steps), axis=-2)])
    apart = median(np.abs(np.diff(runs, axis=0)), (0,))
    error: Floats = MAD_TO_SIGMA * apart / np.sqrt(2 * len(runs))
    return error


def _beside_peers(error: Floats) -> Floats:
    """The error of a level over that of its peers on the other DP ranks (last axis), which have errors, too."""
    of_peers = lower_median(error, axis=-1)[..., None] / np.sqrt(max(error.shape[-1] / 2, 1))
    beside: Floats = np.hypot(error, of_peers)
    return beside


def _pauses(grid: Floats, base: Floats, level: Floats, shared: Floats) -> Floats:
    """Seconds by which single computes exceed all factors; 0 below the threshold."""
    expected = base[:, :, :, None, None, None] * level[:, :, None, None, None, :] * shared
    # Mean-one noise around the expectation: forwards and backwards scatter alike.
    ratio = grid / safe(expected)
    samples = [sampled(ratio[kind]) for kind in (FORWARD, BACKWARD)]
    centre = np.array([float(median(sample, (0,))) for sample in samples])[:, None, None, None, None, None]
    sigma = max(float(_spread(sample, (0,))) for sample in samples)
    threshold = max(SMALLEST_PAUSE, PAUSE_SPREADS * sigma)
    return np.where(ratio / safe(centre) > 1 + threshold, grid - expected * centre, 0.0)


def _length_signature(relative: Floats, pause: Floats) -> tuple[float, float]:
    """Correlation of forwards and backwards within a DP rank and step, averaged over stages; spread of backwards."""
    logs = np.log(np.maximum(relative, 1e-12))
    logs = np.where(pause > 0, np.nan, logs)
    over_stages: Any = nan_mean(logs, (1, 2))
    within = 0 if over_stages.shape[1] > 1 else 1
    deviation = over_stages - np.expand_dims(nan_mean(over_stages, (within + 1,)), within + 1)
    forward, backward = deviation[FORWARD].ravel(), deviation[BACKWARD].ravel()
    known = np.isfinite(forward) & np.isfinite(backward)
    forward, backward = forward[known], backward[known]
    if len(forward) < 3 or forward.std() == 0 or backward.std() == 0:
        return 0.0, 0.0
    return float(np.corrcoef(forward, backward)[0, 1]), float(backward.std())
