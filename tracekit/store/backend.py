"""Where a store is and in which form: a folder, a single file of an older tracekit, an address in S3.

In: a path. Out: the `Backend` that reads the store there.
"""

from __future__ import annotations

import os
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import polars as pl

from tracekit.base.command_line import adding
from tracekit.base.errors import NotAStoreError, StoreError
from tracekit.base.s3 import s3_url
from tracekit.base.text import encodable
from tracekit.store.catalogue import Catalogue
from tracekit.store.catalogue_file import is_duckdb
from tracekit.store.folder import Folder, is_store_folder
from tracekit.store.hangs import StoredHang
from tracekit.store.remote import Remote
from tracekit.store.single_file import SingleFile
from tracekit.store.window import AnyTrace, StoredWindow

#: Names the default store; without it the store is DEFAULT_NAME in the working directory.
STORE_VARIABLE = "TRACEKIT_STORE"
DEFAULT_NAME, OLD_DEFAULT_NAME = "tracekit.store", "tracekit.duckdb"


def default_store() -> Path:
    """`$TRACEKIT_STORE`, else tracekit.store in the working directory, or a tracekit.duckdb of an older version."""
    if named := os.environ.get(STORE_VARIABLE):
        return Path(named)
    new, old = Path(DEFAULT_NAME), Path(OLD_DEFAULT_NAME)
    return old if old.exists() and not new.exists() else new


class Backend(Protocol):
    """Reads one form of a store."""

    def reading(self) -> AbstractContextManager[Catalogue]:
        """The catalogue as it is now."""

    def trace(self, window: StoredWindow) -> AnyTrace:
        """The trace of a window."""

    def report(self, window: StoredWindow) -> str | None:
        """The report on it as JSON; None if there is none."""

    def workers(self, window: StoredWindow) -> pl.DataFrame | None:
        """S of each worker in each step, as in `WorkerSlowdowns.rows`; None if there is none."""

    def hangs(self, job: str | None) -> tuple[StoredHang, ...]:
        """The reports on hangs, of one job or of all, newest first."""


def backend_of(path: Path) -> Backend:
    """What reads the store at `path`. Raises StoreError if there is none."""
    if (remote := remote_of(path)) is not None:
        if not remote.exists():
            raise remote.missing()
        return remote
    if not exists(path):
        raise StoreError(f"{path}: no such store; make one with `{adding(path)}`")
    if path.is_dir():
        if not is_store_folder(path):
            raise NotAStoreError(path, "a folder, but not a tracekit store; choose another --store")
        return Folder(path)
    if not is_duckdb_file(path):
        raise NotAStoreError(path, "not a tracekit store; pass a trace file without --store")
    return SingleFile(path)


def is_store(path: Path) -> bool:
    """Whether there is a store, or a DuckDB file that may be one. Raises StoreError if it cannot be read."""
    if (remote := remote_of(path)) is not None:
        return remote.exists()
    return exists(path) and (is_store_folder(path) if path.is_dir() else is_duckdb_file(path))


def remote_of(path: Path) -> Remote | None:
    """The store at an address in S3; None for a path."""
    url = s3_url(path)
    return None if url is None else Remote(url)


def check_encodable(path: Path) -> None:
    """Raise StoreError for a path that is not UTF-8, which DuckDB cannot open."""
    if encodable(str(path)) != str(path):
        raise StoreError(f"{path}: DuckDB needs a path in UTF-8; choose another --store")


def exists(path: Path) -> bool:
    """Whether anything is at a path. Raises StoreError if that cannot be determined."""
    check_encodable(path)
    try:
        return path.exists()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None


def is_duckdb_file(path: Path) -> bool:
    """Whether a path is a DuckDB file. Raises StoreError if it cannot be read."""
    try:  # must not wait for the writer of a pipe
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_duckdb(file)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}; check the path") from None
