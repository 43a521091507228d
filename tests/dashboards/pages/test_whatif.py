"""The page What-if: the numbers of `whatif --fix` and `--keep`, asked by hand, by text and by suggestion."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, Route, expect

import tracekit
from tests.dashboards import clicks
from tests.dashboards.conftest import SAMPLES, Serving
from tests.dashboards.tabs import PATIENCE_MS
from tests.handmade import run
from tracekit.base.text import seconds
from tracekit.dashboards.browser.data import replays
from tracekit.dashboards.browser.data.replays import LONGEST_ADDRESS

Visit = Callable[..., Page]
SLOW = SAMPLES / "slow_worker.parquet"
#: What the page asks of the server, and after how long it asks again: once answered, and where no answer comes.
ASKING = "**/_dash-update-component*"
POLL_MS, LOST_MS = 400, 10_000


def asked_on_the_command_line(store: Path, option: str, selection: str, job: str = "slow-worker") -> dict[str, Any]:
    ran = run("whatif", "--store", store, "--job", job, option, selection, "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)["questions"][0]
    return found


def address(**state: str) -> str:
    return f"/whatif?{urlencode({'job': 'slow-worker', **state})}"


def form(visit: Visit, theme: str = "light") -> Page:
    """The page with the form for questions of one's own."""
    page = visit(address(), theme=theme)
    page.click("text=Ask your own question")
    return page


def answer(page: Page) -> str:
    page.wait_for_selector("#whatif-answer .figure-card")
    return page.inner_text("#whatif-answer")


def says(page: Page, text: str) -> None:
    """Wait until the answer contains the text."""
    page.locator("#whatif-answer", has_text=text).wait_for()


def check_answer(page: Page, question: dict[str, Any]) -> None:
    says(page, seconds(question["step_time_s"]))  # not the answer before it
    text = answer(page)
    assert seconds(question["saved_s"]) in text
    assert f"{question['saved_gpu_hours_per_day']:,.1f}\nGPU-hours a day saved" in text
    assert f"{question['ops']:,}\nops selected" in text


def test_the_plain_question_is_asked_with_one_click_and_the_form_stays_folded(visit: Visit, serving: Serving) -> None:
    page = visit(address())
    assert page.locator("#whatif-kept").inner_text() == page.locator("#whatif-answer").inner_text() == ""
    expect(page.locator("#whatif-select")).to_be_hidden()
    page.get_by_role("row", name="Rank 9 on host-0001 29").get_by_role("button").click()
    check_answer(page, asked_on_the_command_line(serving.store, "--fix", "worker=1,2"))
    expect(page.locator("#whatif-select")).to_be_hidden()
    assert clicks.state(page) == {"job": "slow-worker", "select": "worker=1,2", "action": "peers"}
    page.get_by_role("row", name="Make rank 9 on host-0001").get_by_role("button").click()
    expect(page.locator("#whatif-select")).to_have_value(re.compile("^kind=.* and worker=1,2$"))
    expect(page.locator("#whatif-select")).to_be_visible()


@pytest.mark.every_push
def test_the_controls_write_the_selection_and_the_answer_is_that_of_fix(visit: Visit, serving: Serving) -> None:
    page = form(visit, theme="dark")
    page.fill("#whatif-workers", "1,2")
    page.fill("#whatif-steps", "100-105")
    expect(page.locator("#whatif-select")).to_have_value("worker=1,2 and step=100-105")
    page.click("#whatif-run")
    check_answer(page, asked_on_the_command_line(serving.store, "--fix", "worker=1,2 and step=100-105"))
    assert clicks.state(page)["select"] == "worker=1,2 and step=100-105"


def test_several_workers_stages_kinds_and_microbatches_can_be_chosen_by_hand(visit: Visit, serving: Serving) -> None:
    page = form(visit)
    page.get_by_label("backward-compute", exact=True).check()
    page.fill("#whatif-stages", "1-2")
    page.fill("#whatif-dp-ranks", "0, 1")
    page.fill("#whatif-workers", "1, 2 0,1")
    page.fill("#whatif-microbatches", "0-6")
    page.fill("#whatif-slowest", "50 %")
    text = (
        "kind=backward-compute and stage=1-2 and dp_rank=0,1 and (worker=1,2 or worker=0,1) and microbatch=0-6"
        " and slowest=50%"
    )
    expect(page.locator("#whatif-select")).to_have_value(text)
    page.click("#whatif-run")
    check_answer(page, asked_on_the_command_line(serving.store, "--fix", text))


def test_a_selection_can_be_typed(visit: Visit, serving: Serving) -> None:
    page = form(visit)
    page.fill("#whatif-select", "everything but communication")
    page.press("#whatif-select", "Enter")
    check_answer(page, asked_on_the_command_line(serving.store, "--fix", "everything but communication"))


def test_only_the_selected_ops_as_recorded_is_keep(visit: Visit, serving: Serving) -> None:
    page = form(visit)
    page.fill("#whatif-select", "stage=2")
    page.click("text=Keep only these as recorded")
    page.click("#whatif-run")
    says(page, "With stage=2 alone as recorded")
    asked = asked_on_the_command_line(serving.store, "--keep", "stage=2")
    assert seconds(asked["step_time_s"]) in answer(page)
    by_stage = {row["pp_rank"]: row for row in json.loads(tracekit.load(SLOW).whatif().to_json())["by_pp_rank"]}
    assert f"they alone cost {1 - 1 / by_stage[2]['slowdown']:.1%}" in answer(page)
    assert clicks.state(page)["action"] == "keep"


def test_scaling_by_a_factor_is_the_replay_of_the_library(visit: Visit) -> None:
    page = form(visit)
    page.fill("#whatif-select", "communication")
    page.click("text=Scale them")
    page.fill("#whatif-factor", "0.25")
    page.click("#whatif-run")
    step_s = tracekit.load(SLOW).answer("communication * 0.25").step_time_s
    says(page, "communication takes 0.25 times as long")
    assert seconds(step_s) in answer(page)
    assert clicks.state(page)["factor"] == "0.25"


def test_a_suggestion_is_asked_with_one_click(visit: Visit, serving: Serving) -> None:
    page = form(visit)
    page.click("text=Rank 9 on host-0001 like peers")
    check_answer(page, asked_on_the_command_line(serving.store, "--fix", "worker=1,2"))
    assert page.input_value("#whatif-select") == "worker=1,2"
    page.click("text=Communication twice as fast")
    says(page, "communication takes 0.5 times as long")
    assert page.input_value("#whatif-factor") == "0.5"


def test_the_button_of_a_fix_gives_its_own_price_and_it_can_be_edited(visit: Visit, serving: Serving) -> None:
    """Each fix of the table fills in its own edit: the answer saves what the row promises."""
    page = form(visit)
    page.click("text=Fixes that any job could try: 3")
    fixes = json.loads(tracekit.load(SLOW).whatif().to_json())["fixes"]
    for at, fix in enumerate([fix for fix in fixes if fix["edit"]]):
        page.locator("button[data-whatif=edit]").nth(at).click()
        says(page, f"a step takes {seconds(fix['new_step_s'])} instead of")
    page.fill("#whatif-select", "worker=1,2 + stage=3 and compute * 0.9")
    page.click("text=Make them as fast as their peers")
    page.click("#whatif-run")
    check_answer(page, asked_on_the_command_line(serving.store, "--fix", "worker=1,2 + stage=3 and compute * 0.9"))


def test_the_controls_follow_what_is_suggested_and_typed(visit: Visit) -> None:
    page = form(visit)
    page.fill("#whatif-stages", "3")
    expect(page.locator("#whatif-select")).to_have_value("stage=3")
    page.click("text=Rank 9 on host-0001 like peers")
    expect(page.locator("#whatif-workers")).to_have_value("1,2")
    expect(page.locator("#whatif-stages")).to_have_value("")
    expect(page.locator("#whatif-select")).to_have_value("worker=1,2")
    page.fill("#whatif-select", "everything but communication")
    page.press("#whatif-select", "Enter")
    expect(page.locator("#whatif-workers")).to_have_value("")
    says(page, "With everything but communication as fast as peers")
    expect(page.locator("#whatif-select")).to_have_value("everything but communication")
    page.fill("#whatif-select", "kind=forward-send and stage=2")
    page.press("#whatif-select", "Enter")
    says(page, "With kind=forward-send and stage=2 as fast as peers")
    expect(page.locator("#whatif-select")).to_have_value("kind=forward-send and stage=2")
    page.fill("#whatif-steps", "100-101")
    expect(page.locator("#whatif-select")).to_have_value("step=100-101")
    page.fill("#whatif-steps", "")
    expect(page.locator("#whatif-select")).to_have_value("")


def test_kept_scenarios_survive_in_another_browser_and_can_be_removed(visit: Visit) -> None:
    page = form(visit)
    suggested = ("Rank 9 on host-0001 like peers", "Communication twice as fast", "Only the last stage slow")
    for number, suggestion in enumerate(suggested, start=1):
        page.click(f"text={suggestion}")
        page.click("text=Keep for comparison")
        expect(page.locator(".scenarios button")).to_have_count(number)
    page.wait_for_selector("text=Kept for comparison")
    shown = page.inner_text(".scenarios")
    other = visit(clicks.address(page), theme="dark", width=1920)
    other.locator(".scenarios button").nth(2).wait_for()
    assert other.inner_text(".scenarios") == shown
    assert other.inner_text("#whatif-answer") == page.inner_text("#whatif-answer")
    other.click("[aria-label='Remove scenario 2']")
    expect(other.locator(".scenarios button")).to_have_count(2)
    assert "communication" not in other.inner_text(".scenarios")
    assert clicks.state(other)["kept"] == "peers:worker=1,2;keep:stage=3"


def test_bars_stand_for_the_kept_scenarios_beside_the_job_as_it_ran(visit: Visit) -> None:
    page = visit(address(kept="peers:worker=1,2;peers:communication"))
    page.wait_for_selector("#whatif-bars .bar >> nth=2")
    labels = page.locator("#whatif-bars .down").all_text_contents()
    assert set(labels) == {"as it ran", "1  worker=1,2 as fast as peers", "2  communication as fast as peers"}
    clicks.unfold(page)
    csv = page.locator("#whatif-kept a", has_text="CSV").get_attribute("href")
    assert csv is not None
    assert csv.startswith("data:text/csv")


def test_a_selection_that_is_not_understood_is_said_at_its_field(visit: Visit) -> None:
    page = form(visit)
    page.fill("#whatif-select", "wrker=1,2")
    page.click("#whatif-run")
    page.wait_for_selector("text='wrker' is not a label of this job")
    expect(page.locator("#whatif-select")).to_have_attribute("aria-invalid", "true")
    says(page, "needs a correction")
    page.fill("#whatif-select", "worker=1,2")
    page.click("#whatif-run")
    says(page, "With worker=1,2 as fast as peers")
    expect(page.locator("text='wrker' is not a label of this job")).to_have_count(0)


def test_a_selection_without_ops_is_said_at_its_field(visit: Visit) -> None:
    page = visit(address(select="stage=9"))
    page.wait_for_selector("text=matches no op; the job has stage")  # in the form, which is open


def test_no_more_is_kept_than_an_address_can_hold(visit: Visit) -> None:
    state = {"select": "stage=1", "factor": ""}
    state["factor"] = "1" * (LONGEST_ADDRESS - 10 - len(address(**state)))  # it has no meaning here
    page = visit(address(**state))
    says(page, "With stage=1 as fast as peers")
    page.click("text=Keep for comparison")
    page.locator("#whatif-kept", has_text="The address would have more than 7,500 characters").wait_for()
    assert "kept" not in clicks.state(page)


def test_two_browsers_ask_different_questions_at_once(visit: Visit, serving: Serving) -> None:
    pages = [form(visit), form(visit, theme="dark")]
    for page, worker in zip(pages, ("0,1", "2,3"), strict=True):
        page.fill("#whatif-select", f"worker={worker}")
        page.click("#whatif-run")
    for page, worker in zip(pages, ("0,1", "2,3"), strict=True):
        says(page, f"worker={worker}")
        check_answer(page, asked_on_the_command_line(serving.store, "--fix", f"worker={worker}"))


def test_a_store_that_disappears_under_an_open_page_is_said_in_words(visit: Visit, serving: Serving) -> None:
    page = form(visit)
    page.fill("#whatif-select", "stage=1")
    away = serving.store.rename(serving.store.with_suffix(".away"))
    try:
        page.click("#whatif-run")
        says(page, "is the store still there?")
    finally:
        away.rename(serving.store)
    page.fill("#whatif-select", "stage=2")
    page.click("#whatif-run")
    says(page, "With stage=2 as fast as peers")


def test_a_job_too_large_for_the_server_is_said_in_words(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MOST_OPS", 1000)
    page = visit(address(select="worker=3,3"))
    says(page, "8,928 ops, more than the 1,000 that this server loads")


def test_progress_is_shown_while_the_answer_is_computed(
    visit: Visit, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slow:
        slow.setattr(replays.Replays, "ask", lambda *_, **__: replays.Pending(replays.Phase.BUILDING))
        page = visit(address(select="dp_rank=2"))
        assert "reading the trace\nbuilding the graph ...\nreplaying" in page.inner_text("#whatif-answer")
    says(page, "With dp_rank=2 as fast as peers")


def test_a_click_while_something_is_replayed_is_not_lost(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays.Replays, "ask", _never_done(replays.Replays.ask, "stage=1"))
    page = visit(address(select="worker=1,2", kept="peers:stage=1"))
    says(page, "With worker=1,2 as fast as peers")
    page.click("text=Keep for comparison")
    expect(page.locator(".scenarios button")).to_have_count(2)
    page.click("text=Ask your own question")
    page.click("text=Rank 9 on host-0001 like peers")
    page.click("text=Only the last stage slow")
    says(page, "With stage=3 alone as recorded")
    page.click("[aria-label='Remove scenario 1']")
    expect(page.locator(".scenarios button")).to_have_count(1)
    assert clicks.state(page)["kept"] == "peers:worker=1,2"


def _never_done(ask: Any, selection: str) -> Any:
    """The same, but the replay of this selection goes on for ever and changes its phase each time it is asked for."""
    phases = itertools.cycle([replays.Phase.BUILDING, replays.Phase.REPLAYING])

    def later(self: Any, stored: Any, query: Any, **settings: Any) -> Any:
        if query.selection == selection:
            return replays.Pending(next(phases))
        return ask(self, stored, query, **settings)

    return later


def test_the_page_asks_again_only_once_it_was_answered(
    browser: Browser, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays.Replays, "ask", _never_done(replays.Replays.ask, "stage=1"))
    asked: list[Route] = []

    def hold(route: Route) -> None:
        asked.append(route)

    with browser.new_context(base_url=serving.url) as context:
        page = context.new_page()
        page.goto(address(select="stage=1"))
        with page.expect_request(ASKING, timeout=PATIENCE_MS):
            page.route(ASKING, hold)
        page.clock.install()
        with page.expect_request(ASKING, timeout=PATIENCE_MS):
            asked.pop().continue_()
            page.clock.run_for(POLL_MS)
        page.clock.run_for(LOST_MS // 2)
        assert len(asked) == 1  # a busy server that answers later than this is heard
        with page.expect_request(ASKING, timeout=PATIENCE_MS):
            page.clock.run_for(LOST_MS)


def test_on_a_phone_the_answer_is_above_the_form_and_comes_into_view(visit: Callable[..., Page]) -> None:
    page = visit(address(), width=390)
    button = page.locator("main .panel button[data-whatif=suggest]:visible").last
    button.click()  # far below the top
    answer = page.locator("#whatif-answer")
    expect(answer).to_be_in_viewport(timeout=PATIENCE_MS)
    assert answer.bounding_box()["y"] < button.bounding_box()["y"]
