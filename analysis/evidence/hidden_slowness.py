"""Slowness that neither the usual worker of a step, the usual step of a worker nor its usual microbatch shows.

In: times of computes and optimizers. Out: the level of quiet workers where most are slow; who is slow by its
optimizer, which does not depend on the lengths of sequences; the work that single workers have at one place of each
step.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.evidence.significance import SIGNIFICANCE, Episodes, episodes_of, most_telling, needed_nats
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import NOTHING, lower_median, median, nan_mean, safe


class TurnThresholds(Struct, frozen=True):
    """When workers are slow in turn."""

    #: A level of a series lasts at least this share of its steps. Chosen: less is an accident.
    level_share: float = 0.05
    #: If each worker's own steps are too few, all together show a level in at least this share. Chosen: as that of a
    #: kind of workers; what is rarer may be an accident.
    least_share: float = 0.25
    #: Workers whose quiet steps differ by less than this are alike. Chosen: as what is worth naming.
    factor: float = 0.04


TURNS = TurnThresholds()


class OptimizerThresholds(Struct, frozen=True):
    """When an optimizer is as slow as computes. `causes`: the benchmark of 582 simulated jobs."""

    #: A slow worker's optimizer, and each kind of its computes, exceeds the usual one by this share of the excess of
    #: its computes. Benchmark `causes`.
    share: float = 0.6
    #: Computes are as slow as the optimizers if they are slower by this share of that. Definition: nearer to that than
    #: to none.
    nearer: float = 0.5


OPTIMIZERS = OptimizerThresholds()


class PlaceThresholds(Struct, frozen=True):
    """When a worker has more work than its peers at one place of the step."""

    #: Looked at if the mean excess is this many standard errors. Statistic: one normal value of a thousand.
    errors: float = 3.0
    #: Half of the excess is in this share of the steps. Chosen: in others, another worker may be slow there.
    returning_share: float = 0.9
    #: Excesses of both kinds at one place, as factors, differ by less than this. Definition: nearer to those of longer
    #: work than to equal times in backwards that take twice as long as forwards.
    kinds_alike: float = 1.4
    #: Of more cells of a stage, this many show the noise. Chosen: each costs time.
    noise_cells: int = 250


PLACES = PlaceThresholds()


#: Of `faster_minority`: nobody.
NOBODY = np.zeros(1, np.bool_)


def faster_minority(values: Floats) -> Bools:
    """The workers that are faster throughout, if they are fewer than the others, [..., dp_ranks]. `values`: [...,
    steps, dp_ranks].

    The mean of both kinds is the speed of neither. Stretches of the trace tell kinds apart that the noise of steps
    hides.
    """
    *before, steps, dp_ranks = values.shape
    stretches = SIGNIFICANCE.fewest_turns
    if steps < stretches or dp_ranks < 3:
        return np.zeros((*before, dp_ranks), np.bool_)
    logs = np.moveaxis(np.where(values > 0, np.log(safe(values)), np.nan), -2, 0)[steps % stretches :]
    level = nan_mean(logs.reshape(stretches, -1, *logs.shape[1:]), (1,))
    cut = two_levels(np.moveaxis(level, 0, -1).reshape(-1, dp_ranks * stretches)).reshape(*before, 1)
    fast, members = (level <= cut).all(axis=0), (level <= cut).any(axis=0).sum(axis=-1)
    return np.asarray(fast & ((members == fast.sum(axis=-1)) & (2 * members < dp_ranks))[..., None])


def usual_worker(values: Floats, turns: Bools | bool = True, fast: Bools = NOBODY) -> Floats:
    """What the usual worker takes in each step, [..., steps]: if most are slow, what the others take.

    `values`: [..., steps, dp_ranks]; `turns`, `fast`: as of `quiet_level`.
    """
    quiet = quiet_level(values, turns, fast)
    return np.where(np.isnan(quiet), lower_median(values, -1), quiet)


def quiet_level(values: Floats, turns: Bools | bool = True, fast: Bools = NOBODY) -> Floats:
    """What the workers that are not slow take in each step, [..., steps], if so many are slow that the usual one may
    be; else nan. `values`: [..., steps, dp_ranks]; `turns`: where workers may be slow in turn, [...]; `fast`: as
    `faster_minority` tells, broadcasts to `values`; they are the only ones not slow, unless too few for a kind.

    Their own quiet steps tell that level. Workers that are slow together more than one after the other are no case of
    this: in such steps, all have more work or none is at fault.
    """
    in_turn, quiet, usual = _turns(values, TURNS.least_share)
    in_turn = (in_turn & turns)[..., None]
    kind = fast & (fast.mean(axis=-1, keepdims=True) >= TURNS.least_share)
    logs = np.log(safe(values))
    level = nan_mean(np.where(np.where(in_turn[..., None], quiet, kind), logs, np.nan), (values.ndim - 1,))
    return np.exp(np.where(in_turn & np.isnan(level), usual, level))


def _turns(values: Floats, least: float) -> tuple[Bools, Bools, Floats]:
    """Whether so many workers are slow in turn that the usual one of a step may be, [...]; who is not slow, [...,
    steps, dp_ranks]; the logarithm of what these take, [..., 1].

    A worker with two levels is slow at the upper one. A trace may be too short to show both of each worker, so the
    levels of all together count, too, if they are at the lower one in the share `least` of their steps.
    """
    logs = np.log(safe(values))
    *before, steps, dp_ranks = logs.shape
    series = np.moveaxis(logs, -1, -2).reshape(-1, dp_ranks, steps)
    of_all = two_levels(series.reshape(len(series), -1))
    of_all = np.where((series <= of_all[:, None, None]).mean(axis=(1, 2)) < least, np.nan, of_all)
    own = two_levels(series.reshape(-1, steps)).reshape(-1, dp_ranks)
    cut = np.where(np.isnan(own), of_all[:, None], own).reshape(*before, 1, dp_ranks)
    slow = logs > np.where(np.isnan(cut), np.inf, cut)
    usual_of_each = lower_median(np.where(slow, np.nan, logs), -2)
    usual = lower_median(usual_of_each, -1)[..., None]
    quiet = ~slow & np.isfinite(values) & (np.abs(usual_of_each - usual) < TURNS.factor)[..., None, :]
    hides = (quiet.sum(axis=-1) <= (dp_ranks - 1) // 2).any(axis=-1)
    return np.asarray(hides & ~together(slow)), np.asarray(quiet), usual


def unclear_turns(values: Floats) -> Bools:
    """Whether workers seem to be slow in turn, but in so many steps that the others may be accidents, [...].

    `values`: [..., steps, dp_ranks].
    """
    return _turns(values, 0.0)[0] & ~_turns(values, TURNS.least_share)[0]


def together(slow: Bools) -> Bools:
    """Whether members are slow in the same steps more than in turn, [...]. `slow`: [..., steps, members]; true if fewer
    than two are slow at times.
    """
    variance = slow.var(axis=-2)
    apart, at_times = variance.sum(axis=-1), (variance > 0).sum(axis=-1)
    # Of independent members, the variances add up; together, their number times as much.
    beyond = slow.sum(axis=-1).var(axis=-1) - apart
    return np.asarray((at_times < 2) | (2 * beyond >= (at_times - 1) * apart))


def two_levels(series: Floats) -> Floats:
    """A value between the two levels of each series, [series, steps] -> [series]; nan if it does not clearly have two,
    of some steps each.
    """
    steps = series.shape[1]
    fewest = max(SIGNIFICANCE.fewest_turns, math.ceil(TURNS.level_share * steps))
    if steps < 2 * fewest:
        return np.full(len(series), np.nan)
    ordered = np.sort(series, axis=1)
    before = np.cumsum(ordered - ordered.mean(axis=1, keepdims=True), axis=1)[:, fewest - 1 : steps - fewest]
    size = np.arange(fewest, steps - fewest + 1)
    between = before**2 * steps / (size * (steps - size))
    total, best = ordered.var(axis=1) * steps, between.argmax(axis=1)
    within = np.maximum(total - between.max(axis=1), NOTHING)
    nats = steps / 2 * np.log(np.maximum(SIGNIFICANCE.split * total / within, NOTHING))
    # Between the means of both levels, which are this far apart.
    apart = np.sqrt(between.max(axis=1) * steps / (size[best] * (steps - size[best])))
    low = np.take_along_axis(ordered.cumsum(axis=1), size[best, None] - 1, axis=1)[:, 0] / size[best]
    clear = apart > np.maximum(SIGNIFICANCE.spreads * np.sqrt(within / (steps - 2)), SIGNIFICANCE.outstanding)
    return np.where(clear & (nats >= -math.log(SIGNIFICANCE.false_kinds)), low + apart / 2, np.nan)


def slow_in_square(grid: Floats, optimizer: Floats, smallest: float) -> Floats:
    """With two stages on two DP ranks, how much slower the worker computes that its optimizer shows to be slow, 1
    elsewhere, [kinds, stages, steps, dp_ranks].

    A slow worker looks like the diagonally opposite one, except for the cost of their microbatches. Stages compared
    with each other show by how much one of the two is slow, whatever these cost; the optimizers show which one.
    """
    logs = np.log(np.where(grid > 0, grid, np.nan))
    of_stages = median(logs[:, 0] - logs[:, 1], (1, 2))
    slow = np.ones((len(grid), *optimizer.shape))
    for sign, diagonal in ((1, ((0, 0), (1, 1))), (-1, ((0, 1), (1, 0)))):
        beyond = sign * (of_stages[..., 0] - of_stages[..., 1])
        steps = beyond.min(axis=0) > np.log1p(smallest)
        if not steps.any():
            continue
        least = 1 + OPTIMIZERS.share * np.expm1(np.median(beyond[:, steps]))
        cells = [cell for cell in diagonal if np.median(optimizer[cell[0], steps, cell[1]]) > least]
        if len(cells) == 1:
            ((stage, dp_index),) = cells
            slow[:, stage, steps, dp_index] = np.exp(beyond[:, steps])
    return slow


def of_long_data(episodes: Episodes, over_peers: Floats, optimizer: Floats | None) -> Bools:
    """Members that have long sequences in their slow steps: all kinds of computes take longer, the optimizer does not,
    [members].

    `over_peers`: logs of slowness, [..., steps, dp_ranks]; `optimizer`: over that of peers, [steps, dp_ranks]. Without
    one, only steps that come and go are such chance: as much data since or until a step looks like a slower machine.
    """
    steps = episodes.slow.shape[1]
    slow = np.where(episodes.slow.T, 1.0, np.nan)
    by_kind = nan_mean(over_peers.reshape(-1, *slow.shape) * slow, (1,))
    of_data = by_kind.min(axis=0) > OPTIMIZERS.share * by_kind.max(axis=0)
    if optimizer is None:
        return np.asarray(of_data & ~episodes.slow.all(axis=1) & (episodes.since == 0) & (episodes.until == steps))
    slowness = median(optimizer * slow, (0,))
    return np.asarray(of_data & (slowness - 1 < OPTIMIZERS.share * np.expm1(episodes.level)))


def told_by_optimizers(
    episodes: Episodes, over_peers: Floats, optimizer: Floats | None, of_data: Bools, smallest: float
) -> tuple[Episodes, Floats]:
    """The episodes without those of long sequences, `of_data`, unless they last throughout, which is no chance; and the
    logs of slowness over peers. For members whose computes are as slow as their optimizers, as far as lengths let one
    see that, both are those of the optimizers.

    Shapes as in `of_long_data`.
    """
    by_chance = of_data & ~episodes.slow.all(axis=1)
    episodes = structs.replace(episodes, nats=np.where(by_chance, 0.0, episodes.nats))
    if optimizer is None or optimizer.shape[1] < 2:
        return episodes, over_peers
    level, members = np.log(safe(optimizer)), optimizer.shape[1]
    others = episodes_of(level.T, members).nats < needed_nats(members)
    if others.all() or not others.any():
        return episodes, over_peers
    level = level - level[:, others].mean()  # a slow half is not slow beside the mean of all
    alone = episodes_of(level.T, members)
    slow = alone.significant(smallest) & ~episodes.significant(smallest)
    where = (alone.slow & slow[:, None]).T
    if not where.any():
        return episodes, over_peers
    beyond_others = np.nanmean(over_peers[..., where]) - np.nanmean(over_peers[..., others])
    if beyond_others < OPTIMIZERS.nearer * level[where].mean():
        return episodes, over_peers
    alone = structs.replace(alone, nats=np.where(slow, alone.nats, 0.0))
    return most_telling([episodes, alone]), np.where(where, level, over_peers)


def place_factor(grid: Floats, smallest: float) -> Floats | None:
    """How much longer single workers compute at one place of each step, beyond their other places and beyond their
    peers at that place, [kinds, stages, 1, microbatches, 1, dp_ranks]; None if none does.

    `grid`: seconds, as of a `ComputeTable`. It takes `smallest` more, relative, in nine of ten steps, beyond chance:
    what moves from place to place, as pauses do, is no work of a place. If forwards and backwards of a worker have it,
    they have it at the same places and in proportion. Where most workers have it, none has more than its peers.
    """
    places, steps, dp_ranks = grid.shape[3:]
    if min(places, dp_ranks) < 2 or steps <= SIGNIFICANCE.fewest_turns:  # it has to return as often
        return None
    mean = np.log(safe(nan_mean(grid, (2, 4))))
    beside = mean - lower_median(mean, 3)[..., None]
    far = beside - lower_median(beside, 2)[:, :, None] > np.log1p(smallest)
    if not far.any():
        return None
    factor = np.ones(far.shape)
    for kind, stage in np.argwhere(far.any(axis=(2, 3))):
        factor[kind, stage] = _longer_cells(nan_mean(grid[kind, stage], (0,)), far[kind, stage], far.size, smallest)
    excess, of_both = factor - 1, (factor > 1).any(axis=2, keepdims=True).all(axis=0)
    in_proportion = excess.max(axis=0) <= PLACES.kinds_alike * excess.min(axis=0)
    factor = np.where(of_both & ~in_proportion, 1.0, factor)
    return factor[:, :, None, :, None] if (factor > 1).any() else None


def _longer_cells(seconds: Floats, far: Bools, tests: int, smallest: float) -> Floats:
    """The factors of those cells `far`, [microbatches, dp_ranks], that are slow in all steps; 1 for others.

    `seconds`: of the computes of one kind and stage, [microbatches, steps, dp_ranks]. Kinds and stages share the noise
    of a microbatch, so each shows its own.
    """
    beside = np.log(safe(seconds))
    for axis in (2, 0):
        beside = _beside_others(beside, far[:, None], axis)
    series = np.moveaxis(beside, 1, 2).reshape(far.size, -1)
    steps = series.shape[1]
    # Of a large job, those that may be slow, beside as many as show the noise.
    members = series.mean(axis=1) > PLACES.errors * series.std(axis=1) / np.sqrt(steps)
    members &= far.ravel()
    factor = np.ones(far.size)
    if members.any():
        members[:: max(1, far.size // PLACES.noise_cells) | 1] = True
        members &= np.isfinite(series).any(axis=1)  # without others to compare with, nothing shows
        # Of each microbatch and of each rank, one mean is taken away.
        peers = far.size / (far.size - (far.shape[0] - 1) * (far.shape[1] - 1))
        episodes = structs.replace(episodes_of(series[members], peers), needed=needed_nats(tests))
        returns = (series[members] > episodes.level[:, None] / 2).mean(axis=1) >= PLACES.returning_share
        slow = episodes.significant(smallest) & returns & far.ravel()[members]
        factor[members] = np.where(slow, np.exp(episodes.level), 1.0)
    return factor.reshape(far.shape)


def _beside_others(values: Floats, far: Bools, axis: int) -> Floats:
    """Values less the mean of the others along `axis` that are not `far`; nan without any."""
    counted = np.isfinite(values) & ~far
    quiet = np.where(counted, values, 0.0)
    others = counted.sum(axis=axis, keepdims=True) - counted
    mean = (quiet.sum(axis=axis, keepdims=True) - quiet) / np.maximum(others, 1)
    return np.where(others > 0, values - mean, np.nan)
