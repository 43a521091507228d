"""Operation of the dashboard: access checks, health checks, metrics, and headers that keep a page to itself.

In: the Dash app. Out: the same with the routes that an operator needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import flask
from dash import Dash
from flask_compress import Compress
from werkzeug.exceptions import BadRequest, HTTPException, InternalServerError
from werkzeug.wrappers import Response

from tracekit.base.errors import NotStoredError, StoreError, TracekitError
from tracekit.base.text import printable
from tracekit.dashboards.browser.data.whatif_query import LONGEST_ADDRESS
from tracekit.dashboards.browser.ui.context import results
from tracekit.dashboards.browser.web.access import HEALTH, MOST_BYTES_ASKED, Access, WithoutPrefix
from tracekit.dashboards.browser.web.auth import refused
from tracekit.dashboards.browser.web.downloads import download, report_page, workbook
from tracekit.dashboards.browser.web.handle import HANDLE, handle
from tracekit.dashboards.browser.web.search import search
from tracekit.dashboards.browser.web.tokens import LOGIN, LOGOUT

if TYPE_CHECKING:
    from tracekit.live.metrics import JobStates

#: Paths that Dash itself answers: callbacks of the pages, and the files of its components.
_DASH, _FILES = "/_dash", "/_dash-component-suites/"


#: POST is allowed only for callbacks of pages, login and logout, and for handling incidents.
_POSTED_TO = ("/_dash-update-component", LOGIN, LOGOUT, HANDLE)
_LOOKING = ("GET", "HEAD", "OPTIONS")
#: OWASP's list of secure headers, in addition to the policy of pages.
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-Permitted-Cross-Domain-Policies": "none",
    "X-DNS-Prefetch-Control": "off",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": ", ".join(f"{name}=()" for name in ("camera", "geolocation", "microphone", "payment", "usb")),
}
_TLS_ONLY = "max-age=31536000; includeSubDomains"
#: Bundles and assets carry their version in the address.
_KEPT = "public, max-age=31536000, immutable"
#: Without text/plain: health checks and metrics stay readable to the simplest client.
_COMPRESSED = (
    *("application/json", "application/javascript", "application/octet-stream"),
    *("text/javascript", "text/css", "text/csv", "text/html"),
)


def harden(app: Dash, access: Access) -> None:
    """Add authentication, health checks, metrics, downloads, and headers that keep a page to this host."""
    server = app.server
    server.config.update(
        MAX_CONTENT_LENGTH=MOST_BYTES_ASKED, SESSION_COOKIE_PATH=access.prefix, SESSION_COOKIE_SECURE=access.secure
    )
    server.wsgi_app = WithoutPrefix(server.wsgi_app, access.prefix)
    server.before_request(lambda: _refusal(access))
    server.after_request(lambda response: _restrict(app, access, response))
    server.register_error_handler(Exception, _failed)
    server.register_error_handler(TracekitError, _refused)
    server.add_url_rule(HEALTH, "healthz", _healthz)
    server.add_url_rule("/readyz", "readyz", _readyz)
    server.add_url_rule("/metrics", "metrics", lambda: _metrics(access.url))
    server.add_url_rule("/state", "state", _state)
    for address in ("/api", "/api/", "/api/<path:path>"):
        server.add_url_rule(address, "api", _no_api)
    server.add_url_rule("/download/<name>.csv", "download", download)
    server.add_url_rule("/download/<name>.xlsx", "workbook", workbook)
    server.add_url_rule("/download/report.html", "report_page", report_page)
    server.add_url_rule("/search", "search", search)
    server.add_url_rule(HANDLE, "handle", handle, methods=["POST"])
    if access.auth is not None:
        access.auth.register(server)
    _compress(server)


def _compress(server: flask.Flask) -> None:
    """Compress whole answers for browsers that ask for it; a range counts plain bytes and stays as it is."""
    server.config.update(
        COMPRESS_MIMETYPES=_COMPRESSED, COMPRESS_MIN_SIZE=1000, COMPRESS_REGISTER=False, COMPRESS_ZSTD_LEVEL=9
    )
    compressor = Compress(server)

    def compress(response: flask.Response) -> flask.Response:
        if response.status_code != 200 or response.mimetype not in _COMPRESSED:
            return response
        response.direct_passthrough = False
        response.make_sequence()  # as a stream, the file would not be closed
        return compressor.after_request(response)

    server.after_request(compress)


def _refusal(access: Access) -> Response | None:
    """Return the rejection of a request that would change something or may not pass; None if it may."""
    request = flask.request
    flask.g.prefix, flask.g.proxied = access.prefix, access.proxied
    if len(request.query_string) > 3 * LONGEST_ADDRESS:  # as %XX; pages say themselves what is too long for them
        return refused(414, f"the address has more than {LONGEST_ADDRESS:,} characters")
    if request.method not in _LOOKING and not (request.method == "POST" and request.path in _POSTED_TO):
        return refused(405, "the dashboard only reads")
    return access.refusal(request)


def _no_api(path: str = "") -> tuple[dict[str, str], int]:
    """Return a JSON 404: there is no API; programs use /metrics and /download."""
    return {"error": f"no such address: /api/{path:.100}; programs can ask /metrics and /download/TABLE.csv"}, 404


def _healthz() -> flask.Response:
    """Alive: the process answers."""
    return flask.Response("ok\n", mimetype="text/plain")


def _readyz() -> flask.Response:
    """Ready: the store can be read."""
    try:
        count = results().jobs().height
    except TracekitError:
        return refused(503, "the store cannot be read")
    return flask.Response(f"ok, {count} jobs\n", mimetype="text/plain")


def _state() -> flask.Response:
    """Return the state of the store, which pages poll to notice new data."""
    return flask.Response(results().state(), mimetype="text/plain")


def _metrics(url: str) -> flask.Response:
    """The metrics, with links to `url`: whoever scrapes them need not reach the dashboard where people do."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    from tracekit.live.metrics import StoreMetrics

    states = _states(results().path)
    states()  # raises an error where the metrics would be empty
    return flask.Response(
        generate_latest(StoreMetrics(states, url or flask.request.url_root)), content_type=CONTENT_TYPE_LATEST
    )


@lru_cache(maxsize=1)
def _states(store: Path) -> Callable[[], JobStates]:
    """Return the source of the metrics."""
    from tracekit.live.metrics import remembered
    from tracekit.store import Store

    return remembered(Store(store))


def _refused(error: TracekitError) -> flask.Response:
    """Return a one-line error: 404 if the store lacks the data, 503 if it cannot be read, 400 for a wrong request."""
    if isinstance(error, NotStoredError):
        return refused(404, str(error))
    return refused(503 if isinstance(error, StoreError) else 400, str(error))


def _failed(error: Exception) -> flask.Response | HTTPException:
    """Answer a request that Dash cannot handle, and so no page sent, with one line to the client and one in the log.

    Errors of the pages themselves are shown on them (components.guarded, callbacks.say_failure).
    """
    path = flask.request.path
    if isinstance(error, InternalServerError):
        return refused(500, "an error of tracekit itself; the server's log has the details")
    if isinstance(error, HTTPException) and not (isinstance(error, BadRequest) and path.startswith(_DASH)):
        return error
    if not path.startswith(_DASH):
        raise error
    why = printable(f"{type(error).__name__}: {error}".replace("\n", " "))
    log = logging.getLogger(__name__)
    log.warning("%s cannot be answered: %.300s", printable(path)[:100], why)
    log.debug("where that came from", exc_info=error)
    if path.startswith(_FILES):
        return refused(404, "no such file")
    return refused(400, "this is nothing that a page of the dashboard asks")


def _restrict(app: Dash, access: Access, response: flask.Response) -> flask.Response:
    headers = response.headers
    for name, value in _HEADERS.items():
        headers[name] = value
    if access.secure:
        headers["Strict-Transport-Security"] = _TLS_ONLY
    if flask.request.path.startswith("/assets/"):
        headers["Cache-Control"] = _KEPT if "m" in flask.request.args else "no-cache"
    headers.setdefault("Cache-Control", "no-store")
    if response.mimetype == "text/html":
        # Dash's own inline scripts are allowed by their hashes; charts are images of themselves while they are saved.
        headers["Content-Security-Policy"] = (
            f"default-src 'self'; script-src 'self' {' '.join(app.csp_hashes())}; style-src 'self' 'unsafe-inline';"
            " img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none';"
            " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
        )
    return response
