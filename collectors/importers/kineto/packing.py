"""Serialise the ranks of a file, to pass them from the reading process to its parent.

In: `RankColumns`, or an error. Out: bytes, and the same again. Arrays are copied as they lie in memory.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from tracekit.base.errors import FormatError
from tracekit.collectors.importers.kineto.rank_columns import RankColumns


class _Packed(msgspec.Struct):
    """`ranks`: of the file, without their header, which is `header` as JSON; `problem`: why there are none."""

    ranks: list[RankColumns]
    header: str = "{}"
    problem: str | None = None


def packed(found: list[RankColumns] | FormatError) -> bytes:
    """Serialise ranks or an error for `unpacked`."""
    if isinstance(found, FormatError):
        content = _Packed([], problem=str(found))
    else:
        # JSON, because a header may hold integers of any size.
        header = json.dumps(dict(found[0].header)) if found else "{}"
        content = _Packed([replace(one, header={}) for one in found], header)
    return msgspec.msgpack.encode(content, enc_hook=_array_to_bytes)


def unpacked(content: bytes) -> list[RankColumns]:
    """Deserialise the output of `packed`. Raises the FormatError in it, if any."""
    found = msgspec.msgpack.decode(content, type=_Packed, dec_hook=_bytes_to_array)
    if found.problem is not None:
        raise FormatError(found.problem)
    header = json.loads(found.header)
    return [replace(one, header=header) for one in found.ranks]


def _array_to_bytes(value: Any) -> tuple[str, memoryview]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot be packed")
    return value.dtype.str, np.ascontiguousarray(value).data.cast("B")


def _bytes_to_array(_: type, value: Any) -> np.ndarray:
    kind, content = value
    return np.frombuffer(content, kind)
