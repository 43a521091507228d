"""Workers that are slow in turn: what those that are not take in each step.

In: times of workers, [..., steps, members]. Out: the level of the quiet ones, also where most are slow in a step, so
that neither the usual worker of a step nor the usual step of a worker shows it.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.significance import SIGNIFICANCE
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import NOTHING, lower_median, nan_mean, safe


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


def usual_worker(values: Floats, turns: Bools | bool = True) -> Floats:
    """What the usual worker takes in each step, [..., steps]: if most are slow in turn, what the others take.

    `values`: [..., steps, dp_ranks]; `turns`: as of `quiet_level`.
    """
    quiet = quiet_level(values, turns)
    return np.where(np.isnan(quiet), lower_median(values, -1), quiet)


def quiet_level(values: Floats, turns: Bools | bool = True) -> Floats:
    """What the workers that are not slow take in each step, [..., steps], if so many are slow in turn that the usual
    one may be; else nan. `values`: [..., steps, dp_ranks]; `turns`: where workers may be slow in turn, [...].

    Their own quiet steps tell that level. Workers that are slow together more than one after the other are no case of
    this: in such steps, all have more work or none is at fault.
    """
    in_turn, quiet, usual = _turns(values, TURNS.least_share)
    level = nan_mean(np.where(quiet, np.log(safe(values)), np.nan), (values.ndim - 1,))
    return np.where((in_turn & turns)[..., None], np.exp(np.where(np.isnan(level), usual, level)), np.nan)


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
