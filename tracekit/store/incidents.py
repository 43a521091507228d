"""Incidents: how long a cause has been acting on a job, across its windows.

In: the incidents that are not settled and the causes in a window. Out: which incidents open, continue, close and open
again. A place, such as a rank, has one incident, whatever is found to slow it down. The incident closes once several
windows in a row no longer show it, and opens again if the place is slow before it has been gone for as long as it
lasted, so that what comes and goes is one incident under one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from msgspec import structs

from tracekit.report.answer import CauseInWords
from tracekit.report.findings import WindowVerdict
from tracekit.report.run import SMALLEST_ALARMING_SHARE

#: An incident closes after this many windows in a row without its cause.
CLEAR_WINDOWS = 2
#: An incident continues while its cause costs this share of the step. It is less than it takes to open one, so that a
#: cause of about that size does not open one incident after another.
SMALLEST_LASTING_SHARE = SMALLEST_ALARMING_SHARE / 2
#: The kind of cause of a hang.
HANG = "hang"


@dataclass(frozen=True, slots=True)
class Incident:
    """A cause that acts on a job, or acted until `closed_at`; `cause`: as in the last window that showed it.

    `opened_window`, `seen_window`, `closed_window`: the first and the last window that showed it, and the one that
    closed it; None for a hang, which no window shows, and for an incident closed by the end of the job. `clear`:
    windows in a row that no longer showed it, counted until it is settled. `incident_id`: 0 until it is stored.
    `job_ending`: how its job ended, as in "ended with exit code 1"; None while it runs. `first_step`:
    the first that its cause slowed down, and `since`: when that began, seconds since the epoch; None where unknown.
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
        """Whether a window is one of these."""
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
            return f"cured, gone {gone}" if self._cured else f"no longer seen {gone}"
        if self.clear and self.seen_window is not None:
            return f"no longer seen since window {self.seen_window + 1}; the job {self.job_ending or 'ended'}"
        return f"the job {self.job_ending or 'ended'}"

    @property
    def settled(self) -> bool:
        """Whether it is over for good: its job has ended, or it has been gone for as long as it lasted."""
        if self.closed_at is None:
            return False
        return self.job_ending is not None or not (self.closed_window and self.windows) or self._cured

    @property
    def _cured(self) -> bool:
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
    verdict: WindowVerdict,
    ended_at: datetime,
    moved_at: datetime | None = None,
) -> tuple[Incident, ...]:
    """The incidents of a job after window `number`, which ended at `ended_at`: those of `before`, not yet settled, and
    new ones.

    `moved_at`: when its last step began, None if unknown. A window that cannot be trusted opens and closes nothing.
    """
    if not verdict.judged:
        return tuple(before)
    going_on = [one for one in before if one.closed_at is None]
    after = [_gone_on(incident, number, verdict, ended_at, moved_at) for incident in going_on]
    new = [sighting for sighting in verdict.alarming if not any(one.shows_in(sighting) for one in going_on)]
    for incident in (one for one in before if one.closed_at is not None):
        again = [sighting for sighting in new if incident.shows_in(sighting)]
        new = [sighting for sighting in new if sighting not in again]
        after.append(_seen(incident, number, again) if again else replace(incident, clear=incident.clear + 1))
    for sighting in new:
        if not any(incident.shows_in(sighting) for incident in after if incident.closed_at is None):
            after.append(Incident(0, job, sighting, ended_at, number, number))
    return tuple(after)


def _seen(incident: Incident, number: int, sightings: Sequence[CauseInWords]) -> Incident:
    """The incident, open, after a window that shows it: of several causes at its place, the costliest is its cause."""
    cause = max(sightings, key=lambda sighting: sighting.cost_s)
    if not cause.code:  # which was asked for when the incident opened
        cause = structs.replace(cause, code=incident.cause.code)
    return replace(incident, cause=cause, seen_window=number, clear=0, closed_at=None, closed_window=None)


def _gone_on(
    incident: Incident, number: int, verdict: WindowVerdict, ended_at: datetime, moved_at: datetime | None
) -> Incident:
    """An open incident after one more window."""
    if incident.cause.kind == HANG:  # windows of steps before the hang can be stored while the job hangs
        over = moved_at is not None and moved_at > incident.opened_at
        return replace(incident, closed_at=ended_at, closed_window=number) if over else incident
    seen = [one for one in verdict.sightings if incident.shows_in(one) and one.share >= SMALLEST_LASTING_SHARE]
    if seen:
        return _seen(incident, number, seen)
    clear = incident.clear + 1
    if clear >= CLEAR_WINDOWS:
        return replace(incident, clear=clear, closed_at=ended_at, closed_window=number)
    return replace(incident, clear=clear)
