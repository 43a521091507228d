"""The clock of a GPU (globaltimer) against the monotonic clock of its host, from NCCL's ordinary events.

In: GPU times of channels with the host times before and after them. Out: a `GpuClock`. It needs no measurement: a
channel cannot start before its operation was enqueued, and NCCL cannot report a start or an end before it happened. So
each channel bounds the difference of the clocks from both sides; in a stretch of time the tightest bounds of each side
leave a few microseconds, the shortest launch plus the shortest poll. A line through the middles removes drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

#: Number of stretches of time for the drift fit, the least number, and the fewest channels of a stretch.
STRETCHES, LEAST_STRETCHES = 16, 4
LEAST_CHANNELS = 8
REFINEMENTS = 3
#: Assumed drift of a clock if too few channels allow a fit.
UNKNOWN_DRIFT = 5e-5
#: A less certain clock is rejected: it may have been set back while the job ran.
LARGEST_UNCERTAINTY_NS = 5_000_000

_Times = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GpuClock:
    """host = `host_ns` + (gpu - `gpu_ns`) x (1 + `drift`), ns.

    `uncertainty_ns`: largest error of a time, from the width of the bounds and the distance of the line from their
    middles. `channels`: number of channels used.
    """

    gpu_ns: int
    host_ns: int
    drift: float
    uncertainty_ns: float
    channels: int

    def to_host(self, gpu_ns: _Times) -> _Times:
        """GPU times on the host's monotonic clock, ns."""
        since = gpu_ns - self.gpu_ns
        return self.host_ns + since + np.round(self.drift * since).astype(np.int64)


def converted(frame: pl.DataFrame, names: Iterable[str], convert: Callable[[_Times], _Times]) -> pl.DataFrame:
    """The frame with the times `names` on another clock; nulls stay."""
    return frame.with_columns(
        pl.when(pl.col(name).is_not_null()).then(pl.Series(convert(frame[name].fill_null(0).to_numpy()))).alias(name)
        for name in names
    )


def fit_gpu_clock(channels: pl.DataFrame, operations: pl.DataFrame) -> GpuClock | None:
    """Fit the clock of one rank's GPU to its channels and operations; None if no channel has both bounds, or no line
    fits them.
    """
    enqueued = operations.select("enqueue_ns", operation="handle")
    bounded = channels.join(enqueued, on="operation").drop_nulls(["gpu_start_ns", "gpu_end_ns", "seen_end_ns"])
    if bounded.is_empty():
        return None
    start, end, enqueue, seen_start, seen_end = (
        bounded[name].to_numpy()
        for name in ("gpu_start_ns", "gpu_end_ns", "enqueue_ns", "seen_start_ns", "seen_end_ns")
    )
    base_gpu = int(start[0])
    base = int(enqueue[0]) - base_gpu  # differences of clocks are small numbers from here on
    least = (enqueue - start - base).astype(np.float64)  # host - gpu is at least this
    most = np.minimum(seen_start - start, seen_end - end).astype(np.float64) - base
    since = (start - base_gpu).astype(np.float64)
    drift, missed = 0.0, UNKNOWN_DRIFT * float(np.ptp(since)) / 2
    for _ in range(REFINEMENTS):  # bounds of one stretch are only tight after drift is removed
        means, low, high = _stretches(since, least - drift * since, most - drift * since)
        if len(means) > 1:
            more, missed = min((_line(means, bounds) for bounds in (low, high)), key=lambda line: line[1])
            drift += more
    lowest, highest = float((least - drift * since).max()), float((most - drift * since).min())
    offset = (lowest + highest) / 2
    # The error of the line counts twice towards the ends of the recording.
    uncertainty = abs(highest - lowest) / 2 + 2 * missed
    if uncertainty > LARGEST_UNCERTAINTY_NS:
        return None
    return GpuClock(
        gpu_ns=base_gpu,
        host_ns=base_gpu + base + round(offset),
        drift=drift,
        uncertainty_ns=uncertainty,
        channels=len(start),
    )


def _line(times: _Floats, bounds: _Floats) -> tuple[float, float]:
    """The slope of the line through bounds, and the largest distance of one from it."""
    slope, offset = np.polyfit(times, bounds, 1)
    return float(slope), float(np.abs(bounds - (slope * times + offset)).max())


def _stretches(since: _Floats, least: _Floats, most: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    """Mean time and tightest bounds of each stretch of time."""
    count = min(STRETCHES, len(since) // LEAST_CHANNELS)
    count = count if count >= LEAST_STRETCHES else 1
    length = np.ptp(since) / count or 1.0
    stretch = np.minimum(((since - since.min()) / length).astype(np.int64), count - 1)
    numbers, sizes = np.unique(stretch, return_counts=True)
    whole = [stretch == number for number in numbers[sizes >= LEAST_CHANNELS]] or [np.ones(len(since), dtype=bool)]
    low = np.array([least[inside].max() for inside in whole])
    high = np.array([most[inside].min() for inside in whole])
    means = np.array([since[inside].mean() for inside in whole])
    return means, low, high
