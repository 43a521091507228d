"""Fleet: all jobs of the store, the costliest first, and what they lose together."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
import polars as pl
from dash import Input, clientside_callback, html
from dash.development.base_component import Component

from tracekit.dashboards.figures.fleet import waste_cdf
from tracekit.dashboards.ui.components import attributes, figure_panel, grid, note, panel, plain_table, term
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.glossary import GLOSSARY
from tracekit.dashboards.ui.shell import page
from tracekit.text import short


def build(q: str = "", **_: str) -> list[Component]:
    """`q`: text that the rows shown contain."""
    jobs = results().jobs()
    if jobs.is_empty():
        return [
            html.H1("Fleet"),
            panel(
                "No job yet", note("The store is empty. Add one with `tracekit import TRACE` or `tracekit collect`.")
            ),
        ]
    analysed = jobs.filter(pl.col("slowdown").is_not_null())
    trusted = analysed.filter("trustworthy")
    return [
        html.H1("Fleet"),
        _figures(jobs, analysed, trusted),
        _job_grid(analysed, q),
        html.Div(
            [
                html.Div(_waste(trusted), className="half"),
                html.Div(_not_analysed(jobs), className="half"),
            ],
            className="row",
        ),
    ]


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
                f"straggling (S >= 1.1): {straggling.height:,} of {trusted.height:,}",
            ),
            card(f"{lost:,.0f}", [term("GPU-hours lost"), " a day"]),
            card(f"{lost / total:.1%}" if total else "-", ["of their GPU time"]),
            card(f"{doubtful:,}", [term("trust", "not trustworthy"), ", so not counted here"]),
            card(f"{jobs.height - analysed.height:,}", "not analysed"),
        ],
        className="figures",
    )


def _job_grid(analysed: pl.DataFrame, q: str) -> Component:
    who = viewer()
    rows = [
        {
            "name": row["name"],
            "shown": short(row["name"]),
            "slowdown": row["slowdown"],
            "lost": max(row["lost_gpu_hours_per_day"], 0.0),
            "waste": row["waste"],
            "gpus": row["world_size"],
            "causes": [
                kind.replace("-", " ") + (f": {short(place)}" if place != "whole job" else "")
                for kind, place in zip(row["cause_kinds"], row["cause_places"], strict=True)
            ],
            "trust": "yes" if row["trustworthy"] else "no",
            "started": who.minute(row["started_at"]),
            "steps": row["steps"],
        }
        for row in analysed.iter_rows(named=True)
    ]
    three, one = {"function": "d3.format('.3f')(params.value)"}, {"function": "d3.format(',.1f')(params.value)"}
    whole = {"function": "d3.format(',')(params.value)"}
    columns: list[dict[str, Any]] = [
        {"field": "shown", "headerName": "Job", "cellRenderer": "JobLink", "flex": 2, "minWidth": 180},
        {
            "field": "lost",
            "headerName": "GPU-hours lost a day",
            "headerTooltip": GLOSSARY["GPU-hours lost"],
            "valueFormatter": one,
            "type": "rightAligned",
        },
        {
            "field": "slowdown",
            "headerName": "S",
            "valueFormatter": three,
            "type": "rightAligned",
            "maxWidth": 100,
            "cellClassRules": {"slow": "params.value >= 1.1 && params.data.trust === 'yes'"},
        },
        {
            "field": "waste",
            "headerName": "Waste",
            "valueFormatter": {"function": "d3.format('.1%')(params.value)"},
            "type": "rightAligned",
            "maxWidth": 110,
        },
        {"field": "gpus", "headerName": "GPUs", "valueFormatter": whole, "type": "rightAligned", "maxWidth": 100},
        {
            "field": "causes",
            "valueFormatter": {"function": "params.value.join('; ')"},
            "headerName": "Causes",
            "cellRenderer": "Chips",
            "cellDataType": False,
            "flex": 3,
            "minWidth": 240,
        },
        {
            "field": "trust",
            "headerName": "Trust",
            "maxWidth": 90,
            "cellClassRules": {"slow": "params.value === 'no'"},
        },
        {"field": "started", "headerName": f"Started ({who.zone_name})", "flex": 1, "minWidth": 160},
        {"field": "steps", "headerName": "Steps", "valueFormatter": whole, "type": "rightAligned", "maxWidth": 100},
    ]
    search = dmc.TextInput(
        id="fleet-q",
        value=q,
        placeholder="Filter: job, cause, worker ...",
        debounce=300,
        w=280,
        **attributes(aria_label="Show only the jobs whose row contains this text"),
    )
    shown = grid(
        rows,
        columns,
        id="fleet-grid",
        label="Jobs ranked by GPU-hours lost",
        options={"quickFilterText": q, "rowHeight": 36},
    )
    return panel("Jobs by GPU-hours lost", shown, extra=[search, html.A("CSV", href="/download/jobs.csv", download="")])


def _waste(trusted: pl.DataFrame) -> Component:
    drawn = waste_cdf(trusted["waste"], viewer().theme)
    table = trusted.select("name", "waste", "slowdown", "world_size").sort("waste", descending=True)
    return figure_panel(
        ["Distribution of the ", term("waste")],
        drawn,
        label="Cumulative distribution of the share of GPU time that jobs lose",
        table=table,
        csv="/download/jobs.csv",
    )


def _not_analysed(jobs: pl.DataFrame) -> Component:
    left = jobs.filter(pl.col("slowdown").is_null())
    if left.is_empty():
        return panel("Not analysed", note("Every job of the store was analysed."))
    table = left.select(
        pl.col("name").map_elements(short, return_dtype=pl.String).alias("job"),
        pl.col("problem").fill_null("stored without an analysis").alias("why"),
    )
    return panel("Not analysed, and why", html.Div(plain_table(table), className="table-scroll"))


clientside_callback(
    """function (text) {
        window.tracekit.remember({q: text});
        dash_ag_grid.getApi("fleet-grid").setGridOption("quickFilterText", text || "");
    }""",
    Input("fleet-q", "value"),
    prevent_initial_call=True,
)

page(__name__, "/", "Fleet", build, lambda found, _: [found.jobs])
