"""Labels of a series, as exporters write them: which host and device it is of.

In: labels of Prometheus. Out: the columns of `tracekit.analysis.metrics.samples.COLUMNS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

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
    return SeriesKey(exporters_name(metric), host, device, labels.get("UUID"))


def exporters_name(metric: str) -> str:
    """The name of a metric as the exporter has it: OpenMetrics adds `_total` to the counters of dcgm-exporter."""
    return metric.removesuffix("_total") if metric.startswith("DCGM_") else metric
