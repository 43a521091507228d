"""The page What-if: the numbers of `whatif --fix` and `--keep`, asked by hand, by text and by suggestion."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, Route, expect

import tracekit
from tests.dashboards import clicks
from tests.dashboards.conftest import SAMPLES, Serving
from tests.dashboards.page_text import found, lines, sent
from tests.dashboards.tabs import PATIENCE_MS
from tests.handmade import run
from tests.reports import report_with
from tracekit.base.text import seconds
from tracekit.dashboards.browser.data import replays
from tracekit.dashboards.browser.data.replays import (
    LONGEST_ADDRESS,
    Pending,
    Phase,
    QueryAction,
    Rejected,
    Status,
    WhatifAnswer,
    WhatifQuery,
)
from tracekit.dashboards.browser.data.stored_kinds import KINDS
from tracekit.dashboards.browser.ui.figures import StepBar, scenario_times
from tracekit.dashboards.browser.web.app import make_app
from tracekit.dashboards.theme import LIGHT

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


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of the page's parts, within a request of a page."""
    server = make_app(tmp_path_factory.mktemp("parts") / "none.store").server
    with server.test_request_context("/whatif"):
        yield import_module("tracekit.dashboards.browser.pages.whatif_parts")


#: A step of 2 s that 12 of 1,000 ops make 0.5 s longer; and S = 1.25 of those of a stage alone.
WORKER, STAGE = WhatifQuery("worker=1,2"), WhatifQuery("stage=1", QueryAction.KEEP)
FASTER = WhatifAnswer("worker=1,2", 12, 1.5, 0.5, 0.125, 30.0)
ALONE = WhatifAnswer("stage=1", 7, 1.6, 0.4, 0.0, None, 1.25)
BY_STEP = [{"step": step, "slowdown": 1.0, "recorded_s": 2.0, "original_s": 2.0, "ideal_s": 1.0, "lost_s": 0.0}
           for step in range(2)]  # fmt: skip
MADE = report_with(
    step_time_s={"recorded": 2.0}, job={"ops": 1000, "steps": 2}, trust={"replay_error": 0.0123}, by_step=BY_STEP
)


def test_an_answer_is_a_sentence_and_figures_with_what_they_mean(parts: Any) -> None:
    def told(query: WhatifQuery | None, status: Status | None, wrong: str | None = None) -> list[str]:
        return lines(parts.answer_panel(MADE, parts.CurrentAnswers(query, status, wrong, (), ())))

    error = "The error is the replay error (1.23%) and the scatter over 2 steps (95%). "
    assert told(WORKER, FASTER) == [
        "Answer", "Keep for comparison",
        "With worker=1,2 as fast as peers, a step takes 1.50 s instead of 2.00 s: 500.0 ms (25.0%) less.",
        "1.50 s", "a step, recorded 2.00 s", "500.0 ms", "saved a step, ± 125.0 ms", "30.0", "GPU-hours a day saved",
        "12", "ops selected of 1,000",
        f"{error}Like the price of a fix : everything else as recorded, launch delays kept.",
    ]  # fmt: skip
    assert told(STAGE, ALONE)[2:] == [
        "With stage=1 alone as recorded and all else ideal, a step takes 1.60 s: they alone cost 20.0% of it.",
        "1.60 s", "a step of the ideal job, with these as recorded", "20.0%", "lost to them alone",
        "7", "ops selected of 1,000",
        f"{error}This is the question of the paper, without launch delays; it is no price of a fix.",
    ]  # fmt: skip
    assert told(WORKER, Pending(Phase.BUILDING)) == [
        "Answer", "waiting for its turn", "reading the trace", "building the graph ...", "replaying"]  # fmt: skip
    assert told(WORKER, Rejected("too large")) == ["Answer", "Not replayed", "too large"]
    correction = ["Answer", "No answer: the selection above needs a correction."]
    assert told(WORKER, Rejected("no ops", selection=True)) == told(None, None, "wrong") == correction
    assert parts.answer_panel(MADE, parts.CurrentAnswers(None, None, None, (), ())) is None
    doubtful = report_with(trust={"trustworthy": False, "reasons": ("a", "b")})
    doubt = lines(parts.answer_panel(doubtful, parts.CurrentAnswers(WORKER, FASTER, None, (), ())))
    assert "Do not trust this figure: a; b" in doubt
    assert doubt[-1].startswith("The error is the replay error (0.00%). Like")


def test_a_change_is_more_or_less_and_within_its_error_nothing(parts: Any) -> None:
    slower, unclear = (WhatifAnswer("", 1, *times, None) for times in ((2.5, -0.5, 0.25), (1.75, 0.25, 0.25)))
    longer = WhatifQuery("stage=1", QueryAction.SCALE, 1.5)
    assert parts.sentence(longer, slower) == (
        f"If {longer}, a step takes 2.50 s instead of 2.00 s: 500.0 ms (25.0%) more."
    )
    assert parts.sentence(WORKER, unclear, "the recording") == (
        "With worker=1,2 as fast as peers, the recording takes 1.75 s instead of 2.00 s: a difference within its error,"
        " so nothing is promised."
    )


def test_kept_scenarios_are_rows_numbered_from_1_and_bars_and_what_is_asked_now_is_the_last(parts: Any) -> None:
    waiting = (WhatifQuery("dp_rank=1"), Pending(Phase.READING))
    seen = parts.CurrentAnswers(WORKER, FASTER, None, ((STAGE, ALONE), waiting), ("no kept scenario",))
    assert seen.pending
    shown = parts.kept_panel(MADE, seen)
    assert [[*lines(row)] for row in found(shown, "Tr")][1:4] == [
        ["1", str(STAGE), "1.60 s", "alone costs 20.0%", "Remove"],
        ["2", "dp_rank=1 as fast as peers", "reading the trace ...", "Remove"],
        ["3", str(WORKER), "1.50 s", "500.0 ms ± 125.0 ms (+25.0%)", "30.0", "not kept"],
    ]
    assert [row.className for row in [*found(shown, "Tr")][1:4]] == ["", "", "current"]
    assert "no kept scenario" in lines(shown)
    drawn = sent(shown)  # the question of the paper has no bar: its step is that of the ideal job
    assert ("as it ran" in drawn, f"3  {WORKER}" in drawn, f"1  {STAGE}" in drawn) == (True, True, False)
    assert parts.kept_panel(MADE, parts.CurrentAnswers(WORKER, FASTER, None, (), ())) is None
    side_by_side = parts.kept_panel(MADE, parts.CurrentAnswers(WORKER, FASTER, None, ((WORKER, FASTER),), ()))
    assert [row.className for row in found(side_by_side, "Tr")][1:2] == [""]
    assert "not kept" not in lines(side_by_side)
    problems = parts.kept_panel(MADE, parts.CurrentAnswers(None, None, None, (), ("unread",)))
    assert lines(problems) == ["Scenarios side by side", "unread"]


def test_bars_of_scenarios_have_their_times_and_how_much_longer_they_are() -> None:
    bars = [StepBar("half", 1.0, 0.25), StepBar("twice", 4.0, 0.5)]
    fig = scenario_times(2.0, bars, LIGHT, "step")
    (drawn,) = fig.data
    assert (list(drawn.x), list(drawn.y)) == ([2.0, 1.0, 4.0], ["as it ran", "half", "twice"])
    assert list(drawn.text) == ["2.00 s", "1.00 s (-50.0%)", "4.00 s (+100.0%)"]
    assert list(drawn.error_x.array) == [0.0, 0.25, 0.5]
    assert list(drawn.marker.color) == [LIGHT.recorded, LIGHT.changed, LIGHT.changed]
    assert (drawn.error_x.thickness, drawn.orientation, fig.layout.height) == (1.2, "h", 74 + 34 * 3)
    (line,) = fig.layout.shapes
    assert (line.x0, line.x1, line.line.color, line.line.width) == (2.0, 2.0, LIGHT.recorded, 1.5)
    assert (fig.layout.xaxis.rangemode, fig.layout.yaxis.autorange, fig.layout.yaxis.showgrid) == (
        "tozero", "reversed", False)  # fmt: skip


def test_priced_fixes_are_those_of_causes_and_apart_those_that_any_job_could_try(parts: Any) -> None:
    fixes = [
        {"title": "Swap", "new_step_s": 1.5, "saved_s": 0.5, "error_s": 0.01, "confidence": 0.9},
        {"title": "Overlap", "new_step_s": 1.75, "saved_s": 0.25, "bound": True},
        {"title": "Withheld", "new_step_s": 1.0, "saved_s": 1.0, "withheld": "why"},
    ]
    kind = KINDS["pipeline"]
    shown = parts.fixes_panel(kind, report_with(step_time_s={"recorded": 2.0}, fixes=fixes))
    rows = [lines(row) for row in found(shown, "Tr")]
    assert ["Swap (90% sure)", "2.00 s to 1.50 s", "500.0 ms ± 10.0 ms"] in rows
    assert ["Overlap", "2.00 s to 1.75 s", "at most 250.0 ms"] in rows
    assert (len(rows), "Fixes that any job could try: 1" in lines(shown)) == (4, True)
    assert "promises no saving" in " ".join(lines(parts.fixes_panel(kind, report_with(fixes=fixes[2:]))))


def test_what_a_step_loses_most_to_is_listed_with_the_largest_first(parts: Any) -> None:
    """Of a step of 2 s; 0.075 % of it is too little, and so is S = 1.004."""
    workers = [
        {"dp_rank": 1, "pp_rank": 0, "rank": None, "host": None, "slowdown": 1.25, "slowdown_error": None,
         "slowdown_approx": 1.25},
        {"dp_rank": 0, "pp_rank": 0, "rank": None, "host": None, "slowdown": 1.004, "slowdown_error": None,
         "slowdown_approx": 1.0},
    ]  # fmt: skip
    stages = [{"pp_rank": 0, "saved_s": 0.25}, {"pp_rank": 1, "saved_s": 0.5}, {"pp_rank": 2, "saved_s": 0.0015}]
    kinds = [{"kind": "forward-compute", "saved_s": 0.375}]
    report = report_with(step_time_s={"recorded": 2.0}, by_worker=workers, by_pp_rank=stages, by_kind=kinds)
    rows = [lines(row) for part in parts.losses(report) for row in found(part, "Tr")]
    assert rows == [
        ["Worker", "Costs alone"], ["DP 1, stage 0", "20.0%", "Ask"],
        ["Stage or DP rank", "Lost a step"], ["stage 1", "500.0 ms", "Ask"], ["stage 0", "250.0 ms", "Ask"],
        ["Op kind", "Lost a step"], ["forward-compute", "375.0 ms", "Ask"],
    ]  # fmt: skip
    assert parts.losses(report_with()) == []
