"""Incidents: what goes on in all jobs, the open ones first, then what is over and how long it lasted."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from tracekit.dashboards.ui.components import note, panel
from tracekit.dashboards.ui.context import results
from tracekit.dashboards.ui.incidents import incident_table
from tracekit.dashboards.ui.shell import page

#: Closed incidents that are listed.
MOST_CLOSED = 200


def build(**_: str) -> list[Component]:
    """Both lists, the newest first."""
    incidents = results().incidents()
    running = [one for one in incidents if one.closed_at is None]
    over = [one for one in incidents if one.closed_at is not None]
    none = "No cause costs any watched job 5 % of its step, and none hangs."
    listed = panel(f"{len(running):,} open", incident_table(running) if running else note(none))
    parts = [html.H1("Incidents"), listed]
    if over:
        more = f", the newest {MOST_CLOSED} of {len(over):,}" if len(over) > MOST_CLOSED else ""
        parts.append(panel(f"{len(over):,} closed{more}", incident_table(over[:MOST_CLOSED])))
    return parts


page(__name__, "/incidents", "Incidents", build, lambda found, _: [found.incidents])
