"""Incidents: what goes on in all jobs, the costliest first, then what is over and how long it lasted."""

from __future__ import annotations

from functools import partial
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.browser.ui.components import href, note, panel
from tracekit.dashboards.browser.ui.context import results
from tracekit.dashboards.browser.ui.incident_table import COLUMNS, ORDERS, handled, incident_table
from tracekit.dashboards.browser.ui.shell import page

#: Incidents that are listed, of the open and of the closed ones.
MOST_LISTED = 100
_COSTLIEST = "GPU-hours a day"


def build(sort: str = "", **_: str) -> list[Component]:
    """The open ones by column `sort`, then the newest closed ones."""
    incidents, (running, over) = results().incidents(only_open=True), results().count_incidents()
    chosen = sort if sort in ORDERS else _COSTLIEST
    listed = sorted(handled(incidents), key=ORDERS[chosen])[:MOST_LISTED]
    none = note("No cause costs any watched job 5% of its step, and none hangs.")
    table = incident_table(listed, [_head(name, chosen) for name in COLUMNS]) if listed else none
    cut = f", the first {MOST_LISTED} of them" if running > MOST_LISTED else ""
    parts = [html.H1("Incidents"), panel(f"{running:,} open{cut}", table, id="incidents")]
    if over:
        cut = f", the newest {MOST_LISTED} of them" if over > MOST_LISTED else ""
        closed = [one for one in results().incidents(most=MOST_LISTED) if one.closed_at is not None]
        parts.append(panel(f"{over:,} closed{cut}", incident_table(handled(closed))))
    return parts


def _head(name: str, chosen: str) -> Any:
    """The heading of a column, which sorts by it if it can."""
    if name not in ORDERS:
        return name
    words = f"{name} \u2193" if name == chosen else name
    return dcc.Link(words, href=href("/incidents", sort=None if name == _COSTLIEST else name))


page(
    __name__,
    "/incidents",
    "Incidents",
    build,
    lambda reads, _: [partial(reads.incidents, only_open=True), reads.count_incidents],
)
