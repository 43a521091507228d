"""When the windows of a job ran, on one axis: by their clocks where these agree, by their steps where they do not.

In: rows of the catalogue, oldest first. Out: a stretch of the axis for each window. Windows are stored in the order of
their steps, so a clock that puts one before its predecessor is wrong. Such a window follows its predecessor, for as
long as its steps took: what it lost is known although its time of day is not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from tracekit.base.text import ranks_text

#: How far ahead of the store's clock a clock may be, seconds: a window further ahead was stored before it ran.
_AHEAD_S = 60.0
#: Twice what a double resolves of seconds since the epoch, and more.
LEAST_DATED_S = 1e-6

Row = Mapping[str, Any]


class Stretch(Struct, frozen=True):
    """A window on the axis, seconds after its origin. `dated`: its clock agrees with the others, so it says when."""

    start_s: float
    until_s: float
    dated: bool


class Axis(Struct, frozen=True):
    """The stretch of each window, in order, and the end of the run, `end_s`. `origin_s`: seconds since the epoch, None
    if no window says when it ran. `notes`: which clocks disagree.
    """

    stretches: Sequence[Stretch]
    end_s: float
    origin_s: float | None
    notes: Sequence[str]


def axis_of(rows: Sequence[Row], lengths_s: Sequence[float]) -> Axis:
    """The axis of a job. `lengths_s`: of its windows, by their steps."""
    dated = _have_agreeing_clocks(rows, lengths_s)
    if not any(dated):
        origin_s, at_s = None, 0.0
    else:
        first = dated.index(True)
        begins_s = rows[first]["started_at"] - sum(lengths_s[:first])
        at_s = _start_up_s(rows[0], begins_s, lengths_s[0])
        origin_s = begins_s - at_s
    stretches = list[Stretch]()
    for row, length_s, is_dated in zip(rows, lengths_s, dated, strict=True):
        if is_dated:
            start_s = row["started_at"] - origin_s
            start_s = at_s if start_s < at_s + LEAST_DATED_S else start_s
            stretches.append(Stretch(start_s, start_s + _clocked_s(row), is_dated))
        else:
            stretches.append(Stretch(at_s, at_s + length_s, is_dated))
        at_s = stretches[-1].until_s
    if origin_s is not None:
        at_s += _still_watched_s(rows[-1], origin_s + at_s)
    return Axis(stretches, at_s, origin_s, tuple(_notes(rows, dated)))


def _have_agreeing_clocks(rows: Sequence[Row], lengths_s: Sequence[float]) -> list[bool]:
    """Whether the clock of each window agrees with those of the others: the most windows of which each begins once the
    last step of the one before has begun. A window that would have been stored before it ran does not, unless all are
    so, by a clock that is ahead throughout.
    """
    sized = enumerate(zip(rows, lengths_s, strict=True))
    timed = [index for index, (row, length_s) in sized if row["started_at"] is not None and _is_whole(row, length_s)]
    before_stored = [index for index in timed if rows[index]["ended_at"] <= rows[index]["added_s"] + _AHEAD_S]
    agree = set(_longest_chain(rows, before_stored or timed))
    return [index in agree for index in range(len(rows))]


def _is_whole(row: Row, length_s: float) -> bool:
    """Whether the clock of a window shows at least half the time that its steps took."""
    return row["ended_at"] >= row["started_at"] and 2 * _clocked_s(row) >= length_s


def _longest_chain(rows: Sequence[Row], timed: Sequence[int]) -> Iterator[int]:
    """Yield the most windows that follow one another, the last one first."""
    ends, last = list[float](), list[int]()  # of chains of 1, 2, ... windows, those that end first
    before = dict[int, int | None]()
    for index in timed:
        longest = bisect_right(ends, rows[index]["started_at"])
        before[index] = last[longest - 1] if longest else None
        if longest == len(ends):
            ends.append(rows[index]["ended_at"])
            last.append(index)
        elif rows[index]["ended_at"] < ends[longest]:
            ends[longest], last[longest] = rows[index]["ended_at"], index
    link = last[-1] if last else None
    while link is not None:
        yield link
        link = before[link]


def _clocked_s(row: Row) -> float:
    """The duration of a window by its clock, seconds: its last step counts as a mean one."""
    length_s: float = row["ended_at"] - row["started_at"] + (row["recorded_s"] or 0.0)
    return length_s


def _start_up_s(row: Row, begins_s: float, length_s: float) -> float:
    """Seconds from the begin of the watch to the first window: by the clock of the store alone where that of the window
    is ahead of it; 0 if the window began before the watch did.
    """
    began_s: float | None = row["began_s"]
    if began_s is None:
        return 0.0
    if begins_s > row["added_s"]:
        return max(float(row["added_s"]) - length_s - began_s, 0.0)
    return max(begins_s - began_s, 0.0)


def _still_watched_s(row: Row, ends_s: float) -> float:
    """Seconds from the end of the last window to the end of the watch; by the clock of the store alone, from when the
    window was stored, unless the window ended during the watch; 0 if an earlier watch has stored it.
    """
    if row["watched_until_s"] is None or row["added_s"] < row["began_s"]:
        return 0.0
    during = row["began_s"] <= ends_s <= row["added_s"]
    return max(float(row["watched_until_s"]) - (ends_s if during else row["added_s"]), 0.0)


def _notes(rows: Sequence[Row], dated: Sequence[bool]) -> Iterator[str]:
    pairs = zip(rows, dated, strict=True)
    wrong = [row["number"] for row, is_dated in pairs if row["started_at"] is not None and not is_dated]
    if wrong:
        names = ranks_text(wrong, name="window")
        yield f"{names}: the clock contradicts that of other windows, so steps say when they ran; compare the clocks"
