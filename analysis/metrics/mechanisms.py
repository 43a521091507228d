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
#: Counters of dcgm-exporter whose names do not say so, in Parquet and in version 3 of the exporter.
_DCGM_COUNTER = "_VIOLATION"


class Mechanism(Struct, frozen=True):
    """One mechanism. `metrics`: the names that show it, the best one first. `slow`: -1 if slow machines have lower
    values, 1 if higher ones. `excess`: from the effect, the logarithm of a ratio or the difference of rates, and the
    value itself to how much longer the work takes. `what`, `unit`, `scale`: for sentences; values are divided by
    `scale`.
    """

    name: MechanismName
    metrics: tuple[str, ...]
    slow: int
    excess: Callable[[float, float], float]
    what: str
    unit: str
    scale: float = 1.0


def _of_ratio(effect: float, own: float) -> float:
    del own
    return float(np.expm1(-effect))


def _of_share(effect: float, own: float) -> float:
    """Work that waits for this share of the time takes 1 / (1 - share) as long, usually with a share less `effect`."""
    return effect / (1 - min(own, 0.99))


def _waiting(name: MechanismName, metric: str, what: str) -> Mechanism:
    return Mechanism(name, (metric,), 1, _of_share, what, "% of the time", 0.01)


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
CPU_PRESSURE = _waiting(
    MechanismName.CPU_PRESSURE, "node_pressure_cpu_waiting_seconds_total", "processes waiting for a CPU"
)
MEMORY_PRESSURE = _waiting(
    MechanismName.MEMORY_PRESSURE, "node_pressure_memory_waiting_seconds_total", "processes waiting for memory"
)
IO_PRESSURE = _waiting(MechanismName.IO_PRESSURE, "node_pressure_io_waiting_seconds_total", "processes waiting for I/O")
#: Recorded by `tracekit collect` alone. One cause of CPU pressure.
CPU_LIMIT = _waiting(
    MechanismName.CPU_LIMIT, "tracekit_cpu_throttled_seconds_total", "processes throttled by their CPU limit"
)
#: The mechanisms to try for a part of a rank, the usual one first.
MECHANISMS = {
    "compute": (CLOCK, CPU_LIMIT, CPU_PRESSURE),
    "network": (LINK,),
    "process": (CPU_PRESSURE, CPU_LIMIT, CLOCK, MEMORY_PRESSURE, IO_PRESSURE),
}


def metrics_of(parts: Iterable[str]) -> tuple[str, ...]:
    """The metrics of exporters that tests of these parts of a rank read."""
    mechanisms = dict.fromkeys(mechanism for part in parts for mechanism in MECHANISMS.get(part, ()))
    names = [name for mechanism in mechanisms if mechanism is not CPU_LIMIT for name in mechanism.metrics]
    return (*names, ERRORS) if LINK in mechanisms else tuple(names)


def is_counter(metric: str) -> bool:
    """Whether a metric only grows until it is reset."""
    return metric.endswith(("_total", _DCGM_COUNTER))
