"""The page Time: the steps of the report, what the pattern says of them, and the way to the timeline of a step."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page

from tests.dashboards.clicks import address, click_figure, wait_for_state
from tests.dashboards.conftest import Serving
from tests.dashboards.pages.test_pages import whatif
from tracekit.dashboards.data.queries import Results

Visit = Callable[..., Page]

READ_LINES = """(id) => document.querySelector(`#${id}`).figure.data
    .map((line) => [line.name, Array.from(line.y)])"""
READ_MAP = """() => Array.from(document.querySelector("#time-workers").figure.data[0].z,
    (row) => Array.from(row))"""


#: The first row is that of worker (0,0), not of the slowest.
IN_ORDER = """(first) => Math.abs(
    document.querySelector("#time-workers")?.figure?.data[0].z[0][0] - first) < 1e-6"""


def open_time(visit: Visit, address: str, **more: Any) -> Page:
    page = visit(address, **more)
    for id_ in ("time-slowdown", "time-times"):
        page.wait_for_selector(f"#{id_} .line")
    page.wait_for_selector("#time-workers .area")
    return page


def test_lines_and_map_show_the_steps_of_the_report(visit: Visit, serving: Serving) -> None:
    rows = whatif(serving.store, "python-gc")["by_step"]
    page = open_time(visit, "/time?job=python-gc", theme="dark", width=1920)
    lines = dict(page.evaluate(READ_LINES, "time-times"))
    for name in ("recorded", "original", "ideal"):
        assert lines[name] == pytest.approx([row[f"{name}_s"] for row in rows])
    (_, slowdown), *_ = page.evaluate(READ_LINES, "time-slowdown")
    assert slowdown == pytest.approx([row["slowdown"] for row in rows])
    slowest = max(rows, key=lambda row: row["original_s"])
    table = page.locator("#page table.tight tbody tr").first.inner_text()
    assert table.split()[:2] == [str(slowest["step"]), f"{slowest['slowdown']:.3f}"]
    found = Results(serving.store).worker_map("python-gc")
    order = found.worst(None, 40)
    assert np.array(page.evaluate(READ_MAP)) == pytest.approx(found.per_step.reshape(len(rows), -1).T[order])
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_click_on_a_step_opens_its_timeline(visit: Visit, serving: Serving) -> None:
    steps = [row["step"] for row in whatif(serving.store, "slow-worker")["by_step"]]
    page = open_time(visit, "/time?job=slow-worker")
    click_figure(page, "time-times", 2.5 / len(steps), 0.5)
    page.wait_for_url(f"{serving.url}/timeline?job=slow-worker&step={steps[2]}")


def test_a_click_on_the_map_opens_the_timeline_of_that_worker_in_that_step(visit: Visit, serving: Serving) -> None:
    steps = [row["step"] for row in whatif(serving.store, "slow-worker")["by_step"]]
    page = open_time(visit, "/time?job=slow-worker")
    click_figure(page, "time-workers", 4.5 / len(steps), 0.5 / 16)
    page.wait_for_url(f"{serving.url}/timeline?job=slow-worker&step={steps[4]}&worker=1%2C2")


def test_the_rows_are_the_slowest_workers_or_all_of_them(visit: Visit, odd: Serving) -> None:
    page = open_time(visit, "/time?job=wide", base=odd.url)
    assert len(page.evaluate(READ_MAP)) == 40
    assert len(open_time(visit, "/time?job=wide&rows=all", base=odd.url, within=page).evaluate(READ_MAP)) == 48


def test_the_choice_of_rows_is_a_view_with_an_address(visit: Visit, serving: Serving) -> None:
    found = Results(serving.store).worker_map("slow-worker")
    everyone = found.per_step.reshape(len(found.steps), -1).T
    page = open_time(visit, "/time?job=slow-worker")
    page.focus("#time-rows input[value=worst]")
    page.keyboard.press("ArrowRight")
    wait_for_state(page, job="slow-worker", rows="all")
    again = open_time(visit, address(page))
    assert np.array(again.evaluate(READ_MAP)) == pytest.approx(everyone)
    page.wait_for_function(IN_ORDER, arg=float(everyone[0, 0]))
    assert page.evaluate(READ_MAP) == again.evaluate(READ_MAP)
    again.focus("#time-rows input[value=all]")
    again.keyboard.press("ArrowLeft")
    wait_for_state(again, job="slow-worker")


def test_odd_jobs_have_a_page(visit: Visit, odd: Serving) -> None:
    page = None
    for job in ("single", "missing"):
        page = open_time(visit, f"/time?job={job}", base=odd.url, within=page)
        (_, slowdown), *_ = page.evaluate(READ_LINES, "time-slowdown")
        assert slowdown == pytest.approx([row["slowdown"] for row in whatif(odd.store, job)["by_step"]])


def test_the_moment_of_a_step_is_beside_its_number(visit: Visit, serving: Serving) -> None:
    start = Results(serving.store).step_starts("slow-worker")[100]
    assert start is not None
    page = open_time(visit, "/time?job=slow-worker")
    first = page.evaluate("document.querySelector('#time-times').figure.data[0].customdata[0]")
    assert first == [100, datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")]
