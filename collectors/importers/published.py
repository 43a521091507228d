"""Importer of the traces published with "Understanding Stragglers in Large Model Training" (OSDI'25).

In: a Parquet file and the YAML file with the job's parallel sizes. Out: a `Trace`.
Columns of the file: dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc (model chunk), mb_id
(microbatch), gmc (global model chunk); -1 where a column has no meaning. Seconds are float32.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl

from tracekit.base.errors import FormatError, LayoutError
from tracekit.base.paths import unreadable
from tracekit.trace.canonical import Trace, columns_of_file, trace_of_file
from tracekit.trace.model import LARGEST_SIZE, Layout, TimeUnit, is_size
from tracekit.trace.schema import NULLABLE

#: Published column -> canonical column.
COLUMNS = {
    "step": "step",
    "rank": "rank",
    "dp_rank": "dp_rank",
    "stage": "pp_rank",
    "optype": "kind",
    "seq_id": "seq",
    "mb_id": "microbatch",
    "mc": "chunk",
    "start_ts": "start",
    "duration": "duration",
}
#: Size in the YAML file -> size of `Layout`. Files without one of the optional sizes have 1 of it.
SIZES = {
    "dp_size": "dp",
    "pp_size": "pp",
    "tp_size": "tp",
    "cp_size": "cp",
    "ep_size": "ep",
    "vpp_size": "vpp",
    "dsp_size": "dsp",
    "world_size": "world_size",
}
#: Layouts and kernel classes are a few lines; larger files are refused.
LARGEST_YAML_BYTES = 1 << 16
REQUIRED_SIZES = ("dp_size", "pp_size", "world_size")


def read_published(
    path: str | os.PathLike[str],
    layout_path: str | os.PathLike[str],
    *,
    unit: TimeUnit | None = None,
    steps: Sequence[int] | None = None,
) -> Trace:
    """Read a published trace; `unit`: of its times, by default seconds. `steps`: only these.

    Raises FormatError, TraceError or LayoutError, each naming the file at fault.
    """
    header = read_mapping(layout_path, "dp_size: 4")
    layout = _layout(header, str(layout_path))
    columns = columns_of_file(path)
    if missing := [name for name in COLUMNS if name not in columns]:
        raise FormatError(
            f"{path}: column {missing[0]!r} is missing; a published trace has {', '.join(COLUMNS)}."
            " A canonical trace contains its layout: leave out --layout"
        )
    return trace_of_file(
        path,
        layout,
        unit=unit,
        steps=steps,
        renamed=_canonical,
        name=str(_scalar(header.get("trial_name")) or "") or Path(os.fsdecode(path)).stem,
        metadata={"format": "published", "run_id": _scalar(header.get("run_id"))},
        columns={name: column for column, name in COLUMNS.items()},
    )


def _canonical(ops: pl.DataFrame) -> pl.DataFrame:
    """The columns of a trace among those of `ops`, with canonical names."""
    ops = ops.select(pl.col(column).alias(name) for column, name in COLUMNS.items() if column in ops.columns)
    integers = [name for name in NULLABLE & {*ops.columns} if ops[name].dtype.is_integer()]
    return ops.with_columns(pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name) for name in integers)


def read_mapping(path: str | os.PathLike[str], example: str) -> dict[str, Any]:
    """Read a small YAML file of lines such as `example`. Raises FormatError if it cannot be read or is no mapping."""
    import yaml

    class _Plain(yaml.SafeLoader):
        """Loads YAML without aliases: a few lines of them can expand to more data than any memory holds."""

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has an alias, which such a file does not need")
            return super().compose_node(parent, index)

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Skip merge keys: they need aliases."""

    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST_YAML_BYTES + 1)
        if len(text) > LARGEST_YAML_BYTES:
            raise FormatError(
                f"{path}: larger than {LARGEST_YAML_BYTES} bytes; expected a few lines such as `{example}`"
            )
        content = yaml.load(text.decode("utf-8"), _Plain)  # noqa: S506 - a safe loader
    except OSError as error:
        raise unreadable(path, error) from None
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply; expected lines such as `{example}`") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: impossible bytes, dates and numbers
        why = (str(error).splitlines() or [""])[0]
        raise FormatError(f"{path}: not YAML ({why}); expected lines such as `{example}`") from None
    if not isinstance(content, dict):
        raise FormatError(
            f"{path}: expected a YAML mapping with lines such as `{example}`, found {type(content).__name__}"
        )
    return content


def _scalar(value: object) -> str | int | float | None:
    """Convert a text, number or date of the YAML file for JSON; None for anything nested."""
    if isinstance(value, date):
        return str(value)
    return value if isinstance(value, str | int | float) else None


def _layout(header: dict[str, Any], source: str) -> Layout:
    if missing := [name for name in REQUIRED_SIZES if name not in header]:
        raise LayoutError(f"{source}: {missing[0]} is missing; expected {', '.join(SIZES)}")
    for name in SIZES:
        if name in header and not is_size(header[name]):
            raise LayoutError(
                f"{source}: {name} is {header[name]!r:.40}; expected an integer from 1 to {LARGEST_SIZE}, such as"
                f" `{name}: 4`"
            )
    try:
        return Layout(**{size: header[name] for name, size in SIZES.items() if name in header})
    except LayoutError as error:
        raise LayoutError(f"{source}: {error}") from None
