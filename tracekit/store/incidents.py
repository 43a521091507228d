"""Incidents: how long a cause has been acting on a job, and what people do about it.

A place, such as a rank, has one incident, whatever is found to slow it down. The incident closes once several
windows in a row no longer show it, and opens again if the place is slow before it has been gone for as long as it
lasted, so that what comes and goes is one incident under one number.

    STORE/handled/<incident>           a line of JSON a change: who takes it, until when messages are muted, notes
    STORE/handled/fixes                a line of JSON for each fix that was applied

Both are read as data of others: a damaged line is left out.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import structs

from tracekit.base.contained import Contained
from tracekit.base.errors import SelectionError, UnsafeFileError
from tracekit.base.text import LAST_MOMENT
from tracekit.report.conclusions import SMALLEST_ALARMING_SHARE, CauseInWords
from tracekit.report.findings import AppliedFix
from tracekit.report.report import Report

#: An incident closes after this many windows in a row without its cause.
CLEAR_WINDOWS = 2
#: An incident continues while its cause costs this share of the step. It is less than it takes to open one, so that a
#: cause of about that size does not open one incident after another.
SMALLEST_LASTING_SHARE = SMALLEST_ALARMING_SHARE / 2
#: The kind of cause of a hang.
HANG = "hang"
HANGS = "hangs"
HANDLED, FIXES = "handled", "fixes"
#: The most characters of an owner or a note.
LONGEST_TEXT = 1000
#: Seconds since the epoch.
_Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_MOMENT)]
_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
_Record = TypeVar("_Record", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Incident:
    """A cause that acts on a job, or acted until `closed_at`; `cause`: as in the last window that showed it.

    `opened_window`, `seen_window`, `closed_window`: the first and the last window that showed it, and the one that
    closed it; None for a hang, which no window shows, and for an incident closed by the end of the job. `clear`:
    windows in a row that no longer showed it, counted until it is settled. `incident_id`: 0 until it is stored.
    `job_ending`: how its job ended, as in "ended with exit code 1"; None while it runs. `first_step`: the first that
    its cause slowed down, and `since`: when that began, seconds since the epoch. `length_s`, `steps`: from then, else
    from the first window that showed it, to the end of the last one. All are None where unknown.
    """

    incident_id: int
    job: str
    cause: CauseInWords
    opened_at: datetime
    opened_window: int | None
    seen_window: int | None
    clear: int = 0
    closed_at: datetime | None = None
    closed_window: int | None = None
    job_ending: str | None = None
    first_step: int | None = None
    since: float | None = None
    length_s: float | None = None
    steps: int | None = None

    @property
    def began_s(self) -> float:
        """When its cause began to act, seconds since the epoch: with the first slow step or, if that says no time, with
        the window that showed it.
        """
        return self.opened_at.timestamp() if self.since is None else self.since

    @property
    def windows(self) -> int:
        """The number of windows from the first to the last that showed it; 0 for a hang."""
        if self.opened_window is None or self.seen_window is None:
            return 0
        return self.seen_window - self.opened_window + 1

    def shows_in_window(self, number: int) -> bool:
        """Whether a window is one of those that showed it."""
        return bool(self.windows) and 0 <= number - (self.opened_window or 0) < self.windows

    @property
    def closed_because(self) -> str | None:
        """Why it closed; None while it is open. A job that ends, or crashes, was not cured."""
        if self.closed_at is None:
            return None
        if self.closed_window is not None:
            if self.seen_window is None:
                return f"steps go on in window {self.closed_window}"
            gone = f"since window {self.seen_window + 1}"
            return f"cured, gone {gone}" if self._is_settled else f"no longer seen {gone}"
        if self.clear and self.seen_window is not None:
            return f"no longer seen since window {self.seen_window + 1}; the job {self.job_ending or 'ended'}"
        return f"the job {self.job_ending or 'ended'}"

    @property
    def settled(self) -> bool:
        """Whether it cannot open again: its job has ended, or it has been gone for as long as it lasted."""
        if self.closed_at is None:
            return False
        return self.job_ending is not None or not (self.closed_window and self.windows) or self._is_settled

    @property
    def _is_settled(self) -> bool:
        """Whether it has been gone for as long as it lasted."""
        return self.clear >= max(CLEAR_WINDOWS, self.windows)

    def shows_in(self, sighting: CauseInWords) -> bool:
        """Whether a sighting is at the place of this incident: some of the same ranks, or the same part of the whole
        job. A hang has no such place.
        """
        if self.cause.ranks or sighting.ranks:
            return self.cause.kind != HANG and bool({*self.cause.ranks} & {*sighting.ranks})
        return (self.cause.part or self.cause.kind) == (sighting.part or sighting.kind)


def followed(
    before: Sequence[Incident],
    job: str,
    number: int,
    report: Report,
    ended_at: datetime,
    moved_at: datetime | None = None,
) -> tuple[Incident, ...]:
    """The incidents of a job after window `number`, which ended at `ended_at`: those of `before`, not yet settled, and
    new ones.

    `report`: on the window. `moved_at`: when its last step began, None if unknown. A window that cannot be trusted
    opens and closes nothing.
    """
    if not report.judged:
        return tuple(before)
    going_on = [incident for incident in before if incident.closed_at is None]
    after = [_continued(incident, number, report, ended_at, moved_at) for incident in going_on]
    new = [sighting for sighting in report.alarming if not any(incident.shows_in(sighting) for incident in going_on)]
    for incident in (incident for incident in before if incident.closed_at is not None):
        matches = [sighting for sighting in new if incident.shows_in(sighting)]
        new = [sighting for sighting in new if sighting not in matches]
        after.append(_extended(incident, number, matches) if matches else replace(incident, clear=incident.clear + 1))
    for sighting in new:
        if not any(incident.shows_in(sighting) for incident in after if incident.closed_at is None):
            after.append(Incident(0, job, sighting, ended_at, number, number))
    return tuple(after)


def _extended(incident: Incident, number: int, sightings: Sequence[CauseInWords]) -> Incident:
    """The incident, open, after a window that shows it: of several causes at its place, the costliest is its cause."""
    cause = max(sightings, key=lambda sighting: sighting.cost_s)
    if not cause.code:  # requested when the incident opened
        cause = structs.replace(cause, code=incident.cause.code)
    return replace(incident, cause=cause, seen_window=number, clear=0, closed_at=None, closed_window=None)


def _continued(
    incident: Incident, number: int, report: Report, ended_at: datetime, moved_at: datetime | None
) -> Incident:
    """An open incident after one more window."""
    if incident.cause.kind == HANG:  # windows of steps before the hang can be stored while the job hangs
        has_moved = moved_at is not None and moved_at > incident.opened_at
        return replace(incident, closed_at=ended_at, closed_window=number) if has_moved else incident
    seen = [
        account
        for account in report.answer.accounts
        if incident.shows_in(account) and account.share >= SMALLEST_LASTING_SHARE
    ]
    if seen:
        return _extended(incident, number, seen)
    clear = incident.clear + 1
    if clear >= CLEAR_WINDOWS:
        return replace(incident, clear=clear, closed_at=ended_at, closed_window=number)
    return replace(incident, clear=clear)


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
    """Append a change. Raises SelectionError for a text that is too long, OSError, UnsafeFileError.

    A change is a line that is appended, so if two people write at once, both are kept.
    """
    if max(len(change.owner or ""), len(change.note or "")) > LONGEST_TEXT:
        raise SelectionError(f"an owner and a note have at most {LONGEST_TEXT:,} characters")
    _append(store, str(incident), change)


def write_applied(store: Path, fix: AppliedFix) -> None:
    """Append a fix that was applied. Raises OSError, UnsafeFileError."""
    _append(store, FIXES, fix)


def _append(store: Path, name: str, record: msgspec.Struct) -> None:
    folder = Contained(store)
    folder.make_folder(HANDLED, durable=True)
    folder.append(f"{HANDLED}/{name}", msgspec.json.encode(record) + b"\n", durable=True)
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
    return tuple(_read_records(store, str(incident), IncidentChange))


def read_applied(store: Path) -> tuple[AppliedFix, ...]:
    """The fixes that were applied, oldest first; of the same fix between the same jobs, the last that was noted."""
    return tuple({(fix.before, fix.after, fix.title): fix for fix in _read_records(store, FIXES, AppliedFix)}.values())


def _read_records(store: Path, name: str, kind: type[_Record]) -> Iterator[_Record]:
    with suppress(OSError):
        for line in Contained(store).read(f"{HANDLED}/{name}").splitlines():
            with suppress(ValueError, RecursionError):
                yield msgspec.json.decode(line, type=kind)


def owner_of(changes: Sequence[IncidentChange]) -> str | None:
    """The owner named last, else the last person to acknowledge the incident; None if there is none."""
    names = [change.owner for change in changes if change.owner is not None] or [change.by for change in changes]
    return names[-1] if names else None


def muted_until(changes: Sequence[IncidentChange], now: float) -> float | None:
    """Until when the incident is muted, as the last change that mentions it says; None if it is not."""
    until = [change.muted_until for change in changes if change.muted_until is not None]
    return until[-1] if until and until[-1] > now else None
