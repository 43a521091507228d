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
#: Hosts and GPUs that are listed.
MOST_LISTED = 200


def build(q: str = "", **_: str) -> list[Component]:
    """`q`: text that names of hosts and GPUs shown contain."""
    hosts = results().host_jobs().filter(pl.col("host").str.contains(q, literal=True))
    gpus = results().gpu_jobs().filter(pl.col("gpu").str.contains(q, literal=True))
    said = note(
        "A host is the culprit of a job if a trusted window of it has a cause that costs 5 % of the step and sits on"
        " this host alone."
    )
    if hosts.is_empty():
        why = f"No host has {short(q)!r} in its name." if q else "No job in this store says on which hosts it ran."
        return [html.H1("Hosts"), panel("No host", note(why))]
    counted = _by_host(hosts)
    parts = [panel("Hosts, the most frequent culprits first", said, _host_table(counted), _left_out(counted.height))]
    if not gpus.is_empty():
        by_gpu = gpus.group_by("gpu", maintain_order=True).agg(pl.all()).sort(pl.col("job").list.len(), descending=True)
        parts.append(panel("GPUs that were culprits", _gpu_table(by_gpu), _left_out(by_gpu.height)))
    return [html.H1("Hosts"), *parts]


def _by_host(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per host: its last jobs, and in how many of them it was the culprit."""
    last = rows.group_by("host", maintain_order=True).head(LAST_JOBS)
    return (
        last.group_by("host", maintain_order=True)
        .agg(
            pl.col("job", "kinds", "number"), blamed=pl.col("kinds").count(), jobs=pl.len(), at=pl.col("added_at").max()
        )
        .sort("blamed", "at", descending=True)
    )


def _host_table(hosts: pl.DataFrame) -> Component:
    rows = [
        html.Tr(
            [
                html.Td(html.B(short(row["host"]))),
                html.Td(_verdict(row["blamed"], row["jobs"])),
                html.Td(_jobs(row)),
                html.Td(viewer().moment(row["at"])),
            ]
        )
        for row in hosts.head(MOST_LISTED).iter_rows(named=True)
    ]
    return _table(("Host", "History", "In which jobs", "Last seen"), rows)


def _gpu_table(gpus: pl.DataFrame) -> Component:
    rows = [
        html.Tr([html.Td(short(row["gpu"])), html.Td(short(row["host"][0] or "-")), html.Td(_jobs(row))])
        for row in gpus.head(MOST_LISTED).iter_rows(named=True)
    ]
    return _table(("GPU", "On host", "Culprit in"), rows)


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
