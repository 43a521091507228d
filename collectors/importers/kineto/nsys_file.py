"""Opens an export of Nsight Systems: a SQLite file that `nsys export --type sqlite` wrote.

In: a path. Out: `Export`, which reads its tables row by row. Versions of Nsight Systems have different tables and
columns: a missing table has no rows, a missing column is -1, or None for text, unless every version has it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.base.errors import FormatError
from tracekit.collectors.importers.kineto.event_tables import Ints

_AGAIN = "export it again: `nsys export --type sqlite REPORT.nsys-rep`"
#: Where the head of a SQLite file, all of big-endian integers, says how long the file is.
_PAGE_BYTES, _CHANGES, _PAGES, _PAGES_AS_OF = slice(16, 18), slice(24, 28), slice(28, 32), slice(92, 96)
#: SQLite keeps what is not yet in a file beside it.
_UNFINISHED = ("-wal", "-journal")


class Export:
    """The tables of an open file."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._connection = path, connection
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self._columns = {
            table: {row[1] for row in connection.execute(f"PRAGMA table_info({_quoted(table)})")} for (table,) in tables
        }

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table with these columns."""
        return self._columns.get(table, set()) >= set(columns) and table in self._columns

    def rows(
        self,
        table: str,
        numbers: Sequence[str],
        texts: Sequence[tuple[str, str]] = (),
        where: str = "",
        needs: Sequence[str] = (),
    ) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of all rows: numbers first. `texts`: the column of a text, or of its id in StringIds.

        Raises FormatError if the table lacks a column that it `needs`.
        """
        if table not in self._columns:
            return iter(())
        if missing := [name for name in needs if not self.has(table, name)]:
            raise FormatError(f"{self._path}: the table {table} lacks the column {missing[0]}; {_AGAIN}")
        wanted = [f"coalesce({_quoted(name)}, -1)" if self.has(table, name) else "-1" for name in numbers]
        wanted += [self._text(table, name, number) for name, number in texts]
        return self._connection.execute(f"SELECT {', '.join(wanted)} FROM {_quoted(table)} WHERE {where or 1}")  # noqa: S608

    def strings(self, table: str, column: str) -> dict[int, str]:
        """Return the texts that a column of ids refers to, by id."""
        if not (self.has(table, column) and self.has("StringIds", "id", "value")):
            return {}
        ids = f"SELECT {_quoted(column)} FROM {_quoted(table)}"  # noqa: S608
        return dict(self._connection.execute(f"SELECT id, value FROM StringIds WHERE id IN ({ids})"))  # noqa: S608

    def _text(self, table: str, name: str, number: str) -> str:
        sources = [_quoted(name)] if self.has(table, name) else []
        if self.has(table, number) and self.has("StringIds", "id", "value"):
            sources.append(f"(SELECT value FROM StringIds WHERE id = {_quoted(number)})")  # noqa: S608
        return f"coalesce({', '.join(sources)}, NULL)" if sources else "NULL"


@contextmanager
def opened(path: Path) -> Iterator[Export]:
    """Open an export. Raises FormatError if it is cut, damaged, or still being written, also while it is read."""
    try:
        _check_whole(path)
        # Immutable: SQLite would create files beside one in WAL mode, and fail in a folder that cannot be written.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            yield Export(path, connection)
    except (sqlite3.Error, ValueError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        why = error if isinstance(error, sqlite3.Error) else "a column of numbers holds something else"
        raise FormatError(f"{path}: damaged ({why}); copy it again, or {_AGAIN}") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None


def columns(rows: Iterable[tuple[int, ...]], names: Sequence[str]) -> dict[str, Ints]:
    """Return the columns of rows of numbers, by name. No row is kept as an object."""
    numbers = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, len(names))
    return {name: numbers[:, place].copy() for place, name in enumerate(names)}


def _check_whole(path: Path) -> None:
    for ending in _UNFINISHED:
        beside = Path(f"{path}{ending}")
        if beside.is_file() and beside.stat().st_size:
            raise FormatError(f"{path}: still being written, as {beside.name} beside it shows; wait, or {_AGAIN}")
    with path.open("rb") as file:
        head = file.read(100)
    page, pages = int.from_bytes(head[_PAGE_BYTES]), int.from_bytes(head[_PAGES])
    whole, size = (65536 if page == 1 else page) * pages, path.stat().st_size
    if size < whole and head[_CHANGES] == head[_PAGES_AS_OF]:
        raise FormatError(f"{path}: cut off, {size:,} of {whole:,} bytes are there; copy it again, or {_AGAIN}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
