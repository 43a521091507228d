"""The page Workers: the numbers of the report on the map, and every way to move about on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import polars as pl
import pytest
from playwright.sync_api import Page, expect

from tests.cases import case
from tests.dashboards.clicks import address, click_figure, point_at_figure, wait_for_state
from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines, sent
from tests.dashboards.pages.test_pages import whatif
from tests.dashboards.watched import analysed
from tests.handmade import LAYOUT, healthy_frame, slow_frame
from tracekit.base.text import cost_alone
from tracekit.dashboards.browser.data.queries import Results
from tracekit.dashboards.browser.data.view_state import Box, WorkerView, choose_box
from tracekit.dashboards.figures.worker_map import WorkerMap
from tracekit.store import Store
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

Visit = Callable[..., Page]

JOB = "slow-worker"
#: What is drawn, whether the figure came with the page or later.
READ_MAP = """() => {
    const heat = document.querySelector("#workers-map").figure.data[0];
    return Array.from(heat.z, (row) => Array.from(row));
}"""
READ_LINES = """() => document.querySelector("#workers-times").figure.data
    .map((line) => [line.name, Array.from(line.y)])"""
READ_OUTLINES = """() => document.querySelector("#workers-map").figure.layout.shapes
    .map((box) => [box.x0, box.y0, box.line.color, box.line.width])"""


def open_map(visit: Visit, address: str, **more: Any) -> Page:
    page = visit(address, **more)
    page.wait_for_selector("#workers-map .area")
    return page


def test_the_map_and_the_list_show_the_slowdowns_of_the_report(visit: Visit, serving: Serving) -> None:
    rows = whatif(serving.store, JOB)["by_worker"]
    page = open_map(visit, f"/workers?job={JOB}", theme="dark", width=1920)
    drawn = np.array(page.evaluate(READ_MAP))
    for row in rows:
        assert drawn[row["dp_rank"], row["pp_rank"]] == pytest.approx(1 - 1 / row["slowdown"], abs=1e-6)
    first = page.locator("#workers-list tbody tr").first.inner_text().split()
    worst = rows[0]
    assert first == [
        str(worst["rank"]),
        worst["host"],
        f"{worst['dp_rank']},",
        str(worst["pp_rank"]),
        cost_alone(worst["slowdown"]),
    ]
    text = page.inner_text("#page")
    assert f"One worker stands out: rank 9 on host-0001, which alone costs {1 - 1 / worst['slowdown']:.1%}" in text
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.every_push
def test_a_click_on_a_cell_shows_that_worker_and_the_address_brings_it_back(visit: Visit, serving: Serving) -> None:
    page = open_map(visit, f"/workers?job={JOB}")
    expect(page.locator("#workers-detail h3")).to_contain_text("Rank 9 on host-0001 (dp 1, stage 2)")
    click_figure(page, "workers-map", 0.5 / 4, 3.5 / 4)
    expect(page.locator("#workers-detail h3")).to_have_text("Rank 3 on host-0000 (dp 3, stage 0)")
    wait_for_state(page, job=JOB, worker="3,0")
    (row,) = [row for row in whatif(serving.store, JOB)["by_worker"] if (row["dp_rank"], row["pp_rank"]) == (3, 0)]
    said = page.inner_text("#workers-detail")
    assert f"{cost_alone(row['slowdown'])} of a step" in said
    assert row["host"] in said
    links = page.locator("#workers-detail a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert "/timeline?job=slow-worker&worker=3%2C0" in links
    assert "/whatif?job=slow-worker&select=worker%3D3%2C0" in links
    again = open_map(visit, address(page))
    for part in ("list", "readout", "detail", "hosts"):
        assert again.inner_text(f"#workers-{part}") == page.inner_text(f"#workers-{part}")
    assert again.evaluate(READ_OUTLINES) == page.evaluate(READ_OUTLINES)


def test_scrubbing_shows_the_map_of_each_step_and_the_address_brings_it_back(visit: Visit, serving: Serving) -> None:
    found = Results(serving.store).worker_steps(JOB)
    page = open_map(visit, f"/workers?job={JOB}")
    slider = page.locator("#workers-step")
    slider.focus()
    for position, step in ((1, 100), (2, 101), (3, 102)):
        page.keyboard.press("ArrowRight")
        expect(page.locator("#workers-readout")).to_contain_text(re.compile(f"Step {step}: .* lost"))
        wait_for_state(page, job=JOB, step=str(step))
        assert np.array(page.evaluate(READ_MAP)) == pytest.approx(1 - 1 / found.slowdown[position - 1], abs=1e-6)
    again = open_map(visit, address(page), theme="dark")
    assert np.array(again.evaluate(READ_MAP)) == pytest.approx(1 - 1 / found.slowdown[2], abs=1e-6)
    assert again.inner_text("#workers-list") == page.inner_text("#workers-list")
    page.keyboard.press("Home")
    expect(page.locator("#workers-readout")).to_contain_text("All 12 steps")
    wait_for_state(page, job=JOB)


def test_figures_of_steps_show_the_report_and_a_click_on_them_goes_to_the_step(visit: Visit, serving: Serving) -> None:
    report = whatif(serving.store, JOB)
    page = open_map(visit, f"/workers?job={JOB}")
    page.wait_for_selector("#workers-times .line")
    lines = dict(page.evaluate(READ_LINES))
    for name in ("recorded", "ideal"):
        assert lines[name].pop(10) is None  # steps 110 to 199 were not recorded
        assert lines[name] == pytest.approx([row[f"{name}_s"] for row in report["by_step"]])
    click_figure(page, "workers-times", 2.5 / 12, 0.5)
    expect(page.locator("#workers-readout")).to_contain_text("Step 102: ")
    expect(page.locator("#workers-step")).to_have_value("3")
    wait_for_state(page, job=JOB, step="102")
    click_figure(page, "workers-steps", 4.5 / 12, 1.5 / 16)
    expect(page.locator("#workers-readout")).to_contain_text("Step 104: ")
    second = Results(serving.store).worker_map(JOB).worst(None, 2)[1]
    wait_for_state(page, job=JOB, step="104", worker=f"{second // 4},{second % 4}")
    slowest = max(report["by_step"], key=lambda row: row["recorded_s"])["step"]
    first = page.get_by_role("link", name="timeline", exact=True).first
    assert first.get_attribute("href") == f"/timeline?job={JOB}&step={slowest}"


def test_a_typed_worker_is_shown_and_one_that_is_not_there_is_said(visit: Visit) -> None:
    page = open_map(visit, f"/workers?job={JOB}")
    page.fill("#workers-go", "(2, 1)")
    page.keyboard.press("Enter")
    expect(page.locator("#workers-detail h3")).to_have_text("Rank 6 on host-0000 (dp 2, stage 1)")
    wait_for_state(page, job=JOB, worker="2,1")
    page.fill("#workers-go", "rank 9")
    page.keyboard.press("Enter")
    expect(page.locator("#workers-detail h3")).to_contain_text("Rank 9 on host-0001 (dp 1, stage 2)")
    page.fill("#workers-go", "2,1")
    page.keyboard.press("Enter")
    wait_for_state(page, job=JOB, worker="2,1")
    page.fill("#workers-go", "16")
    page.keyboard.press("Enter")
    expect(page.locator("#workers-said")).to_have_text("No rank 16 was analysed in this job.")
    page.fill("#workers-go", "4,0")
    page.keyboard.press("Enter")
    expect(page.locator("#workers-said")).to_have_text("The worker at dp 4, stage 0 was not analysed in this job.")
    wait_for_state(page, job=JOB, worker="2,1")


def test_a_host_marks_its_workers_until_it_is_chosen_again(visit: Visit) -> None:
    page = open_map(visit, f"/workers?job={JOB}")
    page.click("#workers-hosts button:has-text('host-0000')")
    wait_for_state(page, job=JOB, host="host-0000")
    expect(page.locator("#workers-map .marker")).to_have_count(8)
    page.click("#workers-hosts button:has-text('host-0000')")
    expect(page.locator("#workers-map .marker")).to_have_count(0)
    wait_for_state(page, job=JOB)


def test_a_drag_over_the_map_sums_up_the_workers_in_it_with_the_ways_on(visit: Visit, serving: Serving) -> None:
    report = whatif(serving.store, JOB)
    page = open_map(visit, f"/workers?job={JOB}")
    point_at_figure(page, "workers-map", 1.5 / 4, 1.5 / 4)
    area = page.locator("#workers-map .area").bounding_box()
    assert area is not None
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 2.4 / 4, area["y"] + area["height"] * 0.6 / 4, steps=3)
    page.mouse.up()
    wait_for_state(page, job=JOB, dp_rank="0-1", stage="1-2")
    excess = {(row["dp_rank"], row["pp_rank"]): 1 - 1 / row["slowdown"] for row in report["by_worker"]}
    assert min(excess.values()) > -1e-12
    own, whole = sum(excess[at] for at in ((0, 1), (0, 2), (1, 1), (1, 2))), sum(excess.values())
    several = page.locator("#workers-several")
    expect(several).to_contain_text("4 workers, dp 0-1, stage 1-2: summed")
    expect(several).to_contain_text(f"{own:.1%} of {whole:.1%}, {own / whole:.0%} of what all workers cost")
    links = dict(several.locator("a").evaluate_all("all => all.map(one => [one.innerText, one.getAttribute('href')])"))
    assert links == {
        "Timeline of these workers": f"/timeline?job={JOB}&dp_rank=0-1&stage=1-2",
        "What if they were as fast as their peers?": f"/whatif?job={JOB}&select=dp_rank%3D0-1+and+stage%3D1-2",
    }
    again = open_map(visit, address(page))
    assert again.inner_text("#workers-several") == several.inner_text()
    assert again.evaluate(READ_OUTLINES) == page.evaluate(READ_OUTLINES)
    click_figure(page, "workers-map", 0.5 / 4, 3.5 / 4)
    expect(several).to_have_text("A drag over the map chooses several workers.")
    wait_for_state(page, job=JOB, worker="3,0")


def test_the_keyboard_chooses_several_workers_from_enter_to_shift_and_enter(visit: Visit) -> None:
    page = open_map(visit, f"/workers?job={JOB}")
    picture = page.locator("#workers-map .chart-picture")
    picture.press("ArrowRight")  # the first cell
    picture.press("Enter")
    expect(page.locator("#workers-detail h3")).to_have_text("Rank 0 on host-0000 (dp 0, stage 0)")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "Shift+Enter"):
        picture.press(key)
    wait_for_state(page, job=JOB, worker="0,0", dp_rank="0-2", stage="0-1")
    expect(page.locator("#workers-several")).to_contain_text("6 workers, dp 0-2, stage 0-1: ")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("dp_rank=9-10&stage=0", "No worker has DP rank '9-10' and stage '0'."),
        ("dp_rank=3-1&stage=0-3", "No worker has DP rank '3-1' and stage '0-3'."),
        ("dp_rank=one&stage=0", "No worker has DP rank 'one' and stage '0'."),
        ("stage=0-3", "No worker has DP rank '(no name)' and stage '0-3'."),
    ],
)
def test_a_box_without_workers_is_said(serving: Serving, query: str, words: str) -> None:
    shown = Pages(serving.store).lines("/workers", job=JOB, **dict(parse_qsl(query)))
    assert words in shown
    assert "A drag over the map chooses several workers." in shown


def test_a_box_on_a_pooled_map_holds_the_workers_of_its_blocks() -> None:
    """Of 330 DP ranks, three are a row of the map; the last row has no others to fill it."""
    ones = np.ones((330, 2))
    found = WorkerMap(pl.DataFrame(), np.arange(10, 340), ones, ones, ones, (), np.arange(1), ones[None])
    view = choose_box(found, (1, 1), (0, 1), WorkerView())
    assert view.box == Box("10-15", "1-1")
    assert view.box.cells(found).tolist() == [1, 3, 5, 7, 9, 11]
    assert choose_box(found, (-3, 9), (109, 500), WorkerView()).box == Box("337-339", "0-1")


def test_workers_that_were_not_traced_are_named(visit: Visit, odd: Serving) -> None:
    found = whatif(odd.store, "missing")
    page = open_map(visit, "/workers?job=missing", base=odd.url)
    missing = found["coverage"]["missing_workers"]
    (gone,) = missing
    assert f"1 worker was not traced: (dp {gone['dp_rank']}, stage {gone['pp_rank']})." in page.inner_text("#page")
    assert np.array(page.evaluate(READ_MAP)).size == len(found["by_worker"])


def test_a_job_of_one_worker_has_a_map_of_one_cell(visit: Visit, odd: Serving) -> None:
    page = open_map(visit, "/workers?job=single", base=odd.url)
    assert "The job has one worker: there is no peer to compare it with." in page.inner_text("#page")
    assert page.inner_text("#workers-hosts") == "The job runs on one host, host-0000."
    assert "drain" not in page.inner_text("#page").lower()
    assert np.array(page.evaluate(READ_MAP)).shape == (1, 1)


@pytest.fixture(scope="module")
def handmade(handmade_store: Path) -> Pages:
    return Pages(handmade_store)


def test_the_page_of_workers_has_their_figures_over_all_steps_and_in_a_step(handmade: Pages) -> None:
    over_all = " | ".join(handmade.lines("/workers", job="repaired"))
    assert "which alone costs 12.4% of a step. The same worker is the slowest in 50% of the steps." in over_all
    assert (
        "Rank | Host | DP, stage | Costs alone | 1 | b | 1, 0 | 12.4% | 0 | a | 0, 0 | 0.0% | 2 | a | 0, 1 | 0.0% |"
        " 3 | c |"
    ) in over_all
    assert (
        "Rank 1 on b (dp 1, stage 0) the slowest | Costs alone | 12.4% of a step | Place | 1 of 4, the slowest first"
        " | DP,"
        " stage | 1, 0 | Host | b | Stands out | in 4 of 8 steps, with 2% or more | Timeline of this worker |"
    ) in over_all
    assert " | ".join(["step | slowdown", *(f"{step} | {1.283 if step < 4 else 1}" for step in range(8))]) in over_all
    assert (
        "Host | Workers | Slowest | Rank | Summed | b | 1 | 12.4% | 1 | 12.4% | a | 2 | 0.0% | 0 | 0.0% | c | 1 |"
        " 0.0% | 3"
        " | 0.0% | Choose a host"
    ) in over_all
    slowest = [f"{step} | {time}" for step, time in enumerate(["15.50 s | 4.25 s"] * 4 + ["11.25 s | 0.00 s"] * 4)]
    assert " | timeline | ".join(["Step | Recorded | Lost | Open | " + slowest[0], *slowest[1:]]) in over_all
    in_step = " | ".join(handmade.lines("/workers", job="repaired", step="2", worker="1,0", host="a"))
    assert "Step 2: 4.25 s lost" in in_step
    assert "DP, stage | In the step | Costs alone | 1 | b | 1, 0 | 22.0% | 12.4% | 0 | a |" in in_step
    assert "Rank 1 on b (dp 1, stage 0) | Costs alone" in in_step


def test_several_workers_are_summed_up_and_lead_on_together(handmade: Pages) -> None:
    page = handmade.page("/workers", job="slow", dp_rank="0-1", stage="0", step="1")
    assert "2 workers, dp 0-1, stage 0: summed 16.9% of 16.9%, 100% of what all workers cost" in lines(page)
    links = {"".join(lines(link)): link.href for link in found(page, "Link")}
    assert links["Timeline of these workers"] == "/timeline?job=slow&step=1&dp_rank=0-1&stage=0"
    assert links["What if they were as fast as their peers?"] == "/whatif?job=slow&select=dp_rank%3D0-1+and+stage%3D0"
    nothing = handmade.lines("/workers", job="slow", dp_rank="0", stage="0-1")
    assert "2 workers, dp 0, stage 0-1: summed 0.0% of 16.9%, 0% of what all workers cost" in nothing
    assert "2 workers, dp 0, stage 0-1: summed 0.0%" in handmade.lines("/workers", job="fine", dp_rank="0", stage="0-1")


#: The page as it opens, of the job `repaired`: no step and no worker is chosen.
OPENED = dict.fromkeys(("step", "worker", "host", "dp_rank", "stage"))
FIELDS = {"workers_step": 0, "workers_go": None, "workers_job": "repaired"}


def changed_to(pages: Pages, what: str, view: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """What is set on the page when `what` changes."""
    fields = {**FIELDS, "workers_view": {**OPENED, **(view or {})}}
    return pages.answer("workers-said.children", what, **{**fields, **values})


def test_what_is_chosen_on_the_page_of_workers_is_its_view(handmade: Pages) -> None:
    def button(kind: str, value: str) -> str:
        return json.dumps({"place": "list", "type": f"pick-{kind}", "value": value}, separators=(",", ":"))

    def clicked(*customdata: object) -> dict[str, Any]:
        return {"points": [{"customdata": customdata}]}

    box = {"points": [], "box": [[0, 1], [1, 1]]}
    for what, before, values, expected in (
        ("workers-step", {}, {"workers_step": "3"}, {"step": 2}),
        ("workers-step", {"step": 2, "worker": "1,0"}, {"workers_step": "0"}, {"worker": "1,0"}),
        ("workers-step", {}, {"workers_step": "99"}, {"step": 7}),
        ("workers-step", {"step": 2}, {"workers_step": "x"}, {}),
        ("workers-map", {"dp_rank": "0-1", "stage": "0"}, {"workers_map": clicked(1, 0)}, {"worker": "1,0"}),
        ("workers-map", {}, {"workers_map": box}, {"dp_rank": "1-1", "stage": "0-1"}),
        ("workers-times", {}, {"workers_times": clicked(3, 1, 0)}, {"step": 3, "worker": "1,0"}),
        ("workers-steps", {"worker": "0,1"}, {"workers_steps": clicked(5)}, {"step": 5, "worker": "0,1"}),
        ("workers-go", {}, {"workers_go": "1,0"}, {"worker": "1,0"}),
        (button("worker", "0,1"), {"step": 2}, {}, {"step": 2, "worker": "0,1"}),
        (button("host", "b"), {}, {}, {"host": "b"}),
        (button("host", "a"), {"host": "b"}, {}, {"host": "a"}),
        (button("host", "b"), {"host": "b"}, {}, {}),
        (button("host", "nowhere"), {}, {}, {}),
    ):
        with case((what, before, values)):
            assert changed_to(handmade, what, before, **values)["workers-view"]["data"] == {**OPENED, **expected}


def test_a_change_of_the_page_of_workers_sets_the_parts_that_it_changes(handmade: Pages) -> None:
    stepped = changed_to(handmade, "workers-step", workers_step="3")
    everywhere = {"workers-said", "workers-map", "workers-list", "workers-readout", "workers-several", "workers-view"}
    assert stepped.keys() == everywhere
    found_click = {"points": [{"customdata": [3, 1, 0]}]}
    clicked = changed_to(handmade, "workers-times", workers_times=found_click)
    assert clicked.keys() == everywhere | {"workers-detail", "workers-hosts", "workers-step"}
    assert clicked["workers-step"] == {"value": 4}  # the slider counts from 1; at 0 it shows all steps
    refused = changed_to(handmade, "workers-go", workers_go="9,9")
    assert refused.keys() == {"workers-said"}
    assert "9" in sent(refused)


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Jobs on one host: `cut` lacks a worker, `gap` lacks it in one step, `one` has no other."""
    store = Store(tmp_path_factory.mktemp("lacking") / "s.store")
    last = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    first = (pl.col("dp_rank") == 0) & (pl.col("pp_rank") == 0)
    alone = healthy_frame(range(3)).filter(first & pl.col("kind").cast(pl.String).str.ends_with("compute"))
    metadata = {"hosts": dict.fromkeys("0123", "n0"), "layout_source": "gradient groups"}
    for name, ops, layout in (
        ("cut", slow_frame(range(3)).filter(~last), LAYOUT),
        ("gap", slow_frame(range(3)).filter(~(last & (pl.col("step") == 1))), LAYOUT),
        ("one", alone, Layout()),
    ):
        store.append(analysed(Trace.from_frame(ops, layout, name=name, metadata=metadata)))
    return Pages(store.path)


def test_what_is_not_on_the_map_is_said(lacking: Pages) -> None:
    blank = "A DP rank that lacks a stage cannot be replayed: it is blank in those steps, or not on the map at all."
    assert f"1 worker was not traced: (dp 1, stage 1). {blank}" in lacking.lines("/workers", job="cut")
    assert blank in lacking.lines("/workers", job="gap")
    assert "The job runs on one host, n0." in lacking.lines("/workers", job="cut")
    assert "The job has one worker: there is no peer to compare it with." in lacking.text("/workers", job="one")
    assert "cannot be replayed" not in lacking.text("/workers", job="one")


def test_a_job_whose_layout_was_inferred_says_by_what(lacking: Pages) -> None:
    about = lacking.lines("/job", job="gap")
    assert about[about.index("Layout known by") + 1] == "gradient groups"
