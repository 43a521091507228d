"""Means over steps and how certain their difference is; medians and spreads, which are robust against outliers.

In: arrays of any shape, nan where nothing was measured; series over the steps, one or several at once. Out: arrays
reduced over the given axes; differences of series with intervals that hold for all of them together, from a bootstrap
over blocks of steps, and margins of single means and of their ratios, from the same blocks. Steps resemble their
neighbours, so single steps cannot be drawn. Several runs before show how far runs differ from each other, too.
Intervals of few degrees of freedom are those of Student's t distribution.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.base.limits import Finite
from tracekit.base.text import seconds

#: With fewer steps, not even their order tells two runs apart: 4 + 4 steps have 70 orders, 5 + 5 have 252. Statistic.
FEWEST_STEPS = 5
#: Confidence level of the intervals. Definition.
CONFIDENCE = 0.95
#: The number of resamples; of 99 %, 20 are beyond.
_SAMPLES = 2000
#: Values that differ by no more than this share are equal but for the rounding of their sums.
_ROUNDING = 1e-9
#: Probability of taking the normal noise of a side for a step apart. Chosen; steps that stand apart do so by far.
_APART = 0.01
#: Ask for fewer more steps than this.
_MOST_STEPS = 100_000
#: Ask for fewer more runs than this.
_MOST_RUNS = 100
#: Draw at most so many numbers at a time.
_NUMBERS_AT_ONCE = 1 << 22
#: Ratio of the standard deviation to the median absolute deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
#: The median of n values scatters by this factor x their spread / sqrt(n).
MEDIAN_ERROR = 1.2533
#: Above this many numbers, spreads and typical values are computed from an evenly spaced sample.
SAMPLE = 100_000
#: Seconds and factors below this count as 0: no clock resolves them, and dividing by them overflows.
NOTHING = 1e-12


class MeanDifference(Struct, frozen=True):
    """A mean before and after, and the 95 % interval of the difference; no interval if there are too few steps."""

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

    @property
    def largest_share(self) -> float:
        """The largest difference in the interval, up or down, as a share of the mean before; infinite without one."""
        if self.low is None or self.high is None:
            return math.inf
        return max(-self.low, self.high) / self.before if self.before else 0.0


class MeanDifferences(Struct, frozen=True, eq=False):
    """Differences of several means, [figures] each.

    `errors`: standard errors of both means, [2, figures]. `reach`: half the width of an interval, in standard errors of
    the difference; infinite if there are too few steps to tell. All intervals together hold at `confidence`. `steps`,
    `blocks`: their numbers on both sides. `runs`: the number of runs before. `between`: the standard deviation of their
    means, [figures]; 0 for one run, which shows nothing of it. `noise`: how far identical runs differ for other reasons
    than their steps, [figures], where the caller knows it. `rare`: half the width of the interval for what steps apart
    from all others add, [figures].
    """

    before: Floats
    after: Floats
    errors: Floats
    reach: float
    confidence: float
    steps: tuple[int, int]
    blocks: tuple[int, int]
    runs: int = 1
    between: Floats | float = 0.0
    noise: Floats | None = None
    rare: Floats | float = 0.0

    @property
    def difference(self) -> Floats:
        """After minus before."""
        return self.after - self.before

    @property
    def noise_is_known(self) -> bool:
        """Whether the margins have in them how far runs differ, and not only their steps."""
        return self.noise is not None or self.runs > 1

    @property
    def margin(self) -> Floats:
        """Half the width of each interval; 0 for a figure that does not vary."""
        error: Floats = np.hypot(*self.errors)
        error[error > 0] *= self.reach
        margin: Floats = np.hypot(np.hypot(error, self.rare), self._of_further_run(self.runs))
        return margin

    def _of_further_run(self, runs: int) -> Floats:
        """Half the width of the interval for the mean of one further run, if so many runs before spread as these do."""
        if self.noise is not None:
            return self.noise
        t = student_beyond(self._chance, runs - 1) if runs > 1 else 0.0
        return np.broadcast_to(t * math.sqrt(1 + 1 / runs) * self.between, self.before.shape)

    @property
    def _chance(self) -> float:
        """The probability beyond either end of each interval, so that all of them hold together (Bonferroni)."""
        return (1 - self.confidence) / (2 * len(self.errors[0]))

    def more_runs(self, column: int, margin: float) -> int | None:
        """How many more runs before would narrow the interval of a figure to +- `margin` if they spread as these do,
        None if too many, or if one run does not show how they spread.
        """
        rare = float(np.broadcast_to(self.rare, self.before.shape)[column])
        within = math.hypot(self.reach * float(np.hypot(*self.errors[:, column])), rare)

        def is_enough(more: int) -> bool:
            return math.hypot(within, float(self._of_further_run(self.runs + more)[column])) <= margin

        fewest = bisect.bisect_left(range(_MOST_RUNS), True, key=is_enough)
        return fewest if self.runs > 1 and fewest < _MOST_RUNS else None

    def more_steps(self, column: int, margin: float) -> int | None:
        """How many more steps of every run would narrow the interval of a figure to +- `margin`, None if too many.

        Their errors shrink with the root of the steps, the reach as that of Student's t for as many blocks.
        """
        rare = float(np.broadcast_to(self.rare, self.before.shape)[column])
        between = math.hypot(float(self._of_further_run(self.runs)[column]), rare)

        def reach(grown: Floats) -> float:
            return student_beyond(self._chance, max(float(np.array(self.blocks) @ grown) - 2, 1.0))

        longer = max(self.reach / reach(np.ones(2)), 1.0) if math.isfinite(self.reach) else 1.0

        def is_enough(more: int) -> bool:
            grown = 1 + more * np.array([self.runs, 1]) / np.array(self.steps)
            error = math.sqrt(float((self.errors[:, column] ** 2 / grown).sum()))
            return math.hypot(error * reach(grown) * longer, between) <= margin

        fewest = bisect.bisect_left(range(_MOST_STEPS), True, key=is_enough)
        return fewest if fewest < _MOST_STEPS else None


def difference_of_means(before: Floats, after: Floats) -> MeanDifference:
    """The difference of two means over steps, [steps] each, with its interval if there are enough of both."""
    differences = differences_of_means(before[:, None], after[:, None], CONFIDENCE)
    means, margin = (float(differences.before[0]), float(differences.after[0])), float(differences.margin[0])
    if min(len(before), len(after)) < FEWEST_STEPS or math.isinf(margin):
        return MeanDifference(*means, None, None)
    difference = means[1] - means[0]
    return MeanDifference(*means, difference - margin, difference + margin)


def margins(series: Floats, length: int | None = None) -> Floats:
    """Half the width of the 95 % interval of each mean over steps, [steps, figures] -> [figures]; nan if there are too
    few steps to tell.

    The standard error is that of the bootstrap over blocks, which needs no draws for a mean; Student's t has one degree
    of freedom less than there are blocks. `length`: of a block, by default what the figures ask for.
    """
    blocks = _Blocks(series, length)
    error = np.where(np.isfinite(blocks.error), blocks.error, np.nan)
    return error * student_beyond((1 - CONFIDENCE) / 2, max(len(series) / blocks.length - 1, 1.0))


def saving_error_s(saving: Floats, replay_error_s: float, length: int | None = None) -> float:
    """How far a mean saving, of [steps], can be off: by the error of the replay, and by the margin of a mean over
    steps, which one step does not show. `length`: as for `margins`.
    """
    return replay_error_s + float(np.nan_to_num(margins(saving[:, None], length)[0]))


def ratio_margins(above: Floats, below: Floats, leading: Floats) -> Floats:
    """Half the width of the 95 % interval of mean(above) / mean(below), [steps, figures] and [steps], linearised in
    both means. Blocks are as long as mean(leading) / mean(below) asks for, [steps].
    """
    whole = float(below.mean())
    if not whole > 0:
        return np.full(above.shape[1], np.nan)
    series = np.column_stack([leading, above])
    residual = (series - np.outer(below, series.mean(axis=0) / whole)) / whole
    return margins(residual[:, 1:], block_length(residual[:, :1]))


def differences_of_means(before: Floats, after: Floats, confidence: float) -> MeanDifferences:
    """The differences of means over steps, with intervals that hold together.

    `before`, `after`: [steps, figures] each. Circular blocks of neighbouring steps are drawn with replacement (Politis
    and Romano, 1992), the same for all figures, so that figures that vary together stay together. The intervals are
    studentised, since the standard errors of few blocks are uncertain themselves, and reach as far as the largest
    deviation of any figure does in `confidence` of the samples. Both halves of the samples use the same two streams of
    random numbers, the other way round: swapping the sides mirrors the result.

    A single stall would make those errors vanish in each sample without it, and intervals absurd. So steps that stand
    apart are no part of the noise: what they add to a mean has an interval of its own.
    """
    chance = 1 - confidence
    apart = [_apart(side, chance) for side in (before, after)]
    rare = np.hypot(*(_rare_margin(side, *away, chance) for side, away in zip((before, after), apart, strict=True)))
    sides = [_Blocks(np.where(away, usual, side)) for side, (away, usual) in zip((before, after), apart, strict=True)]
    reach = math.inf
    numbers = sides[0].number, sides[1].number
    if min(numbers) > 1:
        largest = np.concatenate([_largest(sides, seeds) for seeds in ((0, 1), (1, 0))])
        reach = float(np.quantile(largest, confidence, method="higher"))
    errors, steps = np.array([side.error for side in sides]), (len(before), len(after))
    return MeanDifferences(_mean(before), _mean(after), errors, reach, confidence, steps, numbers, rare=rare)


def differences_from_runs(runs: Sequence[Floats], after: Floats, confidence: float) -> MeanDifferences:
    """The differences of means between earlier runs, [steps, figures] each, and one further run.

    Of one earlier run, only the noise within runs is known: `differences_of_means`. Of k > 1, with means m_1 ... m_k of
    mean m and standard deviation s, a further run of the same kind is within m +- t s sqrt(1 + 1/k): the prediction
    interval for one further observation (Hahn and Meeker, Statistical Intervals, 1991), with t from Student's
    distribution of k - 1 degrees of freedom, and 1 / figures of the doubt for each figure (Bonferroni). It holds for a
    further run with as much noise within as the earlier ones; so that it holds for a shorter or noisier one, the margin
    of the noise within runs, from steps around the mean of their own run, is added, the squares of both (Zou and
    Donner, 2008). s has some of that noise in it already, which makes the intervals rather too wide than too narrow.
    """
    if len(runs) == 1:
        return differences_of_means(runs[0], after, confidence)
    means = np.stack([_mean(run) for run in runs])
    mean = _mean(means)
    around = np.concatenate([run - run_mean + mean for run, run_mean in zip(runs, means, strict=True)])
    between = np.sqrt(((means - mean) ** 2).sum(axis=0) / (len(runs) - 1))
    return replace(differences_of_means(around, after, confidence), runs=len(runs), between=between)


def _mean(series: Floats) -> Floats:
    """The mean over the first axis; of equal values that value, not a rounded one."""
    mean: Floats = np.where((series == series[0]).all(axis=0), series[0], series.mean(axis=0))
    return mean


def _apart(series: Floats, chance: float) -> tuple[Bools, Floats]:
    """Mask of the few steps that stand apart from all others, [steps, figures], and the mean of the others, [figures].

    The generalised extreme Studentized deviate test (Rosner, 1983), which finds such a step in normal noise of any
    figure with a probability of 1 %. Few are as many as a share of more than `chance` of the samples lacks altogether,
    about exp(-few).
    """
    steps, columns = len(series), np.arange(series.shape[1])
    others, apart = np.ones(series.shape, np.bool_), np.zeros(series.shape, np.bool_)
    few = min(math.floor(-math.log(chance)), (steps - 1) // 2) if steps >= FEWEST_STEPS else 0
    for count in range(1, few + 1):
        rest = steps - count
        deviation = np.where(others, np.abs(series - series.mean(axis=0, where=others)), 0.0)
        deviation[deviation <= _ROUNDING * np.abs(series).max(axis=0)] = 0.0
        spread = np.sqrt((deviation**2).sum(axis=0) / rest)
        farthest = deviation.argmax(axis=0)
        t = student_beyond(_APART / (2 * (rest + 1) * len(columns)), rest - 1)
        needed = rest * t / math.sqrt((rest - 1 + t * t) * (rest + 1))
        others[farthest, columns] = False
        apart = np.where(deviation.max(axis=0) > needed * spread, ~others, apart)
    return apart, series.mean(axis=0, where=~apart)


def _rare_margin(series: Floats, apart: Bools, usual: Floats, chance: float) -> Floats:
    """Half the width of the interval for what steps apart add to each mean, [figures]: neighbours are one event, and
    identical runs have as many as a Poisson distribution allows.
    """
    margin = np.zeros_like(usual)
    for column in np.flatnonzero(apart.any(axis=0)).tolist():
        places = np.flatnonzero(apart[:, column])
        events = np.split(series[places, column] - usual[column], np.flatnonzero(np.diff(places) > 1) + 1)
        sizes, count = np.array([event.sum() for event in events]) / len(series), len(events)
        margin[column] = math.sqrt((sizes**2).mean()) * (poisson_most(count, chance / (2 * len(usual))) - count)
    return margin


def poisson_most(count: int, chance: float) -> float:
    """The largest mean of a Poisson distribution that gives at most `count` with a probability of `chance`."""

    def is_beyond(mean: float) -> bool:
        return math.exp(-mean) * sum(mean**number / math.factorial(number) for number in range(count + 1)) < chance

    low, high = 0.0, 1.0
    while not is_beyond(high):
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return low


class _Blocks:
    """The steps of a side, [steps, figures], as overlapping blocks that wrap round.

    `mean`, `error`: the mean and its standard error, [figures]. `number`: of blocks that a sample consists of.
    `length`: of each, by default what the figures ask for.
    """

    def __init__(self, series: Floats, length: int | None = None) -> None:
        varies = np.ptp(series, axis=0) > _ROUNDING * np.abs(series).max(axis=0)
        series = np.where(varies, series, series[0])
        self.length = length = block_length(series) if length is None else length
        steps = len(series)
        self.mean = _mean(series)
        deviation = series - self.mean
        sums = np.cumsum(np.concatenate([np.zeros_like(deviation[:1]), deviation, deviation[: length - 1]]), axis=0)
        self.of_block = (sums[length:] - sums[:-length]) / length
        self.number = -(-steps // length)
        # The mean of all blocks is known exactly, so steps / length of them have one degree of freedom less.
        freedom = steps / length - 1
        self.error = np.sqrt((self.of_block**2).mean(axis=0) / freedom) if freedom else np.full_like(self.mean, np.inf)

    def drawn(self, seed: int) -> Floats:
        """How often each block is in each of half the samples, [samples, blocks]."""
        blocks = len(self.of_block)
        drawn = np.random.default_rng(seed).integers(0, blocks, (_SAMPLES // 2, self.number))
        drawn += blocks * np.arange(len(drawn))[:, None]
        return np.bincount(drawn.ravel(), minlength=len(drawn) * blocks).reshape(-1, blocks).astype(float)

    def sampled(self, drawn: Floats, figures: slice) -> tuple[Floats, Floats]:
        """Deviation of the mean and its squared standard error in each sample, [samples, figures]."""
        blocks = self.of_block[:, figures]
        mean = drawn @ blocks / self.number
        variance = np.maximum(drawn @ blocks**2 / self.number - mean**2, 0.0)
        return mean, variance / (self.number - 1)


def _largest(sides: Sequence[_Blocks], seeds: tuple[int, int]) -> Floats:
    """The largest deviation of any figure in each sample, in standard errors of the sample, [samples]."""
    drawn = [side.drawn(seed) for side, seed in zip(sides, seeds, strict=True)]
    largest, batch_size = np.zeros(len(drawn[0])), max(1, _NUMBERS_AT_ONCE // len(drawn[0]))
    for first in range(0, len(sides[0].mean), batch_size):
        figures = slice(first, first + batch_size)
        (mean, error), (other, also) = (side.sampled(times, figures) for side, times in zip(sides, drawn, strict=True))
        deviation, scale = np.abs(other - mean), np.sqrt(error + also)
        # A sample of equal blocks has no scatter: its deviation is beyond any reach.
        deviation = np.divide(deviation, scale, out=np.where(deviation > 0, np.inf, 0.0), where=scale > 0)
        np.maximum(largest, deviation.max(axis=1), out=largest)
    return largest


def block_length(series: Floats) -> int:
    """The number of neighbouring steps to draw together, for [steps, figures]: the most that a figure asks for.

    The rule of Politis and White (2004), corrected by Patton, Politis and White (2009), for circular blocks: the length
    with the least error of the variance, from the autocovariances up to twice the lag from which on none is beyond
    chance.
    """
    return max(map(_block_length, series.T), default=1)


def _block_length(series: Floats) -> int:
    steps, deviation = len(series), series - series.mean()
    if steps < 4 or (series == series[0]).all():
        return 1
    in_a_row = max(5, math.ceil(math.sqrt(math.log10(steps))))
    most = min(math.ceil(math.sqrt(steps)) + in_a_row, steps - 1)
    covariance = np.array([deviation[: steps - lag] @ deviation[lag:] for lag in range(most + 1)]) / steps
    beyond = np.abs(covariance[1:]) >= 2 * math.sqrt(math.log10(steps) / steps) * covariance[0]
    quiet = next((lag for lag in range(most) if not beyond[lag : lag + in_a_row].any()), most)
    lags = np.arange(1, min(2 * max(quiet, 1), most) + 1)
    window = np.minimum(1.0, 2 * (1 - lags / lags[-1]))
    spectrum = covariance[0] + 2 * (window * covariance[lags]).sum()
    curvature = 2 * (window * lags * covariance[lags]).sum()
    if spectrum == 0:
        return 1
    best = math.ceil((1.5 * (curvature / spectrum) ** 2 * steps) ** (1 / 3))
    return int(min(max(best, 1), math.ceil(min(3 * math.sqrt(steps), steps / 3))))


def slowdown_by_step(original_s: Floats, ideal_s: Floats) -> Floats:
    """Contribution of each step to S, [steps]: their mean is S, their scatter that of a ratio of means."""
    slowdown, ideal = original_s.mean() / ideal_s.mean(), ideal_s.mean()
    of_steps: Floats = slowdown + (original_s - slowdown * ideal_s) / ideal
    return of_steps


class Estimate(Struct, frozen=True):
    """A figure with its 90 % interval."""

    value: Finite  #: the likely value
    low: Finite  #: the lower end of its 90 % interval
    high: Finite  #: the upper end

    @property
    def words(self) -> str:
        """The value of a time, and its interval."""
        return f"{seconds(self.value)} ({self.interval})" if self.interval else seconds(self.value)

    @property
    def interval(self) -> str:
        """The interval of a time in words, "" if it is too narrow for them."""
        low, high = seconds(self.low), seconds(self.high)
        return f"{low} to {high}" if low != high else ""


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


def safe(values: Any) -> Floats:
    """`values` as divisors: 1 where there is nothing to compare with because ops took no time."""
    return np.where(values > NOTHING, values, 1.0)


def median(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Median over `axes`, ignoring nan; nan if all values are nan."""
    if not np.isnan(values).any():
        return _by_rows(_median, _flat(values, axes))
    ordered, count = _sorted(values, axes)
    low = np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis=-1)
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[-1] - 1), axis=-1)
    return np.asarray((low + high)[..., 0] / 2)


def lower_median(values: Floats, axis: int | tuple[int, ...]) -> Floats:
    """Median over `axis`, the lower of two middle values: half of the values may be slow. nan as in `median`."""
    if isinstance(axis, int) and not np.isnan(values).any():
        middle = (values.shape[axis] - 1) // 2
        return np.asarray(np.take(np.partition(values, middle, axis=axis), middle, axis=axis))
    ordered, count = _sorted(values, (axis,) if isinstance(axis, int) else axis)
    return np.asarray(np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis=-1)[..., 0])


def lower_median_of(present: Floats, cells: int) -> float:
    """The lower median of `cells` values, all 0 except `present`: if half are 0, that is the usual case."""
    place = (cells - 1) // 2 - (cells - len(present))
    return 0.0 if place < 0 else float(np.partition(present, place)[place])


def of_peers(values: Floats, axis: int) -> Floats:
    """The usual value along `axis`, as the lower median; of two values, for each the other. Broadcasts to `values`."""
    if values.shape[axis] == 2:
        return np.flip(values, axis)
    return np.asarray(np.expand_dims(lower_median(values, axis), axis))


def _by_rows(reduced: Callable[[Floats], Floats], values: Floats) -> Floats:
    """What `reduced` makes of the last axis, on all cores."""
    if values.size < parallel.WORTH_THREADS:
        return reduced(values)
    rows = values.reshape(-1, values.shape[-1])
    result = np.empty(len(rows))

    def run(part: slice) -> None:
        result[part] = reduced(rows[part])

    parallel.each(run, parallel.slices(len(rows), rows.size))
    return result.reshape(values.shape[:-1])


def _median(values: Floats) -> Floats:
    """Median over the last axis of values without nan; several times faster than numpy's on short rows."""
    count = values.shape[-1]
    if not count:
        return np.full(values.shape[:-1], np.nan)
    parted = np.partition(values, count // 2, axis=-1)
    upper = parted[..., count // 2]
    if count % 2:
        return np.array(upper)
    return np.asarray((parted[..., : count // 2].max(axis=-1) + upper) / 2)


def _flat(values: Floats, axes: tuple[int, ...]) -> Floats:
    """The values with `axes` joined into one, the last."""
    moved = np.moveaxis(values, axes, tuple(range(-len(axes), 0)))
    kept_axes = moved.ndim - len(axes)
    return moved.reshape(*moved.shape[:kept_axes], math.prod(moved.shape[kept_axes:]))


def _sorted(values: Floats, axes: tuple[int, ...]) -> tuple[Floats, Ints]:
    """Values in ascending order over `axes` (made the last axis), nan at the end; the number of values not nan, [...,
    1].
    """
    ordered = np.ascontiguousarray(_flat(values, axes))
    if np.may_share_memory(ordered, values):
        ordered = ordered.copy()
    count = np.isfinite(ordered).sum(axis=-1, keepdims=True)
    if ordered.size < parallel.WORTH_THREADS:
        ordered.sort(axis=-1)
    else:
        rows = ordered.reshape(-1, ordered.shape[-1])
        parallel.each(lambda part: rows[part].sort(axis=-1), parallel.slices(len(rows), rows.size))
    return ordered, count


def sampled(values: Floats) -> Floats:
    """At most about SAMPLE of the values, evenly spaced, flat."""
    return values.reshape(-1)[:: sample_stride(values.size)]


def sample_stride(count: int) -> int:
    """The distance of the values of a sample: an odd one does not resonate with axes of even length."""
    return max(1, count // SAMPLE) | 1


def spread_of_logs(values: Floats) -> float:
    """Robust standard deviation of the logarithms of values, ignoring nan; 0 without any."""
    logs = np.log(np.maximum(values[np.isfinite(values)], NOTHING))
    return MAD_TO_SIGMA * float(np.median(np.abs(logs - np.median(logs)))) if len(logs) else 0.0


def nan_mean(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Mean over `axes`, ignoring nan; nan if all values are nan."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axes)
    total = np.where(finite, values, 0.0).sum(axis=axes)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def lower_quantile(values: Floats, axis: int, share: float) -> Floats:
    """The quantile `share` over `axis`, the lower of two neighbouring values; nan as in `median`."""
    ordered, count = _sorted(values, (axis,))
    place = np.maximum(np.floor(share * (count - 1)).astype(np.int64), 0)
    return np.asarray(np.take_along_axis(ordered, place, axis=-1)[..., 0])
