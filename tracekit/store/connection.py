"""Open DuckDB files, converting DuckDB's errors to ours.

In: the path of a DuckDB file. Out: a connection that can access only that file. To start DuckDB takes ten times as long
as to open a catalogue, so each process starts it once, and attaches a file for as long as it is open.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import StoreBusyError, StoreError

if TYPE_CHECKING:
    import duckdb

#: DuckDB attaches a file once at a time: reading threads take turns. What the one whose turn it is has open:
_ONE_READS = threading.RLock()
_READING: list[str] = []
#: How long to retry opening a file that was replaced meanwhile. A writer takes many times as long as opening, so a
#: second attempt is rare.
_OPENING_S = 60.0
#: DuckDB as started, by process, since a fork starts its own, and by how often it has the file open already.
_STARTED: dict[tuple[int, int], duckdb.DuckDBPyConnection] = {}
#: Files are attached under names that nobody uses again.
_NUMBERS = itertools.count(1)
_CREATED = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
_OF_SINGLE_FILES = frozenset({"job", "op", "step", "report", "worker_slowdown"})


@contextmanager
def connected(path: Path, store: Path | str, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the DuckDB file `path` of a store, named in errors. Raises StoreError, StoreBusyError if it is in use."""
    import duckdb

    try:
        if not read_only:
            with _attached(path, read_only=False) as connection:
                yield connection
            return
        with _ONE_READS, _attached(path, read_only=True) as connection:
            _make_safe(connection, store)
            _READING.append(_name(path))
            try:
                yield connection
            finally:
                _READING.pop()
    except duckdb.Error as error:
        raise _store_error(error, store) from None


@contextmanager
def in_memory() -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to an empty database that goes with it."""
    with _attached(None, read_only=False) as connection:
        yield connection


def _duckdb(which: tuple[int, int]) -> duckdb.DuckDBPyConnection:
    """DuckDB, see `_STARTED`, without threads of its own: a process that has some ends badly in a fork of it."""
    import duckdb

    started = _STARTED.get(which)
    if started is None:
        nothing_else = ("autoinstall_known_extensions", "autoload_known_extensions", "python_enable_replacements")
        started = duckdb.connect(":memory:", config={"threads": 1, **dict.fromkeys(nothing_else, False)})
        with suppress(duckdb.CatalogException):  # before DuckDB 2, there were none
            started.execute("SET async_threads = 0")
        started = _STARTED.setdefault(which, started)
    return started


@contextmanager
def _attached(path: Path | None, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to a file, None: to memory, that finds its tables. Raises duckdb.Error."""
    times = _READING.count(_name(path)) if path is not None and read_only else 0
    which, name = (os.getpid(), times), f"catalogue_{next(_NUMBERS)}"
    connection = _duckdb(which).cursor()
    try:
        if path is None or not read_only:
            _attach(connection, name, ":memory:" if path is None else _name(path))
        else:
            _attach_to_read(connection, name, path)
        connection.execute(f"USE {name}")
        yield connection
    finally:
        connection.close()  # ends its transaction
        _detach(which, name)


def _detach(which: tuple[int, int], name: str) -> None:
    """Let go of a file. If DuckDB cannot, because a damaged file has made it unusable, it is started again."""
    import duckdb

    try:
        with _duckdb(which).cursor() as connection:
            connection.execute(f"DETACH DATABASE IF EXISTS {name}")
    except duckdb.Error:
        _STARTED.pop(which, None)


def _attach(connection: duckdb.DuckDBPyConnection, name: str, path: str, *, read_only: bool = False) -> None:
    quoted = path.replace("'", "''")
    connection.execute(f"ATTACH '{quoted}' AS {name} (TYPE duckdb{', READ_ONLY' if read_only else ''})")


def _attach_to_read(connection: duckdb.DuckDBPyConnection, name: str, path: Path) -> None:
    """Attach one state of a file that writers replace.

    DuckDB opens a file several times to attach it: the header may come from the old file, and the blocks from the one
    that replaced it. So the file is attached again until it is the same before and after.
    """
    import duckdb

    deadline = time.monotonic() + _OPENING_S
    while time.monotonic() < deadline:
        before = _identity(path)
        try:
            _attach(connection, name, _name(path), read_only=True)
        except duckdb.Error:
            if _identity(path) == before:
                raise
            continue
        if _identity(path) == before:
            return
        connection.execute(f"DETACH {name}")
    raise duckdb.IOException(
        f"for {_OPENING_S:.0f} s, the file was replaced during every attempt to open it; try again"
    )


def _make_safe(connection: duckdb.DuckDBPyConnection, store: Path | str) -> None:
    """Let nothing in a foreign file run as part of our queries: it could read other files of this machine.

    Raises StoreError if there are views in place of tables. DuckDB's own functions come before macros of the file.
    """
    (name,) = connection.execute("SELECT current_database()").fetchall()[0]
    views = "SELECT view_name FROM duckdb_views() WHERE NOT internal AND database_name = $name"
    found = {view.lower() for (view,) in connection.execute(views, {"name": name}).fetchall()} & _tables()
    if found:
        raise StoreError(f"{store}: not a store of tracekit: {min(found)} is a view there, not a table")
    connection.execute(f"SET search_path = 'system.main,{name}.main'")


@cache
def _tables() -> frozenset[str]:
    """The tables of stores, of any version."""
    scripts = [file for file in files("tracekit.store").iterdir() if file.name.endswith(".sql")]
    created = (_CREATED.findall(script.read_text(encoding="utf-8")) for script in scripts)
    return _OF_SINGLE_FILES.union(*created)


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
