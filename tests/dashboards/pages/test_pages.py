"""Every page opens in both themes and shows the numbers of `whatif --json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dash.development.base_component import Component
from msgspec import structs
from playwright.sync_api import Page, expect

from tests.dashboards.clicks import unfold
from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines
from tests.dashboards.watched import write_watched
from tests.handmade import run, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.text import cost
from tracekit.report.report import Report
from tracekit.store import Incoming, Store

Visit = Callable[..., Page]
Serve = Callable[[Path], Serving]


def whatif(store: Path, job: str) -> dict[str, Any]:
    ran = run("whatif", "--store", store, "--job", job, "--json")
    report: dict[str, Any] = json.loads(ran.out)
    return report


def test_bars_of_steps_leave_a_space_where_steps_were_not_recorded(sample_store: Path) -> None:
    """The sample has steps 100 to 109, 200 and 201."""
    (bars,) = found(Pages(sample_store).page("/job", job="slow-worker"), "Div", "bars")
    assert [getattr(bar, "className", None) == "gap" for bar in bars.children] == [False] * 10 + [True] + [False] * 2


@pytest.mark.every_push
def test_the_card_of_a_job_says_what_to_do_first_and_what_that_saves(sample_store: Path) -> None:
    text = Pages(sample_store).job_card("slow-worker")
    assert re.search(r"Do first\W*Check rank 9 on host-0001", text)
    assert re.search(r"Saves\W*343\.4 ms", text)


def test_every_job_is_in_the_table_the_one_that_loses_most_first(visit: Visit, serving: Serving) -> None:
    names = visit("/", theme="dark").locator("#jobs a.job").all_inner_texts()
    assert names[0] == "slow-worker"
    assert set(names[-2:]) == {"healthy", "collected-healthy"}
    assert len(names) == 8
    pages = Pages(serving.store)
    cells = next(lines(row) for row in found(pages.page("/"), "Tr") if "slow-worker" in lines(row))
    lost = whatif(serving.store, "slow-worker")["verdict"]
    figures = [f"{lost['share']:.0%}", f"{lost['lost_gpu_hours_per_day']:,.1f}"]
    assert cells[:4] == ["slow-worker", "straggler", *figures]
    assert listed(pages.page("/", sort="job")) == sorted(names)


def test_what_is_lost_is_money_where_the_price_is_known(serving: Serving) -> None:
    lost = whatif(serving.store, "slow-worker")["verdict"]["lost_gpu_hours_per_day"]
    page = Pages(serving.store, gpu_hour=2.5).page("/")
    cells = next(lines(row) for row in found(page, "Tr") if "slow-worker" in lines(row))
    assert cells[3:5] == [f"{lost:,.1f}", f"{lost * 2.5:,.0f}"]
    assert " at 2.5 a GPU-hour" in "\n".join(lines(page))
    assert "Cost a day" not in "\n".join(Pages(serving.store).lines("/"))


def listed(page: Component) -> list[str]:
    """The jobs of the table, in its order."""
    return [lines(link)[0] for link in found(page, "Link", "job")]


def test_facets_and_the_filter_narrow_the_table_and_lead_on_from_each_other(serving: Serving) -> None:
    pages = Pages(serving.store)
    page = pages.page("/", verdict="uneven work")
    assert listed(page) == ["sequence-lengths", "slow-last-stage"]
    links = {link.href for link in found(page, "Link", "facet")}
    assert "/?verdict=stalls" in links
    assert "/" in links  # the chosen one leads back
    assert listed(pages.page("/", verdict="uneven work", q="STAGE")) == ["slow-last-stage"]
    assert listed(pages.page("/", q="Imbalance stage")) == ["slow-last-stage"]  # words of its cause
    assert listed(pages.page("/", host="host-0001")) == ["slow-worker"]
    assert listed(pages.page("/", days="1")) == listed(pages.page("/"))
    nothing = pages.text("/", team="<b>", sort="x", at="-3", days="y", status="running")
    assert "No job fits." in nothing
    assert "0 of 8 jobs" in nothing


def test_many_jobs_come_in_parts(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracekit.dashboards.browser.pages.jobs.MOST_ROWS", 3)
    pages = Pages(serving.store)
    parts = [pages.page("/", sort="job", at=at) for at in ("1", "2", "3")]
    assert [listed(part) for part in parts] == [
        ["collected", "collected-healthy", "gpu_slow_input"],
        ["healthy", "python-gc", "sequence-lengths"],
        ["slow-last-stage", "slow-worker"],
    ]
    assert listed(pages.page("/", sort="job", at="99")) == listed(parts[2])
    assert {"/?sort=job&at=1", "/?sort=job&at=3"} <= {link.href for link in found(parts[1], "Link")}


@pytest.mark.every_push
def test_keys_move_through_the_table_and_two_jobs_are_compared(visit: Visit, serving: Serving) -> None:
    page = visit("/")
    page.wait_for_selector("#jobs a.job")
    for key, name in (("j", "slow-worker"), ("j", "sequence-lengths"), ("k", "slow-worker"), ("k", "slow-worker")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == name
    page.keyboard.press("Enter")
    page.wait_for_selector(".job-title")
    assert page.inner_text("h1") == "slow-worker"
    visit("/", within=page)
    page.click("[data-compare=healthy]")
    page.click("[data-compare=slow-worker]")
    page.wait_for_url(f"{serving.url}/compare?job=healthy&with=slow-worker")


def test_on_a_phone_a_row_has_what_is_lost_to_whom_and_on_a_desk_a_name_is_not_squeezed(
    tmp_path: Path, visit: Visit, show: Serve
) -> None:
    store = Store(tmp_path / "s.store")
    job = replace(slow_trace((0, 1)), metadata={"label_team": "post-training of models"})
    store.add([Incoming(job, "a-name-of-words", "x", PipelineJob(job).stored())])
    url = show(store.path).url
    page = visit("/", width=1024, base=url)
    assert page.locator("#jobs td").first.evaluate("cell => cell.offsetWidth") >= 150
    cells = visit("/", width=390, base=url).locator("#jobs td").all()
    shown = [cell.get_attribute("data-head") for cell in cells if cell.is_visible()]
    assert shown == ["Job", "Verdict", "Lost", "GPU-hours a day", "Culprit", "Status", "Team"]


def test_what_burns_now_has_a_card_and_a_trend_of_its_windows(tmp_path: Path) -> None:
    pages = Pages(write_watched(tmp_path / "s.store"))
    (card,) = found(pages.page("/"), "Article")
    assert lines(card)[0] == "live"  # the incident of the other job is over
    trends = [one.title for one in found(pages.page("/"), "Div", "trend")]
    assert trends[0] == "lost in the last 2 windows: 39% to 39%, 39% at most"
    assert trends[1].startswith("lost in the last 3 windows: 39% to 0%")


@pytest.fixture
def doubtful(tmp_path: Path, show: Serve) -> Serving:
    """A job that is trustworthy, and one of several causes that is not."""
    store = Store(tmp_path / "s.duckdb")
    trace = slow_trace((0, 1))
    found = PipelineJob(trace).stored()
    report = found.report.to_dict()
    report["trust"]["trustworthy"] = False
    report["causes"] = [{**report["causes"][0], "kind": kind} for kind in ("slow-worker", "python-gc", "late-data")]
    report["answer"]["places"] = [report["answer"]["places"][0]] * 3
    store.add(
        [
            Incoming(trace, "good", "x", found),
            Incoming(trace, "doubtful", "x", structs.replace(found, report=msgspec.convert(report, Report))),
        ]
    )
    return show(store.path)


def test_a_row_names_its_causes_when_pointed_at_and_one_that_is_not_trustworthy_is_in_no_sum(doubtful: Serving) -> None:
    lost = whatif(doubtful.store, "good")["verdict"]["lost_gpu_hours_per_day"]
    page = Pages(doubtful.store).page("/")
    (row,) = [row for row in found(page, "Tr") if "doubtful" in lines(row)]
    titles = [cell.title for cell in found(row, "Td") if getattr(cell, "title", None)]
    assert [one.split(":")[0] for one in titles[1].split("; ")] == ["slow worker", "garbage collection", "late data"]
    assert "no verdict" in lines(row)
    assert f"1 job needs attention: {lost:,.0f} of" in "\n".join(lines(page))


def test_sentences_about_a_job_that_is_not_trustworthy_say_so_first(doubtful: Serving) -> None:
    pages = Pages(doubtful.store)
    said = [line for line in pages.lines("/workers", job="doubtful") if "stands out" in line or "slowdown is" in line]
    assert said
    assert all(words.startswith("Not trustworthy: ") for words in said)
    assert "Not trustworthy: " not in pages.text("/workers", job="good")


def test_a_second_dashboard_in_the_process_answers_like_the_first(visit: Visit, odd: Serving, serving: Serving) -> None:
    for server, number in ((odd, 3), (serving, 8)):
        expect(visit("/", base=server.url).locator("#jobs a.job")).to_have_count(number)


@pytest.mark.every_push
def test_a_job_shows_its_verdict_causes_and_fixes(visit: Visit, serving: Serving) -> None:
    found = whatif(serving.store, "slow-worker")
    page = visit("/job?job=slow-worker", theme="dark")
    assert f"straggler, {found['verdict']['share']:.0%} lost" in page.inner_text(".job-title")
    sentence, answer = found["verdict"]["sentence"], found["answer"]
    card = page.inner_text(".hero").replace("\u2192", "->")
    unfold(page)
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
    before, after = (whatif(sample_store, job)["verdict"]["share"] for job in ("healthy", "slow-worker"))
    page = Pages(sample_store).page("/compare", job="slow-worker", **{"with": "healthy"})
    row = next(row for row in map(lines, found(page, "Tr")) if row[0] == "Share lost")
    assert f"+{(after - before) * 100:.1f} points" in " ".join(row)
