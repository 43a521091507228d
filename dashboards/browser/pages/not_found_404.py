"""What an address that names no page shows. Dash knows the page by the name of this module."""

from __future__ import annotations

from dash import dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.browser.ui.components import href, problem
from tracekit.dashboards.browser.ui.shell import page


def build(**_: str) -> list[Component]:
    """The way back."""
    return [
        html.H1("No such page"),
        problem(
            "This address names no page of the dashboard; it may have been cut when it was copied.",
            way_on=dcc.Link("All jobs", href=href("/")),
        ),
    ]


page(__name__, "/not-found", "No such page", build, lambda *_: [])
