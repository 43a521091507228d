"""Tables as workbooks of Excel, read as the XML in a ZIP file that they are (ECMA-376)."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.dashboards.page_text import Pages
from tests.dashboards.pages.test_pages import whatif
from tests.handmade import slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.browser.web.app import make_app
from tracekit.store import Incoming, Store

MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


def read_workbook(content: bytes) -> dict[str, list[list[str | None]]]:
    """The cells of each sheet as text, row by row; those that nobody wrote are None. A formula is an error."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        names = [one.attrib["name"] for one in _xml(file, "workbook").iter(f"{MAIN}sheet")]
        shared = ["".join(one.itertext()) for one in _xml(file, "sharedStrings")]
        sheets = {}
        for number, name in enumerate(names, start=1):
            sheet = _xml(file, f"worksheets/sheet{number}")
            assert not list(sheet.iter(f"{MAIN}f"))
            assert not list(sheet.iter(f"{MAIN}hyperlink"))
            sheets[name] = [[_cell(cell, shared) for cell in row] for row in sheet.iter(f"{MAIN}row")]
    return sheets


def _xml(file: zipfile.ZipFile, part: str) -> ElementTree.Element:
    return ElementTree.fromstring(file.read(f"xl/{part}.xml"))  # noqa: S314 - we wrote it


def _cell(cell: ElementTree.Element, shared: list[str]) -> str | None:
    value = cell.find(f"{MAIN}v")
    if value is None or value.text is None:
        return None
    return shared[int(value.text)] if cell.attrib.get("t") == "s" else value.text


def test_a_workbook_has_a_sheet_for_each_table_of_the_job(sample_store: Path) -> None:
    client = make_app(sample_store).server.test_client()
    answer = client.get("/download/report.xlsx?job=slow-worker")
    assert answer.headers["Content-Disposition"] == 'attachment; filename="slow-worker.xlsx"'
    sheets = read_workbook(answer.data)
    report = whatif(sample_store, "slow-worker")
    assert {"by_worker", "by_kind", "by_step", "causes", "fixes"} <= set(sheets)
    rows = sheets["by_worker"]
    assert len(rows) == 1 + len(report["by_worker"])
    worst = dict(zip(rows[0], rows[1], strict=True))
    assert worst["host"] == "host-0001"
    assert float(worst["slowdown"]) == report["by_worker"][0]["slowdown"]
    (alone,) = read_workbook(client.get("/download/by_kind.xlsx?job=slow-worker").data).values()
    assert alone == sheets["by_kind"]


def test_text_that_looks_like_a_formula_or_a_link_is_text_in_a_workbook(tmp_path: Path) -> None:
    trace = slow_trace((0,), metadata={"hosts": {"0": "=1+1", "1": "https://evil.example", "2": "@x", "3": "\x01"}})
    Store(tmp_path / "s").add([Incoming(trace, "=cmd", "x", PipelineJob(trace).stored())])
    client = make_app(tmp_path / "s").server.test_client()
    sheets = read_workbook(client.get("/download/report.xlsx").data)
    host = sheets["by_worker"][0].index("host")
    assert {"=1+1", "https://evil.example", "@x"} <= {row[host] for row in sheets["by_worker"][1:]}
    jobs = read_workbook(client.get("/download/jobs.xlsx").data)["jobs"]
    assert jobs[1][jobs[0].index("name")] == "=cmd"


def test_without_its_extra_a_workbook_is_said_to_need_it(sample_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    answer = make_app(sample_store).server.test_client().get("/download/jobs.xlsx")
    assert answer.status_code == 400
    assert "pip install 'tracekit-analysis[xlsx]'" in answer.text


def test_a_table_that_fits_no_sheet_is_said_to_be_there_as_csv(
    sample_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracekit.dashboards.browser.web.serving.MOST_SHEET_ROWS", 15)
    answer = make_app(sample_store).server.test_client().get("/download/by_worker.xlsx?job=slow-worker")
    assert (answer.status_code, "16 rows are more than the 15 of a sheet" in answer.text) == (400, True)


def test_pages_without_the_extra_say_how_to_get_it(sample_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracekit.dashboards.browser.ui.shell.find_spec", lambda _: None)
    for path, job in (("/", {}), ("/job", {"job": "slow-worker"})):
        assert "XLSX: pip install 'tracekit-analysis[xlsx]'" in Pages(sample_store).text(path, **job)
