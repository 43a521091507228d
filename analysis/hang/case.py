"""Everything that the verdict on a hang uses, and its names for operations and groups.

In: a `FlightRecord`. Out: a `Case`.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from tracekit.analysis.hang.mismatch import hidden_calls
from tracekit.analysis.hang.states import NOBODY, WAITS, Rendezvous, find_rendezvous
from tracekit.analysis.hang.wait_graph import WaitGraph, build_graph, stalls
from tracekit.analysis.numeric.arrays import Ints
from tracekit.trace.dumps import FlightRecord

#: The number of ranks listed for one wait.
SHOWN = 8


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

    def members(self, number: int, *states: int) -> list[int]:
        """The members of an operation in any of these states."""
        rows = self.rendezvous.members.filter((pl.col("id") == number) & pl.col("state").is_in(states))
        return [int(rank) for rank in rows["rank"]]
