"""The server as it is run, whose loop is taken turn by turn, so that nothing depends on time."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from waitress import wasyncore

from tracekit.dashboards.browser.web.app import make_server

#: More than the systems of both ends keep of what nobody reads.
LARGE = b"x" * 10_000_000


@dataclass
class Turns:
    """A server with one thread whose loop is taken turn by turn, and whose clock stands until it is moved."""

    address: tuple[str, int]
    server: Any
    clock: list[float]
    clients: ExitStack
    answered: list[str]

    def client(self, sent: bytes = b"", *, small: bool = False) -> socket.socket:
        """A connection that the server has taken, and over which that was sent; `small`: it can hold little."""
        before = set(self.server.active_channels.values())
        client = self.clients.enter_context(socket.create_connection(self.address, timeout=10))
        if small:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.until(lambda: set(self.server.active_channels.values()) - before)
        client.sendall(sent)
        return client

    def until(self, done: Callable[[], object]) -> None:
        """Take turns until something is so."""
        while not done():
            self.server.asyncore.loop(timeout=0.1, use_poll=True, map=self.server._map, count=1)

    def asked(self, path: str, **headers: str) -> bytes:
        """The head of the answer to a new client."""
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
        return self.answer(self.client("\r\n".join([*lines, "", ""]).encode()))

    def answer(self, client: socket.socket, *, whole: bool = False) -> bytes:
        """The head of the answer to a client, or all of one that fits into a megabyte."""
        self.until(lambda: arrived(client) and (self.idle() or not whole))
        data = client.recv(1 << 20)
        return data if whole else data.split(b"\r\n\r\n")[0]

    def idle(self) -> bool:
        """Whether no request is being answered, and none can be read: a thread notes its activity after the answer."""
        asked = any(one.requests for one in self.server.active_channels.values())
        return not asked and self.server.task_dispatcher.active_count == 0

    def after(self, seconds: float) -> None:
        """Let time pass once clients have what they take, after which the server looks at its connections."""
        self.until(lambda: not any(map(_being_sent, self.server.active_channels.values())))
        self.clock[0] += seconds
        self.server.maintenance(self.clock[0])

    @property
    def open(self) -> int:
        """How many connections are open."""
        return len(self.server.active_channels)


def arrived(client: socket.socket) -> bool:
    """Whether a client can read: an answer, or the end."""
    return bool(select.select([client], [], [], 0)[0])


def _being_sent(connection: Any) -> bool:
    """Whether a part of an answer waits that the client would take: sending it is activity."""
    return bool(connection.total_outbufs_len and select.select([], [connection.socket], [], 0)[1])


def application(request: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    """Notes each request; answers one for /held when the test ends, and one for /large with much."""
    request["answered"].append(path := request["PATH_INFO"])
    if path == "/held":
        assert request["release"].wait(60)
    body = LARGE if path == "/large" else b"ok"
    start("200 OK", [("Content-Length", str(len(body)))])
    return [body]


@pytest.fixture
def serve_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Turns]]:
    """Serves an application; `answered` has the paths of its requests."""
    with ExitStack() as stack:
        clock, answered, release = [0.0], list[str](), threading.Event()
        for module in ("channel", "server"):
            monkeypatch.setattr(f"waitress.{module}.time", SimpleNamespace(time=lambda: clock[0]))

        def serve(served: Any) -> Turns:
            def noted(request: dict[str, Any], start: Any) -> Any:
                return served({**request, "answered": answered, "release": release}, start)

            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server = make_server(listening, noted, 1)
            stack.callback(server.task_dispatcher.shutdown)
            stack.callback(wasyncore.close_all, server._map)
            stack.callback(release.set)
            return Turns(listening.getsockname()[:2], server, clock, stack.enter_context(ExitStack()), answered)

        yield serve
