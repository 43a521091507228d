"""The course of clocks over the trace: steady, drifting, or stepped once.

In: the offset of each clock in each run of steps. Out: the simplest course that explains it, and the rest.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA, MEDIAN_ERROR, median

#: An effect must be this many of its standard errors large.
ERRORS = 6.0
#: With this many runs, the scatter of a clock is estimated from its changes between runs.
FEWEST_FOR_SCATTER = 5
#: A line takes this many runs; so many leave two on each side of a jump, because one late run is not a jump.
FEWEST_FOR_LINE = 4
FEWEST_FOR_LONE = 5
#: Number of free parameters of a steady clock, of a line, and of a jump including its place.
STEADY, LINE, JUMP = 1, 2, 3


class Courses(Struct, frozen=True, eq=False):
    """The courses of clocks, [clocks] each.

    `ahead_s`: seconds ahead in each run, [runs, clocks]. `drift`: seconds per second. `jump_s`, `jump_run`: the step of
    a clock, seconds ahead, and the first run after that, -1 if it was not. `error_s`: standard error of the level,
    seconds. `irregular_s`: movement beyond the scatter that follows none of the courses, seconds on average.
    """

    ahead_s: Floats
    drift: Floats
    jump_s: Floats
    jump_run: Ints
    error_s: Floats
    irregular_s: Floats


def fit_courses(samples: Floats, times: Floats, scatter_s: Floats, floor_s: float) -> Courses:
    """The course of each clock. `samples`: seconds ahead, [runs, clocks]. `times`: of the runs, seconds, ascending.

    `scatter_s`: their usual scatter, [clocks], used if there are too few runs to estimate it. Changes below `floor_s`
    do not count.
    """
    runs = len(samples)
    spread = _scatter(samples) if runs >= FEWEST_FOR_SCATTER else scatter_s
    level = np.median(samples, axis=0)
    steady = np.broadcast_to(level, samples.shape)
    slope, line = _line(samples, times)
    jump_s, jump_run, jumped = _jump(samples)
    # Negligible differences do not decide.
    least = np.maximum(spread / 2, floor_s / 10)

    def score(fitted: Floats, free: int) -> Floats:
        """The Bayesian information criterion, for misfits with a Laplace distribution."""
        misfit = np.abs(samples - fitted).mean(axis=0)
        return np.asarray(2 * runs * np.log(np.maximum(misfit, least)) + free * np.log(max(runs, 2)))

    error = MEDIAN_ERROR * spread / np.sqrt(runs)
    span = np.abs(slope) * (times[-1] - times[0])
    # A slope over the whole trace has sqrt(12) times the standard error of a level.
    drifts = (span > np.maximum(floor_s, ERRORS * np.sqrt(12) * error)) & (runs >= FEWEST_FOR_LINE)
    sides = np.sqrt(1 / np.maximum(jump_run, 1) + 1 / np.maximum(runs - jump_run, 1))
    jumps = np.abs(jump_s) > np.maximum(floor_s, ERRORS * MEDIAN_ERROR * spread * sides)
    scores = np.stack(
        [
            score(steady, STEADY),
            np.where(drifts, score(line, LINE), np.inf),
            np.where(jumps, score(jumped, JUMP), np.inf),
        ]
    )
    best = scores.argmin(axis=0)
    ahead = np.where(best == 1, line, np.where(best == 2, jumped, steady))
    return Courses(
        ahead_s=ahead,
        drift=np.where(best == 1, slope, 0.0),
        jump_s=np.where(best == 2, jump_s, 0.0),
        jump_run=np.where(best == 2, jump_run, -1),
        error_s=error,
        irregular_s=_irregular(samples - ahead, spread),
    )


def scatter(samples: Floats) -> float:
    """The spread of single samples around their course, for the median clock, seconds; `samples`: [runs, ...]."""
    if len(samples) < 2:
        return 0.0
    changes = _changes(samples)
    return float(MAD_TO_SIGMA * median(changes, tuple(range(changes.ndim))) / np.sqrt(2))


def _scatter(samples: Floats) -> Floats:
    """The spread of single samples around their course, for each clock, [clocks]."""
    return np.asarray(MAD_TO_SIGMA * median(_changes(samples), (0,)) / np.sqrt(2))


def _changes(samples: Floats) -> Floats:
    """Changes of samples from run to run, beyond a drift, [runs - 1, ...]."""
    changes = np.diff(samples, axis=0)
    return np.abs(changes - median(changes, (0,)))


def _line(samples: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Slope, [clocks], and values, [runs, clocks], of the line through the medians of all pairs (Theil-Sen)."""
    before, after = np.triu_indices(len(samples), 1)
    if not len(before):
        return np.zeros(samples.shape[1]), samples
    slope = np.median((samples[after] - samples[before]) / (times[after] - times[before])[:, None], axis=0)
    rising = slope * times[:, None]
    return slope, rising + np.median(samples - rising, axis=0)


def _jump(samples: Floats) -> tuple[Floats, Ints, Floats]:
    """Size and place of the best jump, [clocks], and its values, [runs, clocks]."""
    runs, clocks = samples.shape
    size, place = np.zeros(clocks), np.zeros(clocks, np.int64)
    best, fitted = np.full(clocks, np.inf), samples.copy()
    margin = 2 if runs >= FEWEST_FOR_LONE else 1
    for run in range(margin, runs - margin + 1):
        levels = [np.median(samples[:run], axis=0), np.median(samples[run:], axis=0)]
        values = np.repeat(levels, [run, runs - run], axis=0)
        cost = np.abs(samples - values).sum(axis=0)
        better = cost < best
        best = np.where(better, cost, best)
        size, place = np.where(better, levels[1] - levels[0], size), np.where(better, run, place)
        fitted = np.where(better, values, fitted)
    return size, place, fitted


def _irregular(residual: Floats, scatter: Floats) -> Floats:
    """The mean size, [clocks], of what remains beyond the scatter for more than one run at a time."""
    if len(residual) >= 3:
        inner = np.median(np.stack([residual[:-2], residual[1:-1], residual[2:]]), axis=0)
        residual = np.concatenate([inner[:1], inner, inner[-1:]])
    return np.asarray(np.maximum(np.abs(residual) - ERRORS * scatter, 0.0).mean(axis=0))
