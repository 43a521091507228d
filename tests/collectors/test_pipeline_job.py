"""The DP 2 x PP 2 job, from an unmodified script to the verdict."""

import polars as pl
import pytest

from tests.collectors.conftest import contradictions
from tracekit.trace.model import OpKind, Worker

KINDS = {
    OpKind.DATA_LOAD,
    OpKind.FORWARD_COMPUTE,
    OpKind.BACKWARD_COMPUTE,
    OpKind.FORWARD_SEND,
    OpKind.FORWARD_RECV,
    OpKind.BACKWARD_SEND,
    OpKind.BACKWARD_RECV,
    OpKind.ALL_REDUCE,
    OpKind.OPTIMIZER,
    OpKind.GC,
    OpKind.HOST_DELAY,  # the loop between two steps
}


@pytest.fixture
def pipeline(runs):
    """Rank 3 is slowed by 6 ms in each forward."""
    return runs["pipeline"]


def test_layout_is_found_without_options(pipeline):
    """The device mesh says who stands where."""
    layout = pipeline.trace.layout
    assert (layout.dp, layout.pp, layout.tp, layout.vpp, layout.world_size) == (2, 2, 1, 1, 4)
    assert pipeline.trace.worker_ranks() == {Worker(0, 0): 0, Worker(0, 1): 1, Worker(1, 0): 2, Worker(1, 1): 3}
    assert pipeline.attempt["layout_source"] == "device mesh (dp, pp)"


def test_every_kind_of_op_is_there(pipeline):
    """All a step does has its kind, for every worker and step."""
    trace = pipeline.trace
    assert set(trace.ops["kind"].cast(str).unique()) == set(KINDS)
    assert trace.coverage().complete
    assert list(trace.steps) == list(range(1, 6))


def test_microbatches_are_told_apart(pipeline):
    """Four forwards and four backwards per worker and step, one per microbatch."""
    computes = pipeline.trace.ops.filter(pl.col("kind").cast(pl.String).str.ends_with("compute"))
    per_worker = computes.group_by("step", "rank", "kind").agg(pl.col("microbatch").sort())
    assert per_worker["microbatch"].to_list() == [[0, 1, 2, 3]] * (5 * 4 * 2)


def test_nothing_is_lost(pipeline):
    """No record dropped, no transfer without its peer, no hook failed, no effect before its cause."""
    assert pipeline.trace.metadata["dropped_records"] == 0
    assert pipeline.trace.metadata["collect"]["unmatched_p2p"] == 0
    assert pipeline.trace.metadata["collect"]["causality_violations"] == 0
    assert all(not rank["failures"] and not rank["unfinished"] for rank in pipeline.attempt["ranks"])


def test_the_graph_orders_nothing_that_ran_the_other_way(pipeline):
    assert contradictions(pipeline.trace) == []


def test_what_makes_a_rank_slow_is_in_its_forwards_and_nobody_elses(pipeline):
    """Every forward sleeps 1 ms, those of rank 3 7 ms, every backward 2 ms: on no machine do they last less."""
    shortest = pipeline.trace.ops.group_by("rank", "kind").agg(pl.col("duration").min())
    found = {(rank, kind): duration for rank, kind, duration in shortest.iter_rows()}
    assert found[3, "forward-compute"] >= 0.007
    for rank in range(4):
        assert found[rank, "forward-compute"] >= 0.001
        assert found[rank, "backward-compute"] >= 0.002
