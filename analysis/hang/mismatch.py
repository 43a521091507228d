"""Calls that do not belong together: members of one group whose calls of one sequence number differ.

In: a `FlightRecord` and its `Rendezvous`. Out: `Mismatch`es at operations that are stuck. Only what the members of a
collective must agree on is compared: the operation, and for those with equal contributions the type and the number of
elements. An all-to-all of a mixture of experts sends as many elements as it likes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import polars as pl

from tracekit.analysis.hang.states import WAITS, Rendezvous
from tracekit.flight_record import FlightRecord

_EQUAL_SHARES = r"all_?reduce$|_all_?gather_base|_reduce_?scatter_base|broadcast$|^reduce$"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`ranks`: those whose call differs from that of most members; where the group is split evenly, whose calls from
    there on differ from what other groups of this description call under these numbers, or call at all; where that does
    not tell either, all members. `calls`: rank -> what it called and where, one rank per kind of call.
    """

    id: int
    ranks: tuple[int, ...]
    calls: tuple[tuple[int, str], ...]


def find_mismatches(record: FlightRecord, rendezvous: Rendezvous) -> list[Mismatch]:
    """The earliest mismatch of each group that is stuck in one."""
    stuck = rendezvous.operations.filter(~pl.col("p2p")).select("id", "group", "sequence")
    waiting = rendezvous.members.filter(state=WAITS).select("id").unique()
    calls = (
        record.operations.filter(~pl.col("p2p"))
        .join(stuck.join(waiting, on="id", how="semi"), on=["group", "sequence"])
        .with_columns(_signature().alias("signature"))
    )
    differing = calls.group_by("id").agg(pl.col("signature").n_unique().alias("kinds")).filter(pl.col("kinds") > 1)
    if differing.is_empty():
        return []
    first = stuck.join(differing, on="id").sort("sequence").unique("group", keep="first", maintain_order=True)
    usual = _usual(record)
    return [_mismatch(record, calls.filter(id=number).sort("rank"), usual) for number in first["id"]]


def _signature() -> pl.Expr:
    shares = pl.concat_str(pl.lit(" "), "dtypes", pl.lit(" "), pl.col("elements_in").cast(pl.String))
    return pl.concat_str("name", pl.when(pl.col("name").str.contains(_EQUAL_SHARES)).then(shares).otherwise(pl.lit("")))


@dataclass(frozen=True, slots=True)
class _Usual:
    """How often groups of a description make a call: under one sequence number, and at all."""

    at: Counter[tuple[str, int, str]]
    ever: Counter[tuple[str, str]]


def _usual(record: FlightRecord) -> _Usual:
    named = pl.Series([group.description for group in record.groups], dtype=pl.String)
    collectives = record.operations.filter(~pl.col("p2p")).with_columns(_signature().alias("signature"))
    counts = collectives.group_by("group", "sequence", "signature").len()
    found = _Usual(Counter(), Counter())
    for description, sequence, signature, count in zip(
        named.gather(counts["group"]), counts["sequence"], counts["signature"], counts["len"], strict=True
    ):
        found.at[description, sequence, signature] += count
        found.ever[description, signature] += count
    return found


def _mismatch(record: FlightRecord, calls: pl.DataFrame, usual: _Usual) -> Mismatch:
    counts = Counter(calls["signature"].to_list())
    description, sequence = record.groups[int(calls["group"][0])].description, int(calls["sequence"][0])
    alike = _alike(record, calls, usual, description, sequence)
    # The group's own history is none of it: who skips a rare call makes the usual one in its place.
    own = Counter(record.operations.filter(~pl.col("p2p") & (pl.col("group") == calls["group"][0]))
                  .select(_signature().alias("signature"))["signature"].to_list())  # fmt: skip
    elsewhere = [one for one in counts if usual.ever[description, one] > own[one]]
    right = _most(counts) or _most(alike) or (elsewhere[0] if len(elsewhere) == 1 else None)
    wrong = calls.filter(pl.col("signature") != right) if right is not None else calls
    shown = calls.unique("signature", keep="first", maintain_order=True)
    return Mismatch(
        id=int(calls["id"][0]),
        ranks=tuple(wrong["rank"].to_list()),
        calls=tuple(
            (rank, f"{name} {sizes} {dtypes}" + (f" at {site}" if site else ""))
            for rank, name, sizes, dtypes, site in shown.select("rank", "name", "sizes", "dtypes", "call_site").rows()
        ),
    )


def _alike(record: FlightRecord, calls: pl.DataFrame, usual: _Usual, description: str, sequence: int) -> Counter[str]:
    """Signature -> how often other groups make the calls that its ranks make, under their numbers, from this one on.

    A rank that left a call out is one ahead of its peers, and of other groups, ever after.
    """
    later = record.operations.filter(
        ~pl.col("p2p") & (pl.col("group") == calls["group"][0]) & (pl.col("sequence") >= sequence)
    ).with_columns(_signature().alias("signature"))
    here = Counter(later.select("sequence", "signature").iter_rows())
    called = dict(calls.select("rank", "signature").iter_rows())
    found: Counter[str] = Counter()
    for rank, number, signature in later.select("rank", "sequence", "signature").iter_rows():
        if rank in called:
            found[called[rank]] += usual.at[description, number, signature] - here[number, signature]
    return found


def _most(counts: Counter[str]) -> str | None:
    """The most frequent one; None where two are equally frequent."""
    ranked = counts.most_common(2)
    return ranked[0][0] if len(ranked) == 1 or ranked[0][1] > ranked[1][1] else None
