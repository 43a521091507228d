"""Bounded searches of folders, so that nobody waits for one of a whole disk.

In: a folder. Out: its files, or FormatError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tracekit.base.errors import FormatError

#: A folder with more files and folders below it is not searched for a job.
MOST_ENTRIES = 50_000


class Search:
    """A search of a folder. `folders`: those that it has seen, by device and inode. `bounded`: it may end early."""

    def __init__(self, folder: Path, *, bounded: bool = True) -> None:
        self._folder, self._left = folder, MOST_ENTRIES if bounded else float("inf")
        self.folders: set[tuple[int, int]] = set()

    def count(self, entries: int) -> None:
        """Count entries that it looks at. Raises FormatError if they are too many."""
        self._left -= entries
        if self._left < 0:
            many = f"{MOST_ENTRIES:,} files and folders"
            raise FormatError(f"{self._folder}: not searched further after {many}; name the trace, or a smaller folder")


def files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and below it. Raises FormatError if they are too many."""
    search = Search(folder)
    for root, folders, names in os.walk(folder):
        search.count(len(folders) + len(names))
        yield from (Path(root) / name for name in sorted(names))
