"""The wait-for graph of a hang report, folded by process group; the page Hang draws and lists it.

In: a report as documented in docs/hang.md. Out: `Node`s, culprits first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.base.text import ranks_text


@dataclass(frozen=True, slots=True)
class Node:
    """Ranks that share a place in the graph. `column`: 0 for culprits, else the number of waits between them and the
    nearest culprit. `held_by`: the nodes (by number) that they wait for.
    """

    column: int
    label: str
    ranks: tuple[int, ...]
    operation: str
    held_by: tuple[int, ...]


def fold(report: dict[str, Any]) -> tuple[Node, ...]:
    """Fold the wait-for graph of a hang report (docs/hang.md) into nodes: culprits, undecided ranks, then the waiting
    ranks, grouped by process group and distance from the culprits.
    """
    nodes = [Node(0, row["class"], (row["rank"],), row["operation"], ()) for row in report["culprits"]]
    nodes += [
        Node(0, "all alike" if row.get("alike") else "cannot tell", tuple(row["ranks"]), row["operation"], ())
        for row in report["undecided"]
    ]
    place = {rank: number for number, node in enumerate(nodes) for rank in node.ranks}
    waiting = {wait["rank"]: wait for wait in report["waiting"] if wait["rank"] not in place}
    column = _columns(place, {rank: wait["for"] for rank, wait in waiting.items()})
    together: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, wait in sorted(waiting.items()):
        together[column[rank], wait.get("group") or "unnamed group"].append(rank)
    first = len(nodes)
    keys = sorted(together)
    place |= {rank: first + number for number, key in enumerate(keys) for rank in together[key]}
    for number, key in enumerate(keys):
        ranks = together[key]
        held_by = {place[other] for rank in ranks for other in waiting[rank]["for"] if other in place} - {
            first + number
        }
        operation = waiting[ranks[0]]["operation"]
        nodes.append(Node(key[0], key[1], tuple(ranks), operation, tuple(sorted(held_by))))
    return tuple(nodes)


def _columns(culprits: Iterable[int], waits_for: dict[int, Sequence[int]]) -> dict[int, int]:
    """Return the number of waits between each waiting rank and the nearest culprit; 1 where unknown."""
    waiters: defaultdict[int, list[int]] = defaultdict(list)
    for rank, held in waits_for.items():
        for other in held:
            waiters[other].append(rank)
    columns: dict[int, int] = {}
    column, ring = 1, list(culprits)
    while ring:
        ring = [rank for other in ring for rank in waiters.pop(other, ()) if rank in waits_for and rank not in columns]
        columns |= dict.fromkeys(ring, column)
        column += 1
    return {rank: columns.get(rank, 1) for rank in waits_for}


def node_table(nodes: Sequence[Node]) -> pl.DataFrame:
    """The same as a table, culprits first."""
    rows = []
    for node in nodes:
        awaited = dict.fromkeys(ranks_text(nodes[held].ranks) for held in node.held_by)
        rows.append((ranks_text(node.ranks, most=1000), node.label, node.operation, ", ".join(awaited)))
    return pl.DataFrame(rows, dict.fromkeys(("ranks", "what", "operation", "wait for"), pl.String()), orient="row")
