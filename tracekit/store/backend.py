"""Where a store is and in which form: a folder, or an address in S3.

In: a path. Out: the `Backend` that reads the store there.
"""

from __future__ import annotations

import os
from pathlib import Path

from tracekit.base.command_line import adding
from tracekit.base.errors import NotAStoreError, StoreError
from tracekit.base.s3 import s3_url
from tracekit.base.text import encodable
from tracekit.store.catalogue_file import is_duckdb_file
from tracekit.store.folder import Folder, is_store_folder, older_store
from tracekit.store.remote import Remote

#: Names the default store; without it the store is DEFAULT_NAME in the working directory.
STORE_VARIABLE = "TRACEKIT_STORE"
DEFAULT_NAME = "tracekit.store"

Backend = Folder | Remote


def default_store() -> Path:
    """`$TRACEKIT_STORE`, else tracekit.store in the working directory."""
    return Path(os.environ.get(STORE_VARIABLE) or DEFAULT_NAME)


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
    if is_duckdb_file(path):
        raise older_store(path)
    raise NotAStoreError(path, "not a tracekit store; pass a trace file without --store")


def is_store(path: Path) -> bool:
    """Whether there is a store, or a file that an older tracekit may have made one. Raises StoreError on failure."""
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
