"""Figures of the page What-if."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from tracekit.base.text import seconds, short
from tracekit.dashboards.figures.base import figure
from tracekit.dashboards.figures.theme import Theme, ink_on

#: Characters of a name beside its bar.
LONGEST_LABEL = 46


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
    drawn = figure(theme, height=74 + 34 * len(rows), x=f"seconds a {whole}")
    drawn.add_bar(
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
    drawn.add_vline(recorded_s, line={"color": theme.recorded, "width": 1.5, "dash": "dot"})
    drawn.update_xaxes(rangemode="tozero")
    drawn.update_yaxes(autorange="reversed", showgrid=False)
    return drawn
