"""Figures of the page Time: the life of a job over the wall clock, all on one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import tzinfo
from typing import Any

import plotly.graph_objects as go
import polars as pl

from tracekit.dashboards.browser.data.life import Event
from tracekit.dashboards.figures.base import figure
from tracekit.dashboards.figures.theme import Theme

#: Room for the labels of the y axes, so that moments are below each other, pixels.
_LEFT = 104
_ROW_PX = 26
#: Where a click on a row of spans or events leads; None: nowhere.
Where = Callable[[int | None, int | None], str | None]


def rates(
    spans: pl.DataFrame, column: str, theme: Theme, words: str, where: Where, *, events: Sequence[Event] = ()
) -> go.Figure:
    """One figure of each span, from its start to its end; the line breaks where steps are missing.

    `words`: hover text for the value, as Plotly formats it. `events`: incidents, as bands.
    """
    drawn = figure(theme, height=200)
    x, y, data = list[float | None](), list[float | None](), list[Any]()
    for row in spans.iter_rows(named=True):
        steps = f"step {row['first_step']}"
        if row["last_step"] != row["first_step"]:
            steps = f"mean of steps {row['first_step']} to {row['last_step']}"
        if row["broken"] and x:
            x, y, data = [*x, row["start_s"] * 1e3], [*y, None], [*data, None]
        x += [row["start_s"] * 1e3, row["end_s"] * 1e3]
        y += [row[column]] * 2
        data += [[where(row["window"], row["step"]), steps]] * 2
    drawn.add_scatter(
        x=x,
        y=y,
        customdata=data,
        mode="lines",
        line={"color": theme.recorded, "width": 2},
        hovertemplate=f"%{{customdata[1]}}: {words}<extra></extra>",
    )
    for event in events:
        if event.kind == "incident":
            drawn.add_shape(
                type="rect",
                x0=event.start_s * 1e3,
                x1=event.end_s * 1e3,
                y0=0,
                y1=1,
                yref="paper",
                fillcolor=theme.slow[2],
                opacity=0.25,
                line={"width": 0},
                layer="below",
            )
    drawn.update_yaxes(rangemode="normal" if column == "loss" else "tozero", tickformat=",.4g")
    drawn.update_layout(hovermode="x")
    return drawn


def losses(lost: pl.DataFrame, theme: Theme) -> go.Figure:
    """What a mean step loses to each kind of cause, seconds, on top of each other: `Life.losses`."""
    drawn = figure(theme, height=220, legend=True)
    kinds = lost.group_by("kind").agg(pl.col("lost_s").sum()).sort("lost_s", descending=True)["kind"].to_list()
    for kind, shade in zip(sorted(kinds, key=lambda kind: kind == "others"), theme.slow[3:] * 2, strict=False):
        rows = lost.filter(pl.col("kind") == kind)
        drawn.add_bar(
            x=((rows["start_s"] + rows["end_s"]) * 500).to_list(),
            width=((rows["end_s"] - rows["start_s"]) * 1e3).to_list(),
            y=rows["lost_s"].to_list(),
            name=kind,
            marker={"color": theme.dimmed if kind == "others" else shade},
            hovertemplate=f"{kind}: %{{y:.3g}} s a step<extra></extra>",
        )
    drawn.update_layout(barmode="stack")
    drawn.update_yaxes(rangemode="tozero")
    return drawn


def happened(events: Sequence[Event], theme: Theme, where: Where) -> go.Figure:
    """A row for each kind of event, with a bar for as long as it lasts."""
    kinds = list(dict.fromkeys(one.kind for one in events))
    drawn = figure(theme, height=60 + _ROW_PX * len(kinds))
    colours = {"incident": theme.slow[3], "hang": theme.slow[5]}
    drawn.add_bar(
        orientation="h",
        base=[one.start_s * 1e3 for one in events],
        x=[(one.end_s - one.start_s) * 1e3 for one in events],
        y=[one.kind for one in events],
        marker={"color": [colours.get(one.kind, theme.dimmed) for one in events]},
        customdata=[[where(one.window, one.step)] for one in events],
        text=[one.words for one in events],
        textposition="none",
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    drawn.update_layout(barmode="overlay", bargap=0.4)
    drawn.update_yaxes(type="category", showgrid=False, autorange="reversed")
    return drawn


def cost_over_time(windows: pl.DataFrame, theme: Theme, where: Callable[[str, int], str]) -> go.Figure:
    """A point for each window: when it began, and the share of its step that is lost.

    `windows`: `job`, `number`, `at_s`, `share`; `where`: the link of a job and a window.
    """
    drawn = figure(theme, height=200)
    judged = windows.drop_nulls("share").sort("at_s")
    drawn.add_scatter(
        x=(judged["at_s"] * 1e3).to_list(),
        y=judged["share"].to_list(),
        customdata=[[where(job, number), job] for job, number in judged.select("job", "number").iter_rows()],
        mode="markers",
        marker={"color": theme.bad, "size": 7},
        hovertemplate="%{customdata[1]}: %{y:.1%} of the step<extra></extra>",
    )
    drawn.update_yaxes(rangemode="tozero", tickformat=".0%")
    return drawn


def on_the_clock(
    drawn: go.Figure, ends: tuple[float, float], chosen: tuple[float, float] | None, zone: tzinfo, title: str
) -> go.Figure:
    """Give a figure the axis of time: from and to, seconds since the epoch. `chosen`: the range that a reader chose."""
    whole = [end * 1e3 for end in ends]
    shared: dict[str, Any] = {"axis": "time", "zone": str(zone), "left": _LEFT}
    if chosen is not None:
        shared["range"] = [end * 1e3 for end in chosen]
    drawn.update_xaxes(type="date", range=whole, title={"text": title})
    drawn.update_layout(meta=shared)
    return drawn
