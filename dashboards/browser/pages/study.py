"""Fleet: how many jobs of a study straggle, what is lost, to what, where, and which fixes give back most."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component
from msgspec import structs

from tracekit.base.errors import StoreError
from tracekit.base.paths import adding
from tracekit.base.text import short
from tracekit.dashboards.browser.data.queries import FleetReport, FleetStudy
from tracekit.dashboards.browser.ui.components import (
    figure_panel,
    folded,
    halves,
    href,
    inline_csv,
    note,
    panel,
    row_table,
)
from tracekit.dashboards.browser.ui.context import results, service, viewer
from tracekit.dashboards.browser.ui.figures import distribution
from tracekit.dashboards.browser.ui.sentences import Tone
from tracekit.dashboards.browser.ui.shell import page
from tracekit.dashboards.words import figure_columns
from tracekit.fleet.words import APPLIED, BY_CAUSE, BY_TEAM, answer_rows, culprits_table, headline, hours, tables
from tracekit.report.findings import AppliedFix
from tracekit.report.tables import Table

#: Jobs that are listed, and rows of a table on the first screen.
MOST_JOBS, MOST_ROWS = 5, 4


def build(team: str = "", cause: str = "", job: str = "", **_: str) -> list[Component]:
    """The report on the study that the server was given. `team`, `cause`: those of the jobs that are listed; `job`: the
    one to show.
    """
    served = service().study
    if served is None:
        advice = "`tracekit fleet run TRACES --out STUDY` makes one, `tracekit dashboard --study STUDY` shows it here."
        return [html.H1("Fleet"), panel("No study", note(advice))]
    report = served.report()
    if job:
        return _job_page(served, report, job)
    applied: tuple[AppliedFix, ...] = ()
    stored: set[str] = set()
    with suppress(StoreError):  # a study can be served without a store
        applied, stored = results().store.applied(), set(results().jobs()["name"])
    figures = replace(report.figures, applied=applied)
    answer = [part for about, words in answer_rows(figures) for part in (html.Dt(about), html.Dd(words))]
    tone = Tone.BAD if figures.straggling_jobs.value > 0 else Tone.GOOD
    verdict = html.P(headline(figures), className="verdict")
    drilled = {
        BY_CAUSE: ("cause", figures.causes["kind"].to_list()),
        BY_TEAM: ("team", figures.groups["team"]["group"].to_list()),
    }
    all_tables = list(tables(figures))
    titles = [BY_CAUSE, APPLIED, *([BY_TEAM] if figures.groups["team"].height > 1 else [])]
    short_ones = [
        structs.replace(table, rows=table.rows[:MOST_ROWS], note=None) for table in all_tables if table.title in titles
    ]
    first = [_panel(table, *drilled.get(table.title, ())) for table in short_ones]
    rest = [_panel(table, *drilled.get(table.title, ())) for table in all_tables]
    (first if report.culprits.height else rest).append(_culprits(report))
    return [
        html.H1(f"Fleet: {report.name}"),
        html.Section([verdict, html.Dl(answer, className="answer paired")], className=f"panel hero {tone}"),
        halves(_jobs(report, team, cause, stored), *first),
        folded("All tables", halves(*([_distribution(report)] if figures.jobs else []), *rest)),
    ]


def _distribution(report: FleetReport) -> Component:
    table = report.curves.select("quantile", "waste_jobs", "waste_hours")
    return figure_panel(
        "What jobs lose: cumulative distribution",
        distribution(report.curves, viewer().theme),
        label="Share of jobs and of GPU-hours that lose at most that",
        table=table,
        csv=inline_csv(table),
    )


def _jobs(report: FleetReport, team: str, cause: str, stored: set[str]) -> Component:
    """The jobs that lose most, each with the way to its page: of those that are `stored`, the page Job."""
    jobs, price = report.jobs, service().gpu_hour
    if team:
        jobs = jobs.filter(pl.col("team").fill_null("unknown") == team)
    if cause:
        jobs = jobs.filter(pl.col("causes").list.contains(cause))
    rows = [
        [
            dcc.Link(short(row["name"]), href=_job_address(row["name"], stored)),
            short(row["team"] or "unknown"),
            "-" if row["verdict_share"] is None else f"{row['verdict_share']:.1%}",
            hours(row["lost_gpu_hours"]),
            *([] if price is None else [hours(row["lost_gpu_hours"] * price)]),
        ]
        for row in jobs.head(MOST_JOBS).filter(pl.col("slowdown").is_not_null()).iter_rows(named=True)
    ]
    chosen = ", ".join(f"{name} {short(value)}" for name, value in (("team", team), ("cause", cause)) if value)
    heads = ["Job", "Team", "Lost", "GPU-hours lost", *([] if price is None else ["Cost"])]
    table = row_table(heads, rows, "Jobs that lose most", range(2, len(heads)))
    count = html.Span(f"{jobs.height:,} jobs ", className="note")
    everything = [dcc.Link("All jobs", href=href("/fleet"))] if chosen else []
    return panel(f"Jobs that lose most{f': {chosen}' if chosen else ''}", table, extra=[count, *everything])


def _job_address(name: str, stored: set[str]) -> str:
    return href("/job", job=name) if name in stored else href("/fleet", job=name)


def _job_page(served: FleetStudy, report: FleetReport, name: str) -> list[Component]:
    head = [html.H1(f"Fleet: {report.name}"), html.P(dcc.Link("All jobs", href=href("/fleet")))]
    rows = report.jobs.filter(pl.col("name") == name)
    if rows.is_empty():
        return [*head, panel("No such job", note(f"The study has no job named {short(name)} that counts."))]
    (row,), price = rows.head(1).iter_rows(named=True), service().gpu_hour
    lost = f"{hours(row['lost_gpu_hours'])} of {hours(row['gpu_hours'])} GPU-hours lost"
    lost += "" if price is None else f", {hours(row['lost_gpu_hours'] * price)} at {price:g} a GPU-hour"
    causes, fixes = served.of_job(row["job"])
    cause_rows = [
        [cause["title"], cause["where"], hours(cause["lost_gpu_hours"]), cause["suggested_fix"] or "-"]
        for cause in causes.iter_rows(named=True)
    ]
    fix_rows = [[fix["title"], fix["where"], hours(fix["saved_gpu_hours"])] for fix in fixes.iter_rows(named=True)]
    sentence = row["headline"] or "no verdict"
    verdict = html.P(f"{sentence[:1].upper()}{sentence[1:]}.", className="verdict")
    advice = note(f"`{adding(results().path)}` with its trace shows all of it, step by step.")
    heads, fix_heads = ("Cause", "Where", "GPU-hours lost", "What to do"), ("Fix", "Where", "GPU-hours saved")
    tone = Tone.BAD if row["straggling"] or cause_rows else Tone.GOOD
    return [
        *head,
        html.Section([html.H2(short(name)), verdict, note(f"{lost}.")], className=f"panel hero {tone}"),
        *([panel("Why", row_table(heads, cause_rows, "Causes", (2,)))] if cause_rows else []),
        *([panel("Fixes", row_table(fix_heads, fix_rows, "Fixes", (2,)))] if fix_rows else []),
        advice,
    ]


def _culprits(report: FleetReport) -> Component:
    table = culprits_table(report.culprits, report.rate)
    if not table.rows:
        return panel(table.title, note(table.note or ""))
    csv = html.A("CSV", href=inline_csv(report.culprits), download="")
    return panel(table.title, _table_component(table, table.rows), note(table.note or ""), extra=csv)


def _panel(table: Table, by: str = "", values: Sequence[str] = ()) -> Component:
    """A table; with `by`, a parameter of this page, each row leads to the jobs of its value."""
    cells: list[Any] = list(table.rows)
    if by:
        cells = [
            [dcc.Link(first, href=href("/fleet", **{by: value})), *others]
            for (first, *others), value in zip(table.rows, values, strict=False)  # of many, the first are listed
        ]
    return panel(table.title, _table_component(table, cells), *([note(table.note)] if table.note else []))


def _table_component(table: Table, cells: Sequence[Any]) -> Component:
    return row_table(table.heads, cells, table.title, figure_columns(table.rows))


page(__name__, "/fleet", "Fleet", build, lambda _study, _state: [])
