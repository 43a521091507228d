"""Windows and incidents of watched jobs in a terminal.

In: what a store keeps of them. Out: text on a rich console, wrapped to its width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import polars as pl
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekit.base.text import printable, short
from tracekit.dashboards.terminal.tables import labelled
from tracekit.live.incident_words import advice, handling, lasted, since_words, utc
from tracekit.store import Incident, StoredWindow, WindowPart
from tracekit.store.handling import IncidentChange


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
        shown = "not analysed" if window.slowdown is None else printable(words or "")
        pruned = "" if WindowPart.OPS in window.files else " (ops pruned)"
        lost = "-" if share is None else f"{share:z.1%}"
        table.add_row(f"{window.number}", f"{window.first_step} to {window.last_step}", lost, Text(f"{shown}{pruned}"))
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
