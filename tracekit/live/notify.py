"""Report incidents without Prometheus: to a webhook, as JSON, or to people, as a text through Apprise.

In: incidents as they open and close. Out: one message for each window that opens or closes some, posted from a thread.
If a receiver does not answer, the message is tried again after growing delays. The number of waiting messages is
limited, and dropped messages are counted.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from tracekit.base.errors import SelectionError
from tracekit.base.http import OPENER
from tracekit.base.text import printable
from tracekit.live.incident_words import advice, lasted, since_words, utc
from tracekit.live.metrics import incident_texts, page_of
from tracekit.live.outbox import MOST_WAITING, Outbox
from tracekit.store import Incident

#: Limit of opened and of closed incidents in a message; the costliest are kept.
MOST_TOLD = 20
#: How often a message is tried; the delay after the first failure, seconds, which doubles each time, and its limit.
MOST_ATTEMPTS, FIRST_RETRY_S, LONGEST_RETRY_S = 8, 1.0, 60.0
#: How long a receiver may take to answer, seconds.
ANSWER_TIMEOUT_S = 10.0
#: The host whose webhooks are for people.
_SLACK = "hooks.slack.com"

#: The content of a message: number of each incident, and "opened" or "closed".
Keys = Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Sent:
    """Counts of sent, failed and dropped messages."""

    sent: int = 0
    failed: int = 0
    dropped: int = 0


class Notifier:
    """Posts messages to `url`: JSON to a webhook, a text to any other receiver that Apprise knows, such as Slack.

    `arrived` is called from another thread with the content of each delivered message. `counts` counts messages by
    outcome; `problem`: the reason why the last attempt failed, None if it succeeded.
    """

    def __init__(self, url: str, page: str = "", *, arrived: Callable[[Keys], None] | None = None) -> None:
        try:
            parts = urlsplit(url)
            webhook = parts.scheme in ("http", "https") and parts.hostname not in (None, "", _SLACK) and parts.port != 0
        except ValueError:  # of brackets or a port
            raise _no_address(url) from None
        if any(char <= " " for char in url):
            raise _no_address(url)
        self._elsewhere = None if webhook else _elsewhere(url, parts.scheme)
        self._sent = self._failed = 0
        self.problem: str | None = None
        self._page = page
        self._content = message if self._elsewhere is None else text_message
        who, _, self._receiver = parts.netloc.rpartition("@")  # the rest of the address may be a secret
        self._url = urlunsplit(parts._replace(netloc=self._receiver))
        self._headers = {"Content-Type": "application/json", "User-Agent": "tracekit"}
        if who:
            name, _, password = who.partition(":")
            secret = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
            self._headers["Authorization"] = f"Basic {secret}"
        self._told: str | None = None
        self._asked_s = 0.0
        self._arrived = arrived
        self._outbox = Outbox[tuple[bytes, Keys]](self._deliver, "tracekit-notify")

    @property
    def counts(self) -> Sent:
        """The messages so far, by outcome."""
        return Sent(self._sent, self._failed, self._outbox.dropped)

    def tell(self, opened: Sequence[Incident], closed: Sequence[Incident]) -> None:
        """Queue a message about opened and closed incidents; never blocks."""
        if not opened and not closed:
            return
        begun, over = _costliest(opened), _costliest(closed)
        left_out = len(opened) + len(closed) - len(begun) - len(over)
        body = json.dumps(self._content(begun, over, self._page, left_out)).encode()
        by_status = (("opened", opened), ("closed", closed))
        keys = [(incident.incident_id, status) for status, incidents in by_status for incident in incidents]
        self._outbox.put((body, keys))

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for queued messages to be sent. What is left counts as dropped."""
        self._outbox.close(timeout_s)

    def changes(self) -> Iterator[str]:
        """Return a line if messages began to fail since the last call, or arrive again. For one thread only."""
        problem = self.problem
        if problem is not None and self._told is None:
            yield (
                f"--notify: {self._receiver} {problem}; trying again after growing delays, keeping at most"
                f" {MOST_WAITING} messages"
            )
        elif problem is None and self._told is not None:
            yield f"--notify: {self._receiver} answers again"
        self._told = problem

    def losses(self) -> Iterator[str]:
        """A line with the number of messages that were not delivered, if there are any."""
        if lost := self._failed + self._outbox.dropped:
            yield f"--notify: {lost} message{'s' if lost > 1 else ''} did not reach {self._receiver}"

    def _deliver(self, waiting: tuple[bytes, Keys]) -> None:
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

    def _post(self, body: bytes) -> str | None:
        """Post once. Returns why it failed; None if the address itself, without a redirect, has accepted it."""
        self._asked_s = 0.0
        if self._elsewhere is not None:
            return self._elsewhere(json.loads(body)["text"])
        request = urllib.request.Request(self._url, data=body, headers=self._headers)  # noqa: S310 - http or https
        try:
            with OPENER.open(request, timeout=ANSWER_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            self._asked_s = _retry_after_s(error.headers.get("Retry-After"))
            return f"answers {error.code}"
        except (OSError, http.client.HTTPException) as error:
            return f"cannot be reached: {error}"


def _elsewhere(url: str, scheme: str) -> Callable[[str], str | None]:
    """What sends a text to a receiver that is no webhook, and says why that failed, None if it did not.

    Raises SelectionError.
    """
    try:
        import apprise
    except ImportError:
        raise SelectionError(
            f"--notify {_shown(url)!r:.200}; expected an address such as https://host/path, or for {printable(scheme)}://"
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
    return SelectionError(f"--notify {_shown(url)!r:.200}; expected an address such as https://host/path")


def _retry_after_s(header: str | None) -> float:
    """Return the delay that an overloaded receiver requests, seconds; at most the longest delay between attempts."""
    return min(float(header), LONGEST_RETRY_S) if header is not None and header.isdecimal() else 0.0


def _shown(url: str) -> str:
    """An address without the parts that may be secret."""
    scheme, _, rest = printable(url).rpartition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme}://{host}/..." if scheme else host


def _costliest(incidents: Sequence[Incident]) -> list[Incident]:
    return sorted(incidents, key=lambda incident: -incident.cause.share)[:MOST_TOLD]


def message(opened: Sequence[Incident], closed: Sequence[Incident], page: str, left_out: int = 0) -> dict[str, Any]:
    """The generic JSON message; docs/live.md shows an example."""
    return {
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


def text_message(
    opened: Sequence[Incident], closed: Sequence[Incident], page: str, left_out: int = 0
) -> dict[str, Any]:
    """One text for people, in Markdown."""
    blocks = [_lines(incident, "opened", page) for incident in opened]
    blocks += [_lines(incident, "closed", page) for incident in closed]
    blocks += [f"and {left_out} more incidents that cost less"] if left_out else []
    return {"text": "\n\n".join(blocks)}


def _lines(incident: Incident, status: str, page: str) -> str:
    """What to say of an incident: red while it is open, green once it is cured, white if it ended otherwise."""
    mark = "\N{MEDIUM WHITE CIRCLE}" if incident.closed_window is None else "\N{LARGE GREEN CIRCLE}"
    if status == "opened":
        mark = "\N{LARGE RED CIRCLE}"
    state = status
    if incident.closed_because is not None:
        state = f"closed after {lasted(incident)}, {_escaped(incident.closed_because)}"
    what = f"incident {incident.incident_id} {state}: {_escaped(incident.cause.what)}"
    lines = [f"{mark} **{_escaped(incident.job)}**: {what}"]
    if status == "opened":
        lines.append(f"**Since**: {_escaped(since_words(incident, utc))}")
        lines += [f"**{title}**: {_escaped(text)}" for title, text in advice(incident)]
    if address := page_of(incident, page):
        lines.append(f"[the evidence]({_escaped(address)})")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Text in which the characters that Markdown uses are escaped."""
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", printable(text))
