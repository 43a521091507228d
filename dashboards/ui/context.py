"""What a page needs to know of the running server and of who looks at it.

In: the Flask application and request at hand. Out: the results, the viewer's theme and time zone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from urllib.parse import parse_qsl
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import flask

from tracekit.base.errors import SelectionError
from tracekit.dashboards.data.fleet_study import FleetStudy
from tracekit.dashboards.data.queries import Results
from tracekit.dashboards.data.replays import Replays
from tracekit.figures.theme import LIGHT, THEMES, Theme
from tracekit.trace.units import EARLIEST_S

EXTENSION = "tracekit"
#: In which a page that shows a window says its job and window, as in an address, whenever it asks for something
#: (assets/tracekit.js).
WINDOW_HEADER = "X-Tracekit-Window"
#: Numbers of windows are 32-bit integers.
LONGEST_NUMBER = 10


@dataclass(frozen=True, slots=True)
class Service:
    """What the server was started with. `prefix`: the path under which browsers see it, with slashes around it.

    `study`: of many jobs, where there is one beside the store.
    """

    results: Results
    replays: Replays
    prefix: str
    study: FleetStudy | None


@dataclass(frozen=True, slots=True)
class Viewer:
    """Preferences of the browser: these are the person's, so they are in cookies; the view itself is in the URL."""

    theme: Theme
    zone: tzinfo

    @property
    def zone_name(self) -> str:
        """The zone as a heading says it."""
        return str(self.zone)

    def moment(self, epoch_s: float | None) -> str:
        """A point in time in the viewer's zone, named."""
        return self._formatted(epoch_s, "%Y-%m-%d %H:%M:%S %Z")

    def minute(self, epoch_s: float | None) -> str:
        """The same to the minute, for a column whose heading names the zone."""
        return self._formatted(epoch_s, "%Y-%m-%d %H:%M")

    def _formatted(self, epoch_s: float | None, pattern: str) -> str:
        if epoch_s is None or epoch_s < EARLIEST_S:  # of a clock that does not count from 1970
            return "unknown"
        try:
            return datetime.fromtimestamp(epoch_s, self.zone).strftime(pattern)
        except (ValueError, OverflowError, OSError):  # a trace can hold any number
            return "unknown"


def results() -> Results:
    """The results of the store that this server shows, as they are throughout the request.

    Of the job of the page, those of the window that its address names.
    """
    if "results" not in flask.g:
        service: Service = flask.current_app.extensions[EXTENSION]
        flask.g.results = service.results.at_one_state()
        job, window = _named_window()
        if _is_number(window):
            choose_window(job or flask.g.results.newest(), window)
    found: Results = flask.g.results
    return found


def _named_window() -> tuple[str, str]:
    """Job and window in the address of the page: of the request, or as a page says that calls back; "" if none."""
    said = flask.request.headers.get(WINDOW_HEADER)
    asked = flask.request.args if said is None else dict(parse_qsl(said))
    return asked.get("job", ""), asked.get("window", "")


def _is_number(window: str) -> bool:
    return window.isascii() and window.isdecimal() and len(window) < LONGEST_NUMBER


def choose_window(job: str, window: str) -> None:
    """Let `results` be of that window of the job, for the rest of the request. Raises SelectionError for no number."""
    if not _is_number(window):
        raise SelectionError(f"window {window!r:.40} is not a window number; leave it out to see the newest window")
    flask.g.results = results().of_window(job, int(window))
    flask.g.window = (job, int(window))


def chosen_window(job: str) -> int | None:
    """The window of the job that the request is about; None: the newest."""
    of_job, window = flask.g.get("window", (None, None))
    return window if of_job == job else None


def replays() -> Replays:
    """What answers what-if questions in the background."""
    service: Service = flask.current_app.extensions[EXTENSION]
    return service.replays


def study() -> FleetStudy | None:
    """The study that the server was given."""
    service: Service = flask.current_app.extensions[EXTENSION]
    return service.study


def prefixed(path: str) -> str:
    """A path of the dashboard as browsers have to ask for it."""
    service: Service = flask.current_app.extensions[EXTENSION]
    return service.prefix + path.removeprefix("/")


def viewer() -> Viewer:
    """Who looks: dark or light as they chose, else as their system is; UTC or a zone of their own."""
    cookies = flask.request.cookies
    system = THEMES.get(cookies.get("system_theme", ""), LIGHT)
    return Viewer(THEMES.get(cookies.get("theme", ""), system), _zone(cookies.get("zone", "UTC")))


def _zone(name: str) -> tzinfo:
    """The time zone of that name; UTC for what is none, since a cookie can hold anything."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return UTC
