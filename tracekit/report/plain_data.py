"""Structs as plain data, and as frames.

In: the structs of a report. Out: JSON without nan, polars frames. A key that a
source lacks is absent (`Maybe`); an undefined figure is null (`Number`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import polars as pl
from msgspec import UNSET, Struct, UnsetType

T = TypeVar("T")
Maybe = Union[T, UnsetType]  # noqa: UP007
Number = float | None
#: Types of JSON that are columns of a table.
_COLUMNS: dict[Any, Any] = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}


def frame_of(things: Sequence[object], shape: type[Struct], but: Collection[str] = ()) -> pl.DataFrame:
    """One row for each thing, with the columns of `shape` that are text, numbers or truth values, `but` for these.

    A column that the first thing lacks is left out.
    """
    first = things[0] if things else None
    types = {field.name: _without_none(field.type) for field in msgspec.structs.fields(shape)}
    schema = {
        name: _COLUMNS[kind]
        for name, kind in types.items()
        if kind in _COLUMNS and name not in but and getattr(first, name, None) is not UNSET
    }
    return pl.DataFrame([{name: getattr(thing, name) for name in schema} for thing in things], schema)


def _without_none(form: Any) -> Any:
    """The type of a value that is there."""
    kind = get_args(form)[0] if get_origin(form) in {Union, UnionType} else form
    return str if get_origin(kind) is Literal else kind


def plain(content: Any) -> dict[str, Any]:
    """Return structs, and what is in them, as JSON data; nan and infinities become None, because JSON has neither."""
    data: dict[str, Any] = json.loads(encoded(content))
    return data


def encoded(content: Any) -> bytes:
    """Structs, and the frames and numbers of numpy in them, as JSON; nan and infinities become null."""
    return msgspec.json.encode(content, enc_hook=_rows_or_number)


def _rows_or_number(thing: Any) -> Any:
    return thing.to_dicts() if isinstance(thing, pl.DataFrame) else thing.item()
