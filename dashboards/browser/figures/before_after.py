"""Figures of the page Compare: grey is before, purple is after; the maps have the scale of slowdown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.dashboards.figures.base import figure, markers
from tracekit.dashboards.figures.theme import Theme
from tracekit.dashboards.figures.worker_charts import worker_heatmap
from tracekit.dashboards.figures.worker_map import UNKNOWN, Ints, WorkerMap
from tracekit.report.compare import CostChange, Side

#: Sets of ops that cost less than this share of the costliest one are not drawn.
LEAST_SHARE = 0.01


def costs(changes: Sequence[CostChange], theme: Theme, *, y: str) -> go.Figure:
    """The cost of each set of ops alone per step, before and after, as pairs of bars; negligible costs are only in the
    table.
    """
    sizes = [max(abs(change.before_s or 0.0), abs(change.after_s or 0.0)) for change in changes]
    changes = [
        change for change, size in zip(changes, sizes, strict=True) if size >= LEAST_SHARE * max(sizes, default=0.0)
    ]
    drawn = figure(
        theme, height=90 + 34 * max(len(changes), 2), x="seconds a step that it costs alone", y=y, legend=True
    )
    for name, colour, values in (
        ("before", theme.dimmed, [change.before_s for change in changes]),
        ("after", theme.changed, [change.after_s for change in changes]),
    ):
        drawn.add_bar(
            y=[change.name for change in changes],
            x=values,
            orientation="h",
            name=name,
            marker={"color": colour},
            hovertemplate="%{y}, " + name + ": %{x:.3g} s<extra></extra>",
        )
    drawn.update_layout(barmode="group", bargap=0.3)
    drawn.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return drawn


def step_series(before: Side, after: Side, theme: Theme, *, split: bool) -> go.Figure:
    """Recorded step times with their means. `split`: both sides on one axis of steps, else each from its first step."""
    drawn = figure(theme, x="step" if split else "steps from the first one traced", y="recorded seconds", legend=True)
    for name, colour, side in (("before", theme.dimmed, before), ("after", theme.changed, after)):
        positions = side.steps if split else np.arange(len(side.steps))
        drawn.add_scatter(
            x=positions,
            y=side.recorded_s,
            customdata=side.steps,
            name=name,
            mode=markers(len(positions)),
            line={"color": colour, "width": 1.5},
            marker={"size": 5},
            hovertemplate="step %{customdata}: %{y:.4g} s<extra>" + name + "</extra>",
        )
        drawn.add_scatter(
            x=positions[[0, -1]],
            y=[side.recorded_s.mean()] * 2,
            mode="lines",
            line={"color": colour, "width": 2, "dash": "dash"},
            showlegend=False,
            hovertemplate="mean " + name + ": %{y:.4g} s<extra></extra>",
        )
    return drawn


def distributions(before: Side, after: Side, theme: Theme) -> go.Figure:
    """The share of steps that took at most x, on either side."""
    drawn = figure(theme, x="recorded seconds of a step", y="share of the steps", legend=True)
    for name, colour, side in (("before", theme.dimmed, before), ("after", theme.changed, after)):
        values = np.sort(side.recorded_s)
        drawn.add_scatter(
            x=np.concatenate([values[:1], values]),
            y=np.arange(len(values) + 1) / len(values),
            name=name,
            mode="lines",
            line={"shape": "hv", "color": colour, "width": 2},
            hovertemplate="%{y:.0%} of the steps took at most %{x:.4g} s<extra>" + name + "</extra>",
        )
    drawn.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return drawn


def worker_map(side: Side, ranks: Ints, theme: Theme) -> go.Figure:
    """Exact S_w of each worker, DP ranks down, stages across.

    `ranks`: the global rank of each, shaped as `side.workers`; UNKNOWN where the trace lacks it.
    """
    nowhere, per_step = np.full(ranks.shape, UNKNOWN), side.workers[None]
    worker_map_of_side = WorkerMap(
        pl.DataFrame(), side.dp_ranks, side.workers, ranks, nowhere, (), side.steps[:0], per_step
    )
    return worker_heatmap(worker_map_of_side, None, theme)
