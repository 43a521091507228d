"""Jobs: a card for each job that needs attention, by what fixing it saves; all in a table; what they lose."""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import Input, Output, clientside_callback, dcc, html, no_update
from dash.development.base_component import Component

from tracekit.analysis.attribution.attribution import SMALLEST_HEADLINE_SHARE
from tracekit.base.command_line import adding, command
from tracekit.base.text import short
from tracekit.dashboards.pages.fleet_parts import job_card
from tracekit.dashboards.ui.callbacks import answers
from tracekit.dashboards.ui.charts import share_bars
from tracekit.dashboards.ui.components import as_table, grid, href, note, panel, plain_table, scrolled, term
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.glossary import GLOSSARY
from tracekit.dashboards.ui.shell import page

#: Cards that are shown; further jobs that need attention are in the table.
MOST_CARDS = 12


def build(q: str = "", **_: str) -> list[Component]:
    """`q`: text that the rows shown contain."""
    jobs = results().jobs()
    if jobs.is_empty():
        return [
            html.H1("Jobs"),
            panel(
                "No job yet",
                note(
                    f"The store is empty. Add one with `{adding(results().path)}`, record one with"
                    f" `{command('collect', '--store', results().path, '--', 'COMMAND')}`."
                ),
            ),
        ]
    analysed = jobs.filter(pl.col("slowdown").is_not_null())
    trusted = analysed.filter("trustworthy")
    return [
        html.H1("Jobs"),
        *_attention(analysed),
        _all_jobs(jobs, analysed, trusted, q),
    ]


def _attention(analysed: pl.DataFrame) -> list[Component]:
    """The jobs whose verdict names a loss; those that are not trustworthy last."""
    share = pl.col("lost_gpu_hours_per_day") / (24 * pl.col("world_size"))
    losing = analysed.filter(pl.col("straggling") | (share >= SMALLEST_HEADLINE_SHARE))
    losing = losing.sort("trustworthy", descending=True, maintain_order=True)
    if losing.is_empty():
        return [panel("No job needs attention", note("Nothing costs any analysed job 5 % of its step."))]
    cards = [job_card(stored) for stored in results().stored_jobs(losing["name"][:MOST_CARDS].to_list())]
    more = losing.height - len(cards)
    said = [note(f"{more:,} more jobs lose time: they are in the table below.")] if more > 0 else []
    sure = losing.filter("trustworthy")
    lost, of = sure["lost_gpu_hours_per_day"].sum(), 24 * int(sure["world_size"].sum())
    count = f"{losing.height:,} job{'s need' if losing.height > 1 else ' needs'} attention:"
    count += f" {lost:,.0f} of {of:,} GPU-hours a day are lost"
    order = [note("First comes the job whose first fix saves the most GPU-hours a day.")] if losing.height > 1 else []
    return [html.H2(count, className="count"), *order, html.Div(cards, className="job-cards"), *said]


def _all_jobs(jobs: pl.DataFrame, analysed: pl.DataFrame, trusted: pl.DataFrame, q: str) -> Component:
    """What all lose together, and the table, which is loaded when it is opened."""
    failed = jobs.height - analysed.height
    said = f"; {failed:,} not analysed" if failed else ""
    title = html.H2(f"All {jobs.height:,} job{'s' if jobs.height > 1 else ''}: sort, search{said}")
    summary = html.Summary(title, id="all-jobs-summary", n_clicks=0)
    more = [html.Div(_waste(trusted), className="half"), html.Div(_not_analysed(jobs), className="half")]
    parts = [
        summary,
        _figures(jobs, analysed, trusted),
        _job_grid(analysed, q),
        html.Div(more, className="row"),
    ]
    return html.Details(parts, id="all-jobs", open=bool(q), className="panel")


def card(value: str, caption: Any) -> Component:
    """One figure with what it counts."""
    return html.Div(
        [html.Div(value, className="value"), html.Div(caption, className="caption")], className="figure-card"
    )


def _figures(jobs: pl.DataFrame, analysed: pl.DataFrame, trusted: pl.DataFrame) -> Component:
    """The cards. Figures of jobs that are not trustworthy are in the table, marked, and in no sum."""
    straggling = trusted.filter("straggling")
    lost = float(trusted["lost_gpu_hours_per_day"].clip(0).sum())
    total = 24.0 * int(trusted["world_size"].sum())
    doubtful = analysed.height - trusted.height
    return html.Div(
        [
            card(f"{jobs.height:,}", "jobs"),
            card(
                f"{straggling.height / trusted.height:.0%}" if trusted.height else "-",
                f"straggling (slowdown >= 1.1): {straggling.height:,} of {trusted.height:,}",
            ),
            card(f"{lost:,.0f}", [term("GPU-hours lost"), " a day"]),
            card(f"{lost / total:.1%}" if total else "-", ["of their GPU time"]),
            card(f"{doubtful:,}", [term("trust", "not trustworthy"), ", so not counted here"]),
            card(f"{jobs.height - analysed.height:,}", "not analysed"),
        ],
        className="figures",
    )


def job_rows(analysed: pl.DataFrame) -> list[dict[str, Any]]:
    """The rows of the table, in the order of the cards."""
    who = viewer()
    return [
        {
            "name": row["name"],
            "shown": short(row["name"]),
            "slowdown": row["slowdown"],
            "saves": max(row["gives_back"], 0.0),
            "lost": max(row["lost_gpu_hours_per_day"], 0.0),
            "waste": row["waste"],
            "gpus": row["world_size"],
            "causes": "; ".join(
                kind.replace("-", " ") + (f": {short(place)}" if place != "whole job" else "")
                for kind, place in zip(row["cause_kinds"], row["cause_places"], strict=True)
            ),
            "trust": "yes" if row["trustworthy"] else "no",
            "started": who.minute(row["started_at"]),
            "steps": row["steps"],
        }
        for row in analysed.iter_rows(named=True)
    ]


def _job_grid(analysed: pl.DataFrame, q: str) -> Component:
    """The table; its rows come when it is unfolded, or at once where some are asked for."""
    three, one = {"function": "params.value.toFixed(3)"}, {"function": "d3.format(',.1f')(params.value)"}
    whole = {"function": "d3.format(',')(params.value)"}
    columns: list[dict[str, Any]] = [
        {"field": "shown", "headerName": "Job", "cellRenderer": "JobLink", "flex": 2, "minWidth": 180},
        {
            "field": "saves",
            "headerName": "Fixing saves a day",
            "headerTooltip": "GPU-hours a day that the first fix saves.",
            "valueFormatter": one,
            "type": "rightAligned",
        },
        {
            "field": "lost",
            "headerName": "GPU-hours lost a day",
            "headerTooltip": GLOSSARY["GPU-hours lost"],
            "valueFormatter": one,
            "type": "rightAligned",
        },
        {
            "field": "slowdown",
            "headerName": "Slowdown",
            "valueFormatter": three,
            "type": "rightAligned",
            "maxWidth": 100,
            "cellClassRules": {"slow": "params.value >= 1.1 && params.data.trust === 'yes'"},
        },
        {
            "field": "waste",
            "headerName": "Waste",
            "valueFormatter": {"function": "(params.value * 100).toFixed(1) + '%'"},
            "type": "rightAligned",
            "maxWidth": 110,
        },
        {"field": "gpus", "headerName": "GPUs", "valueFormatter": whole, "type": "rightAligned", "maxWidth": 100},
        {
            "field": "causes",
            "headerName": "Causes",
            "tooltipField": "causes",
            "flex": 3,
            "minWidth": 240,
        },
        {
            "field": "trust",
            "headerName": "Trust",
            "maxWidth": 90,
            "cellClassRules": {"slow": "params.value === 'no'"},
        },
        {"field": "started", "headerName": f"Started ({viewer().zone_name})", "flex": 1, "minWidth": 160},
        {"field": "steps", "headerName": "Steps", "valueFormatter": whole, "type": "rightAligned", "maxWidth": 100},
    ]
    search = dcc.Input(
        id="fleet-q",
        value=q,
        type="search",
        placeholder="job, cause, worker ...",
        debounce=0.3,
        className="field",
    )
    shown = grid(
        job_rows(analysed) if q else None,
        columns,
        count=analysed.height,
        id="fleet-grid",
        label="Jobs by what fixing them saves a day",
        options={"quickFilterText": q, "rowHeight": 36, "rowBuffer": 2, "enableBrowserTooltips": True},
    )
    csv = html.A("CSV", href=href("/download/jobs.csv"), download="")
    return html.Div([html.Div([html.Label(["Filter", search]), csv], className="filter"), shown])


def _waste(trusted: pl.DataFrame) -> Component:
    table = trusted.select("name", "waste", "slowdown", "world_size").sort("waste", descending=True)
    picture = share_bars(table["waste"].clip(0).to_list(), "job") if table.height else note("No job can be trusted.")
    return panel(
        ["Jobs by ", term("waste"), ", the largest first"], picture, as_table(table, csv=href("/download/jobs.csv"))
    )


def _not_analysed(jobs: pl.DataFrame) -> Component:
    left = jobs.filter(pl.col("slowdown").is_null())
    if left.is_empty():
        return panel("Not analysed", note("Every job of the store was analysed."))
    table = left.select(
        pl.col("name").map_elements(short, return_dtype=pl.String).alias("job"),
        pl.col("problem").fill_null("stored without an analysis").alias("why"),
    )
    return panel("Not analysed, and why", scrolled(plain_table(table), "Jobs not analysed"))


@answers(Output("fleet-grid", "rowData"), Input("all-jobs-summary", "n_clicks"))
def unfold(clicks: int) -> Any:
    """The rows, once the table is unfolded: thousands of them are no part of a page that shows cards."""
    return job_rows(results().jobs().filter(pl.col("slowdown").is_not_null())) if clicks == 1 else no_update


clientside_callback(
    """function (text) {
        window.tracekit.remember({q: text});
        const grid = dash_ag_grid.getApi && dash_ag_grid.getApi("fleet-grid");
        if (grid) grid.setGridOption("quickFilterText", text || "");
    }""",
    Input("fleet-q", "value"),
    prevent_initial_call=True,
)

page(__name__, "/", "Jobs", build, lambda found, _: [found.jobs])
