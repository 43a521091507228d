"""The web server process: gunicorn around the dashboard.

In: a store, a bound socket and who may look. Out: a server until it is told to stop. `create` is the application for
those who run gunicorn themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flask
from gunicorn.app.base import BaseApplication
from gunicorn.errors import AppImportError

from tracekit.dashboards.web.auth import Auth, read_auth
from tracekit.errors import TracekitError

#: A what-if of a large job keeps a thread this long at most before gunicorn takes the worker for dead.
TIMEOUT_S = 300
#: The longest address that gunicorn can be told to take: a view with kept what-ifs has a long one.
LONGEST_REQUEST_LINE = 8190
#: Read by `create`: what `--auth` says.
AUTH_VARIABLE = "TRACEKIT_DASHBOARD_AUTH"


@dataclass(frozen=True, slots=True)
class Serving:
    """How to serve: `listening` is the descriptor of a socket, `at_end` is called once, when the server has ended."""

    store: Path
    listening: int
    threads: int
    auth: Auth | None
    at_end: Callable[[], None]


def create(store: str | None = None) -> flask.Flask:
    """The WSGI application, for `gunicorn 'tracekit.dashboards.web.server:create("jobs.store")'`.

    Without `store`: $TRACEKIT_STORE, else ./tracekit.store. $TRACEKIT_DASHBOARD_AUTH takes the place of `--auth`.
    Raises AppImportError, of which gunicorn prints the one line, where that variable is set and cannot be understood.
    """
    from tracekit.dashboards.web.app import make_app
    from tracekit.store import default_store

    path = default_store() if store is None else Path(store)
    return make_app(path.absolute(), auth=_auth_of_environment()).server


def _auth_of_environment() -> Auth | None:
    """The authentication that the variable names: none where it is not set, and an error where it is empty."""
    text = os.environ.get(AUTH_VARIABLE)
    if text is None:
        return None
    try:
        return read_auth(text)
    except TracekitError as error:
        raise AppImportError(f"${AUTH_VARIABLE}: {error}") from None


def serve(serving: Serving) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    _Gunicorn(serving).run()


class _Gunicorn(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
    """Gunicorn started from here instead of from its own command line."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        super().__init__()

    def load_config(self) -> None:
        for name, value in {
            "bind": f"fd://{self._serving.listening}",
            "workers": 1,
            "worker_class": "gthread",
            "threads": self._serving.threads,
            "timeout": TIMEOUT_S,
            "limit_request_line": LONGEST_REQUEST_LINE,
            "loglevel": "warning",
            "control_socket_disable": True,
            "proc_name": "tracekit-dashboard",
            "on_exit": lambda _server: self._serving.at_end(),
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        from tracekit.dashboards.web.app import make_app

        return make_app(self._serving.store, auth=self._serving.auth).server
