"""Plotly figures that only pages draw: two jobs side by side, what-if answers, GPUs, the jobs of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.base.text import seconds, short
from tracekit.dashboards.figures.charts import broken_line, figure, markers
from tracekit.dashboards.theme import Theme, ink_on
from tracekit.report.compare import CostChange, Side
from tracekit.report.hardware import MemoryTimes
from tracekit.report.tables import BarTimeline, LegendEntry, Series, SeriesLine, TimelineBar

#: Sets of ops that cost less than this share of the costliest one are not drawn.
LEAST_SHARE = 0.01
#: Characters of a name next to its bar.
LONGEST_LABEL = 46


def _side_colours(theme: Theme) -> dict[str, str]:
    return {"before": theme.dimmed, "after": theme.changed}


def costs(changes: Sequence[CostChange], theme: Theme, *, y: str) -> go.Figure:
    """The cost of each set of ops alone per step, before and after, as pairs of bars; negligible costs are only in the
    table.
    """
    sizes = [max(abs(change.before_s or 0.0), abs(change.after_s or 0.0)) for change in changes]
    changes = [
        change for change, size in zip(changes, sizes, strict=True) if size >= LEAST_SHARE * max(sizes, default=0.0)
    ]
    fig = figure(theme, height=90 + 34 * max(len(changes), 2), x="seconds a step that it costs alone", y=y, legend=True)
    for name, colour in _side_colours(theme).items():
        fig.add_bar(
            y=[change.name for change in changes],
            x=[getattr(change, f"{name}_s") for change in changes],
            orientation="h",
            name=name,
            marker={"color": colour},
            hovertemplate="%{y}, " + name + ": %{x:.3g} s<extra></extra>",
        )
    fig.update_layout(barmode="group", bargap=0.3)
    fig.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return fig


def step_series(before: Side, after: Side, theme: Theme, *, split: bool) -> go.Figure:
    """Recorded step times with their means. `split`: both sides on one axis of steps, else each from its first step."""
    fig = figure(theme, x="step" if split else "steps from the first one traced", y="recorded seconds", legend=True)
    for (name, colour), side in zip(_side_colours(theme).items(), (before, after), strict=True):
        positions = side.steps if split else np.arange(len(side.steps))
        fig.add_scatter(
            **broken_line(side.steps, positions, side.recorded_s, [(step,) for step in side.steps.tolist()]),
            name=name,
            mode=markers(len(positions)),
            line={"color": colour, "width": 1.5},
            marker={"size": 5},
            hovertemplate="step %{customdata[0]}: %{y:.4g} s<extra>" + name + "</extra>",
        )
        fig.add_scatter(
            x=positions[[0, -1]],
            y=[side.recorded_s.mean()] * 2,
            mode="lines",
            line={"color": colour, "width": 2, "dash": "dash"},
            showlegend=False,
            hovertemplate="mean " + name + ": %{y:.4g} s<extra></extra>",
        )
    return fig


def distributions(before: Side, after: Side, theme: Theme) -> go.Figure:
    """The share of steps that took at most x, on either side."""
    fig = figure(theme, x="recorded seconds of a step", y="share of the steps", legend=True)
    for (name, colour), side in zip(_side_colours(theme).items(), (before, after), strict=True):
        values = np.sort(side.recorded_s)
        fig.add_scatter(
            x=np.concatenate([values[:1], values]),
            y=np.arange(len(values) + 1) / len(values),
            name=name,
            mode="lines",
            line={"shape": "hv", "color": colour, "width": 2},
            hovertemplate="%{y:.0%} of the steps took at most %{x:.4g} s<extra>" + name + "</extra>",
        )
    fig.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return fig


@dataclass(frozen=True, slots=True)
class StepBar:
    """One scenario: its number and name, its step time and the error of that, seconds."""

    label: str
    step_time_s: float
    error_s: float


def scenario_times(recorded_s: float, bars: Sequence[StepBar], theme: Theme, whole: str) -> go.Figure:
    """Times of a `whole`, a step or a recording, in scenarios and as the job ran."""
    rows = [StepBar("as it ran", recorded_s, 0.0), *bars]
    colours = [theme.recorded, *[theme.changed] * len(bars)]
    fig = figure(theme, height=74 + 34 * len(rows), x=f"seconds a {whole}")
    fig.add_bar(
        y=[short(bar.label, LONGEST_LABEL) for bar in rows],
        x=[bar.step_time_s for bar in rows],
        error_x={"type": "data", "array": [bar.error_s for bar in rows], "color": theme.text, "thickness": 1.2},
        orientation="h",
        marker={"color": colours},
        text=[
            seconds(bar.step_time_s) + (f" ({bar.step_time_s / recorded_s - 1:+.1%})" if position else "")
            for position, bar in enumerate(rows)
        ],
        textposition="inside",
        insidetextanchor="start",
        textfont={"color": [ink_on(colour) for colour in colours]},
        hovertemplate="%{y}: %{x:.4g} s<extra></extra>",
    )
    fig.add_vline(recorded_s, line={"color": theme.recorded, "width": 1.5, "dash": "dot"})
    fig.update_xaxes(rangemode="tozero")
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig


#: Most ranks in one figure.
_MOST_RANKS = 32
#: What a GPU did in turn: its words, its seconds in `by_rank` of the report, and its tone.
_GPU_PARTS = (
    ("before its first op", "before_first_s", 3),
    ("computing", "compute_s", 0),
    ("exposed communication", "exposed_communication_s", 4),
    ("idle", "idle_s", 5),
)


def memory_over_time(memory: MemoryTimes) -> Series:
    """Memory that PyTorch has given out on a GPU: `gpu.memory` of the report."""
    given_out = SeriesLine("given out", 0, [point.bytes / 1e9 for point in memory.points])
    return Series("Memory over time", "seconds", "GB", [point.seconds for point in memory.points], [given_out])


def rank_times(ranks: Sequence[Mapping[str, Any]]) -> BarTimeline:
    """The GPU time of each rank, one part after the other: `by_rank` of the report on a recording, with
    `before_first_s` if that is known; of many ranks, the costliest.
    """
    costliest = sorted(sorted(ranks, key=lambda row: -row["sole_delay_s"])[:_MOST_RANKS], key=lambda row: row["rank"])
    bars = []
    for number, row in enumerate(costliest):
        end_s = 0.0
        for what, (words, key, _) in enumerate(_GPU_PARTS):
            spent_s = row.get(key, 0.0)
            if spent_s > 0:
                hover_text = f"rank {row['rank']}, {words}: {seconds(spent_s)}"
                bars.append(TimelineBar(number, what, end_s, end_s + spent_s, hover_text))
            end_s += spent_s
    names = [f"rank {row['rank']}" for row in costliest]
    legend = [LegendEntry(words, tone) for words, _, tone in _GPU_PARTS]
    return BarTimeline("What each GPU did", "of the recording", names, legend, bars, [])


def distribution(curves: pl.DataFrame, theme: Theme) -> go.Figure:
    """The share of jobs, and of GPU-hours, that lose at most a given share."""
    fig = figure(theme, height=280, x="share lost", y="share with at most that", legend=True)
    for column, name, colour in (
        ("waste_jobs", "of jobs", theme.text),
        ("waste_hours", "of GPU-hours", theme.dimmed),
    ):
        fig.add_scatter(
            x=curves[column].to_list(),
            y=curves["quantile"].to_list(),
            name=name,
            mode="lines",
            line={"shape": "vh", "color": colour, "width": 2},
        )
    fig.update_xaxes(tickformat=".0%")
    fig.update_yaxes(tickformat=".0%", range=[0, 1.01])
    return fig
