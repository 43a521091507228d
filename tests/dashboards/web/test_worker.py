"""Clients that are slow, or never finish, or take no answer: they hold no thread, and nobody else waits for them."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from waitress import wasyncore
from werkzeug.security import generate_password_hash

from tests.dashboards.web.test_serving import dashboard
from tracekit.dashboards.web import worker
from tracekit.dashboards.web.worker import LONGEST_HEAD, MOST_OF_ADDRESS, PATIENCE_S, SLOWEST_BYTES_PER_S, make_server

#: What slow clients send before they stop, or of which they do not read the answers.
UNFINISHED = {
    "nothing": b"",
    "a head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-",
    "a head of HTTP/1.0": b"GET / HTTP/1.0\r\n",
    "a body": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nuser=ann",
    "a body of which nothing comes": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n",
    "chunks": b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nuser=\r\n",
    "pages nobody reads": b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
}
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
#: More than the systems of both ends keep of what nobody reads.
LARGE = b"x" * 10_000_000


@contextmanager
def connections(address: tuple[str, int], sent: Iterable[bytes]) -> Iterator[None]:
    """A connection for each of `sent`, over which that is sent and nothing is read."""
    with ExitStack() as stack:
        for data in sent:
            client = stack.enter_context(socket.create_connection(address, timeout=10))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(data)
        yield


def status(address: tuple[str, int], path: str, **headers: str) -> int:
    """The status of an answer, which has to come before slow clients are left."""
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=PATIENCE_S - 5)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_two_hundred_slow_clients_keep_nobody_waiting_and_try_no_password(sample_store: Path, tmp_path: Path) -> None:
    """Of each kind at once: more unfinished logins than an address may try passwords. Nobody has logged in before."""
    (tmp_path / "users").write_text(f"ann:{generate_password_hash('right', 'pbkdf2:sha256:1')}\n")
    right = f"Basic {b64encode(b'ann:right').decode()}"
    with dashboard(sample_store, "--auth", f"password:{tmp_path / 'users'}", folder=tmp_path) as url:
        address = ("127.0.0.1", urlsplit(url).port or 0)
        with connections(address, list(UNFINISHED.values()) * (200 // len(UNFINISHED) + 1)):
            assert status(address, "/healthz") == 200
            assert status(address, "/", Authorization=right) == 200


@dataclass
class Turns:
    """A server with one thread whose loop is taken turn by turn, and whose clock stands until it is moved."""

    address: tuple[str, int]
    server: Any
    loop: dict[int, Any]
    clock: list[float]
    clients: ExitStack
    answered: list[str]

    def client(self, sent: bytes = b"") -> socket.socket:
        """A connection that the server has taken, and over which that was sent."""
        before = self.open
        client = self.clients.enter_context(socket.create_connection(self.address, timeout=10))
        self.until(lambda: self.open != before)
        client.sendall(sent)
        return client

    def until(self, done: Callable[[], object]) -> None:
        """Take turns until something is so."""
        while not done():
            wasyncore.loop(timeout=0.1, use_poll=True, map=self.loop, count=1)

    def after(self, seconds: float) -> None:
        """Let time pass, after which the server looks at its connections."""
        self.clock[0] += seconds
        self.server.maintenance(0.0)

    @property
    def open(self) -> int:
        """How many connections are open."""
        return len(self.server.active_channels)

    @property
    def moved(self) -> int:
        """Bytes that went over the connections since their clients are waited for."""
        return sum(one.moved for one in self.server.active_channels.values())


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    clock, answered, release = [0.0], [], threading.Event()

    def application(request: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        answered.append(path := request["PATH_INFO"])
        if path == "/held":
            assert release.wait(60)
        body = LARGE if path == "/large" else b"ok"
        start("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    monkeypatch.setattr(worker, "monotonic", lambda: clock[0])
    loop: dict[int, Any] = {}
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as clients:
        server = make_server(listening, application, 1, loop)
        yield Turns(listening.getsockname()[:2], server, loop, clock, clients, answered)
        release.set()
        wasyncore.close_all(loop)


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
def test_a_client_that_stops_is_left_after_a_while(sent: bytes, turns: Turns) -> None:
    turns.client(sent)
    turns.until(lambda: not sent or turns.moved >= len(sent) or turns.answered)
    turns.until(lambda: not any(one.requests for one in turns.server.active_channels.values()))
    turns.after(PATIENCE_S - 1)
    assert turns.open == 1
    turns.after(2)
    assert turns.open == 0


@pytest.mark.parametrize("kind", ["a head", "a body", "chunks"])
def test_a_byte_now_and_then_buys_no_time(kind: str, turns: Turns) -> None:
    client = turns.client(UNFINISHED[kind])
    for sent in range(int(PATIENCE_S) + 1):
        client.sendall(b"1")
        turns.until(lambda sent=sent: turns.moved > len(UNFINISHED[kind]) + sent)
        turns.after(1)
    assert turns.open == 0


def test_who_does_not_take_a_large_answer_is_left_and_holds_no_thread(turns: Turns) -> None:
    turns.client(GET % b"/large")
    turns.until(lambda: turns.answered)
    other = turns.client(GET % b"/other")
    turns.until(lambda: "/other" in turns.answered)
    turns.until(lambda: select.select([other], [], [], 0)[0])
    turns.after(PATIENCE_S + turns.moved / SLOWEST_BYTES_PER_S + 1)
    assert turns.open == 0


def test_who_leaves_answers_untaken_is_not_answered_further_on_that_connection(turns: Turns) -> None:
    client = turns.client(GET % b"/large" * 20)
    turns.until(lambda: any(one.close_when_flushed for one in turns.server.active_channels.values()))
    assert turns.answered == ["/large"]
    taken = 0
    while turns.open:
        turns.until(lambda: not turns.open or select.select([client], [], [], 0)[0])
        taken += len(client.recv(1 << 20))
    while more := client.recv(1 << 20):
        taken += len(more)
    assert len(LARGE) < taken < 2 * len(LARGE)


def test_requests_of_one_connection_are_answered_in_their_order(turns: Turns) -> None:
    turns.client(GET % b"/a" + GET % b"/b" + GET % b"/c")
    turns.until(lambda: len(turns.answered) == 3)
    assert turns.answered == ["/a", "/b", "/c"]


def test_who_sends_fast_enough_may_send_for_long(turns: Turns) -> None:
    """A megabyte at the least speed takes longer than a client may keep silent."""
    piece = b"x" * 10_000
    client = turns.client(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
    for sent in range(99):
        client.sendall(piece)
        turns.until(lambda sent=sent: turns.moved > len(piece) * (sent + 1))
        turns.after(len(piece) / SLOWEST_BYTES_PER_S)
    client.sendall(piece)
    turns.until(lambda: turns.answered)


def test_a_client_with_too_many_connections_loses_the_one_that_waited_longest(turns: Turns) -> None:
    first, second = turns.client(), turns.client()
    for _ in range(MOST_OF_ADDRESS - 2):
        turns.clock[0] += 0.001
        turns.client()
    assert turns.open == MOST_OF_ADDRESS
    third = turns.clients.enter_context(socket.create_connection(turns.address, timeout=10))
    turns.until(lambda: select.select([first], [], [], 0)[0])
    assert first.recv(1) == b""
    second.sendall(GET % b"/second")
    third.sendall(GET % b"/third")
    turns.until(lambda: len(turns.answered) == 2)
    assert turns.open == MOST_OF_ADDRESS


def test_health_is_answered_while_all_threads_are_busy(turns: Turns) -> None:
    turns.client(GET % b"/held")
    turns.until(lambda: turns.answered)
    turns.client(GET % b"/waiting")
    turns.client(GET % b"/healthz")
    turns.until(lambda: "/healthz" in turns.answered)
    assert turns.answered == ["/held", "/healthz"]
    turns.after(100 * PATIENCE_S)
    assert turns.open == 2, "whose requests are in progress is not waited for"


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
    turns.until(lambda: select.select([client], [], [], 0)[0])
    assert client.recv(12).split()[1] == status
    turns.until(lambda: not turns.open and not sending.is_alive())
    assert not turns.answered
