"""Random op graphs, and a plain simulation of them to compare with."""

from __future__ import annotations

from collections import deque

import numpy as np
import polars as pl
from hypothesis import strategies as st

from tracekit.analysis.graph.op_graph import OpGraph
from tracekit.analysis.numeric.arrays import Floats


@st.composite
def frames(draw: st.DrawFn, steps: int = 1) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ops of a few ranks with edges from earlier to later rows, and rendezvous of ops that do not wait for each other.

    With several `steps`, all have the same ops, of other durations.
    """
    size = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rank = rng.integers(0, 4, size)
    level = np.sort(rng.integers(0, 6, size))  # ops of one level do not wait for each other
    before, after = np.nonzero((level[:, None] < level[None, :]) & (rng.random((size, size)) < 0.2))
    rendezvous = np.full(size, -1)
    for at in range(6):
        members = [int(ops[0]) for one in range(4) if len(ops := np.flatnonzero((level == at) & (rank == one)))]
        if len(members) > 1 and rng.random() < 0.7:
            rendezvous[members] = at
    kind = rng.choice(np.array(["a", "b", "c"], dtype="U4"), size)
    kind[rendezvous >= 0] = "sync"
    parts, edges = [], []
    for step in range(steps):
        parts.append(
            pl.DataFrame(
                {
                    "step": np.full(size, 10 * step),
                    "rank": rank,
                    "kind": kind,
                    "start": rng.random(size),
                    "duration": rng.random(size),
                    "rendezvous": np.where(rendezvous >= 0, rendezvous + 100 * step, -1),
                    "host": [f"n{one // 2}" for one in rank],
                }
            )
        )
        edges.append(pl.DataFrame({"before": before + step * size, "after": after + step * size}))
    ops = pl.concat(parts).with_columns(
        rendezvous=pl.when(pl.col("rendezvous") >= 0).then(pl.col("rendezvous")), why=pl.lit("launch")
    )
    return ops.drop("why"), pl.concat(edges).with_columns(why=pl.lit("launch"))


def simulated_ends(graph: OpGraph, cost: Floats) -> Floats:
    """When each op ends, by events: an op that is ready starts, a rendezvous when its last member is there."""
    size = len(cost)
    waiting = np.bincount(graph.after, minlength=size)
    members = {number: np.flatnonzero(graph.rendezvous == number) for number in set(graph.rendezvous.tolist())}
    # Clocks may be a little off, so that a transfer takes less than nothing and its end is the start of another op.
    ready, end = np.where(waiting == 0, 0.0, -np.inf), np.full(size, np.nan)
    arrived: dict[int, int] = {}
    events = deque(np.flatnonzero(waiting == 0).tolist())
    while events:
        op = events.popleft()
        number = int(graph.rendezvous[op])
        arrived[number] = arrived.get(number, 0) + 1
        group = [op] if number < 0 else members[number]
        if number >= 0 and arrived[number] < len(group):
            continue
        begin = max(ready[one] for one in group)
        for one in group:
            end[one] = begin + cost[one]
            for after in graph.after[graph.before == one]:
                ready[after] = max(ready[after], end[one])
                waiting[after] -= 1
                if not waiting[after]:
                    events.append(int(after))
    return end
