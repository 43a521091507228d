"""The paper's figures, drawn from `paper_figures.csv`.

In: the table that `paper_figures.py` wrote. Out: Plotly figures by the name that stands for them in docs/method.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.dashboards.figures.charts import figure
from tracekit.dashboards.theme import LIGHT

TABLE = Path(__file__).parent / "paper_figures.csv"
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up")
_COLOURS = (LIGHT.dimmed, LIGHT.outline, LIGHT.recorded, LIGHT.ideal, LIGHT.changed)


def figures() -> dict[str, go.Figure]:
    """Every figure of the page."""
    table = pl.read_csv(TABLE)
    return {
        "waste": _shares(table, "waste", "share of the GPU time lost"),
        "workers": _shares(table, "m_w", "M_W: share of the loss that the slowest 3 % of workers give back"),
        "stages": _shares(table, "m_s", "M_S: share of the loss that the last stage gives back"),
        "correlation": _shares(table, "correlation", "correlation of forwards and backwards of a microbatch"),
        "exact": _exact(table),
    }


def _shares(table: pl.DataFrame, column: str, x: str) -> go.Figure:
    """The share of the jobs of each cause that have at most x."""
    drawn = figure(LIGHT, x=x, y="share of the jobs", legend=True)
    jobs = table.filter(pl.col("cause") != "none") if column in {"m_w", "m_s"} else table  # no loss, no share of it
    for cause, colour in zip(table["cause"].unique(maintain_order=True), _COLOURS, strict=True):
        values = np.sort(jobs.filter(pl.col("cause") == cause)[column].to_numpy())
        if len(values):
            drawn.add_scatter(
                x=[values[0], *values],
                y=np.arange(len(values) + 1) / len(values),
                name=cause,
                line={"shape": "hv", "color": colour, "width": 2},
            )
    drawn.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return drawn


def _exact(table: pl.DataFrame) -> go.Figure:
    """What the worst worker of each job costs, exactly and by the paper's approximation."""
    drawn = figure(LIGHT, x="exact S of the worst worker", y="min(S of its DP rank, S of its stage)", legend=True)
    causes = table["cause"].unique(maintain_order=True)
    for cause, colour, symbol in zip(causes, _COLOURS, _SYMBOLS, strict=True):
        jobs = table.filter(pl.col("cause") == cause)
        marker = {"color": colour, "symbol": symbol, "size": 8}
        drawn.add_scatter(
            x=jobs["worst_worker"], y=jobs["worst_worker_approx"], mode="markers", name=cause, marker=marker
        )
    ends = [1.0, float(table["worst_worker"].max())]
    drawn.add_scatter(x=ends, y=ends, mode="lines", line={"color": LIGHT.grid}, showlegend=False)
    return drawn
