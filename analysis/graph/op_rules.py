"""The dependency rules that an op trace can name, and the graph that they build together.

In: an `OpTrace`. Out: an `OpGraph`. A rule is a function from ops to the edges among them; plug-ins bring others. Rules
of pipeline traces are not registered: they state their edges once per lane (`megatron`).

- `explicit`: what the trace states itself, a list of the ops that each op waits for.
- `streams`: a stream of a rank runs one op after the other, in order of start.
- `kineto`: those of GPU recordings (`analysis/gpu/op_trace.py`). Three dependencies are certain: the order of a stream,
  the order of a host thread, and that a launched op waits for its launch. Events between streams are recorded only if
  the profiler was configured to. Otherwise they are inferred from what frameworks do, and their edges say so:

  - A collective, or another op on a stream that mostly communicates, waits for the last op that its thread launched on
    another stream before it. In a CUDA graph, whose ops share one launch, it waits for the last op that had ended
    before it, at its place in the graph, in every step and on every rank.
  - If a stream is made to wait outside a collective's call, the thread's next op waits for the latest collective that
    had ended by then.
  - A call that synchronises waits for what was launched before it.
  - A GPU op that starts long after all of this, and just after the end of an op on another stream, waits for that op if
    steps and ranks agree on it too often for chance.

  An inferred edge that contradicts the recorded times is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import polars as pl

from tracekit.analysis.graph.op_graph import OpGraph, require_columns
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints, dense, numbered, waits_beyond_chance
from tracekit.base.errors import TraceError
from tracekit.base.plug_ins import PlugIn, plug_ins, tell
from tracekit.trace.op import OpTrace

#: Columns that only this rule reads; none of them is a label.
KINETO_COLUMNS = (
    "role", "communicates", "launched_by", "resumed_by", "in_collective", "scope", "copied",
    "waits_stream", "waits_for_stream", "recorded_at", "call_s",
    "did", "did_s", "did_n", "bytes", "outer", "inputs", "own", "recomputed", "shape", "occupancy",
    "exchanges", "rows_sent", "rows_received",
)  # fmt: skip
#: A GPU op that starts this long, seconds, after everything that it is known to wait for waited for something else.
#: Within a CUDA graph, where the host does not intervene, any gap beyond noise counts. Chosen.
_LATE_S, _LATE_IN_GRAPH_S = 100e-6, 10e-6
#: How much earlier than the end of its cause an op may be recorded because of clock noise, seconds. Chosen.
SLACK_S = 10e-6
_TYPES = {
    "role": pl.String, "scope": pl.String, "communicates": pl.Boolean, "in_collective": pl.Boolean,
    "recorded_at": pl.Float64, "recomputed": pl.Boolean, "shape": pl.String,
}  # fmt: skip
_ROLES = ("gpu", "stream-wait", "synchronise", "window")
NO_EDGES = pl.DataFrame(schema={"before": pl.Int64, "after": pl.Int64, "why": pl.Categorical()})


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
    return OpGraph.from_frames(trace.ops.drop(stated), edges, axes=trace.axes, groups=trace.groups)


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


def explicit_edges(ops: pl.DataFrame) -> pl.DataFrame:
    """An edge for each entry of `waits_for`, with its entry of `why`. Raises TraceError if their lengths differ."""
    if "waits_for" not in ops.columns:
        return NO_EDGES
    lists = [name for name in ("waits_for", "why") if name in ops.columns]
    for name in lists:
        if not isinstance(ops[name].dtype, pl.List):
            raise TraceError(f"ops: column {name!r} has type {ops[name].dtype}; expected a list for each op")
    if "why" in lists:
        words, waits = (ops[name].list.len().fill_null(0) for name in ("why", "waits_for"))
        differs = words != waits
        if differs.any():
            row = int(differs.arg_max() or 0)
            raise TraceError(
                f"ops: column 'why', row {row}: {words[row]} words for {waits[row]} ops in 'waits_for'; expected one"
                " for each"
            )
    edges = ops.select(pl.col(lists)).with_row_index("after").filter(pl.col("waits_for").list.len() > 0)
    edges = edges.explode(lists).rename({"waits_for": "before"})
    before = edges["before"]
    if not before.dtype.is_integer() and before.dtype != pl.Null:
        raise TraceError(f"ops: column 'waits_for' has lists of {before.dtype}; expected row numbers of the ops")
    if before.dtype != pl.Null and (strange := (before < 0) | (before >= ops.height)).fill_null(value=False).any():
        first = int(strange.arg_max() or 0)
        raise TraceError(
            f"ops: column 'waits_for', row {edges['after'][first]}: {before[first]}; the ops have rows 0 to"
            f" {ops.height - 1}"
        )
    why = pl.col("why").cast(pl.String).cast(pl.Categorical) if "why" in lists else pl.lit("rule", pl.Categorical)
    try:
        return edges.select(pl.col("before").cast(pl.Int64), pl.col("after").cast(pl.Int64), why=why)
    except pl.exceptions.PolarsError:
        raise TraceError(f"ops: column 'why' has lists of {edges['why'].dtype}; expected words") from None


def stream_edges(ops: pl.DataFrame) -> pl.DataFrame:
    """An edge between neighbours on a stream; none for ops whose stream is null, or if there is no such column."""
    if "stream" not in ops.columns:
        return NO_EDGES
    stream = [name for name in ("step", "rank", "stream") if name in ops.columns]
    rows = ops.select(*stream, "start").with_row_index("after").filter(pl.col("stream").is_not_null())
    ordered = rows.sort("start", maintain_order=True)
    edges = ordered.select(pl.col("after").cast(pl.Int64), before=pl.col("after").shift(1).over(stream).cast(pl.Int64))
    return edges.drop_nulls().select("before", "after", why=pl.lit("stream", pl.Categorical))


def kineto_edges(ops: pl.DataFrame) -> pl.DataFrame:
    """Edges among the ops of a GPU recording."""
    missing = [name for name in KINETO_COLUMNS if name not in ops.columns]
    table = ops.with_columns(pl.lit(None, _TYPES.get(name, pl.Int64)).alias(name) for name in missing)
    rules = _Rules(table)
    parts = [
        stream_edges(ops),
        rules.linked("launched_by", "launch"),
        rules.linked("resumed_by", "inferred"),
        rules.recorded_events(),
        rules.inferred(rules.producers()),
        rules.inferred(rules.consumers()),
        rules.inferred(rules.synchronised()),
    ]
    edges = pl.concat(parts)
    edges = pl.concat([edges, rules.inferred(rules.late_starts(edges))])
    return pl.concat([edges, rules.beginnings(edges)])


class _Rules:
    """The ops as arrays, and each rule as a method that returns rows before and rows after."""

    def __init__(self, ops: pl.DataFrame) -> None:
        self.ops = ops
        self.rank = ops["rank"].to_numpy()
        self.start = ops["start"].to_numpy()
        self.end = (ops["start"] + ops["duration"]).to_numpy()
        self.role = {role: (ops["role"] == role).fill_null(value=False).to_numpy() for role in _ROLES}
        self.peer = numbered(ops["peer"] if "peer" in ops.columns else ops["name"])
        self.stream = numbered(ops["stream"])
        self.gpu = np.flatnonzero(self.role["gpu"])
        self.launcher = ops["launched_by"].fill_null(-1).to_numpy().astype(np.int64)
        self.aside = self._aside()
        # The time and thread of each GPU op's launch.
        self.launched_at = np.append(self.end, np.nan)[self.launcher]
        self.thread = np.append(self.stream, -1)[self.launcher]

    def _aside(self) -> Bools:
        """Communication, and other ops on streams that mostly communicate, such as packing of messages."""
        communicates = self.ops["communicates"].fill_null(value=False).to_numpy()
        place = dense(self.rank * (1 + self.stream.max(initial=0)) + self.stream)
        duration = np.where(self.role["gpu"], self.end - self.start, 0.0)
        of_stream = np.bincount(place, weights=duration)
        mostly = 2 * np.bincount(place, weights=duration * communicates) > of_stream
        return np.asarray(self.role["gpu"] & (communicates | mostly[place]))

    def linked(self, column: str, why: str) -> pl.DataFrame:
        """Ops that name the op they wait for."""
        named = self.ops.select(column).with_row_index("after").drop_nulls()
        return named.select(
            pl.col(column).cast(pl.Int64).alias("before"),
            pl.col("after").cast(pl.Int64),
            why=pl.lit(why, pl.Categorical),
        )

    def inferred(self, edges: tuple[Ints, Ints]) -> pl.DataFrame:
        """Edges that were not recorded, without those that contradict the recorded times."""
        before, after = edges
        possible = self.end[before] <= self.start[after] + SLACK_S
        return _frame(before[possible], after[possible], "inferred")

    def producers(self) -> tuple[Ints, Ints]:
        """The last other op that its thread launched before each collective, or that ended before it in its graph."""
        wanted, others = self.gpu[self.aside[self.gpu]], self.gpu[~self.aside[self.gpu]]
        before, after = self._ended_before_in_graph(wanted, others)
        launched = self._launched_before(np.setdiff1d(wanted, after), others)
        return np.concatenate([launched[0], before]), np.concatenate([launched[1], after])

    def _ended_before_in_graph(self, wanted: Ints, among: Ints) -> tuple[Ints, Ints]:
        """The last of `among` of the same launch that had ended before each of `wanted`, at its place in the graph.

        A collective can also start late because the one before it ended late. What it waits for had ended before it in
        every run of the graph, so the run in which the fewest ops had ended decides.
        """
        wanted = wanted[self.launcher[wanted] >= 0]
        among = self._in_every_run(wanted, among)
        scale = _scale(self.end)
        ends = _keys(self.launcher[among], np.zeros(len(among), np.int64), self.end[among], scale)
        order = np.argsort(ends, kind="stable")
        launches = self.launcher[among[order]]
        first, last = (np.searchsorted(launches, self.launcher[wanted], side=side) for side in ("left", "right"))
        inside = last > first
        wanted, first, last = wanted[inside], first[inside], last[inside]
        starts = _keys(self.launcher[wanted], np.zeros(len(wanted), np.int64), self.start[wanted] + SLACK_S, scale)
        ended = np.clip(np.searchsorted(ends[order], starts, side="right"), first, last) - first
        fewest = np.full(int(self.peer.max()) + 1, len(among))
        np.minimum.at(fewest, self.peer[wanted], ended)
        place = fewest[self.peer[wanted]]
        return among[order[(first + place - 1)[place > 0]]], wanted[place > 0]

    def _in_every_run(self, wanted: Ints, among: Ints) -> Ints:
        """Those of `among` that have a counterpart in every launch of their graph; the first `wanted` identifies a
        graph.

        So ops have the same number on all ranks, even if one rank runs more.
        """
        order = wanted[np.lexsort((self.start[wanted], self.launcher[wanted]))]
        launches, first = np.unique(self.launcher[order], return_index=True)
        graph = self.peer[order[first]]
        place = np.minimum(np.searchsorted(launches, self.launcher[among]), max(len(launches) - 1, 0))
        among = among[launches[place] == self.launcher[among]] if len(launches) else among[:0]
        graph_of = graph[np.searchsorted(launches, self.launcher[among])]
        runs = np.bincount(graph, minlength=int(graph.max(initial=-1)) + 1)
        alike = graph_of * (int(self.peer.max()) + 1) + self.peer[among]
        _, like, times = np.unique(alike, return_inverse=True, return_counts=True)
        return np.asarray(among[times[like] == runs[graph_of]])

    def _launched_before(self, wanted: Ints, among: Ints) -> tuple[Ints, Ints]:
        """The last of `among` that the same thread launched before each of `wanted`."""
        launched = self._by_thread(among).last(self.rank[wanted], self.thread[wanted], self.launched_at[wanted])
        real = (launched >= 0) & (self.launcher[wanted] >= 0)
        return launched[real], wanted[real]

    def _by_thread(self, rows: Ints) -> _Ordered:
        """GPU ops with a launch, by rank, thread and launch time."""
        rows = rows[self.launcher[rows] >= 0]
        return _Ordered(rows, self.rank[rows], self.thread[rows], self.launched_at[rows], _scale(self.end))

    def recorded_events(self) -> pl.DataFrame:
        """Streams that wait for an event, if the profiler recorded which."""
        waits = self.ops.with_row_index("row").filter(
            (pl.col("role") == "stream-wait")
            & pl.col("waits_for_stream").is_not_null()
            & pl.col("recorded_at").is_not_null()
        )
        row, rows = waits["row"].to_numpy(), self.gpu[self.launcher[self.gpu] >= 0]
        names, first = np.unique(self.stream[rows], return_index=True)
        code = {name: int(number) for name, number in zip(self.ops["stream"].gather(rows[first]), names, strict=True)}

        def stream(column: str) -> Ints:
            return np.array([code.get(f"stream {number}", -1) for number in waits[column]], np.int64)

        launched = _Ordered(rows, self.rank[rows], self.stream[rows], self.launched_at[rows], _scale(self.end))
        recorded = waits["recorded_at"].to_numpy()
        before = launched.last(self.rank[row], stream("waits_for_stream"), recorded, side="right")
        after = launched.first(self.rank[row], stream("waits_stream"), self.end[row])
        both = (before >= 0) & (after >= 0)
        return _frame(before[both], after[both], "event")

    def consumers(self) -> tuple[Ints, Ints]:
        """The latest collective that had ended when the op after a wait of its thread began."""
        recorded = self.ops["waits_for_stream"].is_not_null().to_numpy()
        inside = self.ops["in_collective"].fill_null(value=False).to_numpy()
        waits = np.flatnonzero(self.role["stream-wait"] & ~recorded & ~inside)
        launched = self._by_thread(self.gpu[~self.aside[self.gpu]])
        following = launched.first(self.rank[waits], self.stream[waits], self.end[waits])
        following = np.unique(following[following >= 0])
        collective = self._latest_ended(self.gpu[self.aside[self.gpu]], following)
        return collective[collective >= 0], following[collective >= 0]

    def late_starts(self, edges: pl.DataFrame) -> tuple[Ints, Ints]:
        """For GPU ops that start later than `edges` explain, the op whose end they waited for."""
        ready = np.full(len(self.start), -np.inf)
        np.maximum.at(ready, edges["after"].to_numpy(), self.end[edges["before"].to_numpy()])
        gap = self.start - ready
        least = np.where(self._follows_in_graph(), _LATE_IN_GRAPH_S, _LATE_S)
        late = self.gpu[np.isfinite(gap[self.gpu]) & (gap >= least)[self.gpu]]
        ended = self._latest_ended(self.gpu, late, slack=0.0)
        earlier = (ended >= 0) & (self.start[ended] < self.start[late])
        late, ended = late[earlier], ended[earlier]
        waits = waits_beyond_chance(
            gap[late],
            self.start[late] - self.end[ended],
            self._ended_between(ready[late], self.start[late], self.rank[late]),
            self.peer[late],
        )
        return ended[waits], late[waits]

    def _follows_in_graph(self) -> Bools:
        """Mask of ops that come after another op of the same launch, [ops]."""
        launched = self.gpu[self.launcher[self.gpu] >= 0]
        order = launched[np.lexsort((self.start[launched], self.launcher[launched]))]
        follows = np.zeros(len(self.start), np.bool_)
        follows[order[1:]] = self.launcher[order[1:]] == self.launcher[order[:-1]]
        return follows

    def _ended_between(self, begin: Floats, end: Floats, rank: Ints) -> Ints:
        """The number of GPU ops of the rank that ended between two times."""
        counts = np.zeros(len(rank), np.int64)
        for number in np.unique(rank):
            of_rank, ends = rank == number, np.sort(self.end[self.gpu[self.rank[self.gpu] == number]])
            until = np.searchsorted(ends, end[of_rank], side="right")
            counts[of_rank] = until - np.searchsorted(ends, begin[of_rank], side="right")
        return counts

    def _latest_ended(self, among: Ints, rows: Ints, slack: float = SLACK_S) -> Ints:
        """The op among `among` that ended last on the same rank before each of `rows` began; -1 for none."""
        ended = _Ordered(among, self.rank[among], np.zeros(len(among), np.int64), self.end[among], _scale(self.end))
        return ended.last(self.rank[rows], np.zeros(len(rows), np.int64), self.start[rows] + slack, side="right")

    def synchronised(self) -> tuple[Ints, Ints]:
        """The ops that synchronising calls wait for: their own copy, or the last op of their thread or of all
        streams.
        """
        calls = np.flatnonzero(self.role["synchronise"])
        copied = self.ops["copied"].fill_null(-1).to_numpy().astype(np.int64)
        copies = calls[copied[calls] >= 0]
        before, after = [copied[copies]], [copies]
        rest = calls[copied[calls] < 0]
        device = (self.ops["scope"] == "device").fill_null(value=False).to_numpy()
        of_thread = rest[~device[rest]]
        last = self._by_thread(self.gpu).last(self.rank[of_thread], self.stream[of_thread], self.end[of_thread])
        # It did not wait for an op that had not ended yet, so the event is another one, of an earlier op.
        waited = (last >= 0) & (self.end[last] <= self.start[of_thread] + SLACK_S)
        before.append(last[waited])
        after.append(of_thread[waited])
        # Synchronising a device ends with the latest of all streams; an unknown event ends with some earlier op.
        rest = np.concatenate([rest[device[rest]], of_thread[~waited]])
        latest = self._latest_ended(self.gpu, rest)
        before.append(latest[latest >= 0])
        after.append(rest[latest >= 0])
        return np.concatenate(before), np.concatenate(after)

    def beginnings(self, edges: pl.DataFrame) -> pl.DataFrame:
        """An op that waits for nothing else begins with the window of its rank."""
        windows = np.flatnonzero(self.role["window"])
        of_rank = dict(zip(self.rank[windows].tolist(), windows.tolist(), strict=True))
        waits = np.zeros(len(self.rank), np.bool_)
        waits[edges["after"].to_numpy()] = True
        waits[windows] = True
        first = np.flatnonzero(~waits)
        first = first[np.isin(self.rank[first], self.rank[windows])]
        before = np.array([of_rank[rank] for rank in self.rank[first].tolist()], np.int64)
        return _frame(before, first, "rule")


class _Ordered:
    """Rows by rank, thread and time. `scale`: see `_scale`."""

    def __init__(self, rows: Ints, rank: Ints, thread: Ints, time: Floats, scale: float) -> None:
        keys, self.scale = _keys(rank, thread, time, scale), scale
        order = np.argsort(keys, kind="stable")
        self.rows, self.rank, self.thread, self.keys = rows[order], rank[order], thread[order], keys[order]

    def last(self, rank: Ints, thread: Ints, time: Floats, *, side: Literal["left", "right"] = "left") -> Ints:
        """The last row of each rank and thread before a time (at it, too, with `side` right); -1 for none."""
        return self._row_at(np.searchsorted(self.keys, _keys(rank, thread, time, self.scale), side) - 1, rank, thread)

    def first(self, rank: Ints, thread: Ints, time: Floats) -> Ints:
        """The first row of each rank and thread from a time on; -1 for none."""
        return self._row_at(np.searchsorted(self.keys, _keys(rank, thread, time, self.scale)), rank, thread)

    def _row_at(self, place: Ints, rank: Ints, thread: Ints) -> Ints:
        inside = np.clip(place, 0, max(len(self.rows) - 1, 0))
        if not len(self.rows):
            return np.full(len(place), -1)
        same = (inside == place) & (self.rank[inside] == rank) & (self.thread[inside] == thread)
        return np.where(same, self.rows[inside], -1)


def _scale(times: Floats) -> float:
    """Greater than any time, so that rank and thread take precedence over time in a key."""
    return float(np.ptp(times)) + 1.0 if len(times) else 1.0


def _keys(rank: Ints, thread: Ints, time: Floats, scale: float) -> Floats:
    """Numbers that sort by rank, thread and time."""
    threads = 4096
    return np.asarray((rank.astype(np.float64) * threads + thread) * scale + np.nan_to_num(time))


def _frame(before: Ints, after: Ints, why: str) -> pl.DataFrame:
    if not len(before):
        return NO_EDGES
    return pl.DataFrame({"before": before.astype(np.int64), "after": after.astype(np.int64)}).with_columns(
        why=pl.lit(why, pl.Categorical)
    )


#: Maps the ops of a trace, in row order, to edges: `before` and `after` (row numbers, Int64) and `why`.
DependencyRule = Callable[[pl.DataFrame], pl.DataFrame]
RULES: dict[str, DependencyRule] = {"explicit": explicit_edges, "streams": stream_edges, "kineto": kineto_edges}
#: Columns without which a rule cannot run.
NEEDED = {"streams": ("rank", "start"), "kineto": ("rank", "start", "duration", "name")}
