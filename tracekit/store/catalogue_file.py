"""The catalogue's file: its lock, the copy that a writer works on, and how that replaces it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tracekit.base.atomic_write import Kind, OutputPlace
from tracekit.base.contained import Contained, opened_through_links
from tracekit.base.errors import StoreBusyError, StoreError, UnsafeFileError
from tracekit.store.connection import identity

#: How long a writer waits for another one.
LOCK_TIMEOUT_S = 60.0
_POLL_S = 0.05
_COPY_PREFIX = ".tracekit.store-"
_BY_DESCRIPTOR = "/proc/self/fd/{}"
#: What NFS and others say of locks that they do not have.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


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
    _found: tuple[int, ...] | None

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
        if identity(self.folder.status(self._place.path.name)) != self._found:
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
    _remove_copies(folder)  # killed writers left them: nobody else is writing now
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
