"""Fleet: how many jobs of a study straggle, what is lost, to what, where, and which fixes give back most."""

from __future__ import annotations

from collections.abc import Iterator

from dash import html
from dash.development.base_component import Component

from tracekit.dashboards.data.fleet_study import FleetReport
from tracekit.dashboards.figures.fleet import distribution
from tracekit.dashboards.pages.job_parts import tone_class
from tracekit.dashboards.ui.components import attributes, figure_panel, html_table, inline_csv, note, panel
from tracekit.dashboards.ui.context import study, viewer
from tracekit.dashboards.ui.sentences import Tone
from tracekit.dashboards.ui.shell import page
from tracekit.fleet.words import Table, answer_rows, culprits_table, headline, tables


def build(**_: str) -> list[Component]:
    """The report on the study that the server was given."""
    served = study()
    if served is None:
        how = "`tracekit fleet run TRACES --out STUDY` makes one, `tracekit dashboard --study STUDY` shows it here."
        return [html.H1("Fleet"), panel("No study", note(how))]
    report = served.report()
    found = report.figures
    answer = [part for about, words in answer_rows(found) for part in (html.Dt(about), html.Dd(words))]
    tone = Tone.BAD if found.straggling_jobs.value > 0 else Tone.GOOD
    verdict = html.P(headline(found), className="verdict")
    return [
        html.H1(f"Fleet: {report.name}"),
        html.Section([verdict, html.Dl(answer, className="answer")], className=f"panel hero {tone_class(tone)}"),
        *([html.Div(list(_distributions(report)), className="row")] if found.jobs else []),
        _culprits(report),
        html.Div([html.Div(_panel(table), className="half") for table in tables(found)], className="row"),
    ]


def _distributions(report: FleetReport) -> Iterator[Component]:
    for of, title in (("slowdown", "Slowdown"), ("waste", "Waste")):
        table = report.curves.select("quantile", f"{of}_jobs", f"{of}_hours")
        drawn = figure_panel(
            f"{title}: cumulative distribution",
            distribution(report.curves, of, title, viewer().theme),
            label=f"Share of jobs and of GPU-hours with at most that {title}",
            table=table,
            csv=inline_csv(table),
        )
        yield html.Div(drawn, className="half")


def _culprits(report: FleetReport) -> Component:
    table = culprits_table(report.culprits, report.rate)
    if not table.rows:
        return panel(table.title, note("None beyond chance."))
    csv = html.A("CSV", href=inline_csv(report.culprits), download="")
    return panel(table.title, _shown(table), note(table.note), extra=csv)


def _panel(table: Table) -> Component:
    return panel(table.title, _shown(table), *([note(table.note)] if table.note else []))


def _shown(table: Table) -> Component:
    numbers = [at for at, figures in enumerate(table.figures()) if figures]
    # On a phone the table scrolls sideways, so the keyboard must reach it.
    return html_table(table.heads, table.rows, numbers, tabIndex=0, **attributes(aria_label=table.title))


page(__name__, "/fleet", "Fleet", build, lambda _found, _state: [])
