"""Dumps of PyTorch's flight recorder: a folder with one file per rank in, a `FlightRecord` out.

A rank without a file, an empty file or a torn one is evidence in a hang, so none of them is an error.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.errors import FormatError
from tracekit.base.memory import no_garbage_collection
from tracekit.base.text import printable, quoted, short
from tracekit.collectors.importers.flight_recorder_entries import (
    COALESCED,
    Entry,
    ImpossibleError,
    UnreadableError,
    bounded_memory,
    checked_entries,
    elements,
    first_dtype,
    is_newer,
    read_dump,
    whole_number,
)
from tracekit.trace.dumps import OPERATIONS, STATUSES, DumpedGroup, FlightRecord, Progress, RankDump

#: Dumps whose newest operations are further apart hardly show the same hang: no timeout of PyTorch is longer.
FAR_APART_S = 1800.0
#: Maximum length of host and process names from a dump, characters.
LONGEST_TEXT = 200
#: Damaged entries of a dump that a note lists.
LISTED = 3
_RANK_IN_NAME = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|dump|bin))?$")
#: Names of dumps that continue after the rank, with `.json.gz` or a time: `nccl_trace_rank_12.json.gz`.
_RANK_INSIDE_NAME = re.compile(r"trace_rank_(\d+)\.")
_OTHER_FILES = frozenset({".log", ".txt", ".out", ".err", ".csv", ".yaml", ".yml", ".py", ".md", ".html", ".png"})


def read_flight_records(directory: Path) -> FlightRecord:
    """Read all dumps of a folder.

    Raises FormatError if the folder has none that can be read, has two of one rank, or dumps of different jobs.
    """
    files = _files(directory)
    rows = DumpRows()
    dumps, notes = rows.dumps, rows.notes
    with no_garbage_collection(), bounded_memory():
        for path in files:
            rank = _rank_of(path.name)
            try:
                dump = read_dump(path)
                rank = _stated_rank(dump, rank)
            except UnreadableError as error:
                if rank is not None and path.suffix not in _OTHER_FILES:
                    notes.append(f"{short(path.name)} {error}")
                    dumps.setdefault(rank, RankDump(path.name, str(error)))
                continue
            if rank in dumps and dumps[rank].problem is None:
                raise FormatError(
                    f"{directory}: {short(dumps[rank].source)} and {short(path.name)} are both dumps of rank"
                    f" {rank}; keep only the dumps of one attempt in the folder"
                )
            dumps[rank] = _add_dump(rows, rank, path.name, dump)
    if all(dump.problem is not None for dump in dumps.values()):
        reason = next(iter(notes), "no file is a dump")
        raise FormatError(
            f"{directory}: no readable flight-recorder dump ({reason}); expected one file per rank, such as"
            " nccl_trace_rank_0; TORCH_FR_DUMP_TEMP_FILE says where PyTorch writes them"
        )
    return _record(directory, rows)


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise FormatError(
            f"{directory}: cannot be read as a folder of flight-recorder dumps: {error.strerror or error}"
        ) from None


def _rank_of(name: str) -> int | None:
    match = _RANK_INSIDE_NAME.search(name) or _RANK_IN_NAME.search(name)
    return int(match.group(1)) if match is not None and int(match.group(1)) < MOST_RANKS else None


def _stated_rank(dump: Mapping[str, Any], named: int | None) -> int:
    about = dump.get("tracekit")
    rank = about.get("rank", named) if isinstance(about, dict) else named
    if not isinstance(rank, int) or not 0 <= rank < MOST_RANKS:
        raise UnreadableError("has no rank in its name; rename it to end in the rank, as in nccl_trace_rank_12")
    return rank


def _add_dump(rows: DumpRows, rank: int, name: str, dump: dict[str, Any]) -> RankDump:
    """Add one dump; a dump whose groups have unexpected types counts as damaged."""
    config, notes = dump.get("pg_config") or {}, rows.notes
    try:
        groups = rows.groups.add(rank, config)
        default = [about for about in config.values() if about.get("desc") == "default_pg"]
        stated = [str(about["ranks"]) for about in default if "..." not in about["ranks"]]
        world = max((ranks.count(",") + 1 for ranks in stated), default=0)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = f"is damaged: its pg_config is not that of a dump ({type(error).__name__})"
        notes.append(f"{short(name)} {reason}")
        return RankDump(name, reason, doubt=reason)
    if world > 1:
        rows.worlds[rank] = world
    entries = checked_entries(dump["entries"])
    if dump["entries"] and not entries.entries:
        reason = f"is damaged: {entries.left_out[0]}; none of its {len(dump['entries'])} entries can be used"
        notes.append(f"{short(name)} {reason}")
        return RankDump(name, reason, doubt=reason)
    places = add_operations(rows, rank, entries.entries, groups)
    odd_status = add_statuses(rows, rank, dump.get("pg_status") or {}, groups, places)
    if entries.restarted:
        notes.append(
            f"{short(name)}: sequence numbers of a group start again (a restart); older operations are left out"
        )
    if is_newer(dump["version"]):
        notes.append(f"{short(name)} has version {dump['version'][:10]}, newer than the known 2.10")
    odd = [*entries.left_out, *([] if odd_status is None else [odd_status])]
    doubts = [*entries.doubts, *([] if odd_status is None else ["its pg_status is damaged"])]
    doubt = f"rank {rank} is not accused: {', '.join(doubts)}" if doubts else None
    if odd or doubts:
        listed = [*odd[:LISTED], *([f"{len(odd) - LISTED} more"] if len(odd) > LISTED else [])]
        notes.append(f"{short(name)}: {'; '.join([*listed, *([] if doubt is None else [doubt])])}")
    about = dump.get("tracekit")
    about = about if isinstance(about, dict) else {}
    if (taken_ns := whole_number(about.get("taken_ns"))) is not None:
        rows.taken_ns = max(rows.taken_ns or 0, taken_ns)
    stack = about.get("stack")
    return RankDump(
        name,
        doubt=doubt,
        operations=len(entries.entries),
        host=_text(about.get("host")),
        phase=_text(about.get("phase")),
        process=_text(about.get("process")),
        stack=tuple(map(str, stack)) if isinstance(stack, list | tuple) else None,
        starts=_shows_starts(dump, entries.entries),
    )


def _shows_starts(dump: Mapping[str, Any], entries: Sequence[Entry]) -> bool:
    """True if a dump has the start of any operation, which needs events of the device before each."""
    statuses = dump.get("pg_status")
    last = [
        whole_number(status.get("last_started_collective"))
        for status in (statuses.values() if isinstance(statuses, dict) else ())
        if isinstance(status, dict)
    ]
    return any(number is not None for number in last) or any(
        entry.started or whole_number(entry.raw.get("time_discovered_started_ns")) for entry in entries
    )


def _text(value: Any) -> str | None:
    return None if value is None else printable(str(value))[:LONGEST_TEXT]


def _record(directory: Path, rows: DumpRows) -> FlightRecord:
    dumps, sizes = rows.dumps, sorted(set(rows.worlds.values()))
    if len(sizes) > 1:
        ranks = [next(rank for rank, world in rows.worlds.items() if world == size) for size in sizes[:2]]
        raise FormatError(
            f"{directory}: dumps of different jobs: rank {ranks[0]} is in a job of {sizes[0]} ranks, rank {ranks[1]} in"
            f" one of {sizes[1]}; keep only the dumps of one job in the folder"
        )
    beyond = [rank for rank in dumps if sizes and rank >= sizes[0]]
    if beyond:
        raise FormatError(
            f"{directory}: {short(dumps[beyond[0]].source)} is a dump of rank {beyond[0]}, but the job has {sizes[0]}"
            " ranks; keep only the dumps of one job in the folder"
        )
    absent = set(range(sizes[0] if sizes else max(dumps) + 1)) - {
        rank for rank, dump in dumps.items() if dump.problem is None
    }
    groups, places = rows.groups.finish(absent)
    to_place = pl.Series([places[number] for number in range(len(places))], dtype=pl.Int32)
    operations, statuses = (
        table.with_columns(group=to_place.gather(table["group"]))
        for table in (
            pl.DataFrame(rows.operations, schema=OPERATIONS, orient="row"),
            pl.DataFrame(rows.statuses, schema=STATUSES, orient="row"),
        )
    )
    operations = _with_ranks(operations, groups)
    if sizes:  # ranks beyond the job are no peers
        operations = operations.with_columns(
            pl.when(pl.col(end) < sizes[0]).then(end).alias(end) for end in ("source", "target")
        )
    peers = operations.select(pl.max_horizontal("source", "target").max()).item() or 0
    members = max(0, peers, *(max(group.ranks, default=0) for group in groups))
    return FlightRecord(
        world_size=sizes[0] if sizes else max(members, *dumps) + 1,
        groups=groups,
        operations=operations,
        statuses=statuses,
        dumps=dumps,
        taken_ns=rows.taken_ns,
        notes=(*rows.notes, *_far_apart(operations)),
    )


def _with_ranks(operations: pl.DataFrame, groups: tuple[DumpedGroup, ...]) -> pl.DataFrame:
    """Turn the ends of transfers into ranks of the job. Recorders number them within the group, or within the job."""
    p2p = operations["p2p"].to_numpy()
    ends = {name: operations[name].to_numpy().copy() for name in ("source", "target")}
    rank, group = operations["rank"].to_numpy(), operations["group"].to_numpy()
    sends = operations["name"].str.contains("send").to_numpy()
    for place in np.unique(group[p2p]):
        members: npt.NDArray[np.int32] = np.asarray(groups[place].ranks, np.int32)
        rows = np.flatnonzero(p2p & (group == place))
        own = np.where(sends[rows], ends["source"][rows], ends["target"][rows])
        inside = (own >= 0) & (ends["source"][rows] < len(members)) & (ends["target"][rows] < len(members))
        local = inside.copy()
        local[inside] = members[own[inside]] == rank[rows[inside]]
        neither = rows[~local & (own != rank[rows])]  # only its own end is known
        for name, values in ends.items():
            values[rows[local]] = members[values[rows[local]]]
            values[neither] = np.where(sends[neither] == (name == "source"), rank[neither], -1)
    columns = [pl.Series(name, np.where(p2p, values, -1), pl.Int32()) for name, values in ends.items()]
    operations = operations.with_columns(columns)
    nullable = [pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name) for name in ends]
    return operations.with_columns(nullable)


def _far_apart(operations: pl.DataFrame) -> list[str]:
    newest = operations.group_by("rank").agg(pl.col("created_ns").max()).sort("created_ns")
    if newest.height < 2:
        return []
    apart_s = (newest["created_ns"][-1] - newest["created_ns"][0]) / 1e9
    if apart_s < FAR_APART_S:
        return []
    first, last = newest["rank"][0], newest["rank"][-1]
    why = "dumps of two attempts, or of hosts whose clocks differ"
    return [f"the newest operations of rank {first} and rank {last} are {apart_s:,.0f} s apart: {why}"]


_NUMBER = re.compile(r"\d+")
_CUT = "..."
#: No job has more ranks.
MOST_RANKS = 1 << 22


@dataclass(frozen=True, slots=True)
class _Key:
    """Identity of a group: its description, its members as stated (its name if they are not), and its number among such
    groups of one rank.
    """

    description: str
    members: str
    occurrence: int


@dataclass(slots=True)
class GroupTable:
    """Collects the groups of all dumps; `finish` returns their members.

    A group's name is its number within one process; description and members identify it. Their text can be cut after 30
    ranks; other dumps complete it.
    """

    _keys: dict[_Key, int] = field(default_factory=dict)
    _stated: dict[_Key, tuple[int, ...]] = field(default_factory=dict)
    _seen_on: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(self, rank: int, config: Mapping[Any, Any]) -> dict[str, int]:
        """Take the `pg_config` of a rank; returns the group of each of its names, in order of creation.

        Raises ValueError if no job has such members.
        """
        groups: dict[str, int] = {}
        times: Counter[tuple[str, str]] = Counter()
        for name in sorted(map(str, config), key=creation):
            about = config[name]
            members = about.get("ranks")
            if not members or members == "[]":  # gloo's recorder does not record groups
                continue
            stated = (str(about.get("desc", "")), members if isinstance(members, str) else str(list(members)))
            groups[name] = self._place(rank, _Key(*stated, times[stated]))
            times[stated] += 1
        return groups

    def add_named(self, rank: int, name: str, description: str) -> int:
        """Add a group whose members the dump does not state; every rank that uses the name is a member."""
        return self._place(rank, _Key(description, f"name {name}", 0))

    def _place(self, rank: int, key: _Key) -> int:
        if key not in self._keys:
            self._stated[key] = _stated(key.members)
        place = self._keys.setdefault(key, len(self._keys))
        self._seen_on[place].add(rank)
        return place

    def finish(self, without_dump: Iterable[int] = ()) -> tuple[tuple[DumpedGroup, ...], dict[int, int]]:
        """Return all groups, and the final position for each place that `add` returned."""
        missing = frozenset(without_dump)
        stated = self._stated
        whole = defaultdict(list)
        for key, ranks in stated.items():
            if _is_whole(key):
                whole[key.description, key.occurrence].append((ranks, key))
        groups: dict[_Key, DumpedGroup] = {}
        same: dict[_Key, _Key] = {}
        for key, place in self._keys.items():
            ranks, seen = stated[key], self._seen_on[place]
            if _is_whole(key):
                groups[key] = DumpedGroup(key.description, ranks)
                continue
            head = ranks if _CUT not in key.members else _stated(key.members.split(_CUT, 1)[0])
            twins = [twin for members, twin in whole[key.description, key.occurrence] if members[: len(head)] == head]
            if _CUT in key.members and len(twins) == 1:
                same[key] = twins[0]
            else:
                groups[key] = DumpedGroup(key.description, _completed(ranks, seen, missing))
        for key, members in _beyond_the_end(
            {key: groups[key] for key in groups if _CUT in key.members}, groups, missing
        ):
            groups[key] = DumpedGroup(key.description, members)
        places = {key: place for place, key in enumerate(groups)}
        return tuple(groups.values()), {place: places[same.get(key, key)] for key, place in self._keys.items()}


def creation(name: str) -> tuple[int, int | str]:
    """A key for the order of creation: names that are numbers count the groups of a process."""
    return (0, int(name)) if name.isdecimal() else (1, name)


def _is_whole(key: _Key) -> bool:
    return key.members.startswith("[") and _CUT not in key.members


def _stated(members: str) -> tuple[int, ...]:
    """Parse stated members. Raises ValueError for ranks that no job has."""
    ranks = tuple(map(int, _NUMBER.findall(members))) if members.startswith("[") else ()
    if max(ranks, default=0) >= MOST_RANKS:
        raise ValueError(f"rank {max(ranks)}")
    return ranks


def _beyond_the_end(
    cut: Mapping[_Key, DumpedGroup], groups: Mapping[_Key, DumpedGroup], missing: frozenset[int]
) -> list[tuple[_Key, tuple[int, ...]]]:
    """Complete cut groups whose last members left no dump: with the next evenly spaced ranks that no group of the same
    description has.
    """
    members_of: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for key, group in groups.items():
        members_of[key.description, key.occurrence].update(group.ranks)
    completed = []
    for key, group in cut.items():
        ranks, others = list(group.ranks), members_of[key.description, key.occurrence]
        stride = ranks[1] - ranks[0] if len(ranks) > 2 else 0
        while stride > 0 and ranks[-1] + stride in missing and ranks[-1] + stride not in others:
            ranks.append(ranks[-1] + stride)
            others.add(ranks[-1])
        completed.append((key, tuple(ranks)))
    return completed


def _completed(stated: tuple[int, ...], seen: set[int], missing: frozenset[int]) -> tuple[int, ...]:
    """Return the members of a group with a cut list: the stated ones, the ranks that have the group and, if all of
    these are evenly spaced, the ranks between them that left no dump.
    """
    members = sorted({*stated, *seen})
    if len(stated) > 2 and missing:
        stride = stated[1] - stated[0]
        grid = range(members[0], members[-1] + 1, stride) if stride > 0 else range(0)
        if all(rank in grid for rank in members):
            members = [rank for rank in grid if rank in missing or rank in set(members)]
    return tuple(members)


#: Newest finished operations to keep per rank: they show where the calls of ranks begin to differ.
FINISHED_KEPT = 512
_TRANSFER = re.compile(r"(?:^|:)(send|recv|isend|irecv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
_NOT_THE_PROGRAM = re.compile(
    r"site-packages/torch/|/torch/(?:distributed|nn|autograd|utils|_)|tracekit/collectors/record/|<frozen "
)


@dataclass(slots=True)
class DumpRows:
    """Collects what dumps say: rows of `OPERATIONS` and `STATUSES`, whose groups are positions in the `GroupTable`;
    `worlds`: the number of ranks of the job by rank; `taken_ns`: when the last dump was taken, None if none says so.
    """

    operations: list[tuple[Any, ...]] = field(default_factory=list)
    statuses: list[tuple[int, int, int, int]] = field(default_factory=list)
    groups: GroupTable = field(default_factory=GroupTable)
    transfers: dict[str, tuple[bool, int, int] | None] = field(default_factory=dict)
    dumps: dict[int, RankDump] = field(default_factory=dict)
    worlds: dict[int, int] = field(default_factory=dict)
    taken_ns: int | None = None
    notes: list[str] = field(default_factory=list)


def add_operations(rows: DumpRows, rank: int, entries: list[Entry], groups: dict[str, int]) -> dict[int, int]:
    """Add rows for the entries of a rank; return the group of each `pg_id` in them."""
    places: dict[int, int] = {}
    # The parts of a coalesced call have no state of their own; the closing entry has it for all.
    closed = {(*entry.counted, entry.sequence): entry.finished for entry in entries if COALESCED in entry.name}
    parts = {(*entry.counted, entry.sequence) for entry in entries if COALESCED not in entry.name}
    finished_to_skip = sum(entry.finished for entry in entries) - FINISHED_KEPT
    calls = set()
    for entry in entries:
        named, description = entry.group
        group = groups.get(named)
        if group is None:
            group = groups[named] = rows.groups.add_named(rank, named, description)
        if entry.pg_id >= 0:
            places[entry.pg_id] = group
        call, counted = (entry.pg_id, entry.sequence), (*entry.counted, entry.sequence)
        finished = entry.finished or closed.get(counted, False)
        if COALESCED in entry.name and (counted in parts or (not entry.p2p and call in calls)):
            continue
        if finished and finished_to_skip > 0:
            finished_to_skip -= 1
            continue
        if not entry.p2p:
            if call in calls:
                continue  # further parts of one coalesced call
            calls.add(call)
        rows.operations.append(_row(rows, rank, group, finished, entry))
    return places


def _row(rows: DumpRows, rank: int, group: int, finished: bool, entry: Entry) -> tuple[Any, ...]:
    """Build one row; peers of a transfer are still numbers within the group, which `_record` turns into ranks."""
    sizes = entry.raw.get("input_sizes") or []
    source, target = -1, -1
    if entry.p2p and (ends := _transfer(rows, entry.name)) is not None:
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


def _transfer(rows: DumpRows, name: str) -> tuple[bool, int, int] | None:
    """Return (sends, this rank, its peer), as numbered in the name."""
    if name not in rows.transfers:
        match = _TRANSFER.search(name)
        rows.transfers[name] = None
        if match is not None and max(own := int(match.group(2)), peer := int(match.group(3))) < MOST_RANKS:
            rows.transfers[name] = "send" in match.group(1), own, peer
    return rows.transfers[name]


def _call_site(frames: Any) -> str | None:
    """Return the innermost frame of the program itself; None if the entry has none."""
    for frame in frames if isinstance(frames, list | tuple) else ():
        file = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(file, str) and not _NOT_THE_PROGRAM.search(file):
            return short(f"{file}:{quoted(frame.get('line'), 12)} {frame.get('name', '')!s:.80}")
    return None


def add_statuses(
    rows: DumpRows, rank: int, statuses: Any, groups: dict[str, int], places: dict[int, int]
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
            rows.statuses.append((rank, place, *checked[number]))
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
