"""One look at a path, shared by all who ask what the path is.

In: a path. Out: its type, its first and last bytes and the entries of a folder, each read at most once. Nothing here
raises an OSError: what cannot be read is empty, and the reader of the file reports why.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

#: How much of a file is read to recognise it, bytes.
HEAD_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"


def unpacked(beginning: bytes) -> bytes:
    """As many first bytes of a file, unpacked if it is gzipped; none if its stream is damaged there."""
    if not beginning.startswith(_GZIP):
        return beginning
    try:
        return zlib.decompressobj(wbits=31).decompress(beginning, len(beginning))
    except zlib.error:
        return b""


class Look:
    """What can be seen of a path without reading all of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @cached_property
    def _mode(self) -> int:
        """Type and permissions, 0 if nothing can be seen at the path."""
        try:
            return self.path.stat().st_mode
        except (OSError, ValueError):
            return 0

    @cached_property
    def exists(self) -> bool:
        """Whether anything is at the path, be it a link that leads nowhere."""
        return os.path.lexists(self.path)

    @property
    def is_folder(self) -> bool:
        """Whether the path leads to a folder."""
        return stat.S_ISDIR(self._mode)

    @property
    def is_file(self) -> bool:
        """Whether the path leads to a regular file: a pipe or a device might block for ever."""
        return stat.S_ISREG(self._mode)

    @cached_property
    def is_readable(self) -> bool:
        """Whether the path is a file that can be read."""
        if not self.is_file:
            return False
        try:
            self._bytes(0, 1)
        except OSError:
            return False
        return True

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file, as they are stored."""
        return self.beginning(HEAD_BYTES)

    @cached_property
    def text(self) -> bytes:
        """The first bytes of the file, unpacked; none if its gzip stream is damaged there."""
        return unpacked(self.head)

    @cached_property
    def tail(self) -> bytes:
        """The last bytes of a file that has more than `head`: a job that hung says so at the end."""
        if len(self.head) < HEAD_BYTES:
            return b""
        try:
            return self._bytes(max(HEAD_BYTES, self.path.stat().st_size - HEAD_BYTES), HEAD_BYTES)
        except OSError:
            return b""

    def beginning(self, most: int) -> bytes:
        """At most so many first bytes of the file, as they are stored."""
        try:
            return self._bytes(0, most) if self.is_file else b""
        except OSError:
            return b""

    @cached_property
    def entries(self) -> tuple[Look, ...]:
        """What is directly in the folder, by name."""
        try:
            return tuple(map(Look, sorted(self.path.iterdir()))) if self.is_folder else ()
        except OSError:
            return ()

    def files(self, endings: tuple[str, ...] = ("",)) -> Iterator[Look]:
        """The regular files directly in the folder whose names end so, by name."""
        return (entry for entry in self.entries if entry.name.endswith(endings) and entry.is_file)

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name."""
        return self.is_folder and os.path.lexists(self.path / name)

    def _bytes(self, offset: int, size: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
