"""Summarize each rank's GPU and its samples for the trace's metadata.

In: the fact `device` of a rank and the file of its samples. Out: plain data. It keeps the reasons for throttling apart,
because many clusters run with a power cap on purpose, while a thermal slowdown is never intended.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from enum import IntFlag
from pathlib import Path
from typing import Any

from tracekit.collectors.record.wire_format import SAMPLES_SUFFIX, rank_stem


class ClockReason(IntFlag):
    """The reasons NVML gives for lowered clocks, as far as they slow the work down."""

    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE = 0x80

    @property
    def text(self) -> str:
        """The reason in readable form."""
        return (self.name or "").lower().replace("_", "-")


def read_samples(directory: Path, rank: int) -> list[list[int | None]]:
    """Read a rank's samples: host ns, SM MHz, C, mW, reasons. Stops at a torn or damaged line; no file is no error."""
    samples: list[list[int | None]] = []
    try:
        lines = (Path(directory) / (rank_stem(rank) + SAMPLES_SUFFIX)).read_bytes().split(b"\n")
    except OSError:
        return samples
    for line in lines[:-1]:
        try:
            sample = json.loads(line)
        except ValueError:
            break
        if not (isinstance(sample, list) and len(sample) == 5 and all(isinstance(one, int | None) for one in sample)):
            break
        samples.append(sample)
    return samples


def clock_series(
    samples: Sequence[Sequence[int | None]], begun_ns: int, most: int
) -> dict[str, list[float] | list[int]]:
    """The SM clock over time, at most so many samples: `time`, seconds since 1970, and `sm_mhz`.

    `begun_ns`: when the monotonic clock of the host was 0, ns since 1970.
    """
    clocks = [(sample[0], sample[1]) for sample in samples if sample[0] is not None and sample[1] is not None]
    thinned = clocks[:: max(1, -(-len(clocks) // most))]
    return {"time": [(at + begun_ns) / 1e9 for at, _ in thinned], "sm_mhz": [mhz for _, mhz in thinned]}


def summarize_gpu(facts: Mapping[str, Any], samples: Sequence[Sequence[int | None]]) -> dict[str, Any]:
    """What is known about one rank's GPU: `facts`, and `sm_mhz`, `temperature_c`, `power_w`, None if nothing was
    sampled; `throttled`: share of the samples with any reason; `reasons`: reason -> share of the samples.
    """
    bits = [sample[4] for sample in samples if sample[4] is not None]
    slowed = [ClockReason(value & sum(ClockReason)) for value in bits]
    return {
        **facts,
        "samples": len(samples),
        "sm_mhz": _spread([sample[1] for sample in samples]),
        "temperature_c": _spread([sample[2] for sample in samples]),
        "power_w": _spread([None if sample[3] is None else sample[3] / 1000 for sample in samples]),
        "throttled": sum(map(bool, slowed)) / len(slowed) if slowed else None,
        "reasons": {
            reason.text: sum(reason in one for one in slowed) / len(slowed)
            for reason in ClockReason
            if any(reason in one for one in slowed)
        },
    }


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """The smallest, median and largest sample."""
    present = [value for value in values if value is not None]
    return {"min": min(present), "median": statistics.median(present), "max": max(present)} if present else None
