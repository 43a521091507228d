"""The picture of a pipeline: a row for each stage, computes by kind, bubbles by what is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from tracekit.analysis.bubbles.picture import LEGEND, WHATS
from tracekit.dashboards.figures.base import axis, figure
from tracekit.report.pictures import Picture

if TYPE_CHECKING:
    from tracekit.dashboards.figures.theme import Theme

_ROW_PX, _HEAD_PX = 24, 110


def pipeline_step(pictures: Sequence[Picture], theme: Theme) -> go.Figure:
    """The pictures below each other, on one axis of time."""
    names, firsts = list[str](), list[int]()
    for picture in pictures:
        names.append(picture.name)  # a row of its own, without bars
        firsts.append(len(names))
        names += [f"stage {stage}" for stage in range(picture.stages)]
    drawn = figure(theme, height=_HEAD_PX + _ROW_PX * len(names), x="milliseconds since the first compute", legend=True)
    for what, name, colour in zip(WHATS, LEGEND, colours(theme), strict=True):
        bars = [
            (first + bar.stage, bar)
            for first, picture in zip(firsts, pictures, strict=True)
            for bar in picture.bars
            if bar.what == what
        ]
        if bars:
            drawn.add_bar(
                orientation="h",
                base=[bar.start_s * 1e3 for _, bar in bars],
                x=[(bar.end_s - bar.start_s) * 1e3 for _, bar in bars],
                y=[row for row, _ in bars],
                marker={"color": colour, "line": {"width": 0}},
                text=[bar.words for _, bar in bars],
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
                name=name,
            )
    drawn.update_layout(barmode="overlay", bargap=0.2, hovermode="closest")
    drawn.update_yaxes(axis(names, len(names), down=True, showgrid=False))
    drawn.update_xaxes(rangemode="tozero")
    return drawn


def colours(theme: Theme) -> tuple[str, ...]:
    """A colour for each of `WHATS`: lost time in those of slowdown."""
    return (*theme.kinds[:3], theme.slow[1], theme.slow[2], theme.slow[4], theme.slow[3])
