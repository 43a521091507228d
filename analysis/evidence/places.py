"""Work that single workers have at one place of each step: data that is dealt by place, or user code.

In: seconds of computes, as of a `ComputeTable`. Out: how much longer they take for it, as a factor.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.evidence.compute_profile import COMPUTES
from tracekit.analysis.evidence.significance import SIGNIFICANCE, episodes_of, needed_nats
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.statistics import lower_median, nan_mean, safe


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


def place_factor(grid: Floats) -> Floats | None:
    """How much longer single workers compute at one place of each step, beyond their other places and beyond their
    peers at that place, [kinds, stages, 1, microbatches, 1, dp_ranks]; None if none does.

    `grid`: seconds, as of a `ComputeTable`. It takes 4 % in nine of ten steps, beyond chance: what moves from place to
    place, as pauses do, is no work of a place. If forwards and backwards of a worker have it, they have it at the same
    places and in proportion. Where most workers have it, none has more than its peers.
    """
    places, steps, dp_ranks = grid.shape[3:]
    if min(places, dp_ranks) < 2 or steps <= SIGNIFICANCE.fewest_turns:  # it has to return as often
        return None
    mean = np.log(safe(nan_mean(grid, (2, 4))))
    beside = mean - lower_median(mean, 3)[..., None]
    far = beside - lower_median(beside, 2)[:, :, None] > np.log1p(COMPUTES.position)
    if not far.any():
        return None
    factor = np.ones(far.shape)
    for kind, stage in np.argwhere(far.any(axis=(2, 3))):
        factor[kind, stage] = _longer_cells(nan_mean(grid[kind, stage], (0,)), far[kind, stage], far.size)
    excess, of_both = factor - 1, (factor > 1).any(axis=2, keepdims=True).all(axis=0)
    in_proportion = excess.max(axis=0) <= PLACES.kinds_alike * excess.min(axis=0)
    factor = np.where(of_both & ~in_proportion, 1.0, factor)
    return factor[:, :, None, :, None] if (factor > 1).any() else None


def _longer_cells(seconds: Floats, far: Bools, tests: int) -> Floats:
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
        slow = episodes.significant(COMPUTES.position) & returns & far.ravel()[members]
        factor[members] = np.where(slow, np.exp(episodes.level), 1.0)
    return factor.reshape(far.shape)


def _beside_others(values: Floats, far: Bools, axis: int) -> Floats:
    """Values less the mean of the others along `axis` that are not `far`; nan without any."""
    counted = np.isfinite(values) & ~far
    quiet = np.where(counted, values, 0.0)
    others = counted.sum(axis=axis, keepdims=True) - counted
    mean = (quiet.sum(axis=axis, keepdims=True) - quiet) / np.maximum(others, 1)
    return np.where(others > 0, values - mean, np.nan)
