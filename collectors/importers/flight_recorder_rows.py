"""The entries and statuses of one flight-recorder dump as rows of a `FlightRecord`.

In: the checked entries of a dump and its statuses. Out: `DumpRows`, which collects the rows of all ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tracekit.base.text import quoted, short
from tracekit.collectors.importers.flight_recorder_entries import (
    COALESCED,
    Entry,
    ImpossibleError,
    elements,
    first_dtype,
    whole_number,
)
from tracekit.collectors.importers.flight_recorder_groups import MOST_RANKS, GroupTable, creation
from tracekit.trace.dumps import Progress

#: Newest finished operations to keep per rank: they show where the calls of ranks begin to differ.
FINISHED_KEPT = 512
_TRANSFER = re.compile(r"(?:^|:)(send|recv|isend|irecv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
_NOT_THE_PROGRAM = re.compile(
    r"site-packages/torch/|/torch/(?:distributed|nn|autograd|utils|_)|tracekit/collectors/record/|<frozen "
)


@dataclass(slots=True)
class DumpRows:
    """Collects rows of `OPERATIONS` and `STATUSES`; groups are positions in the `GroupTable`."""

    operations: list[tuple[Any, ...]] = field(default_factory=list)
    statuses: list[tuple[int, int, int, int]] = field(default_factory=list)
    groups: GroupTable = field(default_factory=GroupTable)
    transfers: dict[str, tuple[bool, int, int] | None] = field(default_factory=dict)


def take_operations(columns: DumpRows, rank: int, entries: list[Entry], groups: dict[str, int]) -> dict[int, int]:
    """Add rows for the entries of a rank; return the group of each `pg_id` in them."""
    places: dict[int, int] = {}
    coalesced = _coalesced(entries)
    finished_to_skip = sum(entry.finished for entry in entries) - FINISHED_KEPT
    calls = set()
    for entry in entries:
        named, description = entry.group
        group = groups.get(named)
        if group is None:
            group = groups[named] = columns.groups.add_named(rank, named, description)
        if entry.pg_id >= 0:
            places[entry.pg_id] = group
        call = entry.pg_id, entry.sequence
        finished = entry.finished
        if whole := coalesced.get((*entry.counted, entry.sequence)):
            if COALESCED in entry.name and not entry.p2p and call in calls:
                continue
            finished = finished or whole.finished
            if COALESCED in entry.name and whole.parts:
                continue
        if finished and finished_to_skip > 0:
            finished_to_skip -= 1
            continue
        if not entry.p2p:
            if call in calls:
                continue  # further parts of one coalesced call
            calls.add(call)
        columns.operations.append(_row(columns, rank, group, finished, entry))
    return places


@dataclass(slots=True)
class _Coalesced:
    finished: bool = False
    parts: int = 0


def _coalesced(entries: list[Entry]) -> dict[tuple[int, bool, int], _Coalesced]:
    """Merge coalesced calls: the parts have no state of their own; the closing entry has it for all."""
    merged = {
        (*entry.counted, entry.sequence): _Coalesced(entry.finished) for entry in entries if COALESCED in entry.name
    }
    if merged:
        for entry in entries:
            key = *entry.counted, entry.sequence
            if key in merged and COALESCED not in entry.name:
                merged[key].parts += 1
    return merged


def _row(columns: DumpRows, rank: int, group: int, finished: bool, entry: Entry) -> tuple[Any, ...]:
    """Build one row; peers of a transfer are still numbers within the group, which `_record` turns into ranks."""
    sizes = entry.raw.get("input_sizes") or []
    source, target = -1, -1
    if entry.p2p and (ends := _transfer(columns, entry.name)) is not None:
        sends, own, other = ends
        source, target = (own, other) if sends else (other, own)
    progress = Progress.STARTED if entry.started else Progress.SCHEDULED
    if finished:
        progress = Progress.FINISHED
    return (
        rank,
        group,
        entry.sequence,
        entry.record,
        short(entry.name.split(":", 1)[-1]),
        source,
        target,
        quoted(sizes, 80),
        elements(sizes),
        first_dtype(entry.raw.get("input_dtypes")),
        entry.created_ns or 0,
        int(progress),
        _call_site(entry.raw.get("frames")),
        entry.p2p,
    )


def _transfer(columns: DumpRows, name: str) -> tuple[bool, int, int] | None:
    """Return (sends, this rank, its peer), as numbered in the name."""
    if name not in columns.transfers:
        match = _TRANSFER.search(name)
        columns.transfers[name] = None
        if match is not None and max(own := int(match.group(2)), peer := int(match.group(3))) < MOST_RANKS:
            columns.transfers[name] = "send" in match.group(1), own, peer
    return columns.transfers[name]


def _call_site(frames: Any) -> str | None:
    """Return the innermost frame of the program itself; None if the entry has none."""
    for frame in frames if isinstance(frames, list | tuple) else ():
        file = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(file, str) and not _NOT_THE_PROGRAM.search(file):
            return short(f"{file}:{quoted(frame.get('line'), 12)} {frame.get('name', '')!s:.80}")
    return None


def take_statuses(
    columns: DumpRows, rank: int, statuses: Any, groups: dict[str, int], places: dict[int, int]
) -> str | None:
    """Add the statuses, which are kept by the group's number in the process; return their impossible values.

    Entries show some numbers. For the others, both tables are in order of creation, if that agrees with the entries.
    """
    try:
        checked = {_number(number): _counts(status) for number, status in dict(statuses).items()}
    except (TypeError, ValueError) as error:
        return f"pg_status is not used: {error!s:.200}"
    names = sorted(groups, key=creation)
    in_order = dict(zip(sorted(checked), (groups[name] for name in names), strict=False))
    agrees = len(checked) == len(names) and all(in_order.get(number) == place for number, place in places.items())
    for number, place in (in_order if agrees else places).items():
        if number in checked:
            columns.statuses.append((rank, place, *checked[number]))
    return None


def _number(value: Any) -> int:
    number = whole_number(value)
    if number is None:
        raise ImpossibleError(f"{quoted(value, 40)} is no number of a group")
    return number


def _counts(status: Any) -> tuple[int, int]:
    """Return the last issued and the last finished sequence number, -1 for none."""
    if not isinstance(status, dict):
        raise ImpossibleError(f"a status is {quoted(status, 40)}")
    counts = []
    for name in ("last_enqueued_collective", "last_completed_collective"):
        value = status.get(name)
        number = -1 if value in (-1, "-1") else whole_number(value)
        if number is None:
            raise ImpossibleError(f"{name} is {quoted(value, 40)}")
        counts.append(number)
    return counts[0], counts[1]
