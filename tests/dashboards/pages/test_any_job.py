"""A job of any source: listed with the others, with the same pages; those about workers say if it has none."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

import tracekit
from tests.analysis.rl.logs import lines as lines_of_rl
from tests.analysis.rl.logs import write
from tests.cases import case
from tests.dashboards.page_text import Pages, lines, sent
from tests.handmade import slow_trace
from tests.reports import report_with
from tests.test_gpu_traces import SAMPLE
from tests.test_op_trace import DP, OPS
from tracekit.analysis.job.graph import GraphJob
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.text import seconds
from tracekit.dashboards.browser.data.replays import read_query
from tracekit.dashboards.figures.lanes import LEVELS_OF_RL, StreamOps
from tracekit.store import Incoming, Store
from tracekit.trace.op import OpTrace

#: A job of each source, and whether it has workers.
SOURCES = {"pipeline": True, "op trace": False, "recording": False, "post-training": False}
OF_WORKERS = ("/workers", "/pipeline")
NO_WORKERS = "This page is about the workers of a pipeline, which this job does not have."


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """A job of each source, one that was stored without an analysis, and one that an older version analysed."""
    gpus = tracekit.load(SAMPLE)
    rl = tracekit.load(write(tmp_path_factory.mktemp("rl") / "rl.jsonl", lines_of_rl()))
    ops, pipeline = OpTrace(OPS, "op trace", groups=DP), slow_trace((3, 8), name="pipeline")
    of_ops, of_rl = GraphJob(ops).stored(), rl.stored()
    stale = structs.replace(of_rl, report=structs.replace(of_rl.report, what_if=[]))
    older = structs.replace(of_ops, report=structs.replace(of_ops.report, report_version=2))
    store = Store(tmp_path_factory.mktemp("any") / "jobs.store")
    store.add(
        [
            Incoming(pipeline, "pipeline", "p.parquet", PipelineJob(pipeline).stored()),
            Incoming(ops, "op trace", "ops.parquet", of_ops),
            Incoming(ops, "bare ops", "ops.parquet"),
            Incoming(ops, "older", "ops.parquet", older),
            Incoming(gpus.trace, "recording", "gpu_slow_input", gpus.stored()),
            Incoming(rl.trace, "post-training", "rl.jsonl", of_rl),
            Incoming(rl.trace, "stale", "rl.jsonl", stale),
        ]
    )
    return Pages(store.path)


def report_on(pages: Pages, name: str) -> dict[str, Any]:
    report = pages.service.results.stored(name).report
    assert report is not None
    return report.to_dict()


def test_the_page_job_shows_the_answer_causes_fixes_and_tables_of_the_report(pages: Pages) -> None:
    for name in SOURCES:
        with case(name):
            report, text = report_on(pages, name), " ".join(pages.lines("/job", job=name))
            answer, whole = report["answer"], report["job"]["whole"]
            assert f"{report['verdict']['label']}, {report['verdict']['share']:.0%} lost trustworthy" in text
            assert f"{answer['headline'][1:]}. Do this first: {answer['action']} {answer['saves']}." in text
            assert all(answer[part] in text for part in ("who", "cost", "check", "trust"))
            assert text.count(answer["action"][1:]) == text.count(answer["check"]) == 1  # advice stands once
            assert all(remark["words"] in text for remark in report["remarks"])
            for cause, place in zip(report["causes"], answer["places"], strict=True):
                assert f"{cause['title']} {place}, {cause['when']}" in text
                assert all(figure["words"] in text for figure in cause["evidence"])
            assert f"{whole.capitalize()} after, recorded Saved per {whole}" in text
            for fix in report["fixes"]:
                assert fix["title"] in text
                assert (fix["withheld"] or seconds(fix["new_step_s"])) in text
            for section in report["sections"]:
                heads, *rows = (section["heads"], *section["rows"]) if section["type"] == "table" else ([],)
                rows = [[head[:1].upper() + head[1:] for head in heads], *rows]
                assert " ".join([section["title"], *(cell for row in rows for cell in row)]) in text


def test_the_pages_of_post_training_have_its_words(pages: Pages) -> None:
    timeline = " ".join(pages.lines("/timeline", job="post-training"))
    assert "Phases and requests, one by one" in timeline
    assert "Phase: generate train sync reward request" in timeline
    ops = pages.service.results.step("post-training", 3)
    assert isinstance(ops, StreamOps)
    assert ops.roles == ("phases", "a")
    assert (ops.who(0), ops.who(1), ops.facts(0)[0]) == ("phases", "a", ["role", "phases"])
    levels = {kind: LEVELS_OF_RL[level] for kind, level in zip(ops.frame["kind"], ops.level, strict=True)}
    assert levels == {kind: kind for kind in ("generate", "reward", "train", "sync", "request")}
    whatif = pages.lines("/whatif", job="post-training")
    assert "Alternative" in whatif
    assert "staleness=1" in whatif
    for alternative in ("staleness=1", "longest-first", "partial=0.9,engines=2"):
        assert str(read_query(alternative)) == alternative


def test_a_run_of_post_training_without_an_alternative_has_no_words_of_ops(pages: Pages) -> None:
    """One that trains on stale samples already has none."""
    assert "Phases and requests, one by one" in pages.text("/timeline", job="stale")
    whatif = pages.lines("/whatif", job="stale")
    assert "Alternative" in whatif
    assert "Ops" not in whatif
    assert not any(line.startswith("Every ") for line in whatif)


def test_the_page_of_an_op_trace_has_the_numbers_of_the_hand(pages: Pages) -> None:
    """Two ranks lose 4.5 s of every 6.5 s step: 33.2 of 48 GPU-hours a day. Forwards take 3 s of the critical path."""
    text = pages.text("/job", job="op trace")
    assert "Rank 1 on n1 costs 69% of each step: Python collects garbage for 2.50 s a step" in text
    assert "4.50 s of every 6.50 s step, 33.2 of 48 GPU-hours a day" in text
    assert "forward\n3.00 s\n46%" in text


def test_what_each_gpu_did_is_drawn_where_it_was_recorded(pages: Pages) -> None:
    for name, drawn in {"pipeline": 0, "op trace": 0, "recording": 1, "post-training": 0}.items():
        with case(name):
            page = sent(pages.page("/job", job=name))
            assert page.count("What each GPU did") == page.count("rank 0, exposed communication: ") == drawn


def test_only_a_job_with_workers_has_the_pages_about_them_and_links_to_them(pages: Pages) -> None:
    for name, has_workers in SOURCES.items():
        with case(name):
            job = sent(pages.page("/job", job=name))
            assert all(f"{path}?job=" in job for path in ("/timeline", "/whatif", "/compare"))
            assert "/hang?job=" not in job  # it has none
            for path, words in {
                "/timeline": "of this view",
                "/whatif": "Priced fixes",
                "/compare": "Compare with",
            }.items():
                assert words in pages.text(path, job=name)
            for path in OF_WORKERS:
                page = pages.page(path, job=name)
                assert (f"{path}?job=" in job) == has_workers
                assert any(line.startswith(NO_WORKERS) for line in lines(page)) != has_workers
                assert "/job?job=" in sent(page)


def test_the_list_of_jobs_has_each_with_its_findings(pages: Pages) -> None:
    rows = {row["name"]: row for row in pages.job_rows()}
    for name in SOURCES:
        with case(name):
            report = report_on(pages, name)
            assert rows[name]["slowdown"] == pytest.approx(report["slowdown"])
            gpus = report["job"]["gpus"]
            assert rows[name]["gpus"] == gpus
            assert (rows[name]["lost_gpu_hours_per_day"] is None) == (gpus is None) == (name == "post-training")
            assert rows[name]["cause_kinds"][0] == report["causes"][0]["kind"]
            assert rows[name]["verdict"] == report["verdict"]["label"].replace("-", " ")
            assert rows[name]["share"] == pytest.approx(report["verdict"]["share"])


def test_each_table_of_the_report_is_a_file_and_others_are_refused_in_a_line(pages: Pages) -> None:
    for name, has_workers in SOURCES.items():
        with case(name):
            tables = {
                "causes": True,
                "fixes": True,
                "by_kind": True,
                "by_worker": has_workers,
                "by_rank": not has_workers and name != "post-training",
            }
            for table, there in tables.items():
                answer = pages.client().get(f"/download/{table}.csv", query_string={"job": name})
                assert answer.status_code == (200 if there else 404)
                assert there or answer.text == f"the job {name!r} has no table {table}\n"


def test_data_about_workers_is_refused_in_a_line(pages: Pages) -> None:
    why = "is no pipeline, so it has no workers"
    for address in ("/timeline/path", "/timeline/export.json.gz", "/download/by_worker_per_step.csv"):
        with case(address):
            answer = pages.client().get(address, query_string={"job": "op trace"})
            assert (answer.status_code, answer.text) == (404, f"the job 'op trace' {why}\n")
    compared = pages.text("/compare", job="pipeline", **{"with": "op trace"})
    assert f"op trace {why}; choose another job." in compared


def test_a_job_without_a_report_that_can_be_shown_says_how_to_get_one(pages: Pages) -> None:
    reasons = {
        "bare ops": "It was stored without an analysis",
        "older": "It was analysed by another version of tracekit. `tracekit store repair --store ",
    }
    for name, why in reasons.items():
        with case(name):
            assert why in pages.text("/job", job=name)
            assert name in sent(pages.page("/"))
            assert all(NO_WORKERS in pages.text(path, job=name) for path in OF_WORKERS)


def test_a_fix_that_is_not_promised_alone_says_so_in_the_chart(pages: Pages) -> None:
    parts = [{"title": title, "marginal_saved_s": saved_s} for title, saved_s in (("sure", 2.0), ("unsure", 1.0))]
    fixes = [
        {"kind": "combination", "title": "both", "details": {"sequence": parts}},
        {"kind": "a", "title": "sure"},
        {"kind": "b", "title": "unsure", "withheld": "the saving is below its error"},
    ]
    report = report_with(fixes=fixes, step_time_s={"recorded": 10.0})
    from tracekit.dashboards.browser.pages.job import fix_levels  # pages need an app

    with pages._server.test_request_context("/job"):
        levels = fix_levels(pages.service.results.stored("pipeline"), report)
    assert [(one.title, one.start_s, one.end_s) for one in levels] == [
        ("Recorded", 0, 10.0),
        ("sure", 10.0, 8.0),
        ("unsure (not promised alone)", 8.0, 7.0),
        ("With these fixes", 0, 7.0),
    ]
