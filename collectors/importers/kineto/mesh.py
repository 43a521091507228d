"""Find the place of ranks on the job's mesh from the names of process groups.

In: `RankColumns` of all files. Out: axes and the coordinate of each rank. A group named after an axis holds the ranks
that differ along it, in their order. If names do not tell, there are no axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tracekit.collectors.importers.kineto.rank_columns import RankColumns
from tracekit.collectors.importers.kineto.rank_placement import info, members, pg_config, rank_list

#: Names of axes that frameworks use as names of groups.
_KNOWN = {"dp", "dp_replicate", "dp_shard", "ddp", "fsdp", "hsdp", "tp", "sp", "pp", "cp", "ep", "etp"}
#: DeviceMesh's name of the group of an axis; an axis without a name has its number instead.
_OF_DEVICE_MESH = re.compile(r"mesh_(?!dim_\d+$)([a-z]\w*)")
#: Megatron's names, such as TENSOR_MODEL_PARALLEL_GROUP.
_OF_MEGATRON = re.compile(r"(data|tensor|pipeline|context|expert)(?:_model)?_parallel_group")
_INITIALS = {"data": "dp", "tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}


@dataclass(frozen=True, slots=True)
class RankMesh:
    """`coordinates`: label such as tp_rank -> rank -> coordinate. `axes`: labels that are independent of the others."""

    coordinates: Mapping[str, Mapping[int, int]]
    axes: tuple[str, ...]


def mesh_of(files: Sequence[RankColumns], ranks: Sequence[int]) -> RankMesh:
    """Return the axes along which every one of these ranks has one coordinate."""
    groups: dict[str, set[tuple[int, ...]]] = {}
    for file in files:
        for description, listed in _described(file):
            if (axis := axis_of(description)) is not None and len(listed) > 1:
                groups.setdefault(f"{axis}_rank", set()).add(tuple(sorted(listed)))
    coordinates = {
        axis: place for axis, some in sorted(groups.items()) if (place := _places(some)).keys() >= set(ranks)
    }
    axes: list[str] = []
    # A group over two axes is named like one of its own; each axis by itself is smaller.
    for axis in sorted(coordinates, key=lambda axis: (max(coordinates[axis].values()), axis)):
        with_axis = [coordinates[one] for one in (*axes, axis)]
        shared = set.intersection(*(set(place) for place in with_axis))
        if len({tuple(place[rank] for place in with_axis) for rank in shared}) == prod(
            max(p.values()) + 1 for p in with_axis
        ):
            axes.append(axis)
    return RankMesh(coordinates, tuple(axes))


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
