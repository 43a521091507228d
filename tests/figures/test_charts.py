"""Figures in full, as Plotly gets them: every number of a small picture worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
from msgspec import convert

from tests.figures.test_worker_map import one_slow, small
from tracekit.dashboards.figures.charts import (
    axis,
    figure,
    markers,
    picture,
    plan_front,
    step_axis,
    step_times,
    step_workers,
    worker_heatmap,
    worker_over_steps,
)
from tracekit.dashboards.theme import DARK, LIGHT
from tracekit.report.questions import Optimum
from tracekit.report.tables import BarTimeline, LegendEntry, Series, SeriesLine, ShareGrid, TimelineBar, UsualBand
from tracekit.trace.model import Worker

#: Lines between cells, labels and the shape of a mark.
DOTTED = {"color": LIGHT.text, "dash": "dot", "width": 1}


def plain(value: Any) -> Any:
    """Lists and numbers in place of arrays, tuples and Plotly's objects."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(inner) for inner in value]
    return value.item() if isinstance(value, np.generic) else value


def drawn(fig: go.Figure) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The traces and the layout of a figure."""
    return [plain(trace.to_plotly_json()) for trace in fig.data], plain(fig.layout.to_plotly_json())


def part(whole: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: whole[name] for name in names if name in whole}


def test_an_empty_figure_is_in_the_theme_and_its_axes_have_titles() -> None:
    traces, layout = drawn(figure(DARK, height=90, x="across", y="down", legend=True))
    lines = {"automargin": True, "gridcolor": DARK.grid, "linecolor": DARK.grid, "zerolinecolor": DARK.grid}
    assert traces == []
    assert part(layout, "height", "margin", "paper_bgcolor", "plot_bgcolor", "showlegend") == {
        "height": 90, "margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "paper_bgcolor": DARK.paper,
        "plot_bgcolor": DARK.paper, "showlegend": True,
    }  # fmt: skip
    assert layout["font"] == {"color": DARK.text, "family": "system-ui, sans-serif", "size": 13}
    assert layout["xaxis"] == lines | {"title": {"text": "across", "standoff": 8}}
    assert layout["yaxis"] == lines | {"title": {"text": "down", "standoff": 8}}
    assert layout["legend"] == {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    _, bare = drawn(figure(LIGHT))
    assert (bare["height"], bare["showlegend"], bare["xaxis"]["title"]["text"]) == (320, False, "")


def test_an_axis_names_every_few_positions_and_reaches_half_a_position_beyond_both_ends() -> None:
    assert axis("abcde", 5) == {
        "tickvals": [0, 1, 2, 3, 4], "ticktext": ["a", "b", "c", "d", "e"], "range": [-0.5, 4.5], "zeroline": False,
    }  # fmt: skip
    assert axis("abcde", 3, down=True, showgrid=False) == {
        "tickvals": [0, 2, 4], "ticktext": ["a", "c", "e"], "range": [4.5, -0.5], "zeroline": False, "showgrid": False,
    }  # fmt: skip
    assert (axis("abcde", 2)["tickvals"], axis("", 4)["tickvals"]) == ([0, 3], [])


def test_an_axis_of_steps_has_the_first_step_of_each_block() -> None:
    fig = figure(LIGHT)
    step_axis(fig, np.array([7, 8, 9, 20, 21]), 2)
    _, layout = drawn(fig)
    assert layout["meta"] == {"axis": "steps", "at": [7, 9, 21]}
    assert part(layout["xaxis"], "range", "ticktext") == {"range": [-0.5, 2.5], "ticktext": ["7", "9", "21"]}
    step_axis(fig, np.arange(36))
    assert drawn(fig)[1]["xaxis"]["tickvals"] == list(range(0, 36, 2))  # at most 18
    assert [markers(120), markers(121)] == ["lines+markers", "lines"]


def test_a_map_of_workers_with_all_that_can_be_marked_on_it() -> None:
    """Three DP ranks of two stages. The DP rank 1 has the cells 2 and 3, DP rank 3 the cells 4 and 5."""
    (heat, dots), layout = drawn(worker_heatmap(small(), None, LIGHT, marked=[1], chosen=5, dotted=[4], boxed=[2, 5]))
    assert [[round(z, 4) for z in row] for row in heat["z"]] == [[0, 0.0909], [0.2308, -0.1111], [0.1667, 0]]
    assert heat["customdata"] == [[[0, 0, 0], [0, 1, 1]], [[1, 0, 2], [1, 1, 3]], [[3, 0, 6], [3, 1, -1]]]
    assert heat["text"] == [["a", "a"], ["a", "a"], ["b", "host unknown"]]
    assert part(heat, "xgap", "ygap", "hoverongaps", "texttemplate") == {
        "xgap": 2, "ygap": 2, "hoverongaps": False, "texttemplate": "%{z:.0%}",
    }  # fmt: skip
    assert heat["hovertemplate"] == (
        "%{text}<br>dp %{customdata[0]}, stage %{customdata[1]}<br>alone costs %{z:.1%} of a step<extra></extra>"
    )
    assert part(dots, "x", "y", "mode", "showlegend") == {"x": [-0.4], "y": [2], "mode": "markers", "showlegend": False}
    assert dots["marker"] == {"color": LIGHT.outline, "size": 7, "symbol": "circle"}
    assert layout["shapes"] == [
        {"type": "rect", "line": {"color": colour, "width": width}, "x0": west, "x1": east, "y0": north, "y1": south}
        for colour, width, west, east, north, south in (
            (LIGHT.outline, 2, 0.5, 1.5, -0.5, 0.5), (LIGHT.text, 3, 0.5, 1.5, 1.5, 2.5),
            (LIGHT.text, 3, -0.5, 1.5, 0.5, 2.5),
        )
    ]  # fmt: skip
    assert (layout["height"], layout["uirevision"]) == (202, "map")  # 44 pixels a row, and 70
    assert part(layout["xaxis"], "ticktext", "range", "showgrid", "constrain") == {
        "ticktext": ["0", "1"], "range": [-0.5, 1.5], "showgrid": False, "constrain": "domain",
    }  # fmt: skip
    assert part(layout["yaxis"], "ticktext", "range", "showgrid") == {
        "ticktext": ["0", "1", "3"], "range": [2.5, -0.5], "showgrid": False,
    }  # fmt: skip
    assert (layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]) == ("stage", "DP rank")


def test_a_map_of_very_many_workers_shows_the_worst_of_each_block() -> None:
    """320 x 64 cells: two rows of cells are one, so that at most 160 are left; a ring of 14 pixels marks one."""
    (heat, ring), layout = drawn(worker_heatmap(one_slow(320, 64, Worker(77, 5)), None, LIGHT, marked=[77 * 64 + 5]))
    assert (len(heat["z"]), len(heat["z"][0])) == (160, 64)
    assert heat["hovertemplate"].startswith("the worst of 2 workers: rank %{customdata[2]}<br>dp %{customdata[0]}, ")
    assert heat["customdata"][38][5] == [77, 5, 77 * 64 + 5]
    assert (heat["xgap"], heat["ygap"], "text" in heat, "texttemplate" in heat) == (0, 0, False, False)
    assert part(ring, "x", "y") == {"x": [5], "y": [38]}
    assert ring["marker"] == {"symbol": "square-open", "size": 14, "color": LIGHT.outline, "line": {"width": 2}}
    assert layout["height"] == 640
    assert layout["yaxis"]["ticktext"] == [str(dp_rank) for dp_rank in range(0, 320, 20)]


def test_cells_have_gaps_and_figures_only_where_there_is_room() -> None:
    few, many = (worker_heatmap(one_slow(rows, 8, Worker(0, 0)), None, LIGHT).data[0] for rows in (20, 21))
    assert [(heat.xgap, heat.ygap, heat.texttemplate) for heat in (few, many)] == [(2, 2, "%{z:.0%}"), (0, 0, None)]
    low = worker_heatmap(one_slow(1, 8, Worker(0, 0)), None, LIGHT)
    assert low.layout.height == 170


def test_a_worker_stands_before_the_band_of_nine_in_ten_of_the_others() -> None:
    """S of cell 2 (1.3) is 1.25 in step 7 and 1.35 in step 9; those of the others are given by `small`."""
    drawing = worker_over_steps(small(), 2, LIGHT, moments=["first", "second"], position=1)
    (low, high, own), layout = drawn(drawing)
    others = np.array([[1.0, 1.1, 0.9, 1.2, 1.0]]) + np.array([[-0.05], [0.05]])
    ends = np.quantile(1 - 1 / others, (0.05, 0.95), axis=1)
    assert [low["y"], high["y"]] == [pytest.approx(end, abs=1e-6) for end in ends]
    assert [low["x"], high["x"], own["x"]] == [[0, 1]] * 3
    assert part(high, "fill", "name", "hoverinfo") == {
        "fill": "tonexty", "name": "nine in ten of the others", "hoverinfo": "skip",
    }  # fmt: skip
    assert (low["showlegend"], "fill" in low, low["line"]) == (False, False, {"width": 0, "color": LIGHT.dimmed})
    assert own["y"] == pytest.approx([1 - 1 / 1.25, 1 - 1 / 1.35])
    assert own["customdata"] == [[7, "first"], [9, "second"]]
    assert part(own, "mode", "line", "marker", "name") == {
        "mode": "lines+markers", "line": {"color": LIGHT.bad, "width": 2}, "marker": {"size": 5}, "name": "this worker",
    }  # fmt: skip
    assert own["hovertemplate"] == "step %{customdata[0]}: alone costs %{y:.1%}<br>%{customdata[1]}<extra></extra>"
    assert layout["shapes"] == [
        {"type": "line", "line": DOTTED, "x0": 1, "x1": 1, "xref": "x", "y0": 0, "y1": 1, "yref": "y domain"}
    ]
    assert (layout["height"], layout["showlegend"], layout["yaxis"]["tickformat"]) == (230, True, ".0%")
    assert layout["meta"]["at"] == [7, 9]
    alone, layout = drawn(worker_over_steps(one_slow(1, 1, Worker(0, 0)), 0, LIGHT, moments=[""]))
    assert ([trace["name"] for trace in alone], "shapes" in layout) == (["this worker"], False)


def test_a_step_that_leaves_a_worker_out_counts_as_costing_nothing_in_the_band() -> None:
    low, high, own = worker_over_steps(small(((9, 1),)), 0, LIGHT, moments=["", ""]).data
    others = 1 - 1 / (np.array([1.1, 1.2, 1.0]) + 0.05)
    assert [low.y[1], high.y[1]] == pytest.approx(np.quantile([*others, 0, 0], (0.05, 0.95)))
    assert own.y[1] == pytest.approx(1 - 1 / 1.05, abs=1e-6)


def test_times_of_steps_are_two_lines_from_zero() -> None:
    by_step = pl.DataFrame({"step": [4, 5], "recorded_s": [1.5, 2.5], "ideal_s": [1.0, 1.25]})
    (recorded, ideal), layout = drawn(step_times(by_step, ["", "at noon"], LIGHT))
    assert (recorded["y"], ideal["y"]) == ([1.5, 2.5], [1.0, 1.25])
    assert recorded["customdata"] == ideal["customdata"] == [[4, ""], [5, "at noon"]]
    assert [(line["name"], line["line"], line["marker"]) for line in (recorded, ideal)] == [
        ("recorded", {"color": LIGHT.recorded, "width": 2}, {"size": 4}),
        ("ideal", {"color": LIGHT.ideal, "width": 2}, {"size": 4}),
    ]
    assert ideal["hovertemplate"] == "step %{customdata[0]}: ideal %{y:.4g} s<br>%{customdata[1]}<extra></extra>"
    assert part(layout, "height", "hovermode", "hoverdistance", "showlegend") == {
        "height": 240, "hovermode": "x", "hoverdistance": -1, "showlegend": True,
    }  # fmt: skip
    assert (layout["yaxis"]["rangemode"], layout["yaxis"]["title"]["text"]) == ("tozero", "seconds")
    assert layout["meta"]["at"] == [4, 5]


def test_the_map_of_steps_has_a_row_for_each_worker_and_a_column_for_each_step() -> None:
    (heat,), layout = drawn(step_workers(small(), [2, 4], LIGHT))
    shares = [[1 - 1 / 1.25, 1 - 1 / 1.35], [1 - 1 / 1.15, 1 - 1 / 1.25]]
    assert heat["z"] == [pytest.approx(row) for row in shares]
    assert heat["customdata"] == [[[7, 1, 0, 2], [9, 1, 0, 2]], [[7, 3, 0, 6], [9, 3, 0, 6]]]
    assert (heat["xgap"], heat["ygap"], heat["hoverongaps"]) == (1, 1, False)
    assert heat["hovertemplate"] == (
        "step %{customdata[0]}, dp %{customdata[1]}, stage %{customdata[2]}: alone costs %{z:.1%}<extra></extra>"
    )
    assert part(layout["yaxis"], "ticktext", "range") == {"ticktext": ["rank 2", "rank 6"], "range": [1.5, -0.5]}
    assert (layout["yaxis"]["title"]["text"], layout["yaxis"]["tickfont"]) == ("worker", {"size": 11})
    assert (layout["meta"]["at"], layout["height"]) == ([7, 9], 210)
    (ranked,), layout = drawn(step_workers(one_slow(3, 4, Worker(1, 1)), range(12), LIGHT))
    assert ranked["hovertemplate"].startswith("step %{customdata[0]}, rank %{customdata[3]} (dp %{customdata[1]}, ")
    assert (layout["yaxis"]["title"]["text"], layout["height"]) == ("", 18 * 12 + 80)


def test_the_map_of_very_many_steps_shows_the_worst_of_each_block() -> None:
    """Of 30 workers at 1,001 steps, two steps share a column."""
    workers = one_slow(3, 10, Worker(0, 0))
    steps, per_step = np.arange(50, 1051), np.ones((1001, 3, 10), np.float32)
    per_step[701, 1, 4] = 2.0
    many = type(workers)(**{**{name: getattr(workers, name) for name in workers.__struct_fields__},
                            "steps": steps, "per_step": per_step})  # fmt: skip
    (heat,), layout = drawn(step_workers(many, range(30), LIGHT))
    assert (len(heat["z"]), len(heat["z"][0])) == (30, 501)
    assert (heat["z"][14][350], heat["customdata"][14][350]) == (0.5, [751, 1, 4, 14])
    assert sum(map(sum, heat["z"])) == 0.5
    assert heat["hovertemplate"].startswith("the worst here: step ")
    assert (heat["xgap"], heat["ygap"], layout["meta"]["at"][:3]) == (0, 1, [50, 52, 54])


def test_a_grid_of_shares() -> None:
    shares = ShareGrid("Experts", "layer", "rank", ["l0", "l1"], ["r0", "r1", "r2"], [[0, 0.5, -0.5], [0, 0, 0.25]], "")
    (heat,), layout = drawn(picture(shares, LIGHT))
    assert heat["z"] == [[0, 0.5, -0.5], [0, 0, 0.25]]
    assert heat["customdata"] == [[[row, column] for column in ("r0", "r1", "r2")] for row in ("l0", "l1")]
    assert heat["hovertemplate"] == "layer %{customdata[0]}, rank %{customdata[1]}: %{z:+.0%} <extra></extra>"
    assert (heat["xgap"], heat["ygap"], heat["zmin"], heat["zmax"]) == (2, 2, 0, 0.4)
    assert (layout["height"], layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]) == (
        70 + 2 * 24, "rank", "layer")  # fmt: skip
    assert part(layout["xaxis"], "ticktext", "range", "showgrid") == {
        "ticktext": ["r0", "r1", "r2"], "range": [-0.5, 2.5], "showgrid": False,
    }  # fmt: skip
    assert part(layout["yaxis"], "range", "showgrid") == {"range": [1.5, -0.5], "showgrid": False}
    tall = ShareGrid("", "", "", [str(row) for row in range(48)], ["r"], [[0.0]] * 48, "")
    assert picture(tall, LIGHT).layout.height == 640
    assert list(picture(tall, LIGHT).layout.yaxis.tickvals) == list(range(0, 48, 2))


def test_lines_over_what_is_usual_and_bars_of_parts() -> None:
    lines = [SeriesLine("host", 1, [1.0, 2.0]), SeriesLine("peer", 5, [3.0, None])]
    usual = UsualBand("usual", [0.5, 0.75], [4.0, 5.0])
    over_time = Series("Clock", "seconds", "MHz", [10.0, 20.0], lines, usual=usual, marks=[15.0])
    (low, high, host, peer), layout = drawn(picture(over_time, LIGHT))
    assert [trace["x"] for trace in (low, high, host, peer)] == [[10, 20]] * 4
    assert [trace["y"] for trace in (low, high, host, peer)] == [[0.5, 0.75], [4, 5], [1, 2], [3, None]]
    assert (low["showlegend"], low["name"], high["name"], high["fill"]) == (False, "", "usual", "tonexty")
    assert low["line"] == high["line"] == {"color": LIGHT.dimmed, "width": 0}
    assert (host["line"], peer["line"]) == (
        {"color": LIGHT.kinds[1], "width": 2}, {"color": LIGHT.slow[4], "width": 2})  # fmt: skip
    assert host["hovertemplate"] == "%{x:.4g}, host: %{y:.4g} MHz<extra></extra>"
    (mark,) = layout["shapes"]
    assert (mark["x0"], mark["x1"], mark["line"]) == (15, 15, DOTTED)
    assert (layout["height"], layout["showlegend"], layout["barmode"]) == (220, True, "stack")
    assert (layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]) == ("seconds", "MHz")
    tones = [SeriesLine(str(tone), tone, [1.0]) for tone in range(7)]
    bars, layout = drawn(picture(Series("", "", "", [0.0], tones, stacked=True), LIGHT))
    assert {trace["type"] for trace in bars} == {"bar"}
    slow = LIGHT.slow
    assert [bar["marker"] for bar in bars] == [
        {"color": colour, "line": {"width": 0}} for colour in (*LIGHT.kinds[:3], slow[1], slow[2], slow[4], slow[3])
    ]


def test_bars_of_a_timeline_are_in_milliseconds_unless_they_are_long() -> None:
    legend = [LegendEntry("forward", 0), LegendEntry("unused", 1), LegendEntry("bubble", 3)]
    bars = [TimelineBar(1, 0, 0.25, 0.75, "a"), TimelineBar(0, 2, 1.0, 9.5, "b"), TimelineBar(1, 0, 1.0, 1.5, "c")]
    of_step = BarTimeline("Step", "since it began", ["stage 0", "stage 1"], legend, bars, [])
    (forward, bubble), layout = drawn(picture(of_step, LIGHT))
    assert part(forward, "base", "x", "y", "text", "orientation", "name") == {
        "base": [250, 1000], "x": [500, 500], "y": [1, 1], "text": ["a", "c"], "orientation": "h", "name": "forward",
    }  # fmt: skip
    assert part(bubble, "base", "x", "y", "text", "name") == {
        "base": [1000], "x": [8500], "y": [0], "text": ["b"], "name": "bubble",
    }  # fmt: skip
    assert [bar["marker"] for bar in (forward, bubble)] == [
        {"color": colour, "line": {"width": 0}} for colour in (LIGHT.kinds[0], LIGHT.slow[1])
    ]
    assert layout["xaxis"]["title"]["text"] == "milliseconds since it began"
    assert part(layout, "height", "barmode", "bargap", "hovermode", "showlegend") == {
        "height": 110 + 2 * 24, "barmode": "overlay", "bargap": 0.2, "hovermode": "closest", "showlegend": True,
    }  # fmt: skip
    assert part(layout["yaxis"], "ticktext", "range", "showgrid") == {
        "ticktext": ["stage 0", "stage 1"], "range": [1.5, -0.5], "showgrid": False,
    }  # fmt: skip
    assert layout["xaxis"]["rangemode"] == "tozero"
    long = BarTimeline("", "since", ["r"], legend, [TimelineBar(0, 0, 2.0, 10.0, "")], [])
    (bar,), layout = drawn(picture(long, LIGHT))
    assert (bar["base"], bar["x"], layout["xaxis"]["title"]["text"]) == ([2], [8], "seconds since")
    heights = [picture(BarTimeline("", "", ["r"] * rows, [], [], []), LIGHT).layout.height for rows in (64, 65)]
    assert heights == [110 + 24 * 64, 110 + 3 * 65]


def test_plans_by_memory_or_by_microbatches_where_that_is_unknown() -> None:
    """Plans of 2.0 and 1.5 s beside one in use of 2.5 s; none takes less than 1.25 s."""
    plan = {"split": [4, 4], "schedule": "1f1b", "recompute": [False, False]}
    settings = {"bucket_cap_mb": None, "step_time_s": 1.5, "layers": [4, 4], "microbatches": 16, "paste": {},
                "recompute_layers": []}  # fmt: skip
    whole = {"saved_s": 0.5, "bound_s": 1.25, "buckets": [[4], [4]], "settings": settings, "tied": False}
    fast = plan | {"memory_gb": 40.0, "step_time_s": 1.5, "microbatches": 16}
    small_plan = plan | {"memory_gb": 20.0, "step_time_s": 2.0, "microbatches": 8}
    now = plan | {"memory_gb": 30.0, "step_time_s": 2.5, "microbatches": 4, "split": [5, 3]}
    optimum = {"step_time_s": {"now": 2.5, "best": 1.5}, "nothing_to_gain": False, "reason": None, "limit_gb": None,
               "searched": {"plans": 3, "replayed": 3}}  # fmt: skip
    of_memory = optimum | {"plans": [fast | whole], "front": [small_plan, fast], "now": now}
    (plans, current, bound), layout = drawn(plan_front(convert(of_memory, Optimum), LIGHT))
    assert part(plans, "x", "y", "name", "mode") == {
        "x": [20, 40], "y": [2000, 1500], "name": "fastest plans", "mode": "markers"}  # fmt: skip
    assert part(current, "x", "y", "text", "name") == {
        "x": [30], "y": [2500], "text": ["5,3, 1f1b, 4 microbatches"], "name": "plan in use"}  # fmt: skip
    assert part(bound, "x", "y", "mode", "line") == {
        "x": [20, 40], "y": [1250, 1250], "mode": "lines", "line": {"color": LIGHT.dimmed, "dash": "dash"}}  # fmt: skip
    assert [line["marker"] for line in (plans, current)] == [
        {"color": LIGHT.ideal, "size": 9}, {"color": LIGHT.recorded, "size": 9}]  # fmt: skip
    assert plans["hovertemplate"] == "%{text}<br>%{y:.1f} ms<extra></extra>"
    assert layout["xaxis"]["title"]["text"] == "memory of the fullest stage, GB"
    assert (layout["yaxis"]["title"]["text"], layout["showlegend"]) == ("step, ms", True)
    unknown = {"memory_gb": None}
    both = [plan | whole | unknown for plan in (fast, small_plan)]
    of_microbatches = optimum | {"plans": both, "front": [], "now": now | unknown}
    (plans, current, bound), layout = drawn(plan_front(convert(of_microbatches, Optimum), LIGHT))
    assert (plans["x"], plans["y"], current["x"], bound["x"]) == ([8, 16], [2000, 1500], [4], [4, 16])
    assert layout["xaxis"]["title"]["text"] == "microbatches"
