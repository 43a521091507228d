"""Mechanisms by which a machine slows down its work, and the metrics that show them.

In: names of metrics as dcgm-exporter and node_exporter write them. Out: for each mechanism, which metric, which of a
host's devices counts, and how much longer the work takes (the dose).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct

from tracekit.report.metrics import MechanismName

ERRORS = "node_infiniband_port_errors_received_total"
_PRESSURE = "node_pressure_cpu_waiting_seconds_total"
#: Counters of dcgm-exporter whose names do not say so, in Parquet and in version 3 of the exporter.
_DCGM_COUNTER = "_VIOLATION"


class Mechanism(Struct, frozen=True):
    """One mechanism. `metrics`: the names that show it, the best one first. `slow`: -1 if slow machines have lower
    values, 1 if higher ones. `excess`: from the effect, the logarithm of a ratio or the difference of rates, to how
    much longer the work takes. `what`, `unit`, `scale`: for sentences; values are divided by `scale`.
    """

    name: MechanismName
    metrics: tuple[str, ...]
    slow: int
    excess: Callable[[float], float]
    what: str
    unit: str
    scale: float = 1.0


def _of_ratio(effect: float) -> float:
    return float(np.expm1(-effect))


def _of_share(effect: float) -> float:
    """Work that waits this share of the time takes 1 / (1 - share) as long."""
    waiting = min(effect, 0.99)
    return waiting / (1 - waiting)


CLOCK = Mechanism(MechanismName.CLOCK, ("DCGM_FI_DEV_SM_CLOCK",), -1, _of_ratio, "SM clock", "MHz")
LINK = Mechanism(
    MechanismName.LINK,
    ("node_infiniband_rate_bytes_per_second", "node_network_speed_bytes"),
    -1,
    _of_ratio,
    "link rate",
    "GB/s",
    1e9,
)
CPU_PRESSURE = Mechanism(
    MechanismName.CPU_PRESSURE, (_PRESSURE,), 1, _of_share, "processes waiting for a CPU", "% of the time", 0.01
)
#: The mechanisms to try for a part of a rank, the usual one first.
MECHANISMS = {
    "compute": (CLOCK, CPU_PRESSURE),
    "network": (LINK,),
    "process": (CPU_PRESSURE, CLOCK),
}


def metrics_of(parts: Iterable[str]) -> tuple[str, ...]:
    """The metrics that tests of these parts of a rank read."""
    mechanisms = dict.fromkeys(mechanism for part in parts for mechanism in MECHANISMS.get(part, ()))
    names = [name for mechanism in mechanisms for name in mechanism.metrics]
    return (*names, ERRORS) if LINK in mechanisms else tuple(names)


def is_counter(metric: str) -> bool:
    """Whether a metric only grows until it is reset."""
    return metric.endswith(("_total", _DCGM_COUNTER))
