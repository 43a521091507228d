"""Text about an incident, besides its sentences, for terminal and dashboard.

In: an incident. Out: words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from urllib.parse import urlencode

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
        words = "; ".join([*parts, *([change.note] if change.note is not None else [])])
        yield printable(f"{moment(change.changed_at)}, {change.by}: {words or 'acknowledged'}")


def since_words(incident: Incident, moment: Callable[[float], str]) -> str:
    """Since when its cause acts: the first slow step and when it began. `moment`: as in `handling`."""
    step = "" if incident.first_step is None else f"step {incident.first_step}, "
    return f"{step}{moment(incident.began_s)}"


def utc(epoch_s: float) -> str:
    """A moment for terminals and messages."""
    return f"{datetime.fromtimestamp(epoch_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def lasted(incident: Incident) -> str:
    """How long an incident lasted: the time of the run, or its steps where the run says no time. Of a hang, the time
    until steps went on, or until now.
    """
    length_s, steps = incident.length_s, incident.steps or 0
    if length_s is None or length_s < 0:  # clocks of a run can go back, as its steps can
        if steps > 0:
            return f"{steps:,} step{'s' * (steps > 1)}"
        # By one clock: that of the process which opened it, and closes it.
        ended = incident.closed_at.timestamp() if incident.closed_at is not None else time.time()
        length_s = max(ended - incident.opened_at.timestamp(), 0.0)
    minutes, seconds = divmod(int(length_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def incident_texts(incident: Incident, page: str) -> dict[str, str]:
    """Annotations of an incident for alerts: the sentences of its analysis, and links.

    `page`: as for `StoreMetrics`.
    """
    cause = incident.cause
    return {
        "what": cause.what,
        "who": cause.who,
        "why": cause.why,
        "code": cause.code or "",
        "check": cause.check,
        "fix": cause.fix or "",
        "hosts": ", ".join(cause.hosts),
        "ranks": ", ".join(map(str, cause.ranks)),
        "page": page_of(incident, page),
    }


def page_of(incident: Incident, page: str) -> str:
    """The address of the evidence for an incident; "" without a dashboard."""
    if not page:
        return ""
    path, state = evidence(incident)
    return f"{page.rstrip('/')}{path}?{urlencode(state)}"
