"""Routes of the dashboard besides pages: health, metrics, downloads, search, and the handling of incidents."""

from __future__ import annotations

import io
import ipaddress
import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import flask
import msgspec
import polars as pl
from dash import Dash
from flask_compress import Compress
from werkzeug.exceptions import BadRequest, HTTPException, InternalServerError
from werkzeug.wrappers import Response

from tracekit.base.errors import NotStoredError, SelectionError, StoreError, TracekitError, extra
from tracekit.base.paths import command
from tracekit.base.text import printable, short
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.replays import LONGEST_ADDRESS
from tracekit.dashboards.browser.data.view_state import WorkerView, choose_worker, comma
from tracekit.dashboards.browser.ui.components import href
from tracekit.dashboards.browser.ui.context import choose_window, results
from tracekit.dashboards.browser.web.access import (
    HEALTH,
    LOGIN,
    LOGOUT,
    MOST_BYTES_ASKED,
    Access,
    WithoutPrefix,
    refused,
)
from tracekit.dashboards.documents.page import page
from tracekit.dashboards.figures.worker_map import WorkerMap
from tracekit.report.report import COMMON_TABLES, PIPELINE_TABLES
from tracekit.report.tables import safe_csv
from tracekit.store import Store
from tracekit.store.incidents import IncidentChange, current_user

if TYPE_CHECKING:
    from tracekit.live.metrics import JobStates

HANDLE = "/handle"
#: What the headers begin with that proxies add.
_OF_PROXIES = ("x-forwarded", "x-real-ip", "forwarded", "via")
#: The state of a connection in /proc/net/tcp that has ended; its user is no longer known.
_TIME_WAIT = "06"
#: Where Linux lists the connections of this machine.
_CONNECTIONS = Path("/proc/net")
#: Paths that Dash itself answers: callbacks of the pages, and the files of its components.
_DASH, _FILES = "/_dash", "/_dash-component-suites/"
#: Tables of a report that are a file of their own.
TABLES = (*PIPELINE_TABLES, "by_rank", *COMMON_TABLES)
_PER_STEP = "by_worker_per_step"
#: All tables of a report, as the name of a workbook.
REPORT = "report"
#: Rows of a sheet, without the heads.
MOST_SHEET_ROWS = 1_048_575
#: Text from outside stays text.
_AS_TEXT = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "nan_inf_to_errors": True}
#: Most links of an answer, and most hosts among them.
MOST_FOUND, MOST_HOSTS = 12, 4
LONGEST_QUERY = 300


class _IncidentRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`mute_h`: hours; 0 ends the muting, None leaves it."""

    incident: int
    owner: str = ""
    note: str = ""
    mute_h: Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None = None


def handle() -> flask.Response:
    """Add a change to an incident. Raises SelectionError, StoreError."""
    request, store = flask.request, Store(results().path)
    # Behind a proxy on this machine, only --auth identifies the user.
    forwarded = flask.g.proxied or any(name.startswith(_OF_PROXIES) for name in request.headers.keys(lower=True))
    user = flask.g.get("user") or (current_user() if not forwarded and _is_own(request.environ) else None)
    if user is None:
        instead = command("store", "handle", "INCIDENT", "--owner", "NAME", "--store", store.path)
        return refused(403, f"this dashboard does not know its users: start it with --auth, or type `{instead}`")
    if request.mimetype != "application/json":  # which no other site can send
        return refused(415, "expected JSON")
    try:
        change = msgspec.json.decode(request.get_data(), type=_IncidentRequest)
    except msgspec.DecodeError as error:
        raise SelectionError(f"this is no change of an incident: {error}") from None
    now_s = time.time()
    until = None if change.mute_h is None else now_s + 3600.0 * change.mute_h
    store.handle(
        change.incident, IncidentChange(now_s, user, change.owner.strip() or None, until, change.note.strip() or None)
    )
    return flask.Response(status=204)


def _is_own(connection: Mapping[str, Any]) -> bool:
    """Whether the other end of a connection is a process on this machine of the user who runs this one."""
    try:
        address, port = ipaddress.ip_address(connection["REMOTE_ADDR"]), int(connection["REMOTE_PORT"])
        table = (_CONNECTIONS / ("tcp6" if address.version == 6 else "tcp")).read_text(encoding="ascii")
    except (KeyError, ValueError, OSError):
        return False
    words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
    client = f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
    rows = map(str.split, table.splitlines())
    # An address and port can have several connections, of different users.
    users = {int(row[7]) for row in rows if row[1] == client and row[3] != _TIME_WAIT}
    return users == {os.getuid()}


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
    server.register_error_handler(Exception, _failure_response)
    server.register_error_handler(TracekitError, _error_response)
    server.add_url_rule(HEALTH, "healthz", _healthz)
    server.add_url_rule("/readyz", "readyz", _readyz)
    server.add_url_rule("/metrics", "metrics", lambda: _metrics(access.url))
    server.add_url_rule("/state", "state", _store_state)
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
    return flask.Response("ok\n", mimetype="text/plain")


def _readyz() -> flask.Response:
    try:
        count = results().jobs().height
    except TracekitError:
        return refused(503, "the store cannot be read")
    return flask.Response(f"ok, {count} jobs\n", mimetype="text/plain")


def _store_state() -> flask.Response:
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
    from tracekit.live.metrics import remembered

    return remembered(Store(store))


def _error_response(error: TracekitError) -> flask.Response:
    """Return a one-line error: 404 if the store lacks the data, 503 if it cannot be read, 400 for a wrong request."""
    if isinstance(error, NotStoredError):
        return refused(404, str(error))
    return refused(503 if isinstance(error, StoreError) else 400, str(error))


def _failure_response(error: Exception) -> flask.Response | HTTPException:
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


def download(name: str) -> flask.Response:
    """The file of a table. Raises StoreError or SelectionError."""
    return csv_file(name, _table(name))


def csv_file(name: str, table: pl.DataFrame) -> flask.Response:
    """A table as a file to save."""
    return _file(f"{name}.csv", safe_csv(table), "text/csv")


def workbook(name: str) -> flask.Response:
    """A table as a file for Excel, or with REPORT all of a job, a sheet for each.

    Raises StoreError, SelectionError or MissingExtraError.
    """
    with extra("xlsx", "a file for Excel"):
        from xlsxwriter import Workbook
    if name == REPORT:
        stored = results().stored(_job())
        stem = file_stem(stored.name)
        sheets = {kind: _without_lists(stored.table(kind)) for kind in TABLES if stored.has_rows(kind)}
    else:
        stem, sheets = name, {name: _table(name)}
    longest = max((table.height for table in sheets.values()), default=0)
    if longest > MOST_SHEET_ROWS:
        raise SelectionError(f"{longest:,} rows are more than the {MOST_SHEET_ROWS:,} of a sheet; CSV has all")
    file = io.BytesIO()
    with Workbook(file, _AS_TEXT) as book:
        for title, table in sheets.items():
            table.write_excel(book, title, float_precision=6)
    return _file(f"{stem}.xlsx", file.getvalue(), "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet")


def report_page() -> flask.Response:
    """The report on a job as one HTML page, as `tracekit whatif --html` writes it. Raises StoreError."""
    stored = results().stored(_job())
    analysis = results().job_of(stored).analysis
    return _file(f"{file_stem(stored.name)}.html", page(analysis.report, analysis.lanes), "text/html")


def _file(name: str, content: str | bytes, kind: str) -> flask.Response:
    response = flask.Response(content, mimetype=kind)
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def file_stem(job: str) -> str:
    """The name of a job as that of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", job)[:80].strip("._") or "job"


def _job() -> str:
    """The job in the address, else the newest; its window is chosen."""
    job = flask.request.args.get("job") or results().newest()
    if (window := flask.request.args.get("window")) is not None:
        choose_window(job, window)
    return job


def _table(name: str) -> pl.DataFrame:
    """The table `name`: the list of jobs, or a table of one job. Raises StoreError or SelectionError."""
    if name == "jobs":
        lists = pl.col("cause_kinds", "cause_places", "cause_hosts").list.join("; ")
        return results().jobs().drop("job_id", "number", "analysed", "metadata", "tracekit").with_columns(lists)
    if name not in (*TABLES, _PER_STEP):
        raise NotStoredError(f"no table {name!r}; there are jobs, {', '.join(TABLES)} and {_PER_STEP}")
    stored = results().stored(_job())
    return _per_step(stored) if name == _PER_STEP else _without_lists(stored.table(name))


def _without_lists(table: pl.DataFrame) -> pl.DataFrame:
    return table.select(name for name, kind in table.schema.items() if not kind.is_nested() and kind != pl.Null)


def _per_step(stored: Stored) -> pl.DataFrame:
    by_step = results().worker_steps(stored.name)
    steps, dp_ranks, stages = by_step.slowdown.shape
    return pl.DataFrame(
        {
            "step": by_step.steps.repeat(dp_ranks * stages),
            "dp_rank": pl.Series(by_step.dp_ranks.repeat(stages).tolist() * steps),
            "pp_rank": pl.Series(list(range(stages)) * (steps * dp_ranks)),
            "slowdown": by_step.slowdown.ravel(),
        }
    )


def search() -> flask.Response:
    """Links to what the query names. Raises StoreError."""
    query = " ".join(flask.request.args.get("q", "").split())[:LONGEST_QUERY]
    return flask.jsonify(list(islice(_search_matches(query, flask.request.args.get("job")), MOST_FOUND)))


def _search_matches(query: str, job: str | None) -> Iterator[dict[str, str]]:
    """Yield matches in the open job first, then jobs, the costliest first."""
    if job is not None and query:
        with suppress(NotStoredError):  # removed meanwhile, or without workers: jobs can still match
            yield from _in_job(results().worker_map(job), job, query.casefold())
    names = results().jobs()["name"]
    matching = names.filter(names.str.to_lowercase().str.contains(query.lower(), literal=True))
    for name in matching.head(MOST_FOUND):
        yield {"text": short(name), "kind": "job", "href": href("/job", job=name)}


def _in_job(workers: WorkerMap, job: str, query: str) -> Iterator[dict[str, str]]:
    cell = choose_worker(workers, query, WorkerView()).cell
    if cell is not None:
        where = href("/workers", job=job, worker=comma(workers.worker(cell)))
        yield {"text": workers.full_name(cell), "kind": "worker", "href": where}
    hosts = [host for host in workers.hosts if query in host.casefold()]
    for host in hosts[:MOST_HOSTS]:
        yield {"text": short(host), "kind": "host", "href": href("/workers", job=job, host=host)}
