"""Figures of the Workers page: the map of exact S_w, and one worker over the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from tracekit.dashboards.figures.base import axis, figure, markers, step_axis
from tracekit.dashboards.figures.theme import Theme, slowdown_scale
from tracekit.dashboards.figures.worker_map import UNKNOWN, Ints, Pooled, WorkerMap, blocks_that_fit, lost_alone, pool

#: Maps up to this many cells show each value and the gaps between cells.
FEW_CELLS = 160
#: Maps up to this many cells name the host in the hover text.
NAMED_CELLS = 4096
#: Cells at least this large (pixels of a typical panel) are outlined exactly, smaller ones by a square around them.
LARGE_CELL_PX = 14
PANEL_WIDTH_PX = 740
TALLEST_MAP_PX = 640
TICKS = 16


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
    named = bool(workers.hosts) and cells <= NAMED_CELLS
    height = int(np.clip(44 * rows + 70, 170, TALLEST_MAP_PX))
    drawn = figure(theme, height=height, x="stage", y="DP rank")
    drawn.add_heatmap(
        z=lost_alone(pooled.values).astype(np.float32),
        customdata=_who(workers, pooled),
        **slowdown_scale(theme),
        hovertemplate=_hover(workers, pooled, named=named),
        hoverongaps=False,
        xgap=2 if cells <= FEW_CELLS else 0,
        ygap=2 if cells <= FEW_CELLS else 0,
        **({"texttemplate": "%{z:.0%}"} if cells <= FEW_CELLS else {}),
        **({"text": _hosts(workers, pooled)} if named else {}),
    )
    _outline(drawn, [_place(workers, pooled, cell) for cell in marked], theme.outline, 2, height)
    if chosen is not None:
        _outline(drawn, [_place(workers, pooled, chosen)], theme.text, 3, height)
    if dotted:
        aside = 0.4 if cells <= FEW_CELLS else 0.0  # of the figure in the cell
        places = [(column - aside, row) for column, row in (_place(workers, pooled, cell) for cell in dotted)]
        _markers(drawn, places, {"symbol": "circle", "size": 7, "color": theme.outline})
    if len(boxed):
        (west, north), (east, south) = (_place(workers, pooled, int(cell)) for cell in (boxed[0], boxed[-1]))
        corners = {"x0": west - 0.5, "x1": east + 0.5, "y0": north - 0.5, "y1": south + 0.5}
        drawn.add_shape(type="rect", line={"color": theme.text, "width": 3}, **corners)
    stages = np.arange(workers.stages)[:: pooled.column_block]
    drawn.update_xaxes(axis(stages, TICKS, showgrid=False, constrain="domain"))
    drawn.update_yaxes(axis(workers.dp_ranks[:: pooled.row_block], TICKS, down=True, showgrid=False))
    drawn.update_layout(uirevision="map")  # playing the steps keeps the zoom
    return drawn


def worker_over_steps(
    workers: WorkerMap, cell: int, theme: Theme, *, moments: Sequence[str], position: int | None = None
) -> go.Figure:
    """What one worker alone costs of each step, in front of the band that contains nine in ten of the others.

    `moments`: when each step was. `position`: of the marked step.
    """
    everyone = lost_alone(workers.per_step.reshape(len(workers.steps), -1))
    own, others = everyone[:, cell], np.delete(everyone, cell, axis=1)
    across = np.arange(len(workers.steps))
    drawn = figure(theme, height=230, x="step", y="share of a step", legend=True)
    if others.size:
        filled = np.where(np.isnan(others), 0.0, others)
        low, high = np.quantile(filled, (0.05, 0.95), axis=1)
        line = {"width": 0, "color": theme.dimmed}
        drawn.add_scatter(x=across, y=low, mode="lines", line=line, hoverinfo="skip", showlegend=False)
        drawn.add_scatter(
            x=across,
            y=high,
            mode="lines",
            line=line,
            fill="tonexty",
            hoverinfo="skip",
            name="nine in ten of the others",
        )
    drawn.add_scatter(
        x=across,
        y=own,
        mode=markers(len(own)),
        line={"color": theme.bad, "width": 2},
        marker={"size": 5},
        customdata=list(zip(workers.steps.tolist(), moments, strict=True)),
        hovertemplate="step %{customdata[0]}: alone costs %{y:.1%}<br>%{customdata[1]}<extra></extra>",
        name="this worker",
    )
    if position is not None:
        drawn.add_vline(x=position, line={"color": theme.text, "width": 1, "dash": "dot"})
    drawn.update_yaxes(tickformat=".0%")
    step_axis(drawn, workers.steps)
    return drawn


def _who(workers: WorkerMap, pooled: Pooled) -> np.ndarray:
    """dp_rank, pp_rank and global rank of the worker behind each cell, [rows, columns, 3]."""
    ranks = workers.rank[pooled.row, pooled.column]
    return np.stack([workers.dp_ranks[pooled.row], pooled.column, ranks], axis=2).astype(np.int32)


def _hosts(workers: WorkerMap, pooled: Pooled) -> list[list[str]]:
    names = np.array([*workers.hosts, "host unknown"], dtype=object)
    rows: list[list[str]] = names[workers.host[pooled.row, pooled.column]].tolist()
    return rows


def _hover(workers: WorkerMap, pooled: Pooled, *, named: bool) -> str:
    size = pooled.row_block * pooled.column_block
    worst = f"the worst of {size} workers: " if size > 1 else ""
    rank = "" if (workers.rank == UNKNOWN).any() else "rank %{customdata[2]}"
    host = "%{text}" if named else ""
    if rank and host:
        host = f" on {host}"
    who = f"{rank}{host}<br>" if rank or host else ""
    place = "dp %{customdata[0]}, stage %{customdata[1]}"
    return f"{worst}{who}{place}<br>alone costs %{{z:.1%}} of a step<extra></extra>"


def _place(workers: WorkerMap, pooled: Pooled, cell: int) -> tuple[int, int]:
    """Column and row of a flat cell number on the pooled map."""
    row, stage = divmod(cell, workers.stages)
    return stage // pooled.column_block, row // pooled.row_block


def _outline(drawn: go.Figure, places: Sequence[tuple[int, int]], colour: str, width: int, height: int) -> None:
    heat = drawn.data[0].z
    large = min(PANEL_WIDTH_PX / heat.shape[1], (height - 70) / heat.shape[0]) >= LARGE_CELL_PX
    if not large:
        ring = {"symbol": "square-open", "size": 12 + width, "color": colour, "line": {"width": width}}
        _markers(drawn, places, ring)
        return
    for column, row in places:
        box = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        drawn.add_shape(type="rect", line={"color": colour, "width": width}, **box)


def _markers(drawn: go.Figure, places: Sequence[tuple[float, int]], marker: dict[str, object]) -> None:
    drawn.add_scatter(
        x=[column for column, _ in places],
        y=[row for _, row in places],
        mode="markers",
        marker=marker,
        hoverinfo="skip",
        showlegend=False,
    )
