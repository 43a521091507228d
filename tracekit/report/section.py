"""Parts of a report that every renderer draws in its own way.

In: what a report found out. Out: `Table`s, as words.
"""

from __future__ import annotations

from msgspec import Struct


class Table(Struct, frozen=True):
    """A table with a heading. The first column names things, the others are figures; `note`: a remark below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None
