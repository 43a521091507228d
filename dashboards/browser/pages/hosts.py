"""Hosts: which hosts and GPUs held jobs up, over all jobs of the store; of one host, when and in which jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import counted, short
from tracekit.dashboards.browser.data.life import cost_over_time, on_the_clock
from tracekit.dashboards.browser.data.queries import Results
from tracekit.dashboards.browser.ui.components import figure_panel, href, note, panel, row_table, text_field
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.sentences import Tone
from tracekit.dashboards.browser.ui.shell import opens_links, page
from tracekit.report.conclusions import SMALLEST_ALARMING_SHARE
from tracekit.report.finding import kind_words

#: The newest jobs of a host by which it is judged.
LAST_JOBS = 9
#: Hosts and GPUs that are listed, and windows of one host.
MOST_LISTED, MOST_WINDOWS = 100, 1000


def build(q: str = "", host: str = "", **_: str) -> list[Component]:
    """`q`: text that the name of a host, or the UUID or host of a GPU, contains; `host`: the one host to show."""
    if host:
        return _host_page(host)
    reads = results()
    tables = [
        _history_panel(title, noun, read(q, last=LAST_JOBS, most=MOST_LISTED), searched=bool(q))
        for title, noun, read in (
            ("Hosts, the most frequent culprits first", "Host", reads.host_history),
            ("GPUs that were culprits", "GPU", reads.gpu_history),
        )
    ]
    panels = [table for table in tables if table is not None]
    if not panels:
        why = (
            f"No host or GPU has {short(q)!r} in its name." if q else "No job in this store says on which hosts it ran."
        )
        all_hosts = [html.P(dcc.Link("All hosts", href=href("/hosts")))] if q else []
        panels = [panel("No host", note(why), *all_hosts)]
    explanation = note(
        "A host or GPU is the culprit of a job if a trusted window of it has a cause that costs 5% of the step and"
        " sits on this host, or this GPU, alone. That calls for a check of it. Drain a host only if a recording shows"
        " its hardware at fault: the pages Job and Workers say so."
    )
    field = text_field("hosts-q", "Host or GPU", q, placeholder="part of its name", style="wide", sent_as="q")
    search = html.Form(field, action=href("/hosts"), method="GET", role="search")
    return [html.H1("Hosts"), search, explanation, *panels]


def _history_panel(title: str, noun: str, machines: pl.DataFrame, *, searched: bool) -> Component | None:
    """A row per host or GPU that was a culprit, or per one found; None where none is known."""
    if machines.is_empty():
        return None
    listed = machines["found"][0]
    machines = machines if searched else machines.filter(pl.col("blamed") > 0)
    if machines.is_empty():
        return panel(title, note(f"None of {listed:,} was ever the culprit."))
    rows = [
        [
            _machine(row),
            _verdict(row["blamed"], row["jobs"]),
            _jobs(row),
            viewer().moment(row["added_at"]),
        ]
        for row in machines.iter_rows(named=True)
    ]
    table = row_table((noun, "History", "In which jobs", "Last seen"), rows, f"{noun}s")
    more = listed - machines.height
    remark = f"{more:,} more are not listed: they were the culprit less often, or never. Search for a part of the name."
    return panel(title, table, *([note(remark)] if more else []))


def _machine(row: dict[str, Any]) -> Any:
    """A host as a link to its page; a GPU with its host."""
    if row["host"] is None and not row["machine"].startswith("GPU-"):
        return dcc.Link(html.B(short(row["machine"])), href=href("/hosts", host=row["machine"]))
    return [html.B(short(row["machine"])), *([f" on {short(row['host'])}"] if row["host"] else [])]


def _host_page(host: str) -> list[Component]:
    """One host: what it cost each window of its jobs over time, and its jobs."""
    windows = results().on_host(host, MOST_WINDOWS)
    head = [html.H1(short(host)), html.P(dcc.Link("All hosts", href=href("/hosts")))]
    if windows.is_empty():
        return [*head, panel("No job", note("No job in this store says that it ran on this host."))]
    jobs = windows.group_by("job", maintain_order=True).agg(
        pl.len().alias("windows"),
        pl.col("share").max(),
        pl.col("number").sort_by("share", descending=True, nulls_last=True).first(),
        pl.col("kinds").explode().drop_nulls().unique(maintain_order=True),
        pl.col("at_s").max(),
    )
    blamed = jobs.filter(pl.col("share") >= SMALLEST_ALARMING_SHARE)
    words = f"The culprit in {blamed.height:,} of its last {counted(jobs.height, 'job')}"
    if blamed.height:
        worst = blamed.sort("share", descending=True).row(0, named=True)
        words += f"; at worst it cost {worst['share']:.0%} of a window of {short(worst['job'])}"
    rows = [
        [
            dcc.Link(short(row["job"]), href=href("/job", job=row["job"], window=row["number"])),
            f"{row['windows']:,}",
            "-" if row["share"] is None else f"{row['share']:.1%}",
            ", ".join(map(kind_words, row["kinds"])) or "none on this host alone",
            viewer().moment(row["at_s"]),
        ]
        for row in jobs.iter_rows(named=True)
    ]
    tone, moments = Tone.BAD if blamed.height else Tone.GOOD, windows["at_s"].to_list()
    margin_s = max(0.02 * (max(moments) - min(moments)), 60.0)
    ends = min(moments) - margin_s, max(moments) + margin_s
    title = f"{viewer().moment(min(moments))} to {viewer().moment(max(moments))}"
    fig = cost_over_time(windows, viewer().theme, lambda job, number: href("/job", job=job, window=number))
    heads = ("Job", "Windows", "Cost at worst", "Causes on this host alone", "Last window")
    return [
        *head,
        html.Section(html.P(f"{words}.", className="verdict"), className=f"panel hero {tone}"),
        figure_panel(
            "What it cost each window of its jobs",
            on_the_clock(fig, ends, None, viewer().zone, title),
            label="Share of the step that causes on this host alone took, a point for each window of its jobs",
            table=windows.select("job", "number", "at_s", "share"),
            id="host-cost",
        ),
        panel("Its jobs, newest first", row_table(heads, rows, "Jobs of this host", (1, 2))),
    ]


def _verdict(blamed: int, jobs: int) -> str:
    if not blamed:
        return f"never the culprit in its last {jobs} jobs" if jobs > 1 else "not the culprit in its only job"
    return f"culprit in {blamed} of its last {jobs} jobs" if jobs > 1 else "culprit in its only job"


def _jobs(row: dict[str, Any]) -> list[Any]:
    """The jobs in which it was the culprit, each a link to the window that shows it."""
    return [
        html.Div(
            [
                dcc.Link(short(window["job"]), href=href("/job", job=window["job"], window=window["number"])),
                f": {', '.join(map(kind_words, window['kinds'].split(', ')))}",
            ]
        )
        for window in row["culprit_in"] or ()
    ]


def _prefetches(reads: Results, args: Mapping[str, str]) -> list[Callable[[], object]]:
    limits = {"last": LAST_JOBS, "most": MOST_LISTED}
    return [partial(read, args.get("q", ""), **limits) for read in (reads.host_history, reads.gpu_history)]


opens_links("host-cost")
page(__name__, "/hosts", "Hosts", build, _prefetches)
