"""The web server: waitress, with connections that slow clients cannot use up.

In: a listening socket and the application. Out: answers, until stopped. One loop reads requests and writes answers of
all connections; a thread gets a request once it is complete, and leaves the answer to the loop. So a client that sends
or reads slowly, or not at all, holds a connection but no thread; a silent one is closed after a while, and with too
many the one that has been silent for longest. systemd, or whatever runs the container, starts the process again should
it die.
"""

from __future__ import annotations

import logging
import resource
import socket
from typing import Any

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from tracekit.dashboards.browser.web.access import HEALTH, MOST_BYTES_ASKED

#: A client may be silent for so long.
PATIENCE_S = 30
#: Open connections; fewer if the process may not open twice as many files. A browser opens six.
MOST_CONNECTIONS = min(500, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
#: The address, with a view and kept what-ifs, takes up to 8 kB of the request's head; cookies take little.
LONGEST_HEAD = 32 * 1024
#: Unread bytes of answers above which a connection gets no further answers.
MOST_NOT_TAKEN = 1024 * 1024


class _Threads(ThreadedTaskDispatcher):  # type: ignore[misc]  # waitress has no types
    """`count` threads for pages, and one for health checks, which are answered while all others are busy."""

    def __init__(self, count: int, prefix: str) -> None:
        super().__init__()
        self._paths = (HEALTH, prefix + HEALTH[1:])
        self._health = ThreadedTaskDispatcher()
        self._health.set_thread_count(1)
        self.set_thread_count(count)

    def shutdown(self, cancel_pending: bool = True, timeout: float = 5) -> bool:
        """Let the threads finish their answers, then end them."""
        self._health.shutdown(cancel_pending, timeout)
        return bool(super().shutdown(cancel_pending, timeout))

    def add_task(self, connection: HTTPChannel) -> None:
        """Queue the first request of a connection, unless its client has not read earlier answers."""
        request = connection.requests[0]
        if connection.total_outbufs_len > MOST_NOT_TAKEN:
            connection.requests.clear()
            connection.close_when_flushed = True
        elif not request.error and request.path in self._paths:
            self._health.add_task(connection)
        else:
            super().add_task(connection)


class _Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    def handle_accept(self) -> None:
        """Accept a connection; close the one that has been silent for longest if there are too many."""
        super().handle_accept()
        if len(self.active_channels) > MOST_CONNECTIONS:
            waiting = [connection for connection in self.active_channels.values() if not connection.requests]
            min(waiting, key=lambda connection: connection.last_activity).handle_close()

    def maintenance(self, now: float) -> None:
        """Close connections whose clients are silent.

        waitress would mark them, and close them once they become writable: never, if the client does not read.
        """
        for connection in list(self.active_channels.values()):
            if not connection.requests and now - connection.last_activity > PATIENCE_S:
                connection.handle_close()


def make_server(listening: socket.socket, application: Any, threads: int, prefix: str = "/") -> TcpWSGIServer:
    """Return a server for a listening socket; `run` serves until KeyboardInterrupt or SystemExit.

    `threads` answer its requests. `prefix`: the path under which browsers see the application.
    """
    logging.getLogger("waitress").setLevel(logging.ERROR)  # queued requests need no warning
    settings = Adjustments(
        max_request_header_size=LONGEST_HEAD,
        max_request_body_size=MOST_BYTES_ASKED + 1,
        # A thread never waits for a client to read an answer; unread parts go to a file.
        outbuf_high_watermark=2**62,
        connection_limit=2**31,
        cleanup_interval=1,
        clear_untrusted_proxy_headers=False,  # access.py decides which proxy to trust
        asyncore_use_poll=True,
        ident=None,
    )
    socket_information = (listening.family, listening.type, listening.proto, listening.getsockname())
    return _Server(
        application,
        _sock=listening,
        dispatcher=_Threads(threads, prefix),
        adj=settings,
        bind_socket=False,
        sockinfo=socket_information,
    )
