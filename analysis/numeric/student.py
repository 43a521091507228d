"""Student's t distribution: how likely a deviation is by chance, and the deviation of a given chance."""

from __future__ import annotations

import math


def student_tail(t: float, freedom: float) -> float:
    """The probability that Student's t, with `freedom` > 0 degrees of freedom, not always whole, exceeds `t`.

    Half the regularised incomplete beta function of freedom / (freedom + t^2).
    """
    square = t * t
    if square * (freedom + 2) > 3 * freedom:  # there, and below for the rest, the fraction converges fast
        beyond = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square), 1 / (1 + freedom / square)) / 2
    else:
        beyond = 0.5 - _incomplete_beta(0.5, freedom / 2, square / (freedom + square), freedom / (freedom + square)) / 2
    return beyond if t > 0 else 1 - beyond


def student_beyond(chance: float, freedom: float) -> float:
    """What Student's t exceeds with a probability of `chance`, which is more than 0 and at most 1/2."""
    highest = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    before, t = -1.0, 0.0
    while t > before:  # Newton's method: the tail is convex, so no step goes too far
        before = t
        t += (student_tail(t, freedom) - chance) / (highest * (1 + t * t / freedom) ** (-(freedom + 1) / 2))
    return before


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function at `x` = 1 - `rest`, by its continued fraction (DLMF 8.17.22)."""
    fraction = 1.0
    for term in range(20 + 4 * math.isqrt(int(a + b)), 0, -1):
        even = term * (b - term) * x / ((a + 2 * term - 1) * (a + 2 * term))
        odd = (a + term - 1) * (a + b + term - 1) * x / ((a + 2 * term - 2) * (a + 2 * term - 1))
        fraction = 1 - odd / (1 + even / fraction)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    return scale * math.pow(x, a) * math.pow(rest, b) / (a * fraction)
