"""One job on a screen of 80 columns, as in its newest window: verdict, incidents, S over the windows, workers.

In: a store. Out: what rich prints, again and again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracekit.base.errors import NotStoredError
from tracekit.base.text import printable, short
from tracekit.live.incident_words import advice, lasted
from tracekit.show.terminal.maps import sparkline, worker_map
from tracekit.store import Incident, Store

#: The number of windows in the line of S, and of open incidents to describe.
_MOST_WINDOWS, _MOST_INCIDENTS = 600, 3
#: The largest map that fits with everything else on a screen of 24 lines.
_MAP = (6, 32)
_WIDTH = 78


@dataclass(frozen=True)
class TopState:
    """What one frame shows. `windows`: as `LiveTables.history`, the newest last; `incidents`: the open ones, costliest
    first; `workers`: of the newest window; `end`: when and how it ended; None while it runs, and
    of one that was not cut into windows.
    """

    job: str
    windows: pl.DataFrame
    incidents: tuple[Incident, ...]
    workers: pl.DataFrame | None
    end: tuple[datetime, str] | None = None

    @classmethod
    def of(cls, store: Store, job: str) -> TopState:
        """The job as the store has it now. Raises StoreError, NotStoredError while it has no window."""
        with store.reading() as catalogue:
            windows = catalogue.live.history(job, _MOST_WINDOWS)
            incidents = sorted(catalogue.live.incidents(job, only_open=True), key=lambda one: -one.cause.share)
            end = catalogue.live.end(job)
        if windows.is_empty():
            raise NotStoredError(f"{store.name}: no window of job {short(job)!r} yet")
        return cls(job, windows, tuple(incidents), store.workers(job, int(windows["number"][-1])), end)


def frame(state: TopState, now_s: float | None = None) -> RenderableType:
    """One screen. `now_s`: seconds since the epoch."""
    newest = state.windows.row(-1, named=True)
    age_s = (time.time() if now_s is None else now_s) - newest["added_at"]
    when = f"{age_s:.0f} s ago"
    if state.end is not None:
        ended_at, how = state.end
        when = f"{printable(how)} at {ended_at.astimezone():%Y-%m-%d %H:%M:%S}"
    parts: list[RenderableType] = [
        Text(
            f"{short(state.job)}   window {newest['number']}, steps {newest['first_step']} to {newest['last_step']},"
            f" {when}",
            style="bold",
        ),
        _verdict(newest),
    ]
    known = state.windows["slowdown"].drop_nulls().to_numpy()
    if len(known):
        line = Text("S  ").append(sparkline(known, _WIDTH - 20), style="#fe9929")
        parts.append(line.append(f"  {known[-1]:.3f}", style="bold").append(f" (from {known.min():.3f})", style="dim"))
    parts += [_incident(one) for one in state.incidents[:_MOST_INCIDENTS]]
    if more := state.incidents[_MOST_INCIDENTS:]:
        parts.append(Text(f"and {len(more)} more open incidents", style="dim"))
    if state.workers is not None:
        parts.append(_workers(state.workers))
    return Group(*parts)


def _verdict(newest: dict[str, Any]) -> Text:
    if newest["headline"] is None:
        return Text(printable(newest["problem"] or "not analysed"), style="yellow")
    doubt = "" if newest["trustworthy"] else " (cannot be trusted)"
    style = {"balanced": "green", "minor": "yellow"}.get(newest["verdict"], "red")
    return Text(f"{newest['verdict'].upper()}{doubt}", style=style).append(
        f": {printable(newest['headline'])}", style="default"
    )


def _incident(incident: Incident) -> RenderableType:
    since = "" if incident.opened_window is None else f", since window {incident.opened_window}"
    title = Text(f"Incident {incident.incident_id}", style="bold red")
    title.append(f" open for {lasted(incident)}{since}: {printable(incident.cause.what)}", style="default")
    table = Table.grid(padding=(0, 1))
    for name, text in advice(incident):
        table.add_row(Text(f"  {name}", style="bold"), Text(printable(text)))
    return Group(title, table)


def _workers(rows: pl.DataFrame) -> RenderableType:
    """The map of the mean S of each worker over the steps of the window."""
    dp_ranks: Sequence[int] = rows["dp_ranks"][0].to_list()
    per_step = rows["slowdown"].explode().to_numpy().reshape(rows.height, len(dp_ranks), -1)
    return worker_map(np.asarray(per_step, np.float64).mean(axis=0), dp_ranks, _MAP)
