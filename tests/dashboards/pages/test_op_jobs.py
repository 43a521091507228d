"""Op traces in the dashboard: listed with the others, with a page of their own; pages about pipelines say so."""

from __future__ import annotations

import pytest

from tests.dashboards.page_text import Pages, found, sent
from tests.handmade import slow_trace
from tests.test_gpu_traces import SAMPLE
from tests.test_op_trace import DP, OPS
from tracekit.job.graph import GraphJob
from tracekit.job.load import load_gpu
from tracekit.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store
from tracekit.trace.op import OpTrace


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """A pipeline, an op trace, and an op trace that was stored without an analysis."""
    gpus = load_gpu(SAMPLE)
    ops, pipeline = OpTrace(OPS, "two ranks", groups=DP), slow_trace((3, 8), name="pipeline")
    store = Store(tmp_path_factory.mktemp("ops") / "jobs.store")
    store.add(
        [
            Incoming(pipeline, "pipeline", "p.parquet", PipelineJob(pipeline).stored()),
            Incoming(ops, "two ranks", "ops.parquet", GraphJob(ops).stored()),
            Incoming(ops, "bare ops", "ops.parquet"),
            Incoming(gpus.trace, "gpus", "gpu_slow_input", gpus.stored()),
        ]
    )
    return Pages(store.path)


def test_the_fleet_lists_an_op_trace_with_its_verdict(pages: Pages) -> None:
    (row,) = (row for row in pages.job_rows() if row["name"] == "two ranks")
    assert (row["slowdown"], row["gpus"], row["trust"]) == (pytest.approx(6.5 / 3), 2, "yes")
    assert "bare ops" in sent(pages.page("/"))


def test_the_page_of_a_gpu_recording_says_who_why_and_who_waits_for_whom(pages: Pages) -> None:
    text = pages.text("/job", job="gpus")
    assert "Rank 2 on simulated costs 22% of the recording: waits for its data loader." in text
    assert "waits for its data loader: 3.1 ms in its data loader, 0.1 ms on its peers (late-input)" in text
    assert "Do this first: Give this rank's data loader more workers or prefetching, and check its storage" in text
    assert "saves 3.0 ms of the 13.7 ms recorded" in text
    assert not {"Workers", "What-if", "Timeline"} & set(text.split("\n"))
    assert "4 of 4 ranks, " in text
    said = [sent(table) for table in found(pages.page("/job", job="gpus"), "Table")]
    assert any("sole delay" in one and "of it exposed" in one for one in said)
    assert any("waits for rank" in one for one in said)
    assert any("matrix-product" in one for one in said)
    assert "straggler, 22% lost" in text


def test_its_page_shows_verdict_critical_path_and_labels(pages: Pages) -> None:
    """3.5 s of every 6.5 s step on two ranks: 25.8 GPU-hours a day."""
    text = pages.text("/job", job="two ranks")
    assert "Stragglers cost 3.50 s of every 6.50 s step: slowdown 2.167. 26 GPU-hours a day at this rate." in text
    assert "op trace: the pages about pipelines do not apply" in text
    said = [sent(table) for table in found(pages.page("/job", job="two ranks"), "Table")]
    assert any("forward" in one and "3.00 s" in one and "46.2%" in one for one in said)
    assert any("n1" in one and "2.167" in one for one in said)


@pytest.mark.parametrize("path", ["/workers", "/attribution", "/time", "/whatif", "/timeline", "/compare"])
def test_a_page_about_pipelines_says_so_and_links_back(path: str, pages: Pages) -> None:
    text = pages.text(path, job="two ranks")
    assert "This page is about pipelines, and the job is an op trace" in text
    assert "/job?job=two+ranks" in sent(pages.page(path, job="two ranks")) or "two%20ranks" in sent(
        pages.page(path, job="two ranks")
    )


def test_an_op_trace_without_an_analysis_says_how_to_get_one(pages: Pages) -> None:
    assert "It was stored without an analysis" in pages.text("/job", job="bare ops")


def test_a_pipeline_is_not_compared_with_an_op_trace(pages: Pages) -> None:
    text = pages.text("/compare", job="pipeline", **{"with": "two ranks"})
    assert "two ranks is an op trace: only its page Job has results; choose another job." in text


def test_files_of_pipelines_are_refused_in_a_line(pages: Pages) -> None:
    for address in ("/timeline/layout", "/download/by_worker.csv", "/download/by_worker_per_step.csv"):
        answer = pages.client().get(address, query_string={"job": "two ranks"})
        assert (answer.status_code, answer.text.strip()) == (
            404,
            "the job 'two ranks' is an op trace: only its page Job has results",
        )
    assert "two ranks" in pages.client().get("/download/jobs.csv").text
