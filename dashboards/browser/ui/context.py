"""The running server and the viewer, as pages need them.

In: the current Flask application and request. Out: the results, the viewer's theme and time zone.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from urllib.parse import parse_qsl
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import flask

from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.data.queries import FleetStudy, Results
from tracekit.dashboards.browser.data.replays import Replays
from tracekit.dashboards.theme import LIGHT, THEMES, Theme
from tracekit.dashboards.words import moment

EXTENSION = "tracekit"
#: Header with job and window, as in an address; a page of a window sends it with each request (assets/tracekit.js).
WINDOW_HEADER = "X-Tracekit-Window"
#: Numbers of windows are 32-bit integers.
LONGEST_NUMBER = 10


@dataclass(frozen=True, slots=True)
class Service:
    """Settings and data of the server. `prefix`: the path under which browsers see it, with slashes around it.

    `study`: a study of many jobs, if there is one next to the store. `gpu_hour`: what a GPU-hour costs, if known.
    """

    results: Results
    replays: Replays
    prefix: str
    study: FleetStudy | None
    gpu_hour: float | None


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Between two times, seconds since the epoch; `begin`, `end`: as the address has them, "" for an open end."""

    since: float
    until: float
    begin: str
    end: str

    def within(self, first: float, last: float) -> tuple[float, float]:
        """The range, its open ends closed by these."""
        return self.since or first, last if math.isinf(self.until) else self.until


@dataclass(frozen=True, slots=True)
class Viewer:
    """Preferences of the viewer. They belong to the person, so they are in cookies; the view itself is in the URL."""

    theme: Theme
    zone: tzinfo

    def moment(self, epoch_s: float | None) -> str:
        """A point in time in the viewer's zone, named."""
        date = moment(epoch_s, self.zone)
        return "unknown" if date is None else date.strftime("%Y-%m-%d %H:%M:%S %Z")


def service() -> Service:
    """The running server."""
    running: Service = flask.current_app.extensions[EXTENSION]
    return running


def results() -> Results:
    """The results of the server's store, unchanged throughout the request. If the address names a window of the page's
    job, its results are of that window.
    """
    if "results" not in flask.g:
        flask.g.results = service().results.pinned()
        requested = _requested()
        job, window = requested.get("job") or None, requested.get("window", "")
        with suppress(SelectionError):  # the page says it
            choose_range(job, requested.get("since", ""), requested.get("until", ""))
        if _is_number(window):
            choose_window(job or flask.g.results.newest(), window)
    chosen: Results = flask.g.results
    return chosen


def _requested() -> dict[str, str]:
    """Job, window and range in the address of the page: from the request or, in a callback, from its header."""
    stated = flask.request.headers.get(WINDOW_HEADER)
    return flask.request.args.to_dict() if stated is None else dict(parse_qsl(stated))


def _is_number(window: str) -> bool:
    return window.isascii() and window.isdecimal() and len(window) < LONGEST_NUMBER


def choose_window(job: str, window: str) -> None:
    """Make `results` use that window of the job for the rest of the request. Raises SelectionError for a non-number."""
    if not _is_number(window):
        raise SelectionError(f"window {window!r:.40} is not a window number; leave it out to see the newest window")
    flask.g.results = results().of_window(job, int(window))
    flask.g.window = (job, int(window))


def choose_range(job: str | None, since: str, until: str) -> None:
    """Make `results` judge that range of the job, and use the newest window in it, for the rest of the request.

    Raises SelectionError for what is no range, or if no window overlaps it.
    """
    if not (since or until):
        return
    name = job or results().newest()
    chosen = TimeRange(_moment(since, "since", 0.0), _moment(until, "until", math.inf), since, until)
    words = f"since={since:.40}, until={until:.40}"
    if not chosen.since < chosen.until:
        raise SelectionError(f"{words}: the range ends before it begins")
    spans = results().spans(name, 1, chosen.since, chosen.until)
    if spans.is_empty():
        raise SelectionError(f"{words}: no step of this job is in that range")
    flask.g.results = results().in_range(name, int(spans["last"][0]), chosen.since, chosen.until)
    flask.g.range = (name, chosen)


def _moment(text: str, name: str, default: float) -> float:
    """Seconds since the epoch of a time in ISO 8601, by default in the zone of the viewer."""
    if not text:
        return default
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=viewer().zone)).timestamp()
    except (ValueError, OverflowError):
        raise SelectionError(f"{name}={text!r:.40} is not a time such as 2026-11-26T10:00:00Z") from None


def chosen_range(job: str) -> TimeRange | None:
    """The range of time that the request names for the job; None: all of it."""
    range_job, chosen = flask.g.get("range", (None, None))
    return chosen if range_job == job else None


def chosen_window(job: str) -> int | None:
    """The window of the job that the request names; None: the newest."""
    window_job, window = flask.g.get("window", (None, None))
    return window if window_job == job else None


def prefixed(path: str) -> str:
    """A path of the dashboard as browsers must request it."""
    return service().prefix + path.removeprefix("/")


def viewer() -> Viewer:
    """Preferences of the viewer: the chosen theme, else that of their system; the chosen zone, else UTC."""
    cookies = flask.request.cookies
    system = THEMES.get(cookies.get("system_theme", ""), LIGHT)
    return Viewer(THEMES.get(cookies.get("theme", ""), system), _zone(cookies.get("zone", "UTC")))


def _zone(name: str) -> tzinfo:
    """The time zone of that name; UTC for an unknown name, since a cookie can hold anything."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return UTC
