"""Share a job from any of its pages: its answer as text for the clipboard, its report as a file.

In: a stored job. Out: a component; assets/share.js copies.
"""

from __future__ import annotations

from importlib.util import find_spec

from dash import html
from dash.development.base_component import Component

from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.components import attributes, href
from tracekit.dashboards.documents.messages import messages

#: Stands for the address of the page, which the browser knows. `printable` lets no name contain it.
ADDRESS = "\ue000"


def share(stored: Stored) -> Component:
    """The menu Share."""
    assert stored.report is not None
    copies = [
        html.Button(f"Copy {'as' if form == 'Markdown' else 'for'} {form}", **attributes(data_copy=text))
        for form, text in messages(stored.report, ADDRESS).items()
    ]
    page = html.A("Download HTML", href=href("/download/report.html", job=stored.name), download="", className="button")
    said = html.Span(role="status", className="note")
    return html.Details(
        [
            html.Summary("Share"),
            html.Div([*copies, page, xlsx("report", "Download XLSX", "button", job=stored.name), said]),
        ],
        className="share",
    )


def xlsx(name: str, words: str, style: str = "", **state: object) -> Component:
    """The link to a file for Excel (`web/downloads.py`), or how to get one where the extra is missing."""
    if find_spec("xlsxwriter") is None:
        return html.Span("XLSX: pip install 'tracekit-analysis[xlsx]'", className="note")
    return html.A(words, href=href(f"/download/{name}.xlsx", **state), download="", className=style)
