"""One question has one number in the JSON, the terminal, the pages and the metrics; two questions have two names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboards.page_text import Pages
from tests.handmade import run, slow_trace
from tracekit.analysis.job.job import ReportOptions
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.text import seconds, with_error
from tracekit.dashboards.browser.data.replays import WhatifQuery
from tracekit.live.metrics import StoreMetrics, remembered
from tracekit.report.finding import LossKind
from tracekit.report.findings import Findings
from tracekit.store import Incoming, Store

JOB = "slow-worker"
QUESTION = "worker=1,2"
PAGES = ("/", "/job", "/workers", "/whatif", "/compare")


def metrics(store: Path, job: str) -> dict[str, float]:
    families = text_string_to_metric_families(generate_latest(StoreMetrics(remembered(Store(store)))).decode())
    samples = (sample for family in families for sample in family.samples)
    return {sample.name: sample.value for sample in samples if sample.labels.get("training_job") == job}


def fleet_row(pages: Pages, job: str) -> dict[str, Any]:
    (row,) = [row for row in pages.job_rows() if row["name"] == job]
    return dict(row)


@pytest.fixture(scope="module")
def pages(sample_store: Path) -> Pages:
    return Pages(sample_store)


@pytest.fixture(scope="module")
def report(sample_store: Path) -> dict[str, Any]:
    ran = run("whatif", "--store", sample_store, "--job", JOB, "--json", "--fix", QUESTION)
    return dict(json.loads(ran.out))


@pytest.fixture(scope="module")
def terminal(sample_store: Path) -> str:
    """The report as a person sees it, wide enough that no row breaks."""
    asked = ("--fix", QUESTION, "--full")
    return run("whatif", "--store", sample_store, "--job", JOB, *asked, env={"COLUMNS": "220"}).out


@pytest.fixture(scope="module")
def shown(pages: Pages) -> dict[str, list[str]]:
    """The lines of each page; the what-if page answers the question."""
    stored = pages.service.results.stored(JOB)
    pages.service.replays.ask(stored, WhatifQuery(QUESTION), wait_s=300)
    states = {"/whatif": {"select": QUESTION}, "/compare": {"with": "healthy"}}
    return {path: pages.lines(path, **({} if path == "/" else {"job": JOB}), **states.get(path, {})) for path in PAGES}


def test_the_slowdown(pages: Pages, sample_store: Path, report: dict[str, Any], terminal: str, shown: Any) -> None:
    slowdown, lost = report["slowdown"], report["verdict"]["share"]
    assert metrics(sample_store, JOB)["tracekit_job_slowdown_ratio"] == pytest.approx(slowdown, rel=1e-12)
    assert fleet_row(pages, JOB)["slowdown"] == pytest.approx(slowdown, rel=1e-12)
    for path in PAGES[1:]:
        assert f"straggler, {lost:.0%} lost trustworthy" in shown[path], path
    assert re.search(rf"^S +{slowdown:.3f} ± ", terminal, re.MULTILINE)
    compared = shown["/compare"].index("Share lost")
    assert f"{lost:.1%}" in shown["/compare"][compared + 1 : compared + 3]


def test_what_is_lost(pages: Pages, sample_store: Path, report: dict[str, Any], terminal: str, shown: Any) -> None:
    lost, share = report["verdict"]["lost_gpu_hours_per_day"], report["verdict"]["share"]
    (fix,) = (fix for fix in report["fixes"] if fix["kind"] == "replace-workers")
    assert (lost, share * 384) == pytest.approx((fix["saved_gpu_hours_per_day"], lost), rel=1e-12)
    figures, row = metrics(sample_store, JOB), fleet_row(pages, JOB)
    assert figures["tracekit_job_lost_gpus"] * 24 == pytest.approx(lost, rel=1e-12)
    assert row["lost_gpu_hours_per_day"] == pytest.approx(lost, rel=1e-12)
    assert figures["tracekit_job_waste_ratio"] == row["waste"] == pytest.approx(report["waste"], rel=1e-12)
    assert f"{share:.1%} of the time" in terminal
    for text in (terminal, "\n".join(shown["/job"])):
        assert f"{lost:,.3g} of 384 GPU-hours a day" in text
        assert f"costs {share:.0%} of each step" in text
    compared = shown["/compare"].index("GPU-hours lost a day")
    assert f"{lost:,.1f}" in shown["/compare"][compared + 1 : compared + 3]
    assert report["assumptions"] == ["GPU-hours a day: 16 GPUs running all day as in the 12 traced steps"]
    for text in (terminal, "\n".join(shown["/job"])):
        assert report["assumptions"][0] in text


def test_what_the_best_fix_saves(report: dict[str, Any], terminal: str, shown: Any) -> None:
    fix, cause = report["fixes"][0], report["causes"][0]
    assert fix["saved_s"] == pytest.approx(cause["saved_s"], rel=1e-12)
    saved, then = seconds(fix["saved_s"]), seconds(fix["new_step_s"])
    assert fix["new_step_s"] == pytest.approx(report["step_time_s"]["recorded"] - fix["saved_s"])
    row = next(line for line in terminal.splitlines() if line.startswith(f" {fix['title']} "))
    error = with_error(fix["saved_s"], fix["error_s"])
    hours = f"{fix['saved_gpu_hours_per_day']:,.1f}"
    assert (row.split("  ")[0].strip(), fix["assumes"]) == (fix["title"], None)
    assert re.sub(r" {2,}", "|", row).strip().endswith(f"|99%|{then}|{error}|{hours}")
    job = shown["/job"]
    at = max(at for at, line in enumerate(job) if line == fix["title"])
    assert job[at + 1 : at + 6] == ["rank 9 on host-0001", "99%", then, error, hours]
    assert any(f"costs {saved} a step" in line for line in job)
    assert any(f"saves {saved} \u00b1 " in line for line in shown["/job"])
    assert any(report["verdict"]["sentence"][1:] in line for line in shown["/job"])


def test_what_a_repaired_worker_saves(report: dict[str, Any], terminal: str, shown: Any) -> None:
    """Whoever selects the slow worker gets the price of its fix, everywhere."""
    (query,), fix = report["questions"], report["fixes"][0]
    assert (query["saved_s"], query["step_time_s"]) == (fix["saved_s"], fix["new_step_s"])
    assert query["saved_gpu_hours_per_day"] == pytest.approx(fix["saved_gpu_hours_per_day"], rel=1e-12)
    saved, then = seconds(query["saved_s"]), seconds(query["step_time_s"])
    assert re.search(rf"fix {QUESTION} +{then} +{saved} ", terminal)
    sentence = f"With {QUESTION} as fast as peers, a step takes {then} instead of"
    assert any(line.startswith(sentence) for line in shown["/whatif"])
    assert saved in shown["/whatif"]


def test_no_price_of_the_what_if_page_stands_beside_an_ideal(shown: Any) -> None:
    assert not any(re.search(r"\bideal\b", line, re.IGNORECASE) for line in shown["/whatif"])


def test_a_job_faster_than_its_ideal_loses_nothing_anywhere(tmp_path: Path) -> None:
    trace = slow_trace((0, 1))
    found_out = PipelineJob(trace).lean().analysed(ReportOptions())
    faster = structs.replace(found_out.attribution, ideal=found_out.attribution.original * 1.25)
    kind, nothing = LossKind.CONTRADICTION, np.zeros(len(faster.steps))
    verdict = structs.replace(
        found_out.diagnosis.verdict,
        kind=kind,
        label=str(kind),
        headline_s=0.0,
        lost_s=0.0,
        share=0.0,
        lost_gpu_hours=0.0,
        lost_gpu_hours_per_day=0.0,
        sentence="S = 0.80 cannot be",
        confidence=None,
        losses=[],
    )
    headline = structs.replace(found_out.diagnosis.headline, step_lost_s=nothing)
    diagnosis = structs.replace(found_out.diagnosis, headline=headline, verdict=verdict)
    analysis = structs.replace(found_out, attribution=faster, diagnosis=diagnosis).analysis()
    odd, lanes = analysis.report, analysis.lanes
    assert lanes is not None
    store = Store(tmp_path / "jobs.duckdb")
    store.add([Incoming(trace, "odd", "x", Findings(odd, lanes.worker_slowdowns()))])
    pages = Pages(store.path)
    assert odd.to_dict()["wasted_gpu_hours_per_day"] == 0
    row, figures = fleet_row(pages, "odd"), metrics(store.path, "odd")
    assert row["lost_gpu_hours_per_day"] == figures["tracekit_job_lost_gpus"] == 0
    assert row["waste"] == figures["tracekit_job_waste_ratio"] == pytest.approx(odd.to_dict()["waste"])
    text = pages.text("/job", job="odd")
    assert "No verdict. S = 0.80 cannot be." in text
    assert "no straggler" not in text.lower()
