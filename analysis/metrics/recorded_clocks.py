"""The clocks of GPUs that `tracekit collect` sampled, as a source of metrics: a job without Prometheus has them, too.

In: the metadata of a trace. Out: a `MetricSource` in which every GPU is a machine of its own, so that those of one host
are peers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import polars as pl
from msgspec import Struct

from tracekit.analysis.metrics.mechanisms import CLOCK
from tracekit.analysis.metrics.samples import COLUMNS, TimeSpan
from tracekit.trace.canonical import CLOCK_SERIES


class RecordedClocks(Struct, frozen=True):
    """`series`: the sampled clock of each machine; `machines`: the name of each rank's GPU."""

    series: Mapping[str, Mapping[str, Any]]
    machines: Mapping[int, str]
    name: str = "the recording"

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> RecordedClocks | None:
        """The clocks in the metadata of a trace; None without any."""
        gpus = metadata.get("gpus")
        series, machines = {}, {}
        for rank, gpu in gpus.items() if isinstance(gpus, dict) else ():
            sampled = gpu.get(CLOCK_SERIES) if isinstance(gpu, dict) else None
            if isinstance(sampled, dict) and str(rank).isdigit():
                machine = f"{gpu.get('host')}:GPU {gpu.get('index')}"
                series[machine], machines[int(rank)] = sampled, machine
        return cls(series, machines) if series else None

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`. Raises FormatError for series that are none."""
        del metrics, window, hosts
        frames = [pl.DataFrame(schema=COLUMNS)]
        for machine, sampled in self.series.items():
            try:
                values = pl.DataFrame({"time": sampled["time"], "value": sampled["sm_mhz"]}, strict=False)
            except (KeyError, TypeError, ValueError, pl.exceptions.PolarsError):
                continue  # free metadata, which anybody can write
            named = values.with_columns(host=pl.lit(machine), metric=pl.lit(CLOCK.metrics[0]), device=None, uuid=None)
            frames.append(named.select(pl.col(name).cast(kind, strict=False) for name, kind in COLUMNS.items()))
        return pl.concat(frames).drop_nulls(["time", "value"])
