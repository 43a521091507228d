"""The windows of a job on its page: which one is shown, the way to the others, and how the job went over all of them.

In: a stored job. Out: components; nothing of a job with one window that nobody watches. assets/live.js keeps the age of
the newest up to date.
"""

from __future__ import annotations

import time
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from tracekit.base.text import printable
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.ui.components import attributes, href, panel, row_table
from tracekit.dashboards.browser.ui.context import chosen_window, results, viewer
from tracekit.dashboards.browser.ui.incident_table import handled, incident_table

#: Windows that are counted around the one shown, and those that are listed with their headline.
MOST_AROUND, MOST_LISTED = 60, 20
#: A watched job is stale after so many lengths of a window and so long, seconds: as `TracekitStoppedReporting` is due.
STALE_WINDOWS, STALE_S = 5, 60.0


def window_bar(stored: Stored) -> list[Component]:
    """Which window this is, when the newest came, and the way to the others."""
    live = next(results().live_jobs().filter(pl.col("name") == stored.name).iter_rows(named=True), None)
    if live is None or (stored.windows < 2 and not live["watched"] and live["ending"] is None):
        return []
    rows = results().history(stored.name, MOST_AROUND, stored.window).to_dicts()
    numbers = [row["number"] for row in rows]
    shown = next((row for row in rows if row["number"] == stored.window), None)
    steps = "" if shown is None else f", steps {shown['first_step']} to {shown['last_step']}"
    earlier = max((number for number in numbers if number < stored.window), default=None)
    later = min((number for number in numbers if number > stored.window), default=None)
    newest = "" if numbers[-1] == live["number"] else f"; the newest is {live['number']}"
    parts: list[Any] = [
        _way("Earlier window", stored.name, earlier),
        html.B(f"Window {stored.window} of {numbers[0]} to {numbers[-1]}{newest}{steps}"),
        _way("Later window", stored.name, later),
        _age(live),
    ]
    if chosen_window(stored.name) is not None:
        parts.append(dcc.Link("Newest window", href=href("/job", job=stored.name, window=None)))
    return [
        html.Section(
            html.Div(parts, className="window-way"),
            className="panel windows",
            **attributes(aria_label="Windows of this job", data_window=str(stored.window)),
        )
    ]


def _way(words: str, job: str, window: int | None) -> Component:
    if window is None:
        return html.Span(words, className="note")
    return dcc.Link(words, href=href("/job", job=job, window=window))


def _age(live: dict[str, Any]) -> Component:
    """How old the newest window is; a badge once no window has come for too long."""
    if not live["watched"]:
        ending = printable(live["ending"] or "ended")
        return html.Span(f"{ending}; the last window came {viewer().moment(live['added_at'])}", className="note")
    stale_after = STALE_WINDOWS * ((live["ended_at"] or 0.0) - (live["started_at"] or 0.0)) + STALE_S
    age = max(time.time() - live["added_at"], 0.0)  # of another machine, whose clock may be ahead
    stale = age > stale_after
    return html.Span(
        f"{'stale' if stale else 'live'}: newest window {_span(age)} ago",
        className=f"badge {'slow loud' if stale else 'fine'}",
        **attributes(data_added_at=f"{live['added_at']:.3f}", data_stale_after=f"{stale_after:.3f}"),
    )


def _span(age_s: float) -> str:
    """A time span in its largest unit, as assets/live.js writes it."""
    units = (("days", 86400), ("h", 3600), ("min", 60))
    unit, each_s = next((pair for pair in units if age_s >= 2 * pair[1]), ("s", 1))
    return f"{age_s // each_s:.0f} {unit}"


def open_incidents(stored: Stored) -> list[Component]:
    """What goes on in the job, with what to do: it leads the page."""
    incidents = results().incidents(stored.name, only_open=True)
    return [panel("Open incident", incident_table(handled(incidents), of_job=True))] if incidents else []


def history(stored: Stored) -> list[Component]:
    """What each of the last windows showed, and the incidents of the job that are over."""
    incidents = [one for one in results().incidents(stored.name) if one.closed_at is not None]
    parts = []
    if incidents:
        parts.append(panel("Closed incidents of this job", incident_table(handled(incidents), of_job=True)))
    if stored.windows < 2:
        return parts
    rows = [
        [
            dcc.Link(f"{row['number']}", href=href("/job", job=stored.name, window=row["number"])),
            f"{row['first_step']} to {row['last_step']}",
            viewer().moment(row["added_at"]),
            "-" if row["share"] is None else f"{row['share']:z.1%}",
            printable(row["headline"] or row["problem"] or "not analysed"),
        ]
        for row in reversed(results().history(stored.name, MOST_LISTED).to_dicts())
    ]
    heads = ("Window", "Steps", "Stored", "Lost", "What it showed")
    return [*parts, panel("History", row_table(heads, rows, "Windows of this job", numbers=(3,)))]
