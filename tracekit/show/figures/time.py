"""Figures of the Time page. All share one axis: the steps side by side in order, labelled with their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.show.figures.base import axis, figure, markers, step_axis
from tracekit.show.figures.theme import Theme, slowdown_scale
from tracekit.show.figures.worker_map import MOST_CELLS, UNKNOWN, Floats, Ints, WorkerMap, pool

#: A job with at least this S is straggling.
STRAGGLING = 1.1
#: Number of rows in the map of steps and workers if all workers are pooled.
POOLED_ROWS = 128
#: Height of the map with the fewest rows: the title of its axis needs that much.
LOWEST_MAP = 210


def step_slowdown(by_step: pl.DataFrame, pattern: dict[str, Any], moments: Sequence[str], theme: Theme) -> go.Figure:
    """S of each step with the pattern: the change and the levels around it, slow steps, the period.

    `moments`: when each step was, one per row of `by_step`.
    """
    steps, slowdown = by_step["step"].to_numpy(), by_step["slowdown"].to_numpy()
    drawn = figure(theme, height=260, x="step", y="slowdown")
    drawn.add_scatter(
        x=np.arange(len(steps)),
        y=slowdown,
        mode=markers(len(steps)),
        line={"color": theme.accent, "width": 2},
        marker={"size": 5},
        customdata=list(zip(steps.tolist(), moments, strict=True)),
        hovertemplate="step %{customdata[0]}: slowdown %{y:.3f}<br>%{customdata[1]}<extra></extra>",
    )
    drawn.add_hline(
        y=STRAGGLING,
        line={"color": theme.dimmed, "width": 1, "dash": "dot"},
        annotation={"text": "straggling", "font": {"color": theme.dimmed, "size": 11}},
    )
    _mark_slow(drawn, steps, slowdown, pattern["slow_steps"], theme)
    if pattern["since_step"] is not None:
        _mark_change(drawn, int(np.searchsorted(steps, pattern["since_step"])), steps, slowdown, theme)
    drawn.update_xaxes(step_axis(steps))
    low, high = min(1.0, float(slowdown.min())), max(STRAGGLING, float(slowdown.max()))
    drawn.update_yaxes(range=[low - 0.02, high + 0.08 * (high - low) + 0.01])
    drawn.update_layout(hovermode="x", hoverdistance=-1)
    return drawn


def step_times(by_step: pl.DataFrame, moments: Sequence[str], theme: Theme) -> go.Figure:
    """Recorded, original and ideal time of each step, seconds."""
    steps = by_step["step"].to_numpy()
    drawn = figure(theme, height=240, x="step", y="seconds", legend=True)
    customdata = list(zip(steps.tolist(), moments, strict=True))
    for name in ("recorded", "original", "ideal"):
        drawn.add_scatter(
            x=np.arange(len(steps)),
            y=by_step[f"{name}_s"].to_numpy(),
            name=name,
            mode=markers(len(steps)),
            line={"color": getattr(theme, name), "width": 2, "dash": "dot" if name == "original" else "solid"},
            marker={"size": 4},
            customdata=customdata,
            hovertemplate=f"step %{{customdata[0]}}: {name} %{{y:.4g}} s<br>%{{customdata[1]}}<extra></extra>",
        )
    drawn.update_yaxes(rangemode="tozero")
    drawn.update_xaxes(step_axis(steps))
    drawn.update_layout(hovermode="x", hoverdistance=-1)  # a click anywhere above a step is a click on that step
    return drawn


def step_workers(found: WorkerMap, cells: Sequence[int] | None, theme: Theme) -> go.Figure:
    """S_w of workers (down) in each step (across). `cells`: the workers to show, by flat cell number; None: all,
    pooled.
    """
    everyone = found.per_step.reshape(len(found.steps), -1).T
    shown = np.arange(len(everyone)) if cells is None else np.array(cells)
    row_block = max(1, -(-len(shown) // POOLED_ROWS)) if cells is None else 1
    column_block = max(1, -(-len(found.steps) * -(-len(shown) // row_block) // MOST_CELLS))
    pooled = pool(everyone[shown], row_block, column_block)
    rows, columns = pooled.values.shape
    behind = shown[pooled.row]
    ranks = found.rank.ravel()[behind]
    customdata = np.stack(
        [found.steps[pooled.column], found.dp_ranks[behind // found.stages], behind % found.stages, ranks], axis=2
    ).astype(np.int32)
    known = not (found.rank == UNKNOWN).any()
    place = "dp %{customdata[1]}, stage %{customdata[2]}"
    who = f"rank %{{customdata[3]}} ({place})" if known else place
    height = int(np.clip(18 * rows + 80, LOWEST_MAP, 640))
    drawn = figure(theme, height=height, x="step", y="" if known else "worker")
    several = "the worst here: " if row_block * column_block > 1 else ""
    drawn.add_heatmap(
        z=pooled.values,
        customdata=customdata,
        **slowdown_scale(theme),
        hovertemplate=f"{several}step %{{customdata[0]}}, {who}: slowdown alone %{{z:.3f}}<extra></extra>",
        hoverongaps=False,
        xgap=1 if columns <= 100 else 0,
        ygap=1 if rows <= 60 else 0,
    )
    labels = [found.label(int(shown[at * row_block])) for at in range(rows)]
    drawn.update_yaxes(axis(labels, 40, down=True, showgrid=False, tickfont={"size": 11}))
    drawn.update_xaxes(step_axis(found.steps, column_block, showgrid=False))
    return drawn


def _mark_slow(drawn: go.Figure, steps: Ints, slowdown: Floats, slow_steps: Sequence[int], theme: Theme) -> None:
    """Rings around the steps that stand out."""
    at = np.flatnonzero(np.isin(steps, slow_steps))
    if at.size:
        ring = {"symbol": "circle-open", "size": 12, "color": theme.outline, "line": {"width": 2}}
        drawn.add_scatter(x=at, y=slowdown[at], mode="markers", marker=ring, hoverinfo="skip")


def _mark_change(drawn: go.Figure, at: int, steps: Ints, slowdown: Floats, theme: Theme) -> None:
    """A line where the slowdown changed, and the mean level on either side."""
    drawn.add_vline(
        x=at - 0.5,
        line={"color": theme.outline, "width": 2},
        annotation={"text": f"since step {steps[at]}", "xshift": 4, "font": {"color": theme.outline}},
    )
    for first, last in ((0, at), (at, len(steps))):
        level = float(slowdown[first:last].mean())
        line = {"color": theme.text, "width": 1, "dash": "dash"}
        drawn.add_shape(type="line", x0=first - 0.5, x1=last - 0.5, y0=level, y1=level, line=line)
