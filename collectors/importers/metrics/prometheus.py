"""Samples of metrics from Prometheus: its range API over HTTP, or saved answers of it.

In: the base URL of a server, or JSON files. Out: a frame of samples. A server refuses more than 11,000 points a series,
so it is asked in pieces; it repeats old values between samples, so it is first asked how often it samples.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.metrics.samples import Window, short_host
from tracekit.base.errors import FormatError
from tracekit.base.text import short
from tracekit.collectors.importers.metrics.labels import SeriesKey, key_of
from tracekit.collectors.importers.metrics.openmetrics import framed

#: Points of a series in one answer, fewer than a server refuses.
MOST_POINTS = 10_000
#: A server that sends nothing for so long hangs; and one whose answer takes so long. Seconds.
SILENCE_S, ANSWER_S = 15.0, 30.0
#: How long is looked at to find out how often a server samples, and what is assumed if nothing changes, seconds.
_PROBE_S, _USUAL_S = 300.0, 15.0
#: What is read before and after an interval, as a multiple of it, and at least, seconds.
_MARGIN, _LEAST_MARGIN_S = 2.0, 900.0
#: Without an interval, what is read, seconds.
_RECENT_S = 3600.0
_PIECE_BYTES = 1 << 20


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


class Answers:
    """Saved answers of the range API: a file, or a folder of them."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.name, self._files = str(path), files

    def samples(
        self, metrics: Collection[str] | None, window: Window | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        del window, hosts
        keys: list[SeriesKey | None] = []
        parts = [part for file in self._files for part in _rows(file.read_bytes(), str(file), keys, metrics)]
        return _framed(keys, parts)


class Prometheus:
    """A server of Prometheus' HTTP interface. `names`: what to ask for where all metrics are wanted."""

    def __init__(self, url: str, names: Sequence[str]) -> None:
        self.name, self._url, self._names = url, url.rstrip("/"), names

    def samples(
        self, metrics: Collection[str] | None, window: Window | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        """See `MetricSource`."""
        now = time.time()
        asked = Window(now - _RECENT_S, now) if window is None else _widened(window)
        names = self._names if metrics is None else metrics
        keys: list[SeriesKey | None] = []
        parts: list[pl.DataFrame] = []
        for name in names:
            selectors = _selectors(name, hosts)
            step = self._sampling_s(selectors, window or asked)
            for selector in selectors:
                for since, until in _pieces(asked, step):
                    parts += _rows(self._ask(selector, since, until, step), self._url, keys, None)
        return _framed(keys, parts)

    def _sampling_s(self, selectors: Sequence[str], window: Window) -> float:
        """How often a server samples a metric: values change no more often."""
        since = max(window.since, window.until - _PROBE_S)
        keys: list[SeriesKey | None] = []
        parts = [
            part
            for selector in selectors
            for part in _rows(self._ask(selector, since, since + _PROBE_S, 1.0), self._url, keys, None)
        ]
        if not parts:
            return _USUAL_S
        rows = _framed(keys, parts).sort("host", "time")
        changed = rows.filter(pl.col("value") != pl.col("value").shift(1).over("host", "device", "metric"))
        gaps = changed.unique(["host", "time"], maintain_order=True).select(gap=pl.col("time").diff().over("host"))
        gap = gaps.filter(pl.col("gap") > 0.5)["gap"].quantile(0.25, "lower")  # a host's own series change together
        return float(max(1.0, round(gap))) if gap is not None else _USUAL_S

    def _ask(self, selector: str, since: float, until: float, step: float) -> bytes:
        """One answer. Raises FormatError for whatever a server, a network or a certificate can do."""
        query = {"query": selector, "start": f"{since:.3f}", "end": f"{until:.3f}", "step": f"{step:g}"}
        url = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        shown, deadline = short(self._url), time.monotonic() + ANSWER_S
        try:
            with urllib.request.urlopen(url, timeout=SILENCE_S) as answer:  # noqa: S310 - http or https, see source.py
                content = bytearray()
                while piece := answer.read1(_PIECE_BYTES):
                    content += piece
                    if time.monotonic() > deadline:
                        raise FormatError(f"{shown}: no whole answer within {ANSWER_S:.0f} s; ask for fewer hosts")
                return bytes(content)
        except urllib.error.HTTPError as error:
            raise FormatError(
                f"{shown}: answers {error.code} {_why(error)}; is it the base URL of Prometheus?"
            ) from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "verify_message", None) or getattr(error.reason, "strerror", None)
            raise FormatError(f"{shown}: cannot be asked: {reason or error.reason}") from None
        except TimeoutError:
            raise FormatError(f"{shown}: no answer within {SILENCE_S:.0f} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FormatError(f"{shown}: cannot be asked: {error}") from None


def _why(error: urllib.error.HTTPError) -> str:
    """What a server says is wrong."""
    try:
        content = json.loads(error.read1(_PIECE_BYTES))
        return str(content["error"])[:200]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return str(error.reason)


def _widened(window: Window) -> Window:
    margin = max(_MARGIN * (window.until - window.since), _LEAST_MARGIN_S)
    return Window(window.since - margin, min(window.until + margin, max(time.time(), window.until)))


def _selectors(name: str, hosts: Collection[str] | None) -> list[str]:
    """Plain selectors of a metric; of these hosts, with whatever domain and port."""
    if hosts is None:
        return [name]
    label = "Hostname" if name.startswith("DCGM_") else "instance"
    any_of = "|".join(re.escape(short_host(host)) for host in sorted(hosts))
    return [f"{name}{{{label}=~{json.dumps(f'(?i:{any_of})([.:].*)?')}}}"]


def _pieces(window: Window, step: float) -> Iterator[tuple[float, float]]:
    """Spans that together have every point once."""
    points = max(1, math.ceil((window.until - window.since) / step))
    for first in range(0, points, MOST_POINTS):
        last = min(first + MOST_POINTS, points) - 1
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
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        raise FormatError(f"{short(name)}: not an answer of Prometheus' range API, with resultType matrix") from None


def _framed(keys: list[SeriesKey | None], parts: list[pl.DataFrame]) -> pl.DataFrame:
    empty = pl.DataFrame(schema={"key": pl.UInt32, "time": pl.Float64, "value": pl.Float64})
    return framed(keys, pl.concat([empty, *parts]))
