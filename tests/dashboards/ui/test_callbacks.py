"""What the callbacks of the pages do with errors, and with values that no page sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from playwright.sync_api import Page

from tests.dashboards.page_text import Pages, sent
from tests.handmade import slow_trace
from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.ui.shell import MOST_BYTES
from tracekit.dashboards.browser.web.app import make_app
from tracekit.store import Incoming, Store

Visit = Callable[..., Page]

STATE = {"job": "slow-worker", "select": "stage=1", "action": "peers", "factor": None, "beside": "", "remarks": []}
DRAWN = {"answer": "", "beside": "", "losses": ""}
CLICKED = {"points": [{"customdata": [1, 2]}]}
SHOWN = {"step": None, "worker": None, "host": None, "dp_rank": None, "stage": None}
#: A right value for each value that a callback of the pages takes from the browser.
RIGHT: dict[str, Any] = {
    "_pages_location.pathname": "/job",
    "_pages_location.search": "?job=slow-worker",
    "whatif-state.data": STATE,
    "whatif-asked.data": 1,
    "whatif-drawn.data": DRAWN,
    "whatif-select.value": "stage=1",
    "whatif-kinds.value": [],
    "workers-step.value": 1,
    "workers-map.clickData": CLICKED,
    "workers-times.clickData": CLICKED,
    "workers-steps.clickData": CLICKED,
    "workers-go.value": "1,2",
    "workers-job.data": "slow-worker",
    "workers-view.data": SHOWN,
    "time-ask.n_clicks": 1,
    "time-job.data": "slow-worker",
    "compare-mode.value": "split",
    "compare-with.value": None,
    "compare-split.value": "105",
    "compare-job.data": "slow-worker",
}
WRONG = (
    None,
    True,
    7,
    -1.5,
    "x" * 20,
    [],
    {},
    [[None]],
    {"points": [{}]},
    {"points": [{"customdata": []}]},
    {**STATE, "beside": 3},
    {**STATE, "job": []},
)


def callbacks(store: Path) -> dict[str, dict[str, Any]]:
    """The callbacks of the pages that the server answers, by their outputs."""
    app = make_app(store)
    app.server.test_client().get("/")  # with it Dash makes the callback that shows the pages
    return {name: one for name, one in app.callback_map.items() if "callback" in one}


def request(name: str, one: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """What a browser sends for a callback: right values but for `changes`."""

    def values(kind: str) -> list[Any]:
        return [
            []
            if each["id"].startswith("{")
            else {**each, "value": {**RIGHT, **changes}.get(f"{each['id']}.{each['property']}", "")}
            for each in one[kind]
        ]

    first = one["inputs"][0]
    outputs = [dict(zip(("id", "property"), each.rsplit(".", 1), strict=True)) for each in name.strip(".").split("...")]
    return {
        "output": name,
        "outputs": outputs if name.startswith("..") else outputs[0],
        "inputs": values("inputs"),
        "state": values("state"),
        "changedPropIds": [f"{first['id']}.{first['property']}"],
    }


def test_a_callback_refuses_what_no_page_sends(handmade_store: Path) -> None:
    client, name = make_app(handmade_store).server.test_client(), "time-different.children"
    client.get("/")
    right = request(name, callbacks(handmade_store)[name], {"time-job.data": "slow"})
    for changes, code in (
        ({}, 200),
        ({"state": [{**right["state"][0], "value": 7}]}, 400),
        ({"inputs": [{**right["inputs"][0], "value": "one"}]}, 400),
        ({"more": "x" * MOST_BYTES}, 400),
    ):
        assert client.post("/_dash-update-component", json=right | changes).status_code == code


def test_a_job_that_is_stored_without_an_analysis_by_now_is_said_where_it_is_asked_about(tmp_path: Path) -> None:
    Store(tmp_path / "s.store").append(Incoming(slow_trace(), "plain", "x"))
    pages = Pages(tmp_path / "s.store")
    compared = {"compare_mode": "split", "compare_split": "1", "compare_job": "plain"}
    state = {**STATE, "job": "plain"}
    for output, changed, values, said in (
        ("compare-content.children", "compare-mode", compared, "plain is stored without an analysis by now."),
        (
            "whatif-answer.children",
            "whatif-state",
            {"whatif_state": state, "whatif_asked": 1, "whatif_drawn": DRAWN},
            "The job is stored without an analysis by now.",
        ),
    ):
        assert said in sent(pages.answer(output, changed, **values))
    for select, job in (("stage=1", "plain"), ("stage=1", "gone"), ("still typing", "plain")):
        asked = {"whatif_state": {**state, "job": job}, "whatif_select": select, "whatif_kinds": []}
        assert pages.answer("whatif-kinds.value", "whatif-state", **asked) == {}


@pytest.mark.slow
def test_every_callback_answers_what_a_page_sends_and_refuses_what_none_does(
    sample_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_app(sample_store).server.test_client()
    client.get("/")
    found = callbacks(sample_store)
    assert len(found) == 6  # one shows the pages
    for name, one in found.items():
        right = client.post("/_dash-update-component", json=request(name, one, {}))
        assert right.status_code in (200, 204), right.text
        for each in [*one["inputs"], *one["state"]]:
            for wrong in WRONG:
                caplog.clear()
                changes = {f"{each['id']}.{each['property']}": wrong}
                answer = client.post("/_dash-update-component", json=request(name, one, changes))
                assert answer.status_code in (200, 204, 400), changes
                assert "Traceback" not in answer.text
                assert "Something broke" not in answer.text, changes
                logged = [record for record in caplog.records if record.name.startswith("tracekit")]
                assert all(record.levelname == "WARNING" and record.exc_info is None for record in logged)
                assert len(logged) == (answer.status_code == 400)


@pytest.mark.every_push
@pytest.mark.parametrize(
    ("path", "broken", "act"),
    [
        ("/whatif?job=slow-worker", "whatif._ask_all", "[data-whatif=suggest]"),
        pytest.param("/whatif?job=slow-worker", "whatif._report", "[data-whatif=suggest]", marks=pytest.mark.slow),
        pytest.param(
            "/workers?job=slow-worker", "workers._updated_view", "#workers-list button", marks=pytest.mark.slow
        ),
        ("/compare?job=slow-worker", "compare._chosen", "text=This job before a step"),
    ],
)
def test_an_error_in_a_callback_is_said_on_the_page_and_logged_once(
    visit: Visit,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    broken: str,
    act: str,
) -> None:
    page = None
    for error, said, log in (
        (KeyError("secret"), "An error of tracekit itself; the server's log has the details.", [("ERROR", True)]),
        (SelectionError("do this instead"), "do this instead", []),
    ):
        page = visit(path, within=page)
        with monkeypatch.context() as patch:
            patch.setattr(f"tracekit.dashboards.browser.pages.{broken}", mock.Mock(side_effect=error))
            caplog.clear()
            page.locator(act).first.click()
            page.locator("#page [role=alert]", has_text=said).first.wait_for()
        logged = [record for record in caplog.records if record.name.startswith("tracekit")]
        assert [(record.levelname, record.exc_info is not None) for record in logged] == log
        assert "secret" not in page.inner_text("body")


def test_a_message_about_a_callback_can_be_closed(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    page = visit("/whatif?job=slow-worker")

    def fail(*_: Any) -> Any:
        raise KeyError

    monkeypatch.setattr("tracekit.dashboards.browser.pages.whatif._report", fail)
    page.locator("[data-whatif=suggest]").first.click()
    message = page.locator("#page-trouble .problem")
    message.wait_for()
    message.get_by_role("button").click()
    message.wait_for(state="hidden")
