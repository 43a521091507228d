"""The noise of a run, and the steps of a series that stand out from it.

In: series over the steps, one per worker or DP rank: logarithms of its slowdown over its peers, [series, steps]. Out:
the `Noise` of the run and, per series, the `Episodes`: in which steps it is slow, by how much, how certain.

The error of a level is that of a bootstrap over the steps that keeps their autocorrelation: an autoregressive (sieve)
bootstrap, whose variance has a closed form, so that nothing is drawn and the result is always the same. Neighbouring
steps of a worker whose speed wanders are not independent; a z-score that counts each of them makes claims that a second
trace would not confirm. The memory is taken to be one standard error longer than it looks, because short traces hide
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.numeric.statistics import MAD_TO_SIGMA, NOTHING, median, safe

#: The shortest range that holds half of n normal values is this many standard deviations wide, less a share of 1 /
#: sqrt(n) that is larger for even n. Statistic: fitted to 3 to 400 simulated normal values.
HALF_WIDTH = 1.35
HALF_WIDTH_LOST = (1.6, 1.25)
THIRD_WIDTH, THIRD_WIDTH_LOST = 0.86, 1.45


class SignificanceThresholds(Struct, frozen=True):
    """What stands out from noise. `causes`: the benchmark, also of few peers, drifting speeds and heavy tails."""

    #: Share of healthy jobs in which noise alone may cause a false accusation. Definition: one in a thousand.
    false_alarms: float = 1e-3
    #: Fewer series than this do not show how much healthy members differ permanently. Benchmark `causes`.
    fewest_members: int = 6
    #: A periodic slowdown must have happened this many times. Chosen: fewer are chance.
    fewest_turns: int = 3
    #: Periods are searched up to this length. Chosen: each costs time.
    longest_period: int = 32
    #: No GPU repeats a step more precisely than this; rounding of recorded times is of this size. Chosen.
    sigma: float = 1e-4
    #: The longest memory that can be distinguished from a level. Benchmark `causes`.
    longest_memory: float = 0.95
    #: A memory shows if it is this many standard errors long. Statistic: by chance in one job of forty.
    memory_errors: float = 2.0
    #: Fewer steps than this hide any memory. Statistic: its error is larger.
    fewest_steps: int = 6
    #: At least this share of the variance remains when levels are removed. Chosen: less would accuse.
    variance_left: float = 0.1
    #: A rise has begun where it reaches this share of its height. Definition.
    started_share: float = 0.1
    #: Cut a trace into this many stretches to measure its noise over longer times than a step. Statistic: more
    #: stretches are shorter and see less; fewer are too few samples.
    stretches: int = 8
    #: Cut in two, evenly spread values keep this share of their variance around the two means; others that are alike,
    #: more. Statistic.
    split: float = 0.25
    #: The same, cut in three. Statistic.
    split_in_three: float = 1 / 9
    #: A group of members this large is a kind of its own: this many at least ... Definition.
    fewest_of_kind: int = 2
    #: ... and this share. Chosen.
    kind_share: float = 0.25
    #: By chance, values fall apart into two kinds in this share of cases. Definition: as `false_alarms`.
    false_kinds: float = 1e-3
    #: A value this many standard deviations ... Statistic: no normal value of a million.
    spreads: float = 6.0
    #: ... and this much from the usual is far from it. Chosen: half of what is named.
    outstanding: float = 0.02
    #: From this many values on, a third of them shows the spread: with a few outliers, neither of two levels has half
    #: of the steps. Definition: fitted from here on.
    fewest_for_third: int = 24
    #: The level stays as it is until one of these shares of the steps ... Chosen: each costs time.
    starts: tuple[float, float, float, float, float] = (0.0, 0.125, 0.25, 0.375, 0.5)
    #: ... then follows a polynomial of at most this degree ... Chosen: a higher one follows noise.
    highest_degree: int = 3
    #: ... each of which needs this many steps. Chosen.
    steps_per_degree: int = 3


SIGNIFICANCE = SignificanceThresholds()


class Noise(Struct, frozen=True, eq=False):
    """The noise of a run.

    `variance`: of one step, [series]. `freedom`: number of independent deviations behind the estimate. `spread`:
    standard deviation of the permanent differences between healthy members. `memory`: share of a deviation that remains
    a step later. `drift`: the level of members whose level moves smoothly, else 0, [series, steps]; None: unknown.
    """

    variance: Floats
    freedom: float
    spread: float
    memory: float
    drift: Floats | None = None

    def variance_over(self, steps: Ints | int) -> Floats:
        """Variance of the mean over `steps` consecutive steps, [series]."""
        return np.asarray(self.variance * _share_left(self.memory, np.maximum(steps, 1)))

    def error(self, steps: Ints | int) -> Floats:
        """Standard error of a level over `steps` steps, [series]."""
        return np.asarray(np.sqrt(self.variance_over(steps) + self.spread**2))

    def nats(self, level: Floats, steps: Ints | int) -> Floats:
        """Improbability of `level` by chance: minus the log of the probability, from Student's likelihood ratio.

        With few steps, a large ratio means little. The tail beyond a ratio r has the weight exp(-r) / sqrt(4 pi r).
        """
        ratio = (self.freedom + 1) / 2 * np.log1p((level / self.error(steps)) ** 2 / self.freedom)
        tail = ratio + np.log(np.maximum(4 * np.pi * ratio, 1.0)) / 2
        return np.where(level > 0, tail, 0.0)


def needed_nats(tests: int) -> float:
    """The value of `nats` that at most `SIGNIFICANCE.false_alarms` of all jobs reach by chance with this many tests."""
    return math.log(max(tests, 1) / SIGNIFICANCE.false_alarms)


class Episodes(Struct, frozen=True, eq=False):
    """Steps in which each series is slow.

    `slow`: which steps, [series, steps]. All others are [series]: `level`: mean over those steps, a logarithm; `nats`:
    evidence against chance; `error`: of the level. `period`, `since`, `until`: the description of the steps, 0 if it
    does not apply: every `period`-th step, from position `since` on, before position `until`. `rises`: it grows over
    these steps.
    """

    slow: Bools
    level: Floats
    nats: Floats
    error: Floats
    period: Ints
    since: Ints
    until: Ints
    rises: Bools
    needed: float
    noise: Noise

    def significant(self, smallest: float) -> Bools:
        """Mask of series that are slow by at least `smallest` (a factor less 1), unexplained by chance."""
        return np.asarray((np.expm1(self.level) >= smallest) & (self.nats >= self.needed))


def most_telling(candidates: Sequence[Episodes]) -> Episodes:
    """Of several views of the same members, for each member the one in which it is slowest, of those that chance does
    not explain; if chance explains all of them, the least likely one.

    Each view is another test: `needed` grows with their number. For a member that is slow in all kinds of work, the
    least likely view is the kind with the least noise, which shows only part of its slowness.
    """
    needed = needed_nats(len(candidates[0].nats) * len(candidates))
    nats, level = (np.stack([getattr(candidate, name) for candidate in candidates]) for name in ("nats", "level"))
    unlikely = nats >= needed
    best = np.where(unlikely.any(axis=0), np.where(unlikely, level, -np.inf).argmax(axis=0), nats.argmax(axis=0))

    return replace(_picked(candidates, best), needed=needed)


def _picked(candidates: Sequence[Episodes], best: Ints) -> Episodes:
    """For each member the candidate with this number; the noise is that of the first."""

    def chosen(name: str) -> Any:
        return np.stack([getattr(candidate, name) for candidate in candidates])[best, np.arange(len(best))]

    names = ("slow", "level", "nats", "error", "period", "since", "until", "rises")
    return replace(candidates[0], **{name: chosen(name) for name in names})


def kinds_and_all(seconds: Floats, peers: Floats) -> list[Floats]:
    """Views of how much longer members take than their peers, logarithms, [members, steps] each: for all kinds of work
    together, then for each kind as if only that took longer.

    A slowdown of one kind shows best against the same kind on the peers, where noise of the other kinds does not hide
    it. `seconds`, `peers`: [kinds, members, steps].
    """
    share = (np.nansum(seconds, axis=(1, 2)) / safe(np.nansum(seconds)))[:, None, None]
    together = np.log(safe(seconds.sum(axis=0)) / safe(peers.sum(axis=0)))
    return [together, *np.log1p(share * (safe(seconds) / safe(peers) - 1))]


def noise_of(series: Floats, peers: float, *, remembers: bool = True, drifts: bool = True) -> Noise:
    """The noise of members, each compared with `peers` of them; nan where a step gives no value.

    Steps far above the others of their member have a level of their own, so that a worker that is slow at times does
    not count as noise. `remembers`: slow drifts are noise too; `drifts`: except those that chance does not explain.
    """
    members, steps = series.shape
    finite, (above, below) = np.isfinite(series), far_steps(series, peers)
    quiet = finite & ~above & ~below
    parts = [part for part in (quiet, finite & above, finite & below) if part.any()]
    level = _level(series, quiet)
    deviation: Floats = sum(
        (np.where(part, series - _level(series, part)[:, None], 0.0) for part in parts), np.zeros(series.shape)
    )
    independent = members * (1 - 1 / peers)
    # Each level hides changes that move like it.
    levels: Ints = np.sum([part.any(axis=1) for part in parts], axis=0, dtype=np.int64)
    drift = None
    if drifts and remembers and steps >= SIGNIFICANCE.fewest_steps and finite.all():
        drift, parameters = _drift(series, deviation, independent)
        moves = drift.any(axis=1)
        deviation[moves], levels[moves] = (series - drift)[moves], parameters
    seen, error = _memory(deviation, independent) if remembers else (0.0, 0.0)
    # A memory that clearly shows may be longer than it looks; a few steps cannot show one.
    longer = seen > SIGNIFICANCE.memory_errors * error or steps < SIGNIFICANCE.fewest_steps
    longest = min(seen + error, SIGNIFICANCE.longest_memory) if longer else seen
    unexplained = 1 - levels * _share_left(seen, np.maximum(steps // np.maximum(levels, 1), 1)) / np.maximum(levels, 1)
    own_variance = (deviation**2).mean(axis=1) / np.maximum(unexplained, SIGNIFICANCE.variance_left)
    usual = float(np.median(own_variance)) if members >= SIGNIFICANCE.fewest_members else float(own_variance.mean())
    # A member more restless than its peers has a larger error; its few steps determine that only roughly.
    variance = np.maximum(np.maximum(usual, own_variance), SIGNIFICANCE.sigma**2)
    spread = 0.0
    if members >= SIGNIFICANCE.fewest_members and quiet.any():
        level_spread = float(usual_sigma(level[quiet.any(axis=1)][None], by_third=False)[0])
        level_spread = min(level_spread, sigma_of_kinds(np.where(quiet.any(axis=1), level, _level(series, finite))))
        spread = math.sqrt(max(level_spread**2 - usual / steps, 0.0))
    freedom = independent * (steps * (1 - seen**2) / (1 + seen**2) - float(levels.mean()))
    if remembers and steps >= 2 * SIGNIFICANCE.stretches:
        # Neighbours on a host or a link come and go over many steps; the memory of single steps does not predict that.
        predicted = max(usual, SIGNIFICANCE.sigma**2) * float(_share_left(longest, steps))
        variance = variance * max(_over_stretches(deviation, levels) / predicted, 1.0)
        freedom = min(freedom, independent * (SIGNIFICANCE.stretches - float(levels.mean())))
    return Noise(variance, max(freedom, 1.0), spread, longest, drift)


def _drift(series: Floats, deviation: Floats, independent: float) -> tuple[Floats, int]:
    """The level of the members whose level moves smoothly, 0 for others, [series, steps]; how many parameters it has.

    The half of the members that deviates least shows what the noise remembers: a drift looks like a long memory.
    """
    own_squares = (deviation**2).sum(axis=1)
    quiet = own_squares <= np.median(own_squares)
    memory = min(sum(_memory(deviation[quiet], independent * float(quiet.mean()))), SIGNIFICANCE.longest_memory)
    pooled = max(independent, 1.0) if len(series) >= SIGNIFICANCE.fewest_members else 1.0
    level, nats, parameters = _curves(series, deviation, memory, pooled)
    return np.where((nats >= needed_nats(len(series)))[:, None], level, 0.0), parameters


def _over_stretches(deviation: Floats, levels: Ints) -> float:
    """Variance of the mean over all steps, from the means of equally long stretches (batch means)."""
    (members, steps), stretches = deviation.shape, SIGNIFICANCE.stretches
    length = steps // stretches
    means: Floats = deviation[:, steps - length * stretches :].reshape(members, stretches, length).mean(axis=2)
    own_variance: Floats = (means**2).sum(axis=1) / (stretches - levels)
    usual = float(np.median(own_variance)) if members >= SIGNIFICANCE.fewest_members else float(own_variance.mean())
    return float(usual * length / steps)


def _memory(deviation: Floats, independent: float) -> tuple[float, float]:
    """The correlation of a step with the one before, 0 to SIGNIFICANCE.longest_memory, and its standard error."""
    steps, total = deviation.shape[1], float((deviation**2).sum())
    if steps < 2 or total <= 0:
        return 0.0, 0.0
    shows = float((deviation[:, 1:] * deviation[:, :-1]).sum()) / total
    # Removing a level from a short series hides some of its memory (Kendall, 1954).
    memory = min(max((shows * steps + 1) / (steps - 3), 0.0), SIGNIFICANCE.longest_memory) if steps > 3 else 0.0
    return memory, math.sqrt((1 - memory**2) / max(independent * (steps - 1), 1.0))


def _share_left(memory: float, steps: Ints | int) -> Floats:
    """Variance of the mean of `steps` consecutive steps over that of one, if each remembers the one before."""
    count = np.asarray(steps, np.float64)
    together = count * (1 - memory**2) - 2 * memory * (1 - memory**count)
    return np.asarray(together / (count * (1 - memory)) ** 2)


def episodes_of(
    series: Floats,
    peers: float,
    *,
    least_variance: float = 0.0,
    fewest: int = SIGNIFICANCE.fewest_turns,
    remembers: bool = True,
) -> Episodes:
    """Find steps in which members are slow compared with `peers` (including itself), [series, steps] of log factors.

    A description of the steps must pay for itself. "Always" costs nothing, every n-th step the log of the number of
    such patterns, "since a step" and "up to a step" twice the log of the number of steps, and so does each run. The
    description that explains most wins; the steps outside it count as not slow. `fewest`: the least number of steps for
    a transient pattern, because tails of noise lengthen single steps of single workers. `least_variance`: lower bound
    of the variance of one step, if known. `remembers`: as in `noise_of`.
    """
    noise = noise_of(series, peers, remembers=remembers)
    episodes = _described(series, noise, least_variance, fewest)
    if noise.drift is None or not noise.drift.any():
        return episodes
    # A curve leaves little to measure noise by. Even if the drift is noise, it may explain too little.
    plain = _described(series, noise_of(series, peers, drifts=False), least_variance, fewest)
    return _picked([episodes, plain], np.where((episodes.nats < episodes.needed) & (plain.nats > episodes.nats), 1, 0))


def _described(series: Floats, noise: Noise, least_variance: float, fewest: int) -> Episodes:
    members, steps = series.shape
    values = _without_outliers(np.where(np.isfinite(series), series, 0.0), min(fewest, (steps + 1) // 2))
    noise = replace(noise, variance=np.maximum(noise.variance, least_variance))
    masks = _Masks(values, noise, fewest)
    if steps > 2:
        masks.try_runs()
        masks.try_periods()
        masks.try_bursts()
    masks.try_rises()
    slow, count = masks.slow, np.maximum(masks.slow.sum(axis=1), 1)
    level = (values * slow).sum(axis=1) / count
    # The noise of a long run is known from a few stretches only, which limits the evidence for any level, but not the
    # price of a description. That a member is slow at all costs nothing to describe.
    throughout = noise.nats(values.mean(axis=1), values.shape[1])
    return Episodes(
        slow=slow,
        level=level,
        nats=np.maximum(noise.nats(level, count) - masks.cost, throughout),
        error=noise.error(count),
        period=masks.period,
        since=masks.since,
        until=masks.until,
        rises=masks.rises,
        needed=needed_nats(members),
        noise=noise,
    )


def _without_outliers(values: Floats, fewest: int) -> Floats:
    """Clip values to what `fewest` steps reach, above and below: fewer are the tails of noise."""
    if fewest < 2:
        return values
    ordered = np.partition(values, (fewest - 1, values.shape[1] - fewest), axis=1)
    return np.clip(values, ordered[:, fewest - 1 : fewest], ordered[:, values.shape[1] - fewest, None])


def _level(series: Floats, where: Bools) -> Floats:
    total = np.where(where, series, 0.0).sum(axis=1)
    return np.asarray(total / np.maximum(where.sum(axis=1), 1))


class _Masks:
    """The best description so far of the steps in which each member is slow."""

    def __init__(self, values: Floats, noise: Noise, fewest: int) -> None:
        members, steps = values.shape
        self.values, self.noise, self.fewest = values, noise, fewest
        self.slow = np.ones((members, steps), np.bool_)
        self.cost = np.zeros(members)
        self.gain = self._gain(values.sum(axis=1), np.full(members, steps))
        self.period = np.zeros(members, np.int64)
        self.since = np.zeros(members, np.int64)
        self.until = np.full(members, steps, np.int64)
        self.rises = np.zeros(members, np.bool_)

    def _gain(self, total: Floats, count: Ints) -> Floats:
        """Log-likelihood gained by a slow level in `count` steps that add up to `total`."""
        mean = np.maximum(total, 0.0) / np.maximum(count, 1)
        return np.asarray(mean**2 / self.noise.variance_over(count) / 2)

    def _is_better(self, gain: Floats, cost: Floats) -> Bools:
        """True if better by more than rounding: of two equal descriptions, the first is simpler."""
        return np.asarray(gain - cost > (self.gain - self.cost) * (1 + 1e-9))

    def _take(self, gain: Floats, cost: Floats, slow: Bools, **words: Ints) -> None:
        better = self._is_better(gain, cost) & (slow.sum(axis=1) >= self.fewest)
        self.slow[better], self.gain[better], self.cost[better] = slow[better], gain[better], cost[better]
        steps = self.values.shape[1]
        for name, default in (("period", 0), ("since", 0), ("until", steps)):
            getattr(self, name)[better] = words[name][better] if name in words else default

    def try_runs(self) -> None:
        """Try "from a step on" and "up to a step"."""
        members, steps = self.values.shape
        before = np.cumsum(self.values, axis=1)[:, :-1]
        places = np.arange(1, steps)
        # A change point costs twice as much as a choice among as many patterns (Zhang and Siegmund, 2007).
        price, number = np.full(members, 2 * math.log(steps)), np.arange(steps)
        for first in (False, True):
            total = before if first else before[:, -1:] + self.values[:, -1:] - before
            gains = self._gain_of_runs(total, places if first else steps - places)
            best = gains.argmax(axis=1)
            cut = places[best]
            slow = number < cut[:, None] if first else number >= cut[:, None]
            words = {"until": cut} if first else {"since": cut}
            self._take(gains[np.arange(members), best], price, slow, **words)

    def _gain_of_runs(self, total: Floats, count: Ints) -> Floats:
        mean = np.maximum(total, 0.0) / count
        share = _share_left(self.noise.memory, count)
        return np.asarray(mean**2 / self.noise.variance[:, None] / share / 2)

    def try_periods(self) -> None:
        """Try every n-th step."""
        members, steps = self.values.shape
        periods = range(2, min(steps // SIGNIFICANCE.fewest_turns, SIGNIFICANCE.longest_period) + 1)
        price = np.full(members, math.log(max(sum(periods), 1)))
        by_step = np.ascontiguousarray(self.values.T)
        for period in periods:
            # All phases at once: hardly any of them beats the best description.
            turns = np.zeros((-(-steps // period), period, members))
            turns.reshape(-1, members)[:steps] = by_step
            count = (steps - 1 - np.arange(period)) // period + 1
            gains = self._gain(turns.sum(axis=0), count[:, None])
            for phase in np.flatnonzero(self._is_better(gains, price).any(axis=1)).tolist():
                slow = np.broadcast_to(np.arange(steps) % period == phase, self.values.shape)
                self._take(gains[phase], price, slow, period=np.full(members, period))

    def try_bursts(self) -> None:
        """Try all steps above half of the level of the highest ones."""
        high = self.values > self.values.max(axis=1, keepdims=True) / 2
        for _ in range(2):
            level = (self.values * high).sum(axis=1) / np.maximum(high.sum(axis=1), 1)
            high = self.values > level[:, None] / 2
        edges = np.diff(high.astype(np.int8), axis=1, prepend=0, append=0)
        price = 2 * (edges > 0).sum(axis=1) * math.log(self.values.shape[1])
        self._take(self._gain((self.values * high).sum(axis=1), high.sum(axis=1)), price, high)

    def try_rises(self) -> None:
        """Try the level of members whose level moves, if it grows: slow since it is no longer small."""
        drift, steps = self.noise.drift, self.values.shape[1]
        if drift is None:
            return
        highest = drift.max(axis=1, keepdims=True)
        started = (drift > SIGNIFICANCE.started_share * highest).argmax(axis=1)
        level = (self.values * self.slow).sum(axis=1) / np.maximum(self.slow.sum(axis=1), 1)
        unlike, unlike_rise = (self.values - level[:, None] * self.slow) ** 2, (self.values - drift) ** 2
        grows = drift[:, steps // 2 :].sum(axis=1) > drift[:, : -(-steps // 2)].sum(axis=1)
        rises = grows & (highest[:, 0] > 0) & (unlike_rise.sum(axis=1) < unlike.sum(axis=1))
        self.slow[rises] = np.arange(steps) >= started[rises, None]
        self.cost[rises], self.period[rises], self.until[rises] = 2 * math.log(steps), 0, steps
        self.since[rises], self.rises = started[rises], rises


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
    count, fewest = len(level), max(SIGNIFICANCE.fewest_of_kind, int(SIGNIFICANCE.kind_share * len(level)))
    before = np.cumsum(np.sort(level - level.mean()))[fewest - 1 : count - fewest]
    size = np.arange(fewest, fewest + len(before))
    total = float(level.var()) * count
    within = max(total - float((before**2 * count / (size * (count - size))).max()), NOTHING)
    two = count / 2 * math.log(max(SIGNIFICANCE.split * total / within, NOTHING)) >= -math.log(SIGNIFICANCE.false_kinds)
    return math.sqrt(within / (count - 2)) if two else math.inf


def far_steps(series: Floats, peers: float) -> tuple[Bools, Bools]:
    """Masks of steps in which a member is far above the usual value of all, and far below; there it has another level.

    Of two peers, one is as fast as the other is slow; of more, none is far below. If both are slow in turn, few steps
    or none are usual.
    """
    values = np.where(np.isfinite(series), series, 0.0)
    steps = values.shape[1]
    if steps < 3:
        return np.zeros(values.shape, np.bool_), np.zeros(values.shape, np.bool_)
    sigma = usual_sigma(values, by_third=steps >= SIGNIFICANCE.fewest_for_third)
    far = max(SIGNIFICANCE.spreads * float(np.median(sigma)), SIGNIFICANCE.outstanding)
    if peers != 2:
        return values > far, np.zeros(values.shape, np.bool_)
    turns = _turns(values)
    beyond = np.where(np.isnan(turns), far, turns)[:, None]
    return values > beyond, values < -beyond


def _turns(values: Floats) -> Floats:
    """The distance from 0 beyond which a member is slower than its only peer in some steps and faster in others,
    [members]; nan if they are not slow in turn.

    Both are alike in the steps between, if there are any. Levels are as far from each other as one that stands out, and
    chance makes them in `SIGNIFICANCE.false_kinds` of cases. A speed that wanders is between such levels most of the
    time.
    """
    steps = values.shape[1]
    ordered = np.take_along_axis(values, np.abs(values).argsort(axis=1), axis=1)
    # How many steps, those nearest to 0, are between: each number is tried.
    between = np.arange(steps)
    explained = (ordered.cumsum(axis=1) - ordered) ** 2 / np.maximum(between, 1)
    for side in (ordered > 0, ordered <= 0):
        total, count = (each[:, ::-1].cumsum(axis=1)[:, ::-1] for each in (ordered * side, side))
        explained += total**2 / np.maximum(count, 1)
    within = np.maximum(((ordered**2).sum(axis=1, keepdims=True) - explained) / steps, NOTHING)
    split = np.where(between > 0, SIGNIFICANCE.split_in_three, SIGNIFICANCE.split)
    nats = steps / 2 * np.log(np.maximum(split * values.var(axis=1, keepdims=True) / within, NOTHING))
    best = nats.argmax(axis=1)[:, None]
    cut = np.where(best > 0, np.take_along_axis(np.abs(ordered), np.maximum(best - 1, 0), axis=1), 0.0)
    parts = [values > cut, values < -cut, np.abs(values) <= cut]
    slower, faster, alike = (median(np.where(part, values, np.nan), (1,)) for part in parts)
    usual = np.where(best[:, 0] > 0, alike, 0.0)
    beyond = values - np.select(parts, [level[:, None] for level in (slower, faster, usual)])
    sigma = MAD_TO_SIGMA * np.median(np.abs(beyond), axis=1)
    margin = np.minimum(slower - usual, usual - faster)
    clear = margin > np.maximum(SIGNIFICANCE.spreads / np.where(best[:, 0] > 0, 1, 2) * sigma, SIGNIFICANCE.outstanding)
    fewest = np.minimum(parts[0].sum(axis=1), parts[1].sum(axis=1)) >= SIGNIFICANCE.fewest_turns
    return np.where(fewest & clear & (nats.max(axis=1) >= -math.log(SIGNIFICANCE.false_kinds)), cut[:, 0], np.nan)


def _curves(series: Floats, deviation: Floats, memory: float, pooled: float) -> tuple[Floats, Floats, int]:
    """Fit a curve to each of `series`, [series, steps], six steps at least: its level, [series, steps]; how unlikely it
    is by chance, nats, [series]; how many parameters it has at most.

    `deviation`: from the levels otherwise. `memory`: share of a deviation that remains a step later. `pooled`: number
    of independent series that share one variance; 1: each has its own.

    A speed that wanders looks smooth for a while, too. So a curve must explain more than curves do of noise that
    remembers from step to step.
    """
    steps = series.shape[1]
    starts = sorted({round(share * steps) for share in SIGNIFICANCE.starts})
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
    variance = np.maximum(remaining / freedom, SIGNIFICANCE.sigma**2)
    if pooled > 1:
        variance = np.maximum(variance, np.median(without) / (steps - 1))
    freedom *= pooled
    explained = np.maximum(without - remaining, 0.0) / variance
    # Student's likelihood ratio, less the weight of the parameters that any curve has, and of the choice of its start.
    spent = parameters - 1
    nats = (freedom + spent) / 2 * np.log1p(explained / freedom) - spent / 2 * np.log(np.maximum(explained, 1.0))
    return level, nats - math.log(len(starts)), max(map(len, bases))


def _basis(steps: int, start: int) -> Floats:
    """A level up to a step, then a polynomial, [parameters, steps]."""
    after = np.arange(steps) >= start
    degree = min(SIGNIFICANCE.highest_degree, (steps - start) // SIGNIFICANCE.steps_per_degree)
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
