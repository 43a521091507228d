"""Clients that are slow, or never finish, or take no answer: they hold no thread, and nobody else waits for them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.web.conftest import LARGE, Turns, application, arrived
from tests.dashboards.web.test_tokens import NEW, bearer, write
from tracekit.dashboards.browser.web import app
from tracekit.dashboards.browser.web.access import Access, Tokens
from tracekit.dashboards.browser.web.app import LONGEST_HEAD, PATIENCE_S, make_app

#: What slow clients send before they stop, or of which they do not read the answers.
UNFINISHED = {
    "nothing": b"",
    "a head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-",
    "a head of HTTP/1.0": b"GET / HTTP/1.0\r\n",
    "a body": b"POST /handle HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nuser=ann",
    "a body of which nothing comes": b"POST /handle HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n",
    "chunks": b"POST /handle HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nuser=\r\n",
    "pages nobody reads": b"GET /assets/tracekit.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
}
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def turns(serve_turns: Callable[[Any], Turns]) -> Turns:
    return serve_turns(application)


def test_two_hundred_slow_clients_keep_nobody_waiting(
    sample_store: Path, tmp_path: Path, serve_turns: Callable[[Any], Turns]
) -> None:
    """Of each kind at once, with one thread. Nobody waits: the loop takes what has arrived, and has no time to pass."""
    tokens = Tokens(write(tmp_path / "tokens", f"ann: {NEW}\n"))
    turns = serve_turns(make_app(sample_store, Access(tokens)).server)
    slow = [turns.client(sent, small=True) for sent in list(UNFINISHED.values()) * (200 // len(UNFINISHED) + 1)]
    assert turns.open == len(slow) >= 200
    for path, headers in (("/healthz", {}), ("/", {"Authorization": bearer(NEW)})):
        assert turns.asked(path, **headers).startswith(b"HTTP/1.1 200 ")
    assert turns.asked("/").startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
def test_a_client_that_is_silent_is_left_after_a_while(sent: bytes, turns: Turns) -> None:
    turns.client(sent)
    other = turns.client(GET % b"/last")  # which the one thread answers after those of the first
    turns.until(lambda: "/last" in turns.answered and turns.idle())
    turns.after(PATIENCE_S)
    assert turns.open == 2
    other.sendall(GET % b"/again")
    turns.until(lambda: "/again" in turns.answered and turns.idle())
    turns.after(1)
    assert turns.open == 1


def test_who_does_not_take_a_large_answer_is_left_and_holds_no_thread(turns: Turns) -> None:
    turns.client(GET % b"/large")
    turns.until(lambda: turns.answered)
    assert turns.asked("/other").startswith(b"HTTP/1.1 200 ")
    turns.after(PATIENCE_S + 1)
    assert turns.open == 0


def test_who_leaves_answers_untaken_is_not_answered_further_on_that_connection(turns: Turns) -> None:
    client = turns.client(GET % b"/large" * 20)
    turns.until(lambda: any(one.close_when_flushed for one in turns.server.active_channels.values()))
    assert turns.answered == ["/large"]
    taken = 0
    while turns.open:
        turns.until(lambda: not turns.open or arrived(client))
        taken += len(client.recv(1 << 20))
    while more := client.recv(1 << 20):
        taken += len(more)
    assert len(LARGE) < taken < 2 * len(LARGE)


def test_requests_of_one_connection_are_answered_in_their_order(turns: Turns) -> None:
    turns.client(GET % b"/a" + GET % b"/b" + GET % b"/c")
    turns.until(lambda: len(turns.answered) == 3)
    assert turns.answered == ["/a", "/b", "/c"]


def test_with_too_many_connections_the_one_that_has_been_silent_for_longest_goes(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends a byte now and then has no more right to stay than others, and nobody is kept out."""
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 4)
    busy = turns.client(GET % b"/held")
    turns.until(lambda: turns.answered)
    first, second, third = (turns.client() for _ in range(3))
    for client in (first, second, third):
        turns.clock[0] += 1
        client.sendall(b"G")
        turns.until(lambda: any(one.last_activity == turns.clock[0] for one in turns.server.active_channels.values()))
    turns.clock[0] += 1
    assert turns.asked("/healthz").startswith(b"HTTP/1.1 200 ")
    assert (turns.open, first.recv(1)) == (4, b"")
    assert not any(arrived(client) for client in (busy, second, third))


def test_everybody_is_answered_while_all_others_wait_for_a_thread(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is silent who waits for an answer, so that the newcomer goes."""
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 2)
    for path in (b"/held", b"/waiting"):
        turns.client(GET % path)
        turns.until(lambda: sum(len(one.requests) for one in turns.server.active_channels.values()) == turns.open)
    newcomer = turns.clients.enter_context(socket.create_connection(turns.address, timeout=10))
    turns.until(lambda: arrived(newcomer))
    assert (newcomer.recv(1), turns.open) == (b"", 2)


def test_health_is_answered_while_all_threads_are_busy(turns: Turns) -> None:
    turns.client(GET % b"/held")
    turns.until(lambda: turns.answered)
    turns.client(GET % b"/waiting")
    turns.client(GET % b"/healthz")
    turns.until(lambda: "/healthz" in turns.answered)
    assert turns.answered == ["/held", "/healthz"]
    turns.until(lambda: any(not one.requests for one in turns.server.active_channels.values()))
    turns.after(100 * PATIENCE_S)
    assert turns.open == 2, "whose requests are in progress is not silent"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"x" * LONGEST_HEAD, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * (LONGEST_HEAD // 6 + 1), b"431"),
        (b"POST / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n500000\r\n" + b"x" * 0x500000, b"413"),
    ],
    ids=["long address", "many headers", "large body", "impossible body", "large chunks"],
)
def test_what_is_too_large_is_refused(sent: bytes, status: bytes, turns: Turns) -> None:
    client = turns.client()
    sending = threading.Thread(target=client.sendall, args=(sent,))
    sending.start()
    turns.until(lambda: arrived(client))
    assert client.recv(12).split()[1] == status
    turns.until(lambda: not turns.open and not sending.is_alive())
    assert not turns.answered
