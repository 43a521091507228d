"""DuckDB files opened with DuckDB's errors turned into ours.

In: the path of a DuckDB file. Out: a connection to it, which sees that file and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import StoreBusyError, StoreError

if TYPE_CHECKING:
    import duckdb

#: DuckDB shares one instance per path within a process, so a connection opened while another is still open would see
#: the file as it was before it was replaced: threads that read take turns.
_ONE_READS = threading.RLock()
#: How long a file may be opened again because it was replaced meanwhile. A writer takes many times as long as one
#: opening, so a second attempt is rare.
_OPENING_S = 60.0


@contextmanager
def connected(path: Path, store: Path | str, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
    """The DuckDB file `path` of the store that errors name. Raises StoreError, StoreBusyError where it is in use."""
    import duckdb

    try:
        if not read_only:
            with duckdb.connect(_name(path)) as connection:
                yield connection
            return
        with _ONE_READS, _opened(path) as connection:
            # a view in a catalogue from elsewhere reads no file of this machine
            connection.execute("SET enable_external_access = false")
            yield connection
    except duckdb.Error as error:
        raise _store_error(error, store) from None


def _opened(path: Path) -> duckdb.DuckDBPyConnection:
    """A connection that reads one state of a file which writers replace. Raises duckdb.Error.

    DuckDB opens a file several times to make one connection: the header may be of the file as it was, and the blocks of
    the one that has taken its place. So it is opened again, until it was the same file before and after.
    """
    import duckdb

    deadline = time.monotonic() + _OPENING_S
    while time.monotonic() < deadline:
        before = _identity(path)
        try:
            connection = duckdb.connect(_name(path), read_only=True)
        except duckdb.Error:
            if _identity(path) == before:
                raise
            continue
        if _identity(path) == before:
            return connection
        connection.close()
    raise duckdb.IOException(f"for {_OPENING_S:.0f} s the file was replaced whenever it was being opened")


def _name(path: Path) -> str:
    """An absolute path: DuckDB takes ":memory:" and prefixes such as "md:" for other things than a file."""
    return str(path.absolute())


def _identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file from the one that takes its place; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _store_error(error: Exception, store: Path | str) -> StoreError:
    reason = str(error).splitlines()[0]
    if "Could not set lock" in reason:
        return StoreBusyError(
            f"{store}: another process has the store open (it takes one writer, or readers only); try again when it is"
            " done"
        )
    return StoreError(f"{store}: DuckDB cannot use the store: {reason}")


def version_in(connection: duckdb.DuckDBPyConnection) -> tuple[int, ...] | None:
    """What the table `store_version` holds; None where there is no such table."""
    import duckdb

    try:
        return tuple(row[0] for row in connection.execute("SELECT version FROM store_version").fetchall())
    except duckdb.CatalogException:
        return None


def check_version(connection: duckdb.DuckDBPyConnection, store: Path | str, *known: int) -> int:
    """The version of a store, one of `known`, the newest last. Raises StoreError for any other, and for no store."""
    found = version_in(connection)
    if found is None:
        raise StoreError(f"{store}: a DuckDB file, but no tracekit store; choose another --store")
    if len(found) == 1 and found[0] in known:
        return found[0]
    shown = ", ".join(map(str, found)) or "none"
    newer = len(found) == 1 and found[0] > known[-1]
    advice = "a newer tracekit wrote it, upgrade this one" if newer else "use the tracekit that wrote it"
    raise StoreError(f"{store}: store version {shown}; this tracekit uses {known[-1]}: {advice}")
