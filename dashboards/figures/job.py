"""Figures of the page Job."""

from __future__ import annotations

import plotly.graph_objects as go

from tracekit.dashboards.figures.base import figure
from tracekit.dashboards.ui.theme import Theme


def step_times(recorded_s: float, original_s: float, ideal_s: float, theme: Theme) -> go.Figure:
    """The three mean step times as bars."""
    drawn = figure(theme, height=150, x="seconds a step")
    drawn.add_bar(
        y=["ideal", "original", "recorded"],
        x=[ideal_s, original_s, recorded_s],
        orientation="h",
        marker={"color": [theme.ideal, theme.original, theme.recorded]},
        hovertemplate="%{y}: %{x:.4g} s<extra></extra>",
    )
    drawn.update_xaxes(rangemode="tozero")
    return drawn
