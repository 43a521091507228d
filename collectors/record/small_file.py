"""Reads and creates files in folders where others may have put something else, and loads pickles of plain values.

No call waits for a pipe, or follows a link in the last part of a path. Imports the standard library only: it runs where
the training does.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

#: The files that control a run are smaller.
MOST_BYTES = 64 << 10
#: How often a file that is followed is checked, seconds.
FOLLOWING_PERIOD_S = 0.25
#: The state of a rank, and a report on a hang of thousands of ranks, are smaller.
MOST_DUMP_BYTES = 64 << 20


def open_regular(path: Path | str, flags: int = os.O_RDONLY, *, folder: int | None = None, follow: bool = False) -> int:
    """A descriptor of a regular file; with O_CREAT of a new or existing one. Raises OSError.

    `folder`: descriptor of its folder. `follow`: through links, which is safe for reading only.
    """
    safe = flags | (0 if follow else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        handle = os.open(path, safe, 0o644, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link, which is not followed", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return handle


def read_small(path: Path | str, most: int = MOST_BYTES, *, folder: int | None = None) -> bytes:
    """The content of a regular file. Raises OSError, also if it has more than `most` bytes."""
    with open(open_regular(path, folder=folder), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", os.fspath(path))
    return content


class FollowedFile:
    """A file of a run that others put in place or replace while the job runs, checked several times a second.

    `changed_ns`: when its newest version was written, ns since the epoch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed_ns = 0
        self._read: tuple[int, int] | None = None
        self._unreadable: tuple[int, int] | None = None
        self._due = 0.0

    def new_content(self) -> bytes | None:
        """The content, if that is news; cheap enough to call in a loop.

        Raises OSError, once for each version, if it cannot be read; every later call tries it again.
        """
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + FOLLOWING_PERIOD_S
        try:
            status = self.path.lstat()
        except OSError:  # there is none, or its folder is out of reach for a moment
            return None
        version = (status.st_mtime_ns, status.st_ino)
        if version == self._read:
            return None
        self.changed_ns = status.st_mtime_ns
        try:
            content = read_small(self.path)
        except FileNotFoundError:  # it is gone again
            return None
        except OSError:
            if version == self._unreadable:
                return None
            self._unreadable = version
            raise
        self._read = version
        return content


def open_to_read(path: Path | str) -> BinaryIO:
    """A regular file of a recording, perhaps through links. Raises OSError."""
    return open(open_regular(path, follow=True), "rb")


def create(path: Path | str, *, append: bool = False, folder: int | None = None) -> BinaryIO:
    """A file to write, without a buffer. Raises FileExistsError unless it is new, or `append`; other OSErrors."""
    mode_flags = os.O_APPEND if append else os.O_EXCL
    return open(open_regular(path, os.O_WRONLY | os.O_CREAT | mode_flags, folder=folder), "wb", buffering=0)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all of `data`. Raises OSError: a full disk accepts what fits, and fails on the next call."""
    written = file.write(data)
    while written < len(data):
        written += file.write(data[written:])


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: it exists complete or not at all, and replaces an existing file. Raises OSError."""
    partial = path.with_name(f".{path.name}")
    partial.unlink(missing_ok=True)
    with create(partial) as file:
        write_all(file, content)
    partial.rename(path)


class RefusedPickleError(pickle.UnpicklingError):
    """A pickle that contains more than plain values; the message is a clause to follow the pickle's name."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(f"refused: it asks for {module}.{name}, but a dump holds only plain values")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise RefusedPickleError(f"refused: it refers to an object outside itself, by a {type(pid).__name__}")


def load_plain(content: bytes) -> Any:
    """The contents of a pickle. Raises RefusedPickleError, or any of `DAMAGE` if the pickle is damaged."""
    return _PlainUnpickler(io.BytesIO(content)).load()


#: Errors of unpickling damaged bytes, except MemoryError, which is left to the caller.
DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
)
