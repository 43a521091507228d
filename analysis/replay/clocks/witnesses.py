"""Agreement of the ties of each worker on its clock.

In: `Ties` and the offsets estimated from them. Out: `Witnesses`: the evidence for and against each offset.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.robust import MEDIAN_ERROR, median
from tracekit.analysis.replay.clocks.course import ERRORS, FEWEST_FOR_SCATTER, scatter
from tracekit.analysis.replay.clocks.ties import Ties

#: The resolution of the recordings, seconds.
RESOLUTION_S = 20e-6
#: A few steps do not show how much ends scatter: assume this share of the transfer's duration, or the resolution.
SCATTER_SHARE = 0.05


class Witnesses(Struct, frozen=True, eq=False):
    """The evidence of each worker's ties about its offset, [stages, dp_ranks] each.

    `for_it`, `against`: weight of the ties that the offset satisfies but a correct clock would not, and of those that
    it does not satisfy. `kinds`: number of ties. `scatter_s`: scatter of the best agreeing tie from run to run,
    seconds; infinite if none agrees.
    """

    for_it: Floats
    against: Floats
    kinds: Ints
    scatter_s: Floats


class _Misfit(Struct, frozen=True, eq=False):
    """Misfit of one tie per run and worker, seconds, nan if there is none: at the offset, and with a correct clock."""

    weight: float
    took_s: float
    now: Floats
    if_right: Floats


def question(ties: Ties, offsets: Floats, floor_s: float) -> Witnesses:
    """Collect the evidence. `offsets`: seconds, [runs, stages, dp_ranks]. Misfits up to `floor_s` count as 0."""
    _, stages, dp_ranks = ties.shape
    for_it, against = np.zeros((2, stages, dp_ranks))
    kinds = np.zeros((stages, dp_ranks), np.int64)
    scatter_s = np.full((stages, dp_ranks), np.inf)
    # For a clock stepped during the trace, look at the runs in which it is off.
    off = np.abs(offsets) > floor_s
    asked = off | ~off.any(axis=0)
    for misfit in _misfits(ties, offsets):
        now, if_right = (np.abs(median(np.where(asked, one, np.nan), (0,))) for one in (misfit.now, misfit.if_right))
        compared = np.isfinite(now)
        scatter_of_tie = _scatter(misfit)
        tolerance = np.maximum(floor_s, ERRORS * MEDIAN_ERROR * scatter_of_tie / np.sqrt(len(offsets)))
        agrees = compared & (now <= tolerance)
        for_it += misfit.weight * (agrees & (if_right > tolerance))
        against += misfit.weight * (compared & ~agrees)
        kinds += compared
        scatter_s = np.where(agrees, np.minimum(scatter_s, scatter_of_tie), scatter_s)
    return Witnesses(for_it, against, kinds, scatter_s)


def _misfits(ties: Ties, offsets: Floats) -> Iterator[_Misfit]:
    for group in ties.groups:
        axes = (1, 2) if group.all_stages else (2,)
        late = group.left_s - offsets
        late = late - np.expand_dims(median(late, axes), axes)
        yield _Misfit(group.weight, group.took_s, late, late + offsets)
    following = np.roll(offsets, -1, axis=1)
    low, high = np.where(np.isinf(ties.low), np.nan, ties.low), np.where(np.isinf(ties.high), np.nan, ties.high)
    if ties.shape[1] > 1:
        yield _Misfit(1.0, ties.link_took_s, _outside(following - offsets, low, high), _outside(following, low, high))
        before = np.roll(offsets, 1, axis=1)
        low, high = np.roll(low, 1, axis=1), np.roll(high, 1, axis=1)
        yield _Misfit(1.0, ties.link_took_s, _outside(offsets - before, low, high), _outside(-before, low, high))


def _outside(value: Floats, low: Floats, high: Floats) -> Floats:
    """Distance of a value from its bounds, 0 inside; nan if there are none."""
    bounded = np.isfinite(low) | np.isfinite(high)
    return np.where(
        bounded, value - np.clip(value, np.nan_to_num(low, nan=-np.inf), np.nan_to_num(high, nan=np.inf)), np.nan
    )


def _scatter(misfit: _Misfit) -> float:
    """The spread of a tie's evidence about a clock in one run of steps, seconds."""
    if len(misfit.now) < FEWEST_FOR_SCATTER:
        return max(SCATTER_SHARE * misfit.took_s, RESOLUTION_S)
    return scatter(misfit.now)
