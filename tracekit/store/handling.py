"""What people do about incidents, and which fixes they applied.

    STORE/handled/<incident>     a line of JSON for each change: who takes it, until when messages are muted, notes
    STORE/handled/fixes          a line of JSON for each fix that was applied

In: the folder of a store. Out: changes and fixes, oldest first. Each is a line that is appended, so if two people write
at once, both are kept. A damaged line is left out.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from tracekit.base.contained import Contained
from tracekit.base.errors import SelectionError, UnsafeFileError
from tracekit.base.text import LAST_MOMENT
from tracekit.report.applied import AppliedFix

HANDLED, FIXES = "handled", "fixes"
#: The most characters of an owner or a note.
LONGEST_TEXT = 1000

#: Seconds since the epoch.
_Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_MOMENT)]
_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]

_Record = TypeVar("_Record", bound=msgspec.Struct)


class IncidentChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change: `changed_at` and `muted_until` in seconds since the epoch; what is None stays as it was."""

    changed_at: _Moment = msgspec.field(name="at")
    by: _Text
    owner: _Text | None = None
    muted_until: _Moment | None = None
    note: _Text | None = None


def current_user() -> str:
    """The user who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, a number may have no name
        return f"user {os.getuid()}"


def write_change(store: Path, incident: int, change: IncidentChange) -> None:
    """Append a change. Raises SelectionError for a text that is too long, OSError, UnsafeFileError."""
    if max(len(change.owner or ""), len(change.note or "")) > LONGEST_TEXT:
        raise SelectionError(f"an owner and a note have at most {LONGEST_TEXT:,} characters")
    _append(store, str(incident), change)


def write_applied(store: Path, fix: AppliedFix) -> None:
    """Append a fix that was applied. Raises OSError, UnsafeFileError."""
    _append(store, FIXES, fix)


def _append(store: Path, name: str, record: msgspec.Struct) -> None:
    folder = Contained(store)
    folder.make_folder(HANDLED, lasting=True)
    folder.append(f"{HANDLED}/{name}", msgspec.json.encode(record) + b"\n", lasting=True)
    folder.sync_folder(HANDLED)
    folder.touch_folder(HANDLED)  # so that `Store.state` changes


def changed_at(store: Path) -> int:
    """When something was last appended, nanoseconds; 0: never."""
    with suppress(OSError, UnsafeFileError):
        status = Contained(store).folder_status(HANDLED)
        return 0 if status is None else status.st_mtime_ns
    return 0


def read_changes(store: Path, incident: int) -> tuple[IncidentChange, ...]:
    """The changes of an incident, oldest first; none where there is no file. Raises UnsafeFileError."""
    return tuple(_read(store, str(incident), IncidentChange))


def read_applied(store: Path) -> tuple[AppliedFix, ...]:
    """The fixes that were applied, oldest first; of the same fix between the same jobs, the last that was noted."""
    return tuple({(one.before, one.after, one.title): one for one in _read(store, FIXES, AppliedFix)}.values())


def _read(store: Path, name: str, kind: type[_Record]) -> Iterator[_Record]:
    with suppress(OSError):
        for line in Contained(store).read(f"{HANDLED}/{name}").splitlines():
            with suppress(ValueError, RecursionError):
                yield msgspec.json.decode(line, type=kind)


def owner_of(changes: Sequence[IncidentChange]) -> str | None:
    """Who takes the incident: the owner named last, else whoever acknowledged it last; None if nobody has."""
    named = [change.owner for change in changes if change.owner is not None] or [change.by for change in changes]
    return named[-1] if named else None


def muted_until(changes: Sequence[IncidentChange], now: float) -> float | None:
    """Until when the incident is muted, as the last change that mentions it says; None if it is not."""
    until = [change.muted_until for change in changes if change.muted_until is not None]
    return until[-1] if until and until[-1] > now else None
