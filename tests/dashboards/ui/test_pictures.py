"""Small pictures and the figures that only pages draw, without a browser: every length and number by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pytest
from msgspec import convert

from tests.dashboards.page_text import found, lines
from tests.figures.test_worker_map import one_slow, small
from tests.sides import side
from tracekit.dashboards.browser.ui.charts import Level, step_bars, steps_picture, trend, waterfall, worker_cells
from tracekit.dashboards.browser.ui.figures import costs, distribution, distributions, rank_times, step_series
from tracekit.dashboards.browser.web.app import make_app
from tracekit.dashboards.theme import LIGHT
from tracekit.report.compare import CostChange
from tracekit.report.tables import OfStep
from tracekit.trace.model import Worker


@pytest.fixture(scope="module", autouse=True)
def within_a_request(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    server = make_app(tmp_path_factory.mktemp("pictures") / "none.store").server
    with server.test_request_context("/"):
        yield


def steps(*times: tuple[int, float, float | None]) -> list[OfStep]:
    """Number, recorded and lost seconds of each step."""
    usual = {"slowdown": None, "original_s": 1.0, "ideal_s": 1.0}
    rows = [usual | {"step": step, "recorded_s": recorded_s, "lost_s": lost_s} for step, recorded_s, lost_s in times]
    return convert(rows, list[OfStep])


def styles(component: Any, kind: str = "I") -> list[Any]:
    return [part.style for part in found(component, kind)]


def test_a_bar_of_a_step_is_as_high_as_it_is_long_and_its_loss_is_on_top() -> None:
    shown = step_bars(steps((4, 1.0, 0.25), (5, 2.0, None), (9, 0.5, 0.75)), "job")
    green, brown = LIGHT.ideal, LIGHT.slow[3]
    assert styles(shown) == [
        {"height": height, "background": f"linear-gradient(to top, {green} {share}, {brown} {share})"}
        for height, share in (("50.0%", "75.0%"), ("100.0%", "100.0%"), ("25.0%", "0.0%"))
    ]
    marks = [*found(shown, "A")]
    assert [mark.title for mark in marks] == [
        "step 4: 1.00 s, 250.0 ms lost", "step 5: 2.00 s, 0.00 s lost", "step 9: 500.0 ms, 500.0 ms lost",
    ]  # fmt: skip
    assert [mark.href for mark in marks] == [f"/timeline?job=job&step={step}" for step in (4, 5, 9)]
    assert [mark.tabIndex for mark in marks] == [-1, 0, -1]
    assert [getattr(part, "className", None) for part in shown.children] == [None, None, "gap", None]
    assert not [*found(step_bars(steps((4, 1.0, 0.25)), "job", links=False), "A")]
    (idle,) = styles(step_bars(steps((4, 0.0, 0.0), (5, 1.0, 0.0)), "job"))[:1]
    assert idle["background"].endswith("100.0%)")


def test_of_many_steps_a_bar_is_the_slowest_of_several() -> None:
    many = steps(*((step, 2.0 if step == 33 else 1.0, 0.0) for step in range(121)))
    marks = [*found(step_bars(many, "job"), "A")]
    assert len(marks) == 41  # of three steps each
    assert [mark.title.partition(":")[0] for mark in marks[10:13]] == ["step 30", "step 33", "step 36"]
    said = lines(steps_picture(many, "job"))
    assert "121 steps of 1.00 s to 2.00 s; a bar is the slowest of 3: needed lost" in " ".join(said)
    assert "a bar is" not in " ".join(lines(steps_picture(many[:60], "job")))


def test_a_trend_reaches_from_zero_to_the_largest_share_or_a_tenth() -> None:
    shown = trend([0.02, -0.01, 0.05])
    assert [style["height"] for style in styles(shown)] == ["20%", "0%", "50%"]
    assert shown.title == "lost in the last 3 windows: 2% to 5%, 5% at most"
    long = trend([0.9] + [0.1] * 12 + [0.2] * 12)
    assert [style["height"] for style in styles(long)] == ["50%"] * 12 + ["100%"] * 12
    assert long.title == "lost in the last 24 windows: 10% to 20%, 20% at most"


def test_a_bar_of_a_waterfall_begins_where_the_one_before_ends() -> None:
    shown = waterfall([Level("ideal", 0.0, 2.0, "green", "2 s", None), Level("lost", 2.0, 4.0, "brown", "2 s", "/job"),
                       Level("saved", 4.0, 3.0, "blue", "1 s", None)])  # fmt: skip
    assert styles(shown) == [
        {"left": left, "width": f"max({width}, 2px)", "background": colour}
        for left, width, colour in (
            ("0.00%", "50.00%", "green"), ("50.00%", "50.00%", "brown"), ("75.00%", "25.00%", "blue"))
    ]  # fmt: skip
    assert [link.href for link in found(shown, "Link")] == ["/job"]


def test_a_small_map_has_a_cell_for_each_worker_with_its_share_where_it_is_slow() -> None:
    """S of DP ranks 0, 1 and 3: 1 and 1.1, 1.3 and 0.9, 1.2 and 1."""
    shown = worker_cells(small(), "job")
    cells = [*found(shown, "A")]
    assert [cell.children for cell in cells] == ["", "9%", "23%", "", "17%", ""]
    assert [cell.style["background"] for cell in cells] == [LIGHT.slow[level] for level in (0, 2, 4, 0, 3, 0)]
    assert [cell.tabIndex for cell in cells] == [-1, 0, 0, -1, 0, -1]
    assert cells[4].title == "rank 6 on b (dp 3, stage 0): alone costs 16.7% of a step"
    assert cells[4].href == "/workers?job=job&worker=3%2C0"
    assert [span.children for span in found(shown, "Span", "axis")] == ["dp", "stage 0", "stage 1", "0", "1", "3"]
    (grid,) = found(shown, "Div", "cells")
    assert grid.style == {"--columns": 2, "--height": "34px"}
    assert lines(shown)[-1].endswith("DP ranks down, stages across")


def test_a_cell_of_a_map_of_many_workers_is_the_worst_of_its_patch() -> None:
    shown = worker_cells(one_slow(64, 9, Worker(33, 4)), "job")
    cells = [*found(shown, "A")]
    assert len(cells) == 32 * 9
    (slow,) = (number for number, cell in enumerate(cells) if cell.tabIndex == 0)
    assert (slow, cells[slow].children) == (16 * 9 + 4, "")  # no figures in so many cells
    assert cells[slow].title.startswith("rank 301 (dp 33, stage 4): alone costs 66.7%")
    axes = [span.children for span in found(shown, "Span", "axis")]
    assert (axes[1], axes[10:13]) == ("0", ["0", "2", "4"])
    (grid,) = found(shown, "Div", "cells")
    assert (grid.style["--height"], "a cell is the worst of 2 workers" in " ".join(lines(shown))) == ("6px", True)


def test_costs_of_two_jobs_are_pairs_of_bars_without_those_that_nobody_sees() -> None:
    changes = [CostChange("gc", 2.0, 0.5), CostChange("send", None, -0.02), CostChange("tiny", 0.019, None)]
    fig = costs(changes, LIGHT, y="kind")
    assert [(bar.name, list(bar.y), list(bar.x), bar.marker.color) for bar in fig.data] == [
        ("before", ["gc", "send"], [2.0, None], LIGHT.dimmed), ("after", ["gc", "send"], [0.5, -0.02], LIGHT.changed),
    ]  # fmt: skip
    assert fig.data[1].hovertemplate == "%{y}, after: %{x:.3g} s<extra></extra>"
    layout = fig.layout
    assert (layout.height, layout.barmode, layout.bargap, layout.showlegend) == (90 + 34 * 2, "group", 0.3, True)
    assert (layout.yaxis.type, layout.yaxis.autorange, layout.yaxis.showgrid) == ("category", "reversed", False)
    assert costs(changes * 2, LIGHT, y="").layout.height == 90 + 34 * 4


def test_step_times_of_two_sides_have_their_means_and_their_distribution() -> None:
    before, after = side([2.0, 4.0], steps=np.array([5, 6])), side([1.0, 1.5, 0.5], steps=np.array([7, 8, 9]))
    one_axis, each_its_own = (step_series(before, after, LIGHT, split=split) for split in (True, False))
    assert [list(line.x) for line in one_axis.data] == [[5, 6], [5, 6], [7, 8, 9], [7, 9]]
    assert [list(line.x) for line in each_its_own.data] == [[0, 1], [0, 1], [0, 1, 2], [0, 2]]
    assert [list(line.y) for line in one_axis.data] == [[2, 4], [3, 3], [1, 1.5, 0.5], [1, 1]]
    assert [[step for (step,) in line.customdata] for line in each_its_own.data[::2]] == [[5, 6], [7, 8, 9]]
    looks = [(line.line.color, line.line.width, line.line.dash, line.showlegend) for line in one_axis.data]
    assert looks == [
        (LIGHT.dimmed, 1.5, None, None), (LIGHT.dimmed, 2, "dash", False),
        (LIGHT.changed, 1.5, None, None), (LIGHT.changed, 2, "dash", False),
    ]  # fmt: skip
    assert (one_axis.data[0].marker.size, one_axis.data[0].mode) == (5, "lines+markers")
    assert one_axis.data[3].hovertemplate == "mean after: %{y:.4g} s<extra></extra>"
    spread = distributions(before, after, LIGHT)
    assert [(line.name, list(line.x)) for line in spread.data] == [
        ("before", [2, 2, 4]), ("after", [0.5, 0.5, 1, 1.5])]  # fmt: skip
    assert [list(line.y) for line in spread.data] == [[0, 0.5, 1], pytest.approx([0, 1 / 3, 2 / 3, 1])]
    assert (spread.layout.yaxis.range, spread.data[0].line.shape, spread.layout.showlegend) == ((0, 1.02), "hv", True)


def test_jobs_and_hours_of_a_fleet_are_curves_over_the_share_lost() -> None:
    curves = pl.DataFrame({"quantile": [0.5, 1.0], "waste_jobs": [0.1, 0.4], "waste_hours": [0.2, 0.5]})
    fig = distribution(curves, LIGHT)
    assert [(line.name, list(line.x), list(line.y), line.line.color) for line in fig.data] == [
        ("of jobs", [0.1, 0.4], [0.5, 1.0], LIGHT.text), ("of GPU-hours", [0.2, 0.5], [0.5, 1.0], LIGHT.dimmed),
    ]  # fmt: skip
    assert [(line.line.width, line.line.shape) for line in fig.data] == [(2, "vh")] * 2
    assert (fig.layout.height, fig.layout.yaxis.range, fig.layout.xaxis.tickformat) == (280, (0, 1.01), ".0%")


def test_what_a_gpu_did_is_one_part_after_the_other_for_the_costliest_ranks() -> None:
    parts = {"before_first_s": 0.5, "compute_s": 2.0, "exposed_communication_s": 0.0, "idle_s": 1.0}
    drawn = rank_times([{"rank": 3, "sole_delay_s": 0.0, **parts}, {"rank": 1, "sole_delay_s": 1.0, "compute_s": 4.0}])
    assert drawn.rows == ["rank 1", "rank 3"]
    assert [(bar.row, bar.what, bar.start_s, bar.end_s, bar.words) for bar in drawn.bars] == [
        (0, 1, 0.0, 4.0, "rank 1, computing: 4.00 s"), (1, 0, 0.0, 0.5, "rank 3, before its first op: 500.0 ms"),
        (1, 1, 0.5, 2.5, "rank 3, computing: 2.00 s"), (1, 3, 2.5, 3.5, "rank 3, idle: 1.00 s"),
    ]  # fmt: skip
    assert [(entry.name, entry.tone) for entry in drawn.legend] == [
        ("before its first op", 3), ("computing", 0), ("exposed communication", 4), ("idle", 5)]  # fmt: skip
    many = rank_times([{"rank": rank, "sole_delay_s": float(rank % 40)} for rank in range(40)])
    assert many.rows == [f"rank {rank}" for rank in range(8, 40)]
