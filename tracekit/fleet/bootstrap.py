"""Uncertainty of a study's figures: the bootstrap over jobs.

In: columns of jobs, weighted or not. Out: intervals of sums and of ratios of sums. Jobs are drawn with replacement, as
many as there are; all figures use the same draws, which are the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.analysis.numeric.arrays import Floats

#: Total number of draws, so that 100,000 jobs take half a second; the smallest and largest number of samples.
_DRAWS, _FEWEST, _MOST = 40_000_000, 200, 2000
#: Number of samples to sum at once: a product of matrices is several times as fast as one product per vector.
_AT_ONCE = 16
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the ends of its interval."""

    value: float
    low: float
    high: float


def samples_of(jobs: int) -> int:
    """The number of samples to draw for this many jobs."""
    return int(np.clip(_DRAWS // max(jobs, 1), _FEWEST, _MOST))


def bootstrapped(columns: Floats, seed: int = 0) -> Floats:
    """Sums of `columns`, [jobs, figures], in each sample, [samples, figures]."""
    jobs, samples = len(columns), samples_of(len(columns))
    generator = np.random.default_rng(seed)
    sums = np.empty((samples, columns.shape[1]))
    drawn = np.empty((_AT_ONCE, jobs))
    for first in range(0, samples, _AT_ONCE):
        count = min(_AT_ONCE, samples - first)
        for sample in drawn[:count]:
            sample[:] = np.bincount(generator.integers(0, jobs, jobs, dtype=np.int64), minlength=jobs)
        sums[first : first + count] = drawn[:count] @ columns
    return sums


def ratio(of: Floats, to: Floats, of_samples: Floats, to_samples: Floats) -> Interval:
    """A ratio of two sums. `of`, `to`: columns [jobs]; `of_samples`, `to_samples`: their sums in each sample."""
    whole = float(to.sum())
    if not whole > 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = interval(of_samples / to_samples)
    return Interval(float(of.sum()) / whole, low, high)


def interval(samples: Floats) -> tuple[float, float]:
    """The ends between which `CONFIDENCE` of the samples lie; undefined samples do not count."""
    tail = (1 - CONFIDENCE) / 2
    defined = samples[np.isfinite(samples)]
    if not len(defined):
        return float("nan"), float("nan")
    low, high = np.quantile(defined, (tail, 1 - tail))
    return float(low), float(high)
