"""Figures of the page Fleet."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.figures.base import figure
from tracekit.figures.theme import Theme


def waste_cdf(waste: pl.Series, theme: Theme) -> go.Figure:
    """The share of jobs that waste at most x of their GPU time."""
    values = np.sort(np.clip(waste.drop_nulls().to_numpy(), 0, None))
    drawn = figure(theme, x="share of the GPU time lost", y="share of jobs")
    drawn.add_scatter(
        x=[0, *values],
        y=np.arange(len(values) + 1) / max(len(values), 1),
        line={"shape": "hv", "color": theme.recorded, "width": 2},
        hovertemplate="%{y:.0%} of the jobs lose at most %{x:.1%}<extra></extra>",
    )
    drawn.update_xaxes(tickformat=".0%", rangemode="tozero")
    drawn.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return drawn
