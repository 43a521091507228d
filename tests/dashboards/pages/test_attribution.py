"""The page Attribution: both estimates of the report side by side, and the way to the what-if of a bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.dashboards.clicks import click_figure
from tests.dashboards.conftest import Serving
from tests.dashboards.pages.test_pages import whatif
from tracekit.base.text import seconds
from tracekit.dashboards.figures.attribution import MOST_BARS, Estimates, estimates
from tracekit.show.figures.theme import DARK, LIGHT

Visit = Callable[..., Page]

READ_BARS = """(id) => Object.fromEntries(document.querySelector(`#${id}`).figure.data
    .map((bar) => [bar.name, [Array.from(bar.x), Array.from(bar.y)]]))"""


def open_bars(visit: Visit, address: str, **more: Any) -> Page:
    page = visit(address, **more)
    for id_ in ("attribution-kind", "attribution-pp_rank", "attribution-dp_rank"):
        page.wait_for_selector(f"#{id_} .bar")
    return page


def test_both_estimates_are_those_of_the_report(visit: Visit, serving: Serving) -> None:
    found = whatif(serving.store, "slow-worker")
    times = found["step_time_s"]
    page = open_bars(visit, "/attribution?job=slow-worker", theme="dark", width=1920)
    for name, lying in (("kind", True), ("pp_rank", False), ("dp_rank", False)):
        bars, rows = page.evaluate(READ_BARS, f"attribution-{name}"), found[f"by_{name}"]
        names, values = (1, 0) if lying else (0, 1)
        assert bars["alone"][names] == [str(row[name]) for row in rows]
        alone = [(row["slowdown"] - 1) * times["ideal"] for row in rows]
        late = [(row["launch_delay_slowdown"] - 1) * times["original"] for row in rows]
        assert bars["alone"][values] == pytest.approx(alone)
        assert bars["if ideal"][values] == pytest.approx([row["saved_s"] for row in rows])
        assert bars["launch delays"][values] == pytest.approx(late)
    computing = ("forward-compute", "backward-compute", "optimizer")
    saved = sum(row["saved_s"] for row in found["by_kind"] if row["kind"] in computing)
    text = page.inner_text("#page")
    assert f"compute {seconds(saved)}, communication" in text
    assert "r reaches 0.9 on stage 2 of 4. The diagnosis does not name sequence lengths." in text
    assert "Rank 9 on host-0001 costs 31% of each step: computes 80% slower" in page.inner_text(".verdict")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_click_on_a_bar_asks_the_what_if_of_it_and_so_does_the_link_of_the_largest(
    visit: Visit, serving: Serving
) -> None:
    page = open_bars(visit, "/attribution?job=slow-worker")
    links = page.locator(".panel-extra a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert links == [
        "/whatif?job=slow-worker&select=kind%3Dbackward-compute",
        "/whatif?job=slow-worker&select=stage%3D2",
        "/whatif?job=slow-worker&select=dp_rank%3D1",
    ]
    click_figure(page, "attribution-dp_rank", 1.4 / 4, 0.6)
    page.wait_for_url(f"{serving.url}/whatif?job=slow-worker&select=dp_rank%3D1")


def test_the_same_address_shows_the_same_in_another_browser_whatever_else_is_in_it(visit: Visit) -> None:
    page = open_bars(visit, "/attribution?job=sequence-lengths")
    assert "The diagnosis names sequence lengths (99% sure)." in page.inner_text("#page")
    again = open_bars(visit, "/attribution?job=sequence-lengths&step=abc&worker=../../x&kind=<script>alert(1)</script>")
    assert again.inner_text("#page") == page.inner_text("#page")
    assert again.locator("#page script").count() == 0


def test_odd_jobs_have_a_page(visit: Visit, odd: Serving) -> None:
    page = None
    for job, says in (
        ("single", "No straggler (slowdown 1.000), and nothing costs 5% of the step."),
        ("missing", "Not trustworthy: DP ranks are missing from the trace"),
    ):
        page = open_bars(visit, f"/attribution?job={job}", base=odd.url, within=page)
        assert page.inner_text(".verdict").startswith(says)


def test_what_was_too_dear_to_compute_is_not_drawn_and_many_sets_become_lines() -> None:
    count = MOST_BARS + 1
    names = [str(at) for at in range(count)]
    found = Estimates(names, [f"dp_rank={name}" for name in names], [0.5] * count, [None] * count, [None] * count)
    (line,) = estimates(found, LIGHT, x="DP rank").data
    assert (line.type, line.name, len(line.x)) == ("scatter", "alone", count)
    few = Estimates(["0"], ["dp_rank=0"], [0.5], [0.25], [None])
    assert [(bar.type, bar.name) for bar in estimates(few, DARK, x="DP rank").data] == [
        ("bar", "alone"),
        ("bar", "if ideal"),
    ]
