"""What a SOURCE of metrics is: a URL, a Parquet file, OpenMetrics text, saved answers of Prometheus.

In: what the user typed. Out: a `MetricSource`; `SampleTable` is that of a Parquet file.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import polars as pl
from polars._typing import PolarsDataType

from tracekit.analysis.metrics.exporters import FLEET
from tracekit.analysis.metrics.samples import COLUMNS, MetricSource, TimeSpan
from tracekit.base.errors import FormatError
from tracekit.base.stderr import hushed_panics
from tracekit.base.text import short
from tracekit.collectors.importers.metrics.openmetrics import Text, in_seconds
from tracekit.collectors.importers.metrics.prometheus import Answers, Prometheus

_URLS = ("http://", "https://")
_PARQUET = b"PAR1"
_NEEDED = ("time", "host", "metric", "value")


def open_metrics(text: str) -> MetricSource:
    """The source of that path or URL. Raises FormatError for what is none."""
    if text.startswith(_URLS):
        return Prometheus(text, FLEET)
    path = Path(text)
    try:
        if path.is_dir():
            files = sorted(path.glob("*.json"))
            if not files:
                raise FormatError(f"{short(text)}: a folder without answers of Prometheus (*.json)")
            return Answers(path, files)
        if not path.is_file() and path.exists():
            raise FormatError(f"{short(text)}: neither a file nor a folder; expected samples of metrics")
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise FormatError(f"{short(text)}: cannot be read: {error.strerror or error}") from None
    if not start.strip():
        raise FormatError(f"{short(text)}: empty; expected samples of metrics")
    if start.startswith(_PARQUET):
        return SampleTable(path)
    return Answers(path, [path]) if start.lstrip().startswith(b"{") else Text(path)


class SampleTable:
    """A Parquet file of samples. Raises FormatError if it is none."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        try:
            with hushed_panics():
                self._columns = pl.scan_parquet(path, glob=False).collect_schema()
        except Exception as error:  # whatever polars raises for a damaged file
            raise FormatError(f"{path}: not a readable Parquet file; write the metrics again") from error
        if lacking := [name for name in _NEEDED if name not in self._columns]:
            raise FormatError(
                f"{path}: no column {lacking[0]!r}; expected time (seconds since 1970), host, device, metric, value"
            )

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        del window, hosts  # the noise of the test comes from other hosts and other times
        absent = [pl.lit(None, pl.String).alias(name) for name in ("device", "uuid") if name not in self._columns]
        rows = pl.scan_parquet(self._path, glob=False)
        if metrics is not None:
            rows = rows.filter(pl.col("metric").cast(pl.String).is_in(list(metrics)))
        try:
            with hushed_panics():
                samples = rows.with_columns(absent).select(_as(name, kind) for name, kind in COLUMNS.items()).collect()
        except Exception as error:  # a value of another type, or a torn file
            raise FormatError(f"{self._path}: its columns cannot be read as times, names and numbers") from error
        return samples.drop_nulls(list(_NEEDED))


def _as(name: str, kind: PolarsDataType) -> pl.Expr:
    if name == "time":
        return in_seconds(pl.col(name))
    return pl.col(name).cast(kind) if kind.is_numeric() else pl.col(name).cast(pl.String).cast(kind)
