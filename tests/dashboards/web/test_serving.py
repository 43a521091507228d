"""The server around the pages: who may ask, what it tells an operator, and that nothing breaks it or leaks from it."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from urllib.parse import urlencode

import brotli
import pytest
from playwright.sync_api import Page
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboards.clicks import unfold
from tests.dashboards.conftest import SAMPLES, Serving
from tests.dashboards.page_text import Pages, sent
from tests.handmade import run, run_process, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.browser.web.app import make_app
from tracekit.report.findings import Unanalysed
from tracekit.store import Incoming, Store

Visit = Callable[..., Page]
Serve = Callable[[Path], Serving]
Show = Callable[[Path], Serving]

#: Adds eight jobs to a store, one import after the other.
IMPORTING = """
import sys
from pathlib import Path
from tests.handmade import slow_trace
from tracekit.store import Incoming, Store

for number in range(8):
    Store(Path(sys.argv[1])).add([Incoming(slow_trace((0,)), f"job {number}", "x")])
"""

STYLE = "/assets/tracekit.css"


@contextmanager
def dashboard(*arguments: object, folder: Path, ended_by: int = signal.SIGINT) -> Iterator[str]:
    """`tracekit dashboard` as a real process that ends without a complaint; yields the link that it prints."""
    command = [sys.executable, "-m", "tracekit.cli", "dashboard", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            pytest.fail(f"{line}{process.communicate()[1]}")
        try:
            yield found[0].rstrip("/")
        finally:
            process.send_signal(ended_by)
            said = process.communicate(timeout=60)
    assert (process.returncode, *said) == (0, "", "")


def get(url: str, **headers: str) -> tuple[int, str, Message]:
    """Status, body and headers of an answer."""
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode(), refused.headers


class TestTheCommand:
    @pytest.mark.slow
    @pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
    def test_serves_traces_until_a_signal_from_a_store_that_goes_with_it(self, ended_by: int, tmp_path: Path) -> None:
        with dashboard(SAMPLES / "healthy.parquet", folder=tmp_path, ended_by=ended_by) as url:
            assert get(f"{url}/healthz")[:2] == (200, "ok\n")
            assert get(f"{url}/readyz")[:2] == (200, "ok, 1 jobs\n")
            assert get(f"{url}/")[0] == 200
            assert get(f"{url}/whatif?kept={'x' * 8000}")[0] == 200
            assert [path.name[:18] for path in tmp_path.iterdir()] == ["tracekit-dashboard"]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (("--auth", "everybody"), "expected token (prints a link), token:FILE"),
            (("--auth", ""), "expected token"),
            (("--auth", "token:nowhere"), "nowhere cannot be read"),
            (("--auth", "password:users"), "no passwords any more"),
            (("--port", "99999"), "choose another --port"),
        ],
    )
    def test_says_what_it_cannot_do(self, arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
        Store(tmp_path / "jobs.duckdb").add([Incoming(slow_trace((0,)), "job", "file")])
        ran = run("dashboard", "jobs.duckdb", *arguments, cwd=tmp_path)
        assert ran.code == 2
        assert reason in ran.message

    @pytest.mark.slow
    def test_says_once_that_a_trace_cannot_be_read(self, tmp_path: Path) -> None:
        """Traces are read by a process of their own."""
        ran = run_process("dashboard", "nothing.duckdb", cwd=tmp_path)
        assert ran.code == 2
        assert "nothing.duckdb: no such file or folder" in ran.message

    @pytest.mark.slow
    def test_beyond_this_machine_it_prints_a_link_that_opens_it(self, sample_store: Path, tmp_path: Path) -> None:
        with dashboard(sample_store, "--host", "0.0.0.0", folder=tmp_path) as link:
            url, token = link.split("/?token=")
            assert len(token) == 22
            assert [get(url + path)[0] for path in ("/", "/metrics", "/healthz", "/readyz")] == [401, 401, 200, 200]
            assert get(f"{url}/metrics", Authorization=f"Bearer {token}")[0] == 200
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(f"{link}&x=1") as answer:
                assert (answer.status, answer.url) == (200, f"{url}/?x=1")


class TestMetrics:
    def test_each_job_has_its_figures_and_no_worker_has_any(self, serving: Serving) -> None:
        families = {family.name: family for family in text_string_to_metric_families(get(f"{serving.url}/metrics")[1])}
        slowdowns = {
            sample.labels["training_job"]: sample.value for sample in families["tracekit_job_slowdown_ratio"].samples
        }
        stored = Store(serving.store).job_list().select("name", "slowdown").rows()
        assert slowdowns == dict(stored)
        assert {tuple(sample.labels) for family in families.values() for sample in family.samples} == {
            (),
            ("training_job",),
            ("training_job", "verdict"),
            ("analysed",),
        }

    def test_any_job_name_is_a_label(self, tmp_path: Path, show: Show) -> None:
        name = 'a"b\\c\nd{}'
        trace = slow_trace((0,))
        Store(tmp_path / "s.duckdb").add([Incoming(trace, name, "x", PipelineJob(trace).stored())])
        text = get(f"{show(tmp_path / 's.duckdb').url}/metrics")[1]
        found = {
            sample.labels.get("training_job") for one in text_string_to_metric_families(text) for sample in one.samples
        }
        assert name in found


class TestDownloads:
    @pytest.mark.parametrize("table", ["by_worker", "by_kind", "by_step", "causes", "fixes", "by_worker_per_step"])
    def test_a_table_has_the_rows_that_whatif_writes(self, table: str, serving: Serving, tmp_path: Path) -> None:
        ran = run("whatif", "--store", serving.store, "--job", "slow-worker", "--csv", tmp_path / "tables")
        assert ran.code == 0
        wanted = (tmp_path / "tables" / f"{table}.csv").read_text().splitlines()
        status, body, headers = get(f"{serving.url}/download/{table}.csv?job=slow-worker")
        assert status == 200
        assert headers["Content-Disposition"] == f'attachment; filename="{table}.csv"'
        assert len(body.splitlines()) == len(wanted)
        if table == "by_worker":
            assert body.splitlines() == wanted

    @pytest.mark.parametrize(
        "path",
        [
            "/download/nothing.csv",
            "/download/nothing.xlsx",
            "/download/report.xlsx?job=nobody",
            "/download/op.csv?job=healthy",
            "/download/by_step.csv?job=nobody",
            "/download/by_step.csv?job=../../../etc/passwd",
            "/download/..%2F..%2Fetc%2Fpasswd.csv",
        ],
    )
    def test_what_is_no_table_is_a_4xx_in_one_line(self, path: str, serving: Serving) -> None:
        status, body, _ = get(serving.url + path)
        assert status == 404 or "<!DOCTYPE html>" in body  # Dash answers other addresses with its empty page
        assert "root:" not in body
        assert "Traceback" not in body


class TestHeaders:
    def test_a_page_may_load_nothing_from_elsewhere(self, serving: Serving) -> None:
        headers = get(f"{serving.url}/")[2]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "http" not in policy
        assert "unsafe-eval" not in policy
        scripts = next(part for part in policy.split(";") if part.strip().startswith("script-src"))
        assert "unsafe-inline" not in scripts
        assert headers["X-Frame-Options"] == "DENY"

    def test_the_page_says_its_language(self, serving: Serving) -> None:
        assert '<html lang="en" ' in get(f"{serving.url}/")[1]

    def test_the_first_answer_holds_no_data_of_any_page(self, serving: Serving) -> None:
        body = get(f"{serving.url}/")[1]
        assert "slow-worker" not in body
        assert len(body) < 20_000


class TestBrokenAndHostile:
    def test_names_from_outside_are_text_and_never_markup(self, tmp_path: Path, show: Show, visit: Visit) -> None:
        name, host = "<script>alert(1)</script><img src=x onerror=alert(2)>", "<img src=x onerror=alert(3)>"
        trace = slow_trace((0, 1), metadata={"hosts": {str(rank): host for rank in range(4)}})
        Store(tmp_path / "s.duckdb").add([Incoming(trace, name, "<b>source</b>", PipelineJob(trace).stored())])
        base = show(tmp_path / "s.duckdb").url
        page = visit("/", base=base)
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        page.click("#jobs a.job")
        page.wait_for_selector(".job-title")
        assert name[:60] in page.inner_text("h1")
        unfold(page)
        assert "<b>source</b>" in (page.text_content("#page") or "")
        assert page.locator("#page script, #page img").count() == 0
        visit(f"/timeline?{urlencode({'job': name, 'op': '1,0,backward-compute,1'})}", base=base, within=page)
        page.wait_for_selector('#timeline-details[data-kept="true"]')
        assert host in page.inner_text("#timeline-details")
        assert host in page.locator("#timeline-slowest tbody tr").first.inner_text()
        assert page.locator("#page script, #page img").count() == 0
        with page.expect_download() as download:
            page.get_by_text("Open in Perfetto").click()
        assert download.value.suggested_filename.startswith("script_alert_1_script")
        assert download.value.suggested_filename.endswith("-step-0.json.gz")

    def test_an_unknown_job_is_said_on_the_page(self, sample_store: Path) -> None:
        pages = Pages(sample_store)
        assert "no job named 'nobody' in this store; the page Jobs lists" in pages.text("/job", job="nobody")
        assert "did you mean 'slow-worker'?" in pages.text("/job", job="slow-workr")

    def test_names_in_the_address_that_no_page_knows_change_nothing(self, visit: Visit) -> None:
        text = visit("/whatif?job=slow-worker&stored=1&report=1&self=1").inner_text("#page")
        assert "Without which would the job be faster?" in text
        assert "Something broke" not in text

    @pytest.mark.parametrize("body", ["{}", "[]", "null", '"x"', '{"output":"nosuch.x"}', "[" * 100_000, "not JSON"])
    def test_what_no_page_asks_of_dash_is_a_400_in_one_line(
        self, body: str, sample_store: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = make_app(sample_store).server.test_client()
        answer = client.post("/_dash-update-component", data=body, content_type="application/json")
        assert answer.status_code == 400
        assert "Traceback" not in answer.text
        assert len(caplog.records) <= 1
        assert all(one.levelname == "WARNING" and one.exc_info is None for one in caplog.records)

    @pytest.mark.parametrize("file", ["dash/nothing.js", "nothing/nothing.js", "dash/deps/nothing.js", "os/path.py"])
    def test_an_unknown_file_of_dash_is_a_404(
        self, file: str, sample_store: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        answer = make_app(sample_store).server.test_client().get(f"/_dash-component-suites/{file}")
        assert answer.status_code == 404
        assert len(answer.text.splitlines()) == 1
        assert all(one.levelname == "WARNING" and one.exc_info is None for one in caplog.records)

    def test_an_error_of_tracekit_itself_is_one_line_and_logged(
        self, sample_store: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tracekit.dashboards.browser.web.serving.safe_csv", lambda _: 1 / 0)
        answer = make_app(sample_store).server.test_client().get("/download/jobs.csv")
        assert (answer.status_code, len(answer.text.splitlines())) == (500, 1)
        assert "ZeroDivisionError" in caplog.text
        assert "ZeroDivisionError" not in answer.text

    def test_an_address_that_is_no_page_shows_the_way_back(self, visit: Visit) -> None:
        page = visit("/..%2f..%2fetc/passwd", anew=True)
        assert "No such page" in page.inner_text("#page")
        page.get_by_text("All jobs").click()
        page.wait_for_selector("#jobs a.job")

    def test_without_a_job_the_newest_is_shown_and_said(self, sample_store: Path) -> None:
        assert "this is the newest one, slow-worker" in Pages(sample_store).text("/job")

    def test_a_job_that_was_not_analysed_says_why(self, tmp_path: Path) -> None:
        trace = slow_trace((0,))
        Store(tmp_path / "s.duckdb").add([Incoming(trace, "job", "x", Unanalysed("a send without its recv"))])
        pages = Pages(tmp_path / "s.duckdb")
        assert "a send without its recv" in pages.text("/job", job="job")
        assert "a send without its recv" in sent(pages.page("/"))

    def test_an_empty_store_says_how_to_fill_it(self, tmp_path: Path) -> None:
        Store(tmp_path / "s.duckdb").add([])
        assert "tracekit import" in Pages(tmp_path / "s.duckdb").text("/")

    def test_a_store_that_is_replaced_shows_at_the_next_look(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "s.duckdb")
        trace = slow_trace((0,))
        pages = Pages(store.path)
        for number, name in enumerate(("first", "second"), start=1):
            store.add([Incoming(trace, name, "x", PipelineJob(trace).stored())])
            names = [row["name"] for row in pages.job_rows()]
            assert len(names) == number
            assert name in names

    @pytest.mark.slow
    def test_a_store_that_vanishes_or_breaks_is_said_and_comes_back(self, tmp_path: Path, serve: Serve) -> None:
        path = tmp_path / "s.store"
        trace = slow_trace((0,))
        Store(path).add([Incoming(trace, "first", "x", PipelineJob(trace).stored())])
        catalogue = path / "catalog.duckdb"
        kept = catalogue.read_bytes()
        base, pages = serve(path).url, Pages(path)
        healthy = pages.text("/job", job="first")
        for damage, said in (
            (lambda: path.rename(tmp_path / "away"), "is the store still there?"),
            (lambda: (tmp_path / "away").rename(path), None),
            (lambda: catalogue.write_bytes(kept[:5000]), "DuckDB cannot use the store"),
            (lambda: catalogue.write_bytes(b"not a catalogue" * 100), "DuckDB cannot use the store"),
            (catalogue.unlink, "its catalog.duckdb is missing"),
        ):
            damage()
            if said is None:
                continue
            assert said in pages.text("/job", job="first")
            assert get(f"{base}/readyz")[0] == get(f"{base}/metrics")[0] == 503
            for asked in ("download/jobs.csv", "download/by_step.csv?job=first", "timeline/layout?job=first"):
                status, body, _ = get(f"{base}/{asked}")
                assert (status, said in body, len(body.splitlines())) == (503, True, 1)
        catalogue.write_bytes(kept)
        assert pages.text("/job", job="first") == healthy
        assert get(f"{base}/readyz")[0] == 200

    @pytest.mark.slow
    def test_a_running_import_breaks_no_page(self, tmp_path: Path, serve: Serve) -> None:
        store = tmp_path / "s.duckdb"
        trace = slow_trace((0,))
        Store(store).add([Incoming(trace, "first", "x", PipelineJob(trace).stored())])
        base = serve(store).url
        importing = subprocess.Popen([sys.executable, "-c", IMPORTING, str(store)])
        answers = []
        while importing.poll() is None:
            answers.append(get(f"{base}/download/jobs.csv"))
        assert importing.returncode == 0
        assert {status for status, _, _ in answers} == {200}
        assert len(get(f"{base}/download/jobs.csv")[1].splitlines()) == 10


def test_answers_are_compressed_for_browsers_that_take_it(sample_store: Path) -> None:
    """Pages, scripts and styles; a HEAD says so without content. What is small, or a part of a file, stays as it is."""
    client = make_app(sample_store).server.test_client()
    plain, text = (client.get(address, buffered=True).get_data() for address in ("/_dash-layout", STYLE))
    for encoding, unpack in (("gzip", gzip.decompress), ("br", brotli.decompress)):
        answer = client.get("/_dash-layout", headers={"Accept-Encoding": encoding})
        assert (answer.headers["Content-Encoding"], answer.headers["Vary"]) == (encoding, "Accept-Encoding")
        assert unpack(answer.get_data()) == plain
    head = client.head("/_dash-layout", headers={"Accept-Encoding": "gzip"})
    assert (head.headers["Content-Encoding"], head.get_data()) == ("gzip", b"")
    style = client.get(STYLE, headers={"Accept-Encoding": "br"}, buffered=True)
    assert brotli.decompress(style.get_data()) == text
    part = client.get(STYLE, headers={"Accept-Encoding": "br", "Range": "bytes=10-99"}, buffered=True)
    assert (part.status_code, part.get_data()) == (206, text[10:100])
    known = {"Accept-Encoding": "br", "If-None-Match": style.headers["ETag"]}
    assert client.get(STYLE, headers=known, buffered=True).status_code == 304
    for small in ("/healthz", "/metrics"):
        assert "Content-Encoding" not in client.get(small, headers={"Accept-Encoding": "gzip"}).headers
