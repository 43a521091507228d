"""What people do about incidents: who takes one, until when messages about it are muted, and notes.

    STORE/handled/<incident>     a line of JSON for each change, oldest first

In: the folder of a store and the number of an incident. Out: its changes. A change is a line that is appended, so if
two people write at once, both are kept. A damaged line is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

FOLDER = "handled"
#: The most characters of an owner or a note.
LONGEST_TEXT = 1000


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change: `at` and `muted_until` in seconds since the epoch; what is None stays as it was."""

    at: float
    by: str
    owner: str | None = None
    muted_until: float | None = None
    note: str | None = None


def write_change(store: Path, incident: int, change: Change) -> None:
    """Append a change. Raises OSError."""
    folder = store / FOLDER
    folder.mkdir(exist_ok=True)
    file = os.open(folder / str(incident), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, msgspec.json.encode(change) + b"\n")  # one write, so that lines of two writers do not mix
    finally:
        os.close(file)


def read_changes(store: Path, incident: int) -> tuple[Change, ...]:
    """The changes of an incident, oldest first; none where there is no file."""
    changes = []
    with suppress(OSError):
        for line in (store / FOLDER / str(incident)).read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                changes.append(msgspec.json.decode(line, type=Change))
    return tuple(changes)


def is_muted(changes: Sequence[Change], now: float) -> bool:
    """Whether the last change that says until when the incident is muted says so of now."""
    until = [change.muted_until for change in changes if change.muted_until is not None]
    return bool(until) and until[-1] > now
