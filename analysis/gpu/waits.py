"""Which rank waits for which in collectives, and what each rank alone costs.

In: `Matches` and `ClockOffsets`. Out: `Waits`. A rank that begins a collective before the last one waits for it. The
rank that is last most often need not cost most: a rank alone is responsible only for how much later it begins than the
one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.numeric.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class WaitsOfGroup:
    """Seconds that each rank (first axis) waited for each other rank (second axis) in a group, [ranks, ranks]."""

    group: str
    waited: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """Seconds over all matched collectives, [ranks].

    `wait`: last start - own start. `sole_delay`: last start - second-last start, credited to the last. `last`: how
    often a rank was last. `by_group`: which rank waited for which.
    """

    ranks: tuple[int, ...]
    wait: Floats
    sole_delay: Floats
    last: Ints
    by_group: tuple[WaitsOfGroup, ...]

    def each(self) -> Iterator[tuple[float, int, int, str]]:
        """Yield how long a rank waited, seconds, the rank, the one it waited for, and the group."""
        for group in self.by_group:
            for at, by in zip(*np.nonzero(group.waited > 0), strict=True):
                yield float(group.waited[at, by]), self.ranks[at], self.ranks[by], group.group

    @property
    def waited_for(self) -> Floats:
        """Seconds that each rank (first axis) waited for each other rank, over all groups, [ranks, ranks]."""
        none = np.zeros((len(self.ranks), len(self.ranks)))
        return np.asarray(sum((group.waited for group in self.by_group), none))


def measure_waits(matches: Matches, clocks: ClockOffsets) -> Waits:
    """Which rank waited for which, by corrected clocks."""
    ranks = clocks.ranks
    count, instances = len(ranks), matches.matched
    start = matches.start - clocks.of(matches.rank)
    rank = np.searchsorted(ranks, matches.rank)
    order = np.lexsort((start, matches.instance))
    instance, start, rank = matches.instance[order], start[order], rank[order]
    ends = np.cumsum(np.bincount(instance, minlength=instances)) - 1
    last, late = rank[ends], start[ends]
    waited = late[instance] - start
    waits_of: list[WaitsOfGroup] = []
    for number, group in enumerate(matches.groups):
        table = np.zeros((count, count))
        here = matches.group_of[instance] == number
        np.add.at(table, (rank[here], last[instance[here]]), waited[here])
        waits_of.append(WaitsOfGroup(group.group, table))
    sole = late - start[ends - 1] if instances else np.zeros(0)
    wait: Floats = np.bincount(rank, weights=waited, minlength=count).astype(np.float64)
    return Waits(
        ranks=ranks,
        wait=wait,
        sole_delay=np.bincount(last, weights=sole, minlength=count).astype(np.float64),
        last=np.bincount(last, minlength=count),
        by_group=tuple(waits_of),
    )
