"""Hosts: which hosts and GPUs held jobs up, over all jobs of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.ui.components import href, note, panel
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.shell import page
from tracekit.text import short

#: A host is judged by so many of its newest jobs.
LAST_JOBS = 9
_WORDS = {"host": "Host", "gpu": "GPU"}
#: Hosts and GPUs that are listed.
MOST_LISTED = 200


def build(q: str = "", **_: str) -> list[Component]:
    """`q`: text that the name of a host, or the UUID or host of a GPU, contains."""
    hosts = results().host_jobs().filter(pl.col("host").str.contains(q, literal=True))
    named = pl.col("gpu", "host").str.contains(q, literal=True)
    gpus = results().gpu_jobs().filter(pl.any_horizontal(named))
    said = note(
        "A host or GPU is the culprit of a job if a trusted window of it has a cause that costs 5 % of the step and"
        " sits on this host, or this GPU, alone."
    )
    if hosts.is_empty() and gpus.is_empty():
        why = (
            f"No host or GPU has {short(q)!r} in its name." if q else "No job in this store says on which hosts it ran."
        )
        return [html.H1("Hosts"), panel("No host", note(why))]
    parts = []
    for rows, what, title in (
        (hosts, "host", "Hosts, the most frequent culprits first"),
        (gpus, "gpu", "GPUs that were culprits"),
    ):
        if not rows.is_empty():
            counted = _counted(rows, what)
            parts.append(panel(title, _history_table(_WORDS[what], counted), _left_out(counted.height)))
    return [html.H1("Hosts"), said, *parts]


def _counted(rows: pl.DataFrame, what: str) -> pl.DataFrame:
    """One row per host or GPU, named by column `what`: its last jobs, and in how many of them it was the culprit."""
    last = rows.group_by(what, maintain_order=True).head(LAST_JOBS)
    return (
        last.group_by(what, maintain_order=True)
        .agg(
            pl.col("job", "kinds", "number"),
            place=pl.col("host").first(),
            blamed=pl.col("kinds").count(),
            jobs=pl.len(),
            at=pl.col("added_at").max(),
        )
        .sort("blamed", "at", descending=True)
        .rename({what: "name"})
    )


def _history_table(what: str, counted: pl.DataFrame) -> Component:
    rows = [
        html.Tr(
            [
                html.Td([html.B(short(row["name"])), *_place(row)]),
                html.Td(_verdict(row["blamed"], row["jobs"])),
                html.Td(_jobs(row)),
                html.Td(viewer().moment(row["at"])),
            ]
        )
        for row in counted.head(MOST_LISTED).iter_rows(named=True)
    ]
    return _table((what, "History", "In which jobs", "Last seen"), rows)


def _place(row: dict[str, Any]) -> list[str]:
    """Where a GPU was in its newest job."""
    return [] if row["place"] in (None, row["name"]) else [f" on {short(row['place'])}"]


def _verdict(blamed: int, jobs: int) -> str:
    if not blamed:
        return f"never the culprit in its last {jobs} jobs" if jobs > 1 else "not the culprit in its only job"
    return f"culprit in {blamed} of its last {jobs} jobs" if jobs > 1 else "culprit in its only job"


def _jobs(row: dict[str, Any]) -> list[Any]:
    """The jobs in which it was the culprit, each a link to the window that shows it."""
    found = [one for one in zip(row["job"], row["kinds"], row["number"], strict=True) if one[1] is not None]
    return [
        html.Div([dcc.Link(short(job), href=href("/job", job=job, window=number)), f": {kinds.replace('-', ' ')}"])
        for job, kinds, number in found
    ]


def _table(heads: tuple[str, ...], rows: Sequence[Component]) -> Component:
    table = html.Table([html.Thead(html.Tr([html.Th(head) for head in heads])), html.Tbody(rows)], className="plain")
    return html.Div(table, className="table-wide", tabIndex=0, role="region")


def _left_out(count: int) -> Component | None:
    return (
        note(f"{count - MOST_LISTED:,} more are not listed; add ?q=NAME to the address.")
        if count > MOST_LISTED
        else None
    )


page(__name__, "/hosts", "Hosts", build, lambda found, _: [found.host_jobs, found.gpu_jobs])
