"""The pictures of a report as Plotly figures: grids, series and timelines.

In: a `Picture` of a report. Out: a figure in a theme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import numpy as np
import plotly.graph_objects as go

from tracekit.dashboards.figures.base import axis, figure
from tracekit.dashboards.figures.theme import slowdown_scale
from tracekit.report.section import BarTimeline, Picture, Series, ShareGrid

if TYPE_CHECKING:
    from tracekit.dashboards.figures.theme import Theme

_ROW_PX, _HEAD_PX, _TALLEST_PX, _SERIES_PX = 24, 110, 640, 220
#: Rows and columns of a grid that have their names on the axis.
_MOST_NAMED = 24
#: Pixels of a row of many, and how many these are.
_THIN_PX, _MANY_ROWS = 3, 64


def picture(drawn: Picture, theme: Theme) -> go.Figure:
    """A picture of any shape."""
    match drawn:
        case ShareGrid():
            return grid(drawn, theme)
        case Series():
            return series(drawn, theme)
        case BarTimeline():
            return timeline(drawn, theme)
        case _:
            assert_never(drawn)


def grid(drawn: ShareGrid, theme: Theme) -> go.Figure:
    """A heat map in the colours of slowdown."""
    height = min(70 + _ROW_PX * len(drawn.rows), _TALLEST_PX)
    shown = figure(theme, height=height, x=drawn.across, y=drawn.down)
    shown.add_heatmap(
        z=np.array(drawn.values),
        customdata=[[[row, column] for column in drawn.columns] for row in drawn.rows],
        hovertemplate=f"{drawn.down} %{{customdata[0]}}, {drawn.across} %{{customdata[1]}}: %{{z:+.0%}} {drawn.unit}"
        "<extra></extra>",
        xgap=2,
        ygap=2,
        **slowdown_scale(theme),
    )
    shown.update_xaxes(axis(drawn.columns, _MOST_NAMED, showgrid=False))
    shown.update_yaxes(axis(drawn.rows, _MOST_NAMED, down=True, showgrid=False))
    return shown


def series(drawn: Series, theme: Theme) -> go.Figure:
    """Lines over what is usual, or stacked bars."""
    shown = figure(theme, height=_SERIES_PX, x=drawn.axis, y=drawn.unit, legend=True)
    if drawn.usual is not None:
        beside = {"x": drawn.places, "mode": "lines", "line": {"color": theme.dimmed, "width": 0}, "hoverinfo": "skip"}
        shown.add_scatter(**beside, y=drawn.usual.low, name="", showlegend=False)
        shown.add_scatter(**beside, y=drawn.usual.high, name=drawn.usual.name, fill="tonexty")
    for line, colour in ((line, _colours(theme)[line.tone]) for line in drawn.lines):
        words = f"%{{x:.4g}}, {line.name}: %{{y:.4g}} {drawn.unit}<extra></extra>"
        named = {"x": drawn.places, "y": line.values, "name": line.name, "hovertemplate": words}
        if drawn.stacked:
            shown.add_bar(**named, marker={"color": colour, "line": {"width": 0}})
        else:
            shown.add_scatter(**named, mode="lines", line={"color": colour, "width": 2})
    for place in drawn.marks:
        shown.add_vline(x=place, line={"color": theme.text, "width": 1, "dash": "dot"})
    shown.update_layout(barmode="stack")
    return shown


def timeline(drawn: BarTimeline, theme: Theme) -> go.Figure:
    """Bars in rows."""
    row_px = _ROW_PX if len(drawn.rows) <= _MANY_ROWS else _THIN_PX
    shown = figure(theme, height=_HEAD_PX + row_px * len(drawn.rows), x=f"milliseconds {drawn.axis}", legend=True)
    for number, what in enumerate(drawn.legend):
        bars = [bar for bar in drawn.bars if bar.what == number]
        if bars:
            shown.add_bar(
                orientation="h",
                base=[bar.start_s * 1e3 for bar in bars],
                x=[(bar.end_s - bar.start_s) * 1e3 for bar in bars],
                y=[bar.row for bar in bars],
                marker={"color": _colours(theme)[what.tone], "line": {"width": 0}},
                text=[bar.words for bar in bars],
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
                name=what.name,
            )
    shown.update_layout(barmode="overlay", bargap=0.2, hovermode="closest")
    shown.update_yaxes(axis(drawn.rows, len(drawn.rows), down=True, showgrid=False))
    shown.update_xaxes(rangemode="tozero")
    return shown


def _colours(theme: Theme) -> tuple[str, ...]:
    """The colour of each tone: lost time in those of slowdown."""
    return (*theme.kinds[:3], theme.slow[1], theme.slow[2], theme.slow[4], theme.slow[3])
