"""Figures of the page Job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tracekit.analysis.gpu.gpu_times import MemoryTimes
from tracekit.dashboards.figures.base import axis, figure
from tracekit.dashboards.figures.theme import Theme, slowdown_scale
from tracekit.report.experts import LayerLoads
from tracekit.report.metrics import Band

#: Most ranks in one figure.
_MOST_RANKS = 32
_TALLEST_PX = 640
#: Most numbers on an axis of ranks or layers.
_TICKS = 16


def expert_loads(layers: Sequence[LayerLoads], theme: Theme) -> go.Figure:
    """Load of each rank over the mean in each layer, a heat map: `experts.layers` of the report."""
    drawn = figure(theme, height=min(70 + 24 * len(layers), _TALLEST_PX), x="rank", y="layer")
    tokens = np.array([row.tokens_by_rank for row in layers])
    drawn.add_heatmap(
        z=tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1) - 1,
        hovertemplate="layer %{y}, rank %{x}: %{z:+.0%} tokens, compared with the mean<extra></extra>",
        **slowdown_scale(theme),
    )
    drawn.update_xaxes(axis(range(tokens.shape[1]), _TICKS))
    drawn.update_yaxes(axis([row.layer for row in layers], _TICKS))
    return drawn


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


def metric_band(band: Band, theme: Theme) -> go.Figure:
    """A suspect's series over its peers' band, and when the trace shows it slow: `metrics.tests` of the report."""
    drawn = figure(theme, height=220, x="seconds from the beginning of the trace", y=band.unit, legend=True)
    seconds = [time - band.from_s for time in band.time]
    peers = {"color": theme.dimmed, "width": 0}
    for name, values, fill in (("", band.low, None), ("its peers, the middle 80 %", band.high, "tonexty")):
        drawn.add_scatter(
            x=seconds, y=values, name=name, mode="lines", line=peers, fill=fill, showlegend=bool(fill), hoverinfo="skip"
        )
    drawn.add_scatter(
        x=seconds,
        y=band.own,
        name="the host",
        mode="lines",
        line={"color": theme.bad, "width": 2},
        hovertemplate=f"%{{x:.4g}} s: %{{y:.4g}} {band.unit}<extra></extra>",
    )
    for end_s in (0.0, band.to_s - band.from_s):
        drawn.add_vline(x=end_s, line={"color": theme.text, "width": 1, "dash": "dot"})
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
