"""Text about a hung NCCL job: messages of PyTorch's watchdogs on stderr, or a report of NCCL's RAS (`ncclras`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.paths import unreadable
from tracekit.base.text import listed, ranks_text
from tracekit.collectors.importers.flight_recorder import MOST_RANKS
from tracekit.collectors.importers.sniff import is_hang_text
from tracekit.trace.dumps import OPERATIONS, STATUSES, DumpedGroup, FlightRecord, Progress, RankDump

#: What is read of a file, bytes: the messages are the last ones that a job prints.
_MOST_BYTES = 64 << 20


def read_nccl_text(path: Path) -> FlightRecord | None:
    """Read the text about a hang at a path; None if there is none. Raises FormatError if it names no rank."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    texts = {file.name: text for file in files if (text := _text(file)) is not None}
    if not texts:
        return None
    lines = [line for text in texts.values() for line in text.splitlines()]
    source = listed(texts, 3)
    record = watchdog_record(lines, source) or ras_record(lines, source)
    if record is None:
        raise FormatError(f"{path}: text about NCCL that names no rank; give all that the ranks printed to stderr")
    return record


def _text(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, 2) - _MOST_BYTES))
            content = opened.read()
    except OSError as error:
        raise unreadable(file, error) from None
    return content.decode(errors="replace") if is_hang_text(content) else None


def _operation(rank: int, group: int, number: int, name: str) -> dict[str, Any]:
    """A row of `OPERATIONS`: an operation that a rank waits in, of which nothing more is known."""
    row: dict[str, Any] = dict.fromkeys(OPERATIONS.names())
    row |= {"sizes": "", "dtypes": "", "elements": 0, "created_ns": 0, "progress": int(Progress.SCHEDULED)}
    return row | {"rank": rank, "group": group, "sequence": number, "order": number, "name": name, "p2p": False}


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
    """What watchdogs report of a rank in a group. `works`: what timed out, by its number."""

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
    """What watchdogs say of the ranks of a job, None if they name no rank. `source`: the files, in words.

    Checked in PyTorch's `ProcessGroupNCCL.cpp`, as `ras_record` is in NCCL's `ras/client_support.cc`.
    """
    watched: defaultdict[str, defaultdict[int, _WatchedRank]] = defaultdict(lambda: defaultdict(_WatchedRank))
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
            of_rank = watched[name or _DEFAULT][number]
            of_rank.enqueued, of_rank.completed = int(status[1]), int(status[2])
    for number, name, sequence, timed_out in works:
        watched[name or _group_of(watched, number, sequence)][number].works[sequence] = timed_out
    return _record(watched, max(times), source) if watched else None


def _group_of(watched: Mapping[str, Mapping[int, _WatchedRank]], rank: int, sequence: int) -> str:
    """The group of what timed out on a rank: messages of a timeout do not name it, those of counters do."""
    for name, of_group in watched.items():
        counters = of_group.get(rank)
        if counters is not None and (counters.completed or 0) < sequence <= (counters.enqueued or 0):
            return name
    return _DEFAULT


def _timed_out(work: re.Match[str], now_ns: int) -> dict[str, Any]:
    elements = max(int(work[3] or 0), 0)
    since_ns = max(now_ns - int(work[4]) * 1_000_000, 0)
    return {"name": work[2].lower(), "elements": elements, "sizes": f"[{elements}]", "created_ns": since_ns}


def _record(watched: Mapping[str, Mapping[int, _WatchedRank]], taken_ns: int, source: str) -> FlightRecord:
    ranks = sorted({rank for of_group in watched.values() for rank in of_group})
    groups = [
        DumpedGroup(name, tuple(range(ranks[-1] + 1)) if name == _DEFAULT else tuple(sorted(of_group)))
        for name, of_group in watched.items()
    ]
    statuses = [
        (rank, place, counters.enqueued, counters.completed)
        for place, of_group in enumerate(watched.values())
        for rank, counters in of_group.items()
        if counters.enqueued is not None and counters.completed is not None
    ]
    operations = [row for place, of_group in enumerate(watched.values()) for row in _watched_rows(place, of_group)]
    return FlightRecord(
        world_size=ranks[-1] + 1,
        groups=tuple(groups),
        operations=pl.DataFrame(operations, schema=OPERATIONS, orient="row"),
        statuses=pl.DataFrame(statuses, schema=STATUSES, orient="row"),
        dumps={rank: RankDump(source, operations=1) for rank in ranks},
        taken_ns=taken_ns or None,
        notes=tuple(_notes(watched)),
        seen_as="printed messages",
    )


def _watched_rows(place: int, of_group: Mapping[int, _WatchedRank]) -> Iterator[dict[str, Any]]:
    """The unfinished operations of a group; those that have not timed out on a rank have the names that others give."""
    names = {number: work["name"] for rank in of_group.values() for number, work in rank.works.items()}
    for rank, counters in sorted(of_group.items()):
        for number in counters.waits_in:
            row = _operation(rank, place, number, names.get(number, "collective")) | counters.works.get(number, {})
            yield row | {"p2p": row["name"] in ("send", "recv")}


def _notes(watched: Mapping[str, Mapping[int, _WatchedRank]]) -> Iterator[str]:
    yield _COUNTERS_ALONE
    for name, of_group in watched.items():
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


_COMMUNICATOR = re.compile(r"^\s*#(\d+-\d+) \(([0-9a-f]+)\)")
_COUNTS = re.compile(r"Communicator ranks have different (\w+) operation counts")
_LAUNCHED = r"(?:launched up to operation (\d{1,18})|not launched any operations)"
_MANY = re.compile(rf"^\s*(\d{{1,7}}) ranks have {_LAUNCHED}")
_ONE = re.compile(rf"^\s*Rank (\d{{1,7}}) has {_LAUNCHED}")
_PLACE = re.compile(r"Rank (\d{1,7})\b.*-- GPU (\S+) managed by process (\d+) on node (\S+)")
_UNREACHABLE = re.compile(r"Process (\d+) on node (\S+) managing GPUs? ([\d, ]+)")
_SNAPSHOT = (
    "read from a report of RAS: ranks are those of the communicator, and operations count once they are launched. Ranks"
    " of a job that runs can be apart for a moment: ask again; if no count has risen, this is a hang"
)
#: Most places of ranks in the notes.
_MOST_PLACES = 8


class _Counts(Struct):
    """How many operations of a kind the ranks of a communicator have launched: those that are listed, and how many
    others have the same count, by that.
    """

    communicator: str
    operation: str
    launched: dict[int, int] = {}
    others: dict[int, int] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.launched) + sum(self.others.values())

    def complete(self) -> dict[int, int] | None:
        """The count of every rank; None if the report does not tell those that are not listed apart."""
        counts = [count for count, ranks in self.others.items() if ranks > 0]
        if len(counts) > 1 or self.size >= MOST_RANKS or max(self.launched, default=0) >= self.size:
            return None
        return dict.fromkeys(range(self.size), *counts) | self.launched if counts else self.launched


def ras_record(lines: Sequence[str], source: str) -> FlightRecord | None:
    """What RAS says of the largest communicator whose ranks differ; None if the lines are no such report.

    Raises FormatError if it names no rank that is behind.
    """
    counts, places = _read(lines)
    complete = [
        (counted, ranks) for counted in counts if (ranks := counted.complete()) and len(set(ranks.values())) > 1
    ]
    matches = filter(None, map(_UNREACHABLE.search, lines))
    unreachable = [f"process {match[1]} on node {match[2]} (GPU {match[3].strip()})" for match in matches]
    if not complete:
        if not counts and not unreachable:
            return None
        why = f"it cannot reach {listed(unreachable, 3)}: look there first" if unreachable else "give the whole report"
        raise FormatError(f"{source}: a report of RAS that names no rank which others wait for; {why}")
    largest = max(complete, key=lambda pair: pair[0].size)[0].communicator
    chosen = [(counted, ranks) for counted, ranks in complete if counted.communicator == largest]
    size = max(counted.size for counted, _ in chosen)
    others = sorted({counted.communicator for counted in counts} - {largest})
    return FlightRecord(
        world_size=size,
        groups=tuple(DumpedGroup(largest, tuple(range(counted.size))) for counted, _ in chosen),
        operations=pl.DataFrame(
            [
                row
                for place, (counted, ranks) in enumerate(chosen)
                for row in _counted_rows(place, counted.operation.lower(), ranks)
            ],
            schema=OPERATIONS,
            orient="row",
        ),
        statuses=pl.DataFrame(
            [
                (rank, place, launched, min(ranks.values()))
                for place, (_, ranks) in enumerate(chosen)
                for rank, launched in ranks.items()
            ],
            schema=STATUSES,
            orient="row",
        ),
        dumps={rank: RankDump(source, operations=1, host=places.get(rank, ("", None))[1]) for rank in range(size)},
        notes=(
            _SNAPSHOT,
            *[words for words, _ in places.values()][:_MOST_PLACES],
            *([f"ranks of other communicators differ, too: {listed(others, 4)}"] if others else []),
            *(f"RAS cannot reach {where}" for where in unreachable[:_MOST_PLACES]),
        ),
        seen_as="answered RAS",
    )


def _read(lines: Sequence[str]) -> tuple[list[_Counts], dict[int, tuple[str, str]]]:
    """The counts of all communicators that differ, and the place of each listed rank, in words, with its host."""
    counts, places = list[_Counts](), dict[int, tuple[str, str]]()
    communicator, launched = "communicator", None
    for line in lines:
        if match := _COMMUNICATOR.search(line):
            communicator, launched = f"communicator #{match[1]} ({match[2]})", None
        elif match := _COUNTS.search(line):
            counts.append(_Counts(communicator, match[1], {}, {}))
            launched = None
        elif counts:
            place = _PLACE.search(line)
            if place is not None:
                words = f"rank {place[1]} is process {place[3]} on {place[4]}, GPU {place[2]}"
                places[int(place[1])] = words, place[4]
            if match := _ONE.search(line):
                counts[-1].launched[int(match[1])], launched = int(match[2] or 0), None
            elif match := _MANY.search(line):
                launched = int(match[2] or 0)
                counts[-1].others[launched] = int(match[1])
            elif place is not None and launched is not None:
                counts[-1].launched[int(place[1])] = launched
                counts[-1].others[launched] -= 1
    return counts, places


def _counted_rows(place: int, operation: str, ranks: dict[int, int]) -> Iterator[dict[str, Any]]:
    """The operations in which ranks wait that have launched more than others."""
    least = min(ranks.values())
    for rank, launched in ranks.items():
        for number in sorted({least + 1, launched} if launched > least else ()):
            yield _operation(rank, place, number, operation)
