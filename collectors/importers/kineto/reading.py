"""Reads one file, in a separate process if there are several.

In: a path. Out: `RankColumns`. Imports no data-frame library, to keep that process small.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracekit.base.look import Look
from tracekit.base.memory import reuse_large_arrays
from tracekit.base.processes import serve
from tracekit.collectors.importers.kineto.event_columns import ColumnBuilder
from tracekit.collectors.importers.kineto.event_tables import CATEGORIES, FileColumns
from tracekit.collectors.importers.kineto.json_events import EventStream
from tracekit.collectors.importers.kineto.rank_columns import RankColumns, ranks_of
from tracekit.collectors.importers.kineto.sniff import SQLITE


def read_file(path: Path) -> list[RankColumns]:
    """Read the ranks of one file; empty if it has no events of torch.profiler. Raises FormatError."""
    with _no_garbage_collection():
        if Look(path).beginning(len(SQLITE)) == SQLITE:
            from tracekit.collectors.importers.kineto.nsys import read_nsys  # most files are JSON

            columns, header, said = read_nsys(path)
            ranks = _ranks(path, columns, header, said)
            # What is known of the cost of recording is torch.profiler's.
            return [replace(one, work=replace(one.work, cost=None)) for one in ranks]
        stream, builder = EventStream(path, CATEGORIES), ColumnBuilder()
        for batch in stream:
            builder.add(batch)
        note = (
            f"{path.name}: {stream.cut}; the part before was read, and only what all ranks have is compared: copy or"
            " record it again for the rest"
        )
        cut = stream.cut is not None
        return _ranks(path, builder.columns(), stream.header(), (note,) if cut else (), cut=cut, lost=stream.lost)


def _ranks(
    path: Path,
    columns: FileColumns,
    header: Mapping[str, Any],
    notes: tuple[str, ...],
    *,
    cut: bool = False,
    lost: int = 0,
) -> list[RankColumns]:
    """The ranks of a file of which `lost` events could not be read; they may be GPU ops."""
    for count, what in (
        (lost + columns.nameless, "damaged events were left out"),
        (columns.absurd, "events with impossible times were left out"),
        (columns.negative, "negative durations were set to 0"),
    ):
        if count:
            notes = (*notes, f"{path.name}: {count} {what}")
    ranks = ranks_of(columns, str(path), header, notes)
    lost = max(lost - cut, 0)  # the event in which a file is cut off is not damaged
    damaged = min(columns.damaged + lost / max(len(columns.gpu["ts"]) + lost, 1), 1.0)
    return [replace(one, cut=cut, damaged=damaged) for one in ranks]


def send_files() -> None:
    """In a process of its own: for each path that it is asked for, its ranks."""
    reuse_large_arrays()
    serve(read_file)


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
