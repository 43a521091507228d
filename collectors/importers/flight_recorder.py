"""Dumps of PyTorch's flight recorder: a folder with one file per rank in, a `FlightRecord` out.

NCCL's recorder and gloo's, pickles and JSON, versions 2.1 to 2.10, and the files that `tracekit collect --hang-after`
writes. A rank without a file, an empty file or a torn one is evidence in a hang, so none of them is an error.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.importers.flight_recorder_file import UnreadableError, bounded_memory, is_newer, read_dump
from tracekit.collectors.importers.flight_recorder_groups import MOST_RANKS, GroupTable
from tracekit.errors import FormatError
from tracekit.flight_record import OPERATIONS, STATUSES, FlightRecord, ProcessGroup, Progress, RankDump
from tracekit.text import printable, short

#: Finished operations kept per rank, the newest ones: they show where the calls of a rank part from those of others.
FINISHED_KEPT = 512
#: Dumps whose newest operations lie further apart are hardly of one hang: no time-out of PyTorch's is longer.
FAR_APART_S = 1800.0
#: Characters kept of what a dump says of its host and its process.
LONGEST_TEXT = 200
_RANK_IN_NAME = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|dump|bin))?$")
#: Names by which a dump is known with anything behind the rank: `nccl_trace_rank_12.json.gz`, a time.
_RANK_INSIDE_NAME = re.compile(r"trace_rank_(\d+)\.")
_OTHER_FILES = frozenset({".log", ".txt", ".out", ".err", ".csv", ".yaml", ".yml", ".py", ".md", ".html", ".png"})
_TRANSFER = re.compile(r"(?:^|:)(send|recv|isend|irecv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
_COALESCED = "coalesced"
_NOT_THE_PROGRAM = re.compile(
    r"site-packages/torch/|/torch/(?:distributed|nn|autograd|utils|_)|tracekit/collectors/runtime/|<frozen "
)


@dataclass(slots=True)
class _Columns:
    """Rows of `OPERATIONS` and `STATUSES` as they are read; groups are places of the `GroupTable`."""

    operations: list[tuple[Any, ...]] = field(default_factory=list)
    statuses: list[tuple[int, int, int, int]] = field(default_factory=list)
    groups: GroupTable = field(default_factory=GroupTable)
    transfers: dict[str, tuple[bool, int, int] | None] = field(default_factory=dict)


def read_flight_records(directory: Path) -> FlightRecord:
    """Read all dumps of a folder.

    Raises FormatError where the folder has none that can be read, has two of one rank, or dumps of different jobs.
    """
    files = _files(directory)
    columns = _Columns()
    dumps: dict[int, RankDump] = {}
    notes: list[str] = []
    worlds: dict[int, int] = {}
    taken: list[int] = []
    was_collecting = gc.isenabled()
    gc.disable()  # a dump is thousands of small containers without cycles
    try:
        with bounded_memory():
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
                        f"{directory}: {short(dumps[rank].source)} and {short(path.name)} are both of rank {rank};"
                        " keep the dumps of one attempt in the folder"
                    )
                dumps[rank] = _take(columns, rank, path.name, dump, worlds, taken, notes)
    finally:
        if was_collecting:
            gc.enable()
    if all(dump.problem is not None for dump in dumps.values()):
        reason = next(iter(notes), "no file is one")
        raise FormatError(
            f"{directory}: no flight-recorder dump that can be read ({reason}); expected one file per rank, such as"
            " nccl_trace_rank_0, written where TORCH_FR_DUMP_TEMP_FILE says"
        )
    return _record(directory, columns, dumps, worlds, max(taken, default=None), notes)


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
        raise UnreadableError("has no rank in its name, which must end in it, as in nccl_trace_rank_12")
    return rank


def _take(
    columns: _Columns,
    rank: int,
    name: str,
    dump: dict[str, Any],
    worlds: dict[int, int],
    taken: list[int],
    notes: list[str],
) -> RankDump:
    """Put one dump into the columns; one whose content is of other types than a dump's counts as damaged."""
    operations, statuses = len(columns.operations), len(columns.statuses)
    try:
        config, entries = dump.get("pg_config") or {}, dump["entries"]
        groups = columns.groups.add(rank, config)
        world = max((str(about.get("ranks", "")).count(",") + 1 for about in _default_groups(config)), default=0)
        if world > 1:
            worlds[rank] = world
        places = _take_operations(columns, rank, entries, groups)
        if _last_generation(entries):
            notes.append(f"{short(name)}: sequences of a group begin anew (a restart); what came before is left out")
        _take_statuses(columns, rank, dump.get("pg_status") or {}, groups, places)
        about = dump.get("tracekit") or {}
        if "taken_ns" in about:
            taken.append(int(about["taken_ns"]))
        if is_newer(dump["version"]):
            notes.append(f"{short(name)} is of version {dump['version'][:10]}, newer than 2.10")
        stack = about.get("stack")
        return RankDump(
            name,
            operations=len(entries),
            host=_text(about.get("host")),
            phase=_text(about.get("phase")),
            process=_text(about.get("process")),
            stack=None if stack is None else tuple(map(str, stack)),
        )
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        del columns.operations[operations:], columns.statuses[statuses:]
        reason = f"is damaged: its content is not that of a dump ({type(error).__name__})"
        notes.append(f"{short(name)} {reason}")
        return RankDump(name, reason)


def _text(value: Any) -> str | None:
    return None if value is None else printable(str(value))[:LONGEST_TEXT]


def _default_groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [about for about in config.values() if about.get("desc") == "default_pg" and "..." not in about["ranks"]]


def _take_operations(
    columns: _Columns, rank: int, entries: list[dict[str, Any]], groups: dict[str, int]
) -> dict[int, int]:
    """Rows for the entries of a rank; returns the group of each of its `pg_id`s that an entry shows."""
    places: dict[int, int] = {}
    coalesced = _coalesced(entries)
    finished_to_skip = sum(_finished(entry) for entry in entries) - FINISHED_KEPT
    taken = set()
    begins = _last_generation(entries)
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


def _last_generation(entries: list[dict[str, Any]]) -> dict[int, int]:
    """Group number -> the first entry of its last generation: after a restart within the process, numbers of groups are
    used again and their sequences begin anew, so that they fall.
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
    columns: _Columns,
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


def _transfer(columns: _Columns, name: str) -> tuple[bool, int, int] | None:
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


def _take_statuses(
    columns: _Columns, rank: int, statuses: Mapping[Any, Any], groups: dict[str, int], places: dict[int, int]
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


def _record(
    directory: Path,
    columns: _Columns,
    dumps: dict[int, RankDump],
    worlds: dict[int, int],
    taken_ns: int | None,
    notes: list[str],
) -> FlightRecord:
    sizes = sorted(set(worlds.values()))
    if len(sizes) > 1:
        ranks = [next(rank for rank, world in worlds.items() if world == size) for size in sizes[:2]]
        raise FormatError(
            f"{directory}: dumps of different jobs: rank {ranks[0]} is in a job of {sizes[0]} ranks, rank {ranks[1]} in"
            f" one of {sizes[1]}; keep the dumps of one job in the folder"
        )
    beyond = [rank for rank in dumps if sizes and rank >= sizes[0]]
    if beyond:
        raise FormatError(
            f"{directory}: {short(dumps[beyond[0]].source)} is of rank {beyond[0]}, in a job of {sizes[0]} ranks; keep"
            " the dumps of one job in the folder"
        )
    absent = set(range(sizes[0] if sizes else max(dumps) + 1)) - {
        rank for rank, dump in dumps.items() if dump.problem is None
    }
    groups, places = columns.groups.finish(absent)
    operations = pl.DataFrame(columns.operations, schema=OPERATIONS, orient="row")
    to_place = pl.Series([places[at] for at in range(len(places))], dtype=pl.Int32)
    operations = operations.with_columns(to_place.gather(operations["group"]).alias("group"))
    statuses = pl.DataFrame(columns.statuses, schema=STATUSES, orient="row")
    statuses = statuses.with_columns(to_place.gather(statuses["group"]).alias("group"))
    operations = _with_ranks(operations, groups)
    if sizes:  # nobody beyond the job is anybody's peer
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
        taken_ns=taken_ns,
        notes=(*notes, *_far_apart(operations)),
    )


def _with_ranks(operations: pl.DataFrame, groups: tuple[ProcessGroup, ...]) -> pl.DataFrame:
    """Turn the ends of transfers into ranks of the job. Recorders number them within the group; some within the job."""
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
        neither = rows[~local & (own != rank[rows])]  # its own end is known all the same
        for name, values in ends.items():
            values[rows[local]] = members[values[rows[local]]]
            values[neither] = np.where(sends[neither] == (name == "source"), rank[neither], -1)
    kept = [pl.Series(name, np.where(p2p, values, -1), pl.Int32()) for name, values in ends.items()]
    operations = operations.with_columns(kept)
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
