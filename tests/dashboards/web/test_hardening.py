"""What the server refuses: foreign names, writing, and answers that a browser could take for something else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import polars as pl
import pytest

from tests.dashboards.conftest import SAMPLES
from tests.handmade import run, slow_trace
from tests.test_store_windows import window
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.web.access import Access, read_access
from tracekit.dashboards.browser.web.app import make_app
from tracekit.report.tables import safe_csv
from tracekit.store import Incoming, Store

#: Addresses of each kind, and what is posted to them.
ADDRESSES = (
    "/", "/job?job=slow-worker", "/login", "/logout", "/metrics", "/healthz", "/readyz", "/download/jobs.csv",
    "/download/by_worker.csv?job=slow-worker", "/timeline/layout?job=slow-worker", "/timeline/spans?job=slow-worker",
    "/search?q=slow", "/_dash-layout", "/_dash-dependencies", "/_dash-update-component", "/api/jobs", "/nothing",
    "/handle",
)  # fmt: skip
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND")
BODIES: tuple[dict[str, object], ...] = (
    {"json": {"output": "whatif-answer.children", "inputs": [], "changedPropIds": []}},
    {"data": {"token": "x", "next": "/"}},
    {"data": b"\0" * 1000},
)


def contents(folder: Path) -> dict[str, str]:
    """Every file of a store by its hash."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_no_request_of_nobody_in_particular_changes_a_store(tmp_path: Path) -> None:
    ran = run("import", SAMPLES / "slow_worker.parquet", "--store", tmp_path / "s.store")
    assert ran.code == 0, ran.message
    before = contents(tmp_path / "s.store")
    client = make_app(tmp_path / "s.store").server.test_client()
    for address in ADDRESSES:
        for method in METHODS:
            for body in BODIES if method in ("POST", "PUT", "PATCH") else ({},):
                with client.open(address, method=method, **body) as answer:
                    assert answer.status_code < 500, (method, address)
                    assert answer.status_code == 405 or method in ("GET", "HEAD", "OPTIONS", "POST")
    assert contents(tmp_path / "s.store") == before


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8050", 200),
        ("127.0.0.1:8050", 200),
        ("[::1]:8050", 200),
        ("10.1.2.3", 200),
        ("tracekit.example.com", 200),
        ("tracekit.example.com:443", 200),
        ("TraceKit.Example.com.", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("tracekit.example.com.evil.example", 421),
        ("evil.example:8050", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1", 421),
        ("[::1].evil.example", 421),
        ("evil.example@localhost", 421),
        ("", 421),
    ],
)
def test_only_known_names_are_answered(host: str, status: int, sample_store: Path) -> None:
    app = make_app(sample_store, Access(hosts=("tracekit.example.com",)))
    assert app.server.test_client().get("/healthz", headers={"Host": host}).status_code == status


def test_options_about_names_are_read_or_refused() -> None:
    url = "https://b.example/deep/tracekit"
    access = read_access(None, ["A.example"], url)
    assert access == Access(None, ("a.example", "b.example"), "/deep/tracekit/", proxied=True, secure=True, url=url)
    url = "http://b.example:8443/"
    assert read_access(None, [], url) == Access(None, ("b.example",), "/", proxied=True, url=url)
    for host in ("", "a b", "http://a.example", "a.example:80", "-a", "a..b", "*", "a/b"):
        with pytest.raises(SelectionError, match="expected a host name"):
            read_access(None, [host], None)
    for url in (
        "",
        "example.com",
        "ftp://a.example",
        "https://",
        "https://a/?q=1",
        "https://a/#x",
        "https://a/b c",
        "https://[a",
    ):
        with pytest.raises(SelectionError, match="expected an address such as"):
            read_access(None, [], url)


def test_alerts_link_to_the_address_that_browsers_see(tmp_path: Path) -> None:
    """Prometheus may scrape the dashboard where no browser reaches it."""
    store = Store(tmp_path / "s")
    store.append(window(0, analysed=True))
    for url, page in ((None, "http://10.0.0.5/job?"), ("https://b.example/deep/", "https://b.example/deep/job?")):
        client = make_app(store.path, read_access(None, [], url)).server.test_client()
        assert f'page="{page}job=live&window=0"' in client.get("/metrics", headers={"Host": "10.0.0.5"}).text


def test_what_looks_like_an_interface_answers_json_and_404(sample_store: Path) -> None:
    client = make_app(sample_store).server.test_client()
    for address in ("/api", "/api/", "/api/jobs", "/api/v1/jobs/slow-worker"):
        answer = client.get(address)
        assert (answer.status_code, answer.mimetype) == (404, "application/json")
        assert "no such address" in answer.get_json()["error"]


def test_no_other_site_can_post_in_the_name_of_a_visitor(sample_store: Path) -> None:
    client = make_app(sample_store).server.test_client()
    for address in ("/_dash-update-component", "/login", "/logout"):
        assert client.post(address, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        assert client.post(address, headers={"Sec-Fetch-Site": "same-origin"}).status_code != 403


def test_every_answer_has_owasps_headers(sample_store: Path) -> None:
    client = make_app(sample_store).server.test_client()
    for address in ("/", "/metrics", "/download/jobs.csv", "/api/x", "/_dash-layout", "/assets/tracekit.css"):
        with client.get(address) as answer:
            headers = answer.headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Permitted-Cross-Domain-Policies"] == "none"
        assert headers["Cross-Origin-Opener-Policy"] == headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        assert "camera=()" in headers["Permissions-Policy"]
        assert headers["Cache-Control"] == ("no-cache" if address.startswith("/assets") else "no-store")
        assert "Strict-Transport-Security" not in headers  # over plain HTTP it means nothing


def test_a_cell_that_a_spreadsheet_would_compute_is_text() -> None:
    cells = ["=1+1", "+1", "-1", "@x", "\tx", "\rx", "plain", "a=b", None]
    table = pl.DataFrame({"=name": cells, "number": [-1.5] * len(cells)})
    lines = safe_csv(table).split("\n")
    assert lines[0] == "'=name,number"
    assert [line.rpartition(",")[0].strip('"') for line in lines[1:10]] == [
        "'=1+1", "'+1", "'-1", "'@x", "'\tx", "'\rx", "plain", "a=b", "",
    ]  # fmt: skip
    assert all(line.endswith(",-1.5") for line in lines[1:10])


def test_names_in_downloads_are_text(tmp_path: Path) -> None:
    trace = slow_trace((0,))
    Store(tmp_path / "s").add([Incoming(trace, "=HYPERLINK(0)", "@source", PipelineJob(trace).stored())])
    text = make_app(tmp_path / "s").server.test_client().get("/download/jobs.csv").text
    assert "'=HYPERLINK(0)" in text
    assert "'@source" in text
