"""The ranks of a file as bytes, which the process that read it hands to the one that asked.

In: `RankColumns`, or why there are none. Out: bytes, and the same again. Tables travel as Arrow IPC.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import msgspec
import polars as pl

from tracekit.collectors.importers.kineto.rank_columns import RankColumns
from tracekit.errors import FormatError


class _Packed(msgspec.Struct):
    """`ranks`: of the file, without their header, which is `header` as JSON; `problem`: why there are none."""

    ranks: list[RankColumns]
    header: str = "{}"
    problem: str | None = None


def packed(found: list[RankColumns] | FormatError) -> bytes:
    """What `unpacked` reads."""
    if isinstance(found, FormatError):
        content = _Packed([], problem=str(found))
    else:
        # JSON, because a header may hold integers of any size.
        header = json.dumps(dict(found[0].header)) if found else "{}"
        content = _Packed([replace(one, header={}) for one in found], header)
    return msgspec.msgpack.encode(content, enc_hook=_table_to_bytes)


def unpacked(content: bytes) -> list[RankColumns]:
    """What was packed. Raises the FormatError that was packed."""
    found = msgspec.msgpack.decode(content, type=_Packed, dec_hook=_bytes_to_table)
    if found.problem is not None:
        raise FormatError(found.problem)
    header = json.loads(found.header)
    return [replace(one, header=header) for one in found.ranks]


def _table_to_bytes(value: Any) -> bytes:
    if not isinstance(value, pl.DataFrame):
        raise NotImplementedError(f"{type(value).__name__} cannot be packed")
    buffer = io.BytesIO()
    value.write_ipc(buffer)
    return buffer.getvalue()


def _bytes_to_table(_: type, value: Any) -> pl.DataFrame:
    return pl.read_ipc(value)
