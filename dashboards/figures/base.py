"""The look of all figures: axes, fonts and colours of the theme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from tracekit.dashboards.figures.theme import Theme

HEIGHT = 320
#: The largest number of labels on an axis of steps.
STEP_TICKS = 18
#: Lines with more points than this have no markers.
MARKED_STEPS = 120


def figure(theme: Theme, *, height: int = HEIGHT, x: str = "", y: str = "", legend: bool = False) -> go.Figure:
    """An empty figure in the theme, with titled axes."""
    lines = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor"), theme.grid) | {"automargin": True}
    return go.Figure(
        layout={
            "height": height,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "paper_bgcolor": theme.paper,
            "plot_bgcolor": theme.paper,
            "font": {"color": theme.text, "family": "system-ui, sans-serif", "size": 13},
            "hoverlabel": {"bgcolor": theme.paper, "bordercolor": theme.dimmed, "font": {"color": theme.text}},
            "xaxis": {**lines, "title": {"text": x, "standoff": 8}},
            "yaxis": {**lines, "title": {"text": y, "standoff": 8}},
            "showlegend": legend,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        }
    )


def axis(names: Sequence[Any] | npt.NDArray[Any], most: int, *, down: bool = False, **more: Any) -> dict[str, Any]:
    """An axis of positions from 0, at most `most` of them named. `down`: the first one on top."""
    ticks = list(range(0, len(names), max(1, -(-len(names) // most))))
    ends = [-0.5, len(names) - 0.5]
    return {
        "tickvals": ticks,
        "ticktext": [str(names[at]) for at in ticks],
        "range": ends[::-1] if down else ends,
        "zeroline": False,
        **more,
    }


def step_axis(drawn: go.Figure, steps: npt.NDArray[np.int64], block: int = 1, **more: Any) -> None:
    """Put steps side by side in order, labelled with their numbers: traces have gaps between windows of steps.

    `block`: number of steps that share one position; the first of them is its label. The charts of a page of the
    dashboard that have steps share range and cursor (assets/chart_view.js).
    """
    shown = steps[::block]
    drawn.update_xaxes(axis(shown, STEP_TICKS, **more))
    drawn.update_layout(meta={"axis": "steps", "at": shown.tolist()})


def markers(count: int) -> str:
    """The mode of a line through that many points: of many, only the line shows."""
    return "lines+markers" if count <= MARKED_STEPS else "lines"
