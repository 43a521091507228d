"""Figures of steps. All share one axis: the steps side by side in order, labelled with their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.dashboards.figures.base import axis, figure, markers, step_axis
from tracekit.dashboards.figures.theme import Theme, slowdown_scale
from tracekit.dashboards.figures.worker_map import MOST_CELLS, UNKNOWN, WorkerMap, lost_alone, pool

#: Height of the map with the fewest rows: the title of its axis needs that much.
LOWEST_MAP = 210


def step_times(by_step: pl.DataFrame, moments: Sequence[str], theme: Theme) -> go.Figure:
    """Recorded and ideal time of each step, seconds. `moments`: when each step was, one per row of `by_step`."""
    steps = by_step["step"].to_numpy()
    drawn = figure(theme, height=240, x="step", y="seconds", legend=True)
    customdata = list(zip(steps.tolist(), moments, strict=True))
    for name in ("recorded", "ideal"):
        drawn.add_scatter(
            x=np.arange(len(steps)),
            y=by_step[f"{name}_s"].to_numpy(),
            name=name,
            mode=markers(len(steps)),
            line={"color": getattr(theme, name), "width": 2},
            marker={"size": 4},
            customdata=customdata,
            hovertemplate=f"step %{{customdata[0]}}: {name} %{{y:.4g}} s<br>%{{customdata[1]}}<extra></extra>",
        )
    drawn.update_yaxes(rangemode="tozero")
    step_axis(drawn, steps)
    drawn.update_layout(hovermode="x", hoverdistance=-1)  # a click anywhere above a step is a click on that step
    return drawn


def step_workers(workers: WorkerMap, cells: Sequence[int], theme: Theme) -> go.Figure:
    """What workers (down) alone cost of each step (across). `cells`: the workers to show, by flat cell number."""
    everyone = workers.per_step.reshape(len(workers.steps), -1).T
    shown = np.array(cells)
    column_block = max(1, -(-len(workers.steps) * len(shown) // MOST_CELLS))
    pooled = pool(everyone[shown], 1, column_block)
    rows, columns = pooled.values.shape
    behind = shown[pooled.row]
    ranks = workers.rank.ravel()[behind]
    dp_rank, stage = workers.dp_ranks[behind // workers.stages], behind % workers.stages
    customdata = np.stack([workers.steps[pooled.column], dp_rank, stage, ranks], axis=2).astype(np.int32)
    ranked = not (workers.rank == UNKNOWN).any()
    place = "dp %{customdata[1]}, stage %{customdata[2]}"
    who = f"rank %{{customdata[3]}} ({place})" if ranked else place
    height = int(np.clip(18 * rows + 80, LOWEST_MAP, 640))
    drawn = figure(theme, height=height, x="step", y="" if ranked else "worker")
    several = "the worst here: " if column_block > 1 else ""
    drawn.add_heatmap(
        z=lost_alone(pooled.values).astype(np.float32),
        customdata=customdata,
        **slowdown_scale(theme),
        hovertemplate=f"{several}step %{{customdata[0]}}, {who}: alone costs %{{z:.1%}}<extra></extra>",
        hoverongaps=False,
        xgap=1 if columns <= 100 else 0,
        ygap=1 if rows <= 60 else 0,
    )
    labels = [workers.label(cell) for cell in cells]
    drawn.update_yaxes(axis(labels, 40, down=True, showgrid=False, tickfont={"size": 11}))
    step_axis(drawn, workers.steps, column_block, showgrid=False)
    return drawn
