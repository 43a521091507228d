"""The DP 2 x PP 2 job, from an unmodified script to the verdict."""

import numpy as np
import polars as pl
import pytest

from tests.collectors.conftest import TRIES, collect_pipeline, digests, plain, torchrun
from tracekit.analysis.attribution import attribute
from tracekit.analysis.job_replay import JobReplay
from tracekit.model import OpKind, Worker

pytest.importorskip("torch", reason="collecting needs the extra `torch`")

#: A worker whose S is this much above the median worker's stands out.
STANDS_OUT = 0.06
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


@pytest.fixture(scope="module")
def healthy_verdict(healthy):
    return attribute(JobReplay.from_trace(healthy.trace))


@pytest.fixture(scope="module")
def slowed_verdict(slowed):
    return attribute(JobReplay.from_trace(slowed.trace))


def test_layout_is_found_without_options(healthy):
    """The device mesh says who stands where."""
    layout = healthy.trace.layout
    assert (layout.dp, layout.pp, layout.tp, layout.vpp, layout.world_size) == (2, 2, 1, 1, 4)
    assert healthy.trace.worker_ranks() == {Worker(0, 0): 0, Worker(0, 1): 1, Worker(1, 0): 2, Worker(1, 1): 3}
    assert healthy.attempt["layout_source"] == "device mesh (dp, pp)"


def test_every_kind_of_op_is_there(healthy):
    """All a step does has its kind, for every worker and step."""
    trace = healthy.trace
    assert set(trace.ops["kind"].cast(str).unique()) == set(KINDS)
    assert trace.coverage().complete
    assert list(trace.steps) == list(range(1, 25))


def test_microbatches_are_told_apart(healthy):
    """Four forwards and four backwards per worker and step, one per microbatch."""
    computes = healthy.trace.ops.filter(pl.col("kind").cast(pl.String).str.ends_with("compute"))
    per_worker = computes.group_by("step", "rank", "kind").agg(pl.col("microbatch").sort())
    assert per_worker["microbatch"].to_list() == [[0, 1, 2, 3]] * (24 * 4 * 2)


def test_nothing_is_lost(healthy):
    """No record dropped, no transfer without its peer, no hook failed, no effect before its cause."""
    assert healthy.trace.metadata["dropped_records"] == 0
    assert healthy.trace.metadata["collect"]["unmatched_p2p"] == 0
    assert healthy.trace.metadata["collect"]["causality_violations"] == 0
    assert all(not rank["failures"] and not rank["unfinished"] for rank in healthy.attempt["ranks"])


def test_the_replay_explains_the_recording(healthy_verdict, slowed_verdict):
    """Replay error and discrepancy stay under 5 %."""
    for verdict in (healthy_verdict, slowed_verdict):
        assert verdict.trust.replay_error < 0.05
        assert abs(verdict.trust.discrepancy) < 0.05


def test_the_slow_rank_is_named(slowed_verdict):
    """Its worker is the slowest, and stands out."""
    assert slowed_verdict.slowest_workers[0] == Worker(1, 1)
    assert np.unravel_index(slowed_verdict.worker_slowdown.argmax(), (2, 2)) == (1, 1)
    assert slowed_verdict.worker_slowdown.max() - np.median(slowed_verdict.worker_slowdown) > STANDS_OUT


def off_by(healthy, slowed) -> float:
    """How far S of the slowed run is from what both runs measure, relative.

    Medians over the steps on both sides: other processes of the machine disturb single steps.
    """
    measured = np.median(slowed.recorded) / np.median(healthy.recorded)
    return abs(np.median(slowed.step_slowdown) / measured - 1)


def test_its_slowdown_is_what_the_run_without_it_measures(healthy_verdict, slowed_verdict, tmp_path):
    """Within 5 %. Where the machine had other things to do during one of the two runs, both run again."""
    found = [off_by(healthy_verdict, slowed_verdict)]
    while found[-1] > 0.05 and len(found) < TRIES:
        directory = tmp_path / str(len(found))
        runs = []
        for slow in (False, True):
            (directory / str(slow)).mkdir(parents=True)
            runs.append(collect_pipeline(directory / str(slow), slow=slow))
        found.append(off_by(*(attribute(JobReplay.from_trace(run.trace)) for run in runs)))
    assert found[-1] <= 0.05, found


def test_nobody_is_named_on_a_healthy_run(healthy_verdict):
    """Without a slow rank no worker stands out."""
    slowdowns = healthy_verdict.worker_slowdown
    assert slowdowns.max() - np.median(slowdowns) < STANDS_OUT


def test_weights_do_not_change(healthy, slowed, tmp_path):
    """Training gives the same bits with and without collect."""
    alone = plain(torchrun(4, "dp2_pp2.py"), tmp_path)
    expected = digests(alone)
    assert len(expected) == 2
    assert digests(healthy.process) == expected
    assert digests(slowed.process) == expected
