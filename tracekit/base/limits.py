"""Limits for input from others: the time of a query, regular expressions, searches of folders, figures of a report.

In: seconds around the work, patterns and names from outside, a folder. Out: the answer, or one error once it takes
too long, reads too much, or cannot be understood. Ranges of figures are types, which msgspec checks as it decodes a
report, and which the JSON Schema states: a figure outside its range is refused by the path of its key.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from tracekit.base.errors import FormatError, TimeLimitError
from tracekit.base.text import LAST_MOMENT, quoted

#: A sum or a difference may miss its range by so much.
ROUNDING = 1e-6
#: The largest whole number of a table; larger figures overflow once they are scaled.
_LARGEST = 2**63 - 1
_LARGEST_INT32 = 2**31 - 1

#: A figure of either sign: what a fix saves, or how far a clock is ahead.
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
#: An undefined figure is null.
Number = Finite | None
#: A figure that is never negative, in any unit.
Amount = Annotated[float, Meta(ge=-ROUNDING, le=_LARGEST)]
#: How long something takes.
Seconds = Amount
#: Seconds since 1970.
Moment = Annotated[float, Meta(ge=0, le=LAST_MOMENT)]
#: A share of a whole, or how sure something is.
Proportion = Annotated[float, Meta(ge=-ROUNDING, le=1 + ROUNDING)]
#: A waste, 1 - 1/S, or another figure that is 1 at most and can be negative.
AtMostOne = Annotated[float, Meta(ge=-_LARGEST, le=1 + ROUNDING)]
#: S: how many times as long something takes.
Slowdown = Annotated[float, Meta(gt=0, le=_LARGEST)]
#: How many, or the place in a list.
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
#: The number of a rank, of a pipeline stage or of a training step.
Ordinal = Annotated[int, Meta(ge=0, le=_LARGEST_INT32)]

#: Until when, by the monotonic clock, and how many seconds that were; the latter for the message.
_limit: ContextVar[tuple[float, float] | None] = ContextVar("limit", default=None)
#: A longer pattern is no question of a person.
LONGEST_PATTERN = 200
#: Characters searched between two looks at the time, and at Ctrl-C.
_AT_ONCE = 1 << 16
#: A folder with more files and folders below it is not searched for a job.
MOST_ENTRIES = 50_000
#: What the kernel shows as folders is no place for jobs, and has no end.
OF_KERNEL = ("/proc", "/sys", "/dev")


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
    """A search of a folder. `folders`: by device and inode, those that it passes over. `bounded`: it may end early."""

    def __init__(self, folder: Path, *, bounded: bool = True) -> None:
        self._folder, self._entries_left = folder, MOST_ENTRIES if bounded else float("inf")
        self.folders = {(status.st_dev, status.st_ino) for status in map(os.stat, filter(os.path.isdir, OF_KERNEL))}

    def count(self, entries: int) -> None:
        """Count entries that it looks at. Raises FormatError if they are too many."""
        self._entries_left -= entries
        if self._entries_left < 0:
            many = f"{MOST_ENTRIES:,} files and folders"
            raise FormatError(f"{self._folder}: not searched further after {many}; name the trace, or a smaller folder")


def files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and below it. Raises FormatError if they are too many."""
    search = Search(folder)
    for root, folders, names in os.walk(folder):
        search.count(len(folders) + len(names))
        yield from (Path(root) / name for name in sorted(names))
