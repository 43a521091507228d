"""Dumps of PyTorch's flight recorder: a folder with one file per rank in, a `FlightRecord` out.

NCCL's recorder and gloo's, pickles and JSON, versions 2.1 to 2.10, and the files that `tracekit collect --hang-after`
writes. A rank without a file, an empty file or a torn one is evidence in a hang, so none of them is an error.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.errors import FormatError
from tracekit.base.text import printable, short
from tracekit.collectors.importers.flight_recorder_entries import Entry, checked_entries, whole_number
from tracekit.collectors.importers.flight_recorder_file import UnreadableError, bounded_memory, is_newer, read_dump
from tracekit.collectors.importers.flight_recorder_groups import MOST_RANKS
from tracekit.collectors.importers.flight_recorder_rows import DumpRows, take_operations, take_statuses
from tracekit.trace.dumps import OPERATIONS, STATUSES, DumpedGroup, FlightRecord, RankDump

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
    columns = DumpRows()
    dumps: dict[int, RankDump] = {}
    notes: list[str] = []
    worlds: dict[int, int] = {}
    dump_times_ns: list[int] = []
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
                        f"{directory}: {short(dumps[rank].source)} and {short(path.name)} are both dumps of rank"
                        f" {rank}; keep only the dumps of one attempt in the folder"
                    )
                dumps[rank] = _take(columns, rank, path.name, dump, worlds, dump_times_ns, notes)
    finally:
        if was_collecting:
            gc.enable()
    if all(dump.problem is not None for dump in dumps.values()):
        reason = next(iter(notes), "no file is a dump")
        raise FormatError(
            f"{directory}: no readable flight-recorder dump ({reason}); expected one file per rank, such as"
            " nccl_trace_rank_0; TORCH_FR_DUMP_TEMP_FILE says where PyTorch writes them"
        )
    return _record(directory, columns, dumps, worlds, max(dump_times_ns, default=None), notes)


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


def _take(
    columns: DumpRows,
    rank: int,
    name: str,
    dump: dict[str, Any],
    worlds: dict[int, int],
    dump_times_ns: list[int],
    notes: list[str],
) -> RankDump:
    """Add one dump to the columns; a dump whose groups have unexpected types counts as damaged."""
    config = dump.get("pg_config") or {}
    try:
        groups = columns.groups.add(rank, config)
        default = [about for about in config.values() if about.get("desc") == "default_pg"]
        stated = [str(about["ranks"]) for about in default if "..." not in about["ranks"]]
        world = max((ranks.count(",") + 1 for ranks in stated), default=0)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = f"is damaged: its pg_config is not that of a dump ({type(error).__name__})"
        notes.append(f"{short(name)} {reason}")
        return RankDump(name, reason, doubt=reason)
    if world > 1:
        worlds[rank] = world
    entries = checked_entries(dump["entries"])
    if dump["entries"] and not entries.entries:
        reason = f"is damaged: {entries.left_out[0]}; none of its {len(dump['entries'])} entries can be used"
        notes.append(f"{short(name)} {reason}")
        return RankDump(name, reason, doubt=reason)
    places = take_operations(columns, rank, entries.entries, groups)
    odd_status = take_statuses(columns, rank, dump.get("pg_status") or {}, groups, places)
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
        dump_times_ns.append(taken_ns)
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


def _record(
    directory: Path,
    columns: DumpRows,
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
    groups, places = columns.groups.finish(absent)
    operations = pl.DataFrame(columns.operations, schema=OPERATIONS, orient="row")
    to_place = pl.Series([places[at] for at in range(len(places))], dtype=pl.Int32)
    operations = operations.with_columns(to_place.gather(operations["group"]).alias("group"))
    statuses = pl.DataFrame(columns.statuses, schema=STATUSES, orient="row")
    statuses = statuses.with_columns(to_place.gather(statuses["group"]).alias("group"))
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
        taken_ns=taken_ns,
        notes=(*notes, *_far_apart(operations)),
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
