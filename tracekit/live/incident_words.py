"""Text about an incident, besides its sentences, for terminal and dashboard.

In: an incident. Out: words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from tracekit.base.text import printable
from tracekit.store import Incident
from tracekit.store.incidents import IncidentChange


def advice(incident: Incident) -> Iterator[tuple[str, str]]:
    """Yield title and text: the culprit, its line of code, what metrics say of it, the first action with its saving,
    further checks; omit unknown ones.
    """
    cause = incident.cause
    rows = {
        "Who": cause.who,
        "Code": cause.code,
        "Metrics": cause.metrics,
        "Do": cause.fix,
        "More to check": cause.check,
    }
    for title, text in rows.items():
        if text:
            yield title, text


def evidence(incident: Incident) -> tuple[str, dict[str, object]]:
    """The page of the dashboard that shows an incident, as path and parameters: the last window that showed it, or the
    hang.
    """
    if incident.seen_window is None:
        return "/hang", {"job": incident.job}
    return "/job", {"job": incident.job, "window": incident.seen_window}


def handling(changes: Sequence[IncidentChange], moment: Callable[[float], str]) -> Iterator[str]:
    """Yield a sentence per change, oldest first. `moment`: writes seconds since the epoch."""
    for change in changes:
        parts = [f"owner {change.owner}"] if change.owner is not None else []
        if change.muted_until is not None:
            parts.append(
                f"muted until {moment(change.muted_until)}" if change.muted_until > change.changed_at else "not muted"
            )
        said = "; ".join([*parts, *([change.note] if change.note is not None else [])])
        yield printable(f"{moment(change.changed_at)}, {change.by}: {said or 'acknowledged'}")


def since_words(incident: Incident, moment: Callable[[float], str]) -> str:
    """Since when its cause acts: the first slow step and when it began. `moment`: as in `handling`."""
    step = "" if incident.first_step is None else f"step {incident.first_step}, "
    return f"{step}{moment(incident.began_s)}"


def utc(epoch_s: float) -> str:
    """A moment for terminals and messages."""
    return f"{datetime.fromtimestamp(epoch_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def lasted(incident: Incident) -> str:
    """Format the duration of an incident; if it is open, until now."""
    # By one clock: that of the process which opened it, and closes it.
    ended = incident.closed_at.timestamp() if incident.closed_at is not None else time.time()
    minutes, seconds = divmod(max(0, int(ended - incident.opened_at.timestamp())), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
