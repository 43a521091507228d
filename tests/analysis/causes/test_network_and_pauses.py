"""Causes outside the computes, on jobs of the simulator that shares no model with the rules: named and priced.

There is hardly any noise, so that what a rule misses is no bad luck. Truth: the same job, run again without the cause.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import tracekit
from judges.eventsim.cases import draw_job
from judges.eventsim.causes import (
    Checkpoints,
    GcPauses,
    LateData,
    Part,
    ProcessPauses,
    SlowHostThread,
    SlowWorkers,
    StoppedProcess,
    When,
)
from judges.eventsim.model import (
    FIRST_STEP,
    ComputeCost,
    Host,
    Job,
    Noise,
    Posting,
    Recording,
    Schedule,
    Shape,
)
from judges.eventsim.run import simulate
from judges.eventsim.troubles import BusyUplink, Congestion, SlowLink, SlowNic, Traffic, Way
from judges.eventsim.truth import mean_step_s, without
from tests.analysis.causes.corpus import found_in
from tests.analysis.causes.simulated import BUSY, FLAT, PIPELINE, costs, job, named, report
from tests.handmade import frame
from tracekit.report.finding import LossKind
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

ONE_LANE = Shape(dp=1, pp=4, microbatches=8)


class TestPosting:
    @pytest.mark.parametrize("posting", list(Posting))
    @pytest.mark.parametrize(
        ("schedule", "shape"),
        [(Schedule.ONE_F_ONE_B, PIPELINE), (Schedule.INTERLEAVED, Shape(dp=2, pp=4, vpp=2, microbatches=8, steps=3))],
    )
    def test_the_rule_is_read_from_the_recording(self, posting, schedule, shape):
        found = report(job(posting=posting, schedule=schedule, shape=shape)).posting
        assert found.rule.value == posting.value
        assert found.obeyed > 0.95

    @pytest.mark.parametrize("posting", list(Posting))
    def test_a_slow_link_one_way_costs_what_the_job_without_it_saves(self, posting):
        cause = SlowLink(0, 1, 12.0, Way.FORWARD)
        slow = job(cause, posting=posting)
        (found,) = named(slow)
        assert found.kind == "slow-p2p-link"
        assert [(link.dp_rank, link.pp_rank) for link in found.where.links] == [(0, 1)]
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.003 * mean_step_s(slow))

    @pytest.mark.parametrize(("stage", "way"), [(0, Way.FORWARD), (0, Way.BOTH), (1, Way.BACKWARD)])
    def test_a_slow_link_that_every_call_waits_for_is_one_cause_of_two_stages(self, stage, way):
        """With two chunks on two stages every batch has a transfer over the slow link, in either direction."""
        cause = SlowLink(2, stage, 10.0, way)
        shape = Shape(dp=4, pp=2, vpp=2, microbatches=8, steps=4)
        slow = job(cause, posting=Posting.BATCHED, schedule=Schedule.INTERLEAVED, shape=shape)
        (found,) = named(slow)
        assert found.kind == "slow-p2p-link"
        assert [(link.dp_rank, link.pp_rank) for link in found.where.links] == [(2, stage)]
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.03 * mean_step_s(slow))

    def test_a_card_that_calls_only_wait_beside_is_not_slow(self):
        """Host 0 receives from stage 1, whose card is slow, and in the same calls from stage 3, on every DP rank."""
        cause = SlowNic(1, 6.0, Way.SENDING)
        shape = Shape(dp=2, pp=4, vpp=2, tp=4, microbatches=4, steps=6)
        slow = job(cause, posting=Posting.BATCHED, schedule=Schedule.INTERLEAVED, shape=shape)
        (found,) = named(slow)
        assert (found.kind, found.where.host) == ("slow-nic", "host-0001")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.01 * mean_step_s(slow))

    def test_transfers_that_wait_for_others_of_their_call_do_not_clear_a_slow_card(self):
        """Of two links into host 1, one has a quarter of transfers that end with a longer one of the same call."""
        slow = draw_job(881000, "nic-receiving-bursts")
        (cause,) = slow.causes
        (found,) = named(slow)
        assert (found.kind, found.where.host) == ("slow-nic", "host-0001")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.01 * mean_step_s(slow))

    def test_the_published_method_keeps_its_own_rule(self):
        cause = SlowLink(0, 1, 12.0, Way.FORWARD)
        slow = job(cause)
        trace = simulate(slow).trace
        ours, theirs = tracekit.job_of(trace).whatif(), tracekit.job_of(trace, "published").whatif()
        truth = mean_step_s(slow) / mean_step_s(without(slow, cause))
        assert ours.slowdown == pytest.approx(truth, abs=0.01)
        assert theirs.slowdown < truth - 0.03
        assert theirs.posting.telling == 0
        assert ours.method.published_slowdown == pytest.approx(theirs.slowdown)
        assert any("receive" in reason for reason in ours.method.differs_because)


class TestNetwork:
    @pytest.mark.parametrize(
        ("way", "side"), [(Way.SENDING, "sending"), (Way.RECEIVING, "receiving"), (Way.BOTH, "sending and receiving")]
    )
    def test_a_slow_card_is_one_cause_with_its_side_and_one_price(self, way, side):
        cause = SlowNic(2, 6.0, way)  # host 2: DP rank 0, stage 1
        slow = job(cause)
        (found,) = named(slow)
        assert (found.kind, found.title) == ("slow-nic", f"Network card is slow in {side}")
        assert [(worker.dp_rank, worker.pp_rank) for worker in found.where.workers] == [(0, 1)]
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.003 * mean_step_s(slow))

    @pytest.mark.parametrize(("shape", "traffic"), [(FLAT, Traffic.COLLECTIVES), (PIPELINE, Traffic.ALL)])
    def test_congestion_is_one_cause_over_all_traffic(self, shape, traffic):
        cause = Congestion(3, 0.05, 15.0, traffic)
        slow = job(cause, shape=replace(shape, steps=12))
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("congestion", "whole job")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.003 * mean_step_s(slow))

    @pytest.mark.parametrize(
        ("shape", "traffic", "factor"),
        [
            (FLAT, Traffic.COLLECTIVES, 3.0),
            (PIPELINE, Traffic.ALL, 3.0),
            (PIPELINE, Traffic.P2P, 5.0),
            (ONE_LANE, Traffic.P2P, 5.0),
        ],
    )
    @pytest.mark.parametrize("since", [8, 3])
    def test_a_slow_network_is_congested_since_the_step_in_which_it_became_slow(self, shape, traffic, factor, since):
        """Also if most steps are congested, so that the median transfer is."""
        cause = Congestion(3, 1.0, factor, traffic, When(since=since))
        slow = job(cause, shape=replace(shape, steps=12), overlap_dp=True)
        (found,) = named(slow)
        assert (found.kind, found.since_step) == ("congestion", FIRST_STEP + since)
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.005 * mean_step_s(slow))

    def test_scattered_transfers_three_times_as_long_are_congestion_where_nothing_else_explains_them(self):
        cause = Congestion(3, 0.1, 3.0, Traffic.COLLECTIVES)
        slow = job(cause, shape=replace(FLAT, steps=12))
        (found,) = named(slow)
        assert (found.kind, found.when) == ("congestion", "again and again")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.003 * mean_step_s(slow))

    def test_what_congestion_hits_by_chance_is_no_slow_card(self):
        """A third of all transfers is hit: of the cards of a slow ring, some by chance in most of their transfers."""
        cause = Congestion(4, 0.3, 6.0, Traffic.ALL)
        slow = job(cause, shape=Shape(dp=4, pp=2, microbatches=4, steps=12))
        assert {found.kind for found in named(slow)} == {"congestion"}

    def test_an_uplink_that_slows_all_dp_ranks_at_times_is_no_set_of_slow_links(self):
        cause = BusyUplink(0.07, When(since=5, until=9))
        slow = job(cause, shape=Shape(dp=4, pp=4, microbatches=8, steps=15))
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("congestion", "whole job")
        assert found.time is not None
        assert found.time.slow_steps == tuple(range(FIRST_STEP + 5, FIRST_STEP + 9))
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.005 * mean_step_s(slow))

    def test_links_without_a_host_in_common_that_are_slow_in_the_same_steps_are_one_uplink(self):
        """Of three DP ranks, one crosses it between the first two stages, the others between the next."""
        cause = BusyUplink(0.07, When(since=5, until=9))
        slow = job(cause, shape=Shape(dp=3, pp=3, microbatches=8, steps=15))
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("congestion", "whole job")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.005 * mean_step_s(slow))

    def test_two_links_that_are_always_slow_are_two_slow_links(self):
        slow = job(SlowLink(0, 0, 12.0), SlowLink(2, 1, 12.0), shape=Shape(dp=4, pp=4, microbatches=8, steps=10))
        assert {found.kind for found in named(slow)} == {"slow-p2p-link"}

    def test_links_between_hosts_are_slower_than_those_within_and_nobody_is_to_blame(self):
        """Two stages share a host: four of seven links are NVLink."""
        network = replace(BUSY, nvlink=9 * BUSY.nic, activation_bytes=200e6)
        assert named(job(shape=Shape(dp=1, pp=8, tp=4, microbatches=8, steps=8), network=network)) == []

    @pytest.mark.parametrize("when", [When(since=9), When(every=3, phase=1)])
    def test_a_slow_card_says_when_it_is_slow(self, when):
        """The last three of twelve steps are no passing trouble, but all since a step."""
        cause = SlowNic(2, 6.0, Way.SENDING, when)
        slow = job(cause, shape=replace(PIPELINE, steps=12))
        (found,) = named(slow)
        assert found.kind == "slow-nic"
        assert found.time is not None
        assert (found.since_step, found.time.period) == ((109, None) if when.since else (None, 3))
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.003 * mean_step_s(slow))

    def test_links_over_one_slow_card_are_the_card_s_though_one_of_them_is_less_slow(self):
        """Three times as slow; only the link that also waits for other transfers is beyond the limit in all steps."""
        cause = SlowNic(3, 3.2, Way.SENDING)
        shape = Shape(dp=2, pp=4, vpp=2, tp=4, microbatches=8, steps=6)
        network = replace(BUSY, activation_bytes=300e6)
        slow = job(cause, shape=shape, schedule=Schedule.INTERLEAVED, posting=Posting.EARLY, network=network)
        (found,) = named(slow)
        assert (found.kind, found.where.host) == ("slow-nic", "host-0003")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.005 * mean_step_s(slow))

    def test_waiting_for_an_unrecorded_worker_is_its_lateness_and_no_transfer(self):
        cause = SlowWorkers(frozenset({(1, 0)}), 1.6)
        slow = job(cause, shape=FLAT, recording=Recording(unrecorded=frozenset({(1, 0)})))
        found = report(slow)
        (late,) = [one for one in found.findings if one.priced]
        assert late.kind == "unrecorded-worker-late"
        assert "of the data-parallel group of stage 0" in late.title
        # Its optimizer is slow, too, at the end of the step where nobody waits for it in a collective.
        assert late.saved_s == pytest.approx(costs(slow, cause), abs=0.015 * mean_step_s(slow))
        (halved,) = [fix for fix in found.fixes if fix.kind == "compress-dp-communication"]
        saved_s = mean_step_s(slow) - mean_step_s(replace(slow, dp_bytes=0.5))
        assert halved.saved_s == pytest.approx(saved_s, abs=0.01 * mean_step_s(slow))


class TestHost:
    @pytest.mark.parametrize("at_start", [True, False])
    def test_a_stall_of_all_ranks_is_checkpoint_like_and_no_late_data(self, at_start):
        stall = Checkpoints(every=5, stall_s=1.0, at_start=at_start)
        late = LateData(0, 0.2, frozenset({1}))
        slow = job(stall, late, shape=Shape(dp=2, pp=2, microbatches=8, steps=20))
        by_kind = {cause.kind: cause for cause in named(slow)}
        assert set(by_kind) == {"checkpoint-stalls", "late-data-loading"}
        stalled = by_kind["checkpoint-stalls"]
        assert stalled.time is not None
        assert stalled.time.period == 5
        assert "not recorded" in stalled.title
        assert by_kind["late-data-loading"].where.dp_ranks == (1,)
        for cause, truth in ((stalled, stall), (by_kind["late-data-loading"], late)):
            assert cause.saved_s == pytest.approx(costs(slow, truth), abs=0.005 * mean_step_s(slow))

    @pytest.mark.parametrize("stage", [0, 2])
    def test_a_slow_optimizer_costs_what_the_next_step_does_not_hide(self, stage):
        cause = SlowWorkers(frozenset({(1, stage)}), 10.0, part=Part.OPTIMIZER)
        slow = job(cause, shape=replace(PIPELINE, steps=8))
        (found,) = named(slow)
        assert found.kind == "slow-optimizer"
        assert [(worker.dp_rank, worker.pp_rank) for worker in found.where.workers] == [(1, stage)]
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.005 * mean_step_s(slow))

    def test_half_the_bytes_gather_parameters_no_sooner_than_late_data_comes(self):
        """Gradients are reduced sooner; forwards still wait for data."""
        late = job(LateData(1, 0.2), shape=Shape(dp=4, pp=2, microbatches=8, steps=8))
        (halved,) = [fix for fix in report(late).fixes if fix.kind == "compress-dp-communication"]
        saved_s = mean_step_s(late) - mean_step_s(replace(late, dp_bytes=0.5))
        assert halved.saved_s == pytest.approx(saved_s, abs=0.001 * mean_step_s(late))

    def test_a_host_that_is_late_with_every_launch_is_not_late_with_its_data(self):
        cause = SlowHostThread(frozenset({(1, 0)}), 0.04)
        slow = job(cause, shape=FLAT)
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("slow-host-code", "worker (1,0)")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.005 * mean_step_s(slow))


class TestPauses:
    def test_pauses_of_forwards_and_backwards_are_the_process_s(self):
        cause = ProcessPauses(0, rate=0.02, pause_s=0.05)
        slow = job(cause, shape=replace(PIPELINE, steps=6))
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("process-pauses", "whole job")
        assert found.saved_s == pytest.approx(costs(slow, cause), abs=0.003 * mean_step_s(slow))

    def test_pauses_that_spare_backwards_are_the_collector_s(self):
        slow = job(GcPauses(0, rate=0.3, pause_s=0.1, recorded=False), shape=replace(PIPELINE, steps=6))
        assert [cause.kind for cause in named(slow)] == ["python-gc"]

    def test_long_tails_in_proportion_to_computes_are_noise(self):
        noisy = job(noise=Noise(op=0.03, tail=0.02, tail_factor=2.0), shape=replace(PIPELINE, steps=6))
        assert "process-pauses" not in {cause.kind for cause in named(noisy)}

    @pytest.mark.parametrize("forward_s", [0.01, 0.04])
    def test_a_process_stopped_again_and_again_is_no_bad_worker(self, forward_s):
        cause = StoppedProcess((1, 0))
        slow = job(
            cause,
            shape=Shape(dp=2, pp=1, tp=4, microbatches=6, steps=16),
            compute=ComputeCost(forward_s=forward_s),
            host=replace(Job().host, mode=Host.IN_STEP),
        )
        found = report(slow)
        (stopped,) = [one for one in found.findings if one.priced]
        assert (stopped.kind, str(stopped.where)) == ("process-pauses", "worker (1,0)")
        assert stopped.saved_s == pytest.approx(costs(slow, cause), abs=0.01 * mean_step_s(slow))
        assert stopped.since_step is None or stopped.since_step == FIRST_STEP


def test_to_replace_a_worker_takes_evidence_of_its_hardware():
    slow = simulate(job(SlowWorkers(frozenset({(1, 0)}), 1.5), shape=FLAT)).trace
    gpus = {"0": {"reasons": {}}, "8": {"reasons": {"hw-power-brake": 0.4}}}
    throttled = replace(slow, metadata={**slow.metadata, "gpus": gpus})
    for trace, words, act in (
        (
            slow,
            "Make the worker of ranks 8-15 on host-0001 as fast as its peers",
            "Check ranks 8-15 on host-0001 for throttled GPUs ",
        ),
        (
            throttled,
            "Replace the worker of ranks 8-15 on host-0001",
            "Swap host-0001 for a spare, because the GPUs of ranks 8-15 are throttled",
        ),
    ):
        found = tracekit.job_of(trace).analysis.diagnosis
        assert [fix.title for fix in found.fixes if fix.kind == "replace-workers"] == [words]
        assert found.answer.action is not None
        assert found.answer.action.startswith(act)


@pytest.mark.parametrize("worker", [None, (1, 0)])
def test_who_collects_garbage_is_named_only_beyond_chance(worker):
    """All collect at random: one of eight workers does so in 12 of 22 steps, the usual one in 6."""
    drawn = draw_job(9_950_000, "gc")
    slow = replace(drawn, causes=tuple(replace(cause, worker=worker) for cause in drawn.causes))
    (cause,) = tracekit.job_of(simulate(slow).trace).whatif().findings
    assert (cause.kind, str(cause.where)) == ("python-gc", "worker (1,0)" if worker else "whole job")


def test_a_pause_here_and_there_between_blocking_calls_contradicts_nothing():
    """Ranks that did not collect have no gc op, so no start of one that could lie before the end of a call."""
    pauses = GcPauses(seed=5, rate=0.2, pause_s=0.1)
    found = report(job(pauses, posting=Posting.BATCHED, network=replace(BUSY, activation_bytes=2e9)))
    assert found.trust.clamped_delays == 0
    assert found.trust.trustworthy
    assert found.verdict.kind is LossKind.STALLS


@pytest.mark.parametrize("hosts", [1, 2])
def test_on_one_host_no_network_card_is_slow(hosts):
    """Rank 1 leaves the reduction 1 s after its peers, the other collectives with them: its card, if it has one."""

    def lane(reduces_s: float):
        return (
            (0, "params-all-gather", 0, None, 0.0, 0.25),
            (0, "forward-compute", 0, 0, 0.25, 1.0),
            (0, "backward-compute", 0, 0, 1.0, 3.0),
            (0, "grads-reduce-scatter", 0, None, 3.0, 3.0 + reduces_s),
            (0, "optimizer-clip-main-grad", 0, None, 3.0 + reduces_s, 4.6),
        )

    ops = frame({rank: lane(1.5 if rank == 1 else 0.5) for rank in range(4)}, range(10))
    nodes = {"hosts": {str(rank): f"node-{rank % hosts}" for rank in range(4)}}
    found = found_in(Trace.from_frame(ops, Layout(dp=4, pp=1, world_size=4), name="by hand", metadata=nodes))
    assert ("slow-nic" in {cause.kind for cause in found}) == (hosts > 1)
