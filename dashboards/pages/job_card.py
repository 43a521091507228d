"""The card of a job that burns: what, what to do first, what that saves, and how its steps went.

In: a stored job. Out: a component. Sentences come from its report's `answer` and `verdict` alone.
"""

from __future__ import annotations

from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import short
from tracekit.dashboards.data.queries import Stored
from tracekit.dashboards.pages.job_parts import tone_class
from tracekit.dashboards.ui.charts import step_bars
from tracekit.dashboards.ui.components import badge, href, note
from tracekit.dashboards.ui.sentences import first_action, headline, why_no_advice


def job_card(stored: Stored) -> Component:
    """One job."""
    report = stored.report
    link = dcc.Link(html.Bdi(short(stored.name)), href=href("/job", job=stored.name))
    if report is None:  # the list of jobs says more than the report, which is gone or of an older version
        return html.Article(html.Header([html.H3(link), note(stored.problem)]), className="job-card")
    verdict, steps = headline(report), report.get("by_step", ())
    lines = [part for label, words in _rows(report) for part in (html.Dt(label), html.Dd(words))]
    picture = [step_bars(steps, stored.name, links=False)] if len(steps) > 1 else []
    return html.Article(
        [
            html.Header([html.H3(link), *picture]),
            badge(verdict.badge, verdict.tone, loud=True),
            html.P(verdict.sentence, className="what"),
            html.Dl(lines, className="answer"),
        ],
        className=f"job-card {tone_class(verdict.tone)}",
    )


def _rows(report: dict[str, Any]) -> list[tuple[str, Any]]:
    """What to do first, and what that saves."""
    action, saves = first_action(report) or (f"no advice: {why_no_advice(report)}", None)
    rows = {
        "Do first": html.B(action),
        "Saves": saves and saves.removeprefix("saves "),
    }
    return [(label, words) for label, words in rows.items() if words]
