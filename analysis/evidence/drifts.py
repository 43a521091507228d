"""Members whose level moves smoothly over the steps, such as a worker that becomes slower step by step.

In: series over the steps as in `significance`, and how they deviate from the levels they have otherwise. Out: the
level that each follows if it moves, and how unlikely that is by chance. A speed that wanders looks smooth for a while,
too. So a curve must explain more than curves do of noise that remembers from step to step.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats

#: The level stays as it is until one of these shares of the steps, then follows a polynomial of at most this degree.
#: Each degree needs this many steps.
STARTS = (0.0, 0.125, 0.25, 0.375, 0.5)
HIGHEST_DEGREE = 3
STEPS_PER_DEGREE = 3
SMALLEST_VARIANCE = 1e-8


class Drifts(Struct, frozen=True, eq=False):
    """`level`: [series, steps]; `parameters`: of that curve, at most; `nats`: how unlikely by chance, [series]."""

    level: Floats
    parameters: int
    nats: Floats


def drifts_of(series: Floats, deviation: Floats, memory: float, *, pooled: float) -> Drifts:
    """Fit a curve to each of `series`, [series, steps], six steps at least.

    `deviation`: from the levels otherwise. `memory`: share of a deviation that remains a step later. `pooled`: number
    of independent series that share one variance; 1: each has its own.
    """
    steps = series.shape[1]
    starts = sorted({round(share * steps) for share in STARTS})
    level, remaining, parameters = np.zeros_like(series), np.full(len(series), np.inf), np.zeros(len(series), np.int64)
    bases = [_basis(steps, start) for start in starts]
    for basis in bases:
        weights = np.linalg.lstsq(_shocks(basis, memory).T, _shocks(series, memory).T, rcond=None)[0]
        fitted = np.asarray(weights.T @ basis)
        unlike = _squares(series - fitted, memory)
        better = unlike < remaining
        level[better], remaining[better], parameters[better] = fitted[better], unlike[better], len(basis)
    without = _squares(deviation, memory)
    freedom: Floats = np.maximum(steps - parameters, 1).astype(float)
    variance = np.maximum(remaining / freedom, SMALLEST_VARIANCE)
    if pooled > 1:
        variance = np.maximum(variance, np.median(without) / (steps - 1))
    freedom *= pooled
    explained = np.maximum(without - remaining, 0.0) / variance
    # Student's likelihood ratio, less the weight of the parameters that any curve has, and of the choice of its start.
    spent = parameters - 1
    nats = (freedom + spent) / 2 * np.log1p(explained / freedom) - spent / 2 * np.log(np.maximum(explained, 1.0))
    return Drifts(level, max(map(len, bases)), nats - math.log(len(starts)))


def _basis(steps: int, start: int) -> Floats:
    """A level up to a step, then a polynomial, [parameters, steps]."""
    after = np.arange(steps) >= start
    degree = min(HIGHEST_DEGREE, (steps - start) // STEPS_PER_DEGREE)
    place = np.clip(2 * (np.arange(steps) - start) / (steps - 1 - start) - 1, -1, 1)
    curves = [np.ones(steps), place]
    for n in range(2, degree + 1):  # Legendre's polynomials; importing numpy's takes longer than fitting all curves
        curves.append((curves[-1] * place * (2 * n - 1) - curves[-2] * (n - 1)) / n)
    return np.array([*(curve * after for curve in curves[: degree + 1]), *[~after] * bool(start)], np.float64)


def _squares(series: Floats, memory: float) -> Floats:
    return np.asarray((_shocks(series, memory) ** 2).sum(axis=-1))


def _shocks(series: Floats, memory: float) -> Floats:
    """Innovations of a series that remembers the previous step, [..., steps]; independent by chance."""
    first = np.sqrt(1 - memory**2) * series[..., :1]
    return np.concatenate([first, series[..., 1:] - memory * series[..., :-1]], axis=-1)
