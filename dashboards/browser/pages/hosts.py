"""Hosts: which hosts and GPUs held jobs up, over all jobs of the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import short
from tracekit.dashboards.browser.data.queries import Results
from tracekit.dashboards.browser.ui.components import href, note, panel, row_table
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.forms import text_field
from tracekit.dashboards.browser.ui.shell import page
from tracekit.report.finding import kind_words

#: A host is judged by so many of its newest jobs.
LAST_JOBS = 9
#: Hosts and GPUs that are listed.
MOST_LISTED = 100


def build(q: str = "", **_: str) -> list[Component]:
    """`q`: text that the name of a host, or the UUID or host of a GPU, contains."""
    found = results()
    tables = [
        _history_panel(title, what, read(q, last=LAST_JOBS, most=MOST_LISTED), everyone=bool(q))
        for title, what, read in (
            ("Hosts, the most frequent culprits first", "Host", found.host_history),
            ("GPUs that were culprits", "GPU", found.gpu_history),
        )
    ]
    shown = [table for table in tables if table is not None]
    if not shown:
        why = (
            f"No host or GPU has {short(q)!r} in its name." if q else "No job in this store says on which hosts it ran."
        )
        way_on = [html.P(dcc.Link("All hosts", href=href("/hosts")))] if q else []
        shown = [panel("No host", note(why), *way_on)]
    said = note(
        "A host or GPU is the culprit of a job if a trusted window of it has a cause that costs 5% of the step and"
        " sits on this host, or this GPU, alone. That calls for a check of it. Drain a host only if a recording shows"
        " its hardware at fault: the pages Job and Workers say so."
    )
    field = text_field("hosts-q", "Host or GPU", q, placeholder="part of its name", style="wide", sent_as="q")
    search = html.Form(field, action=href("/hosts"), method="GET", role="search")
    return [html.H1("Hosts"), search, said, *shown]


def _history_panel(title: str, what: str, machines: pl.DataFrame, *, everyone: bool) -> Component | None:
    """A row per host or GPU that was a culprit, or per one found; None where none is known."""
    if machines.is_empty():
        return None
    found = machines["found"][0]
    machines = machines if everyone else machines.filter(pl.col("blamed") > 0)
    if machines.is_empty():
        return panel(title, note(f"None of {found:,} was ever the culprit."))
    rows = [
        [
            [html.B(short(row["machine"])), *([f" on {short(row['host'])}"] if row["host"] else [])],
            _verdict(row["blamed"], row["jobs"]),
            _jobs(row),
            viewer().moment(row["added_at"]),
        ]
        for row in machines.iter_rows(named=True)
    ]
    table = row_table((what, "History", "In which jobs", "Last seen"), rows, f"{what}s")
    more = found - machines.height
    said = f"{more:,} more are not listed: they were the culprit less often, or never. Search for a part of the name."
    return panel(title, table, *([note(said)] if more else []))


def _verdict(blamed: int, jobs: int) -> str:
    if not blamed:
        return f"never the culprit in its last {jobs} jobs" if jobs > 1 else "not the culprit in its only job"
    return f"culprit in {blamed} of its last {jobs} jobs" if jobs > 1 else "culprit in its only job"


def _jobs(row: dict[str, Any]) -> list[Any]:
    """The jobs in which it was the culprit, each a link to the window that shows it."""
    return [
        html.Div(
            [
                dcc.Link(short(one["job"]), href=href("/job", job=one["job"], window=one["number"])),
                f": {', '.join(map(kind_words, one['kinds'].split(', ')))}",
            ]
        )
        for one in row["culprit_in"] or ()
    ]


def _reads(found: Results, texts: Mapping[str, str]) -> list[Callable[[], object]]:
    ask = {"last": LAST_JOBS, "most": MOST_LISTED}
    return [partial(read, texts.get("q", ""), **ask) for read in (found.host_history, found.gpu_history)]


page(__name__, "/hosts", "Hosts", build, _reads)
