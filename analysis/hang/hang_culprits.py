"""Find the ranks that hold the job up, from the wait-for graph, and report them with all that waits.

In: a `FlightRecord`. Out: a `HangReport`. A culprit is where waiting ends; each has a class and evidence. A rank that
waits is never a culprit. A rank whose dump is missing may hang, or wait like the others, or have lost its file: it is a
culprit if the others prove that it never came, or if nothing else explains their wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
from msgspec.structs import replace

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
from tracekit.analysis.hang.states import FINISHED, NOBODY, NOT_ISSUED, UNKNOWN, WAITS
from tracekit.analysis.hang.wait_graph import SHOWN, Case, Mismatch, Sinks, find_mismatches, find_sinks, waiting_for
from tracekit.analysis.numeric.arrays import Int32s, adjacency
from tracekit.trace.dumps import FlightRecord, Progress

#: What waiting leads to.
_Finding = HangCulprit | UndecidedStall


def find_hang(record: FlightRecord) -> HangReport:
    """Find the ranks that hold others up, and why. Pure: dumps in, verdict out."""
    case = Case.of(record)
    rendezvous, graph = case.rendezvous, case.graph
    sinks = find_sinks(graph, rendezvous)
    mismatches = find_mismatches(record, rendezvous, case.hidden)
    explained = {int(case.stall[graph.world_size + mismatch.id]) for mismatch in mismatches}
    doubtful = set(rendezvous.doubtful)
    named = [(row, rank) for row in mismatches for rank in row.ranks if rank not in doubtful]
    findings: list[_Finding] = [_mismatched(case, mismatch, rank) for mismatch, rank in named]

    def is_open(node: int) -> bool:
        return int(case.stall[node]) not in explained

    stuck = {rank for rank in _proven(case, sinks) if rank in graph.broken or is_open(rank)}
    findings += [_stuck(case, rank) for rank in sorted(stuck.difference(rank for _, rank in named))]
    findings += [_in_doubt(case, rank) for rank in _doubtful(sinks, mismatches, doubtful)]
    for number in sinks.operations:
        if is_open(graph.world_size + number):
            findings += _not_reached(case, number)
    for ring, number in sinks.unreceived.items():
        if is_open(ring[0]):
            findings += _out_of_order(case, ring, {True}) or [_unreceived(case, number)]
    for ring in sinks.rings:
        if is_open(ring[0]):
            findings += _out_of_order(case, ring, {True, None}) or [_ring(case, ring)]
    culprits = [row for row in findings if isinstance(row, HangCulprit) and row.rank not in doubtful]
    return report_of(case, culprits, [row for row in findings if isinstance(row, UndecidedStall)])


def _doubtful(sinks: Sinks, mismatches: list[Mismatch], doubtful: set[int]) -> list[int]:
    """The ranks in doubt at which waiting ends, or whose calls differ or may differ."""
    differing = {rank for mismatch in mismatches for rank in mismatch.ranks if rank in doubtful}
    unplaced = any(not mismatch.ranks for mismatch in mismatches)
    return sorted({*sinks.doubtful, *differing} or (doubtful if unplaced else set()))


def _in_doubt(case: Case, rank: int) -> UndecidedStall:
    """A rank that may hold others up, or just wait: part of its dump is damaged."""
    rows = case.rendezvous.members.filter((pl.col("rank") == rank) & pl.col("state").is_in([WAITS, UNKNOWN]))
    number = int(rows["id"].to_numpy().min())
    where = case.place(number)
    return UndecidedStall((rank,), where, "its dump is damaged in part: what it did last is unknown (see the notes)")


def _proven(case: Case, sinks: Sinks) -> list[int]:
    """The ranks at the end of waiting, except those whose state is unknown and that may wait themselves."""
    silent = case.graph.silent
    seen = [rank for rank in sinks.ranks if rank not in silent]
    begin, end = case.graph.edges
    # Those for whom a rank waits that waits itself: an operation that a broken rank waits in proves nothing.
    suspects = [rank for rank in sinks.ranks if rank in silent and np.isin(begin[end == rank], end).any()]
    if sinks.doubtful or not suspects:  # the silent ones may wait for those in doubt
        return seen
    blamed = [rank for rank in suspects if _never_came(case, rank, frozenset(seen))]
    if blamed:  # one process is gone: so are the others that left as little and are waited for
        blamed = suspects
    return sorted({*seen, *blamed} or ({*suspects} if not sinks.operations else set()))


def _never_came(case: Case, rank: int, culprits: frozenset[int]) -> bool:
    """True if the others show that a silent rank is not just waiting somewhere.

    They do if an operation is the earliest unfinished one of all ranks that wait in it, and only silent members are
    missing: it would be finished if they had come. A transfer in which its peer waits first also shows it, unless the
    rank is in a collective that a culprit holds up, where it may wait. An operation shows nothing if ranks in the same
    place of other groups have not come to theirs either, because they wait.
    """
    first = case.graph.first_order
    own = case.rendezvous.members.filter(rank=rank).select("id")
    kind = case.rendezvous.operations.select("id", "p2p")
    members = case.rendezvous.members.join(own, on="id", how="semi").join(kind, on="id")
    absent = ~pl.col("p2p") & (pl.col("state") == NOT_ISSUED)
    may_wait_elsewhere = members.filter(absent & pl.col("rank").is_in(culprits)).height > 0
    for (number,), rows in members.group_by("id"):
        waits = rows.filter(state=WAITS)
        at_first = first[waits["rank"].to_numpy()] == waits["order"].to_numpy()
        if not at_first.any():
            continue
        absent_seen = (pl.col("state") == NOT_ISSUED) | pl.col("rank").is_in(case.rendezvous.doubtful)
        only_silent = not rows["p2p"][0] and at_first.all() and rows.filter(absent_seen).is_empty()
        if (only_silent or not may_wait_elsewhere) and not _absent_alike(case, int(str(number)), rank):
            return True
    return False


def _absent_alike(case: Case, number: int, rank: int) -> bool:
    """True if a rank in the same place of a sibling group has not come to this operation either, because it waits."""
    row = case.rendezvous.operations.row(number, named=True)
    group = case.record.groups[row["group"]]
    if row["p2p"] or rank not in group.ranks:
        return False
    place = group.ranks.index(rank)
    alike = case.rendezvous.operations.filter(~pl.col("p2p") & (pl.col("sequence") == row["sequence"]))
    for other, group_number in alike.select("id", "group").iter_rows():
        sibling = case.record.groups[group_number]
        if other == number or sibling.description != group.description or len(sibling.ranks) <= place:
            continue
        peer = sibling.ranks[place]
        waits = case.graph.first_order[peer] < np.iinfo(np.int64).max
        begin, end = case.graph.edges
        if waits and ((begin == case.graph.world_size + other) & (end == peer)).any():
            return True
    return False


def _awaited_in(case: Case, rank: int) -> int:
    """The first operation that a culprit holds up; every culprit holds up one."""
    if rank in case.graph.broken:
        passed = case.rendezvous.members.filter(state=FINISHED).select("id")
        own = case.rendezvous.members.filter(rank=rank, state=WAITS)
        return int(own.join(passed, on="id", how="semi").sort("order")["id"][0])
    begin, end = case.graph.edges
    held = begin[(end == rank) & (begin >= case.graph.world_size)] - case.graph.world_size
    leading = held[np.isin(held, case.leading)]
    return int(min(leading, default=min(held)))


def _earliest(case: Case, rank: int) -> int:
    """The earliest unfinished operation of a rank."""
    own = case.rendezvous.members.filter(rank=rank, state=WAITS)
    return int(own.sort("order")["id"][0])


def _stuck(case: Case, rank: int) -> HangCulprit:
    """A rank at which waiting ends, with its class."""
    dump = case.record.dumps.get(rank)
    if rank in case.graph.broken:
        number = _awaited_in(case, rank)
        peers = case.members(number, FINISHED)
        evidence = f"{case.place(number)} is finished on {_ranks(peers)} and not here"
        return _culprit(case, rank, StallClass.DEVICE, number, (evidence,))
    missed = _not_issued(case, rank)
    if rank not in case.graph.silent and not missed:
        number = _earliest(case, rank)
        evidence = f"{case.place(number)} waits for nobody else"
        return _culprit(case, rank, StallClass.DEVICE, number, (evidence,))
    if dump is None:
        sign: tuple[str, ...] = ("left no dump",)
    elif dump.process is not None:
        sign = (dump.process,)
    elif dump.problem is not None:
        sign = (f"its dump {dump.problem}",)
    elif rank in case.rendezvous.stale:
        sign = ("its dump is older than those of its peers",)
    else:
        sign = () if dump.operations else (_nothing_open(case, rank),)
    # A process that wrote a dump is there: its interpreter may be locked, or the rank has nothing to do in this group.
    wrote = dump is not None and dump.process is None and dump.problem is None and rank not in case.rendezvous.stale
    stall_class = StallClass.HOST
    if sign:
        stall_class = StallClass.SILENT if wrote else StallClass.GONE
    posted = () if sign else _posted_receive(case, rank)
    return _culprit(case, rank, stall_class, _awaited_in(case, rank), (*sign, *missed, *posted))


def _nothing_open(case: Case, rank: int) -> str:
    """What the dump of a rank without entries says: it may list unfinished operations alone."""
    statuses = case.record.statuses.filter(pl.col("rank") == rank, pl.col("issued") == pl.col("finished"))
    counted = [
        f"{issued} enqueued and as many completed in {case.record.groups[group].description or 'unnamed group'}"
        for group, issued in statuses.select("group", "issued").iter_rows()
    ]
    return "; ".join(["its dump has no entries", *counted[:1]])


def _posted_receive(case: Case, rank: int) -> tuple[str, ...]:
    """A receive that a rank has posted without a matching send: posted early, or the place where the rank is stuck."""
    own = case.rendezvous.members.filter(rank=rank, state=WAITS).sort("order")
    receives = own.join(case.rendezvous.operations.filter("p2p", target=rank).select("id", "source"), on="id")
    for number, source in receives.select("id", "source").iter_rows():
        if source in case.members(number, NOT_ISSUED):
            where = f"it has posted a receive that rank {source} has not sent to"
            return (f"{where}: if its stack stands there, ask why rank {source} did not send",)
    return ()


def _not_issued(case: Case, rank: int) -> tuple[str, ...]:
    """Operations in which others wait and which a rank has not issued."""
    rows = case.rendezvous.members.filter((pl.col("rank") == rank) & pl.col("state").is_in([NOT_ISSUED, UNKNOWN]))
    if rows.is_empty():
        return ()
    number = _awaited_in(case, rank)
    if number not in rows["id"]:
        number = int(rows["id"].to_numpy().min())
    waiting = case.members(number, WAITS)
    verb = "did not issue" if rows.filter(id=number)["state"][0] == NOT_ISSUED else "is not seen in"
    more = f", and {rows.height - 1} more" if rows.height > 1 else ""
    return (f"{verb} {case.place(number)}, where {_wait(waiting)}{more}",)


def _mismatched(case: Case, mismatch: Mismatch, rank: int) -> HangCulprit:
    calls = "; ".join(f"rank {caller}: {call}" for caller, call in mismatch.calls)
    evidence = (
        f"calls of {case.group(mismatch.id)} number {case.operation(mismatch.id).rsplit(' ', 1)[-1]} differ: {calls}"
    )
    return _culprit(case, rank, StallClass.MISMATCH, mismatch.id, (evidence,))


def _not_reached(case: Case, number: int) -> Sequence[_Finding]:
    """The culprits of an operation that all have issued and none is late for: one rank's device has not begun it."""
    rows = case.rendezvous.members.filter(id=number, state=WAITS)
    where = case.place(number)
    if NOBODY in case.rendezvous.operations.select("source", "target").row(number):
        missing = "its peer is unknown: the dumps do not say which rank of the job it is"
        return [UndecidedStall(tuple(rows["rank"]), where, missing)]
    hidden = case.hidden.filter(id=number)["rank"].to_list()
    if hidden:
        missing = f"what {_ranks(hidden)} called is damaged in the dump: the calls may differ"
        return [UndecidedStall(tuple(sorted(rows["rank"])), where, missing)]
    if rows.height == 1:
        alone = int(rows["rank"][0])
        return [_culprit(case, alone, StallClass.DEVICE, number, (f"{where} needs nobody else",))]
    started = rows.filter(progress=int(Progress.STARTED))["rank"].to_list()
    scheduled = rows.filter(progress=int(Progress.SCHEDULED))["rank"].to_list()
    if started and scheduled:
        evidence = f"{where} has started on {_ranks(started)} and not here"
        return [_culprit(case, rank, StallClass.DEVICE, number, (evidence,)) for rank in scheduled]
    ranks = tuple(sorted({*started, *scheduled}))
    if started:
        missing = "it has started on all of them: the logs of their network cards and switches would tell"
        return [UndecidedStall(ranks, where, missing)]
    if jumped := _jumped_over(case, number, rows):
        return [UndecidedStall(ranks, where, jumped, alike=True)]
    dumps = case.record.dumps
    if all(rank in dumps and dumps[rank].starts for rank in ranks):
        missing = (
            f"{where} is enqueued on all of them and has started on none, while starts are recorded: what runs before"
            " it on their streams holds it up, such as a kernel that does not end, or an event that is never recorded"
        )
        return [UndecidedStall(ranks, where, missing, alike=True)]
    missing = (
        "all have issued it, and which device has not begun it is not recorded: run with TORCH_NCCL_ENABLE_TIMING=1"
    )
    return [UndecidedStall(ranks, where, missing)]


def _jumped_over(case: Case, number: int, rows: pl.DataFrame) -> str | None:
    """Where an operation that no rank has started was jumped over on all of them, by the same later one, in words."""
    started = case.record.operations.filter(pl.col("progress") == int(Progress.STARTED), ~pl.col("p2p"))
    later = started.join(rows.select("rank", first="order"), on="rank").filter(pl.col("order") > pl.col("first"))
    calls = later.group_by("group", "sequence", "name").agg(pl.col("rank").n_unique().alias("ranks"))
    everywhere = calls.filter(pl.col("ranks") == rows["rank"].n_unique()).sort("sequence", "group")
    if everywhere.is_empty():
        return None
    group, sequence, name = everywhere.select("group", "sequence", "name").row(0)
    described = case.record.groups[group].description or "unnamed group"
    return (
        f"{case.place(number)} is enqueued on all of them and has started on none, while"
        f" {name} {sequence} of {described}, issued after it, has started on all: the device runs them in another order"
        " than they were issued. Look at the streams and events between the two calls"
    )


def _unreceived(case: Case, number: int) -> _Finding:
    """A send whose target is stuck elsewhere. If the target's dump does not show its finished operations, the target
    may have received, and the sender's device may be stuck.
    """
    source, target = case.rendezvous.operations.select("source", "target").row(number)
    history = case.record.operations.filter(rank=target, progress=int(Progress.FINISHED))
    if history.is_empty() and case.record.statuses.filter(rank=target).is_empty():
        missing = (
            f"whether rank {target} has received it is not recorded: dump with finished operations, or group status"
        )
        return UndecidedStall((source, target), case.place(number), missing)
    evidence = f"rank {source} sends to it and it has posted no receive; it waits for rank {source} elsewhere"
    return _culprit(case, target, StallClass.PARTNER, number, (evidence,))


def _out_of_order(case: Case, ring: tuple[int, ...], accepted: set[bool | None]) -> list[HangCulprit]:
    """Of ranks that wait for each other, those that have passed a call in which most members of a group wait.

    If more than half of the members wait in an operation, it is the program's next one. A rank of the ring that has not
    issued it skipped it, or makes its calls in another order, unless it is behind in its other groups too (`_is_level`,
    whose answer must be one of `accepted`). Empty if the ring has no such operation, or several.
    """
    world = case.graph.world_size
    ranks = {node for node in ring if node < world}
    candidates = []
    for number in (node - world for node in ring if node >= world):
        waiting, absent = case.members(number, WAITS), case.members(number, NOT_ISSUED)
        size = len(case.record.groups[case.rendezvous.operations["group"][number]].ranks)
        past = [rank for rank in sorted(ranks.intersection(absent)) if _is_level(case, rank, number) in accepted]
        if 2 * len(waiting) > size and past:
            candidates.append((number, waiting, past))
    if len(candidates) != 1:
        return []
    ((number, waiting, past),) = candidates
    return [_out_of_place(case, rank, number, waiting) for rank in past]


def _is_level(case: Case, rank: int, number: int) -> bool | None:
    """True if a rank has issued as many collectives as the ranks that wait for it in an operation, counted in the other
    groups that it shares with them; None if it shares none.
    """
    group = int(case.rendezvous.operations["group"][number])
    elsewhere = case.rendezvous.sequences.filter((pl.col("group") != group) & pl.col("issued").is_not_null())
    own = elsewhere.filter(rank=rank).select("group", own="issued")
    waiting = elsewhere.filter(pl.col("rank").is_in(case.members(number, WAITS)))
    shared = waiting.join(own, on="group")
    return None if shared.is_empty() else bool((shared["own"] >= shared["issued"]).all())


def _out_of_place(case: Case, rank: int, number: int, waiting: list[int]) -> HangCulprit:
    own = _earliest(case, rank)
    sites = [_called_at(case, member, operation) for member, operation in ((waiting[0], number), (rank, own))]
    evidence = (
        f"{_wait(waiting)} in {case.place(number)}{sites[0]}; it waits for one of them in"
        f" {case.place(own)}{sites[1]}: it left a call out, or calls in another order"
    )
    return _culprit(case, rank, StallClass.MISMATCH, number, (evidence,))


def _called_at(case: Case, rank: int, number: int) -> str:
    """The place where the program called an operation, if the dump has it."""
    rows = case.rendezvous.members.filter(rank=rank, id=number)
    return f" at {rows['call_site'][0]}" if rows.height and rows["call_site"][0] else ""


def _ring(case: Case, ring: tuple[int, ...]) -> UndecidedStall:
    """Ranks that wait for each other."""
    world = case.graph.world_size
    numbers = [node - world for node in ring if node >= world]
    ranks = tuple(sorted(node for node in ring if node < world))
    waits = [f"{_wait(case.members(number, WAITS))} in {case.operation(number)}" for number in numbers[:3]]
    return UndecidedStall(ranks, "; ".join(waits), "they wait for each other: compare the order of their calls")


def _culprit(case: Case, rank: int, stall_class: StallClass, number: int, evidence: tuple[str, ...]) -> HangCulprit:
    dump, taken_ns = case.record.dumps.get(rank), case.record.taken_ns
    operation = case.rendezvous.operations.row(number, named=True)
    since_ns = operation["since_ns"]
    return HangCulprit(
        rank=rank,
        host=None if dump is None else dump.host,
        stall_class=stall_class,
        group=case.record.groups[operation["group"]].description,
        operation=case.operation(number),
        since_s=None if taken_ns is None or not since_ns else round((taken_ns - since_ns) / 1e9, 3),
        since_unix_ns=since_ns or None,
        stall=int(case.stall[rank]),
        waiting=0,
        phase=None if dump is None else dump.phase,
        evidence=evidence,
        stack=None if dump is None else dump.stack,
    )


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:SHOWN]))
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"rank{'s' * (len(listed) != 1)} {shown}{more}"


def _wait(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"{_ranks(listed)} wait{'s' * (len(listed) == 1)}"


def report_of(case: Case, culprits: list[HangCulprit], undecided: list[UndecidedStall]) -> HangReport:
    """The report with these culprits and open questions."""
    record = case.record
    numbers = {stall: place for place, stall in enumerate(dict.fromkeys(culprit.stall for culprit in culprits))}
    begin, end = case.graph.edges
    backwards = adjacency(end, begin, case.graph.nodes)
    behind = {culprit.rank: _held_up(case, culprit, backwards) for culprit in culprits}
    numbered = [replace(row, stall=numbers[row.stall], waiting=len(behind[row.rank])) for row in culprits]
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
            words[number] = case.place(number)
            holders[number] = sorted(holders.get(number, []), key=lambda rank: (rank not in culprits, rank))[
                : SHOWN + 1
            ]
        for_ranks = [holder for holder in holders[number] if holder != rank][:SHOWN]
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
