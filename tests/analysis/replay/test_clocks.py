"""Clock offsets are measured from ops that end together, and gone before anything is attributed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.analysis.causes.corpus import found_in
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.graph.unrecorded import SHARED
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.replay import Method, clock_offsets
from tracekit.analysis.replay.engine import JobReplay
from tracekit.synth import Schedule, SlowNic, SlowP2pLink, SlowWorker, SynthSpec, synthesize
from tracekit.trace.canonical import Trace, read_parquet
from tracekit.trace.model import Layout, OpKind

SAMPLES = Path(__file__).resolve().parents[3] / "sample_traces"
SPEC = SynthSpec(Layout(dp=4, pp=4, tp=4), steps=12, seed=31)


def trace_of(*causes, layout: Layout = SPEC.layout, **changes) -> Trace:
    return synthesize(replace(SPEC, causes=causes, layout=layout, **changes))


def shifted(
    trace: Trace, worker: tuple[int, int], offset_s: float = 0.0, drift: float = 0.0, jump: tuple[int, float] = (0, 0.0)
) -> Trace:
    """The trace as a worker (dp_rank, pp_rank) records it whose clock is ahead, by `drift` more each second.

    `jump`: a step number, and by how much more the clock is ahead from that step on.
    """
    mine = (pl.col("dp_rank") == worker[0]) & (pl.col("pp_rank") == worker[1])
    first = min(trace.step_starts.values())
    since = {step: start - first for step, start in trace.step_starts.items()}
    ahead = offset_s + drift * pl.col("step").replace_strict(since, return_dtype=pl.Float64)
    ahead += pl.when(pl.col("step") >= jump[0]).then(jump[1]).otherwise(0.0)
    return replace(trace, ops=trace.ops.with_columns(pl.when(mine).then(pl.col("start") + ahead).otherwise("start")))


def without(trace: Trace, *kinds: OpKind) -> Trace:
    return replace(trace, ops=trace.ops.filter(~pl.col("kind").is_in(list(kinds))))


def slowdown_of(trace: Trace) -> float:
    return attribute(JobReplay.from_trace(trace)).slowdown


LAYOUTS = {
    "dp 4 x pp 4": Layout(dp=4, pp=4),
    "dp 2": Layout(dp=2),
    "dp 2 x pp 2": Layout(dp=2, pp=2),
    "pp 4": Layout(pp=4),
    "dp 6": Layout(dp=6),
}


@pytest.mark.parametrize(
    ("name", "offset_s"), [*((name, 0.012) for name in LAYOUTS), ("dp 2 x pp 2", -0.012), ("dp 4 x pp 4", 0.4)]
)
def test_a_wrong_clock_changes_no_verdict(name, offset_s):
    layout = LAYOUTS[name]
    right = trace_of(layout=layout)
    wrong = shifted(right, (layout.dp - 1, layout.pp - 1), offset_s)
    assert slowdown_of(wrong) == pytest.approx(slowdown_of(right), rel=0.005)
    replay = JobReplay.from_trace(wrong)
    assert replay.recorded_step_times().mean() == pytest.approx(
        JobReplay.from_trace(right).recorded_step_times().mean(), rel=0.005
    )


@pytest.mark.parametrize("gaps", [False, True])
def test_few_workers_are_fitted_as_many_are(gaps, monkeypatch):
    """By one matrix, or by a solver without one: with a clock ahead, and where collectives lack members, too."""
    wrong = shifted(trace_of(steps=6), (1, 3), 0.02)
    lacking = (pl.col("kind") == str(OpKind.GRADS_REDUCE_SCATTER)) & (pl.col("dp_rank") == 2) & (pl.col("pp_rank") == 1)
    trace = replace(wrong, ops=wrong.ops.filter(~lacking)) if gaps else wrong
    by_matrix = JobReplay.from_trace(trace).clocks.offset_s
    monkeypatch.setattr(clock_offsets, "MOST_IN_MATRIX", 0)
    assert by_matrix == pytest.approx(JobReplay.from_trace(trace).clocks.offset_s, abs=1e-7)
    assert np.argwhere(by_matrix).tolist() == [[3, 1]]


def test_the_offset_and_its_error_are_stated():
    clocks = JobReplay.from_trace(shifted(trace_of(), (1, 3), 0.02)).clocks
    assert np.argwhere(clocks.offset_s).tolist() == [[3, 1]]
    assert clocks.offset_s[3, 1] == pytest.approx(0.02, abs=5 * clocks.error_s[3, 1])
    assert 0 < clocks.error_s[3, 1] < 0.001


def test_a_drift_is_taken_out_of_a_long_trace():
    right = trace_of(steps=32)
    wrong = shifted(right, (2, 1), 0.0, drift=0.001)
    clocks = JobReplay.from_trace(wrong).clocks
    assert np.argwhere(clocks.drift).tolist() == [[1, 2]]
    assert clocks.drift[1, 2] == pytest.approx(0.001, rel=0.02)
    assert slowdown_of(wrong) == pytest.approx(slowdown_of(right), rel=0.005)


def test_without_gradient_clipping_pipeline_and_collectives_tie_the_clocks():
    right = without(trace_of(), OpKind.OPTIMIZER_CLIP_MAIN_GRAD)
    for worker in ((0, 0), (3, 2)):
        assert slowdown_of(shifted(right, worker, 0.012)) == pytest.approx(slowdown_of(right), rel=0.005)


def test_a_whole_stage_on_another_clock():
    right = trace_of()
    ops = right.ops.with_columns(pl.when(pl.col("pp_rank") == 2).then(pl.col("start") + 0.03).otherwise("start"))
    wrong = replace(right, ops=ops)
    assert np.unique(np.argwhere(JobReplay.from_trace(wrong).clocks.offset_s)[:, 0]).tolist() == [2]
    assert slowdown_of(wrong) == pytest.approx(slowdown_of(right), rel=0.005)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_clocks_in_step_are_left_alone(noise):
    assert not JobReplay.from_trace(trace_of(noise=noise)).clocks.any_off


@pytest.mark.parametrize(
    "cause",
    [
        SlowWorker(factor=3),
        SlowNic(dp_rank=2, pp_rank=3, factor=5),
        SlowP2pLink(dp_rank=3, pp_rank=1, factor=50),
    ],
    ids=["slow worker", "slow network card", "slow link"],
)
@pytest.mark.parametrize("clip", [True, False], ids=["with clip", "without clip"])
def test_what_is_slow_is_no_wrong_clock(cause, clip):
    trace = trace_of(cause)
    assert not JobReplay.from_trace(trace if clip else without(trace, OpKind.OPTIMIZER_CLIP_MAIN_GRAD)).clocks.any_off


def test_where_nothing_ties_the_ranks_it_says_so():
    alone = without(
        trace_of(layout=Layout(dp=2)),
        OpKind.OPTIMIZER_CLIP_MAIN_GRAD,
        OpKind.PARAMS_ALL_GATHER,
        OpKind.GRADS_REDUCE_SCATTER,
    )
    clocks = JobReplay.from_trace(alone).clocks
    assert clocks.untied((0, 1)) == "the clocks of DP ranks"
    assert np.isnan(clocks.error_s).all()


def test_a_rank_that_nothing_ties_to_the_others_is_named():
    """Worker (1, 0) has no op that ends with those of another."""
    mine = (pl.col("dp_rank") == 1) & pl.col("kind").is_in([str(kind) for kind in SHARED])
    trace = trace_of(layout=Layout(dp=3))
    replay = JobReplay.from_trace(replace(trace, ops=trace.ops.filter(~mine)))
    assert replay.clocks.untied(replay.graph.dp_ranks) == "the clocks of worker (1,0)"
    assert not replay.clocks.any_off


# ---- several clocks at once


@pytest.fixture(scope="module")
def slow_worker() -> Trace:
    return read_parquet(SAMPLES / "slow_worker.parquet")


@pytest.mark.parametrize(
    "offsets",
    [
        {(1, 3): -0.131, (0, 0): 0.1},
        {(0, 0): 0.08, (1, 0): 0.081, (0, 1): -0.02},
        {(0, 2): 0.15, (1, 2): -0.15, (2, 3): 0.07, (3, 0): -0.02},
        {(0, 1): 0.05, (1, 1): 0.05, (2, 1): 0.05, (3, 1): 0.05},
    ],
    ids=["two", "neighbours alike", "four", "a whole stage"],
)
def test_several_wrong_clocks_are_told_apart(slow_worker, offsets):
    wrong = slow_worker
    for worker, offset_s in offsets.items():
        wrong = shifted(wrong, worker, offset_s)
    clocks = JobReplay.from_trace(wrong).clocks
    expected = np.zeros((4, 4))
    for (dp_rank, stage), offset_s in offsets.items():
        expected[stage, dp_rank] = offset_s
    assert clocks.offset_s == pytest.approx(expected, abs=0.0005)
    assert clocks.doubts == ()
    assert slowdown_of(wrong) == pytest.approx(slowdown_of(slow_worker), rel=0.005)


def test_wrong_clocks_invent_no_cause(slow_worker):
    """Rank 7 is 131 ms behind, rank 0 100 ms ahead: the slow worker is the only cause beside the clocks."""
    wrong = shifted(shifted(slow_worker, (3, 1), -0.131), (0, 0), 0.1)
    report = PipelineJob(wrong).whatif()
    assert {cause.kind for cause in report.findings} == {"bad-worker", "clock-error"}
    assert clocks_in(report) == ["rank 0 ahead by 100.0 ms", "rank 7 behind by 131.0 ms"]


@pytest.mark.parametrize(("jump_s", "way"), [(0.2, "forward"), (-0.2, "back")])
def test_the_remark_says_when_a_clock_was_set_and_which_way(jump_s, way):
    right = trace_of()
    at = int(right.steps[7])
    report = PipelineJob(shifted(right, (2, 1), jump=(at, jump_s))).whatif()
    assert clocks_in(report) == [f"rank 24 set {way} by 200.0 ms at step {at}"]
    assert clocks_in(PipelineJob(right).whatif()) == [""]


def clocks_in(report) -> list[str]:
    """The clocks of the remark, without the errors of their offsets, which are below 0.1 ms."""
    end = ": corrected in all figures"
    remarks = [remark.words.removesuffix(end) for remark in report.remarks if remark.words.endswith(end)]
    return re.sub(r" ± \d+ us", "", ", ".join(remarks)).split(", ")


def test_drifts_of_several_clocks(slow_worker):
    wrong = shifted(shifted(slow_worker, (2, 1), 0.0, drift=0.001), (1, 2), -0.03, drift=-0.0005)
    clocks = JobReplay.from_trace(wrong).clocks
    assert clocks.drift[1, 2] == pytest.approx(0.001, rel=0.05)
    assert clocks.drift[2, 1] == pytest.approx(-0.0005, rel=0.05)
    assert slowdown_of(wrong) == pytest.approx(slowdown_of(slow_worker), rel=0.005)


def test_a_drift_is_no_scatter():
    """Eight steps: the drift moves the clock by as much from each step to the next as it does from any other."""
    right = trace_of(layout=Layout(dp=4), steps=8)
    clocks = JobReplay.from_trace(shifted(right, (1, 0), -0.17, drift=0.004)).clocks
    assert clocks.drift[0, 1] == pytest.approx(0.004, rel=0.02)


@pytest.mark.parametrize("jump_s", [0.003, -0.2])
def test_a_clock_that_is_set_in_mid_trace(slow_worker, jump_s):
    at = int(slow_worker.steps[7])
    clocks = JobReplay.from_trace(shifted(slow_worker, (2, 1), jump=(at, jump_s))).clocks
    assert np.argwhere(clocks.jump_s).tolist() == [[1, 2]]
    assert clocks.jump_s[1, 2] == pytest.approx(jump_s, rel=0.05)
    assert clocks.jump_step[1, 2] == at
    assert slowdown_of(shifted(slow_worker, (2, 1), jump=(at, jump_s))) == pytest.approx(
        slowdown_of(slow_worker), rel=0.005
    )


def test_the_step_of_a_jump_is_found_in_a_long_trace():
    """More steps than are measured by themselves."""
    right = trace_of(layout=Layout(dp=4), steps=120)
    at = int(right.steps[67])
    clocks = JobReplay.from_trace(shifted(right, (3, 0), jump=(at, 0.04))).clocks
    assert clocks.jump_step[0, 3] == at


def test_a_clock_that_moves_irregularly_is_not_trusted(slow_worker):
    wrong = slow_worker
    for at, by_s in ((2, 0.05), (5, -0.09), (8, 0.12)):
        wrong = shifted(wrong, (2, 1), jump=(int(slow_worker.steps[at]), by_s))
    found = attribute(JobReplay.from_trace(wrong))
    assert not found.trust.trustworthy
    assert "the clock of worker (2,1) moved irregularly during the trace" in found.trust.reasons[0]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, pp=2)], ids=["dp 2", "dp 2 x pp 2"])
def test_one_or_two_steps_are_enough(layout, steps):
    right = trace_of(layout=layout, steps=steps)
    assert slowdown_of(shifted(right, (1, 0), 0.03)) == pytest.approx(slowdown_of(right), rel=0.005)


def test_a_wrong_clock_and_a_missing_member_on_one_rank(slow_worker):
    lacks = replace(
        slow_worker,
        ops=slow_worker.ops.filter(
            (pl.col("kind") != "grads-reduce-scatter") | (pl.col("dp_rank") != 1) | (pl.col("pp_rank") != 2)
        ),
    )
    assert slowdown_of(shifted(lacks, (1, 2), -0.08)) == pytest.approx(slowdown_of(lacks), rel=0.005)


def test_half_of_the_evidence_against_the_other_half_is_not_trusted():
    """Two collectives in one step, by which the clock is 30 ms and 60 ms ahead; nothing tells which is a late exit."""
    right = without(trace_of(layout=Layout(dp=4), steps=1, noise=0.0), OpKind.OPTIMIZER_CLIP_MAIN_GRAD)
    mine = pl.col("dp_rank") == 2
    late = pl.when(mine & (pl.col("kind") == "grads-reduce-scatter")).then(0.03).otherwise(0.0)
    wrong = shifted(right, (2, 0), 0.03)
    wrong = replace(wrong, ops=wrong.ops.with_columns(duration=pl.col("duration") + late))
    trust = attribute(JobReplay.from_trace(wrong)).trust
    assert not trust.trustworthy
    assert any("as many of its ops contradict that" in reason for reason in trust.reasons)


def test_interleaved_pipelines_tie_too():
    right = trace_of(layout=Layout(dp=2, pp=2, vpp=2), schedule=Schedule.INTERLEAVED)
    assert slowdown_of(shifted(right, (1, 1), 0.012)) == pytest.approx(slowdown_of(right), rel=0.005)


def test_the_published_method_takes_clocks_as_they_are():
    wrong = shifted(trace_of(), (1, 3), 0.02)
    assert not JobReplay.from_trace(wrong, Method.PUBLISHED).clocks.any_off


def on_one_host(trace: Trace) -> Trace:
    """As `tracekit collect` records it there."""
    hosts = {str(rank): "node-1" for rank in trace.worker_ranks().values()}
    return replace(trace, metadata=trace.metadata | {"format": "collected", "hosts": hosts})


def test_a_clock_that_ranks_share_does_not_move_beside_itself():
    """Rank 1 leaves everything 16 ms later in the last three steps: it was stopped there."""
    wrong = shifted(trace_of(layout=LAYOUTS["dp 2"]), (1, 0), jump=(int(trace_of().steps[-3]), 0.016))
    assert JobReplay.from_trace(wrong).clocks.moves
    assert not JobReplay.from_trace(on_one_host(wrong)).clocks.any_off


def test_a_rank_that_was_shifted_as_a_whole_is_set_right_on_one_host_too():
    wrong = on_one_host(shifted(trace_of(layout=LAYOUTS["dp 2"]), (1, 0), 0.012))
    assert JobReplay.from_trace(wrong).clocks.any_off


@pytest.mark.parametrize("by_gpus", [False, True])
def test_a_clock_that_ranks_share_is_not_named_as_off(by_gpus):
    """A rank that always leaves late is set right; to synchronise clocks is advice for GPUs or hosts that have some."""
    shared = on_one_host(shifted(trace_of(layout=LAYOUTS["dp 2"]), (1, 0), 0.012))
    if by_gpus:
        shared = replace(shared, metadata=shared.metadata | {"device_clock": {}})
    for trace in (shared, shared.redacted()):
        assert JobReplay.from_trace(trace).clocks.any_off
        assert ("clock-error" in {cause.kind for cause in found_in(trace)}) == by_gpus


def test_a_shared_clock_is_not_set_by_what_is_in_doubt():
    """Rank 1 is late in every step, by 4 and 20 ms in turn: a clock that is shared shifts all steps alike."""
    trace = trace_of(layout=LAYOUTS["dp 2"], steps=20)
    late_s = pl.col("step").replace_strict({int(step): 0.012 + 0.008 * (-1) ** step for step in trace.steps})
    start = pl.col("start") + pl.when(pl.col("dp_rank") == 1).then(late_s).otherwise(0.0)
    late = replace(trace, ops=trace.ops.with_columns(start))
    apart = JobReplay.from_trace(late).clocks
    assert apart.any_off
    assert apart.doubts
    shared = JobReplay.from_trace(on_one_host(late)).clocks
    assert not shared.any_off
    assert not shared.doubts


def test_ranks_that_wake_up_unevenly_are_no_doubt_about_a_clock_that_they_share():
    """Rank 1 is up to 30 ms late in each step, as where processors are busy: no single offset explains that."""
    trace = trace_of(layout=LAYOUTS["dp 2"], steps=8)
    drawn = np.random.default_rng(3)
    late_s = pl.col("step").replace_strict({int(step): drawn.uniform(0, 0.03) for step in trace.steps})
    start = pl.col("start") + pl.when(pl.col("dp_rank") == 1).then(late_s).otherwise(0.0)
    hosts = {str(rank): "node-1" for rank in trace.worker_ranks().values()}
    metadata = trace.metadata | {"format": "collected", "hosts": hosts}
    collected = replace(trace, ops=trace.ops.with_columns(start), metadata=metadata)
    apart = replace(collected, metadata=metadata | {"hosts": hosts | {max(hosts): "node-2"}})
    assert JobReplay.from_trace(apart).clocks.doubts
    assert not JobReplay.from_trace(collected).clocks.doubts
