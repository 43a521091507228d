"""The critical path takes exactly the step's time and is the longest one there is."""

from __future__ import annotations

import networkx
import numpy as np
import polars as pl
import pytest
from hypothesis import given

from tests.analysis.op_graphs import frames
from tests.handmade import slow_trace
from tests.properties import examples
from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.graph.op_graph import FoldedGraph, OpGraph, fold
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.graph_replay import GraphReplay, measure_op_durations
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, RECORDED, step_times
from tracekit.trace.model import OpKind

Frames = tuple[pl.DataFrame, pl.DataFrame]
PATIENT = examples(20)


def replay_of(ops: pl.DataFrame, edges: pl.DataFrame) -> GraphReplay:
    graph = fold(OpGraph.from_frames(ops, edges))
    return GraphReplay(graph, measure_op_durations(graph))


def longest_path(graph: OpGraph, cost: np.ndarray) -> float:
    """With networkx: each op as an edge as long as its cost, from its start or its rendezvous' to its end."""
    drawn = networkx.DiGraph()
    for op, number in enumerate(graph.rendezvous.tolist()):
        begin = ("op", op) if number < 0 else ("rendezvous", number)
        if number >= 0:
            drawn.add_edge(("op", op), begin, weight=0.0)
        drawn.add_edge(begin, ("end", op), weight=cost[op])
    for before, after in zip(graph.before.tolist(), graph.after.tolist(), strict=True):
        drawn.add_edge(("end", before), ("op", after), weight=0.0)
    return float(networkx.dag_longest_path_length(drawn))


@PATIENT
@given(frames())
def test_it_is_the_longest_path(drawn: Frames) -> None:
    replay = replay_of(*drawn)
    graph = replay.graph
    assert isinstance(graph, FoldedGraph)
    cost = np.abs(replay.durations.cost[0])  # clocks may make a transfer take less than nothing
    replay = GraphReplay(graph, replay.durations.__class__((cost,), (np.zeros_like(cost),), (cost[:, 0],), 0, 0))
    path = critical_path(replay, ORIGINAL)
    of_ops = np.empty(len(graph.ops.start))
    of_ops[graph.blocks[0].op] = cost
    assert path.cost_s.sum() == pytest.approx(longest_path(graph.ops, of_ops))
    assert path.delay_s.sum() == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(path.cost_s, cost[path.row, path.lane])


@pytest.mark.parametrize("changes", [ORIGINAL, RECORDED, IDEAL])
def test_cost_and_delays_on_it_add_up_to_each_step(changes) -> None:
    replay = JobReplay.from_trace(slow_trace((4, 5, 9)))
    path = critical_path(replay, changes)
    of_steps = np.bincount(path.step, weights=path.cost_s + path.delay_s)
    np.testing.assert_allclose(of_steps, step_times(replay, changes), rtol=1e-12)


def test_steps_whose_lanes_differ_in_structure_have_one_too() -> None:
    """A second reduction on one DP rank alone makes it a template of its own; the path crosses between the two."""
    trace = slow_trace((4, 5))
    worker = trace.ops.filter(step=4, dp_rank=0, pp_rank=1)
    reduction = worker.head(1).with_columns(
        kind=pl.lit(str(OpKind.LAYERNORM_GRADS_ALL_REDUCE)).cast(worker["kind"].dtype),
        seq=pl.lit(0, pl.Int32),
        microbatch=pl.lit(None, pl.Int32),
        chunk=pl.lit(None, pl.Int16),
        start=worker["start"].max(),
        duration=pl.lit(0.001),
    )
    from tracekit.trace.canonical import Trace

    irregular = Trace.from_frame(pl.concat([trace.ops, reduction]), trace.layout, name="irregular")
    replay = JobReplay.from_trace(irregular)
    assert replay.graph.blocks_meet
    for changes in (ORIGINAL, RECORDED, IDEAL):
        path = critical_path(replay, changes)
        of_steps = np.bincount(path.step, weights=path.cost_s + path.delay_s)
        np.testing.assert_allclose(of_steps, step_times(replay, changes), rtol=1e-12)


def test_the_slow_worker_is_on_it() -> None:
    """Backwards of worker (1,0) take twice as long, so that the path leads through it and its label says so."""
    path = critical_path(JobReplay.from_trace(slow_trace((4, 5, 9))), ORIGINAL)
    (worst, seconds), *_ = path.seconds_by(["dp_rank", "stage"]).items()
    assert worst == (1, 0)
    assert seconds > sum(path.seconds_by(["kind"]).values()) / 2
    assert sum(path.seconds_by(["kind"]).values()) == pytest.approx(path.cost_s.sum() / 3)
