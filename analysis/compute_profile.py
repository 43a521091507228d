"""What makes computes differ: stage, worker, DP rank, step, microbatch, pauses.

In: a `ComputeTable`. Out: a `ComputeProfile`, the cost of a compute as the product
    stage and chunk x worker x DP rank x step x microbatch, plus a pause.
Each factor is a median over all others, so that one cause does not pass for another: a slow worker moves no stage,
a long microbatch no worker, a pause no microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekit.analysis.compute_table import ComputeTable
from tracekit.analysis.structure import Floats

FORWARD, BACKWARD = 0, 1
#: A median of n values scatters by this much x their spread / sqrt(n).
MEDIAN_ERROR = 1.2533
#: Median absolute deviation to standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
#: Which quantile of microbatches stands for a DP rank or a step.
QUARTILE = 0.25
#: A pause is at least this share of the compute it interrupts, and this many spreads long.
SMALLEST_PAUSE = 0.5
PAUSE_SPREADS = 8.0
#: Spreads and typical values of more than this many numbers are taken from evenly spaced ones of them.
SAMPLE = 100_000
#: A factor differs from 1 when it exceeds it by this much and by this many of its standard errors.
SMALLEST_FACTOR = 0.04
FACTOR_ERRORS = 6.0
STEP_ERRORS = 5.0


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """Factors of compute costs. All but the seconds are relative, 1 = as the others.

    `base_s`: seconds, [kinds, stages, chunks]. `worker`: [stages, dp_ranks] beyond `dp_rank` [dp_ranks].
    `step`: [steps]. `microbatch`: [microbatches, steps, dp_ranks], mean 1 per job. `*_error`: standard errors.
    `pause_s`: seconds beyond what the factors explain, 0 for no pause, [kinds, stages, chunks, microbatches, steps,
    dp_ranks]. `length_correlation`: of forwards and backwards over the microbatches of one DP rank and step;
    `length_spread`: standard deviation of those backwards, relative.
    """

    base_s: Floats
    worker: Floats
    worker_error: Floats
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


def profile_computes(table: ComputeTable) -> ComputeProfile:
    """Take the costs of `table` apart. The table must not be empty."""
    grid = table.grid
    base = lower_median(median(grid, (3, 4)), axis=-1)
    relative = grid / _safe(base)[:, :, :, None, None, None]
    cells = relative[BACKWARD].reshape(-1, *grid.shape[3:])
    chunks = grid.shape[2]
    # What all stages of a DP rank share; backwards only: pauses of Python do not reach them. The lower median keeps a
    # slow worker out of it but lies below the middle, so a second pass takes the plain one without worker factors.
    first, _ = _worker_factors(relative / lower_median(cells, axis=0), stages=len(cells))
    shared = median(cells / np.repeat(first, chunks, axis=0)[:, None, None, :], (0,))
    worker, worker_error = _worker_factors(relative / shared, stages=len(cells))
    dp_rank_raw, dp_rank_error = _typical(shared, (0, 1))
    dp_rank = dp_rank_raw / lower_median(dp_rank_raw, axis=-1)
    step, step_error = _typical(shared / dp_rank_raw, (0, 2))
    step = step / median(step, (0,))
    # A factor that does not stand out is the microbatches' own: taking it out would bend their costs.
    slow_ranks = np.where(stands_out(dp_rank, dp_rank_error, FACTOR_ERRORS), dp_rank, 1.0)
    slow_steps = np.where(stands_out(step, step_error, STEP_ERRORS), step, 1.0)
    microbatch = shared / slow_ranks / slow_steps[:, None]
    pause = _pauses(grid, base, worker, shared)
    correlation, spread = _length_signature(relative, pause)
    return ComputeProfile(
        base_s=base * median(shared, (0, 1, 2)),
        worker=worker,
        worker_error=worker_error,
        dp_rank=dp_rank,
        dp_rank_error=dp_rank_error,
        step=step,
        step_error=step_error,
        microbatch=microbatch / np.nanmean(microbatch),
        pause_s=pause,
        length_correlation=correlation,
        length_spread=spread,
    )


def stands_out(factor: Floats, error: Floats, errors: float) -> np.ndarray:
    """Where a factor is above 1 by more than the smallest worth naming and by `errors` standard errors.

    No two GPUs and no two steps are alike: how much the factors differ usually counts as error, too.
    """
    usual = MAD_TO_SIGMA * float(lower_median(np.abs(factor - 1).ravel(), 0))
    high: np.ndarray = factor - 1 > np.maximum(SMALLEST_FACTOR, errors * np.maximum(error, usual))
    return high


def median(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Median over `axes`; nan are left out, and nan is the median of nothing else."""
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis=axes))
    ordered, count = _sorted(values, axes)
    low = np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis=-1)
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[-1] - 1), axis=-1)
    return np.asarray((low + high)[..., 0] / 2)


def lower_median(values: Floats, axis: int) -> Floats:
    """The median over `axis`, of two middle values the lower: half of the values may be slow. nan as in `median`."""
    if not np.isnan(values).any():
        middle = (values.shape[axis] - 1) // 2
        return np.asarray(np.take(np.partition(values, middle, axis=axis), middle, axis=axis))
    ordered, count = _sorted(values, (axis,))
    return np.asarray(np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis=-1)[..., 0])


def _sorted(values: Floats, axes: tuple[int, ...]) -> tuple[Floats, np.ndarray]:
    """Values ascending over `axes` (made the last one), nan at the end; how many are not nan, [..., 1]."""
    last = tuple(range(-len(axes), 0))
    moved = np.moveaxis(values, axes, last)
    flat = moved.reshape(*moved.shape[: moved.ndim - len(axes)], -1)
    return np.sort(flat, axis=-1), np.isfinite(flat).sum(axis=-1, keepdims=True)


def sampled(values: Floats) -> Floats:
    """At most about SAMPLE of the values, evenly spaced, flat."""
    flat = values.reshape(-1)
    # An odd stride does not fall in step with axes of even length.
    return flat[:: max(1, len(flat) // SAMPLE) | 1]


def _typical(values: Floats, axes: tuple[int, ...]) -> tuple[Floats, Floats]:
    """The typical value over `axes` and its standard error, relative.

    It is the lower quartile: costs of packed microbatches have a floor (the part that grows with tokens, which all
    have alike) and a long tail, so the quartile scatters less than the median. Its error follows from how far apart
    the quantiles around it lie.
    """
    quantile = np.nanquantile if np.isnan(values).any() else np.quantile
    low, typical, high = quantile(values, (QUARTILE - 0.1, QUARTILE, QUARTILE + 0.1), axis=axes)
    count = np.isfinite(values).sum(axis=axes)
    error = np.sqrt(QUARTILE * (1 - QUARTILE) / np.maximum(count, 1)) * (high - low) / 0.2
    return typical, error / _safe(typical)


def _safe(values: Floats) -> Floats:
    return np.where(values > 0, values, 1.0)


def _spread(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Robust standard deviation of log values over `axes`."""
    logs = np.log(np.maximum(values, 1e-12))
    centre = median(logs, axes)
    deviation = np.abs(logs - np.expand_dims(centre, axes))
    return MAD_TO_SIGMA * median(deviation, axes)


def _worker_factors(beyond: Floats, stages: int) -> tuple[Floats, Floats]:
    """How much slower each worker is than its DP rank's other stages, and the standard error: [stages, dp_ranks]."""
    axes = (0, 2, 3, 4)
    raw = median(beyond, axes)
    count = np.prod([beyond.shape[axis] for axis in axes])
    if stages == 1:
        return np.ones_like(raw), np.zeros_like(raw)
    factor = raw / lower_median(raw, axis=-1)[:, None]
    # What a DP rank's stages share is the DP rank's factor, not theirs.
    few = beyond[:, :, :, : max(1, SAMPLE // beyond[:, :, :, 0].size)]
    return factor / lower_median(factor, axis=0), _spread(few, axes) * MEDIAN_ERROR / np.sqrt(count)


def _pauses(grid: Floats, base: Floats, worker: Floats, shared: Floats) -> Floats:
    """Seconds by which single computes exceed all factors; 0 below the threshold."""
    expected = base[:, :, :, None, None, None] * worker[:, None, None, None, :] * shared
    # Mean-one noise around the expectation: forwards and backwards scatter alike.
    ratio = grid / _safe(expected)
    samples = [sampled(ratio[kind]) for kind in (FORWARD, BACKWARD)]
    centre = np.array([float(median(sample, (0,))) for sample in samples])[:, None, None, None, None, None]
    sigma = max(float(_spread(sample, (0,))) for sample in samples)
    threshold = max(SMALLEST_PAUSE, PAUSE_SPREADS * sigma)
    return np.where(ratio / centre > 1 + threshold, grid - expected * centre, 0.0)


def _length_signature(relative: Floats, pause: Floats) -> tuple[float, float]:
    """Correlation of forwards and backwards within a DP rank and step, averaged over stages; spread of backwards."""
    logs = np.log(np.maximum(relative, 1e-12))
    logs = np.where(pause > 0, np.nan, logs)
    over_stages: Any = _nanmean(logs, (1, 2))
    within = 0 if over_stages.shape[1] > 1 else 1
    deviation = over_stages - np.expand_dims(_nanmean(over_stages, (within + 1,)), within + 1)
    forward, backward = deviation[FORWARD].ravel(), deviation[BACKWARD].ravel()
    known = np.isfinite(forward) & np.isfinite(backward)
    forward, backward = forward[known], backward[known]
    if len(forward) < 3 or forward.std() == 0 or backward.std() == 0:
        return 0.0, 0.0
    return float(np.corrcoef(forward, backward)[0, 1]), float(backward.std())


def _nanmean(values: Floats, axes: tuple[int, ...]) -> Floats:
    known = np.isfinite(values)
    count = known.sum(axis=axes)
    total = np.where(known, values, 0.0).sum(axis=axes)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
