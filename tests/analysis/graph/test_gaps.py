"""Members of collectives that were not recorded are put in and stated; a verdict that hangs on them is not trusted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.replay import Method
from tracekit.analysis.replay.engine import JobReplay
from tracekit.synth import SynthSpec, synthesize
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.model import Layout, OpKind, Worker

SAMPLES = Path(__file__).resolve().parents[3] / "sample_traces"
SLOW, USUAL = [("forward-compute", 0.4), BACKWARD], [FORWARD, BACKWARD]


def dropped(trace: Trace, which: pl.Expr) -> Trace:
    return replace(trace, ops=trace.ops.filter(~which))


def attributed(trace: Trace, method: Method = Method.TRACEKIT) -> Attribution:
    return attribute(JobReplay.from_trace(trace, method))


def reduction_of(dp_rank: int) -> pl.Expr:
    return (pl.col("kind") == "all-reduce") & (pl.col("dp_rank") == dp_rank)


def test_a_missing_member_begins_when_it_was_ready_and_ends_with_its_peers():
    """The slow rank computes for 0.6 s; its peers leave the reduction at 0.61 s."""
    trace = dropped(data_parallel_job([USUAL, USUAL, SLOW]), reduction_of(2))
    graph = DependencyGraph.from_trace(trace, reconstruct=True)
    (block,) = graph.blocks
    row = int(np.flatnonzero(block.template.kind == OpKind.ALL_REDUCE.code)[0])
    assert block.start[row, block.dp_rank == 2] == pytest.approx(0.6)
    assert block.duration[row, block.dp_rank == 2] == pytest.approx(0.01)
    assert [(gap.kind, gap.worker, gap.ops) for gap in graph.gaps] == [(OpKind.ALL_REDUCE, Worker(2, 0), 4)]


def test_a_verdict_that_hangs_on_a_missing_member_is_not_trusted():
    """As recorded nobody waits for the slow rank; with its member put in, S is 0.61 / 0.41 (mean forward 0.2 s)."""
    found = attributed(dropped(data_parallel_job([USUAL, USUAL, SLOW]), reduction_of(2)))
    assert found.slowdown == pytest.approx(0.61 / 0.41)
    assert found.straggling
    assert not found.trust.trustworthy
    (reason,) = found.trust.reasons
    assert reason.startswith("4 all-reduce of worker (2,0) in 4 steps were not recorded: the slowdown is 1.49")


@pytest.mark.parametrize(
    "kinds", [["grads-reduce-scatter"], ["grads-reduce-scatter", "optimizer-clip-main-grad", "params-all-gather"]]
)
def test_the_slow_worker_is_found_without_its_collectives(kinds):
    trace = read_parquet(SAMPLES / "slow_worker.parquet")
    found = attributed(dropped(trace, pl.col("kind").is_in(kinds) & (pl.col("dp_rank") == 1)))
    assert found.slowdown == pytest.approx(attributed(trace).slowdown, rel=0.002)
    assert not found.trust.trustworthy


def test_a_gap_that_turns_nothing_is_stated_and_trusted():
    trace = read_parquet(SAMPLES / "healthy.parquet")
    found = attributed(dropped(trace, (pl.col("kind") == "grads-reduce-scatter") & (pl.col("dp_rank") == 1)))
    assert sum(gap.ops for gap in found.gaps) == 4 * 12
    assert found.trust.trustworthy
    assert found.slowdown == pytest.approx(attributed(trace).slowdown, rel=0.005)


def test_the_published_method_reconstructs_nothing_and_says_so():
    trace = dropped(data_parallel_job([USUAL, USUAL, SLOW]), reduction_of(2))
    found = attributed(trace, Method.PUBLISHED)
    assert not found.trust.trustworthy
    assert any("were not recorded" in reason for reason in found.trust.reasons)


def test_a_rank_that_is_not_in_the_trace_may_be_the_straggler():
    """Without the slow rank its peers' reductions take 0.31 s; if all of that is waiting, S is 0.61 / 0.3."""
    found = attributed(dropped(data_parallel_job([USUAL, USUAL, SLOW]), pl.col("dp_rank") == 2))
    assert found.slowdown == pytest.approx(1.0)
    assert found.hidden_slowdown == pytest.approx(0.61 / 0.3)
    assert not found.trust.trustworthy
    assert "the slowdown could be up to 2.03" in found.trust.reasons[0]


def test_steps_that_a_rank_is_missing_from_are_left_out():
    """With both ranks a step takes 0.61 s, ideally 0.25 + 0.2 + 0.01 s; alone the usual rank would take 0.61 s, too."""
    trace = data_parallel_job([USUAL, SLOW], steps=4)
    replay = JobReplay.from_trace(dropped(trace, (pl.col("dp_rank") == 1) & (pl.col("step") >= 2)))
    assert replay.left_out_steps == (2, 3)
    found = attribute(replay)
    assert found.steps.tolist() == [0, 1]
    assert found.slowdown == pytest.approx(0.61 / 0.46)
    assert found.hidden_slowdown is None


def test_a_rank_that_is_missing_from_most_steps_leaves_them_in():
    """One complete step of five is too little to price a job on."""
    trace = data_parallel_job([USUAL, SLOW], steps=5)
    found = attributed(dropped(trace, (pl.col("dp_rank") == 1) & (pl.col("step") >= 1)))
    assert found.steps.tolist() == [0, 1, 2, 3, 4]
    assert not found.trust.trustworthy


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("optimizer-clip-main-grad", 2), ("optimizer-clip-main-grad", 3), ("embedding-grads-all-reduce", 3)],
)
def test_a_collective_that_nobody_of_a_stage_recorded_is_a_gap(kind, stage):
    """Gradient clipping joins all stages, embedding gradients the first and the last."""
    trace = read_parquet(SAMPLES / "slow_worker.parquet")
    found = attributed(dropped(trace, (pl.col("kind") == kind) & (pl.col("pp_rank") == stage)))
    assert {(gap.kind, gap.worker, gap.ops) for gap in found.gaps} == {
        (OpKind(kind), Worker(dp_rank, stage), 12) for dp_rank in range(4)
    }
    assert found.slowdown == pytest.approx(attributed(trace).slowdown, rel=0.005)


def test_a_gap_of_a_single_pipeline():
    trace = synthesize(SynthSpec(Layout(pp=4), steps=4, seed=3))
    found = attributed(dropped(trace, (pl.col("kind") == "optimizer-clip-main-grad") & (pl.col("pp_rank") == 1)))
    assert [(gap.kind, gap.worker, gap.ops) for gap in found.gaps] == [
        (OpKind.OPTIMIZER_CLIP_MAIN_GRAD, Worker(0, 1), 4)
    ]
    assert found.slowdown == pytest.approx(attributed(trace).slowdown, rel=0.005)


def test_a_stage_without_embeddings_has_no_gap():
    """The stages between the first and the last take no part."""
    assert not attributed(read_parquet(SAMPLES / "healthy.parquet")).gaps
