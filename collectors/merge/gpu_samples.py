"""Summarize each rank's GPU and its samples for the trace's metadata.

In: the fact `device` of a rank and its samples. Out: plain data. It keeps the reasons for throttling apart,
because many clusters run with a power cap on purpose, while a thermal slowdown is never intended.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from enum import IntFlag
from typing import Any


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
