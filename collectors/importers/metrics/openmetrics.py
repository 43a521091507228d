"""Samples of metrics in OpenMetrics text with timestamps, as `promtool tsdb dump-openmetrics` writes it.

In: a text file of any size, read in pieces. Out: a frame of samples.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import polars as pl

from tracekit.analysis.metrics.samples import COLUMNS, TimeSpan
from tracekit.base.errors import FormatError
from tracekit.collectors.importers.metrics.labels import SeriesKey, key_of

_PIECE_BYTES = 1 << 25
_LINE = r'^([a-zA-Z_:][\w:]*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?)[ \t]+(\S+)(?:[ \t]+(\S+))?'
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
#: No time in seconds is that large: the older text format has milliseconds, and tables have those or smaller units.
_MOST_SECONDS = 1e11


class Text:
    """A file of OpenMetrics text."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        del window, hosts
        keys: dict[str, SeriesKey | None] = {}
        pieces, lines, timed = [], 0, 0
        for number, piece in enumerate(self._pieces()):
            rows = _parsed(
                piece, metrics if number else None
            )  # the first piece shows whether this is a file of metrics
            lines, timed = lines + rows.height, timed + rows["time"].count()
            for name in rows["name"].unique():
                if name not in keys:
                    keys[name] = _key(name)
            wanted = {name: key for key, name in enumerate(keys) if _wanted(keys[name], metrics)}
            numbered = pl.DataFrame(
                {"name": list(wanted), "key": list(wanted.values())}, {"name": pl.String, "key": pl.UInt32}
            )
            pieces.append(rows.join(numbered, on="name").select("key", "time", "value"))
        if not lines:
            raise FormatError(f"{self.name}: no metrics; expected OpenMetrics text, such as promtool dumps")
        if not timed:
            raise FormatError(f"{self.name}: samples without timestamps; dump a span of time, not one scrape")
        return framed(list(keys.values()), pl.concat(pieces))

    def _pieces(self) -> Iterator[list[str]]:
        """Lines, so many at a time. Raises FormatError for anything but text."""
        try:
            with open(self._path, encoding="utf-8") as file:
                while piece := file.readlines(_PIECE_BYTES):
                    yield [line.rstrip("\n") for line in piece]
        except UnicodeDecodeError:
            raise FormatError(f"{self.name}: neither Parquet nor text; expected samples of metrics") from None


def _parsed(lines: list[str], metrics: Collection[str] | None) -> pl.DataFrame:
    """Name with labels, value and time of the lines that are samples, of these metrics if they are given."""
    line = pl.col("line")
    chosen = ~line.str.starts_with("#") & (line != "")
    if metrics is not None:
        chosen = line.str.contains(rf"^(?:{'|'.join(metrics)})(?:_total)?[{{ \t]")
    groups = line.str.extract_groups(_LINE).struct.rename_fields(["name", "value", "time"])
    rows = pl.DataFrame({"line": lines}).lazy().filter(chosen).select(groups).unnest("line").drop_nulls("name")
    return rows.with_columns(pl.col("time", "value").cast(pl.Float64, strict=False)).drop_nulls("value").collect()


def _key(name: str) -> SeriesKey | None:
    metric, _, labels = name.partition("{")
    named = {label: _ESCAPE.sub(_unescaped, value) for label, value in _LABEL.findall(labels)}
    return key_of(metric, named)


def _unescaped(escape: re.Match[str]) -> str:
    return "\n" if escape[1] == "n" else escape[1]


def _wanted(key: SeriesKey | None, metrics: Collection[str] | None) -> bool:
    return key is not None and (metrics is None or key.metric in metrics)


def framed(keys: list[SeriesKey | None], rows: pl.DataFrame) -> pl.DataFrame:
    """Samples with the series of the numbers `key`; rows: key, time, value."""
    series = pl.DataFrame(
        [(number, key.host, key.device, key.uuid, key.metric) for number, key in enumerate(keys) if key is not None],
        {"key": pl.UInt32} | {name: COLUMNS[name] for name in ("host", "device", "uuid", "metric")},
        orient="row",
    )
    return rows.drop_nulls().join(series, on="key").with_columns(in_seconds(pl.col("time"))).select(*COLUMNS)


def in_seconds(time: pl.Expr) -> pl.Expr:
    """Times since 1970 in seconds, whether they are in seconds, milliseconds, microseconds or nanoseconds."""
    number = time.cast(pl.Float64)
    for _ in range(3):
        number = pl.when(number > _MOST_SECONDS).then(number / 1e3).otherwise(number)
    return number
