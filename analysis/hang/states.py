"""The state of every rank in every unfinished operation.

In: a `FlightRecord`. Out: `Rendezvous`: a table of the operations that some rank has issued but not finished, and a
table of their members with the state of each. A recorder may list only unfinished operations; the rest then follows
from the lowest unfinished sequence number and from the status of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from tracekit.trace.dumps import FlightRecord, Progress

WAITS, FINISHED, NOT_ISSUED, UNKNOWN = range(4)
_UNTOLD = 4
#: The end of a transfer if its group's members do not determine it.
NOBODY = -1

#: Operations that no rank can finish before every member has reached them. In the others (broadcast, reduce, gather,
#: scatter, transfers), some members may leave early.
_NEEDS_ALL = r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier"
#: A status counts either collectives or transfers, whichever came last; if it is this far beyond every entry, it
#: counts transfers. Chosen.
_STATUS_SLACK = 1000
#: No rank is further ahead of another one: its recorder would have no room for its unfinished operations.
FURTHEST = 1 << 22


_OPERATION = ["id", "group", "sequence", "name", "needs_all", "p2p", "source", "target", "since_ns"]
_MEMBER = ["id", "rank", "state", "order", "progress", "call_site"]


@dataclass(frozen=True, slots=True, eq=False)
class Rendezvous:
    """`operations`: id (its row), group, sequence, name, needs_all, p2p, source, target, since_ns. `members`: id, rank,
    state (one of WAITS, FINISHED, NOT_ISSUED, UNKNOWN), and for those that wait: order, progress, call_site.
    `stale`: ranks whose dump is older than what their peers have finished with them. `doubtful`: ranks whose dump is
    partly damaged: its valid part counts unless peers contradict it. `sequences`: rank, group, issued, finished: the
    last collective that each rank issued and finished in each group; `issued` is null in doubtful ranks.
    """

    operations: pl.DataFrame
    members: pl.DataFrame
    stale: tuple[int, ...]
    doubtful: tuple[int, ...]
    sequences: pl.DataFrame


def find_rendezvous(record: FlightRecord) -> Rendezvous:
    """Collectives and transfers that are unfinished on some rank, in the order in which they were first issued."""
    doubtful = [rank for rank, dump in record.dumps.items() if dump.doubt is not None]
    rendezvous, impossible = _find(record, doubtful)
    if not impossible:
        return rendezvous
    possible = record.operations.filter(~pl.col("rank").is_in(impossible))
    return _find(replace(record, operations=possible), sorted({*doubtful, *impossible}))[0]


def _find(record: FlightRecord, doubtful: list[int]) -> tuple[Rendezvous, set[int]]:
    """The operations and members, and the ranks whose numbers cannot all be right."""
    readable = [rank for rank, dump in record.dumps.items() if dump.problem is None]
    sequences = _known_sequences(record, doubtful)
    unfinished = record.operations.filter(pl.col("progress") != int(Progress.FINISHED))
    unfinished = unfinished.join(sequences, on=["rank", "group"], how="left").filter(
        pl.col("p2p") | (pl.col("sequence") > pl.col("finished").fill_null(-1))
    )
    collectives, members = _collectives(record, unfinished.filter(~pl.col("p2p")), sequences)
    passed = _known_transfers(record, doubtful)
    transfers, ends = _transfers(record, unfinished.filter(pl.col("p2p")), passed, collectives.height)
    operations, members = pl.concat([collectives, transfers]), pl.concat([members, ends])
    members = _without_dump(members, readable).with_columns(
        pl.when(pl.col("rank").is_in(doubtful) & (pl.col("state") == NOT_ISSUED))
        .then(pl.lit(UNKNOWN, pl.Int8))
        .otherwise("state")
        .alias("state")
    )
    stale = _stale(operations, members)
    newest = record.operations.group_by("rank").agg(pl.col("created_ns").max().alias("newest_ns"))
    impossible = _against_all(record, _known_sequences(record, []), newest)
    impossible |= _old_and_new(operations, members, stale, newest) | _against_status(record)
    if stale:
        members = _without_dump(members, [rank for rank in readable if rank not in set(stale)])
        operations = operations.join(members.filter(state=WAITS).select("id").unique(), on="id", how="semi")
        members = members.join(operations.select("id"), on="id", how="semi")
    return _numbered(operations, members, stale, tuple(doubtful), sequences), impossible


def _against_all(record: FlightRecord, sequences: pl.DataFrame, newest: pl.DataFrame) -> set[int]:
    """Ranks that have finished collectives which none of their peers, two at least, has issued, or not issued what all
    of them have finished, in a dump that is no older. Of two ranks of one age, both: one of them is wrong.
    """
    collectives = record.operations.filter(~pl.col("p2p"))
    open_since = pl.col("created_ns").filter(pl.col("progress") != int(Progress.FINISHED)).min()
    seen = collectives.group_by("rank", "group").agg(
        pl.col("name").str.contains(_NEEDS_ALL).all().alias("needs_all"), open_since.alias("since_ns")
    )
    seen = seen.filter(pl.col("needs_all").all().over("group")).join(newest, on="rank")
    issued, finished, since_ns, newest_ns = (pl.col(name) for name in ("issued", "finished", "since_ns", "newest_ns"))

    def of_others(values: pl.Expr, *, highest: bool) -> pl.Expr:
        ordered = values.sort(descending=highest, nulls_last=True)
        first, second = (ordered.slice(position, 1).first().over("group") for position in (0, 1))
        return pl.when(values == first).then(second).otherwise(first)

    ranks = pl.len().over("group")
    behind = of_others(finished, highest=False) - issued
    ahead = finished - of_others(issued, highest=True)
    new = newest_ns >= of_others(since_ns, highest=False)
    others_new = (ranks > 2) | (of_others(newest_ns, highest=True) >= since_ns)
    counted = sequences.filter(issued.is_not_null()).join(seen, on=["rank", "group"])
    strange = ((behind > 0) & new) | ((ahead > 0) & others_new) | (ahead > FURTHEST)
    return set(counted.filter((ranks > 1) & strange)["rank"])


def _against_status(record: FlightRecord) -> set[int]:
    """Ranks whose group status counts more issued and unfinished operations than the newest of their entries."""
    seen = record.operations.filter(~pl.col("p2p")).group_by("rank", "group").agg(pl.col("sequence").max())
    stated = seen.join(_statuses(record), on=["rank", "group"])
    return set(stated.filter(pl.col("issued") > pl.max_horizontal("sequence", "finished"))["rank"])


def _old_and_new(
    operations: pl.DataFrame, members: pl.DataFrame, stale: tuple[int, ...], newest: pl.DataFrame
) -> set[int]:
    """Ranks whose dump is older than what their peers have finished, but not than the operations it waits in with them,
    nor than their issue of those it lacks.
    """
    old, waits = pl.col("rank").is_in(stale), members.filter(state=WAITS)
    waiting_together = waits.filter(old).join(waits.filter(~old).select("id"), on="id", how="semi")
    lacks = members.filter(old, state=NOT_ISSUED).join(operations.filter("needs_all").select("id", "since_ns"), on="id")
    later = lacks.join(newest, on="rank").filter(pl.col("newest_ns") >= pl.col("since_ns"))
    return {*waiting_together["rank"], *later["rank"]}


def _known_sequences(record: FlightRecord, doubtful: list[int]) -> pl.DataFrame:
    """rank, group, issued, finished: the last collective that each rank issued and finished in each group."""
    certain = ~pl.col("rank").is_in(doubtful)
    collectives = record.operations.filter(~pl.col("p2p"))
    done = pl.col("progress") == int(Progress.FINISHED)
    seen = collectives.group_by("rank", "group").agg(
        pl.col("sequence").max().alias("seen"),
        pl.col("sequence").filter(~done).min().alias("first_open"),
        pl.col("sequence").filter(done).max().alias("last_done"),
    )
    statuses = _statuses(record)
    merged = seen.join(statuses, on=["rank", "group"], how="full", coalesce=True)
    return merged.select(
        "rank",
        "group",
        pl.when(certain).then(pl.max_horizontal("seen", "issued")).alias("issued"),
        pl.max_horizontal(
            pl.coalesce(pl.when(certain).then(pl.col("first_open") - 1), "last_done"), pl.col("finished")
        ).alias("finished"),
    )


def _statuses(record: FlightRecord) -> pl.DataFrame:
    """The statuses that count collectives."""
    p2p, sequence = pl.col("p2p"), pl.col("sequence")
    groups = record.operations.group_by("group").agg(p2p.any(), sequence.filter(~p2p).max().alias("highest"))
    counted = record.statuses.join(groups.filter(~p2p), on="group")
    return counted.filter(pl.col("issued") <= pl.col("highest") + _STATUS_SLACK).select(record.statuses.columns)


def _collectives(
    record: FlightRecord, unfinished: pl.DataFrame, sequences: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    operations = (
        unfinished.group_by("group", "sequence")
        .agg(pl.col("name").mode().min(), pl.col("created_ns").min().alias("since_ns"))
        .with_row_index("id")
        .with_columns(pl.col("id").cast(pl.Int64), pl.lit(value=False).alias("p2p"))
        .with_columns(pl.lit(None, pl.Int32).alias(end) for end in ("source", "target"))
        .with_columns(pl.col("name").str.contains(_NEEDS_ALL).alias("needs_all"))
    )
    sizes = {place: len(record.groups[place].ranks) for place in operations["group"].unique()}
    in_groups = pl.DataFrame(
        {
            "group": np.repeat(np.fromiter(sizes, np.int32), np.fromiter(sizes.values(), np.int64)),
            "rank": np.concatenate(
                [np.asarray(record.groups[place].ranks, np.int32) for place in sizes] or [np.zeros(0, np.int32)]
            ),
        }
    )
    own = unfinished.select("rank", "group", "sequence", "order", "progress", "call_site")
    members = (
        operations.select("id", "group", "sequence")
        .join(in_groups, on="group")
        .join(own, on=["rank", "group", "sequence"], how="left")
        .join(sequences, on=["rank", "group"], how="left")
        .with_columns(
            pl.when(pl.col("order").is_not_null())
            .then(WAITS)
            .when(pl.col("sequence") > pl.col("issued"))
            .then(NOT_ISSUED)
            .when(pl.col("issued").is_not_null() | (pl.col("sequence") <= pl.col("finished")))
            .then(FINISHED)
            .otherwise(_UNTOLD)
            .cast(pl.Int8)
            .alias("state")
        )
    )
    return operations.select(_OPERATION), _settled(operations, members).select(_MEMBER)


def _settled(operations: pl.DataFrame, members: pl.DataFrame) -> pl.DataFrame:
    """A rank without entries for a group has finished what a peer could not have finished without it, and has issued
    nothing else.
    """
    needs_all = operations.filter("needs_all").select("id")
    passed = members.filter(state=FINISHED).join(needs_all, on="id", how="semi")["id"].unique()
    settled = pl.when(pl.col("id").is_in(passed.implode())).then(FINISHED).otherwise(NOT_ISSUED).cast(pl.Int8)
    return members.with_columns(pl.when(pl.col("state") == _UNTOLD).then(settled).otherwise("state").alias("state"))


def _transfers(
    record: FlightRecord, unfinished: pl.DataFrame, sequences: pl.DataFrame, first_id: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Sends and their receives. If both sides count alike, the sequence number joins them and shows what the peer has
    finished; otherwise, transfers of a pair match in order, first with first.
    """
    ends = unfinished.with_columns(pl.col("source", "target").fill_null(NOBODY))
    pair = ["group", "source", "target"]
    pairs = _counted_alike(record, ends)
    ends = ends.sort("order").with_columns(
        pl.when(pl.col("group").is_in(pairs))
        .then("sequence")
        .otherwise(pl.int_range(pl.len()).over([*pair, "rank"]))
        .alias("place")
    )
    operations = (
        ends.group_by([*pair, "place"])
        .agg(pl.col("name").min(), pl.col("created_ns").min().alias("since_ns"), pl.col("sequence").min())
        .with_row_index("id", offset=first_id)
        .with_columns(
            pl.col("id").cast(pl.Int64), pl.lit(value=False).alias("needs_all"), pl.lit(value=True).alias("p2p")
        )
    )
    sides = pl.concat(
        [operations.select("id", *pair, "place", pl.col(end).alias("rank")) for end in ("source", "target")]
    )
    members = (
        sides.filter(pl.col("rank") != NOBODY)
        .unique(["id", "rank"])
        .join(
            ends.select("rank", *pair, "place", "order", "progress", "call_site"),
            on=["rank", *pair, "place"],
            how="left",
        )
        .join(sequences.filter(pl.col("group").is_in(pairs)), on=["rank", "group"], how="left")
    )
    passed = pl.col("place") <= pl.col("finished").fill_null(-1)
    state = pl.when(pl.col("order").is_not_null()).then(WAITS).when(passed).then(FINISHED).otherwise(NOT_ISSUED)
    return operations.select(_OPERATION), members.with_columns(state.cast(pl.Int8).alias("state")).select(_MEMBER)


def _counted_alike(record: FlightRecord, ends: pl.DataFrame) -> list[int]:
    """Groups of two in which no number means opposite directions of transfer on the two ranks."""
    ways = ends.group_by("group", "sequence").agg(pl.struct("source", "target").n_unique().alias("ways"))
    both_ways = set(ways.filter(pl.col("ways") > 1)["group"])
    return [
        place for place in ends["group"].unique() if len(record.groups[place].ranks) == 2 and place not in both_ways
    ]


def _known_transfers(record: FlightRecord, doubtful: list[int]) -> pl.DataFrame:
    """rank, group, finished: the last transfer that each rank is certain to have finished in each group."""
    transfers = record.operations.filter("p2p")
    done = pl.col("progress") == int(Progress.FINISHED)
    return transfers.group_by("rank", "group").agg(
        pl.coalesce(
            pl.col("sequence").filter(~done & ~pl.col("rank").is_in(doubtful)).min() - 1,
            pl.col("sequence").filter(done).max(),
        ).alias("finished")
    )


def _without_dump(members: pl.DataFrame, readable: list[int]) -> pl.DataFrame:
    present = pl.col("rank").is_in(readable)
    return members.with_columns(
        pl.when(present).then("state").otherwise(UNKNOWN).cast(pl.Int8).alias("state"),
        *(pl.when(present).then(name).alias(name) for name in ("order", "progress", "call_site")),
    )


def _stale(operations: pl.DataFrame, members: pl.DataFrame) -> tuple[int, ...]:
    """Ranks that have not issued what a peer has finished with them: their dumps are older than the peer's."""
    joint = members.join(operations.filter("needs_all").select("id"), on="id", how="semi")
    finished = joint.filter(state=FINISHED).select("id").unique()
    return tuple(joint.filter(state=NOT_ISSUED).join(finished, on="id", how="semi")["rank"].unique().sort())


def _numbered(
    operations: pl.DataFrame,
    members: pl.DataFrame,
    stale: tuple[int, ...],
    doubtful: tuple[int, ...],
    sequences: pl.DataFrame,
) -> Rendezvous:
    ordered = operations.sort("since_ns", "group", "sequence").with_row_index("new")
    numbers = ordered.select("id", pl.col("new").cast(pl.Int64))
    members = members.join(numbers, on="id").drop("id").rename({"new": "id"}).sort("id", "rank")
    return Rendezvous(ordered.drop("id").rename({"new": "id"}), members, stale, doubtful, sequences)
