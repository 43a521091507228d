"""How the dashboard is served: who may ask, health checks, metrics, and headers that keep a page to itself.

In: the Dash app. Out: the same with what an operator needs around it. Nothing here writes to the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import flask
from dash import Dash
from werkzeug.exceptions import BadRequest, HTTPException

from tracekit.dashboards.ui.context import results
from tracekit.dashboards.web import downloads
from tracekit.dashboards.web.auth import Auth
from tracekit.errors import TracekitError
from tracekit.text import printable

if TYPE_CHECKING:
    from tracekit.live.metrics import JobStates

#: What a load balancer or Kubernetes may ask without a password; neither tells a name.
_OPEN = ("/healthz", "/readyz")
#: A page asks with a few kilobytes; more is an accident or an attack.
MOST_BYTES_ASKED = 4 * 1024 * 1024
#: What Dash itself answers: callbacks of the pages, and the files of its components.
_DASH, _FILES = "/_dash", "/_dash-component-suites/"


def harden(app: Dash, auth: Auth | None) -> None:
    """Add authentication, health checks, metrics, downloads, and headers that keep a page to this host."""
    server = app.server
    server.config["MAX_CONTENT_LENGTH"] = MOST_BYTES_ASKED
    server.before_request(lambda: None if auth is None or flask.request.path in _OPEN else auth.refusal(flask.request))
    server.after_request(lambda response: _restrict(app, response))
    server.register_error_handler(Exception, _failed)
    server.add_url_rule("/healthz", "healthz", _healthz)
    server.add_url_rule("/readyz", "readyz", _readyz)
    server.add_url_rule("/metrics", "metrics", _metrics)
    downloads.register(server)


def _healthz() -> flask.Response:
    """Alive: the process answers."""
    return flask.Response("ok\n", mimetype="text/plain")


def _readyz() -> flask.Response:
    """Ready: the store can be read."""
    try:
        count = results().jobs().height
    except TracekitError:
        return flask.Response("the store cannot be read\n", 503, mimetype="text/plain")
    return flask.Response(f"ok, {count} jobs\n", mimetype="text/plain")


def _metrics() -> flask.Response:
    from tracekit.live.metrics import CONTENT_TYPE, exposition

    states = _states(results().path)
    try:
        states()
    except TracekitError as error:
        return flask.Response(f"{error}\n", 503, mimetype="text/plain")
    return flask.Response(exposition(states, flask.request.url_root), content_type=CONTENT_TYPE)


@lru_cache(maxsize=1)
def _states(store: Path) -> Callable[[], JobStates]:
    """What metrics are made of."""
    from tracekit.live.metrics import remembered
    from tracekit.store import Store

    return remembered(Store(store))


def _failed(error: Exception) -> flask.Response | HTTPException:
    """What Dash cannot answer was not asked by a page: one line for who asked and one for the log.

    Errors of the pages themselves are shown on them (components.guarded, callbacks.say_failure).
    """
    path = flask.request.path
    if isinstance(error, HTTPException) and not (isinstance(error, BadRequest) and path.startswith(_DASH)):
        return error
    if not path.startswith(_DASH):
        raise error
    why = printable(f"{type(error).__name__}: {error}".replace("\n", " "))
    log = logging.getLogger(__name__)
    log.warning("%s cannot be answered: %.300s", printable(path)[:100], why)
    log.debug("where that came from", exc_info=error)
    if path.startswith(_FILES):
        return flask.Response("no such file\n", 404, mimetype="text/plain")
    return flask.Response("this is nothing that a page of the dashboard asks\n", 400, mimetype="text/plain")


def _restrict(app: Dash, response: flask.Response) -> flask.Response:
    headers = response.headers
    headers["X-Content-Type-Options"] = "nosniff"
    headers["X-Frame-Options"] = "DENY"
    headers["Referrer-Policy"] = "no-referrer"
    if response.mimetype == "text/html":
        # Dash's own inline scripts are allowed by their hashes. Mantine and AG Grid set styles from scripts; Plotly
        # makes its PNG as a blob.
        headers["Content-Security-Policy"] = (
            f"default-src 'self'; script-src 'self' {' '.join(app.csp_hashes())}; style-src 'self' 'unsafe-inline';"
            " img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none';"
            " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
        )
    return response
