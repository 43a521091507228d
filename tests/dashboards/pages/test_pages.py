"""Every page opens in both themes and shows the numbers of `whatif --json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from playwright.sync_api import Page

from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines
from tests.handmade import run, slow_trace
from tracekit.base.text import cost
from tracekit.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store

#: Pixels of a row of the table of all jobs.
ROW_HEIGHT = 36

Visit = Callable[..., Page]
Serve = Callable[[Path], Serving]


def whatif(store: Path, job: str) -> dict[str, Any]:
    ran = run("whatif", "--store", store, "--job", job, "--json")
    report: dict[str, Any] = json.loads(ran.out)
    return report


def open_table(page: Page) -> None:
    """Unfold the table of all jobs, which is loaded then."""
    page.click("#all-jobs > summary")
    page.wait_for_selector(".ag-row a")


def test_the_fleet_ranks_the_jobs_by_what_they_lose(visit: Visit) -> None:
    page = visit("/", theme="dark")
    open_table(page)
    names = page.locator(".ag-cell[col-id=shown]").all_inner_texts()
    assert names[0] == "slow-worker"
    assert {"healthy", "collected-healthy"} == set(names[-2:])
    assert len(names) == 8


def test_a_row_of_the_fleet_opens_its_job_by_keyboard(visit: Visit) -> None:
    page = visit("/")
    open_table(page)
    page.focus("#fleet-q")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.ag-row *')"):
            break
    name = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.wait_for_selector(".job-title")
    assert page.inner_text("h1") == name == "slow-worker"


@pytest.fixture
def doubtful(tmp_path: Path, show: Serve) -> Serving:
    """A job that is trustworthy, and one of several causes that is not."""
    store = Store(tmp_path / "s.duckdb")
    trace = slow_trace((0,))
    found = PipelineJob(trace).stored()
    report = json.loads(found.report)
    report["trust"]["trustworthy"] = False
    report["causes"] = [{**report["causes"][0], "kind": kind} for kind in ("slow-worker", "python-gc", "late-data")]
    store.add(
        [
            Incoming(trace, "good", "x", found),
            Incoming(trace, "doubtful", "x", structs.replace(found, report=json.dumps(report))),
        ]
    )
    return show(store.path)


def test_a_row_of_the_fleet_names_its_causes_on_one_line_and_all_of_them_when_pointed_at(
    visit: Visit, doubtful: Serving
) -> None:
    page = visit("/", width=1280, base=doubtful.url)
    open_table(page)
    cell = page.locator(".ag-row", has_text="doubtful").locator("[col-id=causes]")
    everything = cell.get_attribute("title")
    assert everything == cell.inner_text()
    assert [one.split(":")[0] for one in everything.split("; ")] == ["slow worker", "python gc", "late data"]
    inside = cell.bounding_box()
    assert inside is not None
    assert inside["height"] <= ROW_HEIGHT


def test_jobs_that_are_not_trustworthy_are_marked_and_in_no_sum(visit: Visit, doubtful: Serving) -> None:
    lost = whatif(doubtful.store, "good")["verdict"]["lost_gpu_hours_per_day"]
    page = visit("/", base=doubtful.url)
    open_table(page)
    cards = page.inner_text(".figures")
    assert "straggling (slowdown >= 1.1): 1 of 1" in cards
    assert f"{lost:,.0f}\nGPU-hours lost a day" in cards
    assert "1\nnot trustworthy, so not counted here" in cards
    assert page.locator("[col-id=trust].slow").all_inner_texts() == ["no"]


def test_sentences_about_a_job_that_is_not_trustworthy_say_so_first(doubtful: Serving) -> None:
    pages = Pages(doubtful.store)
    said = [line for line in pages.lines("/workers", job="doubtful") if "stands out" in line or "slowdown is" in line]
    assert said
    assert all(words.startswith("Not trustworthy: ") for words in said)
    assert "Not trustworthy: " not in pages.text("/workers", job="good")


def test_a_second_dashboard_in_the_process_answers_like_the_first(visit: Visit, odd: Serving, serving: Serving) -> None:
    for server in (odd, serving):
        page = visit("/", base=server.url)
        open_table(page)
        page.fill("#fleet-q", "python")
        page.wait_for_url("**q=python")


def test_a_job_shows_its_verdict_causes_and_fixes(visit: Visit, serving: Serving) -> None:
    found = whatif(serving.store, "slow-worker")
    page = visit("/job?job=slow-worker", theme="dark")
    assert f"straggler, {found['verdict']['share']:.0%} lost" in page.inner_text(".job-title")
    sentence, answer = found["verdict"]["sentence"], found["answer"]
    card = page.inner_text(".hero")
    page.evaluate("document.querySelectorAll('.folded').forEach((one) => { one.open = true; })")
    text = page.inner_text("#page")
    assert all(answer[part] in card for part in ("who", "cost", "check", "action", "saves", "trust"))
    assert f"{sentence[1:]}." in text
    for cause in found["causes"]:
        assert cause["title"] in text
        assert cost(cause["saved_s"], cause["alone_s"]) in text
    for fix in found["fixes"]:
        assert fix["title"] in text
        assert f"{fix['saved_gpu_hours_per_day']:,.1f}" in text
    for figure in (one["words"] for cause in found["causes"] for one in cause["evidence"]):
        assert figure in text
    page.click("text=Show on the worker map")
    page.wait_for_selector("#workers-detail >> text=Rank 9 on host-0001")


def luminance(colour: str) -> float:
    """Of `rgb(...)`, as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_badges_can_be_read(visit: Visit, theme: str) -> None:
    page = None
    for job in ("slow-worker", "healthy"):
        page = visit(f"/job?job={job}", theme=theme, within=page)
        found = page.locator(".badge").evaluate_all(
            "all => all.map(one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor])"
        )
        assert len(found) == 2
        for colours in found:
            dark, light = sorted(map(luminance, colours))
            assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_the_change_of_a_percentage_is_in_points(sample_store: Path) -> None:
    before, after = (whatif(sample_store, job)["waste"] for job in ("healthy", "slow-worker"))
    page = Pages(sample_store).page("/compare", job="slow-worker", **{"with": "healthy"})
    row = next(row for row in map(lines, found(page, "Tr")) if "waste" in row[0])
    assert f"+{(after - before) * 100:.1f} points" in " ".join(row)
