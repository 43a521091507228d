"""Incidents: the open ones of all jobs, the costliest first, then closed ones with their duration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import percent, printable, short
from tracekit.dashboards.browser.ui.components import (
    attributes,
    badge,
    folded,
    href,
    note,
    panel,
    row_table,
    sorting_head,
)
from tracekit.dashboards.browser.ui.context import results, viewer
from tracekit.dashboards.browser.ui.sentences import Tone
from tracekit.dashboards.browser.ui.shell import page
from tracekit.live.incident_words import advice, evidence, handling, lasted, since_words
from tracekit.store import HANG, Incident
from tracekit.store.incidents import IncidentChange, muted_until, owner_of

#: Incidents that are listed, of the open and of the closed ones.
MOST_LISTED = 100
_COSTLIEST = "GPU-hours a day"

COLUMNS = ("Incident", "Job", "What", "Lost", "GPU-hours a day", "Owner", "Since", "Lasted")
_FIGURES = (3, 4, 7)
#: The orders of columns that can be sorted. Those without an owner come first.
ORDERS: dict[str, Callable[[Handled], Any]] = {
    "Job": lambda handled: handled.incident.job,
    "Lost": lambda handled: -handled.incident.cause.share,
    "GPU-hours a day": lambda handled: -(handled.lost or 0.0),
    "Owner": lambda handled: owner_of(handled.changes) or "",
    "Since": lambda handled: -handled.incident.began_s,
    "Lasted": lambda handled: handled.incident.began_s,
}


def build(sort: str = "", **_: str) -> list[Component]:
    """The open ones by column `sort`, then the newest closed ones."""
    incidents, (running, closed_count) = results().incidents(only_open=True), results().count_incidents()
    chosen = sort if sort in ORDERS else _COSTLIEST
    listed = sorted(handled(incidents), key=ORDERS[chosen])[:MOST_LISTED]
    none = note("No cause costs any watched job 5% of its step, and none hangs.")
    table = incident_table(listed, [_head(name, chosen) for name in COLUMNS]) if listed else none
    cut = f", the first {MOST_LISTED} of them" if running > MOST_LISTED else ""
    parts = [html.H1("Incidents"), panel(f"{running:,} open{cut}", table, id="incidents")]
    if closed_count:
        cut = f", the newest {MOST_LISTED} of them" if closed_count > MOST_LISTED else ""
        closed = [incident for incident in results().incidents(most=MOST_LISTED) if incident.closed_at is not None]
        parts.append(panel(f"{closed_count:,} closed{cut}", incident_table(handled(closed))))
    return parts


def _head(name: str, chosen: str) -> Any:
    """The heading of a column, which sorts by it if it can."""
    if name not in ORDERS:
        return name
    path = href("/incidents", sort=None if name == _COSTLIEST else name)
    return sorting_head(name, path, sorts=name == chosen)


@dataclass(frozen=True, slots=True)
class Handled:
    """An incident, what people did about it, and its GPU-hours a day; None if the size of its job is unknown."""

    incident: Incident
    changes: tuple[IncidentChange, ...]
    lost: float | None


def handled(incidents: Sequence[Incident]) -> list[Handled]:
    """The incidents with their changes and the GPU-hours that they lost."""
    gpus: Mapping[str, int | None] = dict(results().jobs().select("name", "gpus").iter_rows()) if incidents else {}
    changes_of = results().store.handled
    return [
        Handled(incident, changes_of(incident.incident_id), _lost_gpu_hours(incident, gpus.get(incident.job)))
        for incident in incidents
    ]


def _lost_gpu_hours(incident: Incident, gpus: int | None) -> float | None:
    if gpus is None and incident.cause.kind == HANG:  # before the job had a trace
        gpus = results().hung_ranks(incident.job)
    return None if gpus is None else 24 * gpus * incident.cause.share


def incident_table(rows: Sequence[Handled], heads: Sequence[Any] = COLUMNS, *, of_job: bool = False) -> Component:
    """One row per incident; an open one names the culprit and what to do, and can be acknowledged. `of_job`: on a page
    about their job, which rows then do not name.
    """
    columns = [[*heads], *map(_row, rows)]
    for cells in columns if of_job else ():
        del cells[COLUMNS.index("Job")]
    return row_table(columns[0], columns[1:], "Incidents", [column - of_job for column in _FIGURES])


def _row(handled: Handled) -> list[Any]:
    incident, is_open = handled.incident, handled.incident.closed_at is None
    path, query = evidence(incident)
    content: list[Component] = [
        html.Div(dcc.Link(printable(incident.cause.what), href=href(path, **query), className="incident"))
    ]
    if is_open:
        advised = {title: html.Div([html.B(f"{title}: "), printable(text)]) for title, text in advice(incident)}
        first = [advised.pop(title) for title in ("Who", "Do") if title in advised]
        content += [html.Div(first, className="note"), *([folded("More", *advised.values())] if advised else [])]
    history = [html.Div(words, className="note") for words in handling(handled.changes, viewer().moment)]
    content += [*([folded(f"Earlier: {len(history) - 1}", *history[:-1])] if history[1:] else []), *history[-1:]]
    return [
        [f"{incident.incident_id} ", *_state_cell(handled)],
        dcc.Link(short(incident.job), href=href("/job", job=incident.job)),
        content,
        percent(incident.cause.share),
        "-" if handled.lost is None else f"{handled.lost:,.1f}",
        [html.Span(short(owner_of(handled.changes) or "none")), *([" ", _button(handled)] if is_open else [])],
        since_words(incident, viewer().moment),
        [lasted(incident), html.Div(printable(incident.closed_because or ""), className="note")],
    ]


def _state_cell(handled: Handled) -> list[Component]:
    """Whether an open incident is muted or has no owner yet; whether a closed one may open again."""
    if handled.incident.closed_at is not None:
        settled = handled.incident.settled
        return [badge("closed" if settled else "may come back", Tone.GOOD if settled else Tone.UNSURE, loud=False)]
    if muted_until(handled.changes, time.time()) is not None:
        return [badge("muted", Tone.UNSURE, loud=False)]
    return [] if handled.changes else [badge("new", Tone.BAD, loud=True)]


def _button(handled: Handled) -> Component:
    number, words = str(handled.incident.incident_id), "Change" if handled.changes else "Acknowledge"
    dialog = {
        "data_handle": number,
        "data_job": short(handled.incident.job),
        "data_owner": owner_of(handled.changes) or "",
    }
    return html.Button(words, className="chip-button", **attributes(**dialog, aria_label=f"{words} incident {number}"))


page(
    __name__,
    "/incidents",
    "Incidents",
    build,
    lambda reads, _: [partial(reads.incidents, only_open=True), reads.count_incidents],
)
