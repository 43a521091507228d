"""The timeline in a real browser, and the data behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import polars as pl
import pytest
from playwright.sync_api import Page, expect

import tracekit
from tests.analysis.rl.logs import lines, write
from tests.dashboards.clicks import address, state
from tests.dashboards.conftest import SAMPLES, Serving
from tests.dashboards.data.test_spans import early
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.text import seconds
from tracekit.dashboards.browser.web.timeline_requests import packed
from tracekit.store import Incoming, Store
from tracekit.trace.chrome import STREAMS

Visit = Callable[..., Page]
OP = "1,2,backward-compute,2"


@pytest.fixture(scope="module")
def step_105() -> pl.DataFrame:
    return pl.read_parquet(SAMPLES / "slow_worker.parquet").filter(pl.col("step") == 105)


@pytest.fixture(scope="module")
def slow_op(step_105: pl.DataFrame) -> dict[str, Any]:
    backward = step_105.filter(pl.col("kind") == "backward-compute")
    found = backward.filter(pl.col("dp_rank") == 1, pl.col("pp_rank") == 2, pl.col("seq") == 2).row(0, named=True)
    return {**found, "median": backward["duration"].median()}


def painted(page: Page) -> None:
    page.wait_for_selector("#timeline-host[data-painted]")


def window(page: Page) -> tuple[float, float]:
    """From when to when the canvas shows, seconds."""
    found: list[float] = page.evaluate("(() => { const t = tracekitTimeline.current(); return [t.from, t.to]; })()")
    return found[0], found[1]


def place(page: Page, name: str, start: float) -> tuple[float, float]:
    """Where on the screen the first line of the worker of that op is at that time."""
    found: list[float] = page.evaluate(
        """([name, start]) => {
            const t = tracekitTimeline.current(), box = t.canvas.getBoundingClientRect(), { block } = t.scene;
            const row = tracekitTimelineSpans.position(t.scene, name), { AXIS, LABELS } = tracekitTimelineDraw;
            return [
                box.left + LABELS + ((start - t.from) / (t.to - t.from)) * t.width,
                box.top + AXIS + row * block.height - t.scroll.scrollTop + block.lines[0].y + 5,
            ];
        }""",
        [name, start],
    )
    return found[0], found[1]


def fetched(serving: Serving, path: str, **parameters: object) -> tuple[int, bytes]:
    """Status and body of an answer."""
    try:
        with urlopen(f"{serving.url}/timeline/{path}?{urlencode(parameters)}") as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def unpacked(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:4], "little")
    found: dict[str, Any] = json.loads(data[4 : 4 + length])
    for name, (kind, offset, items) in found["arrays"].items():
        found[name] = np.frombuffer(data, np.dtype(kind).newbyteorder("<"), items, 4 + length + offset)
    return found


@pytest.mark.every_push
def test_the_slowest_step_opens_with_the_slowest_ops_first(
    visit: Visit, step_105: pl.DataFrame, slow_op: dict[str, Any]
) -> None:
    page = visit("/timeline?job=slow-worker", theme="dark")
    painted(page)
    page.wait_for_selector("#timeline-slowest tbody tr")
    row = page.locator("#timeline-slowest tbody tr").first
    cells = row.locator("td").all_inner_texts()
    assert cells[:5] == ["rank 9", "host-0001", "dp 1, stage 2", "backward-compute", str(slow_op["microbatch"])]
    assert cells[6] == seconds(slow_op["duration"])
    assert cells[8] == seconds(slow_op["median"])
    assert cells[9] == f"{slow_op['duration'] / slow_op['median']:.2f} x"
    assert state(page)["step"] == "105"
    computes = [str(kind) for kind, stream in STREAMS.items() if stream == "compute"]
    compute = step_105.filter(pl.col("kind").is_in(computes)).height
    assert page.get_attribute("#timeline-host", "data-painted") == str(2 * compute)  # recorded and ideal
    assert page.get_attribute("#timeline-scroll", "aria-label")


@pytest.mark.every_push
def test_an_op_pointed_at_and_clicked_shows_its_figures(visit: Visit, slow_op: dict[str, Any]) -> None:
    page = visit("/timeline?job=slow-worker&step=105")
    painted(page)
    page.mouse.move(*place(page, OP, slow_op["start"] + slow_op["duration"] / 2))
    page.wait_for_selector(f'#timeline-details[data-op="{OP}"][data-kept="false"]')
    said = page.inner_text("#timeline-tip")
    assert f"{slow_op['duration'] / slow_op['median']:.2f} x its peers" in said
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector(f'#timeline-details[data-op="{OP}"][data-kept="true"]')
    terms = page.locator("#timeline-details dt").all_inner_texts()
    values = page.locator("#timeline-details dd").all_inner_texts()
    shown = dict(zip(terms, values, strict=True))
    assert shown["rank"] == "9"
    assert shown["host"] == "host-0001"
    assert shown["recorded: start"] == f"{slow_op['start'] * 1e3:,.3f} ms"
    assert shown["recorded: duration"] == seconds(slow_op["duration"])
    assert shown["peer median"] == seconds(slow_op["median"])
    assert shown["started"].endswith("UTC")
    assert state(page)["op"] == OP


def test_the_whole_step_begins_where_its_earliest_op_does(
    visit: Visit, show: Callable[[Path], Serving], tmp_path: Path
) -> None:
    trace = early(0.25)
    Store(tmp_path / "s.duckdb").add([Incoming(trace, "early", "x", PipelineJob(trace).stored())])
    page = visit("/timeline?job=early&step=0", base=show(tmp_path / "s.duckdb").url)
    painted(page)
    whole = window(page)
    assert whole[0] == -0.25
    assert "from" not in state(page)
    page.focus("#timeline-scroll")
    page.keyboard.press("+")
    page.keyboard.press("Home")
    assert window(page) == whole


def test_zooming_and_panning_change_the_view_and_the_address(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker&step=105")
    painted(page)
    whole = window(page)
    x, y = place(page, OP, 0.5)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -400)
    page.wait_for_url("**from=**")
    zoomed = window(page)
    assert zoomed[1] - zoomed[0] < (whole[1] - whole[0]) * 0.9
    assert zoomed[0] < 0.5 < zoomed[1]
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=4)
    page.mouse.up()
    page.wait_for_function("(before) => tracekitTimeline.current().from > before", arg=zoomed[0])
    panned = window(page)
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    # The address follows a moment later, and can show a place on the way meanwhile.
    page.wait_for_function(
        """(window) => ["from", "to"].every((name, at) =>
            Math.abs(Number(new URL(location).searchParams.get(name)) - window[at] * 1e3) < 2e-3)""",
        arg=panned,
    )


def test_the_keyboard_moves_zooms_and_walks_from_op_to_op(visit: Visit) -> None:
    page = visit(f"/timeline?job=slow-worker&step=105&op={OP}")
    page.wait_for_selector(f'#timeline-details[data-op="{OP}"]')
    page.focus("#timeline-scroll")
    whole = window(page)
    page.keyboard.press("+")
    zoomed = window(page)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.7 * (whole[1] - whole[0]))
    page.keyboard.press("ArrowRight")
    assert window(page)[0] > zoomed[0]
    page.keyboard.press("Home")
    assert window(page) == whole
    page.keyboard.press("n")
    page.wait_for_selector(f'#timeline-details[data-op^="1,2,"]:not([data-op="{OP}"])')
    page.keyboard.press("p")
    page.wait_for_selector(f'#timeline-details[data-op="{OP}"]')
    page.keyboard.press("Escape")
    page.wait_for_function("() => !location.search.includes('op=')")


def test_a_permalink_shows_the_same_view_in_another_browser(visit: Visit) -> None:
    page = visit(f"/timeline?job=slow-worker&step=103&view=recorded&streams=all&dp_rank=1&from=200&to=400&op={OP}")
    page.wait_for_selector(f'#timeline-details[data-op="{OP}"][data-kept="true"]')
    page.focus("#timeline-scroll")
    page.keyboard.press("+")
    page.wait_for_function("() => new URL(location).searchParams.get('from') !== '200'")
    other = visit(address(page))
    other.wait_for_selector(f'#timeline-details[data-op="{OP}"][data-kept="true"]')
    assert window(other) == pytest.approx(window(page), abs=2e-6)
    assert other.inner_text("#timeline-details") == page.inner_text("#timeline-details")
    assert state(other) == state(page)
    assert other.evaluate("tracekitTimeline.current().scene.workers") == 4


def test_controls_change_what_is_drawn_and_the_address(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker")
    painted(page)
    page.get_by_text("Rows and filters").click()
    page.get_by_text("Original", exact=True).click()
    page.wait_for_function("() => tracekitTimeline.current().scene.replays[0] === 'original'")
    page.fill("#timeline-worker", "1,2")
    page.wait_for_function("() => tracekitTimeline.current().scene.workers === 1")
    page.get_by_label("The step after").click()
    page.wait_for_url("**step=106**")
    page.wait_for_function("() => tracekitTimeline.current().scene.step === 106")  # the step is fetched meanwhile
    shown = state(page)
    assert (shown["view"], shown["worker"], shown["step"]) == ("original", "1,2", "106")
    link = page.get_attribute("#timeline-perfetto", "href")
    assert link is not None
    assert "step=106" in link
    page.fill("#timeline-worker", "9,9")
    page.wait_for_function("() => document.getElementById('timeline-status').innerText.includes('no worker matches')")


ROWS_IN_VIEW = "(([first, last]) => last - first)(tracekitTimeline.current().visible())"


def test_forty_of_many_workers_are_in_view(visit: Visit, odd: Serving) -> None:
    page = visit("/timeline?job=wide", base=odd.url)
    painted(page)
    assert page.evaluate("tracekitTimeline.current().scene.rows") == 48
    assert page.evaluate(ROWS_IN_VIEW) >= 40


def click_name(page: Page, row: int) -> None:
    """Click on the name of a row at the left of the canvas."""
    x, y = page.evaluate(
        """(row) => {
            const t = tracekitTimeline.current(), box = t.canvas.getBoundingClientRect(), top = t.scroll.scrollTop;
            return [box.left + 60, box.top + tracekitTimelineDraw.rowTop(t.scene, { top: top }, row) + 6];
        }""",
        row,
    )
    page.mouse.click(x, y)


def test_workers_collapse_by_stage_and_a_click_opens_one(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker")
    painted(page)
    page.get_by_text("Rows and filters").click()
    page.get_by_text("By stage", exact=True).click()
    rows = "tracekitTimeline.current().scene.rows"
    page.wait_for_function(f"() => {rows} === 4")
    click_name(page, 0)  # stage 2, of the slowest worker
    page.wait_for_function(f"() => {rows} === 8")
    assert "open=1%2C2" in address(page)
    ranks = page.evaluate("[...tracekitTimeline.current().scene.pp_rank].slice(0, 5)")
    assert ranks == [2] * 5
    click_name(page, 0)
    page.wait_for_function(f"() => {rows} === 4")
    assert "open=" not in address(page)
    page.wait_for_selector("#timeline-slowest tbody tr")
    page.locator("#timeline-slowest button").first.click()  # the op of a worker whose group is closed
    page.wait_for_function(f"() => {rows} === 8")
    page.wait_for_selector('#timeline-details[data-op^="1,2,"]')


def test_a_pinned_row_stays_on_top_and_in_the_address(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker&order=rank&streams=all")
    painted(page)
    click_name(page, 3)
    page.wait_for_url("**pin=0%2C3**")
    page.wait_for_function("() => tracekitTimeline.current().scene.pinned === 1")
    page.evaluate("tracekitTimeline.current().scroll.scrollTop = 200")
    top = "tracekitTimelineRows.rowAtY(tracekitTimeline.current(), tracekitTimelineDraw.AXIS + 5).row"
    assert (page.evaluate(top), page.evaluate("tracekitTimeline.current().scene.pp_rank[0]")) == (0, 3)
    page.focus("#timeline-scroll")
    page.evaluate("tracekitTimeline.current().scroll.scrollTop = 0")
    click_name(page, 0)
    page.wait_for_function("() => tracekitTimeline.current().scene.pinned === 0")
    assert "pin=" not in address(page)


@pytest.mark.every_push
def test_a_range_dragged_on_the_ruler_shows_sums_by_kind(visit: Visit, step_105: pl.DataFrame) -> None:
    page = visit("/timeline?job=slow-worker&step=105&view=recorded&worker=1,2")
    painted(page)
    (left, y), (right, _) = place(page, OP, 0.3), place(page, OP, 0.5)
    page.mouse.move(left, y - 30)
    page.mouse.down()
    page.mouse.move((left + right) / 2, y - 30)
    page.evaluate("tracekitTimelineRange.sum(tracekitTimeline.current())")  # the view comes to rest during the drag
    assert page.locator("#timeline-details table").count() == 0
    page.mouse.move(right, y - 30)
    page.mouse.up()
    page.wait_for_selector("#timeline-details table")
    begin, end = (float(one) / 1e3 for one in state(page)["range"].split("-"))
    assert (begin, end) == pytest.approx((0.3, 0.5), abs=3e-3)
    backward = step_105.filter(
        pl.col("kind") == "backward-compute", pl.col("dp_rank") == 1, pl.col("pp_rank") == 2,
        pl.col("start") <= end, pl.col("start") + pl.col("duration") >= begin,
    )  # fmt: skip
    inside = (backward["start"] + backward["duration"]).clip(upper_bound=end) - backward["start"].clip(begin)
    row = page.locator("#timeline-details tbody tr", has_text="backward-compute").locator("td").all_inner_texts()
    assert row[1:3] == [str(backward.height), seconds(float(inside.sum()))]
    page.focus("#timeline-scroll")
    page.keyboard.press("Escape")
    page.wait_for_function("() => !location.search.includes('range=')")


@pytest.mark.every_push
def test_ops_are_found_by_name_and_the_rest_fades(visit: Visit, step_105: pl.DataFrame) -> None:
    page = visit("/timeline?job=slow-worker&step=105&view=recorded")
    painted(page)
    page.fill("#timeline-find", "backward 3")
    page.wait_for_selector("#timeline-details table")
    matching = step_105.filter(pl.col("kind") == "backward-compute", pl.col("microbatch") == 3)
    assert page.inner_text("#timeline-details h3").startswith(f"{matching.height} ops that match 'backward 3' of 16")
    expect(page.locator("#timeline-slowest tbody tr")).to_have_count(matching.height)
    painted_faint = page.evaluate(
        """() => {
            const { scene, spans } = tracekitTimeline.current();
            return [...spans.kind].filter((_, index) => scene.matches(spans, index)).length;
        }"""
    )
    assert painted_faint == matching.height
    page.press("#timeline-find", "Enter")
    page.wait_for_selector('#timeline-details[data-op="1,2,backward-compute,3"]')
    assert state(page)["find"] == "backward 3"


def test_the_whole_panel_fills_the_screen(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker")
    painted(page)
    page.get_by_role("button", name="Full screen").click()
    page.wait_for_function("() => document.fullscreenElement?.contains(document.getElementById('timeline-step'))")
    page.focus("#timeline-scroll")
    page.keyboard.press("f")
    page.wait_for_function("() => !document.fullscreenElement")


#: How many pixels of the canvas have the colour of the critical path.
ON_PATH = """() => {
  const t = tracekitTimeline.current(), { canvas } = t, [r, g, b] = [1, 3, 5].map((at) =>
    parseInt(t.scene.colours.outline.slice(at, at + 2), 16));
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) found += data[at] === r && data[at + 1] === g && data[at + 2] === b;
  return found;
}"""


@pytest.mark.every_push
def test_the_critical_path_is_drawn_over_the_ops_and_says_of_whom_the_step_consists(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker&critical=yes")
    painted(page)
    expect(page.locator("#timeline-path-words")).to_contain_text("Critical path, recorded: rank 9 7")
    page.wait_for_function(f"() => ({ON_PATH})() > 500")
    page.locator("#timeline-critical").get_by_text("Hide").click()
    page.wait_for_function(f"() => ({ON_PATH})() === 0")
    expect(page.locator("#timeline-path-words")).to_be_empty()
    assert "critical" not in address(page)


def test_the_path_knows_what_the_filters_hide(serving: Serving) -> None:
    every, one = (
        unpacked(fetched(serving, "path", job="slow-worker", step=105, **more)[1])
        for more in ({}, {"worker": "1,2", "streams": "compute"})
    )
    assert (every["row"] >= 0).sum() > (one["row"] >= 0).sum() > 0
    assert set(one["row"]) == {-1, 0}
    assert every["words"] == one["words"]


#: Paints the timeline again and notes where it writes and where the last track of the last worker ends.
WRITTEN = """() => {
  const t = tracekitTimeline.current(), { AXIS, draw } = tracekitTimelineDraw, texts = [];
  const context = new Proxy(t.canvas.getContext("2d"), {
    get(target, name) {
      if (name === "fillText") return (text, x, y) => texts.push([text, y]);
      return typeof target[name] === "function" ? target[name].bind(target) : target[name];
    },
    set(target, name, value) { target[name] = value; return true; },
  });
  t.scroll.scrollTop = t.scroll.scrollHeight;
  const top = t.scroll.scrollTop;
  draw(context, t.scene, { from: t.from, to: t.to, width: t.width, height: t.height, top: top }, t.spans, [], []);
  const ends = AXIS + t.scene.rows * t.scene.block.height - top;
  return { flags: texts.filter(([text]) => text.endsWith(" ends")), ends: ends, height: t.height };
}"""


def test_where_a_replay_ends_is_said_below_the_ops(visit: Visit) -> None:
    page = None
    for view, flags in (("both", ["ideal ends", "recorded ends"]), ("ideal", ["ideal ends"])):
        page = visit(f"/timeline?job=slow-worker&step=105&view={view}&streams=all", within=page)
        painted(page)
        written = page.evaluate(WRITTEN)
        assert [text for text, _ in written["flags"]] == flags
        heights = [y for _, y in written["flags"]]
        assert all(written["ends"] < y - 6 < y + 6 < written["height"] for y in heights)
        assert len({round(y) for y in heights}) == len(heights)


def test_the_canvas_is_saved_as_a_png(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker&step=102")
    painted(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    assert download.value.suggested_filename == "timeline-step-102.png"
    assert Path(download.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_sharp_screen_gets_a_sharp_canvas_and_a_narrow_one_a_narrow_canvas(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker", width=1920)
    painted(page)
    size = "(() => { const c = tracekitTimeline.current().canvas; return [c.width, c.clientWidth]; })()"
    wide = page.evaluate(size)
    assert wide[0] == wide[1]
    page.evaluate("Object.defineProperty(window, 'devicePixelRatio', { value: 2 })")
    page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for_function("(before) => tracekitTimeline.current().canvas.clientWidth < before", arg=wide[1])
    narrow = page.evaluate(size)
    assert narrow[0] == pytest.approx(2 * narrow[1], abs=1)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_an_op_that_the_step_lacks_is_said_so(visit: Visit) -> None:
    page = visit("/timeline?job=slow-worker&op=1,2,gc,77")
    page.wait_for_function("() => document.getElementById('timeline-status').innerText.includes('is not in this view')")


@pytest.mark.parametrize(
    ("path", "parameters", "status", "said"),
    [
        ("layout", {"job": "nobody"}, 404, "no job named 'nobody'"),
        ("layout", {}, 404, "no job named ''"),
        ("layout", {"job": "slow-worker", "step": "-1"}, 400, "step -1 is not in this job"),
        ("spans", {"job": "slow-worker", "view": "sideways"}, 400, "view='sideways' is not one of"),
        ("op", {"job": "slow-worker"}, 400, "names no op of step 105"),
        ("op", {"job": "slow-worker", "op": "1,2,gc,77"}, 400, "names no op of step 105"),
        ("layout", {"job": "slow-worker", "pin": "1;2"}, 400, "is not DP,PP such as 3,1, 8 at most"),
        ("layout", {"job": "slow-worker", "pin": "1,2 " * 9}, 400, "is not DP,PP such as 3,1, 8 at most"),
        ("layout", {"job": "slow-worker", "group": "rack"}, 400, "is not one of worker, host, stage"),
        ("sums", {"job": "slow-worker", "range": "400-200"}, 400, "is not milliseconds such as 200-400"),
        ("sums", {"job": "slow-worker", "find": "x" * 101}, 400, "is not words in the name of an op"),
        ("slowest.csv", {"job": "slow-worker", "worker": "'; DROP TABLE job; --"}, 400, "is not DP,PP"),
        ("export.json.gz", {"job": "slow-worker", "step": "../../../etc/passwd"}, 400, "is not a number"),
        ("export.json.gz", {"job": "../slow-worker"}, 404, "no job named"),
    ],
)
def test_data_requests_are_refused_in_one_line(
    serving: Serving, path: str, parameters: dict[str, str], status: int, said: str
) -> None:
    code, body = fetched(serving, path, **parameters)
    assert code == status
    assert said in body.decode()
    assert len(body.decode().splitlines()) == 1


def test_above_the_limit_a_window_of_workers_and_time_is_sent(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracekit.dashboards.browser.web.timeline_requests.WHOLE_SPANS", 100)
    asked = {"job": "slow-worker", "step": 105, "order": "rank", "streams": "compute", "view": "recorded"}
    code, body = fetched(serving, "spans", **asked, first=4, last=8, columns=50, **{"from": 0, "to": 500})
    assert code == 200
    found = unpacked(body)
    assert (found["first_row"], found["rows"], found["window"]) == (4, 4, [0.0, 0.5, 50])
    assert len(found["first"]) == 5
    assert found["start"].max() <= 0.5
    assert np.all(np.diff(found["start"][: found["first"][1]]) >= 0)
    code, body = fetched(serving, "spans", **asked, first=4, last=99, columns=50)
    assert (code, b"last='99'; expected a number from 4 to 16" in body) == (400, True)


def test_a_step_with_too_many_ops_is_fetched_window_by_window(
    visit: Visit, monkeypatch: pytest.MonkeyPatch, slow_op: dict[str, Any]
) -> None:
    monkeypatch.setattr("tracekit.dashboards.browser.web.timeline_requests.WHOLE_SPANS", 100)
    page = visit("/timeline?job=slow-worker&step=105&streams=all")
    painted(page)
    assert page.evaluate("tracekitTimeline.current().scene.whole") is False
    loaded = page.evaluate("tracekitTimeline.current().spans.window")
    x, y = place(page, OP, slow_op["start"] + slow_op["duration"] / 2)
    page.mouse.move(x, y)
    for _ in range(12):
        page.mouse.wheel(0, -240)
    narrower = "(wide) => { const w = tracekitTimeline.current().spans.window; return w[1] - w[0] < wide / 8; }"
    page.wait_for_function(narrower, arg=loaded[1] - loaded[0])
    page.mouse.move(x + 2, y)
    page.wait_for_selector(f'#timeline-details[data-op="{OP}"]')
    before = state(page).get("at")
    page.evaluate("tracekitTimeline.current().scroll.scrollTop = 300")
    page.wait_for_function("(at) => new URL(location).searchParams.get('at') !== at", arg=before)
    page.wait_for_function("() => !tracekitTimeline.current().requested && !tracekitTimeline.current().stale()")
    there = state(page)["at"]
    assert there != before
    again = visit(address(page))
    painted(again)
    again.wait_for_function("(at) => new URL(location).searchParams.get('at') === at", arg=there)
    row = again.evaluate("tracekitTimeline.current().scene.block.height")
    assert again.evaluate("tracekitTimeline.current().scroll.scrollTop") == pytest.approx(300, abs=row)


def test_packed_columns_come_out_as_they_went_in() -> None:
    columns = {"a": np.array([1, 2, 255], np.uint8), "b": np.array([0.5, -1.0]), "c": np.zeros(0, np.int32)}
    found = unpacked(packed({"step": 3}, columns))
    assert found["step"] == 3
    for name, values in columns.items():
        assert found[name].tolist() == values.tolist()
    assert all(place[1] % 8 == 0 for place in found["arrays"].values())


def test_the_csv_has_all_digits(serving: Serving, slow_op: dict[str, Any]) -> None:
    code, body = fetched(serving, "slowest.csv", job="slow-worker", step=105)
    first = pl.read_csv(body).row(0, named=True)
    assert code == 200
    assert (first["dp_rank"], first["pp_rank"], first["rank"], first["kind"]) == (1, 2, 9, "backward-compute")
    assert first["start_s"] == slow_op["start"]
    assert first["cost_s"] == pytest.approx(slow_op["duration"], rel=1e-6)


@pytest.mark.parametrize(("width", "names"), [(1280, 216), (390, 130)])
def test_most_of_a_phone_shows_ops_instead_of_names(visit: Visit, width: int, names: int) -> None:
    page = visit("/timeline?job=slow-worker", width=width)
    painted(page)
    left, whole = page.evaluate(
        "(() => [tracekitTimelineDraw.LABELS, tracekitTimeline.current().canvas.clientWidth])()"
    )
    assert left == names
    assert left < whole / 2


def test_a_phone_shows_the_timeline_first_and_two_fingers_zoom_it(visit: Visit) -> None:
    """The fingers move from 60 to 180 pixels apart around one time, which stays where it is; one finger then pans."""
    page = visit("/timeline?job=slow-worker&step=105", width=390)
    painted(page)
    canvas, order = page.locator("#timeline-canvas").bounding_box(), page.locator("#timeline-order").bounding_box()
    assert canvas is not None
    assert order is not None
    assert canvas["y"] < 600 < canvas["y"] + canvas["height"] < order["y"]
    touches = page.context.new_cdp_session(page)
    touches.send("Emulation.setTouchEmulationEnabled", {"enabled": True})

    def fingers(kind: str, *across: float) -> None:
        points = [{"x": x, "y": canvas["y"] + 80, "id": number} for number, x in enumerate(across)]
        touches.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def at(x: float) -> float:
        """The time at a place of the screen, seconds."""
        found: float = page.evaluate("([x, left]) => tracekitTimeline.current().time(x - left)", [x, canvas["x"]])
        return found

    (first, last), middle = window(page), at(240)
    fingers("touchStart", 210)
    fingers("touchStart", 210, 270)
    for apart in (60, 120, 180):
        fingers("touchMove", 240 - apart / 2, 240 + apart / 2)
    fingers("touchEnd")
    page.wait_for_function(
        "(wide) => { const t = tracekitTimeline.current(); return t.to - t.from < wide; }", arg=(last - first) / 2.9
    )
    assert window(page)[1] - window(page)[0] == pytest.approx((last - first) / 3)
    assert at(240) == pytest.approx(middle)
    at_200 = at(200)
    fingers("touchStart", 200)
    for x in (210, 230, 250):
        fingers("touchMove", x)
    fingers("touchEnd")
    assert at(250) == pytest.approx(at_200)
    touches.send("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_a_row_is_as_tall_as_the_lines_that_it_uses(
    visit: Visit, show: Callable[[Path], Serving], tmp_path: Path
) -> None:
    """Four phases lie on lines 1 to 4, three requests of the only engine on lines 0 to 2."""
    job, store = tracekit.load(write(tmp_path / "rl.jsonl", lines())), Store(tmp_path / "rl.store")
    store.add([Incoming(job.trace, "rl", "rl.jsonl", job.stored())])
    page = visit("/timeline?job=rl&step=0", base=show(store.path).url)
    painted(page)
    used, tops, whole, (left, top) = page.evaluate(
        """() => {
            const { scene } = window.tracekitTimeline.current(), { LABELS, AXIS } = window.tracekitTimelineDraw;
            return [scene.used, scene.tops, scene.block.height, [LABELS, AXIS]];
        }"""
    )
    assert used == [5, 3]
    assert tops[1] == whole > tops[2] - tops[1] > whole / 2
    box = page.locator("#timeline-canvas").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + left + 40, box["y"] + top + tops[1] + 14)  # the first line of the engine
    expect(page.locator("#timeline-details h3")).to_contain_text("request")
