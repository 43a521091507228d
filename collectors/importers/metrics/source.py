"""What a SOURCE of metrics is: a URL, a Parquet file, OpenMetrics text, saved answers of Prometheus.

In: what the user typed. Out: a `MetricSource`.
"""

from __future__ import annotations

from pathlib import Path

from tracekit.analysis.metrics.doctor import FLEET
from tracekit.analysis.metrics.samples import MetricSource
from tracekit.base.errors import FormatError
from tracekit.base.text import short
from tracekit.collectors.importers.metrics.openmetrics import Text
from tracekit.collectors.importers.metrics.prometheus import Answers, Prometheus
from tracekit.collectors.importers.metrics.table import Table

_URLS = ("http://", "https://")
_PARQUET = b"PAR1"


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
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise FormatError(f"{short(text)}: cannot be read: {error.strerror or error}") from None
    if not start.strip():
        raise FormatError(f"{short(text)}: empty; expected samples of metrics")
    if start.startswith(_PARQUET):
        return Table(path)
    return Answers(path, [path]) if start.lstrip().startswith(b"{") else Text(path)
