"""The web server: gunicorn, which keeps a worker of ours (worker.py) alive around the dashboard.

In: a store, a bound socket and the access rules. Out: a server that runs until stopped. `create` returns the
application for users who run gunicorn themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flask
from gunicorn.app.base import BaseApplication
from gunicorn.errors import AppImportError

from tracekit.base.errors import TracekitError
from tracekit.base.object_storage import absolute
from tracekit.dashboards.web.access import Access, read_access
from tracekit.dashboards.web.auth import read_auth
from tracekit.dashboards.web.worker import Worker

#: gunicorn replaces a worker that is silent for this long.
TIMEOUT_S = 300
#: Read by `create`: values of `--auth`, `--allowed-host` (comma-separated) and `--public-url`.
AUTH_VARIABLE = "TRACEKIT_DASHBOARD_AUTH"
HOSTS_VARIABLE = "TRACEKIT_DASHBOARD_ALLOWED_HOSTS"
URL_VARIABLE = "TRACEKIT_DASHBOARD_PUBLIC_URL"
STUDY_VARIABLE, PRICE_VARIABLE = "TRACEKIT_STUDY", "TRACEKIT_GPU_HOUR"


def create(store: str | None = None) -> flask.Flask:
    """The WSGI application, for `gunicorn 'tracekit.dashboards.web.server:create("jobs.store")'`.

    Without `store`: $TRACEKIT_STORE, else ./tracekit.store. $TRACEKIT_DASHBOARD_AUTH, $TRACEKIT_DASHBOARD_ALLOWED_HOSTS
    and $TRACEKIT_DASHBOARD_PUBLIC_URL take the place of options, $TRACEKIT_STUDY that of `--study`, $TRACEKIT_GPU_HOUR
    that of `--gpu-hour`. Raises AppImportError, which gunicorn prints as one line, if one of them is invalid.
    """
    from tracekit.dashboards.web.app import make_app
    from tracekit.store import default_store

    path = default_store() if store is None else Path(store)
    study = os.environ.get(STUDY_VARIABLE)
    where = Path(study).absolute() if study else None
    return make_app(absolute(path), _access_of_environment(), where, _price_of_environment()).server


def _price_of_environment() -> float | None:
    text = os.environ.get(PRICE_VARIABLE)
    try:
        price = None if not text else float(text)
    except ValueError:
        price = -1.0
    if price is not None and not 0 <= price < float("inf"):
        raise AppImportError(f"${PRICE_VARIABLE}: {text!r:.40}; expected the price of a GPU-hour, such as 2.5")
    return price


def _access_of_environment() -> Access:
    """Parse the variables; an empty authentication variable is an error, because it would admit everybody."""
    text = os.environ.get(AUTH_VARIABLE)
    try:
        auth = None if text is None else read_auth(text)
    except TracekitError as error:
        raise AppImportError(f"${AUTH_VARIABLE}: {error}") from None
    hosts = filter(None, os.environ.get(HOSTS_VARIABLE, "").replace(" ", "").split(","))
    try:
        return read_access(auth, hosts, os.environ.get(URL_VARIABLE) or None)
    except TracekitError as error:
        raise AppImportError(f"${HOSTS_VARIABLE}, ${URL_VARIABLE}: {error}") from None


def serve(
    store: Path,
    study: Path | None,
    listening: int,
    threads: int,
    access: Access,
    at_end: Callable[[], None],
    gpu_hour: float | None = None,
) -> None:
    """Serve requests until SIGINT or SIGTERM.

    `listening`: the descriptor of a socket. `at_end`: called once, after the server's end. `gpu_hour`: as of
    `make_app`.
    """

    def make() -> flask.Flask:
        from tracekit.dashboards.web.app import make_app

        return make_app(store, access, study, gpu_hour).server

    settings = {
        "bind": f"fd://{listening}",
        "workers": 1,
        "worker_class": Worker,
        "threads": threads,
        "timeout": TIMEOUT_S,
        "loglevel": "warning",
        "control_socket_disable": True,
        "proc_name": "tracekit-dashboard",
        "on_exit": lambda _server: at_end(),
        "worker_exit": _leave,
    }
    _Gunicorn(settings, make).run()


def _leave(_server: Any, worker: Worker) -> None:
    """End a worker that has answered its requests immediately. A normal exit of Python would wait for prefetching
    threads, or for threads that stayed in the process that forked.
    """
    if worker.booted:
        os._exit(0)


class _Gunicorn(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
    """Gunicorn started from here instead of from its own command line."""

    def __init__(self, settings: Mapping[str, Any], make: Callable[[], flask.Flask]) -> None:
        self._settings, self.load = settings, make
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._settings.items():
            self.cfg.set(name, value)
