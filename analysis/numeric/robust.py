"""Statistics that are robust against outliers.

In: arrays of any shape, nan where nothing was measured. Out: arrays reduced over the given axes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Floats, Ints

#: Ratio of the standard deviation to the median absolute deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
#: The median of n values scatters by this factor x their spread / sqrt(n).
MEDIAN_ERROR = 1.2533
#: Above this many numbers, spreads and typical values are computed from an evenly spaced sample.
SAMPLE = 100_000
#: Seconds and factors below this count as 0: no clock resolves them, and dividing by them overflows.
NOTHING = 1e-12


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
    return moved.reshape(*moved.shape[:kept_axes], prod(moved.shape[kept_axes:]))


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
