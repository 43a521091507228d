"""What a run's own noise can do, and which steps of a series stand out of it.

In: series over the steps, one per worker or DP rank: logarithms of how much slower it is than its peers, [series,
steps]. Out: the `Noise` of the run and, per series, an `Episode`: in which steps it is slow, by how much, how sure.

The error of a level is that of a moving-block bootstrap over the steps, whose variance has a closed form, so nothing
is drawn: the spread of the means of all runs of `block` neighbouring steps. The block is as long as the steps of the
run remember each other. Neighbouring steps of a worker that wanders are no independent witnesses; a z-score that
counts each of them is sure of what a second trace would not show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.robust import MAD_TO_SIGMA

Bools = npt.NDArray[np.bool_]

#: How often noise alone may name somebody, per job: one healthy job in a thousand.
FALSE_ALARMS = 1e-3
#: Fewer series than that say nothing about how much healthy members differ for good.
FEWEST_MEMBERS = 6
#: Steps slow in turn must have been slow at least so many times; longer periods are looked for up to this length.
FEWEST_TURNS = 3
LONGEST_PERIOD = 32
#: No step of a GPU repeats more closely than this; rounding of recorded times is of this size.
SMALLEST_SIGMA = 1e-4
#: Far from what is usual: so many standard deviations, and so much. Half of a normal distribution is 1.35 of them wide;
#: of few steps the shortest half is shorter.
OUTSTANDING = 6.0
HALF_WIDTH = 1.35
SMALLEST_OUTSTANDING = 0.02
#: Fewer blocks say nothing about how they differ.
FEWEST_BLOCKS = 3
#: Blocks that overlap know half as much again as those that do not (Kuensch, 1989).
OVERLAPPING = 1.5


@dataclass(frozen=True, slots=True)
class Noise:
    """What a run does by itself.

    `step_variance`: of the mean of n steps, times n; [series]. `freedom`: how many independent deviations it was
    estimated from. `spread`: by how much healthy members differ for good, a standard deviation. `block`: steps that
    move together.
    """

    step_variance: Floats
    freedom: float
    spread: float
    block: int

    def error(self, steps: Ints | int) -> Floats:
        """Standard error of a level over so many steps, [series]."""
        variance: Floats = np.sqrt(self.step_variance / np.maximum(steps, 1) + self.spread**2)
        return variance

    def nats(self, level: Floats, steps: Ints | int) -> Floats:
        """Log-likelihood ratio of `level` against no effect, Student's: few steps make a large ratio worth little."""
        ratio: Floats = (self.freedom + 1) / 2 * np.log1p((level / self.error(steps)) ** 2 / self.freedom)
        return np.where(level > 0, ratio, 0.0)


def needed_nats(tests: int) -> float:
    """The log-likelihood ratio that noise reaches in `FALSE_ALARMS` of all jobs with so many tests at most."""
    return math.log(max(tests, 1) / FALSE_ALARMS)


@dataclass(frozen=True, slots=True)
class Episodes:
    """When each series is slow.

    `on`: [series, steps]; `level`: mean over those steps, a logarithm; `nats`: evidence against chance; `error`: of
    the level. All [series]. `period`, `since`, `until`: how the steps are described, 0 where they are not so: every
    `period`-th step, from position `since` on, before position `until`.
    """

    on: Bools
    level: Floats
    nats: Floats
    error: Floats
    period: Ints
    since: Ints
    until: Ints
    needed: float
    noise: Noise

    def significant(self, smallest: float) -> Bools:
        """Where a series is slow by at least `smallest` (a factor less 1), and chance does not explain it."""
        hit: Bools = (np.expm1(self.level) >= smallest) & (self.nats >= self.needed)
        return hit


def noise_of(series: Floats, *, mirrored: bool = False) -> Noise:
    """The noise of members none of which is slow; nan where a step says nothing. `mirrored`: one is minus another."""
    members, steps = series.shape
    known, high = np.isfinite(series), _stands_out(series, mirrored)
    quiet, slow = known & ~high, known & high
    level, slow_level = _level(series, quiet), _level(series, slow)
    deviation = np.where(quiet, series - level[:, None], 0.0) + np.where(slow, series - slow_level[:, None], 0.0)
    block = _memory(deviation, steps)
    own = _block_variance(deviation, block)
    independent = members / 2 if mirrored else float(members)
    each = max(OVERLAPPING * steps / block - 1, 0.5)
    usual = float(np.median(own)) if members >= FEWEST_MEMBERS else float(own.mean())
    # A member that is more restless than its peers is so in its own error; its few blocks know that only roughly.
    variance = np.maximum(np.maximum(usual, own), SMALLEST_SIGMA**2)
    spread = 0.0
    if members >= FEWEST_MEMBERS:
        level = level[quiet.any(axis=1)]
        low = level[level <= np.median(level)] - np.median(level) if len(level) else np.zeros(1)
        seen = (MAD_TO_SIGMA * float(np.median(np.abs(low)))) ** 2
        spread = math.sqrt(max(seen - usual / steps, 0.0))
    return Noise(variance, max(independent * each, 1.0), spread, block)


def _memory(deviation: Floats, steps: int) -> int:
    """How many neighbouring steps move together: the block length that suits an AR(1) process (Carlstein, 1986)."""
    total = float((deviation**2).sum())
    if steps < 4 or total <= 0:
        return 1
    seen = float((deviation[:, 1:] * deviation[:, :-1]).sum()) / total
    # A level that was taken out of a short series hides some of its memory.
    memory = min((seen * steps + 1) / (steps - 3), 0.95) if steps > 3 else 0.0
    if memory < 2 / math.sqrt(deviation.size):
        return 1
    length = (2 * memory / (1 - memory**2)) ** (2 / 3) * steps ** (1 / 3)
    return int(min(max(math.ceil(length), 1), max(steps // FEWEST_BLOCKS, 1)))


def _block_variance(deviation: Floats, block: int) -> Floats:
    """`block` times the variance of the means of all runs of `block` steps, the ends joined, [series]."""
    steps = deviation.shape[1]
    joined = np.concatenate([np.zeros((len(deviation), 1)), deviation, deviation[:, : block - 1]], axis=1)
    total = np.cumsum(joined, axis=1)
    means = (total[:, block:] - total[:, :-block]) / block
    lost = 1 - block / steps if block < steps else 1.0
    variance: Floats = block * (means**2).mean(axis=1) / lost
    return variance


def episodes_of(
    series: Floats, *, mirrored: bool = False, least_variance: float = 0.0, fewest: int = FEWEST_TURNS
) -> Episodes:
    """In which steps each member is slow beside its peers, [series, steps] of log factors; nan says nothing.

    A description of the steps must pay for itself: always costs nothing, every n-th step the logarithm of how many such
    patterns there are, "since a step" and "up to a step" twice that of how many steps there are, as does each run.
    Of those the one that explains most is taken. Nothing is slow in the steps outside it. `fewest`: steps that what
    comes and goes must have been seen in; the tails of noise make single steps of single workers long.
    `least_variance`: of one step, where it is known to be no less.
    """
    series = _without_outliers(series, min(fewest, series.shape[1]))
    values = np.where(np.isfinite(series), series, 0.0)
    members, steps = values.shape
    noise = noise_of(series, mirrored=mirrored)
    noise = replace(noise, step_variance=np.maximum(noise.step_variance, least_variance))
    masks = _Masks(values, noise, fewest)
    if steps > 2:
        masks.try_runs()
        masks.try_periods()
        masks.try_bursts()
    on, count = masks.on, np.maximum(masks.on.sum(axis=1), 1)
    level = (values * on).sum(axis=1) / count
    return Episodes(
        on=on,
        level=level,
        nats=np.maximum(noise.nats(level, count) - masks.cost, 0.0),
        error=noise.error(count),
        period=masks.period,
        since=masks.since,
        until=masks.until,
        needed=needed_nats(members),
        noise=noise,
    )


def _without_outliers(series: Floats, fewest: int) -> Floats:
    """Nothing beyond what `fewest` steps reach, above or below: fewer are the tails of noise."""
    if fewest < 2:
        return series
    values = np.where(np.isfinite(series), series, 0.0)
    ordered = np.partition(values, (fewest - 1, series.shape[1] - fewest), axis=1)
    low, high = ordered[:, fewest - 1], ordered[:, series.shape[1] - fewest]
    return np.clip(series, np.minimum(low, high)[:, None], np.maximum(low, high)[:, None])


def _stands_out(series: Floats, mirrored: bool) -> Bools:
    """Steps in which a member is far from what is usual for all; its level there is not that of its other steps.

    What is usual: the shortest range with half of a member's steps, of which one of two levels has that many.
    """
    values = np.where(np.isfinite(series), series, 0.0)
    beyond = values.shape[1] // 2
    ordered = np.sort(values, axis=1)
    width = (ordered[:, beyond:] - ordered[:, : values.shape[1] - beyond]).min(axis=1)
    least = max(OUTSTANDING * float(np.median(width)) / HALF_WIDTH, SMALLEST_OUTSTANDING)
    return np.asarray((np.abs(values) if mirrored else values) > least)


def _level(series: Floats, where: Bools) -> Floats:
    total = np.where(where, series, 0.0).sum(axis=1)
    return np.asarray(total / np.maximum(where.sum(axis=1), 1))


class _Masks:
    """The best description so far of the steps in which each member is slow."""

    def __init__(self, values: Floats, noise: Noise, fewest: int) -> None:
        members, steps = values.shape
        self.values, self.noise, self.fewest = values, noise, fewest
        self.on = np.ones((members, steps), np.bool_)
        self.cost = np.zeros(members)
        self.gain = self._gain(values.sum(axis=1), np.full(members, steps))
        self.period = np.zeros(members, np.int64)
        self.since = np.zeros(members, np.int64)
        self.until = np.full(members, steps, np.int64)

    def _gain(self, total: Floats, count: Ints) -> Floats:
        """Log-likelihood that a slow level in `count` steps, which add up to `total`, explains."""
        explained = np.where(total > 0, total**2 / np.maximum(count, 1), 0.0) / self.noise.step_variance / 2
        return np.asarray(explained)

    def _take(self, gain: Floats, cost: Floats, on: Bools, **words: Ints) -> None:
        better = (gain - cost > self.gain - self.cost) & (on.sum(axis=1) >= self.fewest)
        self.on[better], self.gain[better], self.cost[better] = on[better], gain[better], cost[better]
        steps = self.values.shape[1]
        for name, default in (("period", 0), ("since", 0), ("until", steps)):
            getattr(self, name)[better] = words[name][better] if name in words else default

    def try_runs(self) -> None:
        """From a step on, or up to one."""
        members, steps = self.values.shape
        before = np.cumsum(self.values, axis=1)[:, :-1]
        at = np.arange(1, steps)
        # A place for a change costs twice what a choice among as many patterns does (Zhang and Siegmund, 2007).
        price, number = np.full(members, 2 * math.log(steps)), np.arange(steps)
        for first in (False, True):
            total = before if first else before[:, -1:] + self.values[:, -1:] - before
            gains = self._gain_each(total, at if first else steps - at)
            best = gains.argmax(axis=1)
            cut = at[best]
            on = number < cut[:, None] if first else number >= cut[:, None]
            words = {"until": cut} if first else {"since": cut}
            self._take(gains[np.arange(members), best], price, on, **words)

    def _gain_each(self, total: Floats, count: Ints) -> Floats:
        explained = np.where(total > 0, total**2 / count, 0.0)
        return np.asarray(explained / self.noise.step_variance[:, None] / 2)

    def try_periods(self) -> None:
        """Every n-th step."""
        members, steps = self.values.shape
        periods = range(2, min(steps // FEWEST_TURNS, LONGEST_PERIOD) + 1)
        price = np.full(members, math.log(max(sum(periods), 1)))
        for period in periods:
            for phase in range(period):
                on = np.arange(steps) % period == phase
                gain = self._gain(self.values[:, on].sum(axis=1), np.full(members, int(on.sum())))
                self._take(gain, price, np.broadcast_to(on, self.values.shape), period=np.full(members, period))

    def try_bursts(self) -> None:
        """Any steps above half of the level of the highest ones."""
        high = self.values > self.values.max(axis=1, keepdims=True) / 2
        for _ in range(2):
            level = (self.values * high).sum(axis=1) / np.maximum(high.sum(axis=1), 1)
            high = self.values > level[:, None] / 2
        edges = np.diff(high.astype(np.int8), axis=1, prepend=0, append=0)
        price = 2 * (edges > 0).sum(axis=1) * math.log(self.values.shape[1])
        self._take(self._gain((self.values * high).sum(axis=1), high.sum(axis=1)), price, high)
