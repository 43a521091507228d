"""The event-driven simulator against hand-computed times."""

from __future__ import annotations

import ast
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import judges
from judges.eventsim import CASES, draw_job, simulate, truths
from judges.eventsim.causes import Checkpoints, GcPauses, LateData, Rise, SlowWorkers, When
from judges.eventsim.engine import Stops
from judges.eventsim.graph import Flow
from judges.eventsim.model import (
    ComputeCost,
    HostCost,
    Job,
    Network,
    Noise,
    Posting,
    Queueing,
    Recording,
    Schedule,
    Shape,
)
from judges.eventsim.network import SharedNetwork
from judges.eventsim.troubles import BusyUplink, ClockOffset, Congestion, SlowLink
from judges.eventsim.truth import TruthKind, mean_step_s, with_workers_replaced, without
from judges.eventsim.uneven import UnequalSequences

FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.010, 0.020, 0.004
#: A network that takes no time, so that only computes do.
NO_NETWORK = Network(
    latency_s=0, activation_bytes=0, parameter_bytes=0, separate_bytes=0, embedding_bytes=0
)  # fmt: skip
STILL = Noise(op=0, worker=0, transfer=0)
IDLE_HOST = HostCost(launch_s=0, data_load_s=0, between_steps_s=0, layernorm_s=0, clip_s=0)


def exact(**changes) -> Job:
    """A job without noise whose host and network take no time."""
    given = {
        "shape": Shape(dp=1, pp=1, microbatches=4, steps=2),
        "compute": ComputeCost(forward_s=FORWARD_S, backward_ratio=2.0, optimizer_s=OPTIMIZER_S),
        "network": NO_NETWORK,
        "host": IDLE_HOST,
        "noise": STILL,
        "recording": Recording(offset_s=0, drift=0),
    }
    return Job(**(given | changes))


def ops(job: Job, kind: str, **place: int) -> pl.DataFrame:
    frame = simulate(job).trace.ops.filter(pl.col("kind") == kind)
    for name, value in place.items():
        frame = frame.filter(pl.col(name) == value)
    return frame.sort("step", "seq").with_columns(end=pl.col("start") + pl.col("duration"))


def test_judges_share_nothing_with_the_analysis():
    """They import numpy, polars, the standard library, each other, and two classes of the trace format."""
    allowed = {"numpy", "polars"} | set(sys.stdlib_module_names)
    for path in Path(judges.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {name.name.partition(".")[0] for name in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.module == "tracekit":
                assert {name.name for name in node.names} <= {"Layout", "Trace"}, path
            elif isinstance(node, ast.ImportFrom) and not node.module.startswith("judges."):
                assert node.module.partition(".")[0] in allowed, path


def test_a_step_takes_its_microbatches_and_the_bubble_of_its_pipeline():
    """(microbatches + (pp - 1) / vpp) forwards and backwards, and an optimizer, under every posting rule."""
    for posting, (pp, vpp, microbatches) in itertools.product(
        Posting, ((1, 1, 4), (2, 1, 4), (4, 1, 8), (3, 1, 2), (4, 2, 8))
    ):
        schedule = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
        if posting is not Posting.SAME_DIRECTION and vpp > 1:
            continue
        job = exact(shape=Shape(1, pp, vpp, microbatches=microbatches, steps=2), posting=posting, schedule=schedule)
        expected = (microbatches + (pp - 1) / vpp) * (FORWARD_S + BACKWARD_S) + OPTIMIZER_S
        assert simulate(job).step_s == pytest.approx([expected] * 2), (posting, pp, vpp)


def test_a_ring_moves_its_bytes_over_its_slowest_card():
    network = replace(NO_NETWORK, nic=1e9, parameter_bytes=4e9, latency_s=0.01)
    job = exact(shape=Shape(dp=4, pp=1, steps=1), network=network)
    for kind in ("params-all-gather", "grads-reduce-scatter"):
        assert ops(job, kind)["duration"].to_list() == pytest.approx([3.0 + 3 * 0.01] * 4)


def test_transfers_that_pass_a_busy_uplink_share_what_is_left_of_it():
    """Of four hosts, two are behind each switch: both DP ranks' transfers pass the uplink, with 0.2 x 2 cards left."""
    network = replace(NO_NETWORK, nic=1e9, nvlink=3e9, activation_bytes=2e7)
    job = exact(shape=Shape(dp=2, pp=2, microbatches=1, steps=2), network=network)
    busy = replace(job, causes=(BusyUplink(0.2, When(since=1)),))
    for one, seconds in ((job, [0.02] * 2), (busy, [0.02, 0.1])):
        assert ops(one, "forward-send", dp_rank=1)["duration"].to_list() == pytest.approx(seconds)


def ends(queueing: Queueing, arrivals: list[tuple[float, float, bool]]) -> list[float]:
    """End of each flow of (arrival, size, collective) on a shared card of 10 bytes per second."""
    network = SharedNetwork([10.0], queueing)
    flows = {node: Flow(node, size, (0,), 0.0, collective) for node, (_, size, collective) in enumerate(arrivals)}
    events = [(at, node, 0) for node, (at, _, _) in enumerate(arrivals)]
    ended, started = {}, set()
    while events:
        events.sort()
        now, node, version = events.pop(0)
        if node not in started:
            started.add(node)
            events += network.start(node, flows[node], flows[node].size, now)
        elif network.is_current(node, version):
            ended[node] = now
            events += network.finish(node, flows[node], now)
    return [ended[node] for node in flows]


def test_a_card_divides_its_bandwidth():
    # The first is alone for 0.5 s, both share from then on: its other 5 bytes take 1 s.
    assert ends(Queueing.FAIR, [(0.0, 10.0, False), (0.5, 10.0, False)]) == pytest.approx([1.5, 2.0])


def test_a_card_with_a_queue_serves_one_after_the_other_next_to_a_collective():
    assert ends(Queueing.FIFO, [(0.0, 10.0, False), (0.5, 10.0, False)]) == pytest.approx([1.0, 2.0])
    # The collective and the first transfer share; the second transfer gets its share when the first is through.
    assert ends(Queueing.FIFO, [(0.0, 10.0, True), (0.0, 5.0, False), (0.1, 5.0, False)]) == pytest.approx([2, 1, 2])


def test_a_stopped_process_makes_up_for_its_stops():
    stops = Stops(period_s=1.0, length_s=0.25)
    assert stops.end(0.3, 0.2) == pytest.approx(0.5)
    assert stops.end(0.1, 0.5) == pytest.approx(0.75)  # starts when the stop is over
    assert stops.end(0.5, 1.0) == pytest.approx(1.75)  # 0.5 s until the next stop, the rest after it


@pytest.mark.slow
def test_every_schedule_runs_with_every_posting_rule():
    """Each chunk but the last sends every microbatch forward, and receives it backward."""
    for schedule, posting, pp, overlap_dp in itertools.product(Schedule, Posting, (1, 2, 4), (False, True)):
        vpp = 2 if schedule is Schedule.INTERLEAVED else 1
        shape = Shape(dp=2, pp=pp, vpp=vpp, microbatches=4, steps=1)
        trace = simulate(Job(shape=shape, schedule=schedule, posting=posting, overlap_dp=overlap_dp)).trace
        counts = dict(trace.ops["kind"].value_counts().iter_rows())
        transfers = 2 * 4 * (pp * vpp - 1) if pp > 1 else 0
        seen = [counts.get(f"{way}-{end}", 0) for way in ("forward", "backward") for end in ("send", "recv")]
        assert seen == [transfers] * 4, (schedule, posting, pp)


def test_receives_are_posted_as_the_rule_says():
    job = exact(
        shape=Shape(dp=1, pp=2, microbatches=6, steps=1),
        network=replace(NO_NETWORK, activation_bytes=1e9, nic=1e12),
    )
    seen = {}
    for posting in Posting:
        there = replace(job, posting=posting)
        recvs = ops(there, "forward-recv", pp_rank=1)["start"].to_numpy()[1:]
        previous = ops(there, "forward-recv", pp_rank=1)["end"].to_numpy()[:-1]
        forwards = ops(there, "forward-compute", pp_rank=1)["end"].to_numpy()[:-1]
        backwards = ops(there, "backward-compute", pp_rank=1)["end"].to_numpy()[:-1]
        seen[posting] = [np.allclose(recvs, ends) for ends in (previous, forwards, backwards)]
    assert seen == {
        Posting.EARLY: [True, False, False],
        Posting.SAME_DIRECTION: [False, True, False],
        Posting.ANY_DIRECTION: [False, False, True],
        Posting.BATCHED: [False, False, True],
    }


def test_a_batch_starts_and_ends_together():
    shape = Shape(dp=1, pp=4, microbatches=8, steps=1)
    job = Job(shape=shape, posting=Posting.BATCHED, causes=(SlowLink(0, 1, 20.0),))
    sends, recvs = (ops(job, kind, pp_rank=1) for kind in ("forward-send", "backward-recv"))
    together = sends[2:].select("start", "end").to_numpy() == recvs[:6].select("start", "end").to_numpy()
    assert together.all()


def test_equal_jobs_run_equally():
    job = draw_job(5, "four")
    job = replace(job, shape=replace(job.shape, microbatches=job.shape.pp, steps=4))
    one, other = simulate(job), simulate(replace(job))
    assert one.trace.ops.equals(other.trace.ops)
    assert mean_step_s(without(job)) == one.step_s.mean()


def test_a_job_without_a_cause_draws_the_same_for_everything_else():
    shape = Shape(dp=3, pp=1, microbatches=4, steps=3)
    causes = (SlowWorkers(frozenset({(1, 0)}), 1.5), Congestion(3), GcPauses(4, recorded=False), UnequalSequences(5))
    job = Job(shape=shape, causes=causes)
    with_it, without_it = (ops(one, "backward-compute") for one in (job, without(job, causes[0])))
    factor = (with_it["duration"] / without_it["duration"]).to_numpy()
    slow = (with_it["dp_rank"] == 1).to_numpy()
    assert factor[slow] == pytest.approx(1.5, abs=1e-3)
    assert factor[~slow] == pytest.approx(1.0, abs=1e-3)


def test_the_truth_of_a_slow_worker_is_its_extra_work():
    slow = SlowWorkers(frozenset({(0, 0)}), 1.5, When(every=2))
    job = exact(shape=Shape(dp=2, pp=1, microbatches=4, steps=4), causes=(slow,))
    (truth,) = truths(job)
    extra_s = 0.5 * (4 * (FORWARD_S + BACKWARD_S) + OPTIMIZER_S)
    assert (truth.kind, truth.cells) == (TruthKind.BAD_WORKER, {(0, 0)})
    assert truth.saved_s == pytest.approx(extra_s / 2)  # it is slow in every other step
    assert mean_step_s(with_workers_replaced(job, frozenset({(0, 0)}))) == pytest.approx(
        mean_step_s(without(job, slow))
    )
    assert mean_step_s(with_workers_replaced(job, frozenset({(1, 0)}))) == pytest.approx(mean_step_s(job))


def test_a_worker_becomes_slower_until_the_last_step():
    """From step 2 of 4 on: half of the way there in that step, 1.5 times as slow in the last one."""
    for rise, halfway in (
        (Rise.LINEAR, 1.25),
        (Rise.EXPONENTIAL, 1.5**0.5),
        (Rise.SATURATING, 1 + 0.5 * (1 - np.exp(-2)) / (1 - np.exp(-4))),
    ):
        slow = SlowWorkers(frozenset({(0, 0)}), 1.5, When(since=2), rise=rise)
        job = exact(shape=Shape(dp=2, pp=1, microbatches=1, steps=4), causes=(slow,))
        forwards = ops(job, "forward-compute", dp_rank=0).sort("step")
        assert (forwards["duration"] / FORWARD_S).to_list() == pytest.approx([1, 1, halfway, 1.5], abs=1e-3), rise


def test_shards_give_one_dp_rank_the_costliest_microbatches_for_some_steps():
    uneven = UnequalSequences(9, shards=2)
    job = exact(shape=Shape(dp=3, pp=1, microbatches=4, steps=4), causes=(uneven,))
    forwards = ops(job, "forward-compute").with_columns(stretch=(pl.col("step") - pl.col("step").min()) // 2)
    for _, stretch in forwards.group_by("stretch"):
        ranks = stretch.group_by("dp_rank").agg(low=pl.col("duration").min(), high=pl.col("duration").max()).sort("low")
        assert (ranks["high"][:-1] <= ranks["low"][1:]).all()


def test_dealing_microbatches_evenly_keeps_them_all_and_saves_time():
    shape = Shape(dp=4, pp=1, microbatches=6, steps=3)
    job = exact(shape=shape, causes=(UnequalSequences(9),))
    balanced = replace(job, balanced=True)
    before, after = (np.sort(ops(one, "forward-compute", step=101)["duration"]) for one in (job, balanced))
    assert before == pytest.approx(after, abs=2e-6)
    assert mean_step_s(balanced) < mean_step_s(job)


def test_a_checkpoint_stalls_the_whole_job_and_leaves_no_op():
    """At the start of a step or between two; also if one worker writes it, before or after it gathers parameters."""
    one = frozenset({(0, 0)})
    for more in ({"at_start": True}, {"at_start": False}, {"writers": one}, {"writers": one, "gathered": True}):
        job = exact(shape=Shape(dp=2, pp=1, steps=5), causes=(Checkpoints(every=5, stall_s=1.0, **more),))
        simulated = simulate(job)
        assert simulated.step_s[2] - simulated.step_s[0] == pytest.approx(1.0), more
        assert "checkpoint" not in simulated.trace.ops["kind"].unique().cast(pl.String).to_list()
        assert np.diff(list(simulated.trace.step_starts.values())) == pytest.approx(simulated.step_s[:-1], abs=2e-6)


def test_data_that_is_late_in_turn_is_late_on_one_dp_rank_of_each_step():
    shape, cause = Shape(dp=4, pp=1, steps=20), LateData(seed=3, delay_s=0.5, in_turn=True)
    late = cause.late(shape)
    assert late.sum(axis=1).tolist() == [1] * 20
    assert (late.sum(axis=0) > 0).all()
    job = exact(shape=shape, causes=(cause,))
    (truth,) = truths(job)
    assert truth.saved_s == pytest.approx(0.5, rel=0.2)  # give or take a fifth in each step
    # In time on two DP ranks: half of the steps or so remain late, and the same ones.
    left = replace(cause, spared=frozenset({0, 1})).late(shape)
    assert (left == late & np.isin(np.arange(4), [2, 3])).all()


def test_clocks_and_missing_ranks_change_the_recording_only():
    job = exact(shape=Shape(dp=2, pp=1, steps=2))
    ahead = replace(job, causes=(ClockOffset((1, 0), 0.5),))
    hidden = replace(job, recording=replace(job.recording, unrecorded=frozenset({(0, 0)})))
    assert simulate(ahead).step_s.tolist() == simulate(hidden).step_s.tolist() == simulate(job).step_s.tolist()
    shift = ops(ahead, "optimizer", dp_rank=1)["start"] - ops(job, "optimizer", dp_rank=1)["start"]
    assert shift.to_list() == pytest.approx([0.5] * 2)
    assert simulate(hidden).trace.ops["dp_rank"].unique().to_list() == [1]


def test_every_case_draws_the_same_job_from_the_same_seed():
    for case, wanted in CASES.items():
        jobs = [draw_job(seed, case) for seed in (1, 2, 3)]
        assert jobs == [draw_job(seed, case) for seed in (1, 2, 3)], case
        assert len(set(jobs)) == 3, case
        assert all(job.shape.steps >= wanted.steps[0] for job in jobs), case
