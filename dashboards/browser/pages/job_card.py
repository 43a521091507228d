"""The card of a job that burns: what, what to do first, what that saves, and how its steps went.

In: a stored job, or an open hang. Out: a component. Sentences come from its report's `answer` and `verdict` alone.
"""

from __future__ import annotations

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import printable, short
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.charts import step_bars
from tracekit.dashboards.browser.ui.components import badge, href, note
from tracekit.dashboards.browser.ui.context import viewer
from tracekit.dashboards.browser.ui.sentences import Tone, first_action, headline, run_headline, why_no_advice
from tracekit.dashboards.run_words import run_advice, run_of_several
from tracekit.store import Incident


def job_card(stored: Stored) -> Component:
    """One job."""
    report = stored.report
    link = dcc.Link(html.Bdi(short(stored.name)), href=href("/job", job=stored.name))
    if report is None:  # the list of jobs says more than the report, which is gone or of an older version
        return html.Article(html.Header([html.H3(link), note(stored.problem)]), className="job-card")
    verdict, steps = run_headline(report, viewer().zone) or headline(report), report.by_step
    run = run_of_several(report)
    of_run = None if run is None else run_advice(run, report)
    action, saves = first_action(report) or (f"no advice: {why_no_advice(report)}", "")
    action, saves = (action, saves) if of_run is None else (of_run, "")
    lines = [html.Dt("Do first"), html.Dd(html.B(action))]
    lines += [html.Dt("Saves"), html.Dd(saves.removeprefix("saves "))] if saves else []
    picture = [step_bars(steps, stored.name, links=False)] if len(steps) > 1 else []
    return _card([html.H3(link), *picture], verdict.badge, verdict.tone, verdict.sentence, lines)


def hang_card(incident: Incident) -> Component:
    """A job that hangs."""
    cause = incident.cause
    link = dcc.Link(html.Bdi(short(incident.job)), href=href("/hang", job=incident.job))
    lines = [
        html.Dt("Who"),
        html.Dd(printable(cause.who)),
        html.Dt("Do first"),
        html.Dd(html.B(printable(cause.check))),
    ]
    return _card([html.H3(link)], cause.kind, Tone.BAD, printable(cause.what), lines)


def _card(head: list[Component], label: str, tone: Tone, sentence: str, lines: list[Component]) -> Component:
    return html.Article(
        [
            html.Header(head),
            badge(label, tone, loud=True),
            html.P(sentence, className="what"),
            html.Dl(lines, className="answer"),
        ],
        className=f"job-card {tone}",
    )
