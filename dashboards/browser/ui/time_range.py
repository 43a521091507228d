"""The range of time that a reader chose for all pages of a job, and the control that chooses it.

In: a job with its range (`ui/context.py`). Out: components. Pages of a job with several windows show the newest one in
the range; charts of time show the range alone.
"""

from __future__ import annotations

from datetime import UTC, datetime

import plotly.graph_objects as go
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.dashboards.browser.ui.components import href
from tracekit.dashboards.browser.ui.context import chosen_range, results, viewer
from tracekit.dashboards.browser.ui.forms import text_field

#: Ranges that end with the job: name and seconds.
_LAST = (("last 15 minutes", 900.0), ("last hour", 3600.0), ("last day", 86400.0), ("last week", 604800.0))


def range_control(job: str, path: str) -> list[Component]:
    """What range is shown, with links to others and a form; nothing where the job has no times."""
    whole = results().spans(job, 1)
    if whole.is_empty():
        return []
    begin, end = float(whole["start_s"][0]), float(whole["end_s"][0])
    chosen = chosen_range(job)
    shown = "All of the run" if chosen is None else "Range"
    moments = [viewer().moment(at) for at in ((begin, end) if chosen is None else chosen.within(begin, end))]
    ways = [
        dcc.Link(name, href=href(path, job=job, since=_iso(max(end - length, begin)), until=_iso(end), window=None))
        for name, length in _LAST
        if length < end - begin
    ]
    if chosen is not None:
        ways.insert(0, dcc.Link("all of the run", href=href(path, job=job, since=None, until=None)))
    texts = ("", "") if chosen is None else (chosen.begin, chosen.end)
    fields = [
        text_field(f"range-{name}", name.title(), text, placeholder=_iso(at), sent_as=name, style="wide")
        for name, text, at in zip(("since", "until"), texts, (begin, end), strict=True)
    ]
    form = html.Form(
        [dcc.Input(type="hidden", name="job", value=job), *fields, html.Button("Show")], action=href(path), method="GET"
    )
    summary = html.Summary([html.B(f"{shown}: "), f"{moments[0]} to {moments[1]}"])
    return [html.Details([summary, html.Div(ways, className="ways-on"), form], className="time-range")]


def in_range(drawn: go.Figure, job: str) -> go.Figure:
    """A figure over the steps of a job (`step_axis`), zoomed to the chosen range."""
    if (chosen := chosen_range(job)) is not None:
        starts = results().step_starts(job)
        steps = [step for step, at in starts.items() if at is not None and chosen.since <= at <= chosen.until]
        if steps:
            drawn.update_layout(meta=drawn.layout.meta | {"range": [min(steps) - 0.5, max(steps) + 0.5]})
    return drawn


def _iso(moment: float) -> str:
    """As addresses write a moment."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
