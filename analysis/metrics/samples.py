"""Samples of metrics as one columnar table, cleaned; the mechanisms that metrics show, and metrics that are missing.

In: frames with the columns of `COLUMNS`, in any order, from `tracekit.collectors.importers.metrics`, or what
`tracekit collect` sampled. Out: `Samples`: series by number, without duplicates and values that are no numbers;
rates of counters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.base.text import short
from tracekit.report.hardware import MechanismName, MissingMetric
from tracekit.trace.facts import SAMPLED, SM_CLOCK, THROTTLED, WAITED_FOR_CPU, WAITED_FOR_IO, WAITED_FOR_MEMORY

#: `time`: seconds since 1970. `host`: as the exporter names it. `device`: GPU or port, null for the whole host. `uuid`:
#: of the device, null if unknown. `value`: of counters, the total.
COLUMNS = {
    "time": pl.Float64,
    "host": pl.Categorical,
    "device": pl.Categorical,
    "uuid": pl.Categorical,
    "metric": pl.Categorical,
    "value": pl.Float64,
}
_ADDRESS = re.compile(r"[\d.]+|.*:.*")
_TWO_SOURCES = "hosts share a name, or an exporter runs twice"
#: The name of a source whose samples `tracekit collect` took while the job was recorded.
RECORDING = "the recording"

ERRORS = "node_infiniband_port_errors_received_total"
#: Counters of dcgm-exporter whose names do not say so, in Parquet and in version 3 of the exporter.
_DCGM_COUNTER = "_VIOLATION"
#: More hosts than this are counted, not listed.
_MOST_LISTED = 4


class SourceThresholds(Struct, frozen=True):
    """When a series seems to have the samples of two machines."""

    #: Share of contradictions. Chosen: a few happen on restarts.
    conflicts: float = 0.02
    #: Share of falls of a counter. Chosen: as before.
    falls: float = 0.1
    #: Of a gauge, times as many samples as peers have, at distances that vary ... Definition: nearer to two than one.
    dense: float = 1.6
    #: ... or that many at any distances. Chosen.
    very_dense: float = 2.5
    #: How much distances vary, as a share of them. Chosen.
    spread: float = 0.15


SOURCES = SourceThresholds()


class TimeSpan(Struct, frozen=True):
    """A time span, seconds since 1970."""

    since: float
    until: float


class MetricSource(Protocol):
    """What samples are read from."""

    @property
    def name(self) -> str:
        """As the user gave it, without a password."""

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """The samples of these metrics (None: all that a fleet has) with the columns of `COLUMNS`.

        `window`, `hosts`: what is needed; a source may return more. Raises FormatError.
        """


def short_host(name: str) -> str:
    """A host's name without domain and case; addresses are kept whole."""
    lowered = name.strip().lower()
    return lowered if _ADDRESS.fullmatch(lowered) else lowered.partition(".")[0]


class Samples(Struct, frozen=True, eq=False, dict=True):
    """Cleaned samples. `series`: a row per series: its number `series`, host, device, uuid, metric. `values`: series,
    time, value, ordered. `names`: the full names of each host. `dropped`: duplicates, and values that are no numbers.
    `conflicts`: of each series, the share of samples that came twice with different values.
    """

    series: pl.DataFrame
    values: pl.DataFrame
    names: dict[str, frozenset[str]]
    dropped: int
    conflicts: dict[int, float]

    @classmethod
    def of(cls, frame: pl.DataFrame) -> Samples:
        """Clean the samples of a source."""
        keys = ["host", "device", "uuid", "metric"]
        raw = frame.select(keys).unique()
        hosts = raw["host"].cast(pl.String)
        named = raw.with_columns(
            full=hosts.str.to_lowercase(), short=pl.Series([short_host(host) for host in hosts], dtype=pl.String)
        )
        names: dict[str, set[str]] = {}
        for short_name, full in named.select("short", "full").unique().iter_rows():
            names.setdefault(short_name, set()).add(full)
        of_keys = named.with_columns(series=pl.struct("short", "device", "metric").rank("dense") - 1).with_columns(
            pl.col("series").cast(pl.UInt32)
        )
        numbers = frame.filter(pl.col("value").is_finite() & pl.col("time").is_finite())
        values = (
            numbers.join(of_keys, on=keys, nulls_equal=True).select("series", "time", "value").sort("series", "time")
        )
        repeated = (pl.col("series") == pl.col("series").shift(1)) & (pl.col("time") == pl.col("time").shift(1))
        differs = pl.col("value") != pl.col("value").shift(1)
        marked = values.with_columns(again=repeated.fill_null(False), differs=differs)
        clean = marked.filter(~pl.col("again")).drop("again", "differs")
        counts = clean.group_by("series").len("all")
        conflicts = (
            marked.filter(pl.col("again") & pl.col("differs"))
            .group_by("series")
            .len()
            .join(counts, on="series")
            .select("series", pl.col("len") / pl.col("all"))
        )
        series = of_keys.group_by("series").agg(
            host=pl.col("short").first(),
            device=pl.col("device").first().cast(pl.String),
            metric=pl.col("metric").first().cast(pl.String),
            uuid=pl.col("uuid").cast(pl.String).drop_nulls().unique(),
        )
        return cls(
            series.sort("series"),
            clean,
            {host: frozenset(full) for host, full in names.items()},
            frame.height - clean.height,
            dict(conflicts.iter_rows()),
        )

    @cached_property
    def span(self) -> TimeSpan | None:
        """The first and last time; None without samples."""
        time = self.values["time"]
        since, until = time.min(), time.max()
        return TimeSpan(since, until) if isinstance(since, float) and isinstance(until, float) else None

    def hold(self, window: TimeSpan) -> bool:
        """Whether all of a time span was sampled."""
        return self.span is not None and self.span.since <= window.since and window.until <= self.span.until

    @cached_property
    def hosts(self) -> frozenset[str]:
        """The short names of all hosts."""
        return frozenset(self.series["host"])

    def of_metric(self, metric: str) -> pl.DataFrame:
        """Samples of one metric: series, host, device, time, value; of counters `value` is the rate since `before`.

        A difference across a reset of a counter is dropped.
        """
        chosen = self.series.filter(metric=metric).select("series", "host", "device")
        samples = self.values.join(chosen, on="series").sort("series", "time")
        if not is_counter(metric):
            return samples.with_columns(before=pl.col("time"))
        before, rise = pl.col("time").shift(1).over("series"), pl.col("value").diff().over("series")
        rates = samples.with_columns(before=before, value=rise / (pl.col("time") - before))
        return rates.filter(pl.col("value") >= 0)

    def why_not_one_machine(self, host: str, metric: str) -> str | None:
        """Why the series of a host are not those of one machine, in words; None if they can be."""
        full = sorted(name for name in self.names.get(host, ()) if "." in name and name != host)
        if len(full) > 1:
            return f"two hosts share the name {host}: {', '.join(full[:3])}"
        own = self.series.filter(host=host, metric=metric)
        if any(self.conflicts.get(series, 0.0) > SOURCES.conflicts for series in own["series"]):
            return f"{metric} of {host} has two values at a time: {_TWO_SOURCES}"
        return self._moved(own) or self._interleaved(host, metric)

    def _moved(self, own: pl.DataFrame) -> str | None:
        """The device of a host that is, or was, in another host or place, in words."""
        places = (
            self.series.explode("uuid").filter(pl.col("uuid").is_not_null()).select("uuid", "host", "device").unique()
        )
        for device, uuids in own.select("device", "uuid").iter_rows():
            if len(uuids) > 1:
                uuids_text = " and ".join(sorted(uuids)[:2])
                return f"device {device} was replaced, or hosts share a name: {uuids_text}"
            for uuid in uuids:
                where = places.filter(uuid=uuid)
                if where.height > 1:
                    return f"device {uuid} moved: it is reported by {' and '.join(sorted(set(where['host']))[:3])}"
        return None

    def _interleaved(self, host: str, metric: str) -> str | None:
        """Whether samples of two machines alternate in a series of a host, in words."""
        spacing = self.spacing(metric)
        own, usual = spacing.filter(host=host), spacing.filter(pl.col("host") != host)["often"].median()
        if is_counter(metric):
            twice = own.filter(pl.col("falls") > SOURCES.falls)
        else:
            density = pl.col("often") / (usual if isinstance(usual, float) else math.inf)
            irregular = pl.col("spread") > SOURCES.spread * pl.col("spacing")
            twice = own.filter((density > SOURCES.dense) & (irregular | (density < SOURCES.very_dense)))
        if twice.is_empty():
            return None
        return f"samples of {metric} of {host} are of two series in turn: {_TWO_SOURCES}"

    def spacing(self, metric: str) -> pl.DataFrame:
        """Of each series of a metric, the usual time between samples: series, host, spacing; how much it varies:
        spread; samples a second: often; the share of samples below the one before: falls.
        """
        chosen = self.series.filter(metric=metric).select("series", "host")
        gap, rise = pl.col("time").diff(), pl.col("value").diff()
        return (
            self.values.join(chosen, on="series")
            .group_by("series", "host")
            .agg(
                spacing=gap.median(),
                spread=gap.quantile(0.75) - gap.quantile(0.25),
                often=pl.len() / (pl.col("time").max() - pl.col("time").min()),
                falls=(rise < 0).mean(),
            )
            .drop_nulls()
        )


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


CLOCK = Mechanism(MechanismName.CLOCK, (SM_CLOCK,), -1, _of_ratio, "SM clock", "MHz")
LINK = Mechanism(
    MechanismName.LINK,
    ("node_infiniband_rate_bytes_per_second", "node_network_speed_bytes"),
    -1,
    _of_ratio,
    "link rate",
    "GB/s",
    1e9,
)
CPU_PRESSURE = _waiting(MechanismName.CPU_PRESSURE, WAITED_FOR_CPU, "processes waiting for a CPU")
MEMORY_PRESSURE = _waiting(MechanismName.MEMORY_PRESSURE, WAITED_FOR_MEMORY, "processes waiting for memory")
IO_PRESSURE = _waiting(MechanismName.IO_PRESSURE, WAITED_FOR_IO, "processes waiting for I/O")
#: Recorded by `tracekit collect` alone. One cause of CPU pressure.
CPU_LIMIT = _waiting(MechanismName.CPU_LIMIT, THROTTLED, "processes throttled by their CPU limit")
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


class _Needed(Struct, frozen=True):
    """A metric, or others that do as well; the exporter, what to add to it, and what cannot be told without it."""

    metrics: tuple[str, ...]
    exporter: str
    line: str
    why: str


_OF_DCGM = "dcgm-exporter"
_OF_NODE = "node_exporter"
_NEEDED = (
    _Needed(
        CLOCK.metrics,
        _OF_DCGM,
        "DCGM_FI_DEV_SM_CLOCK, gauge, SM clock frequency (in MHz).",
        "slow computing cannot be confirmed or refuted",
    ),
    _Needed(
        ("DCGM_FI_DEV_POWER_VIOLATION",),
        _OF_DCGM,
        "DCGM_FI_DEV_POWER_VIOLATION, counter, Throttling duration due to power constraints (in ns).",
        "whether a low clock is due to power is unknown; the default file has the line as a comment",
    ),
    _Needed(
        ("DCGM_FI_DEV_THERMAL_VIOLATION",),
        _OF_DCGM,
        "DCGM_FI_DEV_THERMAL_VIOLATION, counter, Throttling duration due to thermal constraints (in ns).",
        "whether a low clock is due to heat is unknown; the default file has the line as a comment",
    ),
    _Needed(
        LINK.metrics,
        _OF_NODE,
        "--collector.infiniband (the default, if there is such a card), or --collector.netclass on Ethernet",
        "a slow network card cannot be confirmed or refuted",
    ),
    _Needed(
        (ERRORS,),
        _OF_NODE,
        "--collector.infiniband (the default)",
        "a slow network card cannot be refuted: errors slow it, too",
    ),
    _Needed(
        CPU_PRESSURE.metrics,
        _OF_NODE,
        "--collector.pressure (the default), and psi=1 on the kernel's command line",
        "a process that waits for a CPU cannot be confirmed or refuted",
    ),
)
#: What a server is asked for where all metrics of a fleet are wanted.
FLEET = (
    *(metric for needed in _NEEDED for metric in needed.metrics),
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "ipmi_dcmi_power_consumption_watts",
)


def line_for(metric: str) -> str:
    """What to add to an exporter for a metric: "add to dcgm-exporter: DCGM_FI_DEV_SM_CLOCK, gauge, ..."."""
    needed = next(need for need in _NEEDED if metric in need.metrics)
    return f"add to {needed.exporter}: {needed.line}"


def lacking(samples: Samples) -> Iterator[MissingMetric]:
    """Yield the metrics that no host has, or not all hosts."""
    for needed in _NEEDED:
        having = samples.series.filter(samples.series["metric"].is_in(list(needed.metrics)))
        without = sorted(samples.hosts - set(having["host"]))
        if without:
            hosts = ", ".join(map(short, without)) if len(without) <= _MOST_LISTED else f"{len(without)} hosts"
            where = "on all hosts" if len(without) == len(samples.hosts) else f"on {hosts}"
            yield MissingMetric(needed.metrics[0], needed.exporter, needed.line, f"{where}, {needed.why}")
