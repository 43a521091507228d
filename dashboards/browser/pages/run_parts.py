"""The verdict of a run on the page of its job: what all its windows lost, to whom, from when to when, and what to do.

In: a stored job. Out: components; nothing of a job with one window.
"""

from __future__ import annotations

from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import printable, short, three_digits
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.components import attributes, badge, folded, href, note, row_table
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.sentences import Tone, run_headline
from tracekit.dashboards.run_words import (
    coverage_words,
    elsewhere_words,
    run_advice,
    run_of_several,
    share_words,
    steps_words,
    times_words,
    who_words,
)
from tracekit.report.finding import kind_words
from tracekit.report.report import Report
from tracekit.report.run import RunCause, RunVerdict, State

_HEADS = ("Cause", "Where", "Lost", "GPU-hours", "Steps", "When", "State")
_TONES = {State.OPEN: Tone.BAD, State.OVER: Tone.GOOD, State.ENDED: Tone.UNSURE}


def run_panel(stored: Stored, report: Report) -> list[Component]:
    """The first sentence about the run, what to do first, and its causes; nothing if the page is about one window."""
    run, verdict = run_of_several(report), run_headline(report, viewer().zone)
    if run is None or verdict is None:
        return []
    parts: list[Any] = [html.P(verdict.sentence, className="verdict")]
    if (advice := run_advice(run, report)) is not None:
        parts.append(html.P([html.Span("Do: ", className="label"), html.B(printable(advice))], className="action"))
    if run.causes:
        parts.append(_causes(stored.name, run))
    if covers := coverage_words(run):
        parts.append(note(f"Covers {covers}."))
    return [html.Section(parts, className=f"panel hero {verdict.tone}", **attributes(aria_label="The run"))]


def others_note(stored: Stored, report: Report) -> str | None:
    """What other windows of the run name, for the page of one window."""
    if stored.windows < 2 or report.run:
        return None
    run = results().run(stored.name)
    return None if run is None else elsewhere_words(run, report)


def _causes(job: str, run: RunVerdict) -> Component:
    """The causes that were large in some window; the others folded, so that all of them add up to the bill."""
    rows = [_row(job, cause) for cause in run.alarming]
    small = [_row(job, cause) for cause in run.causes if cause not in run.alarming]
    parts = [row_table(_HEADS, rows, "What the run lost", (2, 3))] if rows else []
    total = f"{three_digits(run.gpu_hours_lost)} GPU-hours lost in all, {share_words(run, run.lost_s)}"
    if small:
        parts.append(folded(f"{len(small)} smaller; {total}", row_table(_HEADS, small, "Smaller losses", (2, 3))))
    elif len(rows) > 1:
        parts.append(note(f"{total}."))
    return html.Div(parts)


def _row(job: str, cause: RunCause) -> list[Any]:
    name = kind_words(cause.cause)
    return [
        dcc.Link(name, href=href("/job", job=job, window=cause.worst_window)),
        who_words(cause) if cause.ranks else "whole job",
        f"{cause.lost_share:.1%}",
        three_digits(cause.gpu_hours_lost),
        short(steps_words(cause)),
        times_words(cause, viewer().zone) or "-",
        badge(str(cause.state).replace("-", " "), _TONES[cause.state], loud=cause.state is State.OPEN),
    ]
