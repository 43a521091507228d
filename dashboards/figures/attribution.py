"""Figures of the page Attribution: the estimates side by side, and the correlation of forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from tracekit.dashboards.ui.sentences import SAME_MICROBATCHES
from tracekit.show.figures.base import figure
from tracekit.show.figures.theme import Theme

#: More sets than this are drawn as lines.
MOST_BARS = 64


@dataclass(frozen=True, slots=True)
class Estimates:
    """The cost of sets of ops, in seconds of the mean step time; None where it was not computed.

    `names`: of the sets; `selections`: the same in the syntax of the what-if page. `alone_s`: (S alone - 1) x T(ideal),
    `fixed_s`: T(original) - T(original with the set idealised), `late_s`: what its launch delays add to T(original).
    """

    names: Sequence[str]
    selections: Sequence[str]
    alone_s: Sequence[float | None]
    fixed_s: Sequence[float | None]
    late_s: Sequence[float | None]


def estimates(found: Estimates, theme: Theme, *, x: str, lying: bool = False) -> go.Figure:
    """Bars of the three estimates for each set. `lying`: horizontal, for long names; `x`: the axis title."""
    height = max(180, 90 + 42 * len(found.names)) if lying else 300
    names_on, costs_on = ("y", "x") if lying else ("x", "y")
    drawn = figure(theme, height=height, legend=True, **{costs_on: "seconds a step", names_on: "" if lying else x})
    for name, values, colour in (
        ("alone", found.alone_s, theme.accent),
        ("if ideal", found.fixed_s, theme.ideal),
        ("launch delays", found.late_s, theme.dimmed),
    ):
        if all(value is None for value in values):
            continue
        hover = f"{x} %{{{names_on}}}, {name}: %{{{costs_on}:.4g}} s a step<extra></extra>"
        common: dict[str, Any] = {"name": name, "customdata": list(found.selections), "hovertemplate": hover}
        common |= {names_on: list(found.names), costs_on: list(values)}
        if lying or len(found.names) <= MOST_BARS:
            drawn.add_bar(orientation="h" if lying else "v", marker_color=colour, **common)
        else:
            drawn.add_scatter(mode="lines", line={"shape": "hvh", "width": 1.5, "color": colour}, **common)
    drawn.update_layout(bargap=0.3, bargroupgap=0.08, legend={"traceorder": "normal"})
    names = drawn.update_yaxes if lying else drawn.update_xaxes
    names(type="category", nticks=min(len(found.names), 24) if not lying else len(found.names))
    if lying:
        drawn.update_yaxes(autorange="reversed")
    return drawn


def correlations(stages: Sequence[int], values: Sequence[float | None], theme: Theme) -> go.Figure:
    """Correlation of forward and backward durations of the same microbatch, by stage."""
    drawn = figure(theme, height=300, x="stage", y="correlation r")
    drawn.add_bar(
        x=[str(stage) for stage in stages],
        y=list(values),
        marker_color=[
            theme.accent if value is not None and value >= SAME_MICROBATCHES else theme.dimmed for value in values
        ],
        hovertemplate="stage %{x}: r = %{y:.3f}<extra></extra>",
    )
    drawn.add_hline(y=SAME_MICROBATCHES, line={"color": theme.text, "width": 1, "dash": "dot"})
    drawn.update_xaxes(type="category")
    drawn.update_yaxes(range=[min(0.0, *(value for value in values if value is not None), 0.0) - 0.02, 1.05])
    return drawn
