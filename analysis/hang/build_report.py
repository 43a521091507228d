"""The parts of a hang report other than its culprits: waiting ranks, stalled groups, equal stacks.

In: a `Case`, culprits and open questions. Out: a `HangReport`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
from msgspec.structs import replace

from tracekit.analysis.hang.case import SHOWN, Case
from tracekit.analysis.hang.hang_report import (
    HangCulprit,
    HangReport,
    HungGroup,
    StackGroup,
    StallClass,
    UndecidedStall,
    WaitingRank,
    first_step,
    headline,
)
from tracekit.analysis.hang.states import FINISHED, NOT_ISSUED, UNKNOWN, WAITS
from tracekit.analysis.hang.wait_graph import waiting_for
from tracekit.analysis.numeric.arrays import Int32s
from tracekit.analysis.numeric.digraph import adjacency
from tracekit.trace.dumps import FlightRecord


def report_of(case: Case, culprits: list[HangCulprit], undecided: list[UndecidedStall]) -> HangReport:
    """The report with these culprits and open questions."""
    record = case.record
    numbers = {stall: place for place, stall in enumerate(dict.fromkeys(culprit.stall for culprit in culprits))}
    begin, end = case.graph.edges
    backwards = adjacency(end, begin, case.graph.nodes)
    behind = {culprit.rank: _held_up(case, culprit, backwards) for culprit in culprits}
    numbered = [replace(each, stall=numbers[each.stall], waiting=len(behind[each.rank])) for each in culprits]
    numbered.sort(key=lambda culprit: (culprit.stall, culprit.rank))
    waiting = _waiting(case, {culprit.rank for culprit in culprits})
    readable = {rank for rank, dump in record.dumps.items() if dump.problem is None}
    stale = tuple(f"the dump of rank {rank} is older than those of its peers" for rank in case.rendezvous.stale)
    contradicted = (
        f"sequence numbers in the dump of rank {rank} contradict those of all its peers: its dump is damaged, and it is"
        " not accused"
        for rank in case.rendezvous.doubtful
        if record.dumps[rank].doubt is None
    )
    seen = f"{len(readable)} of {record.world_size} rank{'s' * (record.world_size != 1)} {record.seen_as}"
    held_up = len(set().union(*behind.values()) - behind.keys())
    return HangReport(
        hang=bool(culprits or undecided or waiting),
        headline=headline(seen, numbered, undecided, len(waiting), held_up),
        first_step=first_step(numbered),
        world_size=record.world_size,
        dumps=len(readable),
        culprits=tuple(numbered),
        undecided=tuple(undecided),
        waiting=waiting,
        groups=_groups(case),
        stacks=_stacks(record),
        without_dump=tuple(rank for rank in range(record.world_size) if rank not in readable),
        notes=(*record.notes, *stale, *contradicted),
    )


def _stacks(record: FlightRecord) -> tuple[StackGroup, ...]:
    ranks: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, dump in record.dumps.items():
        if dump.stack:
            ranks[dump.stack].append(rank)
    groups = (StackGroup(tuple(sorted(alike)), stack) for stack, alike in ranks.items())
    return tuple(sorted(groups, key=lambda group: (len(group.ranks), group.ranks)))


def _held_up(case: Case, culprit: HangCulprit, backwards: tuple[Int32s, Int32s]) -> set[int]:
    """The ranks that wait for a culprit: for its arrival or, if its call differs, in their common operation."""
    waiting = waiting_for(case.graph, culprit.rank, backwards)
    if culprit.stall_class is StallClass.MISMATCH:
        together = case.rendezvous.members.filter(rank=culprit.rank, state=WAITS)["id"]
        others = [waiting_for(case.graph, case.graph.world_size + number, backwards) for number in together]
        waiting = np.unique(np.concatenate([waiting, *others]))
    return set(waiting[waiting != culprit.rank].tolist())


def _waiting(case: Case, culprits: set[int]) -> tuple[WaitingRank, ...]:
    """Every rank that waits, in its earliest unfinished operation."""
    rows = case.rendezvous.members.filter(
        (pl.col("state") == WAITS) & ~pl.col("rank").is_in([*culprits, *case.graph.broken])
    )
    first = rows.sort("order").unique("rank", keep="first").sort("rank")
    begin, end = case.graph.edges
    held = begin >= case.graph.world_size
    holders: dict[int, list[int]] = {}
    for number, rank in zip((begin[held] - case.graph.world_size).tolist(), end[held].tolist(), strict=True):
        holders.setdefault(number, []).append(rank)
    words: dict[int, str] = {}
    waits = []
    for rank, number in first.select("rank", "id").iter_rows():
        if number not in words:
            words[number] = f"{case.operation(number)} of {case.group(number)}"
            holders[number] = sorted(holders.get(number, []), key=lambda rank: (rank not in culprits, rank))[
                : SHOWN + 1
            ]
        for_ranks = [one for one in holders[number] if one != rank][:SHOWN]
        group = case.record.groups[case.rendezvous.operations["group"][number]]
        waits.append(WaitingRank(rank, tuple(for_ranks), words[number], group.description))
    return tuple(waits)


def _groups(case: Case) -> tuple[HungGroup, ...]:
    """Each stalled process group at its earliest unfinished collective."""
    collectives = case.rendezvous.operations.filter(~pl.col("p2p"))
    first = collectives.sort("sequence").unique("group", keep="first").sort("id")
    members = case.rendezvous.members.join(first.select("id"), on="id", how="semi")
    by_state = {
        (number, state): tuple(sorted(ranks))
        for number, state, ranks in members.group_by("id", "state").agg("rank").iter_rows()
    }
    return tuple(
        HungGroup(
            case.record.groups[group].description,
            case.record.groups[group].ranks,
            name,
            sequence,
            *(by_state.get((number, state), ()) for state in (WAITS, FINISHED, NOT_ISSUED, UNKNOWN)),
        )
        for number, group, name, sequence in first.select("id", "group", "name", "sequence").iter_rows()
    )
