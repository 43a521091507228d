"""The page Fleet: what a study says, read again once it has changed; names in it are text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from dash.development.base_component import Component
from playwright.sync_api import Page

from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines
from tests.dashboards.test_accessibility import AXE, RULES, RUN
from tests.documents.evil import EVIL
from tests.fleet.written import job, write_study
from tests.handmade import run, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.fleet.study import Study
from tracekit.report.findings import AppliedFix
from tracekit.store import Incoming, Store


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Two of four jobs straggle; they have 300 of 400 GPU-hours, of which 150 are lost at S = 2."""
    return write_study(
        tmp_path / "last week",
        jobs=[job("a", 2.0, 200, team=EVIL), job("b", 2.0, 100, team="y"), job("c", 1.0, 50), job("d", 1.0, 50)],
        sources=[{"source": name, "job": name} for name in "abcd"],
        causes=[{"job": "a", "kind": "python-gc", "title": EVIL, "lost_gpu_hours": 60.0}],
    )


def test_the_page_says_what_the_study_holds_now(study: Study, tmp_path: Path) -> None:
    pages = Pages(tmp_path / "no.store", study.path)
    lines = pages.lines("/fleet")
    assert "Fleet: last week" in lines
    assert "50.0% of 4 jobs straggle; 37.5% of 400 GPU-hours are lost to it" in lines
    text = "\n".join(lines)
    for title in ("What jobs lose: cumulative distribution", "GPU-hours lost by cause", "Our fleet beside the paper's"):
        assert title in text
    assert "None beyond chance." in lines
    (part,) = study.path.glob("jobs/*.parquet")
    study.read("jobs").filter(name="a").write_parquet(part)
    assert "100.0% of 1 jobs straggle; 50.0% of 200 GPU-hours are lost to it" in pages.text("/fleet")


def test_every_job_has_a_page_that_says_what_the_study_knows_of_it_in_money_too(study: Study, tmp_path: Path) -> None:
    """Job a loses half of 200 GPU-hours, at 2 each; the store has no job, so its page is one of the study."""
    pages = Pages(tmp_path / "no.store", study.path, gpu_hour=2.0)
    listed = pages.page("/fleet")
    assert "/fleet?job=a" in [link.href for link in found(listed, "Link")]
    assert "200" in lines(next(row for row in found(listed, "Tr") if "a" in lines(row)))
    shown = pages.lines("/fleet", job="a")
    assert "100 of 200 GPU-hours lost, 200 at 2 a GPU-hour." in shown
    assert EVIL in "\n".join(shown)
    assert "The study has no job named z that counts." in pages.lines("/fleet", job="z")


def test_fixes_that_were_applied_are_shown_on_their_jobs_and_over_the_fleet(study: Study, tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    trace = slow_trace((0,))
    store.add([Incoming(trace, name, "x", PipelineJob(trace).stored()) for name in ("a", "b", "c")])
    for title, expected, got in ((EVIL, 2.0, 1.5), ("Swap a node", 1.0, -0.5)):
        store.note_applied(
            AppliedFix(
                0.0, "me", "a", "b", "k", title, "step", expected, 0.1, got, got - 0.25, got + 0.25, 100 * expected
            )
        )
    pages = Pages(store.path, study.path)
    text = pages.text("/fleet")
    assert "2 fixes gave back 100 of 300 GPU-hours a day expected" in text  # 150 - 50
    for part in ("Fixes that were applied", "Swap a node", "a, then b", "2.00 s ± 100.0 ms", "-500.0 ms"):
        assert part in text
    for name in ("a", "b"):
        job = pages.text("/job", job=name)
        assert "expected 2.00 s ± 100.0 ms less a step, got 1.50 s less (95% interval 1.25 s to 1.75 s)" in job
        assert "expected 1.00 s ± 100.0 ms less a step, got 500.0 ms more" in job
        assert "/compare?job=b&with=a" in {link.href for link in found(pages.page("/job", job=name), "Link")}
    assert "Fixes applied" not in pages.text("/job", job="c")
    ran = run("fleet", "report", study.path, "--store", store.path)
    assert "Applied     2 fixes gave back 100 of 300 GPU-hours a day expected" in ran.out
    assert run("fleet", "report", study.path, "--store", tmp_path / "none").code == 2


def test_teams_and_causes_lead_to_their_jobs_and_those_to_the_store(study: Study, tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    trace = slow_trace((0,))
    store.add([Incoming(trace, "a", "x", PipelineJob(trace).stored())])
    pages = Pages(store.path, study.path)
    page = pages.page("/fleet")
    links = {link.href for link in found(page, "Link")}
    assert {"/fleet?cause=python-gc", "/fleet?team=y", "/fleet?team=unknown", "/job?job=a"} <= links
    assert "/job?job=b" not in links
    assert listed(page) == ["a", "b", "c", "d"]
    assert listed(pages.page("/fleet", team="y")) == ["b"]
    assert listed(pages.page("/fleet", cause="python-gc")) == ["a"]
    assert listed(pages.page("/fleet", team="y", cause="python-gc")) == []
    assert "/fleet" in {link.href for link in found(pages.page("/fleet", team=EVIL), "Link")}


def listed(page: Component) -> list[str]:
    """The jobs that the page lists."""
    (table,) = [one for one in found(page, "Div", "stacked") if getattr(one, "aria-label") == "Jobs that lose most"]
    return [lines(row)[0] for row in found(table, "Tr")][1:]


def test_without_a_study_or_with_a_damaged_one_the_page_says_what_to_do(study: Study, tmp_path: Path) -> None:
    assert "tracekit dashboard --study STUDY" in Pages(tmp_path / "no.store").text("/fleet")
    (study.path / "tracekit-study").write_text("{}")
    assert "this tracekit reads version" in Pages(tmp_path / "no.store", study.path).text("/fleet")
    ran = run("dashboard", "--study", tmp_path)
    assert (ran.code, "not a study" in ran.message) == (2, True)


@pytest.mark.every_push
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_page_opens_from_any_other_for_everybody(
    study: Study, tmp_path: Path, theme: str, serve: Callable[..., Serving], visit: Callable[..., Page]
) -> None:
    serving = serve(tmp_path / "no.store", study=study.path)
    page = visit("/fleet", base=serving.url, theme=theme, width=390)
    page.wait_for_selector("text=GPU-hours lost by cause")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    page.evaluate(AXE)
    assert page.evaluate(RUN, RULES) == []
    assert page.locator("header a", has_text="Fleet").get_attribute("href") == "/fleet"
    page.set_viewport_size({"width": 1440, "height": 900})  # one screen: all other tables are folded below it
    folded = page.get_by_text("All tables").element_handle()
    page.wait_for_function("(summary) => summary.getBoundingClientRect().bottom <= 900", arg=folded)
