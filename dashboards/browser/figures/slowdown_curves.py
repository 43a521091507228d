"""The figure of the page Fleet: distribution of what is lost, over jobs and over GPU-hours."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from tracekit.dashboards.figures.base import figure
from tracekit.dashboards.figures.theme import Theme


def distribution(curves: pl.DataFrame, theme: Theme) -> go.Figure:
    """The share of jobs, and of GPU-hours, that lose at most a given share."""
    drawn = figure(theme, height=280, x="share lost", y="share with at most that", legend=True)
    for column, name, colour in (
        ("waste_jobs", "of jobs", theme.text),
        ("waste_hours", "of GPU-hours", theme.dimmed),
    ):
        drawn.add_scatter(
            x=curves[column].to_list(),
            y=curves["quantile"].to_list(),
            name=name,
            mode="lines",
            line={"shape": "vh", "color": colour, "width": 2},
        )
    drawn.update_xaxes(tickformat=".0%")
    drawn.update_yaxes(tickformat=".0%", range=[0, 1.01])
    return drawn
