"""Time: since when the job is slow, in which steps, and who in each of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import polars as pl
from dash import ClientsideFunction, Input, Output, State, clientside_callback, dcc, html
from dash.development.base_component import Component

from tracekit.base.text import seconds, short
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.ui.callbacks import answers
from tracekit.dashboards.ui.components import (
    figure_panel,
    figure_parts,
    guarded,
    href,
    html_table,
    note,
    panel,
    term,
)
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.forms import choice
from tracekit.dashboards.ui.sentences import believed, diagnosis_words, time_words
from tracekit.dashboards.ui.shell import job_page
from tracekit.show.figures.time import step_slowdown, step_times, step_workers

#: Workers of the map where only the worst are shown.
WORST_ROWS = 40
SLOWEST_STEPS = 5
ROWS = {"worst": f"slowest {WORST_ROWS}", "all": "all in order"}


def build(stored: Stored, rows: str = "worst", **_: str) -> list[Component]:
    """`rows`: which workers the map of steps and workers shows, a key of ROWS."""
    report, who = stored.report, viewer()
    assert report is not None
    by_step, pattern = stored.table("by_step"), report["patterns"]["time"]
    starts = results().step_starts(stored.name)
    moments = [who.moment(starts.get(step)) for step in by_step["step"]]
    csv = href("/download/by_step.csv", job=stored.name)
    words = believed(report, time_words(pattern, report["by_step"]))
    said = [] if rows in ROWS else [note(f"{short(rows)!r} is no choice of rows: the slowest workers are shown.")]
    return [
        *said,
        panel(
            "Since when",
            html.P(diagnosis_words(report), className="verdict"),
            html.P(words),
            *([_statistic(pattern)] if by_step.height > 1 else []),
        ),
        html.Div(
            [
                html.Div(
                    figure_panel(
                        [term("slowdown", "Slowdown"), " of each ", term("step")],
                        step_slowdown(by_step, pattern, moments, who.theme),
                        label=f"Slowdown of {by_step.height:,} steps. {words}",
                        table=by_step,
                        csv=csv,
                        id="time-slowdown",
                        extra=_hint(),
                    ),
                    className="twothirds",
                ),
                html.Div(panel("Slowest steps", _slowest(stored.name, by_step, moments)), className="third"),
            ],
            className="row",
        ),
        figure_panel(
            ["Time of each step: ", term("recorded"), ", ", term("original"), ", ", term("ideal")],
            step_times(by_step, moments, who.theme),
            label=f"Recorded, original and ideal time of {by_step.height:,} steps",
            table=by_step,
            csv=csv,
            id="time-times",
            extra=_hint(),
        ),
        _worker_panel(stored, rows if rows in ROWS else "worst"),
        dcc.Store(id="time-job", data=stored.name),
    ]


def _hint() -> Component:
    return html.Span("a click opens the timeline of the step", className="note")


def _statistic(pattern: dict[str, Any]) -> Component:
    """On what evidence the words stand."""
    kinds = {
        "changed": "the difference of the means in standard errors",
        "drifting": "the slope in standard errors",
        "periodic": "the share of the variance that the period explains",
        "transient": "the height of the largest in standard errors",
    }
    what = kinds.get(pattern["shape"], "the median slowdown over the steps")
    return note(f"Evidence: {what} is {pattern['statistic']:.3g}; it takes {pattern['needed']:.3g} to say so.")


def _slowest(job: str, by_step: pl.DataFrame, moments: list[str]) -> Component:
    """The slowest steps with where to look at each: what a click on the figure does, for the keyboard."""
    worst = by_step.with_columns(pl.Series("moment", moments)).top_k(SLOWEST_STEPS, by="original_s")
    rows = [
        [
            html.Span(f"{row['step']}", title=row["moment"]),
            f"{row['slowdown']:.3f}",
            seconds(row["original_s"]),
            dcc.Link("timeline", href=href("/timeline", job=job, step=row["step"])),
            dcc.Link("workers", href=href("/workers", job=job, step=row["step"])),
        ]
        for row in worst.iter_rows(named=True)
    ]
    heads = ["Step", "Slowdown", "Original", html.Th("Open", colSpan=2)]
    return html_table(heads, rows, numbers=(1, 2), style="tight")


def _worker_panel(stored: Stored, rows: str) -> Component:
    shown = choice("time-rows", "Workers shown", ROWS, rows)
    box = dcc.Loading(html.Div(_worker_parts(stored.name, rows), id="time-workers-box"), delay_show=300)
    return panel([term("slowdown alone", "Slowdown"), " of each worker alone, step by step"], box, extra=shown)


def _worker_parts(job: str, rows: str) -> list[Component]:
    found = results().worker_map(job)
    cells = None if rows == "all" else found.worst(None, WORST_ROWS)
    shown = len(cells) if cells is not None else found.slowdown.size
    return figure_parts(
        step_workers(found, cells, viewer().theme),
        label=f"Slowdown of {shown:,} workers in {len(found.steps):,} steps",
        table=found.table.head(WORST_ROWS) if cells is not None else found.table,
        csv=href("/download/by_worker_per_step.csv", job=job),
        id="time-workers",
    )


@answers(
    Output("time-workers-box", "children"),
    Input("time-rows", "value"),
    State("time-job", "data"),
)
@guarded
def show_rows(rows: str, job: str) -> Any:
    """Draw the map anew for other workers."""
    return _worker_parts(job, rows)


clientside_callback(ClientsideFunction("time", "remember"), Input("time-rows", "value"), prevent_initial_call=True)
clientside_callback(
    ClientsideFunction("time", "open"),
    Input("time-slowdown", "clickData"),
    Input("time-times", "clickData"),
    Input("time-workers", "clickData"),
    State("time-job", "data"),
    prevent_initial_call=True,
)

job_page(__name__, "/time", "Time", build, lambda found, texts: [partial(found.worker_map, texts["job"])])
