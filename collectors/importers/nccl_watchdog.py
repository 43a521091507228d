"""Messages of PyTorch's NCCL watchdogs: which operation timed out on a rank, and how many it enqueued and completed.

In: lines that the ranks of a job printed. Out: a `FlightRecord`. Checked in PyTorch's `ProcessGroupNCCL.cpp`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import polars as pl
from msgspec import Struct

from tracekit.base.text import ranks_text
from tracekit.collectors.importers.flight_recorder_groups import MOST_RANKS
from tracekit.trace.dumps import OPERATIONS, STATUSES, DumpedGroup, FlightRecord, Progress, RankDump

_NUMBER = r"(-?\d{1,18})"
#: The rank of the job, which torchrun puts in front, or that of the group.
_RANK = re.compile(r"\[rank(\d{1,7})\]|\bRank (\d{1,7})\]")
_GROUP = re.compile(r"\[PG (?:ID )?\S+ (?:PG )?(?:GUID )?[^\s(]*\(([^()]*)\) Rank \d{1,7}\]")
_WORK = re.compile(
    rf"WorkNCCL\(SeqNum={_NUMBER}, OpType=(\w+)(?:, NumelIn={_NUMBER})?[^\n]*?\) ran for (\d{{1,15}}) milliseconds"
)
_STATUS = re.compile(
    rf"last enqueued (?:NCCL )?work: {_NUMBER}, last completed (?:NCCL )?work: {_NUMBER}", re.IGNORECASE
)
_CLOCK = re.compile(r"\[[EWI](\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_DEFAULT = "default_pg"
_COUNTERS_ALONE = (
    "read from messages of watchdogs, which hold counters alone: the flight recorder's dumps"
    " (TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1) name calls and their places"
)


class _WatchedRank(Struct):
    """What a rank says of a group. `works`: what timed out, by its number."""

    enqueued: int | None = None
    completed: int | None = None
    works: dict[int, dict[str, Any]] = {}

    @property
    def waits_in(self) -> list[int]:
        """The operations that timed out, the first that is not completed, and the last."""
        numbers = set(self.works)
        if self.enqueued is not None and self.completed is not None and self.completed < self.enqueued:
            numbers |= {self.completed + 1, self.enqueued}
        return sorted(number for number in numbers if number >= 0)


def watchdog_record(lines: Sequence[str], source: str) -> FlightRecord | None:
    """What watchdogs say of the ranks of a job, None if they name no rank. `source`: the files, in words."""
    said: defaultdict[str, defaultdict[int, _WatchedRank]] = defaultdict(lambda: defaultdict(_WatchedRank))
    works = []
    times = []
    for line in lines:
        work, status = _WORK.search(line), _STATUS.search(line)
        rank = _RANK.search(line) if work or status else None
        if rank is None or (number := int(rank[1] or rank[2])) >= MOST_RANKS:
            continue
        group = _GROUP.search(line)
        name = None if group is None or not group[1] else group[1]
        times.append(now_ns := _clock_ns(line))
        if work is not None:
            works.append((number, name, int(work[1]), _timed_out(work, now_ns)))
        if status is not None:
            of_rank = said[name or _DEFAULT][number]
            of_rank.enqueued, of_rank.completed = int(status[1]), int(status[2])
    for number, name, sequence, timed_out in works:
        said[name or _group_of(said, number, sequence)][number].works[sequence] = timed_out
    return _record(said, max(times), source) if said else None


def _group_of(said: Mapping[str, Mapping[int, _WatchedRank]], rank: int, sequence: int) -> str:
    """The group of what timed out on a rank: messages of a timeout do not name it, those of counters do."""
    for name, of_group in said.items():
        counters = of_group.get(rank)
        if counters is not None and (counters.completed or 0) < sequence <= (counters.enqueued or 0):
            return name
    return _DEFAULT


def _timed_out(work: re.Match[str], now_ns: int) -> dict[str, Any]:
    elements = max(int(work[3] or 0), 0)
    since_ns = max(now_ns - int(work[4]) * 1_000_000, 0)
    return {"name": work[2].lower(), "elements": elements, "sizes": f"[{elements}]", "created_ns": since_ns}


def _record(said: Mapping[str, Mapping[int, _WatchedRank]], taken_ns: int, source: str) -> FlightRecord:
    ranks = sorted({rank for of_group in said.values() for rank in of_group})
    groups = [
        DumpedGroup(name, tuple(range(ranks[-1] + 1)) if name == _DEFAULT else tuple(sorted(of_group)))
        for name, of_group in said.items()
    ]
    statuses = [
        (rank, place, counters.enqueued, counters.completed)
        for place, of_group in enumerate(said.values())
        for rank, counters in of_group.items()
        if counters.enqueued is not None and counters.completed is not None
    ]
    operations = [row for place, of_group in enumerate(said.values()) for row in _rows(place, of_group)]
    return FlightRecord(
        world_size=ranks[-1] + 1,
        groups=tuple(groups),
        operations=pl.DataFrame(operations, schema=OPERATIONS, orient="row"),
        statuses=pl.DataFrame(statuses, schema=STATUSES, orient="row"),
        dumps={rank: RankDump(source, operations=1) for rank in ranks},
        taken_ns=taken_ns or None,
        notes=tuple(_notes(said)),
        seen_as="printed messages",
    )


def _rows(place: int, of_group: Mapping[int, _WatchedRank]) -> Iterator[dict[str, Any]]:
    """The unfinished operations of a group; those that have not timed out on a rank have the names that others give."""
    names = {number: work["name"] for rank in of_group.values() for number, work in rank.works.items()}
    for rank, counters in sorted(of_group.items()):
        for number in counters.waits_in:
            row = dict.fromkeys(OPERATIONS.names()) | {"sizes": "", "dtypes": "", "elements": 0, "created_ns": 0}
            row |= {"rank": rank, "group": place, "sequence": number, "order": number}
            row |= {"name": names.get(number, "collective"), "progress": int(Progress.SCHEDULED)}
            row |= counters.works.get(number, {})
            yield row | {"p2p": row["name"] in ("send", "recv")}


def _notes(said: Mapping[str, Mapping[int, _WatchedRank]]) -> Iterator[str]:
    yield _COUNTERS_ALONE
    for name, of_group in said.items():
        level = [
            rank
            for rank, counters in of_group.items()
            if counters.enqueued is not None and counters.enqueued == counters.completed
        ]
        if level:
            yield (
                f"{ranks_text(level)} completed all that was enqueued in {name}: nothing more was issued there, or the"
                " call that would enqueue it has not returned; a stack (py-spy dump) tells which"
            )
        if name != _DEFAULT:
            yield f"of {name}, only the ranks that wait in it print their counters: {ranks_text(of_group)}"


def _clock_ns(line: str) -> int:
    """When a line was printed, from the beginning of a year that it does not name; 0 if unknown."""
    clock = _CLOCK.search(line)
    if clock is None:
        return 0
    month, day, hour, minute, second = map(int, clock.group(1, 2, 3, 4, 5))
    try:
        time = datetime(2000, month, day, hour, minute, second, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)
    except ValueError:
        return 0
    return int(time.total_seconds()) * 10**9 + int(clock[6].ljust(9, "0"))
