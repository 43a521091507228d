"""The suspect's series over its peers' band, thinned for a figure.

In: samples and one series. Out: a `Band`.
"""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from tracekit.analysis.metrics.mechanisms import Mechanism
from tracekit.analysis.metrics.samples import Samples, TimeSpan
from tracekit.report.metrics import Band

#: Points of a figure.
_POINTS = 120
#: How much is drawn on each side, as a multiple of the interval.
_MARGIN = 1.0
_LOW, _HIGH = 0.1, 0.9


def band_of(
    samples: Samples, metric: str, series: int, peers: Collection[str], window: TimeSpan, mechanism: Mechanism
) -> Band:
    """The series and its peers' around the interval."""
    margin = _MARGIN * (window.until - window.since)
    since, until = window.since - margin, window.until + margin
    width = (until - since) / _POINTS
    values = samples.of_metric(metric).filter(pl.col("time").is_between(since, until))
    own = pl.col("series") == series
    thinned = (
        values.filter(own | pl.col("host").is_in(list(peers)))
        .with_columns(value=pl.col("value") / mechanism.scale, point=((pl.col("time") - since) / width).floor())
        .group_by("point")
        .agg(
            own=pl.col("value").filter(own).mean(),
            low=pl.col("value").filter(~own).quantile(_LOW),
            high=pl.col("value").filter(~own).quantile(_HIGH),
        )
        .sort("point")
    )
    time = (since + (thinned["point"] + 0.5) * width).to_list()
    own_values, low, high = (thinned[name].round_sig_figs(5).to_list() for name in ("own", "low", "high"))
    return Band(mechanism.unit, time, own_values, low, high, window.since, window.until)
