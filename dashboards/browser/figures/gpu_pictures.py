"""Figures of the page Job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from tracekit.analysis.gpu.gpu_times import MemoryTimes
from tracekit.dashboards.figures.base import figure
from tracekit.dashboards.figures.theme import Theme

#: Most ranks in one figure.
_MOST_RANKS = 32


def memory_over_time(memory: MemoryTimes, theme: Theme) -> go.Figure:
    """Memory that PyTorch has given out on a GPU: `gpu.memory` of the report."""
    drawn = figure(theme, height=220, x="seconds", y="GB")
    drawn.add_scatter(
        x=[point.seconds for point in memory.points],
        y=[point.bytes / 1e9 for point in memory.points],
        mode="lines",
        line={"color": theme.dimmed, "shape": "hv"},
        hovertemplate="%{x:.4g} s: %{y:.3g} GB<extra></extra>",
    )
    drawn.update_yaxes(rangemode="tozero")
    return drawn


def rank_times(ranks: Sequence[Mapping[str, Any]], theme: Theme) -> go.Figure:
    """GPU time of each rank as stacked bars: `by_rank` of the report on a recording; of many, the costliest."""
    shown = sorted(sorted(ranks, key=lambda row: -row["sole_delay_s"])[:_MOST_RANKS], key=lambda row: -row["rank"])
    short = max((row["compute_s"] + row["exposed_communication_s"] for row in shown), default=0.0) < 1
    unit, each_s = ("milliseconds", 1e-3) if short else ("seconds", 1.0)
    drawn = figure(theme, height=110 + 24 * len(shown), x=unit)
    parts = (  # lost time in the colours of slowdown
        *([("before its first op", "before_first_s", theme.slow[1])] if "before_first_s" in ranks[0] else []),
        ("computing", "compute_s", theme.dimmed),
        ("exposed communication", "exposed_communication_s", theme.slow[2]),
        ("idle", "idle_s", theme.slow[4]),
    )
    for name, key, color in parts:
        drawn.add_bar(
            y=[f"rank {row['rank']}" for row in shown],
            x=[row[key] / each_s for row in shown],
            name=name,
            orientation="h",
            marker={"color": color},
            hovertemplate=f"%{{y}}, {name}: %{{x:.4g}} {unit}<extra></extra>",
        )
    drawn.update_layout(barmode="stack", showlegend=True, legend={"orientation": "h", "y": 1.15})
    drawn.update_xaxes(rangemode="tozero")
    return drawn
