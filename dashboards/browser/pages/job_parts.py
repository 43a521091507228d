"""The first screen of the page Job: the answer in a card, and the pictures beside it.

In: a stored job and its report. Out: components. Sentences come from the report's `answer`, `verdict` and `remarks`
alone.
"""

from __future__ import annotations

from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import main_clause, seconds, short
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.pages.run_parts import others_note
from tracekit.dashboards.browser.pages.section_parts import ranks_picture
from tracekit.dashboards.browser.ui.charts import Level, steps_picture, worker_cells
from tracekit.dashboards.browser.ui.components import attributes, href, panel
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.sentences import Tone, first_action, headline, node_words, why_no_advice
from tracekit.dashboards.run_words import run_of_several, since_words
from tracekit.report.report import Report

#: A label, its sentence, and the link to where its figures can be seen.
AnswerRow = tuple[str, str | None, Component | None]


def hero(stored: Stored, report: Report) -> Component:
    """What, who, why, what to do first, what that saves, and whether to believe it: each with the way to see it."""
    verdict, trust = headline(report), report.trust
    now = "Now: " if run_of_several(report) else ""
    rows = [row for row in _rows(stored, report) if row[1]]
    parts: list[Any] = [
        html.P(f"{now}{verdict.sentence}", className="verdict"),
        _action(stored, report),
        html.Dl(
            [part for label, words, link in rows for part in (html.Dt(label), html.Dd([words, " ", link]))],
            className="answer",
        ),
    ]
    if not trust.trustworthy:
        reasons = "; ".join(map(short, trust.reasons))
        parts.append(html.P(["Do not trust these figures: ", reasons], className="warning"))
    return html.Section(parts, className=f"panel hero {verdict.tone}", **attributes(aria_label="The answer"))


def _action(stored: Stored, report: Report) -> Component:
    """What to do first, and what that gives back; or why nothing is advised."""
    action = first_action(report)
    if action is None:
        healthy = headline(report).tone is Tone.GOOD
        nothing = "Nothing to do in this window." if stored.windows > 1 else "Nothing to do."
        said = nothing if healthy else f"No advice: {why_no_advice(report)}."
        return html.Div(html.P(said), className="action")
    first = html.P([html.Span("Do this first: ", className="label"), html.B(action[0])])
    then = [f"{words.rstrip('.')}." for words in (action[1], node_words(report)) if words]
    parts = [*then, way(stored, "price other fixes", "/whatif")]
    return html.Div([first, html.P([each for part in parts for each in (part, " ")])], className="action")


def _rows(stored: Stored, report: Report) -> list[AnswerRow]:
    """Label, sentence, and the link to where its figures can be seen."""
    answer = report.answer
    step = report.worst_step.step if report.by_step else None
    trust = f"{'yes' if report.trust.trustworthy else 'NO'}: {answer.trust}"
    path = way(
        stored,
        "critical path of the slowest step",
        "/timeline",
        step=step,
        critical="yes",
    )
    why, since = answer.why, since_words(report, viewer().zone)
    if why and main_clause(why) in answer.headline:
        why = None
    return [
        (
            "Who",
            answer.who and answer.who + since,
            way(stored, "worker map", "/workers", worker=culprit(report)),
        ),
        ("Why", why, path),
        ("Costs", answer.cost, path if why is None else way(stored, "steps", "/workers")),
        ("More to check", answer.check, None),
        ("Run", others_note(stored, report), None),
        ("Trust", trust, None),
        *((remark.name, remark.words, None) for remark in report.remarks),
    ]


def way(stored: Stored, words: str, path: str, **state: object) -> Component | None:
    """A link to a page of the job that is about workers; None if the job has none."""
    return dcc.Link(words, href=href(path, job=stored.name, **state), className="way") if stored.has_workers else None


def culprit(report: Report) -> str | None:
    """The worker of the costliest cause that sits on one, as addresses write it."""
    culprits = report.answer.culprits
    return f"{culprits[0].dp_rank},{culprits[0].pp_rank}" if culprits else None


def pictures(stored: Stored, report: Report) -> list[Component]:
    """Beside the answer: the worker map and the steps, small, or the GPU time of the ranks."""
    if not stored.has_workers:
        return ranks_picture(stored, report)
    worker_map = results().worker_map(stored.name)
    parts = [panel("Steps", steps_picture(report.by_step, stored.name))]
    if worker_map.slowdown.size > 1:
        parts.insert(0, panel("Workers", worker_cells(worker_map, stored.name)))
    return [html.Div(parts, className="pictures")]


def fix_levels(stored: Stored, report: Report) -> list[Level]:
    """Recorded, each fix of the best combination on top of those before it, and what is left; empty without one."""
    fixes = [fix for fix in report.fixes if fix.kind == "combination" and fix.withheld is None]
    if not fixes:
        return []

    def page(path: str) -> str | None:
        return href(path, job=stored.name) if stored.has_workers else None

    step_s, theme = report.step_time_s.recorded, viewer().theme
    levels = [Level("Recorded", 0, step_s, theme.recorded, seconds(step_s), page("/workers"))]
    doubtful = {fix.title for fix in report.fixes if fix.withheld is not None}
    for fix in fixes[0].details["sequence"]:
        saved_s = fix["marginal_saved_s"]
        title = f"{fix['title']} (not promised alone)" if fix["title"] in doubtful else fix["title"]
        levels.append(Level(title, step_s, step_s - saved_s, theme.changed, f"-{seconds(saved_s)}", page("/whatif")))
        step_s -= saved_s
    return [*levels, Level("With these fixes", 0, step_s, theme.changed, seconds(step_s), page("/whatif"))]
