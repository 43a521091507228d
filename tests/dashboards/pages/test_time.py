"""The page Time: what the catalogue and the reports say of the life of a run, and the range that all pages share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import msgspec
import polars as pl
import pytest
from playwright.sync_api import Page, expect
from plotly.utils import PlotlyJSONEncoder

from tests.analysis.small_jobs import BACKWARD, FORWARD, of_steps
from tests.dashboards.clicks import state
from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, sent
from tests.dashboards.watched import HOSTS, analysed, trace
from tracekit.base.errors import SelectionError
from tracekit.costs import BillPart, ClaimedCosts, PlacedLoss
from tracekit.dashboards.browser.data.life import (
    Event,
    cost_over_time,
    event_chart,
    losses,
    on_the_clock,
    rates,
    read_differences,
    read_life,
)
from tracekit.dashboards.browser.data.queries import Results
from tracekit.dashboards.theme import LIGHT
from tracekit.store import Store
from tracekit.trace.facts import STEP_VALUES

#: Window n begins at hour n after this moment, 2023-11-14 22:00 UTC; its steps begin 10 s apart.
BEGIN = 1_699_999_200.0
HOUR = 3600.0
EVER = (0.0, float("inf"))


def write_life(path: Path, hours: Sequence[int] = range(4)) -> Path:
    """A job of windows of four steps each, which begin after these hours.

    Rank 3 is slow in windows 1 and 2; with window 3 its second attempt begins, and steps 12 and 13 were not recorded.
    A step has 800 tokens and 5e13 operations.
    """
    store = Store(path)
    store.begin_watch("live", "torchrun")
    for number, hour in enumerate(hours):
        ran = trace(slow=number in (1, 2))
        first = 4 * number + (2 if number >= 3 else 0)
        steps = {int(step): BEGIN + HOUR * hour + 10 * step for step in range(4)}
        facts = {"hosts": HOSTS, "attempt": int(number >= 3), "gpu_model": "NVIDIA H100", "tokens_per_step": 800}
        ran = replace(
            ran,
            ops=ran.ops.with_columns(step=ran.ops["step"] + first),
            step_starts={step + first: at for step, at in steps.items()},
            metadata=facts | {"label_flops_per_step": "5e13"},
        )
        store.append(analysed(ran))
    return store.path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_life(tmp_path_factory.mktemp("life") / "s.store")


@pytest.fixture(scope="module")
def pages(store: Path) -> Pages:
    return Pages(store)


@pytest.mark.slow
def test_of_few_windows_every_step_is_a_span_with_its_rates(store: Path) -> None:
    life = read_life(Results(store), "live", *EVER)
    assert life is not None
    assert life.stepwise
    rows = life.spans.to_dicts()
    assert [row["step"] for row in rows] == [*range(12), *range(14, 18)]
    assert [row["window"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [row["start_s"] - BEGIN for row in rows[:5]] == [0, 10, 20, 30, HOUR]
    assert [row["step"] for row in rows if row["broken"]] == [14]  # two steps are missing, and it is another attempt
    # 0.1 s forward, 0.2 s backward, 0.01 s to reduce gradients; rank 3 takes 0.3 s forward where it is slow
    assert [row["recorded_s"] for row in rows[3:5]] == pytest.approx([0.31, 0.51])
    assert rows[4]["end_s"] == pytest.approx(rows[4]["start_s"] + rows[4]["recorded_s"])
    assert rows[4]["tokens_per_s"] == pytest.approx(800 / 0.51)
    assert rows[4]["mfu"] == pytest.approx(5e13 / 0.51 / 4 / 989e12)  # four H100 of 989 teraflops


def write_values(path: Path) -> Path:
    """Two windows of four steps, 0.31 s each, of four H100: the loop logs tokens in the steps of the first that have
    some, and a loss in step 1; the second has none. A token takes 2e10 operations.
    """
    store = Store(path)
    values = {"tokens": {"0": 800.0, "1": 400.0, "3": 1200.0}, "loss": {"1": 2.5}}
    for number in range(2):
        ran = trace(slow=False)
        ran = replace(
            ran,
            ops=ran.ops.with_columns(step=ran.ops["step"] + 4 * number),
            step_starts={step + 4 * number: BEGIN + HOUR * number + 10 * step for step in range(4)},
            metadata={"hosts": HOSTS, "gpu_model": "NVIDIA H100", "label_flops_per_token": "2e10"}
            | ({STEP_VALUES: values} if number == 0 else {}),
        )
        store.append(analysed(ran))
    return store.path


def test_steps_have_what_the_loop_logged_of_them_and_windows_their_mean_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without tokens of its own counts with the mean of its window, 800; a step without loss has none."""
    path = write_values(tmp_path / "s.store")
    life = read_life(Results(path), "live", *EVER)
    assert life is not None
    assert life.stepwise
    tokens = [800, 400, 800, 1200]
    assert life.spans["tokens_per_s"].to_list() == pytest.approx([one / 0.31 for one in tokens] + [None] * 4)
    assert life.spans["loss"].to_list() == [None, 2.5, *[None] * 6]
    mfu = [one * 2e10 / 0.31 / 4 / 989e12 for one in tokens]
    assert life.spans["mfu"].to_list() == pytest.approx(mfu + [None] * 4)
    monkeypatch.setattr("tracekit.dashboards.browser.data.life.MOST_STEPWISE", 1)
    life = read_life(Results(path), "live", *EVER)
    assert life is not None
    assert life.spans.select("tokens_per_s", "loss").rows() == [(pytest.approx(800 / 0.31), 2.5), (None, None)]
    monkeypatch.setattr("tracekit.dashboards.browser.data.life.MOST_SPANS", 1)  # the second window has no say
    life = read_life(Results(path), "live", *EVER)
    assert life is not None
    assert life.spans.select("tokens_per_s", "loss").rows() == [(pytest.approx(800 / 0.31), 2.5)]


def test_the_pages_time_and_jobs_show_them(tmp_path: Path) -> None:
    pages = Pages(write_values(tmp_path / "s.store"))
    assert {"Tokens a second", "Loss", "Model FLOPs utilisation"} <= set(pages.lines("/time", job="live"))
    (row,) = pages.job_rows()
    assert row["tokens_per_s"] is None  # of the newest window
    assert "Tokens/s" not in pages.lines("/")
    store = Store(tmp_path / "one.store")
    store.append(analysed(replace(trace(slow=False), metadata={STEP_VALUES: {"tokens": {"0": 3100.0}}})))
    assert "10,000" in Pages(store.path).lines("/")


def test_losses_and_events_are_those_of_the_windows(store: Path) -> None:
    life = read_life(Results(store), "live", *EVER)
    assert life is not None
    reports = [Results(store).of_window("live", number).stored("live").report for number in (1, 2)]
    costs = [report.answer.accounts[0].cost_s for report in reports if report is not None]
    assert [(row["start_s"] - BEGIN, row["kind"]) for row in life.losses.to_dicts()] == [
        (HOUR, "bad-worker"),
        (2 * HOUR, "bad-worker"),
    ]
    assert life.losses["lost_s"].to_list() == pytest.approx(costs)
    incident, restart = life.events
    assert (incident.kind, incident.window, incident.start_s - BEGIN) == ("incident", 2, HOUR)
    assert incident.end_s == pytest.approx(life.spans.filter(window=2)["end_s"].max())
    assert restart == Event("restart", BEGIN + 3 * HOUR, BEGIN + 3 * HOUR, "another attempt, from window 3 on", 3)


def test_losses_are_all_that_the_bill_of_a_window_has(tmp_path: Path) -> None:
    """Five causes of 5 to 1 ms of a step, one of them at two places, of 4 steps."""
    store, ran = Store(tmp_path / "s.store"), trace(slow=False)
    store.append(analysed(replace(ran, step_starts={step: BEGIN + 10 * step for step in range(4)})))
    causes = {"bad-worker": 5, "congestion": 4, "python-gc": 3, "late-data": 2, "unexplained": 1}
    placed = [PlacedLoss(None, BillPart.STRAGGLERS, cause, ms / 1e3) for cause, ms in causes.items()]
    placed.append(PlacedLoss(None, BillPart.CHECKPOINTS, "late-data", 0.0, planned_s=0.001))
    with store.writing() as writer:
        costs = msgspec.json.encode(ClaimedCosts({}, tuple(placed), (), 4, None)).decode()
        writer.catalogue.connection.execute("UPDATE costs SET content = $costs", {"costs": costs})
    lost = Results(store.path).losses("live", 1)
    assert dict(lost.select("kind", "lost_s").iter_rows()) == pytest.approx(
        {"bad-worker": 0.020, "congestion": 0.016, "python-gc": 0.012, "late-data": 0.012, "unexplained": 0.004}
    )


def test_losses_of_a_window_leave_out_when_no_step_was_recorded(tmp_path: Path) -> None:
    """Steps 0 and 1 begin at 0 and 10 s, steps 10 and 11 at 100 and 110 s; each takes 0.51 s."""
    store, ran, later = Store(tmp_path / "s.store"), trace(slow=True), {0: 0, 1: 1, 2: 10, 3: 11}
    ops = ran.ops.with_columns(pl.col("step").replace(later))
    store.append(analysed(replace(ran, ops=ops, step_starts={step: BEGIN + 10 * step for step in later.values()})))
    life = read_life(Results(store.path), "live", *EVER)
    assert life is not None
    stretches = life.losses.select(pl.col("start_s") - BEGIN, pl.col("end_s") - BEGIN).unique().sort("start_s").rows()
    assert stretches == [pytest.approx((0, 10.51), abs=1e-6), pytest.approx((100, 110.51), abs=1e-6)]
    assert life.losses["lost_s"].n_unique() == life.losses["kind"].n_unique()


def test_of_many_windows_a_span_is_several_and_their_mean_is_that_of_their_steps(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracekit.dashboards.browser.data.life.MOST_STEPWISE", 3)
    monkeypatch.setattr("tracekit.dashboards.browser.data.life.MOST_SPANS", 2)
    life = read_life(Results(store), "live", *EVER)
    assert life is not None
    assert not life.stepwise
    means = [row["recorded_s"] for row in Results(store).history("live", 9).to_dicts()]
    assert life.spans["recorded_s"].to_list() == pytest.approx([(means[0] + means[1]) / 2, (means[2] + means[3]) / 2])
    assert life.spans.select("first_step", "last_step").rows() == [(0, 7), (8, 17)]
    costs = [row["lost_s"] for row in life.losses.to_dicts()]
    whole = read_life(Results(store), "live", BEGIN + HOUR, BEGIN + 3 * HOUR - 1)
    assert whole is not None
    assert costs == pytest.approx([lost / 2 for lost in whole.losses["lost_s"]])  # half of the steps are slow


def test_a_kind_of_event_is_a_row_the_first_on_top_and_a_bar_leads_to_its_step() -> None:
    events = (Event("restart", 1.0, 1.0, "another attempt", 3), Event("incident", 2.0, 5.0, "rank 3", 2, 7))
    drawn = event_chart(events, LIGHT, lambda window, step: f"/{window}/{step}").to_dict()
    (bars,), axis = drawn["data"], drawn["layout"]["yaxis"]
    assert list(zip(bars["y"], bars["base"], bars["x"], strict=True)) == [
        ("restart", 1000.0, 0.0),
        ("incident", 2000.0, 3000.0),
    ]
    assert [href for (href,) in bars["customdata"]] == ["/3/None", "/2/7"]
    assert list(bars["marker"]["color"]) == [LIGHT.dimmed, LIGHT.slow[3]]
    assert (axis["type"], axis["autorange"], axis["showgrid"]) == ("category", "reversed", False)
    assert list(bars["text"]) == ["another attempt", "rank 3"]
    layout = drawn["layout"]
    assert (layout["height"], layout["barmode"], layout["bargap"]) == (60 + 2 * 26, "overlay", 0.4)


def test_a_rate_is_a_level_line_over_each_span_that_breaks_where_steps_are_missing() -> None:
    """Step 4 from 10 to 10.5 s, the mean of steps 7 to 9 from 12 to 14 s; an incident from 10 to 11 s."""
    columns = ("start_s", "end_s", "window", "step", "first_step", "last_step", "broken", "loss")
    rows = [(10.0, 10.5, 2, 4, 4, 4, True, 0.5), (12.0, 14.0, 3, None, 7, 9, True, 0.25)]
    spans = pl.DataFrame(rows, columns, orient="row")
    events = (Event("incident", 10.0, 11.0, "rank 3"), Event("restart", 12.0, 12.0, "again"))
    fig = rates(spans, "loss", LIGHT, "loss %{y}", lambda window, step: f"/{window}/{step}", events=events)
    (line,), layout = fig.data, fig.layout
    assert list(line.x) == [10_000, 10_500, 12_000, 12_000, 14_000]
    assert list(line.y) == [0.5, 0.5, None, 0.25, 0.25]
    first, second = ("/2/4", "step 4"), ("/3/None", "mean of steps 7 to 9")
    assert [each and tuple(each) for each in line.customdata] == [first, first, None, second, second]
    assert (line.mode, line.line.color, line.line.width) == ("lines", LIGHT.recorded, 2)
    assert line.hovertemplate == "%{customdata[1]}: loss %{y}<extra></extra>"
    (band,) = layout.shapes
    assert (band.x0, band.x1, band.y0, band.y1, band.yref) == (10_000, 11_000, 0, 1, "paper")
    assert (band.type, band.fillcolor, band.opacity, band.line.width, band.layer) == (
        "rect", LIGHT.slow[2], 0.25, 0, "below")  # fmt: skip
    assert (layout.height, layout.hovermode, layout.yaxis.rangemode, layout.yaxis.tickformat) == (
        200, "x", "normal", ",.4g")  # fmt: skip
    from_zero = rates(spans, "start_s", LIGHT, "", lambda _window, _step: None)
    assert (from_zero.layout.yaxis.rangemode, from_zero.layout.shapes) == ("tozero", ())


def test_losses_are_stacked_bars_as_wide_as_their_spans_the_largest_kind_at_the_bottom_and_others_on_top() -> None:
    lost = pl.DataFrame(
        {
            "start_s": [10.0, 10.0, 10.0, 20.0],
            "end_s": [14.0, 14.0, 14.0, 26.0],
            "kind": ["others", "late-data", "python-gc", "python-gc"],
            "lost_s": [9.0, 0.5, 0.25, 0.375],
        }
    )
    fig = losses(lost, LIGHT)
    assert [(bar.name, list(bar.x), list(bar.width), list(bar.y), bar.marker.color) for bar in fig.data] == [
        ("python-gc", [12_000, 23_000], [4000, 6000], [0.25, 0.375], LIGHT.slow[3]),
        ("late-data", [12_000], [4000], [0.5], LIGHT.slow[4]),
        ("others", [12_000], [4000], [9.0], LIGHT.dimmed),
    ]
    assert fig.data[0].hovertemplate == "python-gc: %{y:.3g} s a step<extra></extra>"
    assert (fig.layout.barmode, fig.layout.yaxis.rangemode, fig.layout.height, fig.layout.showlegend) == (
        "stack", "tozero", 220, True)  # fmt: skip
    many = pl.DataFrame({"start_s": 0.0, "end_s": 1.0, "kind": list("abcde"), "lost_s": [5.0, 4.0, 3.0, 2.0, 1.0]})
    colours = [bar.marker.color for bar in losses(many, LIGHT).data]
    assert colours == [*LIGHT.slow[3:], LIGHT.slow[3]]


def test_what_a_host_cost_is_a_point_for_each_judged_window_in_order_of_time() -> None:
    windows = pl.DataFrame(
        {"job": ["b", "a", "a"], "number": [4, 2, 3], "at_s": [30.0, 20.0, 25.0], "share": [0.25, 0.5, None]}
    )
    fig = cost_over_time(windows, LIGHT, lambda job, number: f"/{job}/{number}")
    (points,) = fig.data
    assert (list(points.x), list(points.y)) == ([20_000, 30_000], [0.5, 0.25])
    assert [tuple(point) for point in points.customdata] == [("/a/2", "a"), ("/b/4", "b")]
    assert (points.mode, points.marker.color, points.marker.size) == ("markers", LIGHT.bad, 7)
    assert points.hovertemplate == "%{customdata[1]}: %{y:.1%} of the step<extra></extra>"
    assert (fig.layout.height, fig.layout.yaxis.rangemode, fig.layout.yaxis.tickformat) == (200, "tozero", ".0%")
    on_the_clock(fig, (10.0, 40.0), None, UTC, "that day")
    assert (fig.layout.xaxis.type, fig.layout.xaxis.range, fig.layout.xaxis.title.text) == (
        "date", (10_000, 40_000), "that day")  # fmt: skip
    assert fig.layout.meta == {"axis": "time", "zone": "UTC", "left": 104}
    on_the_clock(fig, (10.0, 40.0), (15.0, 20.0), UTC, "")
    assert fig.layout.meta["range"] == [15_000, 20_000]


@pytest.mark.slow
def test_nothing_is_drawn_where_the_run_was_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two spans, the first would reach over nine hours without a window."""
    monkeypatch.setattr("tracekit.dashboards.browser.data.life.MOST_STEPWISE", 3)
    monkeypatch.setattr("tracekit.dashboards.browser.data.life.MOST_SPANS", 2)
    life = read_life(Results(write_life(tmp_path / "s.store", (0, 10, 11, 12))), "live", *EVER)
    assert life is not None
    for rows in (life.spans, life.losses):
        assert all(row["start_s"] > BEGIN + 9 * HOUR or row["end_s"] < BEGIN + HOUR for row in rows.to_dicts())
    assert [(row["first_step"], row["last_step"]) for row in life.spans.to_dicts()] == [(0, 3), (4, 7), (8, 17)]
    # rank 3 is slow in the second window and in half of the steps of the last two
    assert [(row["start_s"] - BEGIN) / HOUR for row in life.losses.to_dicts()] == [10, 11]


def test_a_range_has_the_steps_and_events_that_overlap_it_alone(store: Path) -> None:
    life = read_life(Results(store), "live", BEGIN + HOUR + 5, BEGIN + HOUR + 25)
    assert life is not None
    assert life.spans["step"].to_list() == [5, 6]
    assert [one.kind for one in life.events] == ["incident"]
    assert read_life(Results(store), "live", BEGIN + 100, BEGIN + 200) is None


def test_what_is_different_in_a_range_is_whose_ops_take_longer_there_than_around_it(store: Path) -> None:
    """In windows 1 and 2, the forwards of rank 3 take 0.3 s, elsewhere 0.1 s as all others do."""
    found = read_differences(Results(store), "live", BEGIN + HOUR, BEGIN + 2 * HOUR + 60)
    assert (found.inside, found.outside) == (8, 8)
    assert (found.inside_s, found.outside_s) == (pytest.approx(0.2), pytest.approx(0))
    assert found.table.select("label", "value").rows() == [
        ("DP rank", "3"), ("host", "node-d"), ("op kind", "forward-compute"), ("rank", "3")
    ]  # fmt: skip
    assert found.table["inside"].to_list() == pytest.approx([1.0] * 4)
    part = read_differences(Results(store), "live", BEGIN + HOUR + 5, BEGIN + HOUR + 25)  # two steps of window 1
    assert (part.inside, part.outside) == (2, 14)
    assert part.outside_s == pytest.approx(6 * 0.2 / 14)


@pytest.mark.parametrize(("limit", "value", "most"), [("MOST_OPS", 50, 1), ("MOST_STEPWISE", 1, 2)])
def test_a_range_of_too_many_ops_or_windows_says_what_fits(
    store: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, most: int
) -> None:
    monkeypatch.setattr(f"tracekit.dashboards.browser.data.life.{limit}", value)
    with pytest.raises(SelectionError, match=rf"the range has 4 windows of 48 ops; at most {most} can be compared"):
        read_differences(Results(store), "live", *EVER)


def test_checkpoints_are_marked_where_their_steps_were(tmp_path: Path) -> None:
    """Twenty steps, ten seconds apart; step 5 writes a checkpoint for two seconds."""
    work = [FORWARD, BACKWARD]
    ran = of_steps([[[("checkpoint", 2.0), *work] if step == 5 else work] * 3 for step in range(20)])
    store = Store(tmp_path / "s.store")
    store.append(analysed(replace(ran, name="stops", step_starts={step: BEGIN + 10 * step for step in range(20)})))
    life = read_life(Results(store.path), "stops", *EVER)
    assert life is not None
    (stop,) = [one for one in life.events if one.kind != "incident"]
    assert (stop.kind, stop.step, stop.start_s - BEGIN, stop.words) == ("checkpoint", 5, 50, "step 5 took 2 s longer")


def test_pages_of_a_range_show_its_newest_window_and_links_keep_it(pages: Pages) -> None:
    asked = {"job": "live", "since": "2023-11-14T23:00:00Z", "until": "2023-11-15T00:30:00Z"}
    for path in ("/workers", "/whatif", "/timeline"):
        assert "Window 2, steps 8 to 11: the newest in the range." in pages.lines(path, **asked)
    shown = pages.page("/job", **asked)
    links = {str(link.href).partition("?")[0]: link.href for link in found(shown, "Link") if "job-tab" in str(link)}
    assert links["/workers"] == "/workers?job=live&since=2023-11-14T23%3A00%3A00Z&until=2023-11-15T00%3A30%3A00Z"
    assert "Range: 2023-11-14 23:00:00 UTC to 2023-11-15 00:30:00 UTC" in pages.lines("/time", **asked)
    alone = pages.lines("/time", job="live", since="2023-11-14T23:00:00Z")  # an open end
    assert "Range: 2023-11-14 23:00:00 UTC to 2023-11-15 01:00:30 UTC" in alone


def test_pages_of_a_range_judge_the_windows_in_it(pages: Pages) -> None:
    """Rank 3 is slow in both windows of the range, and in two of the four of the run."""
    asked = {"job": "live", "since": "2023-11-14T23:00:00Z", "until": "2023-11-15T00:30:00Z"}
    shown, whole = pages.lines("/job", **asked), pages.lines("/job", job="live")
    (sentence,) = [line for line in shown if line.startswith("Rank 3 on node-d cost ")]
    share = re.search(r"cost 0.0% of the chosen range \(([\d.]+% of its recorded steps)\), steps 4 to 11, ", sentence)
    assert share is not None  # in both windows, but an hour lies between them
    (of_run,) = [line for line in whole if line.startswith("Rank 3 on node-d cost ")]
    assert " of the run " in of_run
    assert any(line.startswith("Covers 2 of 4 windows, steps 4 to 11; ") for line in shown)
    for path in ("/job", "/time", "/workers"):
        badge = f"straggler, 0.0% of the chosen range ({share[1]}) lost trustworthy"
        assert badge in pages.lines(path, **asked)


def test_charts_of_steps_are_as_wide_as_the_steps_that_begin_in_the_range(pages: Pages) -> None:
    """Steps 8 to 11 begin 10 s apart from 00:00:00 on; no step begins in a range within one."""
    for since, until, drawn in (("05", "25", "[8.5, 10.5]"), ("00", "10", "[7.5, 9.5]"), ("01", "09", None)):
        moments = {name: f"2023-11-15T00:00:{second}Z" for name, second in (("since", since), ("until", until))}
        shown = pages.page("/workers", job="live", **moments)
        ranges = re.findall(r'"range": (\[[\d., ]+\])', json.dumps(shown, cls=PlotlyJSONEncoder))
        assert set(ranges) == ({drawn} if drawn else set())


def test_charts_of_steps_show_the_steps_of_the_range(
    store: Path, show: Callable[[Path], Serving], visit: Callable[..., Page]
) -> None:
    page = visit("/workers?job=live&since=2023-11-15T00:00:05Z&until=2023-11-15T00:00:25Z", base=show(store).url)
    for figure in ("workers-times", "workers-history"):
        expect(page.locator(f"#{figure} text.across")).to_have_text(["9", "10"])  # of steps 8 to 11


@pytest.mark.parametrize(
    ("since", "until", "said"),
    [
        ("yesterday", "", "since='yesterday' is not a time such as 2026-11-26T10:00:00Z"),
        ("", "<b>9</b>", "until='<b>9</b>' is not a time"),
        ("9" * 400, "", "is not a time"),
        ("2023-11-15T00:00Z", "2023-11-14T00:00Z", "the range ends before it begins"),
        ("2031-01-01", "2032-01-01", "no step of this job is in that range"),
    ],
)
@pytest.mark.parametrize(
    "path",
    ["/timeline", *(pytest.param(path, marks=pytest.mark.slow) for path in ("/time", "/job", "/workers", "/whatif"))],
)
def test_a_range_that_is_none_is_said_and_the_whole_is_shown(
    pages: Pages, path: str, since: str, until: str, said: str
) -> None:
    page = pages.page(path, job="live", since=since, until=until)
    (problem,) = found(page, "Div", "problem")
    assert said in str(problem)
    assert [link.children for link in found(problem, "Link")] == ["All of the run"]
    lines = pages.lines(path, job="live", since=since, until=until)
    assert any(line.startswith("All of the run: 2023-11-14 22:00:00 UTC to ") for line in lines)


def test_a_range_between_the_steps_of_a_window_has_none(tmp_path: Path) -> None:
    ran, store = trace(slow=True), Store(tmp_path / "s.store")
    store.append(analysed(replace(ran, step_starts={int(step): BEGIN + 1000 * step for step in ran.steps})))
    shown = Pages(store.path).lines("/time", job="live", since="2023-11-14T22:05:00Z", until="2023-11-14T22:10:00Z")
    assert "No step ran in this range." in shown


def test_without_a_range_nothing_is_compared_with_the_rest(pages: Pages) -> None:
    told = pages.answer("time-different.children", "time-ask", time_ask=1, time_job="live")
    assert "All of the run is shown: choose a range." in sent(told)


def test_a_trace_without_times_leads_to_its_steps(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.store")
    store.append(analysed(replace(trace(slow=True), step_starts={})))
    shown = Pages(store.path).page("/time", job="live")
    assert "The trace does not say when its steps ran." in " ".join(Pages(store.path).lines("/time", job="live"))
    assert "/workers?job=live" in [link.href for link in found(shown, "Link")]


@pytest.mark.every_push
def test_a_drag_chooses_the_range_of_all_pages_back_takes_it_away_and_a_click_opens_the_step(
    store: Path, show: Callable[[Path], Serving], visit: Callable[..., Page]
) -> None:
    page = visit("/time?job=live", base=show(store).url)
    area = page.locator("#time-steps .area").bounding_box()
    assert area is not None
    page.mouse.move(area["x"] + area["width"] * 0.3, area["y"] + 40)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + 60, steps=3)
    page.mouse.up()
    expect(page.locator(".time-range b")).to_have_text("Range: ")
    query = state(page)
    assert (query["since"][:15], query["until"][:15]) == ("2023-11-14T22:5", "2023-11-14T23:3")  # 54 min, 90 min
    expect(page.locator("#time-steps")).to_be_visible()
    page.wait_for_function("() => document.querySelector('#time-steps').figure.data[0].x.length === 8")  # four steps
    page.click("#time-ask")
    words = (
        "In these 4 steps, ops take 200.0 ms a step beyond the median of their kind and stage; in 12 steps around them"
    )
    expect(page.locator("#time-different")).to_contain_text(words)  # rank 3 has all of it, here as there: no row
    page.locator("#time-steps .chart-picture").press("ArrowRight")
    expect(page.locator("#time-steps .chart-tip")).to_contain_text("step 4: ")
    page.locator("#time-steps .chart-picture").press("Enter")
    page.wait_for_function("() => location.pathname === '/timeline'")
    opened = state(page)
    assert (opened["window"], opened["step"]) == ("1", "4")
    page.go_back()
    page.wait_for_selector("#time-steps svg")
    page.go_back()
    expect(page.locator(".time-range b")).to_have_text("All of the run: ")


def test_a_point_opens_its_step_where_only_times_are_known(
    tmp_path: Path, show: Callable[[Path], Serving], visit: Callable[..., Page]
) -> None:
    store = Store(tmp_path / "s.store")
    store.append(analysed(replace(trace(slow=False), step_starts={step: BEGIN + 10 * step for step in range(4)})))
    page = visit("/time?job=live", base=show(store.path).url)
    page.locator("#time-steps .chart-picture").press("ArrowRight")
    page.locator("#time-steps .chart-picture").press("Enter")
    page.wait_for_function("() => location.pathname === '/timeline'")


def test_on_a_phone_texts_of_a_short_range_and_of_a_huge_loss_do_not_overlap(
    tmp_path: Path, visit: Callable[..., Page], show: Callable[[Path], Serving]
) -> None:
    """Steps 0.4 s apart, of which 0.2 s are chosen; losses of 1e300 and, in the range, of 1."""
    store = Store(tmp_path / "s.store")
    values = {STEP_VALUES: {"loss": {"0": 1.0, "1": 1e300, "2": 3.0}}}
    starts = {step: BEGIN + 0.4 * step for step in range(4)}
    store.append(analysed(replace(trace(slow=False), step_starts=starts, metadata={"hosts": HOSTS} | values)))
    base, page = show(store.path).url, None
    for chosen in ("", "&since=2023-11-14T22:00:00.100Z&until=2023-11-14T22:00:00.300Z"):
        page = visit(f"/time?job=live{chosen}", base=base, width=390, within=page)
        page.wait_for_selector("#time-loss svg text.down")
        overlapping = page.evaluate(
            """() => [...document.querySelectorAll(".chart svg, #time-steps svg, #time-loss svg")].flatMap((chart) => {
                const texts = [...chart.querySelectorAll("text")].filter((one) => one.textContent);
                const boxes = texts.map((one) => one.getBoundingClientRect());
                return boxes.flatMap((a, at) => boxes.slice(0, at).map((b, other) => [a, b, other])
                    .filter(([a, b]) => Math.min(a.right, b.right) > Math.max(a.left, b.left) + 1
                        && Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top) + 4)
                    .map(([, , other]) => [texts[other].textContent, texts[at].textContent]));
            })"""
        )
        assert overlapping == [], chosen
        labels = page.locator("#time-loss text.down").all_text_contents()
        assert ("1e+300" in labels) == (not chosen), labels
        assert max(map(len, labels)) <= 7
