"""A simulated fleet with metrics as its exporters write them, and faults of known place, cause and dose.

In: a seed and faults. Out: a frame of samples. Every node has a fingerprint; clocks have steps of 15 MHz, drift, and
dip harmlessly; counters are reset; samples are missing and not on a grid.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.metrics.samples import COLUMNS

CLOCK = "DCGM_FI_DEV_SM_CLOCK"
RATE = "node_infiniband_rate_bytes_per_second"
ERRORS = "node_infiniband_port_errors_received_total"
PRESSURE = "node_pressure_cpu_waiting_seconds_total"
#: When fleets begin, seconds since 1970.
BEGAN = 1_700_000_000.0


class Fault(NamedTuple):
    """A part of a host takes `excess` longer, on one device, from `since` to `until`, seconds after the beginning."""

    host: int
    part: str
    excess: float
    since: float
    until: float


def fleet(
    seed: int, *faults: Fault, hosts: int = 16, lasts_s: float = 900.0, every_s: float = 2.0, devices: int = 2
) -> pl.DataFrame:
    """Samples of node-00, node-01, ..."""
    random = np.random.default_rng(seed)
    frames = []
    usual_s = np.arange(0, lasts_s, every_s)
    for host in range(hosts):
        time = usual_s + random.uniform(0, every_s) + random.normal(0, 0.01, len(usual_s))
        time = time[random.random(len(time)) > 0.03]
        slow = {part: np.ones(len(time)) for part in ("compute", "network", "process")}
        for fault in faults:
            if fault.host == host:
                slow[fault.part][(time >= fault.since) & (time <= fault.until)] *= 1 + fault.excess
        fingerprint = random.normal(0, 0.003)
        for device in range(devices):
            noise = random.normal(fingerprint, 0.008, len(time)) + 0.002 * np.sin(time / 300 + random.uniform(0, 6))
            dip = random.uniform(0, lasts_s)
            noise -= 0.02 * ((time > dip) & (time < dip + 20))
            factor = slow["compute"] if device == 0 else 1.0
            clock = np.round(1950 * np.exp(noise) / factor / 15) * 15
            port = slow["network"] if device == 0 else np.ones(len(time))
            errors = np.cumsum(random.poisson(3 * every_s * (port > 1)))
            frames += [
                _frame(time, host, str(device), CLOCK, clock),
                _frame(time, host, f"mlx5_{device}", RATE, 5e10 / port),
                _frame(time, host, f"mlx5_{device}", ERRORS, 100.0 + errors),
            ]
        waiting = 1 - 1 / slow["process"] + random.gamma(2, 0.0025, len(time))
        total = np.cumsum(waiting * np.diff(time, prepend=time[0]))
        if host % 5 == 0:
            total[len(total) // 3 :] -= total[len(total) // 3]
        frames.append(_frame(time, host, None, PRESSURE, total))
    return pl.concat(frames)


def _frame(time: np.ndarray, host: int, device: str | None, metric: str, values: np.ndarray) -> pl.DataFrame:
    literal = {"host": f"node-{host:02}", "device": device, "metric": metric, "uuid": None}
    columns = [pl.lit(value, pl.String).alias(name) for name, value in literal.items()]
    samples = pl.DataFrame({"time": BEGAN + time, "value": values.astype(np.float64)}).with_columns(columns)
    return samples.select(pl.col(name).cast(kind) for name, kind in COLUMNS.items())
