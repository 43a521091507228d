"""Report incidents and windows to others: to a webhook, as JSON; to people, as a text through Apprise; to an
experiment tracker, through a process of its own.

Each receiver has a thread, so that it never keeps the watch waiting: the number of waiting items is limited, and
dropped ones are counted. Incidents already sent to a receiver are noted in the store, so that the next watch sends
the others: STORE/told/<receiver> has `after N` (only incidents after N are sent) and, for each message that
arrived, the number of the incident, and opened or closed.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import queue
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from tracekit.base.contained import Contained
from tracekit.base.errors import SelectionError, UnsafeFileError
from tracekit.base.http import OPENER
from tracekit.base.paths import object_url
from tracekit.base.text import printable
from tracekit.live.incident_words import advice, incident_texts, lasted, page_of, since_words, utc
from tracekit.store import Incident, Store
from tracekit.store.folder import DELIVERIES

#: Limit of waiting items; beyond it, the oldest is dropped.
MOST_WAITING = 100
#: Limit of opened and of closed incidents in a message; the costliest are kept.
MOST_TOLD = 20
#: How often a message is tried; the delay after the first failure, seconds, which doubles each time, and its limit.
MOST_ATTEMPTS, FIRST_RETRY_S, LONGEST_RETRY_S = 8, 1.0, 60.0
#: How long a receiver may take to answer, seconds.
ANSWER_TIMEOUT_S = 10.0
#: The host whose webhooks are for people.
_SLACK = "hooks.slack.com"

_Item = TypeVar("_Item")
#: The content of a message: number of each incident, and "opened" or "closed".
Keys = Sequence[tuple[int, str]]
#: What `--log` can name: each is also the name of its package.
TRACKERS = ("wandb", "mlflow", "tensorboard")
_LINE = re.compile(rb"after (?P<after>[0-9]{1,18})|(?P<incident>[0-9]{1,18}) (?P<status>opened|closed)")


class Notifier:
    """Posts messages to `url`: JSON to a webhook, a text to any other receiver that Apprise knows, such as Slack.

    `arrived` is called from another thread with the content of each delivered message. `counts` counts messages by
    outcome; `problem`: the reason why the last attempt failed, None if it succeeded.

    If a receiver does not answer, the message is tried again after growing delays.
    """

    def __init__(self, url: str, page: str = "", *, arrived: Callable[[Keys], None] | None = None) -> None:
        try:
            parts = urlsplit(url)
            webhook = parts.scheme in ("http", "https") and parts.hostname not in (None, "", _SLACK) and parts.port != 0
        except ValueError:  # of brackets or a port
            raise _no_address(url) from None
        if any(char <= " " for char in url):
            raise _no_address(url)
        self._sender = None if webhook else _sender(url, parts.scheme)
        self._sent = self._failed = 0
        self.problem: str | None = None
        self._page = page
        credentials, _, self._receiver = parts.netloc.rpartition("@")  # the rest of the address may be a secret
        self._url = urlunsplit(parts._replace(netloc=self._receiver))
        self._headers = {"Content-Type": "application/json", "User-Agent": "tracekit"}
        if credentials:
            name, _, password = credentials.partition(":")
            secret = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
            self._headers["Authorization"] = f"Basic {secret}"
        self._problem_said: str | None = None
        self._asked_s = 0.0
        self._arrived = arrived
        self._outbox = Outbox[tuple[str, Keys]](self._deliver, "tracekit-notify")

    @property
    def counts(self) -> dict[str, int]:
        """The messages so far, by outcome: `sent`, `failed` or `dropped`."""
        return {"sent": self._sent, "failed": self._failed, "dropped": self._outbox.dropped}

    def send(self, opened: Sequence[Incident], closed: Sequence[Incident]) -> None:
        """Queue a message about opened and closed incidents; never blocks."""
        if not opened and not closed:
            return
        opened_first, closed_first = _costliest(opened), _costliest(closed)
        left_out = len(opened) + len(closed) - len(opened_first) - len(closed_first)
        write = message if self._sender is None else text_message
        body = write(opened_first, closed_first, self._page, left_out)
        by_status = (("opened", opened), ("closed", closed))
        keys = [(incident.incident_id, status) for status, incidents in by_status for incident in incidents]
        self._outbox.put((body, keys))

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for queued messages to be sent. What is left counts as dropped."""
        self._outbox.close(timeout_s)

    def changes(self) -> Iterator[str]:
        """Return a line if messages began to fail since the last call, or arrive again. For one thread only."""
        problem = self.problem
        if problem is not None and self._problem_said is None:
            yield (
                f"--notify: {self._receiver} {problem}; trying again after growing delays, keeping at most"
                f" {MOST_WAITING} messages"
            )
        elif problem is None and self._problem_said is not None:
            yield f"--notify: {self._receiver} answers again"
        self._problem_said = problem

    def losses(self) -> Iterator[str]:
        """A line with the number of messages that were not delivered, if there are any."""
        if lost := self._failed + self._outbox.dropped:
            yield f"--notify: {lost} message{'s' if lost > 1 else ''} did not reach {self._receiver}"

    def _deliver(self, waiting: tuple[str, Keys]) -> None:
        (body, keys), delay_s = waiting, FIRST_RETRY_S
        for attempt in range(MOST_ATTEMPTS):
            self.problem = self._post(body)
            if self.problem is None:
                self._sent += 1
                if self._arrived is not None:
                    self._arrived(keys)
                return
            if attempt + 1 == MOST_ATTEMPTS or self._outbox.closing.wait(max(delay_s, self._asked_s)):
                break
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)
        self._failed += 1

    def _post(self, body: str) -> str | None:
        """Post once. Returns why it failed; None if the address itself, without a redirect, has accepted it."""
        self._asked_s = 0.0
        if self._sender is not None:
            return self._sender(body)
        request = urllib.request.Request(self._url, data=body.encode(), headers=self._headers)  # noqa: S310 - http or https
        try:
            with OPENER.open(request, timeout=ANSWER_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            self._asked_s = _retry_after_s(error.headers.get("Retry-After"))
            return f"answers {error.code}"
        except (OSError, http.client.HTTPException) as error:
            return f"cannot be reached: {error}"


def _sender(url: str, scheme: str) -> Callable[[str], str | None]:
    """A function that sends a text to a receiver that is not a webhook, and returns why that failed, else None.

    Raises SelectionError.
    """
    try:
        import apprise
    except ImportError:
        raise SelectionError(
            f"--notify {_without_secrets(url)!r:.200}; expected an address such as https://host/path, or for {printable(scheme)}://"
            " install 'tracekit-analysis[notify]'"
        ) from None
    receivers = apprise.Apprise()
    if not receivers.add(url):
        raise _no_address(url)

    def send(text: str) -> str | None:
        sent = receivers.notify(body=text, title="tracekit", body_format=apprise.NotifyFormat.MARKDOWN)
        return None if sent else "did not take the message"

    return send


def _no_address(url: str) -> SelectionError:
    return SelectionError(f"--notify {_without_secrets(url)!r:.200}; expected an address such as https://host/path")


def _retry_after_s(header: str | None) -> float:
    """Return the delay that an overloaded receiver requests, seconds; at most the longest delay between attempts."""
    return min(float(header), LONGEST_RETRY_S) if header is not None and header.isdecimal() else 0.0


def _without_secrets(url: str) -> str:
    """An address without the parts that may be secret."""
    scheme, _, rest = printable(url).rpartition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme}://{host}/..." if scheme else host


def _costliest(incidents: Sequence[Incident]) -> list[Incident]:
    return sorted(incidents, key=lambda incident: -incident.cause.share)[:MOST_TOLD]


def message(opened: Sequence[Incident], closed: Sequence[Incident], page: str, left_out: int) -> str:
    """The generic JSON message; docs/live.md shows an example."""
    content = {
        "version": 1,
        "sent_at": time.time(),
        "left_out": left_out,
        "incidents": [
            {
                "status": status,
                "job": incident.job,
                "incident": incident.incident_id,
                "kind": incident.cause.kind,
                "opened_at": incident.opened_at.timestamp(),
                "closed_at": None if incident.closed_at is None else incident.closed_at.timestamp(),
                "closed_because": incident.closed_because,
                "first_step": incident.first_step,
                "since": incident.began_s,
                "opened_window": incident.opened_window,
                "seen_window": incident.seen_window,
                "share": incident.cause.share,
                "confidence": incident.cause.confidence,
                "saved_gpu_hours_per_day": incident.cause.saved_gpu_hours_per_day,
                **incident_texts(incident, page),
            }
            for status, incidents in (("opened", opened), ("closed", closed))
            for incident in incidents
        ],
    }
    return json.dumps(content)


def text_message(opened: Sequence[Incident], closed: Sequence[Incident], page: str, left_out: int = 0) -> str:
    """One text for people, in Markdown."""
    blocks = [_lines(incident, "opened", page) for incident in opened]
    blocks += [_lines(incident, "closed", page) for incident in closed]
    blocks += [f"and {left_out} more incidents that cost less"] if left_out else []
    return "\n\n".join(blocks)


def _lines(incident: Incident, status: str, page: str) -> str:
    """What to say of an incident: red while it is open, green once it is cured, white if it ended otherwise."""
    mark = "\N{MEDIUM WHITE CIRCLE}" if incident.closed_window is None else "\N{LARGE GREEN CIRCLE}"
    if status == "opened":
        mark = "\N{LARGE RED CIRCLE}"
    state = status
    if incident.closed_because is not None:
        state = f"closed after {lasted(incident)}, {_escaped(incident.closed_because)}"
    subject = f"incident {incident.incident_id} {state}: {_escaped(incident.cause.what)}"
    lines = [f"{mark} **{_escaped(incident.job)}**: {subject}"]
    if status == "opened":
        lines.append(f"**Since**: {_escaped(since_words(incident, utc))}")
        lines += [f"**{title}**: {_escaped(text)}" for title, text in advice(incident)]
    if address := page_of(incident, page):
        lines.append(f"[the evidence]({_escaped(address)})")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text in which the characters that Markdown uses are escaped."""
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", printable(text))


class TrackerProcess:
    """A tracker of one job. `where`: as for `tracekit.dashboards.trackers.opened`.

    Raises SelectionError for a tracker that is unknown or not installed. `logged`, `dropped`: how many windows arrived,
    and, once closed, how many did not.
    """

    def __init__(self, where: str, store: Path | str, job: str) -> None:
        kind = where.partition(":")[0]
        if kind not in TRACKERS:
            raise SelectionError(f"--log {where!r:.200}; expected {', '.join(TRACKERS)}, or one of them with :WHERE")
        if find_spec(kind) is None:
            raise SelectionError(f"--log {kind}: not installed; pip install {kind}")
        self.kind, self.logged, self.dropped, self._unconfirmed = kind, 0, 0, 0
        self._process = subprocess.Popen(  # noqa: S603 - no shell; tracekit itself
            [sys.executable, "-P", "-m", "tracekit.dashboards.trackers", where, str(store), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C ends the watch, which ends this
        )
        self._outbox = Outbox[int](self._log, "tracekit-tracker")

    def send(self, windows: Sequence[dict[str, Any]]) -> None:
        """Queue windows, as `Changes` has them; never blocks."""
        for window in windows:
            self._outbox.put(window["number"])

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the windows and the page; then end the process. What is left is lost."""
        deadline, (requests, answers) = time.monotonic() + timeout_s, self._pipes()
        self._outbox.close(timeout_s)
        self.dropped = self._outbox.dropped + self._unconfirmed
        with suppress(OSError):  # it has ended
            requests.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        self._process.kill()
        self._process.wait()
        answers.close()

    def losses(self) -> Iterator[str]:
        """A line with the number of windows that did not arrive, if there are any, or that the page did not."""
        if self.dropped:
            yield f"--log: {self.dropped} window{'s' * (self.dropped > 1)} did not reach {self.kind}"
        elif self._process.returncode:
            yield f"--log: the report did not reach {self.kind}"

    def _log(self, number: int) -> None:
        """Hand over a window, and wait until the process confirms it."""
        (requests, answers), answer = self._pipes(), ""
        with suppress(OSError, ValueError):  # it has ended, or the watch has
            requests.write(f"{number}\n")
            requests.flush()
            answer = answers.readline()
        self.logged += bool(answer)
        self._unconfirmed += not answer

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


class DeliveryLog:
    """Incidents of a store already sent to the receiver at `url`."""

    def __init__(self, store: Store, url: str) -> None:
        self._store = store
        digest = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._unwritten = ""  # the store may not be there yet
        self._folder = Contained(store.path) if object_url(store.path) is None else None
        self._name = f"{DELIVERIES}/{digest}"

    def note(self, messages: Iterable[tuple[int, str]]) -> None:
        """Record delivered messages: number of the incident, and "opened" or "closed". A read-only store keeps none."""
        self._add(f"{incident} {status}\n" for incident, status in messages)

    def undelivered(self, job: str | None) -> tuple[Sequence[Incident], Sequence[Incident]]:
        """Return the open and the closed incidents not yet sent as such. Raises StoreError.

        Incidents that had closed before the receiver was first used are not sent.
        """
        last, after = self._read_log()
        incidents = self._store.incidents(job) if self._store.is_store() else ()
        if after is None:
            after = max((incident.incident_id for incident in incidents), default=0)
            self._add([f"after {after}\n"])
        opened, closed = list[Incident](), list[Incident]()
        for incident in reversed(incidents):
            number, is_open = incident.incident_id, incident.closed_at is None
            if last.get(number) != ("opened" if is_open else "closed") and (
                is_open or number > after or number in last
            ):
                (opened if is_open else closed).append(incident)
        return opened, closed

    def _add(self, lines: Iterable[str]) -> None:
        self._unwritten += "".join(lines)
        if self._folder is None or not self._unwritten:
            return
        with suppress(OSError, UnsafeFileError):  # at worst, an incident is reported twice
            self._folder.make_folder(DELIVERIES)
            self._folder.append(self._name, self._unwritten.encode())
            self._unwritten = ""

    def _read_log(self) -> tuple[dict[int, str], int | None]:
        """How each incident was last sent, and the last one before the first delivery, None for a new receiver.

        Other lines, and one that a killed writer has left unfinished, are passed over.
        """
        last, after = dict[int, str](), None
        try:
            content = b"" if self._folder is None else self._folder.read(self._name)
        except OSError:
            return last, after
        for match in filter(None, map(_LINE.fullmatch, content.split(b"\n")[:-1])):
            if match["status"] is None:
                after = int(match["after"])
            else:
                last[int(match["incident"])] = match["status"].decode()
        return last, after


class Outbox(Generic[_Item]):
    """Calls `deliver` for each item from a thread called `name`. `closing` is set once nothing is to be retried.

    `dropped`: items that were not delivered because others came, or because the outbox was closed.
    """

    def __init__(self, deliver: Callable[[_Item], None], name: str) -> None:
        self.dropped, self.closing = 0, threading.Event()
        self._deliver, self._on_its_way = deliver, False
        self._waiting: queue.Queue[_Item | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        """Queue an item; never blocks. For one thread only."""
        if self._waiting.full():
            with suppress(queue.Empty):  # it has just been delivered
                self._waiting.get_nowait()
                self.dropped += 1
        self._waiting.put_nowait(item)

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for queued items to be delivered. What is left counts as dropped, including an
        item on its way.
        """
        self.closing.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)
        self.dropped += sum(item is not None for item in list(self._waiting.queue)) + self._on_its_way

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._on_its_way = True
            self._deliver(item)
            self._on_its_way = False
            if self.closing.is_set() and self._waiting.empty():  # the queue had no room for the None
                return
