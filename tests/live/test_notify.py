"""Messages to a webhook: once per incident with its end, tried again, and never more waiting than there is room for."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from tests.cases import case
from tests.handmade import POLL_S
from tests.test_incidents import SLOW
from tracekit.base.errors import SelectionError
from tracekit.live import receivers
from tracekit.live.receivers import Notifier, text_message
from tracekit.store import Incident

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
OPENED = Incident(7, "job <1>", SLOW, NOON, 3, 4)
CLOSED = replace(OPENED, closed_at=NOON + timedelta(minutes=5), closed_window=6)
PATIENCE_S = 60


class Receiver(HTTPServer):
    """A webhook. `answers`: status codes to give, then 200; `got`: what was posted."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.got = list(answers), []
        self.authorization: list[str | None] = []
        self.fetched = 0
        self.retry_after: str | None = None
        self.arrived = threading.Semaphore(0)
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"

    def forget(self) -> None:
        """Whatever has come so far is read."""
        while self.arrived.acquire(blocking=False):
            self.got.pop(0)

    def wait_for(self, messages: int) -> None:
        for _ in range(messages):
            assert self.arrived.acquire(timeout=PATIENCE_S)


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(content))
        self.server.authorization.append(self.headers["Authorization"])
        code = self.server.answers.pop(0) if self.server.answers else 200
        self.send_response(code)
        if code == 429 and self.server.retry_after is not None:
            self.send_header("Retry-After", self.server.retry_after)
        if code == 302:
            self.send_header("Location", "/login")
        self.end_headers()
        self.server.arrived.release()

    def do_GET(self) -> None:
        self.server.fetched += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiving(*answers: int) -> Iterator[Receiver]:
    with Receiver(*answers) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(POLL_S,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


def test_what_opens_and_closes_is_posted_with_all_that_is_to_be_said() -> None:
    with receiving() as receiver:
        notifier = Notifier(receiver.url, "https://dash")
        notifier.send([], [])
        notifier.send([OPENED], [])
        notifier.send([], [CLOSED])
        receiver.wait_for(2)
        notifier.close(PATIENCE_S)
    opened, closed = (message["incidents"][0] for message in receiver.got)
    assert (opened["status"], closed["status"]) == ("opened", "closed")
    assert opened == opened | {
        "job": "job <1>",
        "incident": 7,
        "what": SLOW.what,
        "who": SLOW.who,
        "why": SLOW.why,
        "check": SLOW.check,
        "fix": SLOW.fix,
        "hosts": "node-a",
        "page": "https://dash/job?job=job+%3C1%3E&window=4",
        "opened_at": NOON.timestamp(),
        "closed_at": None,
    }
    assert closed["closed_at"] == NOON.timestamp() + 300
    assert (opened["closed_because"], closed["closed_because"]) == (None, "no longer seen since window 5")
    assert (notifier.counts["sent"], notifier.counts["failed"], notifier.counts["dropped"]) == (2, 0, 0)


def test_a_receiver_that_fails_is_asked_again() -> None:
    with receiving(500, 503) as receiver, mock.patch.object(receivers, "FIRST_RETRY_S", 0.01):
        notifier = Notifier(receiver.url)
        notifier.send([OPENED], [])
        receiver.wait_for(3)
        notifier.close(PATIENCE_S)
    assert len(receiver.got) == 3
    assert (notifier.counts["sent"], notifier.counts["failed"], notifier.problem) == (1, 0, None)


def test_a_receiver_that_is_overrun_says_when_to_ask_again() -> None:
    """No time, or none that makes sense, is the usual delay; an hour is a minute."""
    usual, headers = 0.01, ("30", "0", "86400", "-5", "Wed, 21 Oct 2026 07:28:00 GMT", None)
    waited: list[float] = []
    with receiving() as receiver, mock.patch.object(receivers, "FIRST_RETRY_S", usual):
        notifier = Notifier(receiver.url)
        with mock.patch.object(notifier._outbox.closing, "wait", side_effect=waited.append):
            for header in headers:
                receiver.answers, receiver.retry_after = [429], header
                notifier.send([OPENED], [])
                receiver.wait_for(2)
        notifier.close(PATIENCE_S)
    assert waited == [30.0, usual, 60.0, usual, usual, usual]
    assert notifier.counts["sent"] == len(headers)


def test_a_receiver_that_is_not_there_costs_counted_messages_and_nothing_waits() -> None:
    with receiving() as receiver:
        url = receiver.url
    with mock.patch.object(receivers, "MOST_WAITING", 3):
        notifier = Notifier(url)
    for _ in range(10):
        notifier.send([OPENED], [])
    notifier.close(PATIENCE_S)
    counts = notifier.counts
    assert (counts["sent"], counts["failed"] + counts["dropped"]) == (0, 10)
    assert counts["dropped"] >= 6  # one is on its way, three wait
    assert notifier.problem is not None
    assert notifier.problem.startswith("cannot be reached: ")


def test_a_receiver_that_fails_and_answers_again_is_said_once_each() -> None:
    """Neither the path of the address, which may be a secret, nor each attempt."""
    with receiving(500, 503) as receiver, mock.patch.object(receivers, "FIRST_RETRY_S", 0.01):
        notifier = Notifier(f"{receiver.url}/secret")
        assert [*notifier.changes()] == []
        notifier.problem = "answers 500"
        (said,) = notifier.changes()
        assert [*notifier.changes()] == []
        notifier.send([OPENED], [])
        receiver.wait_for(3)
        notifier.close(PATIENCE_S)
    where = receiver.url.removeprefix("http://").partition("/")[0]
    assert said.startswith(f"--notify: {where} answers 500; trying again after growing delays")
    assert [*notifier.changes()] == [f"--notify: {where} answers again"]
    assert [*notifier.losses()] == []


def test_a_redirect_is_no_delivery() -> None:
    """A browser would be led to a page to log in; the message would be gone."""
    with receiving(302) as receiver, mock.patch.object(receivers, "FIRST_RETRY_S", 0.01):
        notifier = Notifier(receiver.url)
        notifier.send([OPENED], [])
        receiver.wait_for(2)
        notifier.close(PATIENCE_S)
    assert (len(receiver.got), receiver.fetched) == (2, 0)
    assert (notifier.counts["sent"], notifier.problem) == (1, None)
    with receiving(302) as receiver, mock.patch.object(receivers, "MOST_ATTEMPTS", 1):
        notifier = Notifier(receiver.url)
        notifier.send([OPENED], [])
        receiver.wait_for(1)
        notifier.close(PATIENCE_S)
    assert (notifier.counts["sent"], notifier.counts["failed"], notifier.problem) == (0, 1, "answers 302")


def test_a_message_is_given_up_after_the_last_attempt() -> None:
    attempts = mock.patch.multiple(receivers, MOST_ATTEMPTS=3, FIRST_RETRY_S=0.01)
    with receiving(500, 500, 500) as receiver, attempts:
        notifier = Notifier(receiver.url)
        notifier.send([OPENED], [])
        receiver.wait_for(3)
        notifier.close(PATIENCE_S)
    assert (len(receiver.got), notifier.counts["sent"], notifier.counts["failed"]) == (3, 0, 1)


def test_name_and_password_of_an_address_are_sent_and_never_shown() -> None:
    with receiving(500) as receiver, mock.patch.object(receivers, "FIRST_RETRY_S", 0.01):
        notifier = Notifier(receiver.url.replace("http://", "http://on%20call:p%40ss@"))
        notifier.problem = "answers 500"
        (said,) = notifier.changes()
        notifier.send([OPENED], [])
        receiver.wait_for(2)
        notifier.close(PATIENCE_S)
    assert receiver.authorization == ["Basic b24gY2FsbDpwQHNz"] * 2  # on call:p@ss
    assert "ss@" not in said
    with pytest.raises(SelectionError) as refused:
        Notifier("ftp://on-call:secret@host/hidden")
    assert "secret" not in str(refused.value)
    assert "hidden" not in str(refused.value)
    assert "ftp://host/..." in str(refused.value)


def test_a_message_that_a_receiver_never_finishes_to_take_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        notifier = Notifier(f"http://127.0.0.1:{silent.getsockname()[1]}/hook")
        notifier.send([OPENED], [])
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(4) == b"POST"
            notifier.close(0)
            assert (notifier.counts["sent"], notifier.counts["failed"], notifier.counts["dropped"]) == (0, 0, 1)
            (line,) = notifier.losses()
    assert line.startswith("--notify: 1 message did not reach 127.0.0.1:")


def test_a_message_tells_of_the_costliest_of_very_many_incidents() -> None:
    many = [replace(OPENED, incident_id=n, cause=structs.replace(SLOW, share=n / 100)) for n in range(1, 51)]
    with receiving() as receiver:
        notifier = Notifier(receiver.url)
        notifier.send(many, [CLOSED])
        receiver.wait_for(1)
        notifier.close(PATIENCE_S)
    (said,) = receiver.got
    assert [row["incident"] for row in said["incidents"]] == [*range(50, 30, -1), 7]
    assert said["left_out"] == 30
    assert text_message([OPENED], [], "", 30).endswith("\n\nand 30 more incidents that cost less")


def test_slack_gets_a_text_through_apprise() -> None:
    """Its address is that of a webhook, and it takes no JSON of ours."""
    with mock.patch("apprise.Apprise.notify", return_value=True) as notify_all:
        notifier = Notifier(f"https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/{'x' * 24}", "https://dash")
        notifier.send([OPENED], [])
        notifier.close(PATIENCE_S)
    assert notify_all.call_args.kwargs["body"].startswith("\N{LARGE RED CIRCLE} **job \\<1\\>**: incident 7 opened")
    assert notifier.counts["sent"] == 1


def test_an_incident_that_ended_with_its_job_is_not_called_cured() -> None:
    ended = replace(CLOSED, closed_window=None)
    assert text_message([], [ended], "") == (
        "\N{MEDIUM WHITE CIRCLE} **job \\<1\\>**: incident 7 closed after 5 min 0 s, the job ended: rank 3: slow"
    )


def test_other_receivers_get_a_text_in_markdown() -> None:
    """`json://` is Apprise's own receiver, which can be played here; it is refused once, and tried again."""
    with receiving(500) as receiver, mock.patch.object(receivers, "FIRST_RETRY_S", 0.01):
        told = []
        notifier = Notifier(f"json://127.0.0.1:{receiver.server_port}", "https://dash", arrived=told.append)
        notifier.send([OPENED], [CLOSED])
        receiver.wait_for(2)
        notifier.close(PATIENCE_S)
    assert notifier.counts["sent"] == 1
    assert told == [[(7, "opened"), (7, "closed")]]
    assert receiver.got[1]["message"].splitlines() == [
        "\N{LARGE RED CIRCLE} **job \\<1\\>**: incident 7 opened: rank 3: slow",
        "**Since**: 2026-01-01 12:00:00 UTC",
        "**Who**: rank 3",
        "**Do**: replace it",
        "**More to check**: look",
        "[the evidence](https://dash/job?job=job+%3C1%3E&window=4)",
        "",
        (
            "\N{LARGE GREEN CIRCLE} **job \\<1\\>**: incident 7 closed after 5 min 0 s, no longer seen since window 5:"
            " rank 3: slow"
        ),
        "[the evidence](https://dash/job?job=job+%3C1%3E&window=4)",
    ]


def test_without_apprise_the_extra_is_named() -> None:
    with mock.patch.dict("sys.modules", {"apprise": None}), pytest.raises(SelectionError, match=r"\[notify\]'$"):
        Notifier("msteams://host/token")


def test_what_is_no_web_address_is_refused() -> None:
    for url in (
        "ftp://host/x",
        "host/x",
        "https://",
        "file:///etc/passwd",
        "http://[host/x",
        "http://host/a b",
        "http://host:99999/",
    ):
        with case(url), pytest.raises(SelectionError, match="expected an address such as https://host/path"):
            Notifier(url)
