"""The op trace: a job of any shape, one row per op, each with the ops that it waits for.

In: a polars frame or a Parquet file that any tool can write (docs/traces.md). Out: `OpTrace`. Its values are checked
when the graph is built (`analysis/graph/op_rules.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import polars as pl

from tracekit.base.errors import FormatError
from tracekit.base.text import encodable, quoted
from tracekit.trace.model import ProcessGroup, TraceKind


@dataclass(frozen=True, slots=True)
class OpTrace:
    """One job of any shape (`kind`): its ops, the names of its ranks' coordinates, and its process groups.

    `ops`: a column each for `rank`, `start` and `duration` (seconds); optional: `step`, `kind`, `name`, `peer`,
    `stream`, `rendezvous`, `group`, `waits_for` (lists of row numbers), `why` (lists of as many words) and labels.
    `axes`: labels that are coordinates of ranks, such as dp_rank. `rules`: where dependencies come from, `explicit`
    (the column `waits_for`) and `streams` (ops of one stream of a rank run in order of start). `groups`: process
    groups, which the column `group` names. `name`: of the job. `metadata`: plain JSON data. `step_starts`: none,
    because times count from the start of each step.
    """

    kind: ClassVar[Literal[TraceKind.OPS]] = TraceKind.OPS
    step_starts: ClassVar[Mapping[int, float]] = {}
    ops: pl.DataFrame
    name: str
    axes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ("explicit",)
    groups: tuple[ProcessGroup, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> np.ndarray:
        """The step numbers, ascending, int32 [steps]."""
        return (
            self.ops["step"].cast(pl.Int32).unique().sort().to_numpy()
            if "step" in self.ops.columns
            else np.zeros(1, np.int32)
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks, by the name of that size."""
        return {"world_size": self.ops["rank"].n_unique()}

    def overview(self) -> dict[str, str]:
        """What it holds, for people: a line each, by its heading."""
        return {
            "Kind": "op trace (docs/traces.md)",
            "Rules": ", ".join(self.rules),
            "Axes": ", ".join(self.axes) or "none",
            "Groups": f"{len(self.groups):,}",
            "Ranks": f"{self.ops['rank'].n_unique():,}",
            "Steps": f"{len(self.steps):,}",
        }

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the op trace; replaces only another trace. Raises OutputError."""
        from tracekit.base.atomic_write import replacing
        from tracekit.trace.canonical import TRACE_FILE  # most recordings of GPUs become no file

        with replacing(path, TRACE_FILE) as temporary, open(temporary, "wb") as file:
            self.write_to(file)

    def write_to(self, file: BinaryIO) -> None:
        """Write the content of the Parquet file."""
        from tracekit.trace.canonical import METADATA_KEY, OP_TRACE_VERSION

        header = {
            "schema_version": OP_TRACE_VERSION,
            "name": self.name,
            "axes": list(self.axes),
            "rules": list(self.rules),
            "groups": {group.name: list(group.ranks) for group in self.groups},
            "metadata": dict(self.metadata),
        }
        self.ops.write_parquet(file, compression="zstd", metadata={METADATA_KEY: json.dumps(header)})


def read_op_trace(path: str | os.PathLike[str]) -> OpTrace:
    """Read an op trace. Raises FormatError if the file is not one."""
    from tracekit.trace.canonical import OP_TRACE_VERSION, read_columns, read_header

    header = read_header(path)
    if header is None or header.get("schema_version") != OP_TRACE_VERSION:
        raise FormatError(f"{path}: not an op trace (schema version {OP_TRACE_VERSION}); see docs/traces.md")
    ops = read_columns(path)
    if ops.is_empty():
        raise FormatError(f"{path}: no ops (0 rows); record at least one step")
    try:
        groups = {str(name): tuple(map(int, ranks)) for name, ranks in header.get("groups", {}).items()}
        return OpTrace(
            ops=ops,
            name=encodable(str(header.get("name") or Path(os.fsdecode(path)).stem)),
            axes=tuple(map(str, header.get("axes", ()))),
            rules=tuple(map(str, header.get("rules", ("explicit",)))),
            groups=tuple(ProcessGroup(name, tuple(sorted(ranks))) for name, ranks in groups.items()),
            metadata=dict(header.get("metadata", {})),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: damaged tracekit metadata ({quoted(error)}); write the trace again") from None
