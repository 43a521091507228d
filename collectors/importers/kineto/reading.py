"""Reads one file, in a separate process if there are several.

In: a path. Out: `RankColumns`. Imports no data-frame library, to keep that process small.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tracekit.base.errors import FormatError
from tracekit.collectors.importers.kineto.event_columns import ColumnBuilder
from tracekit.collectors.importers.kineto.event_tables import CATEGORIES
from tracekit.collectors.importers.kineto.json_events import EventStream
from tracekit.collectors.importers.kineto.rank_columns import RankColumns, ranks_of


def read_file(path: Path) -> list[RankColumns]:
    """Read the ranks of one file; empty if it has no events of torch.profiler. Raises FormatError."""
    stream, builder = EventStream(path, CATEGORIES), ColumnBuilder()
    with _no_garbage_collection():
        for batch in stream:
            builder.add(batch)
        columns = builder.columns()
        notes = []
        if stream.cut is not None:
            notes.append(
                f"{path.name}: {stream.cut}; the part before was read, and only what all ranks have is compared: copy"
                " or record it again for the rest"
            )
        if lost := stream.lost + columns.nameless:
            notes.append(f"{path.name}: {lost} damaged events were left out")
        if columns.absurd:
            notes.append(f"{path.name}: {columns.absurd} events with impossible times were left out")
        if columns.negative:
            notes.append(f"{path.name}: {columns.negative} negative durations were set to 0")
        found = ranks_of(columns, str(path), stream.header(), tuple(notes))
        lost = max(stream.lost - (stream.cut is not None), 0)  # the event in which a file is cut off is not damaged
        damaged = min(
            columns.damaged + lost / max(len(columns.gpu["ts"]) + lost, 1), 1.0
        )  # the lost events may be GPU ops
        return [replace(one, cut=stream.cut is not None, damaged=damaged) for one in found]


def send_file() -> None:
    """In a process of its own: the ranks of the file that the arguments name, or the error, pickled, on stdout."""
    found: list[RankColumns] | FormatError
    try:
        found = read_file(Path(sys.argv[1]))
    except FormatError as error:
        found = error
    pickle.dump(found, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: with millions of small objects without cycles, it would take longer than reading."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
