"""The Dash application over one store, and its web server: waitress, with connections that slow clients
cannot use up.
"""

from __future__ import annotations

import logging
import re
import resource
import socket
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from dash import Dash, _callback
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from tracekit.dashboards.browser.data.queries import FleetStudy, Results
from tracekit.dashboards.browser.data.replays import Replays
from tracekit.dashboards.browser.ui.context import EXTENSION, Service
from tracekit.dashboards.browser.ui.shell import frame, read_ahead
from tracekit.dashboards.browser.web.access import HEALTH, MOST_BYTES_ASKED, Access
from tracekit.dashboards.browser.web.serving import harden
from tracekit.dashboards.browser.web.timeline_requests import serve_timeline
from tracekit.dashboards.figures.charts import figure
from tracekit.dashboards.theme import LIGHT

_DOCUMENT = """<!DOCTYPE html>
<html lang="en" data-prefix="%prefix%">
<head>{%metas%}<script src="%prefix%assets/theme.js"></script><title>{%title%}</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>
"""


#: Scripts of Dash that no page needs: polyfills for old browsers, and Dash's own table.
_UNUSED = re.compile(r'<script src="[^"]*(deps/polyfill@|/dash_table/)[^"]*"></script>\n')
#: A client may be silent for so long.
PATIENCE_S = 30
#: Open connections; fewer if the process may not open twice as many files. A browser opens six.
MOST_CONNECTIONS = min(500, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
#: The address, with a view and kept what-ifs, takes up to 8 kB of the request's head; cookies take little.
LONGEST_HEAD = 32 * 1024
#: Unread bytes of answers above which a connection gets no further answers.
MOST_NOT_TAKEN = 1024 * 1024


class _App(Dash):
    """Dash without its unused scripts."""

    def _generate_scripts_html(self) -> str:
        return _UNUSED.sub("", super()._generate_scripts_html())


def make_app(
    store: Path, access: Access | None = None, study: Path | None = None, gpu_hour: float | None = None
) -> Dash:
    """Build the dashboard of the store at `store` with that access; each page reads the store anew.

    `study`: a study of many jobs for the page Fleet. `gpu_hour`: the price of a GPU-hour.
    """
    access = access or Access()
    app = _App(
        __name__,
        use_pages=True,
        pages_folder="",  # pages are modules of this package, registered by importing them
        suppress_callback_exceptions=True,  # else Dash sends every page with the first one
        serve_locally=True,
        title="tracekit",
        update_title="",
        assets_folder=str(Path(__file__).parents[1] / "assets"),
        assets_ignore=r"theme\.js",  # inlined in the document
        requests_pathname_prefix=access.prefix,
        routes_pathname_prefix="/",
        index_string=_DOCUMENT.replace("%prefix%", escape(access.prefix)),
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    results = Results(store)
    fleet = None if study is None else FleetStudy(study)
    app.server.extensions[EXTENSION] = Service(results, Replays(results), access.prefix, fleet, gpu_hour)
    if fleet is not None:
        fleet.read_ahead()
    harden(app, access)
    app.server.before_request(read_ahead)  # after the access check
    serve_timeline(app)
    _give_callbacks(app)
    app.layout = frame
    figure(LIGHT)  # Plotly loads its modules with the first figure: better now than with the first page
    return app


@cache
def _declared() -> tuple[Any, ...]:
    """Import the pages and return the callbacks and functions that they register with Dash; none has a script."""
    import_module("tracekit.dashboards.browser.pages")
    registries: tuple[Any, ...] = (_callback.GLOBAL_CALLBACK_LIST, _callback.GLOBAL_CALLBACK_MAP)
    contents = tuple(registry.copy() for registry in registries)
    for registry in registries:
        registry.clear()
    return contents


def _give_callbacks(app: Dash) -> None:
    """Register the callbacks of the pages with the app: Dash does so only for the first app of a process."""
    callbacks, functions = _declared()
    app.callback_map.update({name: dict(function) for name, function in functions.items()})
    app._callback_list.extend(callbacks)  # noqa: SLF001 - as Dash does it


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
    """One loop reads requests and writes answers of all connections; a thread gets a request once it is complete, and
    leaves the answer to the loop. So a client that sends or reads slowly holds a connection but no thread; a silent one
    is closed after a while, and with too many the one that has been silent for longest.
    """

    def handle_accept(self) -> None:
        """Accept a connection; close the one that has been silent for longest if there are too many."""
        super().handle_accept()
        if len(self.active_channels) > MOST_CONNECTIONS:
            waiting = [connection for connection in self.active_channels.values() if not connection.requests]
            min(waiting, key=lambda connection: connection.last_activity).handle_close()

    def maintenance(self, now_s: float) -> None:
        """Close connections whose clients are silent.

        waitress only marks them and closes them once they are writable: never, if the client does not read.
        """
        for connection in list(self.active_channels.values()):
            if not connection.requests and now_s - connection.last_activity > PATIENCE_S:
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
