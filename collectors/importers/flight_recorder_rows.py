"""The entries and statuses of one flight-recorder dump as rows of a `FlightRecord`.

In: the decoded content of a dump. Out: `DumpRows`, which collects the rows of all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracekit.collectors.importers.flight_recorder_groups import MOST_RANKS, GroupTable
from tracekit.flight_record import Progress
from tracekit.text import short

#: Newest finished operations to keep per rank: they show where the calls of ranks begin to differ.
FINISHED_KEPT = 512
_TRANSFER = re.compile(r"(?:^|:)(send|recv|isend|irecv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
_COALESCED = "coalesced"
_NOT_THE_PROGRAM = re.compile(
    r"site-packages/torch/|/torch/(?:distributed|nn|autograd|utils|_)|tracekit/collectors/runtime/|<frozen "
)


@dataclass(slots=True)
class DumpRows:
    """Rows of `OPERATIONS` and `STATUSES` as they are read; groups are places of the `GroupTable`."""

    operations: list[tuple[Any, ...]] = field(default_factory=list)
    statuses: list[tuple[int, int, int, int]] = field(default_factory=list)
    groups: GroupTable = field(default_factory=GroupTable)
    transfers: dict[str, tuple[bool, int, int] | None] = field(default_factory=dict)


def take_operations(
    columns: DumpRows, rank: int, entries: list[dict[str, Any]], groups: dict[str, int]
) -> dict[int, int]:
    """Rows for the entries of a rank; returns the group of each of its `pg_id`s that an entry shows."""
    places: dict[int, int] = {}
    coalesced = _coalesced(entries)
    finished_to_skip = sum(_finished(entry) for entry in entries) - FINISHED_KEPT
    taken = set()
    begins = last_generation(entries)
    for number, entry in enumerate(entries):
        if number < begins.get(int(entry["pg_id"]), 0):
            continue
        name = entry["profiling_name"]
        named, description = _group_name(entry)
        group = groups.get(named)
        if group is None:
            group = groups[named] = columns.groups.add_named(rank, named, description)
        if int(entry["pg_id"]) >= 0:  # transfers that `hang_watch` adds have none
            places[int(entry["pg_id"])] = group
        p2p = bool(entry.get("is_p2p", False))
        sequence = _int64(entry["p2p_seq_id" if p2p else "collective_seq_id"])
        finished = _finished(entry)
        if whole := coalesced.get((group_id := int(entry["pg_id"]), p2p, sequence)):
            if _COALESCED in name and not p2p and (group_id, sequence) in taken:
                continue
            finished = finished or whole.finished
            if _COALESCED in name and whole.parts:
                continue
        if finished and finished_to_skip > 0:
            finished_to_skip -= 1
            continue
        if not p2p:
            if (group_id, sequence) in taken:
                continue  # further parts of one coalesced call
            taken.add((group_id, sequence))
        columns.operations.append(_row(columns, rank, group, sequence, name, p2p, finished, entry))
    return places


def last_generation(entries: list[dict[str, Any]]) -> dict[int, int]:
    """Group number -> the first entry of its last generation. After a restart within the process, group numbers are
    used again and sequence numbers start again, so they fall.
    """
    last: dict[int, int] = {}
    begins: dict[int, int] = {}
    for number, entry in enumerate(entries):
        if not entry.get("is_p2p", False):
            group, sequence = int(entry["pg_id"]), int(entry["collective_seq_id"])
            if sequence < last.get(group, 0):
                begins[group] = number
            last[group] = sequence
    return begins


@dataclass(slots=True)
class _Coalesced:
    finished: bool = False
    parts: int = 0


def _coalesced(entries: list[dict[str, Any]]) -> dict[tuple[int, bool, int], _Coalesced]:
    """Coalesced calls: the parts carry no state of their own, the entry that closes them has it for all."""
    found: dict[tuple[int, bool, int], _Coalesced] = {}
    for entry in entries:
        if _COALESCED in entry["profiling_name"]:
            p2p = bool(entry.get("is_p2p", False))
            key = int(entry["pg_id"]), p2p, int(entry["p2p_seq_id" if p2p else "collective_seq_id"])
            found[key] = _Coalesced(_finished(entry))
    if found:
        for entry in entries:
            p2p = bool(entry.get("is_p2p", False))
            key = int(entry["pg_id"]), p2p, int(entry["p2p_seq_id" if p2p else "collective_seq_id"])
            if key in found and _COALESCED not in entry["profiling_name"]:
                found[key].parts += 1
    return found


def _finished(entry: Mapping[str, Any]) -> bool:
    """NCCL's entries say so in their state, and retire when they time out, too; gloo's only retire."""
    if entry.get("state") == "completed" or entry.get("time_discovered_completed_ns"):
        return True
    return bool(entry.get("retired")) and entry["profiling_name"].startswith("gloo:")


def _group_name(entry: Mapping[str, Any]) -> tuple[str, str]:
    stated = entry["process_group"]
    return (str(stated[0]), str(stated[1])) if isinstance(stated, tuple | list) else (str(stated), "")


def _row(
    columns: DumpRows,
    rank: int,
    group: int,
    sequence: int,
    name: str,
    p2p: bool,
    finished: bool,
    entry: Mapping[str, Any],
) -> tuple[Any, ...]:
    """One row; the peers of a transfer are left as the group's numbers, which `_record` turns into ranks."""
    sizes_in, sizes_out = entry.get("input_sizes") or [], entry.get("output_sizes") or []
    dtypes = entry.get("input_dtypes") or []
    started = entry.get("state") == "started" or bool(entry.get("time_discovered_started_ns"))
    ends = _transfer(columns, name) if p2p else None
    return (
        rank,
        group,
        sequence,
        _int64(entry.get("record_id", 0)),
        str(name).split(":", 1)[-1],
        -1 if ends is None else ends[1] if ends[0] else ends[2],
        -1 if ends is None else ends[2] if ends[0] else ends[1],
        str(sizes_in)[:80],
        _int64(sum(map(math.prod, sizes_in))),
        _int64(sum(map(math.prod, sizes_out))),
        str(dtypes[0]) if dtypes else "",
        _int64(entry.get("time_created_ns") or 0),
        int(Progress.FINISHED if finished else Progress.STARTED if started else Progress.SCHEDULED),
        _call_site(entry.get("frames")),
        p2p,
    )


def _transfer(columns: DumpRows, name: str) -> tuple[bool, int, int] | None:
    """(whether it sends, this rank, its peer), as numbered in the name."""
    if name not in columns.transfers:
        match = _TRANSFER.search(name)
        columns.transfers[name] = None
        if match is not None and max(own := int(match.group(2)), peer := int(match.group(3))) < MOST_RANKS:
            columns.transfers[name] = "send" in match.group(1), own, peer
    return columns.transfers[name]


def _call_site(frames: Any) -> str | None:
    """The innermost frame of the program itself."""
    for frame in frames or ():
        if not _NOT_THE_PROGRAM.search(frame["filename"]):
            return short(f"{frame['filename']}:{frame['line']} {frame['name']}")
    return None


def take_statuses(
    columns: DumpRows, rank: int, statuses: Mapping[Any, Any], groups: dict[str, int], places: dict[int, int]
) -> None:
    """Statuses are kept by the group's number in the process. Entries show some of these; for the others both tables
    are in order of creation, which holds where it agrees with the entries.
    """
    numbers = sorted(map(int, statuses))
    names = sorted(groups, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))
    in_order = dict(zip(numbers, (groups[name] for name in names), strict=False))
    agrees = len(numbers) == len(names) and all(in_order.get(number) == place for number, place in places.items())
    for number, place in (in_order if agrees else places).items():
        status = statuses.get(str(number), statuses.get(number))
        if status is not None:
            issued, finished = status["last_enqueued_collective"], status["last_completed_collective"]
            columns.statuses.append((rank, place, _int64(issued), _int64(finished)))


def _int64(value: Any) -> int:
    """Raises OverflowError, or what `int` raises."""
    number = int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"{number:.3g} has more than 64 bits")
    return number
