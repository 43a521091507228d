"""The catalogue's file: its lock, the copy that a writer works on, how that replaces it, and how DuckDB opens it.

In: the path of a DuckDB file. Out: a connection that can access only that file; DuckDB's errors become ours.
Starting DuckDB takes ten times as long as attaching a catalogue, so each process starts it once and attaches a file
while it is open.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tracekit.base.atomic_write import Kind, OutputPlace
from tracekit.base.contained import Contained, opened_through_links
from tracekit.base.errors import StoreBusyError, StoreError, UnsafeFileError
from tracekit.base.paths import adding, command
from tracekit.base.stderr import say
from tracekit.base.text import printable

if TYPE_CHECKING:
    import duckdb

#: How long a writer waits for another one.
LOCK_TIMEOUT_S = 60.0
#: A writer that waits for longer says so: most wait for a moment.
WAIT_SHOWN_AFTER_S = 1.0
_POLL_S = 0.05
_COPY_PREFIX = ".tracekit.store-"
_BY_DESCRIPTOR = "/proc/self/fd/{}"
#: What NFS and others say of locks that they do not have.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
#: What to do with a store that is too old.
IMPORT_AGAIN = f"import its traces again with `{adding('NEW')}`"
#: The tables with rows about a window, those with rows about a job, and all tables of a catalogue (`schema.sql`).
OF_WINDOWS = ("files", "findings", "culprits", "costs", "windows")
OF_JOBS = (*OF_WINDOWS, "hosts", "gpus", "incidents", "beginnings", "watches", "endings", "jobs")
TABLES = frozenset({"store_version", *OF_JOBS})
#: Settings of a DuckDB that looks for nothing outside its database.
CLOSED: dict[str, str | bool | int | float | list[str]] = {
    "temp_directory": "",  # by default, it is in the current directory
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,  # no table is looked for among Python's variables
}
_VIEWS = "SELECT view_name FROM system.main.duckdb_views() WHERE database_name = $name AND schema_name = 'main'"
#: DuckDB attaches a file once at a time: reading threads take turns.
_ONE_READS = threading.RLock()
#: How long to retry opening a file that was replaced meanwhile: some file systems then lack it.
_OPENING_S = 60.0
#: DuckDB as started, by process: a fork starts its own.
_STARTED: dict[int, duckdb.DuckDBPyConnection] = {}
#: What a thread that reads has attached: process and path -> name, and by how many readers.
_READ: dict[tuple[int, str], tuple[str, int]] = {}
#: Descriptors of the files that are attached to be read, by their names there.
_OPEN: dict[str, int] = {}
#: A path by which DuckDB has a file.
_PATH_BY_DESCRIPTOR = re.compile(r"/proc/self/fd/[0-9]+(/[^\s\"]*)?")
#: Numbers the names under which files are attached, each used once.
_NUMBERS = itertools.count(1)


def is_duckdb(file: BinaryIO) -> bool:
    """Whether this is a DuckDB database; no other file has its mark at byte 8."""
    return file.read(12)[8:] == b"DUCK"


#: The kind of file that a catalogue may replace. Whether tracekit made it is known once DuckDB has opened it.
STORE_FILE = Kind("a tracekit store", is_duckdb)


def is_duckdb_file(path: Path) -> bool:
    """Whether a path, which can be a link, is a DuckDB file. Raises StoreError if it cannot be read."""
    try:
        with opened_through_links(path) as file:
            return file is not None and is_duckdb(file)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None


@dataclass(frozen=True, slots=True)
class CatalogueCopy:
    """A copy that will become the catalogue. `name`: of the copy in `folder`; nothing is there yet.

    `replaces`: whether there is a catalogue already.
    """

    folder: Contained
    name: str
    replaces: bool
    _place: OutputPlace
    _identity: tuple[int, ...] | None

    @property
    def path(self) -> Path:
        """The path of the copy."""
        return self.folder.root / self.name

    def fill(self) -> None:
        """Make it a copy of the catalogue."""
        with self.folder.reading(self._place.path.name) as old, self.folder.new(self.name) as new:
            shutil.copyfile(_BY_DESCRIPTOR.format(old.fileno()), _BY_DESCRIPTOR.format(new.fileno()))  # in the kernel

    def put(self) -> None:
        """Replace the catalogue by the copy, and sync it to the disk.

        Raises StoreBusyError if another program has changed the catalogue meanwhile.
        """
        if identity(self.folder.status(self._place.path.name)) != self._identity:
            raise StoreBusyError(f"{self._place.path}: another program has changed the store meanwhile; try again")
        self.folder.sync(self.name)
        self._place.put(self.path)
        self.folder.sync_folder()


@contextmanager
def catalogue_copy(path: Path) -> Iterator[CatalogueCopy]:
    """A copy of the catalogue at `path` to work on, for the process that has it `locked`; it is removed unless `put`.

    Raises OutputError or StoreError if something else is at `path` or it cannot be written.
    """
    place, folder = OutputPlace(path, STORE_FILE), Contained(path.parent)
    state = identity(folder.status(path.name))
    place.check()
    log = f"{path.name}.wal"
    if folder.status(log) is not None:  # DuckDB would add them to the store
        raise StoreError(
            f"{folder.root / log}: holds changes to the store that another program has not finished; open and close"
            f" {path} with DuckDB, or move this file away if there is no store"
        )
    _remove_copies(folder)  # left by killed writers: no other process writes now
    try:
        copy = f"{_COPY_PREFIX}{secrets.token_hex(4)}"
        yield CatalogueCopy(folder, copy, state is not None, place, state)
    except OSError as error:
        raise place.error(error) from None
    finally:
        _remove_copies(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process writes the catalogue at `path`, and keep others waiting.

    Raises StoreBusyError if that takes too long, OutputError if the lock cannot be written.
    """
    began, shown = time.monotonic(), False
    while (lock := _lock(path)) is None:
        waited_s = time.monotonic() - began
        if waited_s >= WAIT_SHOWN_AFTER_S and not shown:
            say(f"tracekit: {printable(str(path.parent))}: waiting for another writer, at most {LOCK_TIMEOUT_S:.0f} s")
            shown = True
        if waited_s > LOCK_TIMEOUT_S:
            raise StoreBusyError(
                f"{path.parent}: another process has been writing the store for {LOCK_TIMEOUT_S:.0f} s;"
                " try again when it is done"
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def excluding_writers(path: Path) -> Iterator[bool]:
    """Yield whether no process writes the catalogue at `path`; if so, writers wait until this ends. Changes nothing.

    The kernel releases the lock of a writer that ends, however it ends.
    """
    with ExitStack() as stack:
        alone = True
        try:
            lock = Contained(path.parent).open(lock_of(path))
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (OSError, UnsafeFileError) as error:
            alone = isinstance(error, FileNotFoundError)  # each writer begins with creating it
        yield alone


def lock_of(path: Path) -> str:
    """The name of a catalogue's lock, next to it."""
    return f".{path.name}.lock"


def _lock(path: Path) -> int | None:
    """The lock of a catalogue, open and held; None if another process holds it, or has just removed the store."""
    try:
        with ExitStack() as stack:
            lock = Contained(path.parent).open(lock_of(path), os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:
                    stack.pop_all()
                    return lock
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            raise StoreError(
                f"{path.parent}: its file system has no locks ({error.strerror}), so writers could not take turns;"
                " mount it with locks, or choose another --store"
            ) from None
        raise OutputPlace(path, STORE_FILE).error(error) from None
    return None


def _remove_copies(folder: Contained) -> None:
    """Remove copies, and what DuckDB creates next to them."""
    with suppress(OSError):
        for name in folder.files(""):
            if name.startswith(_COPY_PREFIX):
                folder.remove(name)


@contextmanager
def connected(
    path: Path, store: Path | str, *, read_only: bool, copy_of: Path | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the DuckDB file `path` of a store, named in errors; those of a copy name the file next to it that it is a
    `copy_of`. Raises StoreError, StoreBusyError if it is in use.
    """
    import duckdb

    try:
        with _reading(path, store) if read_only else _changing(path) as connection:
            yield connection
    except duckdb.Error as error:
        original = copy_of or path
        reason = _PATH_BY_DESCRIPTOR.sub(lambda _: str(original), str(error).splitlines()[0])
        reason = reason.replace(path.name, original.name)
        if "Could not set lock" not in reason:
            advice = "copy it again"
            if isinstance(store, Path):
                repair = command("store", "repair", "--store", store)
                advice = f"delete {original}, then `{repair}` rebuilds it from the traces, without incidents"
            raise StoreError(f"{store}: DuckDB cannot use the store: {reason}; if it is damaged, {advice}") from None
        raise StoreBusyError(
            f"{store}: another process has the store open (it takes one writer, or readers only); try again when it is"
            " done"
        ) from None


@contextmanager
def writing(path: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection that creates and changes tables in a file, or in ":memory:"."""
    name = f"catalogue_{next(_NUMBERS)}"
    try:
        with _duckdb().cursor() as connection:  # closing it ends its transaction
            _attach(connection, name, path)
            connection.execute(f"USE {name}")
            yield connection
    finally:
        _detach(name)


@contextmanager
def _changing(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection that creates or changes a file in the folder that has it now."""
    with Contained(path.parent).path_of(path.name) as real_path, writing(real_path) as connection:
        yield connection


@contextmanager
def _reading(path: Path, store: Path | str) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection that reads a file, in the state in which the thread reads it already, if it does.

    Nothing in a foreign file runs as part of our queries, since it could read other files of this machine: DuckDB's own
    functions come before macros of the file, and a view in place of a table raises StoreError.
    """
    key = os.getpid(), str(path.absolute())
    with _ONE_READS:
        name, readers = _READ.get(key, (f"catalogue_{next(_NUMBERS)}", 0))
        _READ[key] = name, readers + 1
        try:
            with _duckdb().cursor() as connection:
                if not readers:
                    _attach_to_read(connection, name, path)
                connection.execute(f"SET search_path = 'system.main,{name}.main'")
                views = {view.lower() for (view,) in connection.execute(_VIEWS, {"name": name}).fetchall()} & TABLES
                if views:
                    raise StoreError(f"{store}: not a store of tracekit: {min(views)} is a view there, not a table")
                yield connection
        finally:
            _, readers = _READ.pop(key)
            if readers > 1:
                _READ[key] = name, readers - 1
            else:
                _detach(name)


def _duckdb() -> duckdb.DuckDBPyConnection:
    """DuckDB in this process, without threads: a fork of a process with threads ends badly."""
    import duckdb

    started = _STARTED.get(os.getpid())
    if started is None:
        started = duckdb.connect(
            ":memory:",
            config={"threads": 1, **CLOSED},
        )
        with suppress(duckdb.CatalogException):  # before DuckDB 2, there were none
            started.execute("SET async_threads = 0")
        started = _STARTED.setdefault(os.getpid(), started)
    return started


def _detach(name: str) -> None:
    """Let go of a file. If DuckDB cannot, because a damaged file has made it unusable, it is started again."""
    import duckdb

    try:
        with _duckdb().cursor() as connection:
            connection.execute(f"DETACH DATABASE IF EXISTS {name}")
    except duckdb.Error:
        _STARTED.pop(os.getpid(), None)
    finally:
        if (handle := _OPEN.pop(name, None)) is not None:
            os.close(handle)


def _attach(connection: duckdb.DuckDBPyConnection, name: str, path: str, *, read_only: bool = False) -> None:
    quoted = path.replace("'", "''")
    connection.execute(f"ATTACH '{quoted}' AS {name} (TYPE duckdb{', READ_ONLY' if read_only else ''})")


def _attach_to_read(connection: duckdb.DuckDBPyConnection, name: str, path: Path) -> None:
    """Attach the file that is at a path now, by its descriptor: another can take its place, and DuckDB opens it several
    times. Raises StoreError if it is not a file, or cannot be read.
    """
    import duckdb

    folder, deadline = Contained(path.parent), time.monotonic() + _OPENING_S
    while True:
        try:
            folder.status(f"{path.name}.wal")  # DuckDB reads it, too
            handle = folder.open(path.name)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None
        _OPEN[name] = handle  # until it is detached: closing it would also let go of DuckDB's lock
        try:
            _attach(connection, name, f"/proc/self/fd/{handle}", read_only=True)
        except duckdb.Error:
            if identity(folder.status(path.name)) == state(name) or time.monotonic() > deadline:
                raise
            os.close(_OPEN.pop(name))
        else:
            return


def identity(status: os.stat_result | None) -> tuple[int, ...] | None:
    """Identifies a file and its state, as opposed to one that replaces it; None if there is none."""
    return None if status is None else (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def state(name: str) -> tuple[int, ...]:
    """The `identity` of the file that is attached under this name to be read."""
    status = os.fstat(_OPEN[name])
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def check_version(
    connection: duckdb.DuckDBPyConnection, store: Path | str, version: int, migrated: int | None = None
) -> int:
    """The version of a catalogue. Raises StoreError unless it is the given one, or the one that can be `migrated`."""
    import duckdb

    try:
        versions = [version for (version,) in connection.execute("SELECT version FROM store_version").fetchall()]
    except duckdb.CatalogException:
        raise StoreError(f"{store}: a DuckDB file, but not a tracekit store; choose another --store") from None
    if versions in ([version], [migrated]):
        return int(versions[0])
    newer = len(versions) == 1 and isinstance(versions[0], int) and versions[0] > version
    advice = "a newer tracekit wrote it, upgrade this one" if newer else IMPORT_AGAIN
    raise StoreError(
        f"{store}: store version {', '.join(map(str, versions)) or 'none'}; this tracekit uses {version}: {advice}"
    )


def insert(connection: duckdb.DuckDBPyConnection, table: str, *rows: Mapping[str, Any], verb: str = "INSERT") -> None:
    """Insert rows by the names of their columns; a time of any zone as DuckDB keeps it. To plan a statement takes a
    millisecond, as long as all else, so those of the same columns share one.
    """
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(row), []).append(row)
    for columns, same_columns in alike.items():
        stored = [row[column] for row in same_columns for column in columns]
        values = ", ".join([f"({', '.join('?' * len(columns))})"] * len(same_columns))
        parameters = [naive(value) if isinstance(value, datetime) else value for value in stored]
        connection.execute(f"{verb} INTO {table} ({', '.join(columns)}) VALUES {values}", parameters)


def naive(time: datetime) -> datetime:
    """The time as DuckDB keeps it, UTC."""
    return time.astimezone(UTC).replace(tzinfo=None)
