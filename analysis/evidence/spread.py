"""Scatter of values that are alike, robust against some that are not.

In: values, logarithms. Out: standard deviations, from the shortest range with half of the values; steps far beyond it.
"""

from __future__ import annotations

import math

import numpy as np

from tracekit.analysis.numeric.arrays import Bools, Floats

#: The shortest range that holds half of n normal values is this many standard deviations wide, less a share of 1 /
#: sqrt(n) that is larger for even n (fitted to 3 to 400 simulated normal values).
HALF_WIDTH = 1.35
HALF_WIDTH_LOST = (1.6, 1.25)
#: The same for a third of at least this many values (fitted to 24 to 400): with a few outliers, neither of two levels
#: has half of the steps.
FEWEST_FOR_THIRD = 24
THIRD_WIDTH, THIRD_WIDTH_LOST = 0.86, 1.45
#: Cut in two, evenly spread values keep this share of their variance around the two means; others that are alike, more.
SPLIT_BY_CHANCE = 0.25
#: A group of members this large is a kind of its own: this many at least, and this share.
FEWEST_OF_KIND, SHARE_OF_KIND = 2, 0.25
#: By chance, values fall apart into two kinds in this share of cases.
FALSE_KINDS = 1e-3
TINY = 1e-12
#: A value this many standard deviations, and this much, from the usual is far from it.
OUTSTANDING = 6.0
SMALLEST_OUTSTANDING = 0.02


def usual_sigma(values: Floats, *, by_third: bool) -> Floats:
    """The standard deviation of the values of each row (three at least) at one of the two levels that they may have.

    Uses the shortest range with half of them: one of two levels has that many. A third of them suffices even if there
    are outliers.
    """
    count = values.shape[1]
    beyond = count // 3 if by_third else (count - 1) // 2
    usual, lost = (THIRD_WIDTH, THIRD_WIDTH_LOST) if by_third else (HALF_WIDTH, HALF_WIDTH_LOST[count % 2])
    ordered = np.sort(values, axis=1)
    width = (ordered[:, beyond:] - ordered[:, : count - beyond]).min(axis=1)
    return np.asarray(width / usual / (1 - lost / math.sqrt(count)))


def sigma_of_kinds(level: Floats) -> float:
    """Standard deviation of members around the level of their kind, if there clearly are two kinds; else infinite."""
    count, fewest = len(level), max(FEWEST_OF_KIND, int(SHARE_OF_KIND * len(level)))
    before = np.cumsum(np.sort(level - level.mean()))[fewest - 1 : count - fewest]
    size = np.arange(fewest, fewest + len(before))
    total = float(level.var()) * count
    within = max(total - float((before**2 * count / (size * (count - size))).max()), TINY)
    two = count / 2 * math.log(max(SPLIT_BY_CHANCE * total / within, TINY)) >= -math.log(FALSE_KINDS)
    return math.sqrt(within / (count - 2)) if two else math.inf


def far_steps(series: Floats, peers: int) -> tuple[Bools, Bools]:
    """Masks of steps in which a member is far above the usual value of all, and far below; there it has another level.

    Of two peers, one is as fast as the other is slow; of more, none is far below.
    """
    values = np.where(np.isfinite(series), series, 0.0)
    steps = values.shape[1]
    if steps < 3:
        return np.zeros(values.shape, np.bool_), np.zeros(values.shape, np.bool_)
    sigma = usual_sigma(values, by_third=steps >= FEWEST_FOR_THIRD)
    far = max(OUTSTANDING * float(np.median(sigma)), SMALLEST_OUTSTANDING)
    return values > far, (values < -far) & (peers == 2)
