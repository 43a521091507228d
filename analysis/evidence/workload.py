"""Cost of a microbatch on every stage of its DP rank, how strongly each stage follows it, and its place in the step.

In: computes relative to the usual one of their kind, stage and chunk, [kinds, stages, chunks, microbatches, steps,
dp_ranks], nan if not recorded. Out: workloads [microbatches, steps, dp_ranks], elasticities [kinds, stages, chunks],
position factors [kinds, microbatches].
"""

from __future__ import annotations

import numpy as np

from tracekit.analysis.evidence.significance import episodes_of
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import SAMPLE, lower_median, median, nan_mean, safe

#: Workloads that differ by less than this do not show how strongly a stage follows them.
SMALLEST_WORKLOAD_SPREAD = 0.04
#: A stage follows the workload fully unless its slope differs by this much.
SMALLEST_INELASTICITY = 0.05
#: Computes further from the workload than this were paused.
LARGEST_DEVIATION = 0.5
#: A place in the step that is slower by at least this is slow.
SMALLEST_POSITION = 0.04
#: Places are compared with each other, so there must be at least this many.
FEWEST_PLACES = 3
LARGEST_SLOW_SHARE = 0.5
#: Neighbouring microbatches are related if they correlate by this much and this many standard errors. Sequence lengths
#: do not correlate; a walk that forgets within one microbatch or more correlates by exp(-1) = 0.37 at least, and by
#: half as much next to the mean of a few.
SMALLEST_MEMORY = 0.18
MEMORY_ERRORS = 4.0


def workload(backward: Floats, slowness: Floats, elastic: Floats | None) -> Floats:
    """The workload that all stages of a DP rank share, per microbatch, 1 = the usual one.

    From backwards only, because pauses of Python do not reach them. `slowness`: factor of each worker, [stages, steps,
    dp_ranks]; `elastic`: of backwards, [stages, chunks], None: 1.
    """
    cells = backward / safe(slowness)[:, None, None]
    if elastic is not None:
        cells = 1 + (cells - 1) / elastic[:, :, None, None, None]
    return median(np.maximum(cells.reshape(-1, *cells.shape[2:]), 0.0), (0,))


def elasticity(relative: Floats, slowness: Floats, work: Floats) -> Floats:
    """Share of each stage's cost that follows the workload: 0.6 if four tenths are the same for all microbatches.

    The loss costs the same for each token, regardless of attention. Slopes come from the costliest and the cheapest
    quarter of the microbatches, and are relative to the stages' upper median, because most stages contain only layers.
    """
    shape = relative.shape
    # Evenly spaced lanes that make about SAMPLE cells.
    lanes = slice(None, None, max(1, int(np.prod(shape)) // (4 * SAMPLE)) | 1)
    work = work.reshape(shape[3], -1)[:, lanes].reshape(-1)
    beside = (relative / safe(slowness)[:, :, None, None]).reshape(*shape[:4], -1)[..., lanes]
    cells = beside.reshape(*shape[:3], -1)
    finite = np.isfinite(work)
    if shape[1] < 2 or finite.sum() < 8:
        return np.ones(shape[:3])
    low, high = np.quantile(work[finite], (0.25, 0.75))
    cheap, dear = finite & (work <= low), finite & (work >= high)
    if high - low < SMALLEST_WORKLOAD_SPREAD:
        return np.ones(shape[:3])
    apart = float(work[dear].mean() - work[cheap].mean())
    # A pause is not work.
    cells = np.where(np.abs(cells / safe(work) - 1) < LARGEST_DEVIATION, cells, np.nan)
    bottom, top = nan_mean(cells[..., cheap], (3,)), nan_mean(cells[..., dear], (3,))
    slope = (top - bottom) / apart
    elastic = slope / safe(bottom + slope * (1 - float(work[cheap].mean())))
    ordered = np.sort(elastic, axis=1)
    elastic = elastic / safe(ordered[:, elastic.shape[1] // 2].mean(axis=-1))[:, None, None]
    elastic = np.where(np.isfinite(elastic), np.clip(elastic, 0.1, 1.5), 1.0)
    return np.where(np.abs(elastic - 1) < SMALLEST_INELASTICITY, 1.0, elastic)


def position_factor(relative: Floats) -> Floats:
    """Relative duration of the microbatches at one place of each step, on all ranks, [kinds, microbatches].

    1 if a place does not stand out: by 4 %, in all steps, and by more than chance explains.
    """
    kinds, _, _, places, steps, _ = relative.shape
    factor = np.ones((kinds, places))
    if places < FEWEST_PLACES or steps < 2:
        return factor
    few = relative[..., :: max(1, relative.size // (4 * SAMPLE))]
    # Of two middle ones the faster: what slows down half of a rank's microbatches must not make the others look fast.
    beside = few / safe(lower_median(few, (2, 3)))[:, :, None, None]
    # Of two ranks, take the faster: what only one of them does is not due to the place.
    of_step = lower_median(np.moveaxis(beside, (1, 2, 5), (0, 1, 2)).reshape(-1, kinds, places, steps), axis=0)
    usual = lower_median(of_step, axis=1)[:, None]
    logs = np.log(safe(of_step / safe(usual)))
    episodes = episodes_of(logs.reshape(-1, steps), places)
    slow = (episodes.significant(SMALLEST_POSITION) & episodes.on.all(axis=1)).reshape(kinds, places)
    few_places = slow.mean(axis=1, keepdims=True) <= LARGEST_SLOW_SHARE
    return np.where(slow & few_places, np.exp(episodes.level).reshape(kinds, places), 1.0)


def remembers(work: Floats) -> tuple[bool, bool]:
    """True if microbatches cost like the previous ones on their DP rank: over the run, and within single steps.

    `work`: [microbatches, steps, dp_ranks]. The speed of a machine that wanders remembers in both. Sequence lengths are
    drawn independently for each microbatch. Even if a DP rank gets the long ones for some steps, those of one step come
    in any order. Too few microbatches do not show memory within a step; it is then assumed.
    """
    series = np.log(safe(work)).transpose(2, 1, 0)
    over_run, _ = _autocorrelation(series.reshape(len(series), -1))
    within, error = _autocorrelation(series)
    return (
        over_run > max(SMALLEST_MEMORY, MEMORY_ERRORS / np.sqrt(max(np.isfinite(work).sum(), 1))),
        len(work) < FEWEST_PLACES or within > max(SMALLEST_MEMORY, MEMORY_ERRORS * error) / 2,
    )


def _autocorrelation(series: Floats) -> tuple[float, float]:
    """Correlation of a value with the one before it, -1 to 1, and its error; rows (the last axis) have means of their
    own.
    """
    deviation = series - nan_mean(series, (series.ndim - 1,))[..., None]
    before, after = deviation[..., :-1], deviation[..., 1:]
    total, count = float(np.nansum(deviation**2)), series.shape[-1]
    if total <= 0 or count < 2:
        return 0.0, 0.0
    product = np.where(np.isfinite(before) & np.isfinite(after), before * after, 0.0)
    # The values of a short row are not independent of its mean.
    own = (float(product.sum()) / total * count + 1) / (count - 1)
    return own, float(np.sqrt((product**2).sum())) / total
