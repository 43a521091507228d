"""Prometheus' text format, version 0.0.4.

In: metric families without timestamps or exemplars. Out: bytes. prometheus_client validates and formats names and
labels anew for each sample, which takes most of the time for 20,000 series, although the names are our own and all
series of a job share its labels. So figures of all jobs are columns (`JobFamily`) and are written column by column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import polars as pl
from prometheus_client import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: OpenMetrics type -> the suffix of its metrics and its type in this format, if they differ.
_TYPES = {"counter": ("_total", "counter"), "info": ("_info", "gauge")}
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class LabelSets:
    """The labels of many series, one column per label: `{"training_job": [name, ...]}`."""

    def __init__(self, **columns: Sequence[str]) -> None:
        self.columns = columns

    @cached_property
    def text(self) -> pl.Series:
        """The labels as text of this format, one string per series."""
        names = sorted(self.columns)
        rows = zip(*(self.columns[name] for name in names), strict=True)
        return pl.Series([_labels(dict(zip(names, row, strict=True))) for row in rows], dtype=pl.String)

    def rows(self) -> list[dict[str, str]]:
        """The labels as prometheus_client represents them, one dict per series."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]


class JobFamily(Metric):
    """A family with at most one series per label set. `values`: null for a label set without a series."""

    def __init__(self, name: str, documentation: str, typ: str, labels: LabelSets, values: pl.Series) -> None:
        self.labels, self.values = labels, values
        super().__init__(name, documentation, typ)

    @property
    def sample_name(self) -> str:
        """The name at the start of each line."""
        return self.name + _TYPES.get(self.type, ("", ""))[0]

    @property
    def samples(self) -> list[Sample]:
        """The samples one by one, for prometheus_client."""
        pairs = zip(self.labels.rows(), self.values.to_list(), strict=True)
        return [Sample(self.sample_name, labels, value) for labels, value in pairs if value is not None]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """Ignore assignments: the samples come from the columns."""

    def lines(self) -> list[str]:
        """The samples as lines of this format."""
        frame = pl.DataFrame({"labels": self.labels.text, "value": self.values.cast(pl.Float64)})
        value, number = pl.col("value"), pl.col("value").cast(pl.String)
        infinite = pl.when(value > 0).then(pl.lit("+Inf")).otherwise(pl.lit("-Inf"))
        text = pl.when(value.is_infinite()).then(infinite).otherwise(number)
        lines = frame.drop_nulls("value").select(pl.format(f"{self.sample_name}{{}} {{}}", "labels", text))
        return lines.to_series().to_list()


def exposition(families: Iterable[Metric]) -> bytes:
    """All families, one line per sample."""
    lines: list[str] = []
    labels: dict[tuple[tuple[str, str], ...], str] = {}
    for family in families:
        suffix, kind = _TYPES.get(family.type, ("", family.type))
        name, documentation = family.name + suffix, family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines += (f"# HELP {name} {documentation}", f"# TYPE {name} {kind}")
        if isinstance(family, JobFamily):
            lines += family.lines()
            continue
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
