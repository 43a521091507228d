"""Samples of metrics from Prometheus: its range API over HTTP, or saved answers of it.

In: the base URL of a server, or JSON files. Out: a frame of samples. A server refuses more than 11,000 points a series,
so it is asked in pieces; it repeats old values between samples, so it is first asked how often it samples.
"""

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
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.metrics.mechanisms import is_counter
from tracekit.analysis.metrics.samples import TimeSpan, short_host
from tracekit.base.errors import FormatError
from tracekit.base.http import OPENER
from tracekit.base.text import short
from tracekit.collectors.importers.metrics.labels import SeriesKey, key_of
from tracekit.collectors.importers.metrics.openmetrics import framed

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


class Answers:
    """Saved answers of the range API: a file, or a folder of them."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.name, self._files = str(path), files

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        del window, hosts
        keys: list[SeriesKey | None] = []
        parts = [part for file in self._files for part in _rows(file.read_bytes(), str(file), keys, metrics)]
        return _framed(keys, parts)


class Prometheus:
    """A server of Prometheus' HTTP interface. `names`: what to ask for where all metrics are wanted."""

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
        keys: list[SeriesKey | None] = []
        parts: list[pl.DataFrame] = []
        for name in names:
            selector = _selector(name, hosts)
            step, series = self._sampling(selector, window or asked)
            if not series:
                continue
            points = min(MOST_POINTS, max(_MOST_SAMPLES // series, _FEWEST_POINTS))
            for since, until in _pieces(asked, step, points):
                parts += _rows(self._ask(selector, since, until, step), self._url, keys, None)
        return _framed(keys, parts)

    def _sampling(self, selector: str, window: TimeSpan) -> tuple[float, int]:
        """How often a server samples a metric, seconds, as values change no more often; and how many series it has."""
        since = max(window.since, window.until - _PROBE_S)
        keys: list[SeriesKey | None] = []
        parts = list(_rows(self._ask(selector, since, since + _PROBE_S, 1.0), self._url, keys, None))
        if not parts:
            return _USUAL_S, 0
        rows = _framed(keys, parts).sort("host", "time")
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
                request = urllib.request.Request(url, headers=self._headers)  # noqa: S310 - http(s), see source.py
                with OPENER.open(request, timeout=SILENCE_S) as answer:
                    answers.append(answer.read(MOST_ANSWER_BYTES + 1))
            except Exception as error:  # raised in the thread that waits
                answers.append(error)

        # A server that sends a byte now and then is never silent, so the answer as a whole has a limit.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        answer = answers[0] if answers else TimeoutError()
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
            said = str(msgspec.json.decode(error.read(), type=_Refusal).error)[:200]
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError, http.client.HTTPException):
            said = str(error.reason)
        return f"answers {error.code}: {said}; is it the base URL of Prometheus?"
    if isinstance(reason, TimeoutError):
        return f"no answer within {ANSWER_S:.0f} s"
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


def _rows(
    content: bytes, name: str, keys: list[SeriesKey | None], metrics: Collection[str] | None
) -> Iterator[pl.DataFrame]:
    """Frames of number of the series, time, value; new series are added to `keys`. Raises FormatError."""
    try:
        result = msgspec.json.decode(content, type=_Answer).data.result
        for series in result:
            key = key_of(series.metric.get("__name__", ""), series.metric)
            if key is None or not (metrics is None or key.metric in metrics):
                continue
            pairs = msgspec.json.decode(series.values, type=list[tuple[float, str]])
            times = np.fromiter((pair[0] for pair in pairs), np.float64, len(pairs))
            values = np.array([pair[1] for pair in pairs], dtype=np.str_).astype(np.float64) if pairs else times
            yield pl.DataFrame({"key": np.full(len(pairs), len(keys), np.uint32), "time": times, "value": values})
            keys.append(key)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise FormatError(f"{short(name)}: not an answer of Prometheus' range API, with resultType matrix") from None


def _framed(keys: list[SeriesKey | None], parts: list[pl.DataFrame]) -> pl.DataFrame:
    empty = pl.DataFrame(schema={"key": pl.UInt32, "time": pl.Float64, "value": pl.Float64})
    return framed(keys, pl.concat([empty, *parts]))
