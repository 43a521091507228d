"""What `tracekit collect` sampled while a job was recorded, as sources of metrics: a job without Prometheus has them.

In: the metadata of a trace. Out: a `MetricSource` for each metric, because machines differ: for a clock, each GPU is a
machine with the others of its host as peers; for pressure, it is a cgroup or a host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import polars as pl
from msgspec import Struct

from tracekit.analysis.metrics.samples import COLUMNS, TimeSpan
from tracekit.trace.canonical import SAMPLED

#: The name of such a source.
RECORDING = "the recording"


class SampledMetric(Struct, frozen=True):
    """One metric. `frame`: its samples, with the columns of `COLUMNS`; `machines`: the name of each rank's machine."""

    frame: pl.DataFrame
    machines: Mapping[int, str]
    name: str = RECORDING

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        del metrics, window, hosts
        return self.frame


def sampled_metrics(metadata: Mapping[str, Any]) -> Iterator[SampledMetric]:
    """Yield the metrics in the metadata of a trace, without series that are none: anybody can write metadata."""
    sampled = metadata.get(SAMPLED)
    for metric, series in sampled.items() if isinstance(sampled, dict) else ():
        frames, machines = [], dict[int, str]()
        for machine, content in series.items() if isinstance(series, dict) else ():
            try:
                values = pl.DataFrame({name: content[name] for name in ("time", "value")}, strict=False)
                ranks = [int(rank) for rank in content["ranks"]]
            except (KeyError, TypeError, ValueError, pl.exceptions.PolarsError):
                continue
            named = values.with_columns(host=pl.lit(machine), metric=pl.lit(metric), device=None, uuid=None)
            frames.append(named.select(pl.col(name).cast(kind, strict=False) for name, kind in COLUMNS.items()))
            machines.update({rank: str(machine) for rank in ranks})
        if frames:
            yield SampledMetric(pl.concat(frames).drop_nulls(["time", "value"]), machines)
