"""Means over steps, and how certain their difference is.

In: series over the steps. Out: `MeanDifference`s with Welch's t-interval, corrected for autocorrelation of the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tracekit.analysis.numeric.arrays import Floats

#: Confidence level of the intervals.
CONFIDENCE = 0.95
#: Cap on the correlation of neighbouring steps; above it the interval would mean nothing.
LONGEST_MEMORY = 0.95


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """A mean before and after, and the 95 % interval of the difference; no interval if a side has one step."""

    before: float
    after: float
    low: float | None
    high: float | None

    @property
    def difference(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def share(self) -> float:
        """The difference as a share of the mean before; 0 if that is 0."""
        return self.difference / self.before if self.before else 0.0

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def difference_of_means(before: Floats, after: Floats) -> MeanDifference:
    """The difference of two means with Welch's t-interval; steps that resemble their neighbours count for less."""
    from scipy.special import stdtrit

    means = float(before.mean()), float(after.mean())
    if min(len(before), len(after)) < 2:
        return MeanDifference(*means, None, None)
    sizes = [independent_steps(side) for side in (before, after)]
    errors = [float(side.var(ddof=1)) / size for side, size in zip((before, after), sizes, strict=True)]
    total = sum(errors)
    if total == 0:
        return MeanDifference(*means, means[1] - means[0], means[1] - means[0])
    freedom = total**2 / sum(error**2 / (size - 1) for error, size in zip(errors, sizes, strict=True))
    reach = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(total)
    difference = means[1] - means[0]
    return MeanDifference(*means, difference - reach, difference + reach)


def independent_steps(series: Floats) -> float:
    """The effective number of independent steps: n (1 - r) / (1 + r), at least 2, where r is the correlation of
    neighbouring steps.
    """
    deviation = series - series.mean()
    variance = float((deviation**2).sum())
    if len(series) < 3 or variance == 0:
        return float(len(series))
    memory = float((deviation[1:] * deviation[:-1]).sum()) / variance
    memory = min(max(memory, 0.0), LONGEST_MEMORY)
    return max(2.0, len(series) * (1 - memory) / (1 + memory))
