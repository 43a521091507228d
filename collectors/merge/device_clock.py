"""Fit the clock of a GPU to the host's: piecewise linear through paired readings.

In: readings, each an event that the GPU passed between two host times. Out: a `DeviceClockFit` per rank, which converts
the device times of its records to host times. The clock is assumed to drift evenly between readings. To measure the
error of this assumption, each reading is predicted from its neighbours; the error is part of the uncertainty.
While another process has the GPU, a reading can be most of a second wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Readings wider than this many times the narrowest one are not trusted: the GPU was busy,
WIDE = 4.0
#: unless they are from so much later that the clock may have drifted further than they are wide, seconds per second.
UNKNOWN_DRIFT = 5e-5


@dataclass(frozen=True, slots=True)
class DeviceClockFit:
    """host = device + an offset, interpolated between readings; beyond them it changes by `drift` (seconds per second).

    `uncertainty_ns`: half the widest trusted reading, or the largest error of predicting a reading from its neighbours,
    whichever is larger. `readings`: how many of the `readings_taken` are trusted.
    """

    device_ns: npt.NDArray[np.int64]
    offset_ns: npt.NDArray[np.float64]
    drift: float
    uncertainty_ns: float
    readings_taken: int

    @property
    def readings(self) -> int:
        """The number of trusted readings."""
        return len(self.device_ns)

    def to_host(self, device_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Convert device times to the host's monotonic clock, ns."""
        knots = (self.device_ns - self.device_ns[0]).astype(np.float64)
        since = (device_ns - self.device_ns[0]).astype(np.float64)
        beyond = since - np.clip(since, knots[0], knots[-1])
        offset = np.interp(since, knots, self.offset_ns) + self.drift * beyond
        host_ns: npt.NDArray[np.int64] = device_ns + np.round(offset).astype(np.int64)
        return host_ns

    def to_dict(self) -> dict[str, float]:
        """Plain data, for metadata."""
        return {
            "offset_ns": float(self.offset_ns[0]),
            "drift": self.drift,
            "uncertainty_ns": self.uncertainty_ns,
            "readings": self.readings,
            "readings_taken": self.readings_taken,
        }


def fit_device_clock(readings: Sequence[Sequence[int]]) -> DeviceClockFit:
    """Fit at least one (device ns, host ns before, host ns after), which gives the offset only."""
    table = np.array(readings, np.int64)
    table = table[np.argsort(table[:, 0])]
    width = (table[:, 2] - table[:, 1]).astype(np.float64)
    narrowest = int(np.argmin(width))
    since = np.abs(table[:, 0] - table[narrowest, 0])
    trusted = table[width <= np.maximum(WIDE * width[narrowest], UNKNOWN_DRIFT * since)]
    device_ns = trusted[:, 0]
    half_width = (trusted[:, 2] - trusted[:, 1]) / 2
    offset = (trusted[:, 1] - device_ns) + half_width
    span = (device_ns - device_ns[0]).astype(np.float64)
    drift = float(np.polyfit(span, offset - offset[0], 1)[0]) if len(trusted) > 1 else 0.0
    missed = UNKNOWN_DRIFT * float(since.max()) if len(trusted) == 1 else 0.0
    if len(trusted) > 2:
        share = (span[1:-1] - span[:-2]) / (span[2:] - span[:-2])
        predicted = offset[:-2] + share * (offset[2:] - offset[:-2])
        missed = float(np.abs(predicted - offset[1:-1]).max())
    return DeviceClockFit(device_ns, offset, drift, max(float(half_width.max()), missed), len(table))
