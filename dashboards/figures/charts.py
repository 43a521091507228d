"""Plotly figures that pages and notebooks share: workers, steps, sections of a report, plans; and the look of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.numeric.arrays import Ints
from tracekit.dashboards.figures.worker_map import (
    MOST_CELLS,
    UNKNOWN,
    Pooled,
    WorkerMap,
    blocks_that_fit,
    lost_alone,
    pool,
)
from tracekit.dashboards.theme import Theme, slowdown_scale
from tracekit.dashboards.words import gaps_before
from tracekit.report.questions import FrontPlan, OptimizedPlan, Optimum
from tracekit.report.tables import BarTimeline, Picture, Series, ShareGrid

#: Maps up to this many cells show each value and the gaps between cells.
FEW_CELLS = 160
#: Maps up to this many cells name the host in the hover text.
NAMED_CELLS = 4096
#: Cells at least this large (pixels of a typical panel) are outlined exactly, smaller ones by a square around them.
LARGE_CELL_PX = 14
PANEL_WIDTH_PX = 740
TALLEST_MAP_PX = 640
TICKS = 16
#: Height of the map with the fewest rows: the title of its axis needs that much.
LOWEST_MAP = 210

HEIGHT = 320
#: The largest number of labels on an axis of steps.
STEP_TICKS = 18
#: Lines with more points than this have no markers.
MARKED_STEPS = 120


def worker_heatmap(
    workers: WorkerMap,
    position: int | None,
    theme: Theme,
    *,
    marked: Sequence[int] = (),
    chosen: int | None = None,
    dotted: Sequence[int] = (),
    boxed: Sequence[int] | Ints = (),
) -> go.Figure:
    """DP ranks down, stages across; pooled by maximum if there are too many cells.

    `position`: which step, None for all. Flat cell numbers: `marked` are outlined, `chosen` is outlined boldly,
    `dotted` get a dot, a box is drawn from the first to the last of `boxed`.
    """
    values = workers.values(position)
    pooled = pool(values, *blocks_that_fit(*values.shape))
    rows, columns = pooled.values.shape
    cells = rows * columns
    has_hosts = bool(workers.hosts) and cells <= NAMED_CELLS
    height = int(np.clip(44 * rows + 70, 170, TALLEST_MAP_PX))
    fig = figure(theme, height=height, x="stage", y="DP rank")
    fig.add_heatmap(
        z=lost_alone(pooled.values).astype(np.float32),
        customdata=_identities(workers, pooled),
        **slowdown_scale(theme),
        hovertemplate=_hover(workers, pooled, has_hosts=has_hosts),
        hoverongaps=False,
        xgap=2 if cells <= FEW_CELLS else 0,
        ygap=2 if cells <= FEW_CELLS else 0,
        **({"texttemplate": "%{z:.0%}"} if cells <= FEW_CELLS else {}),
        **({"text": _hosts(workers, pooled)} if has_hosts else {}),
    )
    _outline(fig, [_place(workers, pooled, cell) for cell in marked], theme.outline, 2, height)
    if chosen is not None:
        _outline(fig, [_place(workers, pooled, chosen)], theme.text, 3, height)
    if dotted:
        shift = 0.4 if cells <= FEW_CELLS else 0.0  # of the figure in the cell
        places = [(column - shift, row) for column, row in (_place(workers, pooled, cell) for cell in dotted)]
        _markers(fig, places, {"symbol": "circle", "size": 7, "color": theme.outline})
    if len(boxed):
        (west, north), (east, south) = (_place(workers, pooled, int(cell)) for cell in (boxed[0], boxed[-1]))
        corners = {"x0": west - 0.5, "x1": east + 0.5, "y0": north - 0.5, "y1": south + 0.5}
        fig.add_shape(type="rect", line={"color": theme.text, "width": 3}, **corners)
    stages = np.arange(workers.stages)[:: pooled.column_block]
    fig.update_xaxes(axis(stages, TICKS, showgrid=False, constrain="domain"))
    fig.update_yaxes(axis(workers.dp_ranks[:: pooled.row_block], TICKS, down=True, showgrid=False))
    fig.update_layout(uirevision="map")  # playing the steps keeps the zoom
    return fig


def worker_over_steps(
    workers: WorkerMap, cell: int, theme: Theme, *, moments: Sequence[str], position: int | None = None
) -> go.Figure:
    """The share of each step that one worker alone costs, in front of the band that contains nine in ten of the others.

    `moments`: when each step was. `position`: of the marked step.
    """
    lost = lost_alone(workers.per_step.reshape(len(workers.steps), -1))
    own_lost, others = lost[:, cell], np.delete(lost, cell, axis=1)
    across = np.arange(len(workers.steps))
    fig = figure(theme, height=230, x="step", y="share of a step", legend=True)
    if others.size:
        filled = np.where(np.isnan(others), 0.0, others)
        low, high = np.quantile(filled, (0.05, 0.95), axis=1)
        line = {"width": 0, "color": theme.dimmed}
        fig.add_scatter(x=across, y=low, mode="lines", line=line, hoverinfo="skip", showlegend=False)
        fig.add_scatter(
            x=across,
            y=high,
            mode="lines",
            line=line,
            fill="tonexty",
            hoverinfo="skip",
            name="nine in ten of the others",
        )
    fig.add_scatter(
        **_line_of_steps(workers.steps, own_lost, moments),
        mode=markers(len(own_lost)),
        line={"color": theme.bad, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{customdata[0]}: alone costs %{y:.1%}<br>%{customdata[1]}<extra></extra>",
        name="this worker",
    )
    if position is not None:
        fig.add_vline(x=position, line={"color": theme.text, "width": 1, "dash": "dot"})
    fig.update_yaxes(tickformat=".0%")
    step_axis(fig, workers.steps)
    return fig


def _identities(workers: WorkerMap, pooled: Pooled) -> np.ndarray:
    """dp_rank, pp_rank and global rank of the worker behind each cell, [rows, columns, 3]."""
    ranks = workers.rank[pooled.row, pooled.column]
    return np.stack([workers.dp_ranks[pooled.row], pooled.column, ranks], axis=2).astype(np.int32)


def _hosts(workers: WorkerMap, pooled: Pooled) -> list[list[str]]:
    names = np.array([*workers.hosts, "host unknown"], dtype=object)
    rows: list[list[str]] = names[workers.host[pooled.row, pooled.column]].tolist()
    return rows


def _hover(workers: WorkerMap, pooled: Pooled, *, has_hosts: bool) -> str:
    size = pooled.row_block * pooled.column_block
    worst = f"the worst of {size} workers: " if size > 1 else ""
    rank = "" if (workers.rank == UNKNOWN).any() else "rank %{customdata[2]}"
    host = "%{text}" if has_hosts else ""
    if rank and host:
        host = f" on {host}"
    rank_and_host = f"{rank}{host}<br>" if rank or host else ""
    place = "dp %{customdata[0]}, stage %{customdata[1]}"
    return f"{worst}{rank_and_host}{place}<br>alone costs %{{z:.1%}} of a step<extra></extra>"


def _place(workers: WorkerMap, pooled: Pooled, cell: int) -> tuple[int, int]:
    row, stage = divmod(cell, workers.stages)
    return stage // pooled.column_block, row // pooled.row_block


def _outline(fig: go.Figure, places: Sequence[tuple[int, int]], colour: str, width: int, height: int) -> None:
    heat = fig.data[0].z
    large = min(PANEL_WIDTH_PX / heat.shape[1], (height - 70) / heat.shape[0]) >= LARGE_CELL_PX
    if not large:
        ring = {"symbol": "square-open", "size": 12 + width, "color": colour, "line": {"width": width}}
        _markers(fig, places, ring)
        return
    for column, row in places:
        box = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        fig.add_shape(type="rect", line={"color": colour, "width": width}, **box)


def _markers(fig: go.Figure, places: Sequence[tuple[float, int]], marker: dict[str, object]) -> None:
    fig.add_scatter(
        x=[column for column, _ in places],
        y=[row for _, row in places],
        mode="markers",
        marker=marker,
        hoverinfo="skip",
        showlegend=False,
    )


def step_times(by_step: pl.DataFrame, moments: Sequence[str], theme: Theme) -> go.Figure:
    """Recorded and ideal time of each step, seconds. `moments`: when each step was, one per row of `by_step`."""
    steps = by_step["step"].to_numpy()
    fig = figure(theme, height=240, x="step", y="seconds", legend=True)
    for name in ("recorded", "ideal"):
        fig.add_scatter(
            **_line_of_steps(steps, by_step[f"{name}_s"].to_numpy(), moments),
            name=name,
            mode=markers(len(steps)),
            line={"color": getattr(theme, name), "width": 2},
            marker={"size": 4},
            hovertemplate=f"step %{{customdata[0]}}: {name} %{{y:.4g}} s<br>%{{customdata[1]}}<extra></extra>",
        )
    fig.update_yaxes(rangemode="tozero")
    step_axis(fig, steps)
    fig.update_layout(hovermode="x", hoverdistance=-1)  # a click anywhere above a step is a click on that step
    return fig


def broken_line(
    steps: npt.NDArray[np.integer[Any]], across: np.ndarray, values: np.ndarray, hover: Sequence[Any]
) -> dict[str, Any]:
    """A line through the values of steps, at `across`, that breaks where some were not recorded. `hover`: of each step,
    beginning with its number.
    """
    gaps, points = gaps_before(steps), list(hover)
    for gap in gaps[::-1].tolist():
        points.insert(gap, (0, ""))  # nothing is drawn there to point at
    between = (across[gaps - 1] + across[gaps]) / 2
    return {
        "x": np.insert(across.astype(float), gaps, between),
        "y": np.insert(values.astype(float), gaps, np.nan),
        "customdata": points,
    }


def _line_of_steps(steps: npt.NDArray[np.int64], values: np.ndarray, moments: Sequence[str]) -> dict[str, Any]:
    """The line of steps side by side, with the number and the moment of each."""
    return broken_line(steps, np.arange(len(steps)), values, [*zip(steps.tolist(), moments, strict=True)])


def step_workers(workers: WorkerMap, cells: Sequence[int], theme: Theme) -> go.Figure:
    """The share of each step (across) that workers (down) alone cost. `cells`: flat cell numbers of these workers."""
    per_worker = workers.per_step.reshape(len(workers.steps), -1).T
    numbers = np.array(cells)
    column_block = max(1, -(-len(workers.steps) * len(numbers) // MOST_CELLS))
    pooled = pool(per_worker[numbers], 1, column_block)
    rows, columns = pooled.values.shape
    cell_numbers = numbers[pooled.row]
    ranks = workers.rank.ravel()[cell_numbers]
    dp_rank, stage = workers.dp_ranks[cell_numbers // workers.stages], cell_numbers % workers.stages
    customdata = np.stack([workers.steps[pooled.column], dp_rank, stage, ranks], axis=2).astype(np.int32)
    ranked = not (workers.rank == UNKNOWN).any()
    place = "dp %{customdata[1]}, stage %{customdata[2]}"
    worker_text = f"rank %{{customdata[3]}} ({place})" if ranked else place
    height = int(np.clip(18 * rows + 80, LOWEST_MAP, 640))
    fig = figure(theme, height=height, x="step", y="" if ranked else "worker")
    several = "the worst here: " if column_block > 1 else ""
    fig.add_heatmap(
        z=lost_alone(pooled.values).astype(np.float32),
        customdata=customdata,
        **slowdown_scale(theme),
        hovertemplate=f"{several}step %{{customdata[0]}}, {worker_text}: alone costs %{{z:.1%}}<extra></extra>",
        hoverongaps=False,
        xgap=1 if columns <= 100 else 0,
        ygap=1 if rows <= 60 else 0,
    )
    labels = [workers.label(cell) for cell in cells]
    fig.update_yaxes(axis(labels, 40, down=True, showgrid=False, tickfont={"size": 11}))
    step_axis(fig, workers.steps, column_block, showgrid=False)
    return fig


_ROW_PX, _HEAD_PX, _TALLEST_PX, _SERIES_PX = 24, 110, 640, 220
#: Rows and columns of a grid that have their names on the axis.
_MOST_NAMED = 24
#: Seconds from which on a timeline is in seconds instead of milliseconds.
_LONG_S = 10.0
#: Pixels of a row of many, and how many these are.
_THIN_PX, _MANY_ROWS = 3, 64


def picture(section: Picture, theme: Theme) -> go.Figure:
    """A picture of any shape."""
    match section:
        case ShareGrid():
            return grid(section, theme)
        case Series():
            return series(section, theme)
        case BarTimeline():
            return timeline(section, theme)
        case _:
            assert_never(section)


def grid(grid: ShareGrid, theme: Theme) -> go.Figure:
    """A heat map in the colours of slowdown."""
    height = min(70 + _ROW_PX * len(grid.rows), _TALLEST_PX)
    fig = figure(theme, height=height, x=grid.across, y=grid.down)
    fig.add_heatmap(
        z=np.array(grid.values),
        customdata=[[[row, column] for column in grid.columns] for row in grid.rows],
        hovertemplate=f"{grid.down} %{{customdata[0]}}, {grid.across} %{{customdata[1]}}: %{{z:+.0%}} {grid.unit}"
        "<extra></extra>",
        xgap=2,
        ygap=2,
        **slowdown_scale(theme),
    )
    fig.update_xaxes(axis(grid.columns, _MOST_NAMED, showgrid=False))
    fig.update_yaxes(axis(grid.rows, _MOST_NAMED, down=True, showgrid=False))
    return fig


def series(series: Series, theme: Theme) -> go.Figure:
    """Lines over what is usual, or stacked bars."""
    fig = figure(theme, height=_SERIES_PX, x=series.axis, y=series.unit, legend=True)
    if series.usual is not None:
        band = {"x": series.places, "mode": "lines", "line": {"color": theme.dimmed, "width": 0}, "hoverinfo": "skip"}
        fig.add_scatter(**band, y=series.usual.low, name="", showlegend=False)
        fig.add_scatter(**band, y=series.usual.high, name=series.usual.name, fill="tonexty")
    for line, colour in ((line, _colours(theme)[line.tone]) for line in series.lines):
        words = f"%{{x:.4g}}, {line.name}: %{{y:.4g}} {series.unit}<extra></extra>"
        options = {"x": series.places, "y": line.values, "name": line.name, "hovertemplate": words}
        if series.stacked:
            fig.add_bar(**options, marker={"color": colour, "line": {"width": 0}})
        else:
            fig.add_scatter(**options, mode="lines", line={"color": colour, "width": 2})
    for place in series.marks:
        fig.add_vline(x=place, line={"color": theme.text, "width": 1, "dash": "dot"})
    fig.update_layout(barmode="stack")
    return fig


def timeline(timeline: BarTimeline, theme: Theme) -> go.Figure:
    """Bars in rows."""
    row_px = _ROW_PX if len(timeline.rows) <= _MANY_ROWS else _THIN_PX
    short = max((bar.end_s for bar in timeline.bars), default=0.0) < _LONG_S
    unit, per_s = ("milliseconds", 1e3) if short else ("seconds", 1.0)
    fig = figure(theme, height=_HEAD_PX + row_px * len(timeline.rows), x=f"{unit} {timeline.axis}", legend=True)
    for number, what in enumerate(timeline.legend):
        bars = [bar for bar in timeline.bars if bar.what == number]
        if bars:
            fig.add_bar(
                orientation="h",
                base=[bar.start_s * per_s for bar in bars],
                x=[(bar.end_s - bar.start_s) * per_s for bar in bars],
                y=[bar.row for bar in bars],
                marker={"color": _colours(theme)[what.tone], "line": {"width": 0}},
                text=[bar.words for bar in bars],
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
                name=what.name,
            )
    fig.update_layout(barmode="overlay", bargap=0.2, hovermode="closest")
    fig.update_yaxes(axis(timeline.rows, len(timeline.rows), down=True, showgrid=False))
    fig.update_xaxes(rangemode="tozero")
    return fig


def _colours(theme: Theme) -> tuple[str, ...]:
    """The colour of each tone: lost time in those of slowdown."""
    return (*theme.kinds[:3], theme.slow[1], theme.slow[2], theme.slow[4], theme.slow[3])


def plan_front(optimum: Optimum, theme: Theme) -> go.Figure:
    """The fastest plans by memory or, if that is unknown, by microbatches; the plan in use; the bound."""
    plans: Sequence[FrontPlan | OptimizedPlan] = optimum.front or sorted(optimum.plans, key=_across)
    memory = optimum.now.memory_gb is not None
    fig = figure(theme, x="memory of the fullest stage, GB" if memory else "microbatches", y="step, ms", legend=True)
    bound_s = min(plan.bound_s for plan in optimum.plans)
    current = optimum.now
    ends = [_across(plan) for plan in (*plans, current)]
    for name, points, mode, colour in (
        ("fastest plans", [(_across(plan), plan.step_time_s, _label(plan)) for plan in plans], "markers", theme.ideal),
        ("plan in use", [(_across(current), current.step_time_s, _label(current))], "markers", theme.recorded),
        ("bound", [(end, bound_s, "no plan is faster") for end in (min(ends), max(ends))], "lines", theme.dimmed),
    ):
        fig.add_scatter(
            x=[x for x, _, _ in points],
            y=[step_s * 1e3 for _, step_s, _ in points],
            text=[words for _, _, words in points],
            mode=mode,
            line={"color": colour, "dash": "dash"},
            marker={"color": colour, "size": 9},
            hovertemplate="%{text}<br>%{y:.1f} ms<extra></extra>",
            name=name,
        )
    return fig


def _across(plan: FrontPlan | OptimizedPlan) -> float:
    return float(plan.microbatches) if plan.memory_gb is None else plan.memory_gb


def _label(plan: FrontPlan | OptimizedPlan) -> str:
    return f"{','.join(map(str, plan.split))}, {plan.schedule}, {plan.microbatches} microbatches"


def figure(theme: Theme, *, height: int = HEIGHT, x: str = "", y: str = "", legend: bool = False) -> go.Figure:
    """An empty figure in the theme, with titled axes."""
    lines = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor"), theme.grid) | {"automargin": True}
    return go.Figure(
        layout={
            "height": height,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "paper_bgcolor": theme.paper,
            "plot_bgcolor": theme.paper,
            "font": {"color": theme.text, "family": "system-ui, sans-serif", "size": 13},
            "hoverlabel": {"bgcolor": theme.paper, "bordercolor": theme.dimmed, "font": {"color": theme.text}},
            "xaxis": {**lines, "title": {"text": x, "standoff": 8}},
            "yaxis": {**lines, "title": {"text": y, "standoff": 8}},
            "showlegend": legend,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        }
    )


def axis(names: Sequence[Any] | npt.NDArray[Any], most: int, *, down: bool = False, **more: Any) -> dict[str, Any]:
    """An axis of positions from 0, at most `most` of them named. `down`: the first one on top."""
    ticks = list(range(0, len(names), max(1, -(-len(names) // most))))
    ends = [-0.5, len(names) - 0.5]
    return {
        "tickvals": ticks,
        "ticktext": [str(names[index]) for index in ticks],
        "range": ends[::-1] if down else ends,
        "zeroline": False,
        **more,
    }


def step_axis(fig: go.Figure, steps: npt.NDArray[np.int64], block: int = 1, **more: Any) -> None:
    """Put steps side by side in order, labelled with their numbers: traces have gaps between windows of steps.

    `block`: number of steps that share one position; the first of them is its label. The charts of a page of the
    dashboard that have steps share range and cursor (assets/chart_view.js).
    """
    ticks = steps[::block]
    fig.update_xaxes(axis(ticks, STEP_TICKS, **more))
    fig.update_layout(meta={"axis": "steps", "at": ticks.tolist()})


def markers(count: int) -> str:
    """The mode of a line through that many points: of many, only the line shows."""
    return "lines+markers" if count <= MARKED_STEPS else "lines"
