"""The dependency rules that an op trace can name, and the graph that they build together.

In: an `OpTrace`. Out: an `OpGraph`. A rule is a function from ops to the edges among them, in a module of its own; this
module gives it its name, and finds those of plug-ins. Rules of pipeline traces are not registered: they state their
edges once per lane (`megatron.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import polars as pl

from tracekit.analysis.graph.kineto import COLUMNS as KINETO_COLUMNS
from tracekit.analysis.graph.kineto import NO_EDGES, explicit_edges, kineto_edges, stream_edges
from tracekit.analysis.graph.op_graph import OpGraph, require_columns
from tracekit.base.errors import TraceError
from tracekit.base.plug_ins import PlugIn, plug_ins, tell
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

    Raises TraceError for an unknown rule, one that fails or an invalid value, GraphError if ops contradict each other.
    """
    rules = [_rule(name) for name in trace.rules]
    for name in trace.rules:
        require_columns(trace.ops, NEEDED.get(name, ()), "ops")
    edges = _each_once(pl.concat([rule(trace.ops) for rule in rules] or [NO_EDGES]), trace.ops.height)
    read = ["waits_for", "why", *(KINETO_COLUMNS if "kineto" in trace.rules else ())]
    stated = [name for name in read if name in trace.ops.columns]
    return OpGraph.from_frames(
        trace.ops.drop(stated),
        edges,
        axes=trace.axes,
        groups=trace.groups,
    )


def _rule(name: str) -> DependencyRule:
    """The rule of that name. Raises TraceError: without one of its rules, a trace would be replayed as another job."""
    if name in RULES:
        return RULES[name]
    rules, problems = plug_ins("rules", frozenset(RULES))
    if name not in rules:
        raise TraceError("; ".join((f"rule {name!r:.40} is unknown; known: {', '.join((*RULES, *rules))}", *problems)))
    tell(problems)
    return partial(_guarded_edges, rules[name])


def _guarded_edges(rule: PlugIn, ops: pl.DataFrame) -> pl.DataFrame:
    """The edges of a rule of another distribution. Raises TraceError, which names it, for any failure of it."""
    with rule.guarded(TraceError):
        edges: pl.DataFrame = rule.value(ops.clone()).select(NO_EDGES.columns).cast(dict(NO_EDGES.schema))
        in_range = pl.all_horizontal(pl.col("before", "after").is_between(0, ops.height - 1).fill_null(value=False))
        for before, after, _ in edges.filter(~in_range).rows():
            raise ValueError(f"an edge from row {before} to row {after}; the ops have rows 0 to {ops.height - 1}")
        return edges


def _each_once(edges: pl.DataFrame, ops: int) -> pl.DataFrame:
    """The first edge between each pair of ops, sorted by the later op, the order in which a graph is walked."""
    after, before = edges["after"].to_numpy(), edges["before"].to_numpy()
    later = after[1:] > after[:-1]
    if (later | ((after[1:] == after[:-1]) & (before[1:] > before[:-1]))).all():
        return edges
    key = after * (ops + 1) + before
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    return edges[order[np.flatnonzero(np.diff(ordered, prepend=-1))]]
