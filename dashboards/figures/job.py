"""Figures of the page Job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from tracekit.show.figures.base import figure
from tracekit.show.figures.theme import Theme

#: Most ranks in one figure.
_MOST_RANKS = 32


def rank_times(ranks: Sequence[Mapping[str, Any]], theme: Theme) -> go.Figure:
    """GPU time of each rank as stacked bars: `by_rank` of the report on a recording; of many, the costliest."""
    shown = sorted(sorted(ranks, key=lambda row: -row["sole_delay_s"])[:_MOST_RANKS], key=lambda row: -row["rank"])
    drawn = figure(theme, height=110 + 24 * len(shown), x="seconds")
    parts = (  # lost time in the colours of slowdown
        *([("before its first op", "before_first_s", theme.slow[1])] if "before_first_s" in ranks[0] else []),
        ("computing", "compute_s", theme.dimmed),
        ("exposed communication", "exposed_communication_s", theme.slow[2]),
        ("idle", "idle_s", theme.slow[4]),
    )
    for name, key, color in parts:
        drawn.add_bar(
            y=[f"rank {row['rank']}" for row in shown],
            x=[row[key] for row in shown],
            name=name,
            orientation="h",
            marker={"color": color},
            hovertemplate=f"%{{y}}, {name}: %{{x:.4g}} s<extra></extra>",
        )
    drawn.update_layout(barmode="stack", showlegend=True, legend={"orientation": "h", "y": 1.15})
    drawn.update_xaxes(rangemode="tozero")
    return drawn
