"""Incidents as a table: what, since when, how long, and a link to the window that shows it.

In: incidents of a store. Out: a component.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import percent, printable, short
from tracekit.dashboards.ui.components import badge, folded, href, row_table
from tracekit.dashboards.ui.context import results, viewer
from tracekit.dashboards.ui.sentences import Tone
from tracekit.live.incident_words import advice, evidence, handling, lasted
from tracekit.store import Incident

_HEADS = ("Incident", "Job", "What", "Costs", "Opened", "Lasted")


def incident_table(incidents: Sequence[Incident]) -> Component:
    """One row per incident; an open one names the culprit, the check and the action."""
    return row_table(_HEADS, [_row(one) for one in incidents], "Incidents", numbers=(3, 5), names=_HEADS)


def _row(incident: Incident) -> list[Any]:
    is_open = incident.closed_at is None
    state = (
        badge("closed", Tone.GOOD, loud=False) if incident.settled else badge("may come back", Tone.UNSURE, loud=False)
    )
    state = badge("open", Tone.BAD, loud=True) if is_open else state
    path, asked = evidence(incident)
    what: list[Component] = [html.Div(dcc.Link(printable(incident.cause.what), href=href(path, **asked)))]
    if is_open:
        told = [html.Div([html.B(f"{title}: "), printable(text)]) for title, text in advice(incident)]
        what += [html.Div(told[:1], className="note"), *([folded("What to do", *told[1:])] if told[1:] else [])]
    changes = results().handled(incident.incident_id)
    what += [html.Div(words, className="note") for words in handling(changes, viewer().moment)]
    return [
        [f"{incident.incident_id} ", state],
        html.Td(dcc.Link(short(incident.job), href=href("/job", job=incident.job)), className="short"),
        what,
        percent(incident.cause.share),
        viewer().moment(incident.opened_at.timestamp()),
        [lasted(incident), *_because(incident)],
    ]


def _because(incident: Incident) -> list[Component]:
    """The reason why the incident closed: a crashed job is not cured."""
    why = incident.closed_because
    return [] if why is None else [html.Div(printable(why), className="note")]
