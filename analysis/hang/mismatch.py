"""Calls that do not belong together: members of one group make different calls under the same sequence number.

In: a `FlightRecord` and its `Rendezvous`. Out: `Mismatch`es at operations that are stuck. Compares only what the
members of a collective must agree on: the operation and, if all contributions must be equal, the type and number of
elements. The all-to-all of a mixture of experts may send any number of elements.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import polars as pl

from tracekit.analysis.hang.states import WAITS, Rendezvous
from tracekit.trace.dumps import FlightRecord

_EQUAL_SHARES = r"all_?reduce$|_all_?gather_base|_reduce_?scatter_base|broadcast$|^reduce$"


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
        for place, one in enumerate(record.groups)
        if place != group and one.description == record.groups[group].description
    ]
    usual = signed.filter(pl.col("group").is_in(siblings))
    ever = set(usual["signature"])
    elsewhere = [one for one in counts if one in ever]
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
