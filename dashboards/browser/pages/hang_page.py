"""Hang: which ranks hold a hung job up, why, what to do first, and who waits for whom."""

from __future__ import annotations

from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.analysis.hang.hang_report import HangCulprit, HangReport, waiting_ranks
from tracekit.base.errors import NotStoredError
from tracekit.base.paths import command
from tracekit.base.text import counted, printable, ranks_text, short
from tracekit.dashboards.browser.data.hang_graph import fold, graph_width, node_table, wait_graph
from tracekit.dashboards.browser.ui.components import figure_panel, href, inline_csv, note, panel, problem
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.shell import job_head, page
from tracekit.live.incident_words import advice
from tracekit.store import HANG, Incident
from tracekit.store.hangs import StoredHang

#: Culprits, stacks and earlier hangs that are listed.
MOST_CULPRITS, MOST_STACKS, MOST_HANGS = 32, 6, 20


def build(job: str | None = None, **_: str) -> list[Component]:
    """The newest hang of a job, without `job=` of the store; then a list of the others."""
    hangs = results().store.hangs(job)
    incidents = [] if hangs else [incident for incident in results().incidents(job) if incident.cause.kind == HANG]
    if not hangs and not incidents and job is not None:
        results().stored(job)  # raises if there is no such job
    head = _head(job)
    if incidents:
        return [*head, *map(_without_report, incidents[:MOST_HANGS])]
    if not hangs:
        watch = command("collect", "--hang-after", "120", "--store", results().path, "--", "COMMAND")
        advice = f"`{watch}` watches a job, and keeps what it sees here."
        scope = "in this store" if job is None else f"of {short(job)}"
        return [*head, panel("No hang", html.P(f"No hang {scope} was recorded."), note(advice))]
    newest = hangs[0]
    nodes = fold(newest.report)
    table = node_table(nodes)
    graph = figure_panel(
        "Who waits for whom",
        wait_graph(nodes, viewer().theme),
        label=(
            f"Wait-for graph: {counted(len(newest.report.culprits), 'culprit')},"
            f" {waiting_ranks(len(newest.report.waiting))}"
        ),
        table=table,
        csv=inline_csv(table),
        id="hang-graph",
        width=graph_width(nodes),
        extra=html.Span("culprits at the left, then those that wait for them, by process group", className="note"),
    )
    return [*head, _verdict(newest), graph, *_stacks(newest.report), *_earlier_hangs(hangs[1:])]


def _head(job: str | None) -> list[Component]:
    """The tabs of the job, where its trace is in the store: one that hangs at once has none."""
    if job is None:
        return [html.H1("Hangs")]
    try:
        return [job_head(results().stored(job), "/hang")]
    except NotStoredError:
        return [
            html.H1(short(job)),
            note("This job has no trace in the store: it hung, or failed, before one was made."),
        ]


def _verdict(hang: StoredHang) -> Component:
    report = hang.report
    more = len(report.culprits) - MOST_CULPRITS
    return panel(
        "Verdict",
        html.P(f"{short(hang.job)}, {viewer().moment(hang.found_at)}", className="note"),
        html.P(report.headline, className="verdict"),
        *([html.P(["Do first: ", html.B(report.first_step)])] if report.first_step else []),
        html.Ol([html.Li(_culprit(culprit)) for culprit in report.culprits[:MOST_CULPRITS]], className="causes"),
        *([note(f"and {counted(more, 'more culprit')}: see the table")] if more > 0 else []),
        *[
            problem(
                f"{ranks_text(stall.ranks)}: {stall.missing}",
                title="All alike" if stall.alike else "Cannot tell",
            )
            for stall in report.undecided[:MOST_CULPRITS]
        ],
        *[note(words) for words in report.notes],
    )


def _without_report(incident: Incident) -> Component:
    """A hang whose report was removed, from its incident."""
    check = command("store", "check", "--store", results().path)
    return panel(
        "Verdict",
        html.P(f"{short(incident.job)}, {viewer().moment(incident.opened_at.timestamp())}", className="note"),
        html.P(printable(incident.cause.what), className="verdict"),
        *[html.P([f"{title}: ", html.B(printable(text))]) for title, text in advice(incident)],
        note(f"Its report was removed, or is none that this tracekit reads: `{check}` names what cannot be read."),
    )


def _culprit(culprit: HangCulprit) -> list[Any]:
    host = f" on {printable(culprit.host)}" if culprit.host else ""
    since = "" if culprit.since_s is None else f", for {culprit.since_s:.1f} s"
    phase = f", in {culprit.phase}" if culprit.phase else ""
    group = culprit.group or "an unnamed group"
    holds = f" holds up {counted(culprit.waiting, 'rank')} in {culprit.operation} of {group}{since}"
    return [
        html.B(f"rank {culprit.rank}{host}: {culprit.stall_class}{phase}"),
        html.Div(f"It{holds}."),
        html.Div("; ".join(map(printable, culprit.evidence)), className="note"),
    ]


def _stacks(report: HangReport) -> list[Component]:
    """Equal stacks once, the few that differ from the many first."""
    groups = report.stacks
    if not groups:
        return []
    parts = [
        html.Details(
            [
                html.Summary(f"{ranks_text(group.ranks)}: {printable(next(iter(group.frames), ''))}"),
                html.Ol([html.Li(html.Code(printable(frame))) for frame in group.frames], className="evidence"),
            ],
            open=number == 0,
        )
        for number, group in enumerate(groups[:MOST_STACKS])
    ]
    more = [note(f"and {counted(len(groups) - MOST_STACKS, 'more stack')}")] if len(groups) > MOST_STACKS else []
    return [panel("Stacks, the fewest ranks first", *parts, *more)]


def _earlier_hangs(hangs: tuple[StoredHang, ...]) -> list[Component]:
    if not hangs:
        return []
    rows = [
        html.Li(
            [
                f"{viewer().moment(hang.found_at)}: ",
                dcc.Link(short(hang.job), href=href("/hang", job=hang.job)),
                f": {hang.report.headline}",
            ]
        )
        for hang in hangs[:MOST_HANGS]
    ]
    more = [note(f"and {len(hangs) - MOST_HANGS} more")] if len(hangs) > MOST_HANGS else []
    return [panel("Earlier hangs", html.Ul(rows, className="evidence"), *more)]


page(__name__, "/hang", "Hang", build)
