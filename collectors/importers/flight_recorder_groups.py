"""Match process groups across ranks, which name them differently.

In: the group tables of all dumps. Out: one list of `DumpedGroup`, and for each dump the positions of its groups in it.
The name of a group is its number within one process, so it differs between ranks; description and members identify it.
The text of members can be cut after 30 ranks; other dumps complete it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracekit.trace.dumps import DumpedGroup

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
    """Collects the groups of all dumps; `finish` returns their members."""

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
