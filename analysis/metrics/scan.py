"""The blind scan: hosts that depart from their peers for minutes, by any metric.

In: samples of a fleet and, if possible, of healthy runs of the same nodes. Out: `Alarm`s.

Without a suspicion, thousands of series are looked at for hours, so chance must be known well: the threshold is the
farthest that any healthy node departed in the baselines, and a margin. Without baselines, it is many standard
deviations of this run, and only large departures show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl
from msgspec import Struct

from tracekit.analysis.metrics.effects import FEWEST_PEERS, spread_of
from tracekit.analysis.metrics.mechanisms import is_counter
from tracekit.analysis.metrics.samples import Samples
from tracekit.base.errors import FormatError
from tracekit.report.metrics import Alarm

#: Departures are medians over this time, seconds: shorter ones happen to healthy nodes.
SMOOTHED_S = 180.0
#: The threshold is this many times the farthest that a healthy node departed.
_MARGIN = 1.15
#: And at least so many standard deviations, as baselines are short.
_LEAST_SIGMAS = 4.5
#: Without baselines: so many standard deviations of the smoothed departures.
_SIGMAS = 10.0


class _Limits(Struct, frozen=True):
    """Departures between these are healthy."""

    low: float
    high: float


def scanned(samples: Samples, baselines: Sequence[Samples]) -> Iterator[Alarm]:
    """Yield alarms, by metric. A metric that no baseline has gets the threshold of this run.

    Raises FormatError if no metric can be compared.
    """
    of_metrics = {metric: _departures(samples, metric) for metric in sorted(set(samples.series["metric"]))}
    if all(departures is None for departures in of_metrics.values()):
        raise FormatError(
            f"too little to compare: a metric needs more than {FEWEST_PEERS} hosts with numbers for {SMOOTHED_S:.0f} s"
        )
    for metric, departures in of_metrics.items():
        if departures is None:
            continue
        healthy = [of_run for one in baselines if (of_run := _departures(one, metric)) is not None]
        yield from _alarms(departures, metric, _limits(healthy, departures))


def _departures(samples: Samples, metric: str) -> pl.DataFrame | None:
    """Each series' smoothed departure from the median of all, less its usual one; None with too few hosts or times.

    What is usual for a series is its median, as nodes have fingerprints. A median that is far from those of the other
    series is no fingerprint but a fault that lasts for most of this time.
    """
    values = samples.of_metric(metric)
    spacing = samples.spacing(metric)["spacing"].median()
    if not isinstance(spacing, float) or values["host"].n_unique() <= FEWEST_PEERS:
        return None
    x = pl.col("value") if is_counter(metric) else pl.col("value").log()
    usable = values if is_counter(metric) else values.filter(pl.col("value") > 0)
    moment = (pl.col("time") / spacing).floor().cast(pl.Int64)
    residuals = usable.with_columns(x=x, moment=moment).with_columns(r=x - x.median().over("moment"))
    usual = residuals.group_by("series").agg(usual=pl.col("r").median())
    if usual.is_empty():
        return None
    center, sigma = spread_of(usual["usual"].to_numpy())
    fingerprint = (pl.col("usual") - center).abs() <= _SIGMAS * sigma
    usual = usual.with_columns(usual=pl.when(fingerprint).then("usual").otherwise(center))
    own = residuals.join(usual, on="series").with_columns(r=pl.col("r") - pl.col("usual")).sort("series", "moment")
    width = max(int(SMOOTHED_S / spacing), 1)
    smoothed = pl.col("r").rolling_median_by("moment", f"{width}i", min_samples=max(width * 3 // 4, 1)).over("series")
    departures = own.with_columns(smoothed=smoothed).drop_nulls("smoothed")
    return None if departures.is_empty() else departures.with_columns(pl.col("time") - SMOOTHED_S / 2)


def _limits(healthy: Sequence[pl.DataFrame], departures: pl.DataFrame) -> _Limits:
    if not healthy:
        _, sigma = spread_of(departures["smoothed"].to_numpy())
        return _Limits(-_SIGMAS * sigma, _SIGMAS * sigma)
    values = pl.concat([of_run["smoothed"] for of_run in healthy]).to_numpy()
    _, sigma = spread_of(values)
    least = _LEAST_SIGMAS * sigma
    return _Limits(min(_MARGIN * float(values.min()), -least), max(_MARGIN * float(values.max()), least))


def _alarms(departures: pl.DataFrame, metric: str, limits: _Limits) -> Iterator[Alarm]:
    """An alarm for each stretch of a series beyond the limits."""
    beyond = pl.when(pl.col("smoothed") < limits.low).then(-1).when(pl.col("smoothed") > limits.high).then(1)
    marked = departures.with_columns(beyond=beyond.otherwise(0))
    stretches = (
        marked.with_columns(stretch=pl.col("beyond").rle_id().over("series"))
        .filter(pl.col("beyond") != 0)
        .group_by("series", "stretch", "beyond")
        .agg(
            pl.col("host", "device").first(),
            since=pl.col("time").min(),
            until=pl.col("time").max(),
            farthest=pl.col("smoothed").median(),
        )
        .sort("since", "host")
    )
    change = pl.col("farthest") if is_counter(metric) else pl.col("farthest").exp() - 1
    for row in stretches.with_columns(change=change).iter_rows(named=True):
        yield Alarm(row["host"], row["device"], metric, row["since"], row["until"], row["change"])
