"""The process that answers requests: waitress as a worker of gunicorn, which restarts it if it dies.

In: sockets that listen, and the application. Out: answers. One loop reads requests and writes answers of all
connections; a thread gets a request once it is complete, and leaves the answer to the loop. So a client that sends or
reads slowly, or not at all, holds a connection but no thread, and only briefly: a connection that waits for its client
too long is closed; with too many connections, the one that has waited longest is closed.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from gunicorn.workers.base import Worker as GunicornWorker
from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import BaseWSGIServer, TcpWSGIServer, UnixWSGIServer
from waitress.task import ThreadedTaskDispatcher, WSGITask

from tracekit.dashboards.web.access import HEALTH, MOST_BYTES_ASKED, WithoutPrefix
from tracekit.dashboards.web.attempts import network_of

#: A connection waits this long for its client, plus the time of its bytes at SLOWEST_BYTES_PER_S.
PATIENCE_S, SLOWEST_BYTES_PER_S = 30.0, 10_000
#: Open connections, of one address (for IPv6, one /64 network) and in all. A browser opens six.
MOST_OF_ADDRESS, MOST_IN_ALL = 100, 500
#: The address, with a view and kept what-ifs, takes up to 8 kB of the request's head; cookies take little.
LONGEST_HEAD = 32 * 1024
#: Unread bytes of answers above which a connection gets no further answers.
MOST_NOT_TAKEN = 1024 * 1024


class _Task(WSGITask):  # type: ignore[misc]  # waitress has no types
    def service(self) -> None:
        """Answer a request. Afterwards the connection waits for its client."""
        try:
            super().service()
        finally:
            self.channel.wait()


class _Connection(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """A connection with a client. It waits for the client unless one of its requests is being answered."""

    task_class = _Task

    def __init__(self, server: _Limits, sock: socket.socket, address: Any, *arguments: Any, **options: Any) -> None:
        self.network = network_of(address[0])
        self.wait()
        super().__init__(server, sock, address, *arguments, **options)
        server.make_room(self)

    def received(self, data: bytes) -> bool:
        """Receive data from the client; close the connection if Python cannot parse its numbers."""
        try:
            return bool(super().received(data))
        except ValueError:
            self.handle_close()
            return False

    def wait(self) -> None:
        """Record that the connection waits for its client from now on."""
        self.waiting_since = monotonic()
        self.moved = 0

    def recv(self, size: int) -> bytes:
        """Return bytes from the client."""
        data: bytes = super().recv(size)
        self.moved += len(data)
        return data

    def send(self, data: bytes, do_close: bool = True) -> int:
        """Send data; return the number of bytes that the client's system accepted."""
        sent: int = super().send(data, do_close)
        self.moved += sent
        return sent

    def is_overdue(self, now: float) -> bool:
        """True if the client is slower than allowed."""
        return not self.requests and now > self.waiting_since + PATIENCE_S + self.moved / SLOWEST_BYTES_PER_S


class _Limits(BaseWSGIServer):  # type: ignore[misc]  # waitress has no types
    """A server with limits on the number and the idle time of connections."""

    channel_class = _Connection
    active_channels: dict[int, _Connection]

    def maintenance(self, _now: float) -> None:
        """Close the connections of slow clients.

        waitress would only mark them and close them once they become writable: never, if the client does not read.
        """
        now = monotonic()
        for connection in list(self.active_channels.values()):
            if connection.is_overdue(now):
                connection.handle_close()

    def make_room(self, new: _Connection) -> None:
        """If there are too many connections, of this client or in total, close the one that has waited longest."""
        everybody = list(self.active_channels.values())
        own = [one for one in everybody if one.network == new.network]
        for those, most in ((own, MOST_OF_ADDRESS), (everybody, _most_in_all())):
            if len(those) > most:
                min((one for one in those if not one.requests), key=lambda one: one.waiting_since).handle_close()

    def add_task(self, connection: _Connection) -> None:
        """Queue the first request of a connection, unless its client has not read earlier answers."""
        if connection.total_outbufs_len > MOST_NOT_TAKEN:
            connection.requests.clear()
            connection.close_when_flushed = True
        else:
            super().add_task(connection)


class _Tcp(_Limits, TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    pass


class _Unix(_Limits, UnixWSGIServer):  # type: ignore[misc]  # waitress has no types
    pass


class _Threads(ThreadedTaskDispatcher):  # type: ignore[misc]  # waitress has no types
    """`count` threads for pages, and one for health checks, which are answered while all others are busy."""

    def __init__(self, count: int, health: str) -> None:
        super().__init__()
        self._path = health
        self.set_thread_count(count)
        self._health = ThreadedTaskDispatcher()
        self._health.set_thread_count(1)

    def add_task(self, connection: _Connection) -> None:
        """Queue a request."""
        request = connection.requests[0]
        is_health = not request.error and request.path in (HEALTH, self._path)
        self._health.add_task(connection) if is_health else super().add_task(connection)


def make_server(listening: socket.socket, application: Any, threads: int, loop: dict[int, Any]) -> _Limits:
    """A server for a listening socket, driven by wasyncore in `loop`; `threads` answer its requests."""
    kind = _Unix if listening.family == socket.AF_UNIX else _Tcp
    settings = Adjustments(
        max_request_header_size=LONGEST_HEAD,
        max_request_body_size=MOST_BYTES_ASKED + 1,
        # A thread never waits for a client to read an answer; unread parts go to a file.
        outbuf_high_watermark=2**62,
        connection_limit=2**31,
        clear_untrusted_proxy_headers=False,  # access.py decides which proxy to trust
        ident=None,
    )
    kept = (listening.family, listening.type, listening.proto, listening.getsockname())
    return kind(
        application,
        loop,
        _sock=listening,
        dispatcher=_Threads(threads, _prefix_of(application) + HEALTH[1:]),
        adj=settings,
        bind_socket=False,
        sockinfo=kept,
    )


def _prefix_of(application: Any) -> str:
    """The path under which browsers see the application."""
    inner = getattr(application, "wsgi_app", None)
    return inner.prefix if isinstance(inner, WithoutPrefix) else "/"


class Worker(GunicornWorker):  # type: ignore[misc]  # gunicorn has no types
    """Serves requests until gunicorn ends it: on SIGTERM after the requests in progress, on SIGINT at once."""

    _servers: tuple[_Limits, ...] = ()

    def run(self) -> None:
        """Serve; gunicorn calls this in a process of its own."""
        logging.getLogger("waitress").setLevel(logging.ERROR)  # queued requests need no warning
        self._loop: dict[int, Any] = {}
        self._servers = tuple(make_server(one.sock, self.wsgi, self.cfg.threads, self._loop) for one in self.sockets)
        while self.alive and self.ppid == os.getppid():
            self._turn()
        self._finish()

    def _turn(self) -> None:
        self.notify()
        wasyncore.loop(timeout=1.0, use_poll=True, map=self._loop, count=1)
        for server in self._servers:  # waitress uses a clock that can be set
            server.maintenance(0.0)

    def _finish(self) -> None:
        """Answer the requests in progress and accept no more."""
        for server in self._servers:
            server.accepting = False
        end = monotonic() + self.cfg.graceful_timeout
        while monotonic() < end and any(
            one.requests or one.total_outbufs_len for server in self._servers for one in server.active_channels.values()
        ):
            self._turn()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM: leave the loop."""
        super().handle_exit(sig, frame)
        for server in self._servers:
            server.pull_trigger()

    def handle_quit(self, _sig: int, _frame: FrameType | None) -> NoReturn:
        """SIGINT, in the main thread between any two of its instructions: exit at once, as the server only reads."""
        os._exit(0)


def _most_in_all() -> int:
    """Most connections in total: half of the files that the process may open, as each answer can take one."""
    return min(MOST_IN_ALL, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
