"""`tracekit watch`: watch a run, or a store that others write, until it ends.

In: a run or store, and receivers of notifications. Out: a line per window and incident, metrics, notifications. All
of these report stored results only, so the process that adds windows and the one that reports them are independent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.base.errors import StoreBusyError, StoreError
from tracekit.base.paths import object_url
from tracekit.base.stderr import say
from tracekit.base.text import printable, short, steps_text
from tracekit.live.incident_words import advice, lasted, since_words, utc
from tracekit.live.run import LiveRun
from tracekit.store import Incident, Store
from tracekit.store.incidents import muted_until

if TYPE_CHECKING:
    from tracekit.live.receivers import DeliveryLog, Notifier, TrackerProcess

#: Interval at which the recording and the store are read, seconds.
POLL_S = 0.5
#: How long waiting messages may take at the end, seconds.
CLOSE_TIMEOUT_S = 20.0
#: How long a tracker may take at the end, seconds: the last report is analysed again for its page.
TRACKER_TIMEOUT_S = 60.0
#: How the names of stores end.
STORE_ENDING = ".store"


@dataclass(slots=True)
class Watch:
    """`run`: adds windows to the store; None if another process does. `job`: the only one to report, None for all."""

    store: Store
    run: LiveRun | None
    job: str | None
    log: Callable[[str], None]
    notifier: Notifier | None = None
    deliveries: DeliveryLog | None = None
    tracker: TrackerProcess | None = None
    _problem: str | None = field(default=None, init=False)

    def until_ended(self, stop: threading.Event) -> None:
        """Watch until the run has ended or `stop` is set. Raises StoreError as `LiveRun.finish`."""
        changes = StoreChanges(self.store, self.job)
        self._report(changes)  # before the first window of the run, whose incidents are reported
        self._send_undelivered()
        ended = False
        while not ended and not stop.is_set():
            if self.run is not None:
                ended = self.run.ended()  # before the last read, so that nothing can be written after it
                self.run.poll()
            self._report(changes)
            self._log_notifier()
            if not ended:
                stop.wait(POLL_S)
        unstored: StoreError | None = None
        if self.run is not None and ended:
            try:
                self.run.finish(stop.wait)
            except StoreError as error:
                unstored = error
            self._report(changes)
        if self.notifier is not None:
            self.notifier.close(CLOSE_TIMEOUT_S)
            self._log_notifier()
            self._log_lines(self.notifier.losses())
        if self.tracker is not None:
            self.tracker.close(TRACKER_TIMEOUT_S)
            self._log_lines(self.tracker.losses())
        if unstored is not None:
            raise unstored

    def _send_undelivered(self) -> None:
        """Send what an earlier watch was killed before sending."""
        if self.notifier is not None and self.deliveries is not None:
            with suppress(StoreError):  # the first look has reported it
                self.notifier.send(*map(self._unmuted, self.deliveries.undelivered(self.job)))

    def _log_notifier(self) -> None:
        if self.notifier is not None:
            self._log_lines(self.notifier.changes())

    def _log_lines(self, texts: Iterable[str]) -> None:
        for line in texts:
            self.log(line)

    def _report(self, changes: StoreChanges) -> None:
        try:
            news = changes.look()
        except StoreBusyError:
            return
        except StoreError as error:
            if self.run is None:
                raise
            if str(error) != self._problem:  # not at every look
                self.log(str(error))
            self._problem = str(error)
            return
        self._problem = None
        self._log_lines(lines(news))
        if self.tracker is not None:
            for windows in news.windows.values():
                self.tracker.send(windows)
        if self.notifier is not None:
            self.notifier.send(self._unmuted(news.opened), self._unmuted(news.closed))
        if self.deliveries is not None and news.windows:
            self.deliveries.note(())  # the store is there now

    def _unmuted(self, incidents: Sequence[Incident]) -> list[Incident]:
        now_s = time.time()
        changes_of = self.store.handled
        return [incident for incident in incidents if muted_until(changes_of(incident.incident_id), now_s) is None]


def lines(changes: Changes) -> Iterator[str]:
    """One line per window, and one or more per incident."""
    for job, windows in changes.windows.items():
        for window in windows:
            yield f"{short(job)}, {window_line(window)}"
    for incident in changes.opened:
        yield f"INCIDENT {incident.incident_id} of {short(incident.job)} opened: {incident.cause.what}"
        yield f"    Since: {since_words(incident, utc)}"
        yield from (f"    {title}: {text}" for title, text in advice(incident))
    for incident in changes.closed:
        yield (
            f"incident {incident.incident_id} of {short(incident.job)} closed after {lasted(incident)},"
            f" {printable(incident.closed_because or '')}:"
            f" {incident.cause.what}"
        )


def window_line(window: dict[str, Any]) -> str:
    """One window in a line: its steps, what they lose, and the headline."""
    title = f"window {window['number']}, {steps_text(window['first_step'], window['last_step'])}"
    if window["headline"] is None:
        return f"{title}: {printable(window['problem'] or 'not analysed')}"
    doubt = "" if window["trustworthy"] else " (cannot be trusted)"
    lost = "" if window["share"] is None else f"{window['share']:z.1%} lost, "
    return f"{title}: {lost}{window['verdict']}{doubt}: {window['headline']}"


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, so that work under way is finished."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Changes:
    """`windows`: job -> rows of `LiveTables.history`, oldest first."""

    windows: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    opened: tuple[Incident, ...] = ()
    closed: tuple[Incident, ...] = ()


class StoreChanges:
    """The changes of one job, or of all. The contents of the store at the first look are not news.

    It reads only the store, so whoever adds windows and whoever reports them can run on different machines.
    """

    def __init__(self, store: Store, job: str | None = None) -> None:
        self._store, self._job = store, job
        self._state: str | None = None
        self._newest: dict[str, int] = {}
        self._open: set[int] = set()
        self._last = 0
        self._begun = False

    def look(self) -> Changes:
        """Return the changes since the last look. Raises StoreError."""
        if not self._store.is_store():
            self._begun = True  # everything added to it from now on is news
            return Changes()
        state = self._store.state()
        if state == self._state:
            return Changes()
        with self._store.reading() as catalogue:
            rows = catalogue.live.live_jobs().select("name", "number").rows()
            newest = {name: number for name, number in rows if self._job in (None, name)}
            windows = {
                name: catalogue.live.history(name, number - self._newest.get(name, -1)).to_dicts()
                for name, number in newest.items()
                if self._begun and number > self._newest.get(name, -1)
            }
            # Not all of them: a job that is watched for weeks has many closed ones.
            incidents = catalogue.live.incidents(self._job, after=self._last, numbers=self._open)
        open_ids = {incident.incident_id for incident in incidents if incident.closed_at is None}
        opened_ids = {incident.incident_id for incident in incidents if incident.incident_id > self._last}
        opened_ids |= open_ids - self._open  # closed ones that have opened again
        closed_ids = (self._open | opened_ids) - open_ids
        new = [incident for incident in incidents if incident.incident_id in opened_ids]
        closed = [incident for incident in incidents if incident.incident_id in closed_ids]
        changes = Changes(windows, tuple(reversed(new)), tuple(reversed(closed))) if self._begun else Changes()
        self._state, self._newest, self._begun = state, newest, True
        self._open = open_ids
        self._last = max([self._last, *(incident.incident_id for incident in incidents)])
        return changes


def is_expected(path: Path) -> bool:
    """Whether a path is that of a store that is not there yet, by its name."""
    return object_url(path) is None and path.name.endswith(STORE_ENDING) and not os.path.lexists(path)


def await_store(store: Store) -> None:
    """Wait until the store is there, and say so. Raises StoreError if something else is in its place, or if it is in
    object storage and not there.

    A dashboard or a screen is often opened before the job has its first window.
    """
    path = store.path
    if is_expected(path):
        say(f"tracekit: {printable(str(path))}: no store there yet; waiting for its first window (Ctrl-C ends it)")
        while not (store.is_store() or path.is_file()):
            time.sleep(POLL_S)
    store.check()
