"""Reads samples of metrics: Parquet, OpenMetrics text, answers of Prometheus, and its HTTP interface."""

from __future__ import annotations

import http.client
import json
import math
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct
from polars._typing import PolarsDataType

from tracekit.analysis.metrics.samples import COLUMNS, FLEET, MetricSource, TimeSpan, is_counter, short_host
from tracekit.base.errors import FormatError
from tracekit.base.http import OPENER
from tracekit.base.paths import unreadable
from tracekit.base.stderr import hushed_panics, saying_if_slow
from tracekit.base.text import short

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
            return SavedMetrics(str(path), partial(_from_answers, files))
        if not path.is_file() and path.exists():
            raise FormatError(f"{short(text)}: neither a file nor a folder; expected samples of metrics")
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise unreadable(text, error) from None
    if not start.strip():
        raise FormatError(f"{short(text)}: empty; expected samples of metrics")
    if start.startswith(_PARQUET):
        return SavedMetrics(str(path), partial(_from_table, path, _checked_columns(path)))
    read = partial(_from_answers, [path]) if start.lstrip().startswith(b"{") else partial(_from_text, path)
    return SavedMetrics(str(path), read)


class SavedMetrics:
    """Samples in files. `read`: returns those of some metrics, None for all."""

    def __init__(self, name: str, read: Callable[[Collection[str] | None], pl.DataFrame]) -> None:
        self.name, self._read = name, read

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        del window, hosts  # the noise of the test comes from other hosts and other times
        return self._read(metrics)


def _checked_columns(path: Path) -> pl.Schema:
    """The columns of a Parquet file of samples. Raises FormatError if it is none."""
    try:
        with hushed_panics():
            columns = pl.scan_parquet(path, glob=False).collect_schema()
    except Exception as error:  # whatever polars raises for a damaged file
        raise FormatError(f"{path}: not a readable Parquet file; write the metrics again") from error
    if lacking := [name for name in _NEEDED if name not in columns]:
        raise FormatError(
            f"{path}: no column {lacking[0]!r}; expected time (seconds since 1970), host, device, metric, value"
        )
    return columns


def _from_table(path: Path, columns: pl.Schema, metrics: Collection[str] | None) -> pl.DataFrame:
    """The samples of a Parquet file. Raises FormatError."""
    absent = [pl.lit(None, pl.String).alias(name) for name in ("device", "uuid") if name not in columns]
    rows = pl.scan_parquet(path, glob=False)
    if metrics is not None:
        rows = rows.filter(pl.col("metric").cast(pl.String).is_in(list(metrics)))
    try:
        with hushed_panics():
            samples = rows.with_columns(absent).select(_as(name, kind) for name, kind in COLUMNS.items()).collect()
    except Exception as error:  # a value of another type, or a torn file
        raise FormatError(f"{path}: its columns cannot be read as times, names and numbers") from error
    return samples.drop_nulls(list(_NEEDED))


def _as(name: str, kind: PolarsDataType) -> pl.Expr:
    if name == "time":
        return in_seconds(pl.col(name))
    return pl.col(name).cast(kind) if kind.is_numeric() else pl.col(name).cast(pl.String).cast(kind)


#: Points of a series in one answer, fewer than a server refuses.
MOST_POINTS = 10_000
#: A server that sends nothing for so long hangs; and one whose answer takes so long. Seconds.
SILENCE_S, ANSWER_S = 15.0, 30.0
#: Points of all series in one answer, which bounds memory and the time of an answer.
_MOST_SAMPLES = 2_000_000
_FEWEST_POINTS = 100
#: No answer that was asked for is as large.
MOST_ANSWER_BYTES = 256 << 20
#: How long is looked at to find out how often a server samples, and what is assumed if nothing changes, seconds.
_PROBE_S, _USUAL_S = 300.0, 15.0
#: What is read before and after an interval, as a multiple of it, and at least, seconds.
_MARGIN, _LEAST_MARGIN_S = 2.0, 900.0
#: Without an interval, what is read, seconds.
_RECENT_S = 3600.0


class _Series(Struct):
    """One series of an answer; its values stay JSON until they are needed."""

    metric: dict[str, str]
    values: msgspec.Raw


class _Data(Struct):
    result: list[_Series]


class _Answer(Struct):
    """An answer of the range API."""

    data: _Data
    status: str = "success"


class _Refusal(Struct):
    """What a server says if it does not answer."""

    error: str


def _from_answers(files: Sequence[Path], metrics: Collection[str] | None) -> pl.DataFrame:
    """The samples of saved answers of the range API."""
    return _framed(part for file in files for part in _series(file.read_bytes(), str(file), metrics))


class Prometheus:
    """A server of Prometheus' HTTP interface. `names`: what to ask for where all metrics are wanted.

    It refuses more than 11,000 points a series, so it is asked in pieces; it repeats old values between samples, so it
    is first asked how often it samples.
    """

    def __init__(self, url: str, names: Sequence[str]) -> None:
        parts = urllib.parse.urlsplit(url.rstrip("/"))
        account, _, place = parts.netloc.rpartition("@")
        self._url = self.name = urllib.parse.urlunsplit(parts._replace(netloc=place))  # without the password
        self._headers = {"Authorization": f"Basic {b64encode(unquote(account).encode()).decode()}"} if account else {}
        self._names = names

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        now = time.time()
        asked = TimeSpan(now - _RECENT_S, now) if window is None else _widened(window)
        names = [*(self._names if metrics is None else metrics)]
        names += [f"{name}_total" for name in names if name.startswith("DCGM_") and is_counter(name)]
        parts: list[tuple[SeriesKey, pl.DataFrame]] = []
        for name in names:
            selector = _selector(name, hosts)
            step, series = self._sampling(selector, window or asked)
            if not series:
                continue
            points = min(MOST_POINTS, max(_MOST_SAMPLES // series, _FEWEST_POINTS))
            for since, until in _pieces(asked, step, points):
                parts += _series(self._ask(selector, since, until, step), self._url, None)
        return _framed(parts)

    def _sampling(self, selector: str, window: TimeSpan) -> tuple[float, int]:
        """How often a server samples a metric, seconds, as values change no more often; and how many series it has."""
        since = max(window.since, window.until - _PROBE_S)
        parts = list(_series(self._ask(selector, since, since + _PROBE_S, 1.0), self._url, None))
        if not parts:
            return _USUAL_S, 0
        rows = _framed(parts).sort("host", "time")
        changed = rows.filter(pl.col("value") != pl.col("value").shift(1).over("host", "device", "metric"))
        gaps = changed.unique(["host", "time"], maintain_order=True).select(gap=pl.col("time").diff().over("host"))
        gap = gaps.filter(pl.col("gap") > 0.5)["gap"].quantile(0.25, "lower")  # a host's own series change together
        return max(1.0, round(gap)) if gap is not None else _USUAL_S, len(parts)

    def _ask(self, selector: str, since: float, until: float, step: float) -> bytes:
        """One answer. Raises FormatError for whatever a server, a network or a certificate can do."""
        query = {"query": selector, "start": f"{since:.3f}", "end": f"{until:.3f}", "step": f"{step:g}"}
        url = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        answers: list[bytes | Exception] = []

        def ask() -> None:
            try:
                request = urllib.request.Request(url, headers=self._headers)  # noqa: S310 - http(s), see `open_metrics`
                with OPENER.open(request, timeout=SILENCE_S) as answer:
                    answers.append(answer.read(MOST_ANSWER_BYTES + 1))
            except Exception as error:  # raised in the thread that waits
                answers.append(error)

        # A server that sends a byte now and then is never silent, so the answer as a whole has a limit.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        with saying_if_slow(f"tracekit: {short(self._url)}: waiting for an answer, at most {ANSWER_S:g} s"):
            thread.join(ANSWER_S)
        if not answers:
            raise FormatError(f"{short(self._url)}: no whole answer within {ANSWER_S:g} s")
        answer = answers[0]
        if isinstance(answer, bytes) and len(answer) <= MOST_ANSWER_BYTES:
            return answer
        if isinstance(answer, bytes):
            raise FormatError(f"{short(self._url)}: an answer has more than {MOST_ANSWER_BYTES >> 20} MiB")
        raise FormatError(f"{short(self._url)}: {_why(answer)}") from None


def _why(error: Exception) -> str:
    """Why there is no answer, in words."""
    reason = getattr(error, "reason", error)
    if isinstance(error, urllib.error.HTTPError):
        try:
            message = str(msgspec.json.decode(error.read(), type=_Refusal).error)[:200]
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError, http.client.HTTPException):
            message = str(error.reason)
        return f"answers {error.code}: {message}; is it the base URL of Prometheus?"
    if isinstance(reason, TimeoutError):
        return f"no answer within {SILENCE_S:g} s"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {reason.verify_message}; name the authority in SSL_CERT_FILE"
    return f"cannot be asked: {getattr(reason, 'strerror', None) or reason}"


def _widened(window: TimeSpan) -> TimeSpan:
    margin = max(_MARGIN * (window.until - window.since), _LEAST_MARGIN_S)
    return TimeSpan(window.since - margin, min(window.until + margin, max(time.time(), window.until)))


def _selector(name: str, hosts: Collection[str] | None) -> str:
    """A metric of all hosts, or of these with whatever domain and port."""
    if hosts is None:
        return name
    label = "Hostname" if name.startswith("DCGM_") else "instance"
    any_of = "|".join(re.escape(host) for host in sorted(map(short_host, hosts)))
    pattern = json.dumps(f"(?i:{any_of})([.:].*)?")
    return f"{name}{{{label}=~{pattern}}}"


def _pieces(window: TimeSpan, step: float, most: int) -> Iterator[tuple[float, float]]:
    """Spans that together have every point once."""
    points = max(1, math.ceil((window.until - window.since) / step))
    for first in range(0, points, most):
        last = min(first + most, points) - 1
        yield window.since + first * step, window.since + last * step


def _series(content: bytes, name: str, metrics: Collection[str] | None) -> Iterator[tuple[SeriesKey, pl.DataFrame]]:
    """The times and values of each series of an answer. Raises FormatError."""
    try:
        result = msgspec.json.decode(content, type=_Answer).data.result
        for series in result:
            key = key_of(series.metric.get("__name__", ""), series.metric)
            if key is None or not (metrics is None or key.metric in metrics):
                continue
            pairs = msgspec.json.decode(series.values, type=list[tuple[float, str]])
            times = np.fromiter((pair[0] for pair in pairs), np.float64, len(pairs))
            values = np.array([pair[1] for pair in pairs], dtype=np.str_).astype(np.float64) if pairs else times
            yield key, pl.DataFrame({"time": times, "value": values})
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise FormatError(f"{short(name)}: not an answer of Prometheus' range API, with resultType matrix") from None


def _framed(series: Iterable[tuple[SeriesKey, pl.DataFrame]]) -> pl.DataFrame:
    keys: list[SeriesKey | None] = []
    parts = [pl.DataFrame(schema={"time": pl.Float64, "value": pl.Float64, "key": pl.UInt32})]
    for key, rows in series:
        parts.append(rows.with_columns(key=pl.lit(len(keys), pl.UInt32)))
        keys.append(key)
    return framed(keys, pl.concat(parts))


_PIECE_BYTES = 1 << 25
_LINE = r'^([a-zA-Z_:][\w:]*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?)[ \t]+(\S+)(?:[ \t]+(\S+))?'
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
#: No time in seconds is that large: the older text format has milliseconds, and tables have those or smaller units.
_MOST_SECONDS = 1e11


def _from_text(path: Path, metrics: Collection[str] | None) -> pl.DataFrame:
    """The samples of a file of OpenMetrics text. Raises FormatError."""
    keys: dict[str, SeriesKey | None] = {}
    pieces, lines, timed = [], 0, 0
    for number, piece in enumerate(_lines(path)):
        rows = _parsed(piece, metrics if number else None)  # the first piece shows whether this is a file of metrics
        lines, timed = lines + rows.height, timed + rows["time"].count()
        for name in rows["name"].unique():
            if name not in keys:
                keys[name] = _key(name)
        series = enumerate(keys.items())
        wanted = {
            name: code for code, (name, key) in series if key is not None and (metrics is None or key.metric in metrics)
        }
        numbered = pl.DataFrame(
            {"name": list(wanted), "key": list(wanted.values())}, {"name": pl.String, "key": pl.UInt32}
        )
        pieces.append(rows.join(numbered, on="name").select("key", "time", "value"))
    if not lines:
        raise FormatError(f"{path}: no metrics; expected OpenMetrics text, such as promtool dumps")
    if not timed:
        raise FormatError(f"{path}: samples without timestamps; dump a span of time, not one scrape")
    return framed(list(keys.values()), pl.concat(pieces))


def _lines(path: Path) -> Iterator[list[str]]:
    """Lines, so many at a time. Raises FormatError for anything but text."""
    try:
        with open(path, encoding="utf-8") as file:
            while piece := file.readlines(_PIECE_BYTES):
                yield [line.rstrip("\n") for line in piece]
    except UnicodeDecodeError:
        raise FormatError(f"{path}: neither Parquet nor text; expected samples of metrics") from None


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
    named = {
        label: _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], value)
        for label, value in _LABEL.findall(labels)
    }
    return key_of(metric, named)


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


_PORT = re.compile(r":\d+$")
#: Labels that name the device, in dcgm-exporter and node_exporter; the first one counts.
_DEVICES = ("gpu", "device")


class SeriesKey(Struct, frozen=True):
    """The series of a metric. `uuid`: of the device, if the labels name it."""

    metric: str
    host: str
    device: str | None
    uuid: str | None


def key_of(metric: str, labels: Mapping[str, str]) -> SeriesKey | None:
    """The series that labels name; None if they name no host."""
    host = labels.get("Hostname") or _PORT.sub("", labels.get("instance", ""))
    if not host:
        return None
    device = next((labels[name] for name in _DEVICES if labels.get(name)), None)
    port = labels.get("port")
    if port not in (None, "1") and device is not None:  # most InfiniBand cards have one port
        device = f"{device}:{port}"
    # OpenMetrics adds `_total` to the counters of dcgm-exporter.
    name = metric.removesuffix("_total") if metric.startswith("DCGM_") else metric
    return SeriesKey(name, host, device, labels.get("UUID"))
