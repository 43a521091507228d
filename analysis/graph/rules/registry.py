"""The dependency rules that an op trace can name, and the graph that they build together.

In: an `OpTrace`. Out: an `OpGraph`. A rule is a function from ops to the edges among them, in a module of its own; this
module gives it its name. Rules of pipeline traces are not registered: they state their edges once per lane
(`megatron.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from tracekit.analysis.graph.op_graph import OpGraph, require_columns
from tracekit.analysis.graph.rules.explicit import NO_EDGES, explicit_edges
from tracekit.analysis.graph.rules.kineto import COLUMNS as KINETO_COLUMNS
from tracekit.analysis.graph.rules.kineto import kineto_edges
from tracekit.analysis.graph.rules.streams import stream_edges
from tracekit.base.errors import TraceError
from tracekit.trace.op import OpTrace

#: Maps the ops of a trace, in row order, to edges: `before` and `after` (row numbers, Int64) and `why`.
DependencyRule = Callable[[pl.DataFrame], pl.DataFrame]

RULES: dict[str, DependencyRule] = {
    "explicit": explicit_edges,
    "streams": stream_edges,
    "kineto": kineto_edges,
}
#: Columns without which a rule cannot run.
NEEDED = {"streams": ("rank", "start"), "kineto": ("rank", "start", "duration", "name")}


def op_graph(trace: OpTrace) -> OpGraph:
    """The graph of an op trace, built by the rules that it names.

    Raises TraceError for an unknown rule or an invalid value, GraphError if ops contradict each other.
    """
    if unknown := [name for name in trace.rules if name not in RULES]:
        raise TraceError(f"rule {unknown[0]!r:.40} is unknown; known: {', '.join(RULES)}")
    for rule in trace.rules:
        require_columns(trace.ops, NEEDED.get(rule, ()), "ops")
    edges = pl.concat([NO_EDGES, *(RULES[name](trace.ops) for name in trace.rules)])
    read = ["waits_for", "why", *(KINETO_COLUMNS if "kineto" in trace.rules else ())]
    stated = [name for name in read if name in trace.ops.columns]
    return OpGraph.from_frames(
        trace.ops.drop(stated),
        _each_once(edges, trace.ops.height),
        axes=trace.axes,
        groups=trace.groups,
    )


def _each_once(edges: pl.DataFrame, ops: int) -> pl.DataFrame:
    """The first edge between each pair of ops, sorted by the later op, the order in which a graph is walked."""
    key = edges["after"].to_numpy() * (ops + 1) + edges["before"].to_numpy()
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    return edges[order[np.flatnonzero(np.diff(ordered, prepend=-1))]]
