"""Open DuckDB files, converting DuckDB's errors to ours.

In: the path of a DuckDB file. Out: a connection that can access only that file.
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

#: DuckDB shares one instance per path within a process, so a connection opened while another is open would see the file
#: as it was before it was replaced: reading threads take turns.
_ONE_READS = threading.RLock()
#: How long to retry opening a file that was replaced meanwhile. A writer takes many times as long as opening, so a
#: second attempt is rare.
_OPENING_S = 60.0


@contextmanager
def connected(path: Path, store: Path | str, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the DuckDB file `path` of a store, named in errors. Raises StoreError, StoreBusyError if it is in use."""
    import duckdb

    try:
        if not read_only:
            with duckdb.connect(_name(path)) as connection:
                yield connection
            return
        with _ONE_READS, _opened(path) as connection:
            # a view in a foreign catalogue must not read files of this machine
            connection.execute("SET enable_external_access = false")
            yield connection
    except duckdb.Error as error:
        raise _store_error(error, store) from None


def _opened(path: Path) -> duckdb.DuckDBPyConnection:
    """A connection that reads one state of a file that writers replace. Raises duckdb.Error.

    DuckDB opens a file several times for one connection: the header may come from the old file, and the blocks from the
    one that replaced it. So the file is opened again until it is the same before and after.
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
    raise duckdb.IOException(
        f"for {_OPENING_S:.0f} s, the file was replaced during every attempt to open it; try again"
    )


def _name(path: Path) -> str:
    """An absolute path: DuckDB interprets ":memory:" and prefixes such as "md:" differently."""
    return str(path.absolute())


def _identity(path: Path) -> tuple[int, ...] | None:
    """Identifies a file, as opposed to one that replaces it; None if there is none."""
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
    """The content of the table `store_version`; None if there is no such table."""
    import duckdb

    try:
        return tuple(row[0] for row in connection.execute("SELECT version FROM store_version").fetchall())
    except duckdb.CatalogException:
        return None


def check_version(connection: duckdb.DuckDBPyConnection, store: Path | str, *known: int) -> int:
    """The version of a store, one of `known`, the newest last. Raises StoreError for any other, and if it is not a
    store.
    """
    found = version_in(connection)
    if found is None:
        raise StoreError(f"{store}: a DuckDB file, but not a tracekit store; choose another --store")
    if len(found) == 1 and found[0] in known:
        return found[0]
    shown = ", ".join(map(str, found)) or "none"
    newer = len(found) == 1 and found[0] > known[-1]
    advice = "a newer tracekit wrote it, upgrade this one" if newer else "use the tracekit that wrote it"
    raise StoreError(f"{store}: store version {shown}; this tracekit uses {known[-1]}: {advice}")
