"""Which rank waits for which in collectives, and what each rank alone costs.

In: `Matches` and `ClockOffsets`. Out: `Waits`. A rank that begins a collective before the last one waits for it. The
rank that is last most often need not cost most: a rank alone is responsible only for how much later it begins than the
one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.matching import UNNAMED_GROUP, Matches
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.codes import numbered


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
            for waiting, by in zip(*np.nonzero(group.waited > 0), strict=True):
                yield float(group.waited[waiting, by]), self.ranks[waiting], self.ranks[by], group.group

    @property
    def waited_for(self) -> Floats:
        """Seconds that each rank (first axis) waited for each other rank, over all groups, [ranks, ranks]."""
        none = np.zeros((len(self.ranks), len(self.ranks)))
        return np.asarray(sum((group.waited for group in self.by_group), none))


def measure_waits(matches: Matches, clocks: ClockOffsets) -> Waits:
    """Which rank waited for which, by corrected clocks."""
    start, groups = matches.start - clocks.of(matches.rank), [group.group for group in matches.groups]
    return _waits(clocks.ranks, matches.rank, start, matches.instance, matches.group_of, groups)


def waits_of_ops(ops: pl.DataFrame, ranks: tuple[int, ...]) -> Waits:
    """As `measure_waits`, from the op trace of a recording, whose clocks are corrected."""
    met = ops.filter(pl.col("rendezvous").is_not_null()) if "rendezvous" in ops.columns else ops.clear()
    group = met.get_column("group", default=pl.Series([None] * met.height, dtype=pl.String)).fill_null(UNNAMED_GROUP)
    instance, of_group = (numbered(column) for column in (met.get_column("rendezvous", default=group), group))
    _, first = np.unique(instance, return_index=True)
    names = [str(name) for name in group.gather(np.unique(of_group, return_index=True)[1])]
    return _waits(ranks, met["rank"].to_numpy(), met["start"].to_numpy(), instance, of_group[first], names)


def _waits(
    ranks: tuple[int, ...], rank: np.ndarray, start: Floats, instance: Ints, group_of: Ints, groups: Sequence[str]
) -> Waits:
    """The waits of members of collectives, `rank`, `start` and `instance` [members]; `group_of` [instances]."""
    count, instances = len(ranks), len(group_of)
    rank, order = np.searchsorted(ranks, rank), np.lexsort((start, instance))
    instance, start, rank = instance[order], start[order], rank[order]
    ends = np.cumsum(np.bincount(instance, minlength=instances)) - 1
    last, late = rank[ends], start[ends]
    waited = late[instance] - start
    waits_of: list[WaitsOfGroup] = []
    for number, group in enumerate(groups):
        table = np.zeros((count, count))
        of_group = group_of[instance] == number
        np.add.at(table, (rank[of_group], last[instance[of_group]]), waited[of_group])
        waits_of.append(WaitsOfGroup(group, table))
    sole = late - start[ends - 1] if instances else np.zeros(0)
    wait: Floats = np.bincount(rank, weights=waited, minlength=count).astype(np.float64)
    return Waits(
        ranks=ranks,
        wait=wait,
        sole_delay=np.bincount(last, weights=sole, minlength=count).astype(np.float64),
        last=np.bincount(last, minlength=count),
        by_group=tuple(waits_of),
    )
