"""Find the rank of each file, the ranks of each process group, and the place of ranks on the job's mesh.

Sources in order of precedence: `distributedInfo`, its `pg_config`, the arguments of collectives, names of files.
Sources that contradict each other are an error. A group named after an axis of the mesh holds the ranks that differ
along it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path, PurePath
from typing import Any

import msgspec

from tracekit.base.errors import FormatError
from tracekit.base.paths import command
from tracekit.base.text import listed
from tracekit.collectors.importers.kineto.json_events import CollectiveArgs
from tracekit.collectors.importers.kineto.rank_columns import RankColumns
from tracekit.trace.model import LARGEST_SIZE, ProcessGroup

_RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_.]?(\d+)", re.IGNORECASE)
#: Collectives whose argument `Rank` is the caller's; that of others is their root or peer.
_OWN_RANK = re.compile(r"_?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier)", re.IGNORECASE)


def place(files: Sequence[RankColumns]) -> tuple[list[int], int | None, list[str]]:
    """Find the rank of each file, the number of ranks of the job, and notes on what was guessed.

    Raises FormatError if sources contradict each other or two files have one rank.
    """
    stated = [rank_of(file) for file in files]
    notes: list[str] = []
    if len(files) > 1 and None in stated:
        if any(rank is not None for rank in stated):
            check_one_job(files)
            nameless = files[stated.index(None)].file
            raise FormatError(
                f"{nameless}: does not state its rank, other files do; rename it, for example to rank3_trace.json"
            )
        notes.append("no file states its rank: ranks are numbered in the order of the file names")
    ranks = [number if rank is None else rank for number, rank in enumerate(stated)]
    seen: dict[int, str] = {}
    for columns, rank in zip(files, ranks, strict=True):
        if rank in seen:
            check_one_job(files)
            raise FormatError(
                f"{columns.file} and {seen[rank]}: both are traces of rank {rank}; give the files of one recording,"
                " such as the folder of one iteration"
            )
        seen[rank] = columns.file
    sizes = {size: file.file for file in files if (size := _world_size(file)) is not None}
    if len(sizes) > 1:
        (size, file), (other, second) = list(sizes.items())[:2]
        raise FormatError(
            f"{file} says that the job has {size} ranks, but {second} says {other}; give the files of one job"
        )
    world_size = next(iter(sizes), None)
    if world_size is not None and (missing := sorted(set(range(world_size)) - set(ranks))):
        listed = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        notes.append(
            f"{len(missing)} of {world_size} ranks were not recorded ({listed}): the replay does not wait for them"
        )
    return ranks, world_size, notes


def check_one_job(files: Sequence[RankColumns]) -> None:
    """Raise FormatError, with the files, if one of them states no rank and meets no other: it is a recording of its
    own, and a name for its rank would make one job of several. Called where files contradict each other.
    """
    if all(file.collectives or (_world_size(file) or 1) > 1 or rank_of(file) is not None for file in files):
        return
    paths = sorted({Path(file.file) for file in files})
    folder = os.path.commonpath([path.parent for path in paths])
    names = listed((os.path.relpath(path, folder) for path in paths), 12)
    raise FormatError(
        f"{folder}: {len(paths)} recordings, not the ranks of one job: {names}; name one, such as"
        f" `{command('whatif', paths[0])}`"
    )


def rank_of(file: RankColumns) -> int | None:
    """Return the rank that wrote a file, None if unknown. Raises FormatError if sources contradict each other."""
    stated_ranks: list[tuple[str, int]] = []
    if file.fused:
        return file.part
    stated = info(file)
    if type(stated.get("rank")) is int and 0 <= stated["rank"] < LARGEST_SIZE:
        stated_ranks.append(("distributedInfo", stated["rank"]))
    if len(seen := _ranks_of_collectives(file)) == 1:
        stated_ranks.append(("the arguments of its collectives", seen.pop()))
    path = PurePath(file.file)
    if named := _RANK_IN_NAME.findall(path.name):
        stated_ranks.append(("its name", int(named[-1])))
    elif folder := _RANK_IN_NAME.fullmatch(path.parent.name):
        stated_ranks.append(("its folder's name", int(folder[1])))
    for source, rank in stated_ranks[1:]:
        if rank != stated_ranks[0][1]:
            raise FormatError(
                f"{file.file}: {stated_ranks[0][0]} says rank {stated_ranks[0][1]}, {source} rank {rank}; correct or"
                " rename the file"
            )
    return stated_ranks[0][1] if stated_ranks else None


def _ranks_of_collectives(file: RankColumns) -> set[int]:
    """Return the ranks in the arguments of collectives, for groups that are listed in full."""
    groups = pg_config(file)
    seen = set()
    for args in file.ranks_in_groups:
        ranks = members(args, groups) if _OWN_RANK.match(args.collective or "") else ()
        if ranks and args.rank_in_group is not None and 0 <= args.rank_in_group < len(ranks):
            seen.add(ranks[args.rank_in_group])
    return seen


def _world_size(file: RankColumns) -> int | None:
    size = info(file).get("world_size")
    return size if type(size) is int and 0 < size <= LARGEST_SIZE else None


def info(file: RankColumns) -> Mapping[str, Any]:
    """Return what the head of the file states about the job; empty if nothing."""
    stated = file.header.get("distributedInfo")
    return stated if isinstance(stated, dict) else {}


def pg_config(file: RankColumns) -> dict[str, tuple[int, ...]]:
    """Return the groups in the head of the file whose ranks are listed in full."""
    groups = {}
    listed = info(file).get("pg_config")
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict):
            continue
        ranks = rank_list(entry.get("ranks"))
        size = entry.get("pg_size", entry.get("group_size"))
        if ranks and (size is None or size == len(ranks)):
            groups[str(entry.get("pg_name"))] = ranks
        elif not ranks and size is not None and size == _world_size(file):
            groups[str(entry.get("pg_name"))] = tuple(range(size))
    return groups


def rank_list(value: object) -> tuple[int, ...]:
    """Parse ranks from a list or text such as "[0, 1]"; empty if the list was cut short."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value.encode())
        except msgspec.DecodeError:
            return ()
    if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < LARGEST_SIZE for rank in value):
        return ()
    return tuple(value)


def members(args: CollectiveArgs, groups: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks of a collective's group in the order of the group; empty if unknown."""
    listed = groups.get(args.group_name or "") or rank_list(args.group_ranks)
    if args.group_size is not None and len(listed) != args.group_size:
        return ()
    return listed


def groups_of(
    files: Sequence[RankColumns], ranks: Sequence[int], world_size: int | None
) -> tuple[tuple[ProcessGroup, ...], list[list[str | None]]]:
    """Return the process groups of a job, joined over files by their ranks, because names may differ between ranks; and
    for each file the group of each of its `collectives`, None if unknown.
    """
    keys: list[list[tuple[tuple[int, ...], str] | None]] = []
    for file in files:
        config = pg_config(file)
        keys.append([_key(args, config, world_size) for args in file.collectives])
    # The same ranks can have several communicators: the name distinguishes them if all members have it.
    knows: dict[tuple[tuple[int, ...], str], set[int]] = {}
    for of_file, rank in zip(keys, ranks, strict=True):
        for key in of_file:
            if key is not None:
                knows.setdefault(key, set()).add(rank)
    present = set(ranks)
    shared = {key for key, ranks_ in knows.items() if ranks_ >= set(key[0]) & present}
    names: dict[tuple[tuple[int, ...], str], str] = {}
    for ranks_of_group, name in sorted(knows):
        key = (ranks_of_group, name if (ranks_of_group, name) in shared else "")
        names.setdefault(key, _unused(name or "group", set(names.values()), ranks_of_group))
    named = {key: names[key if key in shared else (key[0], "")] for key in knows}
    of_files = [[None if key is None else named[key] for key in of_file] for of_file in keys]
    return tuple(ProcessGroup(name, tuple(sorted(key[0]))) for key, name in names.items()), of_files


def _key(
    args: CollectiveArgs, config: Mapping[str, tuple[int, ...]], world_size: int | None
) -> tuple[tuple[int, ...], str] | None:
    ranks = members(args, config)
    if not ranks and args.group_size is not None and args.group_size == world_size:
        ranks = tuple(range(world_size))
    if not ranks:
        return None
    description = args.group_description if args.group_description not in (None, "", "undefined") else None
    name = f"{description} {args.group_name}" if description and args.group_name not in (None, description) else None
    return tuple(sorted(ranks)), name or description or args.group_name or ""


def _unused(name: str, used: set[str], ranks: tuple[int, ...]) -> str:
    """Return `name`, followed by the ranks if another group already has it."""
    if name not in used:
        return name
    longer = f"{name} [{', '.join(map(str, ranks[:4]))}{' ...' if len(ranks) > 4 else ''}]"
    number, unique = 2, longer
    while unique in used:
        unique, number = f"{longer} {number}", number + 1
    return unique


#: Names of axes that frameworks use as names of groups.
_KNOWN = {"dp", "dp_replicate", "dp_shard", "ddp", "fsdp", "hsdp", "tp", "sp", "pp", "cp", "ep", "etp"}
#: DeviceMesh's name of the group of an axis; an axis without a name has its number instead.
_OF_DEVICE_MESH = re.compile(r"mesh_(?!dim_\d+$)([a-z]\w*)")
#: Megatron's names, such as TENSOR_MODEL_PARALLEL_GROUP.
_OF_MEGATRON = re.compile(r"(data|tensor|pipeline|context|expert)(?:_model)?_parallel_group")
_INITIALS = {"data": "dp", "tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}


def mesh_of(files: Sequence[RankColumns], ranks: Sequence[int]) -> tuple[dict[str, dict[int, int]], tuple[str, ...]]:
    """Return the axes along which every one of these ranks has one coordinate: label such as tp_rank -> rank ->
    coordinate; and the labels that are independent of the others.
    """
    groups: dict[str, set[tuple[int, ...]]] = {}
    for file in files:
        for description, members in _described(file):
            if (axis := axis_of(description)) is not None and len(members) > 1:
                groups.setdefault(f"{axis}_rank", set()).add(tuple(sorted(members)))
    coordinates = {
        axis: place for axis, members in sorted(groups.items()) if (place := _places(members)).keys() >= set(ranks)
    }
    axes: list[str] = []
    # A group over two axes is named like one of its own; each axis by itself is smaller.
    for axis in sorted(coordinates, key=lambda axis: (max(coordinates[axis].values()), axis)):
        with_axis = [coordinates[name] for name in (*axes, axis)]
        shared = set.intersection(*(set(place) for place in with_axis))
        if len({tuple(place[rank] for place in with_axis) for rank in shared}) == prod(
            max(p.values()) + 1 for p in with_axis
        ):
            axes.append(axis)
    return coordinates, tuple(axes)


def axis_of(description: str) -> str | None:
    """Return the axis that a group is named after, None for none."""
    name = description.lower()
    if match := _OF_DEVICE_MESH.fullmatch(name):
        return match[1]
    if match := _OF_MEGATRON.fullmatch(name):
        return _INITIALS[match[1]]
    return name if name in _KNOWN else None


def _described(file: RankColumns) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the groups named in a file, each with its description."""
    listed = info(file).get("pg_config")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict):
            yield str(entry.get("pg_desc")), rank_list(entry.get("ranks"))
    config = pg_config(file)
    for args in file.collectives:
        yield str(args.group_description), members(args, config)


def _places(groups: Iterable[tuple[int, ...]]) -> dict[int, int]:
    """Return the place of each rank in its group; empty if groups overlap or differ in size."""
    distinct = list(groups)
    places = {rank: place for group in distinct for place, rank in enumerate(group)}
    if len({len(group) for group in distinct}) != 1 or len(places) != sum(map(len, distinct)):
        return {}
    return places
