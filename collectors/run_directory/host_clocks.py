"""Clocks of several hosts: a line per host, fitted to the measurements of its launcher.

In: the pings between launchers. Out: a `ClockFit` per host, applied when segments are merged.
Ranks of one host share its monotonic clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tracekit.base.errors import FormatError
from tracekit.collectors.record.small_file import open_to_read
from tracekit.collectors.run_directory.launchers import ClockSample


@dataclass(frozen=True, slots=True)
class ClockFit:
    """reference = local + `offset_ns` + `drift` x (local - `local_ns`).

    `uncertainty_ns`: half the shortest round trip plus the residual of the fit.
    """

    local_ns: int
    offset_ns: float
    drift: float
    uncertainty_ns: float
    samples: int

    def to_reference(self, local_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Times of this host on the reference clock, ns."""
        since = local_ns - self.local_ns
        return local_ns + np.round(self.offset_ns + self.drift * since).astype(np.int64)


#: Approximate length of a line in a file of samples, bytes.
_SAMPLE_BYTES = 100


def fit_clock(samples: Iterable[ClockSample]) -> ClockFit:
    """Offset and drift by least squares over the better half of the samples; a single one gives the offset only."""
    ordered = sorted(samples, key=lambda sample: sample.round_trip_ns)
    if not ordered:
        raise ValueError("no clock samples; expected at least one")
    best = ordered[: max(2, (len(ordered) + 1) // 2)]
    origin = min(sample.local_ns for sample in best)
    offset = np.array([sample.offset_ns for sample in best], np.float64)
    base = float(offset[0])
    since = np.array([sample.local_ns - origin for sample in best], np.float64)
    drift, intercept = np.polyfit(since, offset - base, 1) if np.ptp(since) > 0 else (0.0, 0.0)
    residual = offset - base - (intercept + drift * since)
    return ClockFit(
        local_ns=origin,
        offset_ns=base + float(intercept),
        drift=float(drift),
        uncertainty_ns=ordered[0].round_trip_ns / 2 + float(np.abs(residual).max()),
        samples=len(ordered),
    )


def read_clocks(directory: Path, newest: int | None = None) -> dict[str, ClockFit]:
    """The fit of each host with measurements, over all samples or about the `newest` ones. Raises FormatError if a file
    is damaged.
    """
    fits = {}
    for path in sorted(directory.glob("clock-*.samples")):
        try:
            samples = [msgspec.json.decode(line, type=ClockSample) for line in _lines(path, newest)]
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: damaged ({error}); delete it to merge without correcting this clock") from None
        if samples:
            fits[path.name.removeprefix("clock-").removesuffix(".samples")] = fit_clock(samples)
    return fits


def _lines(path: Path, newest: int | None) -> list[bytes]:
    """The whole lines at the end of a file, about `newest` of them, or all."""
    with open_to_read(path) as file:
        skipped = 0 if newest is None else max(0, os.fstat(file.fileno()).st_size - newest * _SAMPLE_BYTES)
        file.seek(skipped)
        lines = file.read().split(b"\n")
    return [line for line in lines[bool(skipped) :] if line]
