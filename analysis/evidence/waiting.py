"""The calls of a recording that wait for the GPU, and how long.

In: `GraphSubject` of a recording. Out: `WaitingCalls`.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.gpu.host_ops import QUEUE
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.trace.gpu_activity import PROFILER_LINE

#: Calls that allocate or free memory of the GPU, which wait for it, too.
_ALLOCATES = "(?i)Alloc|Free"


class WaitingCalls(Struct, frozen=True, eq=False):
    """`rows`: of the calls among the ops; `table`: `name`, `operator` and `own` (line of Python) of each;
    `waited_s`: how long each lasted, the wait for the GPU included, seconds.
    """

    rows: Ints
    table: pl.DataFrame
    waited_s: Floats
    ops: int

    @property
    def calls(self) -> Bools:
        """Which ops they are, [ops]."""
        found = np.zeros(self.ops, np.bool_)
        found[self.rows] = True
        return found

    @property
    def names(self) -> list[str]:
        """Their names, each once."""
        return self.table["name"].unique(maintain_order=True).to_list()


def waiting_calls(job: GraphSubject, *, allocates: bool) -> WaitingCalls:
    """Find the calls that wait, either those that allocate or free memory, or all others; none of the profiler.

    A launch that waits for a place in a full queue is none: the host is far ahead.
    """
    ops, graph = job.ops, job.graph.ops
    of_kind = ops["name"].cast(pl.String).str.contains(_ALLOCATES)
    waits = ops["role"].eq("synchronise") & (of_kind if allocates else ~of_kind)
    if "scope" in ops.columns:
        waits &= ops["scope"].cast(pl.String).ne_missing(QUEUE)
    if "own" in ops.columns:
        waits &= ~ops["own"].cast(pl.String).fill_null("").str.contains(f"^({PROFILER_LINE.pattern})")
    rows = np.flatnonzero(waits.fill_null(value=False).to_numpy())
    table = ops[rows].select(
        "name", *(pl.col(name) if name in ops.columns else pl.lit(None, pl.String).alias(name)
                  for name in ("operator", "own")),
    )  # fmt: skip
    called = np.full(len(graph.start), np.inf)
    host = np.isin(graph.after, rows) & ops["role"].ne("gpu").to_numpy()[graph.before]
    np.minimum.at(called, graph.after[host], (graph.start + graph.duration)[graph.before[host]])
    since = np.minimum(called[rows], graph.start[rows])
    return WaitingCalls(rows, table, graph.start[rows] + graph.duration[rows] - since, ops.height)
