"""The catalogue's file: its lock, the copy that a writer works on, and how that replaces it."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tracekit.base.atomic_write import Kind, Place
from tracekit.base.errors import StoreBusyError, StoreError
from tracekit.store.connection import identity

#: How long a writer waits for another one.
LOCK_TIMEOUT_S = 60.0
_POLL_S = 0.05
_COPY_PREFIX = ".tracekit.store-"


def is_duckdb(file: BinaryIO) -> bool:
    """Whether this is a DuckDB database; no other file has its mark at byte 8."""
    return file.read(12)[8:] == b"DUCK"


#: The kind of file that a catalogue may replace. Whether tracekit made it is known once DuckDB has opened it.
STORE_FILE = Kind("a tracekit store", is_duckdb)


def is_duckdb_file(path: Path) -> bool:
    """Whether a path is a DuckDB file. Raises StoreError if it cannot be read."""
    try:  # must not wait for the writer of a pipe
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_duckdb(file)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None


@dataclass(frozen=True, slots=True)
class CatalogueCopy:
    """A copy that will become the catalogue. `path`: where to create it; nothing is there yet.

    `replaces`: whether there is a catalogue already.
    """

    path: Path
    replaces: bool
    _place: Place
    _found: tuple[int, ...] | None

    def put(self) -> None:
        """Replace the catalogue by the copy, and sync it to the disk.

        Raises StoreBusyError if another program has changed the catalogue meanwhile.
        """
        if identity(self._place.path) != self._found:
            raise StoreBusyError(f"{self._place.path}: another program has changed the store meanwhile; try again")
        sync(self.path)
        self._place.put(self.path)
        sync(self._place.path.parent)


@contextmanager
def catalogue_copy(path: Path) -> Iterator[CatalogueCopy]:
    """A copy of the catalogue at `path` to work on, for the process that has it `locked`; it is removed unless `put`.

    Raises OutputError or StoreError if something else is at `path` or it cannot be written.
    """
    place = Place(path, STORE_FILE)
    found = place.check() and identity(path)
    if os.path.lexists(log := f"{path}.wal"):  # DuckDB would add them to the store
        raise StoreError(
            f"{log}: holds changes to the store that another program has not finished; open and close {path} with"
            " DuckDB, or move this file away if there is no store"
        )
    _remove_copies(path.parent)  # killed writers left them: nobody else is writing now
    try:
        copy = path.with_name(f"{_COPY_PREFIX}{secrets.token_hex(4)}")
        yield CatalogueCopy(copy, found is not None, place, found)
    except OSError as error:
        raise place.error(error) from None
    finally:
        _remove_copies(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process writes the catalogue at `path`, and keep others waiting.

    Raises StoreBusyError if that takes too long, OutputError if the lock cannot be written.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while (lock := _lock(path)) is None:
        if time.monotonic() > deadline:
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
def if_nobody_writes(path: Path) -> Iterator[bool]:
    """Whether no process writes the catalogue at `path`; if so, writers wait meanwhile. Changes nothing.

    The kernel releases the lock of a writer that ends, however it ends.
    """
    with ExitStack() as stack:
        alone = True
        try:
            lock = os.open(_lock_of(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            alone = isinstance(error, FileNotFoundError)  # each writer begins with creating it
        yield alone


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _lock(path: Path) -> int | None:
    """The lock of a catalogue, open and held; None if another process holds it, or has just removed the store."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with ExitStack() as stack:
            lock = os.open(_lock_of(path), flags, 0o666)
            stack.callback(os.close, lock)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:
                    stack.pop_all()
                    return lock
    except OSError as error:
        raise Place(path, STORE_FILE).error(error) from None
    return None


def _remove_copies(folder: Path) -> None:
    """Remove copies, and what DuckDB creates next to them."""
    for left in folder.glob(f"{_COPY_PREFIX}*"):
        with suppress(OSError):
            left.unlink()


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some file systems cannot do so for folders
            os.fsync(handle)
    finally:
        os.close(handle)
