"""Clock offsets are measured from ops that end together, and gone before anything is attributed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tracekit.analysis.attribution.attribution import attribute
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.method import Method
from tracekit.model import Layout, OpKind
from tracekit.synth import Schedule, SlowNic, SlowP2pLink, SlowWorker, SynthSpec, synthesize
from tracekit.trace import Trace

SPEC = SynthSpec(Layout(dp=4, pp=4, tp=4), steps=12, seed=31)


def trace_of(*causes, layout: Layout = SPEC.layout, **changes) -> Trace:
    return synthesize(replace(SPEC, causes=causes, layout=layout, **changes))


def shifted(trace: Trace, worker: tuple[int, int], offset_s: float, drift: float = 0.0) -> Trace:
    """The trace as a worker (dp_rank, pp_rank) records it whose clock is ahead, by `drift` more each second."""
    mine = (pl.col("dp_rank") == worker[0]) & (pl.col("pp_rank") == worker[1])
    first = min(trace.step_starts.values())
    since = {step: start - first for step, start in trace.step_starts.items()}
    ahead = offset_s + drift * pl.col("step").replace_strict(since, return_dtype=pl.Float64)
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


@pytest.mark.parametrize("offset_s", [0.012, -0.012, 0.4])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_wrong_clock_changes_no_verdict(layout, offset_s):
    right = trace_of(layout=layout)
    wrong = shifted(right, (layout.dp - 1, layout.pp - 1), offset_s)
    assert slowdown_of(wrong) == pytest.approx(slowdown_of(right), rel=0.005)
    replay = JobReplay.from_trace(wrong)
    assert replay.recorded_step_times().mean() == pytest.approx(
        JobReplay.from_trace(right).recorded_step_times().mean(), rel=0.005
    )


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
    assert not clocks.dp_ranks_tied
    assert np.isnan(clocks.error_s).all()


def test_interleaved_pipelines_tie_too():
    right = trace_of(layout=Layout(dp=2, pp=2, vpp=2), schedule=Schedule.INTERLEAVED)
    assert slowdown_of(shifted(right, (1, 1), 0.012)) == pytest.approx(slowdown_of(right), rel=0.005)


def test_the_published_method_takes_clocks_as_they_are():
    wrong = shifted(trace_of(), (1, 3), 0.02)
    assert not JobReplay.from_trace(wrong, Method.PUBLISHED).clocks.any_off
