"""Small pictures that need no library in the browser: every mark links to a larger view.

In: figures of a job. Out: HTML. Colours are those of the theme; the meaning of each colour is also in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import cost_alone, seconds
from tracekit.dashboards.browser.data.view_state import comma
from tracekit.dashboards.browser.ui.components import attributes, href
from tracekit.dashboards.browser.ui.context import viewer
from tracekit.dashboards.figures.worker_map import Pooled, WorkerMap, pooled_to
from tracekit.dashboards.theme import ink_on
from tracekit.dashboards.words import gaps_of_bars
from tracekit.report.tables import OfStep

#: The largest small map (DP ranks, stages), and the most cells of a map that shows figures.
MOST_ROWS, MOST_COLUMNS, FIGURED_CELLS = 32, 32, 128
#: Most columns with room for more than a number above them.
FEW_COLUMNS = 8
#: Bars of steps; more are pooled, and the slowest of each pool is drawn.
MOST_BARS = 60
#: Windows of a trend.
MOST_TREND = 24


@dataclass(frozen=True, slots=True)
class Level:
    """A row of a waterfall: from `start_s` to `end_s` seconds of a step, in a colour of the theme.

    `figure`: the text at its end; `where`: its link, None without one.
    """

    title: str
    start_s: float
    end_s: float
    colour: str
    figure: str
    where: str | None


def worker_cells(workers: WorkerMap, job: str) -> Component:
    """S_w of every worker, DP ranks down, stages across; large jobs show the worst worker of each patch."""
    pooled = pooled_to(workers.slowdown, MOST_ROWS, MOST_COLUMNS)
    rows, columns = pooled.values.shape
    corner = html.Span("dp", className="axis", title="DP ranks down, stages across")
    noun = "stage " if columns <= FEW_COLUMNS else ""
    heads = [html.Span(f"{noun}{column * pooled.column_block}", className="axis") for column in range(columns)]
    cells: list[Component] = [corner, *heads]
    for row in range(rows):
        cells.append(html.Span(str(workers.dp_ranks[row * pooled.row_block]), className="axis"))
        cells += [
            _cell(workers, job, pooled, row, column, int(pooled.levels[row, column])) for column in range(columns)
        ]
    size = pooled.row_block * pooled.column_block
    patch = f"; a cell is the worst of {size} workers" if size > 1 else ""
    caption = html.Figcaption(f"share of a step that each worker alone costs: DP ranks down, stages across{patch}")
    height = int(np.clip(220 // rows, 5, 34))  # of a row: maps of all sizes take about the same room
    grid = html.Div(cells, className="cells", style={"--columns": columns, "--height": f"{height}px"})
    return html.Figure([grid, caption], className="picture")


def _cell(workers: WorkerMap, job: str, pooled: Pooled, row: int, column: int, level: int) -> Component:
    value = float(pooled.values[row, column])
    if not np.isfinite(value):
        return html.Span(className="cell gap", title="not analysed")
    cell = int(pooled.row[row, column]) * workers.stages + int(pooled.column[row, column])
    worker = workers.worker(cell)
    words = f"{workers.full_name(cell)}: alone costs {cost_alone(value)} of a step"
    colour = viewer().theme.slow[level]
    figured = level and pooled.values.size <= FIGURED_CELLS
    return _mark(
        f"{1 - 1 / value:.0%}" if figured else "",
        href("/workers", job=job, worker=comma(worker)),
        words,
        className="cell",
        style={"background": colour, "color": ink_on(colour)},
        tabIndex=0 if level else -1,
    )


def _mark(content: Any, where: str, words: str, **more: Any) -> Component:
    """A mark that links on (assets/tracekit.js); in large pictures, Tab stops only at the important marks."""
    return html.A(content, href=where, title=words, **more, **attributes(aria_label=words, data_follow="yes"))


def step_bars(by_step: Sequence[OfStep], job: str, *, links: bool = True) -> Component:
    """Recorded time of each step, with its loss by the verdict on top, and a space where steps were not recorded.
    `links`: the timeline of each bar.
    """
    block = -(-len(by_step) // MOST_BARS)
    steps = [max(by_step[i : i + block], key=lambda row: row.recorded_s) for i in range(0, len(by_step), block)]
    slowest = max(steps, key=lambda row: row.recorded_s)
    top = slowest.recorded_s
    theme = viewer().theme
    bars: list[Component] = []
    gaps = gaps_of_bars(np.array([row.step for row in by_step]), block)
    for number, row in enumerate(steps):
        if number in gaps:
            bars.append(html.Span(className="gap", title="steps that were not recorded"))
        lost_s = min(row.lost_s or 0.0, row.recorded_s)
        words = f"step {row.step}: {seconds(row.recorded_s)}, {seconds(lost_s)} lost"
        without_loss = 1.0 - lost_s / row.recorded_s if row.recorded_s else 1.0
        colours = f"linear-gradient(to top, {theme.ideal} {without_loss:.1%}, {theme.slow[3]} {without_loss:.1%})"
        style = {"height": f"{row.recorded_s / top:.1%}", "background": colours}
        if links:
            where = href("/timeline", job=job, step=row.step)
            bars.append(_mark(html.I(style=style), where, words, tabIndex=0 if row is slowest else -1))
        else:
            bars.append(html.Span(html.I(style=style)))
    return html.Div(bars, className="bars", **({} if links else attributes(aria_hidden="true")))


def steps_picture(by_step: Sequence[OfStep], job: str) -> Component:
    """The bars of the steps, with their legend."""
    times = [row.recorded_s for row in by_step]
    theme, pooled = viewer().theme, -(-len(by_step) // MOST_BARS)
    extent = f"{len(by_step):,} steps of {seconds(min(times))} to {seconds(max(times))}"
    extent += f"; a bar is the slowest of {pooled}" if pooled > 1 else ""
    keys = [key("needed", theme.ideal), key("lost", theme.slow[3])]
    ends = [html.Span(f"step {by_step[0].step}"), html.Span(f"{by_step[-1].step}")]
    caption = html.Figcaption([f"{extent}: ", *keys])
    return html.Figure([step_bars(by_step, job), html.Div(ends, className="ends"), caption], className="picture")


def trend(shares: Sequence[float]) -> Component:
    """The shares that the last windows lose, a bar each from 0 to the largest of them, at least 10 %."""
    recent = shares[-MOST_TREND:]
    top = max(*recent, 0.1)
    bars = [
        html.Span(html.I(style={"height": f"{max(share, 0.0) / top:.0%}", "background": viewer().theme.slow[3]}))
        for share in recent
    ]
    words = f"lost in the last {len(recent)} windows: {recent[0]:.0%} to {recent[-1]:.0%}, {max(recent):.0%} at most"
    return html.Div(bars, className="bars trend", title=words, role="img", **attributes(aria_label=words))


def key(words: str, colour: str) -> Component:
    """A legend entry: a colour and its meaning."""
    return html.Span([html.I(style={"background": colour}, **attributes(aria_hidden="true")), words], className="key")


def waterfall(levels: Sequence[Level]) -> Component:
    """Bars one below the other, each beginning where the previous one ends."""
    top = max(max(level.start_s, level.end_s) for level in levels)
    rows = []
    for level in levels:
        start, width = min(level.start_s, level.end_s) / top, abs(level.end_s - level.start_s) / top
        style = {"left": f"{start:.2%}", "width": f"max({width:.2%}, 2px)", "background": level.colour}
        rows.append(
            html.Li(
                [
                    html.Span(level.title, className="name"),
                    html.Span(html.I(style=style), className="track", **attributes(aria_hidden="true")),
                    html.Span(level.figure, className="figure")
                    if level.where is None
                    else dcc.Link(level.figure, href=level.where, className="figure"),
                ]
            )
        )
    return html.Ol(rows, className="waterfall")
