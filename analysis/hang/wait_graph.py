"""The wait-for graph of ranks, the sinks where waiting ends, and calls that do not belong together.

In: a `FlightRecord` and its `Rendezvous`. Out: a `Case`, all that the verdict uses: a `WaitGraph` over ranks and
unfinished operations, and `Mismatch`es at operations that are stuck.

A rank points at the operations in which it waits. An operation points at the members that hold it up: those that have
not issued it or, if all have, those whose device cannot have reached it because something earlier is unfinished there;
for a transfer that one end has finished, the other end. Ranks do not point at ranks directly: an operation of n members
has n edges, not n squared.

Following the edges ends in a *sink*: a rank that does not wait, or an operation that all members have issued and none
is late for. If it ends in a ring instead, receives posted early are removed: they do not stop the rank that posted
them.

Mismatches are different calls of members of one group under the same sequence number. Compared is only what the members
of a collective must agree on: the operation and, if all contributions must be equal, the type and number of elements.
The all-to-all of a mixture of experts may send any number of elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.hang.states import FINISHED, NOBODY, NOT_ISSUED, UNKNOWN, WAITS, Rendezvous, find_rendezvous
from tracekit.analysis.numeric.arrays import Int32s, Ints, reachable, strong_components
from tracekit.trace.dumps import FlightRecord, Progress

#: The place of the earliest unfinished operation of a rank in doubt: something that is damaged may come before all.
BEFORE_ALL = -1
_EQUAL_SHARES = r"all_?reduce$|_all_?gather_base|_reduce_?scatter_base|broadcast$|^reduce$"
#: The number of ranks listed for one wait.
SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False)
class WaitGraph:
    """Nodes are ranks, then operations (number `world_size` + id).

    `edges`: [2, n], from and to. `broken`: ranks with an unfinished operation that their peers have finished. `silent`:
    ranks whose state is unknown. `first_order`: per rank, the place of its earliest unfinished operation.
    """

    world_size: int
    operations: int
    edges: Ints
    broken: frozenset[int]
    silent: frozenset[int]
    first_order: Ints

    @property
    def nodes(self) -> int:
        """Number of nodes: ranks and operations."""
        return self.world_size + self.operations


@dataclass(frozen=True, slots=True)
class Sinks:
    """The ends of waiting: ranks, operations that all members have issued, rings of nodes, with the send in each that
    its target waits beyond (`unreceived`), and rings that nothing resolves. `doubtful`: ends that include ranks in
    doubt, which prove nothing.
    """

    ranks: tuple[int, ...]
    operations: tuple[int, ...]
    unreceived: Mapping[tuple[int, ...], int]
    rings: tuple[tuple[int, ...], ...]
    doubtful: tuple[int, ...]


def build_graph(rendezvous: Rendezvous, world_size: int) -> WaitGraph:
    """The graph of one state of the job."""
    members = rendezvous.members.join(rendezvous.operations.select("id", "needs_all", "p2p", "target"), on="id")
    doubtful = pl.col("rank").is_in(rendezvous.doubtful)
    broken = _broken(members, doubtful)
    waits = members.filter((pl.col("state") == WAITS) & ~pl.col("rank").is_in(broken))
    first = np.full(world_size, np.iinfo(np.int64).max)
    np.minimum.at(first, waits["rank"].to_numpy(), waits["order"].to_numpy())
    first[list(rendezvous.doubtful)] = BEFORE_ALL
    held = _held(members, broken, first)
    begin = np.concatenate([waits["rank"].to_numpy(), world_size + held["id"].to_numpy()]).astype(np.int64)
    end = np.concatenate([world_size + waits["id"].to_numpy(), held["rank"].to_numpy()]).astype(np.int64)
    silent = members.filter(state=UNKNOWN)["rank"].unique().to_list()
    return WaitGraph(
        world_size, rendezvous.operations.height, np.stack([begin, end]), frozenset(broken), frozenset(silent), first
    )


def _broken(members: pl.DataFrame, doubtful: pl.Expr) -> list[int]:
    """Ranks with an unfinished operation that at least as many peers have finished, and could not without them. Peers
    in doubt may wait in it, too.
    """
    may_wait = (pl.col("state") == WAITS) | (doubtful & (pl.col("state") == UNKNOWN))
    counts = (
        members.filter("needs_all")
        .group_by("id")
        .agg((pl.col("state") == FINISHED).sum().alias("finished"), may_wait.sum().alias("waiting"))
        .filter((pl.col("finished") > 0) & (pl.col("finished") >= pl.col("waiting")))
    )
    received = members.filter(pl.col("p2p") & (pl.col("state") == FINISHED) & (pl.col("rank") == pl.col("target")))
    stuck = pl.concat([counts.select("id"), received.select("id")])
    return members.filter(state=WAITS).join(stuck, on="id", how="semi")["rank"].unique().sort().to_list()


def _held(members: pl.DataFrame, broken: list[int], first: Ints) -> pl.DataFrame:
    """id, rank: the members that hold an operation up."""
    absent = members.filter(pl.col("state").is_in([NOT_ISSUED, UNKNOWN]))
    joined = members.filter(state=WAITS).join(absent.select("id"), on="id", how="anti")
    left_behind = joined["p2p"] & joined["id"].is_in(members.filter(state=FINISHED)["id"].implode())
    behind = (joined["rank"].is_in(broken) | left_behind).to_numpy() | (
        first[joined["rank"].to_numpy()] < joined["order"].to_numpy()
    )
    return pl.concat([absent.select("id", "rank"), joined.filter(behind).select("id", "rank")])


def find_sinks(graph: WaitGraph, rendezvous: Rendezvous) -> Sinks:
    """Follow all edges to their ends."""
    ranks, operations, rings = _ends(graph, graph.edges)
    doubt = set(rendezvous.doubtful)
    doubtful = tuple(sorted(doubt.intersection(ranks).union(*(doubt.intersection(ring) for ring in rings))))
    ranks = tuple(rank for rank in ranks if rank not in doubt)
    rings = [ring for ring in rings if not doubt.intersection(ring)]
    alone = [ring for ring in rings if sum(node < graph.world_size for node in ring) == 1]
    ranks = tuple(sorted({*ranks, *(ring[0] for ring in alone)}))  # it waits for itself: its device is stuck
    rings = [ring for ring in rings if ring not in alone]
    unreceived = {ring: number for ring in rings if (number := _unreceived(graph, rendezvous, ring)) is not None}
    open_rings = [ring for ring in rings if ring not in unreceived]
    if not open_rings:
        return Sinks(ranks, operations, unreceived, (), doubtful)
    inside = np.zeros(graph.nodes, bool)
    inside[[node for ring in open_rings for node in ring]] = True
    edges = graph.edges[:, ~_posted_ahead(graph, rendezvous, inside)]
    edges = edges[:, ~_no_longer_behind(graph, rendezvous, edges, inside)]
    more_ranks, more_operations, rings_left = _ends(graph, edges)
    return Sinks(
        tuple(sorted({*ranks, *(rank for rank in more_ranks if inside[rank])})),
        tuple(sorted({*operations, *(number for number in more_operations if inside[number + graph.world_size])})),
        unreceived,
        tuple(ring for ring in rings_left if inside[list(ring)].all()),
        doubtful,
    )


def _unreceived(graph: WaitGraph, rendezvous: Rendezvous, ring: tuple[int, ...]) -> int | None:
    """A send that stops its source while its target has posted no receive and is stuck elsewhere: in an operation that
    the source holds up, or else in a collective.
    """
    numbers = [node - graph.world_size for node in ring if node >= graph.world_size]
    kinds = rendezvous.operations.filter(pl.col("id").is_in(numbers))
    waits = rendezvous.members.filter(state=WAITS).join(kinds.select("id", "p2p"), on="id")
    first = waits.filter(graph.first_order[waits["rank"].to_numpy()] == waits["order"].to_numpy())
    unreceived = (
        kinds.filter("p2p")
        .join(first.select("id", source="rank"), on=["id", "source"], how="semi")
        .join(waits.select("id", target="rank"), on=["id", "target"], how="anti")
        .join(first.select(target="rank", stands_in="id", transfer="p2p"), on="target")
        .join(
            waits.select(source="rank", stands_in="id", joined=pl.lit(value=True)),
            on=["source", "stands_in"],
            how="left",
        )
    )
    begin, end = graph.edges
    holds = begin >= graph.world_size
    held = pl.DataFrame({"stands_in": begin[holds] - graph.world_size, "source": end[holds].astype(np.int32)})
    keys = ["stands_in", "source"]
    direct = unreceived.with_columns(pl.col("stands_in").cast(pl.Int64)).join(held, on=keys, how="semi")
    for chosen in (direct.filter(~pl.col("transfer") | pl.col("joined")), unreceived.filter(~pl.col("transfer"))):
        if not chosen.is_empty():
            return int(chosen["id"].to_numpy().min())
    return None


def _ends(graph: WaitGraph, edges: Ints) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]:
    """Strongly connected components without a way out: single ranks, single operations, and rings."""
    begin, end = edges
    part = strong_components(begin, end, graph.nodes)
    begin, end = part[edges]
    leaves = np.ones(part.max(initial=-1) + 1, bool)
    leaves[begin[begin != end]] = False
    size = np.bincount(part)
    touched = np.zeros(graph.nodes, bool)
    touched[edges.ravel()] = True
    touched[list(graph.broken)] = True
    at_end = leaves[part] & touched
    single = np.flatnonzero(at_end & (size[part] == 1))
    rings: dict[int, list[int]] = {}
    for node in np.flatnonzero(at_end & (size[part] > 1)):
        rings.setdefault(int(part[node]), []).append(int(node))
    ranks = tuple(int(node) for node in single if node < graph.world_size)
    operations = tuple(int(node) - graph.world_size for node in single if node >= graph.world_size)
    return ranks, operations, [tuple(ring) for ring in rings.values()]


def _posted_ahead(graph: WaitGraph, rendezvous: Rendezvous, inside: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Edges from a rank to a receive that may not be the one that stops it: the receive has not begun, and the rank is
    late for a collective in which others wait.
    """
    members = rendezvous.members.join(rendezvous.operations.select("id", "p2p", "target"), on="id")
    late = np.zeros(graph.world_size, bool)
    awaited = members.filter(~pl.col("p2p") & (pl.col("state") == NOT_ISSUED))
    awaited = awaited.filter(inside[graph.world_size + awaited["id"].to_numpy()])
    late[awaited["rank"].to_numpy()] = True
    receives = members.filter(
        pl.col("p2p")
        & (pl.col("state") == WAITS)
        & (pl.col("target") == pl.col("rank"))
        & (pl.col("progress") != int(Progress.STARTED))
    )
    loose = receives.filter(late[receives["rank"].to_numpy()])
    return _among(graph, loose["rank"].to_numpy(), graph.world_size + loose["id"].to_numpy(), graph.edges, inside)


def _no_longer_behind(
    graph: WaitGraph, rendezvous: Rendezvous, edges: Ints, inside: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Edges from an operation that all have issued to a member that is behind only because of such receives."""
    members = rendezvous.members
    waiting = members.filter(state=WAITS)
    pairs = np.stack([waiting["rank"].to_numpy(), graph.world_size + waiting["id"].to_numpy()])
    stays = _among(graph, edges[0], edges[1], pairs, None)
    waiting = waiting.filter(stays)
    first = np.full(graph.world_size, np.iinfo(np.int64).max)
    np.minimum.at(first, waiting["rank"].to_numpy(), waiting["order"].to_numpy())
    freed = members.filter(state=WAITS)
    freed = freed.filter(first[freed["rank"].to_numpy()] >= freed["order"].to_numpy())
    return _among(graph, graph.world_size + freed["id"].to_numpy(), freed["rank"].to_numpy(), edges, inside)


def _among(
    graph: WaitGraph, begin: Ints, end: Ints, edges: Ints, inside: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.bool_]:
    """Mask of the `edges` that are among the pairs begin, end (and lie `inside`)."""
    wanted = np.isin(edges[0] * graph.nodes + edges[1], np.asarray(begin) * graph.nodes + np.asarray(end))
    return wanted if inside is None else wanted & inside[edges[0]] & inside[edges[1]]


def stalls(graph: WaitGraph) -> Ints:
    """The number of each node's stall; different stalls share no rank and no operation."""
    begin, end = graph.edges
    return strong_components(np.concatenate([begin, end]), np.concatenate([end, begin]), graph.nodes)


def waiting_for(graph: WaitGraph, node: int, backwards: tuple[Int32s, Int32s]) -> Ints:
    """The ranks that wait for a node, directly or not. `backwards`: the edges by where they end, as of `adjacency`."""
    reached = reachable(*backwards, node)
    return np.asarray(reached[(reached < graph.world_size) & (reached != node)])


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`ranks`: the ranks whose call differs from that of most members. If the group is split evenly: the ranks whose
    calls, from there on, match fewer calls of other groups of this kind. If that does not decide either: all
    members. Empty if members whose call is damaged could tip the balance. `calls`: rank -> its call and the place of
    it, one rank per kind of call.
    """

    id: int
    ranks: tuple[int, ...]
    calls: tuple[tuple[int, str], ...]


def find_mismatches(record: FlightRecord, rendezvous: Rendezvous, hidden: pl.DataFrame) -> list[Mismatch]:
    """The earliest mismatch of each group that is stuck because of one. `hidden`: see `hidden_calls`."""
    stuck = rendezvous.operations.filter(~pl.col("p2p")).select("id", "group", "sequence")
    waiting = rendezvous.members.filter(state=WAITS).select("id").unique()
    signed = _calls(record).filter(pl.col("signature").is_not_null())
    calls = signed.join(stuck.join(waiting, on="id", how="semi"), on=["group", "sequence"])
    differing = calls.group_by("id").agg(pl.col("signature").n_unique().alias("kinds")).filter(pl.col("kinds") > 1)
    if differing.is_empty():
        return []
    first = stuck.join(differing, on="id").sort("sequence").unique("group", keep="first", maintain_order=True)
    doubtful = stuck.join(hidden, on="id").select("group", "rank").unique()  # a call before this one may differ, too
    return [
        _mismatch(
            record,
            signed,
            calls.filter(id=number).sort("rank"),
            doubtful.filter(group=group).height,
            rendezvous.doubtful,
        )
        for number, group in first.select("id", "group").iter_rows()
    ]


def hidden_calls(record: FlightRecord, rendezvous: Rendezvous) -> pl.DataFrame:
    """id, rank: members of collectives whose call is damaged in their dump, so that it may differ from the others'."""
    members = rendezvous.members.select("id", "rank").join(
        rendezvous.operations.filter(~pl.col("p2p")).select("id", "group", "sequence"), on="id"
    )
    calls = members.join(_calls(record), on=["rank", "group", "sequence"], how="left")
    doubtful = pl.col("rank").is_in(rendezvous.doubtful)
    hidden = calls.filter(pl.col("signature").is_null() & (pl.col("name").is_not_null() | doubtful))
    return hidden.select("id", "rank")


def _calls(record: FlightRecord) -> pl.DataFrame:
    """All collectives with what the members of each must agree on, their `signature`; null where an entry does not
    state it and another one of the same operation does.
    """
    stated = pl.when(pl.col("elements") > 0).then(
        pl.concat_str("name", pl.lit(" "), "dtypes", pl.lit(" "), pl.col("elements").cast(pl.String))
    )
    others_state = stated.is_not_null().any().over("group", "sequence")
    shares = pl.col("name").str.contains(_EQUAL_SHARES)
    signature = pl.when(shares & others_state).then(stated).otherwise("name")
    return record.operations.filter(~pl.col("p2p")).with_columns(signature.alias("signature"))


def _mismatch(
    record: FlightRecord, signed: pl.DataFrame, calls: pl.DataFrame, hidden: int, doubtful: tuple[int, ...]
) -> Mismatch:
    """`signed`: all collectives with their signatures; `calls`: those that should be the same; `hidden`: number of
    members with a damaged call, this one or another; `doubtful`: ranks whose other calls may be damaged.
    """
    group, counts = int(calls["group"][0]), Counter(calls["signature"].to_list())
    # The group's own history does not show it: a rank that skips a rare call makes the usual one in its place.
    siblings = [
        place
        for place, sibling in enumerate(record.groups)
        if place != group and sibling.description == record.groups[group].description
    ]
    usual = signed.filter(pl.col("group").is_in(siblings))
    seen = set(usual["signature"])
    elsewhere = [call for call in counts if call in seen]
    right = (
        _most(counts)
        or _most(_alike(signed.filter(group=group), calls, usual))
        or (elsewhere[0] if len(elsewhere) == 1 else None)
    )
    wrong = calls.filter(pl.col("signature") != right) if right is not None else calls
    first, second, *_ = (*sorted(counts.values(), reverse=True), 0)
    others = {rank for place in siblings for rank in record.groups[place].ranks}
    if hidden >= first - second and (hidden or not others.isdisjoint(doubtful)):
        wrong = wrong.clear()
    shown = calls.unique("signature", keep="first", maintain_order=True)
    return Mismatch(
        id=int(calls["id"][0]),
        ranks=tuple(wrong["rank"].to_list()),
        calls=tuple(
            (rank, f"{name} {sizes} {dtypes}" + (f" at {site}" if site else ""))
            for rank, name, sizes, dtypes, site in shown.select("rank", "name", "sizes", "dtypes", "call_site").rows()
        ),
    )


def _alike(signed: pl.DataFrame, calls: pl.DataFrame, usual: pl.DataFrame) -> Counter[str]:
    """Signature -> how often other groups make the calls of its ranks, under the same numbers, from this call on.

    `signed`, `usual`: calls of the group and of the others. A rank that skipped a call is one call ahead of its peers,
    and of other groups, from then on.
    """
    counts = Counter(usual.select("sequence", "signature").iter_rows())
    called = dict(calls.select("rank", "signature").iter_rows())
    alike = Counter(dict.fromkeys(called.values(), 0))
    later = signed.filter(pl.col("sequence") >= calls["sequence"][0])
    for rank, number, signature in later.select("rank", "sequence", "signature").iter_rows():
        if rank in called:
            alike[called[rank]] += counts[number, signature]
    return alike


def _most(counts: Counter[str]) -> str | None:
    """The most frequent item; None if two are equally frequent."""
    ranked = counts.most_common(2)
    return ranked[0][0] if len(ranked) == 1 or ranked[0][1] > ranked[1][1] else None


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Everything that the verdict uses."""

    record: FlightRecord
    rendezvous: Rendezvous
    graph: WaitGraph
    stall: Ints
    leading: Ints  # operations that are the earliest unfinished one of a rank
    hidden: pl.DataFrame  # id, rank: calls that are damaged

    @classmethod
    def of(cls, record: FlightRecord) -> Case:
        """Gather the facts from a record."""
        rendezvous = find_rendezvous(record)
        graph = build_graph(rendezvous, record.world_size)
        waits = rendezvous.members.filter(state=WAITS)
        at_first = graph.first_order[waits["rank"].to_numpy()] == waits["order"].to_numpy()
        leading = waits.filter(at_first)["id"].unique().to_numpy()
        return cls(record, rendezvous, graph, stalls(graph), leading, hidden_calls(record, rendezvous))

    def operation(self, number: int) -> str:
        """The name of an unfinished operation, in words."""
        row = self.rendezvous.operations.row(number, named=True)
        if row["p2p"]:
            source, target = ("?" if row[end] == NOBODY else row[end] for end in ("source", "target"))
            return f"send {source}->{target}"
        return f"{row['name']} {row['sequence']}"

    def group(self, number: int) -> str:
        """The name of an unfinished operation's group."""
        place = self.rendezvous.operations["group"][number]
        return self.record.groups[place].description or "unnamed group"

    def place(self, number: int) -> str:
        """An unfinished operation and its group, in words."""
        return f"{self.operation(number)} of {self.group(number)}"

    def members(self, number: int, *states: int) -> list[int]:
        """The members of an operation in any of these states."""
        rows = self.rendezvous.members.filter((pl.col("id") == number) & pl.col("state").is_in(states))
        return [int(rank) for rank in rows["rank"]]
