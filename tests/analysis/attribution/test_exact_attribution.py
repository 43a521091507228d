"""Exact attribution to DP ranks and workers: the cheap way equals a replay per rank and per worker."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.analysis.attribution.attribute import attribute, step_times_by_paths, step_times_each_changed
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import (
    IDEAL,
    ORIGINAL,
    addition,
    delayed,
    mean_step_time,
    removal,
    step_times,
)
from tracekit.analysis.whatif.selection import Everything, dp_rank, stage, worker
from tracekit.synth import Schedule, SynthSpec, parse_cause, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker

CAUSES = ("slow-worker", "slow-nic", "slow-p2p-link", "python-gc", "sequence-length-imbalance", "slow-last-stage")

#: What can be done to a DP rank: idealise its ops, or let them keep their launch delays.
CHANGES = (removal, delayed)


@st.composite
def specs(draw):
    """Small jobs of every schedule with a random cause."""
    schedule = draw(st.sampled_from(list(Schedule)))
    pp = draw(st.integers(2 if schedule is Schedule.INTERLEAVED else 1, 3))
    vpp = 2 if schedule is Schedule.INTERLEAVED else 1
    dp = draw(st.integers(1, 4))
    possible = [cause for cause in CAUSES if (pp > 1 or cause != "slow-p2p-link") and (dp > 1 or cause != "slow-nic")]
    return SynthSpec(
        layout=Layout(dp=dp, pp=pp, vpp=vpp),
        schedule=schedule,
        microbatches=pp * draw(st.integers(1, 2)),
        steps=draw(st.integers(1, 3)),
        overlap_dp=draw(st.booleans()),
        record_no_ops=schedule is Schedule.INTERLEAVED and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        causes=(parse_cause(draw(st.sampled_from(possible))),),
    )


def assert_cheap_equals_plain(replay):
    found = attribute(replay)
    for index, rank in enumerate(found.dp_ranks):
        plain = step_times(replay, addition(dp_rank(rank)))
        np.testing.assert_allclose(found.by_dp_rank[:, index], plain, rtol=1e-12)
        for at in range(found.stages):
            plain = step_times(replay, addition(worker(Worker(rank, at))))
            np.testing.assert_allclose(found.by_worker[:, index, at], plain, rtol=1e-12)
    for at in range(found.stages):
        plain = step_times(replay, addition(stage(at)))
        np.testing.assert_allclose(found.by_stage[:, at], plain, rtol=1e-12)

    for change in CHANGES:
        cheap = step_times_by_paths(replay, change(Everything()))
        plain = np.stack([step_times(replay, change(dp_rank(rank))) for rank in found.dp_ranks], axis=1)
        np.testing.assert_allclose(cheap, plain, rtol=1e-12)


@examples(8)
@given(specs())
def test_cheap_way_equals_a_replay_per_worker(spec):
    assert_cheap_equals_plain(JobReplay.from_trace(synthesize(spec)))


def test_one_rank_changed_is_asked_without_a_replay_per_rank(monkeypatch):
    """The one collective takes 2 passes, before and after the change; 64 ranks are far more than these 4."""
    replay = JobReplay.from_trace(synthesize(SynthSpec(layout=Layout(dp=64), steps=2, causes=())))
    plain = np.stack([step_times(replay, removal(dp_rank(rank))) for rank in range(64)], axis=1)
    monkeypatch.setattr(JobReplay, "step_times", None)
    passes = 2 * (replay.graph.rendezvous_count + 1)
    found = step_times_each_changed(replay, removal, passes * replay.graph.ops)
    np.testing.assert_allclose(found, plain, rtol=1e-12)
    assert step_times_each_changed(replay, removal, passes * replay.graph.ops - 1) is None


def odd_lane(trace, *, step, rank, kind="checkpoint"):
    """The same trace, but one DP rank records one more op in one step: its lane has another structure."""
    extra = trace.ops.filter((pl.col("step") == step) & (pl.col("dp_rank") == rank) & (pl.col("pp_rank") == 0))
    row = extra.filter(pl.col("kind") == "optimizer").with_columns(
        kind=pl.lit(kind).cast(trace.ops.schema["kind"]),
        seq=pl.lit(len(extra.filter(pl.col("kind") == kind)), pl.Int32),
        duration=pl.lit(0.004),
    )
    ops = pl.concat([trace.ops, row])
    return Trace.from_frame(ops, trace.layout, name="odd", metadata=dict(trace.metadata))


@pytest.mark.parametrize("dp", [2, 4])
def test_cheap_way_holds_where_lanes_of_a_step_differ(dp):
    trace = synthesize(
        SynthSpec(layout=Layout(dp=dp, pp=2), microbatches=4, steps=3, causes=(parse_cause("slow-worker"),))
    )
    steps = trace.steps
    replay = JobReplay.from_trace(odd_lane(trace, step=int(steps[1]), rank=1, kind="layernorm-grads-all-reduce"))
    assert len(replay.graph.blocks) == 2
    assert replay.graph.blocks_meet
    assert_cheap_equals_plain(replay)


def test_mixed_steps_replay_like_uniform_ones():
    """An extra op of no consequence (a checkpoint of 0 s) changes the form of the graph, not the times."""
    trace = synthesize(SynthSpec(layout=Layout(dp=3, pp=2), microbatches=4, steps=3, seed=5))
    odd = odd_lane(trace, step=int(trace.steps[2]), rank=2)
    odd = Trace.from_frame(
        odd.ops.with_columns(duration=pl.when(pl.col("kind") == "checkpoint").then(0.0).otherwise(pl.col("duration"))),
        odd.layout,
        name="odd",
    )
    before, after = attribute(JobReplay.from_trace(trace)), attribute(JobReplay.from_trace(odd))
    np.testing.assert_allclose(after.original, before.original, rtol=1e-12)
    np.testing.assert_allclose(after.by_worker, before.by_worker, rtol=1e-12)


@examples(4)
@given(specs(), st.integers(0, 1000))
def test_row_order_does_not_matter(spec, seed):
    trace = synthesize(spec)
    shuffled = Trace.from_frame(trace.ops.sample(fraction=1.0, shuffle=True, seed=seed), trace.layout, name=trace.name)
    one, other = attribute(JobReplay.from_trace(trace)), attribute(JobReplay.from_trace(shuffled))
    assert np.array_equal(one.original, other.original)
    assert np.array_equal(one.by_worker, other.by_worker)
    assert np.array_equal(one.ideal, other.ideal)


def test_the_figures_of_workers_and_last_stage_are_contributions_like_any_other():
    spec = SynthSpec(layout=Layout(dp=2, pp=3), microbatches=4, steps=3, causes=(parse_cause("slow-last-stage"),))
    replay = JobReplay.from_trace(synthesize(spec))
    found = attribute(replay)
    for figure, selection in ((found.m_s, stage(2)), (found.m_w, worker(*found.slowest_workers))):
        original_s, ideal_s = mean_step_time(replay, ORIGINAL), mean_step_time(replay, IDEAL)
        assert figure == (original_s - mean_step_time(replay, removal(selection))) / (original_s - ideal_s)
