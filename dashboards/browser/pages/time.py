"""Time: the life of a run over the wall clock: step time, losses by cause, throughput, and what happened when."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import plotly.graph_objects as go
import polars as pl
from dash import Input, Output, State, dcc, html
from dash.development.base_component import Component

from tracekit.base.text import seconds, short
from tracekit.dashboards.browser.data.life import (
    Event,
    Life,
    event_chart,
    losses,
    on_the_clock,
    rates,
    read_differences,
    read_life,
)
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.components import figure_panel, guarded, href, note, panel, row_table
from tracekit.dashboards.browser.ui.context import chosen_range, results, viewer
from tracekit.dashboards.browser.ui.shell import answers, job_page, opens_links
from tracekit.report.finding import kind_words
from tracekit.report.report import Report

#: Events that are listed below their figure.
MOST_LISTED = 50
#: Values of labels in the table of what is different.
MOST_DIFFERENT = 20


def build(stored: Stored, _report: Report, **_: str) -> list[Component]:
    """The charts of the chosen range, all on one axis."""
    chosen = chosen_range(stored.name)
    since, until = (0.0, math.inf) if chosen is None else (chosen.since, chosen.until)
    life = read_life(results(), stored.name, since, until)
    if life is None or life.spans.is_empty():
        link = dcc.Link("the page Workers", href=href("/workers", job=stored.name))
        if chosen is not None:
            return [panel("No steps", note(["No step ran in this range."]))]
        return [panel("No times", note(["The trace does not say when its steps ran. Their order is on ", link, "."]))]
    ends = life.ends if chosen is None else chosen.within(*life.ends)
    panels = _panels(stored, life, ends, chosen is not None)
    button = html.Button("What is different here?", id="time-ask", className="primary")
    answer = html.Div(id="time-different", role="status")
    question = html.Section([button, answer, dcc.Store(id="time-job", data=stored.name)], className="panel")
    return panels if chosen is None else [question, *panels]


def _panels(stored: Stored, life: Life, ends: tuple[float, float], chosen: bool) -> list[Component]:
    zone, theme = viewer().zone, viewer().theme
    title = f"{viewer().moment(ends[0])} to {viewer().moment(ends[1])}"

    def where(window: int | None, step: int | None) -> str | None:
        if window is None:
            return href("/hang", job=stored.name)
        if step is None:
            return href("/job", job=stored.name, window=window)
        return href("/timeline", job=stored.name, window=window, step=step)

    def shown(name: Any, chart: go.Figure, label: str, table: pl.DataFrame, key: str, extra: str = "") -> Component:
        on_the_clock(chart, ends, ends if chosen else None, zone, title)
        return figure_panel(name, chart, label=label, table=table, id=key, extra=html.Span(extra, className="note"))

    spans, steps = life.spans, "steps" if life.stepwise else "windows"
    opens = "the step" if life.stepwise else "the window"
    hint = f"bands: incidents; a drag chooses a range, a click opens {opens}"
    parts = [
        shown(
            ["Time of a step, seconds"],
            rates(spans, "recorded_s", theme, "%{y:.4g} s", where, events=life.events),
            f"Step time of {spans.height:,} {steps} over time; bands are incidents",
            spans.select("window", "step", "start_s", "recorded_s"),
            "time-steps",
            hint,
        )
    ]
    if life.losses.height:
        titled = life.losses.with_columns(pl.col("kind").map_elements(kind_words, return_dtype=pl.String))
        lost = titled.select("start_s", "kind", "lost_s")
        parts.append(
            shown(
                "Lost by cause, seconds of a step",
                losses(titled, theme),
                "Seconds of a step lost to each cause over time",
                lost,
                "time-losses",
            )
        )
    for column, name, words, of in (
        ("tokens_per_s", "Tokens a second", "%{y:,.4g} tokens/s", "time-tokens"),
        ("loss", "Loss", "%{y:.4g}", "time-loss"),
        ("mfu", "Model FLOPs utilisation", "%{y:.1%} of the peak", "time-mfu"),
    ):
        recorded = spans.drop_nulls(column)
        if recorded.height:
            parts.append(
                shown(
                    name,
                    rates(recorded, column, theme, words, where),
                    f"{name} over time",
                    recorded.select("start_s", column),
                    of,
                )
            )
    if life.events:
        table = pl.DataFrame(
            [(event.kind, event.start_s, event.words) for event in life.events],
            ["kind", "start_s", "what"],
            orient="row",
        )
        rows = [_row(event, where(event.window, event.step)) for event in life.events[-MOST_LISTED:]]
        chart = shown(
            "What happened",
            event_chart(life.events, theme, where),
            "Events over time, a row for each kind",
            table,
            "time-events",
        )
        parts += [chart, panel("Events", row_table(("When", "Kind", "What"), rows, "Events"))]
    return parts


def _row(event: Event, where: str | None) -> list[Any]:
    link = dcc.Link(short(event.words, 200), href=where) if where else short(event.words, 200)
    return [viewer().moment(event.start_s), event.kind, link]


@answers(Output("time-different", "children"), Input("time-ask", "n_clicks"), State("time-job", "data"))
@guarded
def compare_range(_clicks: int | None, job: str) -> list[Component]:
    """The labels with a larger share of the excess time of the ops in the range than of those around it."""
    reads, chosen = results(), chosen_range(job)
    if chosen is None:
        return [note("All of the run is shown: choose a range.")]
    different = read_differences(reads, job, chosen.since, chosen.until)
    if not (different.inside and different.outside):
        return [note("There is no step around the range to compare its steps with, or none in it.")]
    rows = [
        [label, short(value), f"{inside:.1%}", f"{outside:.1%}", f"{inside - outside:+.1%}"]
        for label, value, inside, outside in different.table.head(MOST_DIFFERENT).iter_rows()
    ]
    words = (
        f"In these {different.inside:,} steps, ops take {seconds(different.inside_s)} a step beyond the median of their"
        f" kind and stage; in {different.outside:,} steps around them {seconds(different.outside_s)}. Whose that is:"
    )
    heads = ("Label", "Value", "Share here", "Share around it", "Difference")
    table = row_table(heads, rows, "What is different in this range", numbers=(2, 3, 4))
    return [html.P(words), table if rows else note("No label has a larger share here.")]


opens_links("time-steps", "time-tokens", "time-loss", "time-mfu", "time-events")
job_page(__name__, "/time", build, lambda reads, args: [partial(reads.spans, args["job"], 1)])
