"""Prometheus' text format, version 0.0.4.

In: metric families without timestamps or exemplars. Out: bytes. The names are our own, and the labels of a job recur in
each of its series: prometheus_client checks and formats both anew for each sample, which takes most of the time of
20,000 series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: OpenMetrics type -> the suffix of its metrics and its type in this format, where they differ.
_TYPES = {"counter": ("_total", "counter"), "info": ("_info", "gauge")}
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(families: Iterable[Metric]) -> bytes:
    """All families, one line per sample."""
    lines: list[str] = []
    labels: dict[tuple[tuple[str, str], ...], str] = {}
    for family in families:
        suffix, kind = _TYPES.get(family.type, ("", family.type))
        name, documentation = family.name + suffix, family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines += (f"# HELP {name} {documentation}", f"# TYPE {name} {kind}")
        for sample in family.samples:
            key = tuple(sample.labels.items())
            shown = labels[key] if key in labels else labels.setdefault(key, _labels(sample.labels))
            lines.append(f"{sample.name}{shown} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines).encode()


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels.items())) + "}"
