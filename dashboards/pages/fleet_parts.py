"""The card of a job that needs attention: what, who, what it costs, what to do first, and how its steps went.

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
from tracekit.dashboards.ui.components import badge, href
from tracekit.dashboards.ui.sentences import (
    first_action,
    gpu_action,
    gpu_cost,
    gpu_culprit,
    headline,
    op_headline,
    why_no_advice,
)


def job_card(stored: Stored) -> Component:
    """One job."""
    if stored.report is not None:
        verdict, rows, steps = headline(stored.report), _rows(stored.report), stored.report["by_step"]
    elif stored.op_report is not None:
        verdict, rows, steps = op_headline(stored.op_report), _gpu_rows(stored.op_report), []
    else:  # the list of jobs says more than the report, which is gone
        return html.Article(dcc.Link(short(stored.name), href=href("/job", job=stored.name)), className="job-card")
    lines = [part for label, words in rows for part in (html.Dt(label), html.Dd(words))]
    link = dcc.Link(html.Bdi(short(stored.name)), href=href("/job", job=stored.name))
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
    """Who, what to do first and what that saves; reports of older stores have no such sentences."""
    answer = report.get("answer") or {}
    action, saves = first_action(report) or (f"no advice: {why_no_advice(report)}", None)
    rows = {
        "Do first": html.B(action),
        "Saves": saves and saves.removeprefix("saves "),
        "Who": answer.get("who"),
        "Costs": answer.get("cost"),
    }
    return [(label, words) for label, words in rows.items() if words]


def _gpu_rows(report: dict[str, Any]) -> list[tuple[str, Any]]:
    """The same of a recording of GPUs; none of another op trace, whose report names no cause."""
    action = gpu_action(report)
    if action is None:
        return []
    what, saves = action
    costs = [("Costs", said)] if (said := gpu_cost(report)) else []
    rows = [("Do first", html.B(what)), ("Saves", saves), ("Who", gpu_culprit(report)), *costs]
    return [(label, words) for label, words in rows if words]
