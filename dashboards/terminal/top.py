"""Watched jobs in a terminal: one job on a screen of 80 columns, and tables of windows and incidents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekit.base.text import counted, percent, printable, seconds, short, three_digits
from tracekit.dashboards.terminal.tables import (
    BAD,
    LOST,
    UNSURE,
    VERDICT_STYLE,
    labelled,
    merged_map,
    new_table,
    sparkline,
)
from tracekit.live.incident_words import advice, handling, lasted, since_words, utc
from tracekit.report.findings import WorkerSlowdowns
from tracekit.store import Incident, Store, StoredWindow, WindowPart
from tracekit.store.incidents import IncidentChange, owner_of

#: The number of windows in the course of a figure, and of open incidents to describe.
_MOST_WINDOWS, _MOST_INCIDENTS = 600, 3
#: Rows of the map that fit with everything else on a screen of 24 lines.
_MAP_ROWS = 4
#: The width of the course over the windows.
_SHAPE = 28
_LONGEST_OWNER = 12


@dataclass(frozen=True)
class TopState:
    """The data of one frame. `windows`: as `LiveTables.history`, the newest last; `incidents`: the open ones, costliest
    first, each with its owner; `workers`: of the newest window; `end`: when and how it ended; None while it runs, and
    of one that was not cut into windows.
    """

    job: str
    windows: pl.DataFrame
    incidents: tuple[tuple[Incident, str | None], ...]
    workers: pl.DataFrame | None
    end: tuple[datetime, str] | None = None

    @classmethod
    def of(cls, store: Store, job: str) -> TopState:
        """The job as the store has it now. Raises StoreError, NotStoredError if it has no window and no incident."""
        with store.reading() as catalogue:
            windows = catalogue.live.history(job, _MOST_WINDOWS)
            incidents = catalogue.live.incidents(job, only_open=True)
            end = catalogue.live.end(job)
            if windows.is_empty() and not incidents:
                raise catalogue.missing(job)
        costliest = sorted(incidents, key=lambda incident: -incident.cause.share)
        owned = tuple((incident, owner_of(store.handled(incident.incident_id))) for incident in costliest)
        workers = None if windows.is_empty() else store.workers(job, int(windows["number"][-1]))
        return cls(job, windows, owned, workers, end)


def frame(state: TopState, now_s: float | None = None) -> RenderableType:
    """One screen. `now_s`: seconds since the epoch."""
    if state.windows.is_empty():
        return Group(Text(f"{short(state.job)}   no window yet", style="bold"), "", *_incidents(state.incidents, ""))
    newest = state.windows.row(-1, named=True)
    age_s = max((time.time() if now_s is None else now_s) - newest["added_at"], 0.0)  # by a clock that is ahead
    when = f"{age_s:.0f} s ago"
    if state.end is not None:
        ended_at, ending = state.end
        when = f"{printable(ending)} at {ended_at.astimezone():%Y-%m-%d %H:%M:%S}"
    parts: list[RenderableType] = [
        Text(
            f"{short(state.job)}   window {newest['number']}, steps {newest['first_step']} to {newest['last_step']},"
            f" {when}",
            style="bold",
        ),
        _verdict(newest),
    ]
    if state.windows["slowdown"].is_not_null().any():
        parts += ["", _figures(state.windows)]
    if state.incidents:
        parts += ["", *_incidents(state.incidents, newest["headline"] or ""), ""]
    if state.workers is not None and (map_lines := _workers(state.workers)) is not None:
        parts.append(map_lines)
    return Group(*parts)


def _verdict(newest: dict[str, Any]) -> Text:
    if newest["headline"] is None:
        return Text(printable(newest["problem"] or "not analysed"), style=UNSURE)
    doubt = "" if newest["trustworthy"] else " (cannot be trusted)"
    kind = newest["verdict"]
    style = UNSURE if doubt else VERDICT_STYLE.get(kind, BAD)
    return Text(f"{kind.upper()}{doubt}", style=style).append(f": {printable(newest['headline'])}", style="default")


def _figures(windows: pl.DataFrame) -> Table:
    """Step time, the share of it that is lost, tokens a second, loss: in the newest window that has them, the one
    before, and all of them.
    """
    table = new_table("", "now", "before", "lowest", "highest", f"{counted(windows.height, 'window')}, oldest first")
    table.columns[-1].justify = "left"
    rows = (
        ("Step time", "recorded_s", seconds),
        ("Lost", "share", percent),
        ("Tokens/s", "tokens_per_s", _rate),
        ("Loss", "loss", "{:.4g}".format),
    )
    for name, column, show in rows:
        values = windows[column].drop_nulls().to_numpy()
        if not len(values):
            continue
        before = show(values[-2]) if len(values) > 1 else "-"
        usual = 1.0 if column == "share" else max(abs(np.median(values)), 1e-9)
        shape = sparkline(values / usual, _SHAPE)
        table.add_row(name, show(values[-1]), before, show(values.min()), show(values.max()), Text(shape, LOST))
    return table


def _rate(value: float) -> str:
    """A rate per second: 950, 12.3k, 4.56M."""
    size, unit = next(((size, unit) for size, unit in ((1e6, "M"), (1e3, "k")) if value >= size), (1.0, ""))
    return f"{three_digits(value / size)}{unit}"


def _incidents(incidents: Sequence[tuple[Incident, str | None]], headline: str) -> Iterator[RenderableType]:
    """The open incidents as a table, and what to do about the costliest. What the headline says is not repeated."""
    table = new_table("Incident", "open for", "costs", "owner", "what")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for incident, owner in incidents[:_MOST_INCIDENTS]:
        subject = incident.cause.who if _is_in(headline, incident) else incident.cause.what
        cells = (short(owner or "none", _LONGEST_OWNER), Text(printable(subject)))
        table.add_row(str(incident.incident_id), lasted(incident), percent(incident.cause.share), *cells)
    yield table
    if more := incidents[_MOST_INCIDENTS:]:
        yield Text(f" and {len(more)} more open incidents", style="dim")
    first = incidents[0][0]
    rows = [(name, printable(text)) for name, text in advice(first) if name != "Who" or not _is_in(headline, first)]
    yield labelled(rows[: 2 if len(incidents) > 1 else 3])


def _is_in(headline: str, incident: Incident) -> bool:
    """Whether a headline says why the incident is one, without the remarks after it."""
    return incident.cause.why.partition(";")[0] in headline


def _workers(rows: pl.DataFrame) -> RenderableType | None:
    """The map of the mean S of each worker over the steps of the window."""
    workers = WorkerSlowdowns.of_rows(rows)
    return merged_map(workers.slowdown.astype(np.float64).mean(axis=0), workers.dp_ranks.tolist(), _MAP_ROWS)


def print_windows(windows: Iterable[StoredWindow], history: pl.DataFrame, console: Console) -> None:
    """Print a line per window: its steps, the share of them that it lost, and its headline. `history`: as of
    `Store.history`.
    """
    judged = {
        number: (share, words) for number, share, words in history.select("number", "share", "headline").iter_rows()
    }
    table = Table("Window", "Steps", "Lost", "What it showed", box=None, padding=(0, 1), header_style="bold underline")
    for column in table.columns[:3]:
        column.no_wrap, column.justify = True, "right"
    table.columns[3].overflow = "fold"
    for window in windows:
        share, words = judged.get(window.number, (None, None))
        result = "not analysed" if window.slowdown is None else printable(words or "")
        pruned = "" if WindowPart.OPS in window.files else " (ops pruned)"
        lost = "-" if share is None else f"{share:z.1%}"
        table.add_row(f"{window.number}", f"{window.first_step} to {window.last_step}", lost, Text(f"{result}{pruned}"))
    console.print(table)


def print_incidents(
    incidents: Sequence[Incident], changes_of: Callable[[int], Sequence[IncidentChange]], console: Console
) -> None:
    """Print each incident: how long it lasts, the cause, since when, and of an open one the culprit and what to do.
    `changes_of`: what people did about an incident, by its number.
    """
    for incident in incidents:
        state, is_open = f"open for {lasted(incident)}", incident.closed_at is None
        if not is_open:
            state = f"lasted {lasted(incident)}, {incident.closed_because}"
        title = Text(f"{incident.incident_id}  {short(incident.job)}", style="bold")
        console.print(title.append(f": {printable(state)}", style="not bold"))
        rows = [("What", incident.cause.what), ("Since", since_words(incident, utc))]
        rows += [*(advice(incident) if is_open else ())]
        rows += [("Handled", words) for words in handling(changes_of(incident.incident_id), utc)]
        console.print(Padding(labelled((name, printable(text)) for name, text in rows), (0, 0, 1, 3)))
