"""Incidents: what goes on in all jobs, the open ones first, then what is over and how long it lasted."""

from __future__ import annotations

from functools import partial

from dash import html
from dash.development.base_component import Component

from tracekit.dashboards.ui.components import note, panel
from tracekit.dashboards.ui.context import results
from tracekit.dashboards.ui.incidents import incident_table
from tracekit.dashboards.ui.shell import page

#: Incidents that are listed, of the open and of the closed ones.
MOST_LISTED = 100


def build(**_: str) -> list[Component]:
    """Both lists, the newest first."""
    incidents, (running, over) = results().incidents(most=MOST_LISTED), results().count_incidents()
    none = note("No cause costs any watched job 5% of its step, and none hangs.")
    listed = [one for one in incidents if one.closed_at is None]
    parts = [html.H1("Incidents"), panel(_title("open", running), incident_table(listed) if listed else none)]
    if over:
        closed = [one for one in incidents if one.closed_at is not None]
        parts.append(panel(_title("closed", over), incident_table(closed)))
    return parts


def _title(state: str, count: int) -> str:
    return f"{count:,} {state}" + (f", the newest {MOST_LISTED} of them" if count > MOST_LISTED else "")


page(
    __name__,
    "/incidents",
    "Incidents",
    build,
    lambda found, _: [partial(found.incidents, most=MOST_LISTED), found.count_incidents],
)
