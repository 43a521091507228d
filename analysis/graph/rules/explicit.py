"""The rules of a trace that states its dependencies itself.

In: an `OpTrace`, each of whose ops lists those it waits for. Out: an `OpGraph`.
"""

from __future__ import annotations

import polars as pl

from tracekit.analysis.graph.op_graph import OpGraph
from tracekit.errors import TraceError
from tracekit.op_trace import OpTrace

_EDGES = {"before": pl.Int64, "after": pl.Int64}


def explicit_graph(trace: OpTrace) -> OpGraph:
    """The graph that the trace states. Raises TraceError and GraphError, as `OpGraph.from_frames` does."""
    stated = [name for name in ("waits_for", "why") if name in trace.ops.columns]
    return OpGraph.from_frames(trace.ops.drop(stated), _edges(trace.ops), axes=trace.axes, groups=trace.groups)


def _edges(ops: pl.DataFrame) -> pl.DataFrame:
    """An edge for each entry of `waits_for`, with the entry of `why` beside it."""
    if "waits_for" not in ops.columns:
        return pl.DataFrame(schema=_EDGES)
    lists = [name for name in ("waits_for", "why") if name in ops.columns]
    for name in lists:
        if not isinstance(ops[name].dtype, pl.List):
            raise TraceError(f"ops: column {name!r} has type {ops[name].dtype}; expected a list for each op")
    if "why" in lists:
        differs = ops["why"].list.len() != ops["waits_for"].list.len()
        if differs.any():
            row = int(differs.arg_max() or 0)
            raise TraceError(
                f"ops: column 'why', row {row}: {ops['why'].list.len()[row]} words for"
                f" {ops['waits_for'].list.len()[row]} ops in 'waits_for'; expected one for each"
            )
    edges = ops.select(pl.col(lists)).with_row_index("after").filter(pl.col("waits_for").list.len() > 0)
    return edges.explode(lists).rename({"waits_for": "before"})
