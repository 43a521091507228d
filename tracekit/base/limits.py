"""Limits for input from others: the time of a query, regular expressions, searches of folders.

In: seconds around the work, patterns and names from outside, a folder. Out: the answer, or one error once it takes
too long, reads too much, or cannot be understood.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from tracekit.base.errors import FormatError, TimeLimitError
from tracekit.base.text import quoted

#: Until when, by the monotonic clock, and how many seconds that were; the latter for the message.
_limit: ContextVar[tuple[float, float] | None] = ContextVar("limit", default=None)
#: A longer pattern is no question of a person.
LONGEST_PATTERN = 200
#: Characters searched between two looks at the time, and at Ctrl-C.
_AT_ONCE = 1 << 16
#: A folder with more files and folders below it is not searched for a job.
MOST_ENTRIES = 50_000


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let the work inside take at most that long, until it next calls `check_time`; a limit around it holds, too.

    The limit holds in the thread that set it; without one, nothing is limited.
    """
    outer = _limit.get()
    inner = (time.monotonic() + seconds, seconds)
    before = _limit.set(inner if outer is None else min(inner, outer))
    try:
        yield
    finally:
        _limit.reset(before)


def check_time() -> None:
    """Raise TimeLimitError if the time of this thread's `time_limit` is over."""
    limit = _limit.get()
    if limit is not None and time.monotonic() > limit[0]:
        raise TimeLimitError(
            f"it took longer than {limit[1]:g} s; ask for less at a time, such as `worker=1,2` or `step=100-105`"
        )


def check_pattern(pattern: str, *, any_case: bool = False) -> None:
    """Raise ValueError for what is no pattern, or one too large.

    The engine is Rust's, linear in the names: it has neither look-around nor backreferences, limits the size of
    patterns, and releases the GIL.
    """
    search(pattern, ("",), any_case=any_case)


def search(pattern: str, names: Sequence[str], *, any_case: bool = False) -> list[bool]:
    """Whether `pattern` matches each name anywhere. Raises ValueError as `check_pattern`, and TimeLimitError."""
    import polars as pl  # `--help` needs none

    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"{quoted(pattern, 40)} has {len(pattern):,} characters, more than {LONGEST_PATTERN}")
    matched: list[bool] = []
    for part in _some_at_once(names):
        try:
            matched += pl.Series(part, dtype=pl.String).str.contains("(?i)" * any_case + pattern).to_list()
        except pl.exceptions.ComputeError as error:
            why = str(error).partition("\n\n")[0].splitlines()[-1].rpartition("error: ")[2]
            raise ValueError(f"{quoted(pattern)} is not a regular expression: {why}") from None
        check_time()
    return matched


def _some_at_once(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The names in order, about `_AT_ONCE` characters of them at a time."""
    first = characters = 0
    for number, name in enumerate(names, 1):
        characters += len(name)
        if characters >= _AT_ONCE or number == len(names):
            yield names[first:number]
            first, characters = number, 0


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
