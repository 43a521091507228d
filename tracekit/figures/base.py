"""The look of all figures: axes, fonts and colours of the theme."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from tracekit.figures.theme import Theme

HEIGHT = 320
#: The largest number of labels on an axis of steps.
STEP_TICKS = 18


def figure(theme: Theme, *, height: int = HEIGHT, x: str = "", y: str = "", legend: bool = False) -> go.Figure:
    """An empty figure in the theme, with titled axes."""
    axis = {
        "gridcolor": theme.grid,
        "linecolor": theme.grid,
        "zerolinecolor": theme.grid,
        "automargin": True,
        "title": {"standoff": 8},
    }
    return go.Figure(
        layout={
            "height": height,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "paper_bgcolor": theme.paper,
            "plot_bgcolor": theme.paper,
            "font": {"color": theme.text, "family": "system-ui, sans-serif", "size": 13},
            "hoverlabel": {"bgcolor": theme.paper, "bordercolor": theme.dimmed, "font": {"color": theme.text}},
            "xaxis": {**axis, "title": {"text": x, "standoff": 8}},
            "yaxis": {**axis, "title": {"text": y, "standoff": 8}},
            "showlegend": legend,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        }
    )


def step_axis(drawn: go.Figure, steps: npt.NDArray[np.int64], block: int = 1) -> None:
    """Steps side by side in order, labelled with their numbers, because traces have gaps between windows of steps.

    `block`: number of steps that share one position; the first of them is its label.
    """
    count = -(-len(steps) // block)
    ticks = list(range(0, count, max(1, -(-count // STEP_TICKS))))
    drawn.update_xaxes(
        tickvals=ticks,
        ticktext=[str(steps[at * block]) for at in ticks],
        range=[-0.5, count - 0.5],
        zeroline=False,
    )
