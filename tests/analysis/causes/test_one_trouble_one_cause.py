"""One trouble that shows in several ways is one cause, and its price has all of them.

Jobs of the simulator that shares no model with the rules; truth: the same job, run again without the cause.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import tracekit
from benchmarks.eventsim import judged_job
from judges.eventsim.cases import draw_job
from judges.eventsim.causes import Checkpoints, Part, RandomPauses, SlowWorkers, StoppedProcess, When
from judges.eventsim.model import Job, Noise, Posting, Queueing, Schedule, Shape
from judges.eventsim.run import simulate
from judges.eventsim.troubles import Congestion, SlowLink, SlowNic
from judges.eventsim.truth import mean_step_s, without
from tests.analysis.causes.simulated import BUSY, FLAT, PIPELINE, costs, job, named, report
from tracekit.analysis.evidence.computes import _own_length, _pauses_in
from tracekit.analysis.evidence.congestion import rings_faster
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, collectives
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Scale, step_times
from tracekit.trace.canonical import Trace
from tracekit.trace.model import OpKind

#: Of the mean step.
LARGEST_PRICE_ERROR = 0.01
INTERLEAVED = {"schedule": Schedule.INTERLEAVED, "posting": Posting.BATCHED}


def share(of, cause_s: float) -> float:
    return cause_s / mean_step_s(of)


def without_step_starts(trace: Trace) -> Trace:
    """The same trace, with starts that count from the start of each step alone."""
    return Trace.from_frame(trace.ops, trace.layout, name=trace.name, metadata=trace.metadata)


class TestPauses:
    @pytest.mark.parametrize("posting", [Posting.BATCHED, Posting.SAME_DIRECTION])
    def test_pauses_while_a_process_waits_or_launches_count_too(self, posting):
        cause = RandomPauses(5, rate=0.5, pause_s=0.08)
        slow = job(cause, posting=posting, shape=Shape(dp=4, pp=4, microbatches=8, steps=8))
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("process-pauses", "whole job")
        assert share(slow, found.saved_s) == pytest.approx(share(slow, costs(slow, cause)), abs=LARGEST_PRICE_ERROR)

    def test_a_pause_of_an_optimizer_is_one_of_the_process_too(self):
        cause = RandomPauses(1, rate=0.5, pause_s=0.07)
        slow = job(cause, shape=Shape(dp=8, pp=1, microbatches=12, steps=15))
        (found,) = named(slow)
        assert share(slow, found.saved_s) == pytest.approx(share(slow, costs(slow, cause)), abs=LARGEST_PRICE_ERROR)

    @pytest.mark.parametrize(("stage", "length_s"), [(0, 0.06), (2, 0.03)])
    def test_a_stopped_process_that_launches_and_sends_late_is_neither_late_data_nor_a_slow_host(self, stage, length_s):
        cause = StoppedProcess((1, stage), 0.2, length_s)
        slow = job(cause, shape=Shape(dp=4, pp=4, microbatches=8, steps=6), posting=Posting.SAME_DIRECTION)
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("process-pauses", f"worker (1,{stage})")
        assert share(slow, found.saved_s) == pytest.approx(share(slow, costs(slow, cause)), abs=LARGEST_PRICE_ERROR)

    def test_what_one_of_two_ranks_does_is_no_effect_of_the_place_in_the_step(self):
        """The process stops in step with the job's microbatches."""
        assert not judged_job(9_730_000, "P17-stops").wrong


class TestWorkBehindCalls:
    def test_work_behind_a_send_that_blocks_is_no_late_host_code(self):
        """Its peer is slow, so each send takes 56 ms; what the thread does behind the last one begins as much later."""
        slow = draw_job(9_840_002, "P1-bad-worker")
        assert slow.posting is Posting.BATCHED
        replay = JobReplay.from_trace(simulate(slow).trace)
        (block,) = replay.graph.blocks
        gc = np.flatnonzero((block.structure.kind == OpKind.GC.code) & (block.structure.pp_rank == 1))
        assert len(gc)
        assert float(replay.durations.launch_delay[0][gc].max()) < 0.002
        assert not judged_job(9_840_002, "P1-bad-worker").wrong


class TestStoppedProcesses:
    def test_two_computes_a_step_are_enough(self):
        """One microbatch: of 30 steps, a stop of 30 ms hits the forward of 10 and the backward of 10 others."""
        noise = np.random.default_rng(7)
        forward_s, backward_s = (0.03 * (1 + 0.1 * noise.exponential(size=(30, 2))) for _ in range(2))
        forward_s[0::3, 1] += 0.03
        backward_s[1::3, 1] += 0.03
        found = _pauses_in(np.stack([forward_s, backward_s]).reshape(2, 1, 1, 1, 30, 2))
        assert found.stopped.tolist() == [[False, True]]

    def test_a_worker_that_is_slow_in_every_third_step_does_not_stop(self):
        noise = np.random.default_rng(7)
        forward_s, backward_s = (0.03 * (1 + 0.1 * noise.exponential(size=(30, 2))) for _ in range(2))
        forward_s[0::3, 1] += 0.03
        backward_s[0::3, 1] += 0.03
        found = _pauses_in(np.stack([forward_s, backward_s]).reshape(2, 1, 1, 1, 30, 2))
        assert not found.stopped.any()


class TestLengthOfPauses:
    """Forwards of 10 ms, backwards of 20 ms, of which some pause."""

    @staticmethod
    def of_their_own(forward_s: list[float], backward_s: list[float]) -> bool:
        table = np.zeros((2, 1, 1, len(forward_s) + len(backward_s), 1, 1))
        table[0, 0, 0, : len(forward_s), 0, 0] = forward_s
        table[1, 0, 0, -len(backward_s) :, 0, 0] = backward_s
        return _own_length(table, np.array([0.01, 0.02]).reshape(2, 1, 1, 1))

    def test_as_long_in_forwards_as_in_backwards_is_of_their_own(self):
        assert self.of_their_own([0.05, 0.051, 0.049], [0.05, 0.052, 0.05, 0.048])

    def test_computes_that_pause_twice_do_not_hide_it(self):
        assert self.of_their_own([0.05, 0.051, 0.049], [0.05, 0.052, 0.05, 0.048, 0.1])

    def test_twice_as_long_in_backwards_is_in_proportion(self):
        assert not self.of_their_own([0.05, 0.051, 0.049], [0.1, 0.102, 0.1, 0.098])

    def test_three_pauses_prove_nothing(self):
        assert not self.of_their_own([0.05], [0.05, 0.05])

    @pytest.mark.slow
    def test_noise_with_a_long_tail_is_never_of_a_length_of_its_own(self):
        """Exceedances in proportion, exponentially distributed: of 2,000 jobs about two may look otherwise."""
        rng = np.random.default_rng(0)
        shares = rng.exponential(1.0, (2000, 80)) + 0.4  # what is beyond eight spreads of noise of 5 %
        found = sum(self.of_their_own((0.01 * job[:40]).tolist(), (0.02 * job[40:]).tolist()) for job in shares)
        assert found <= 6  # twice as many in 99 of 100 draws


class TestNetwork:
    @pytest.mark.parametrize("queueing", list(Queueing))
    def test_links_that_wait_behind_a_slow_one_are_not_slow_themselves(self, queueing):
        """With four stages and two chunks nearly all calls of the DP rank wait for the slow link in the end."""
        cause = SlowLink(2, 1, 10.0)
        shape = Shape(dp=4, pp=4, vpp=2, microbatches=8, steps=4)
        slow = job(cause, shape=shape, network=replace(BUSY, queueing=queueing), **INTERLEAVED)
        (found,) = named(slow)
        assert found.kind == "slow-p2p-link"
        assert [(link.dp_rank, link.pp_rank) for link in found.where.links] == [(2, 1)]
        assert share(slow, found.saved_s) == pytest.approx(share(slow, costs(slow, cause)), abs=LARGEST_PRICE_ERROR)

    def test_a_link_that_nearly_always_waits_behind_a_slow_one_is_not_slow_itself(self):
        """All but its first transfers of a step do; the hosts of both links have one card each."""
        slow = draw_job(10_050_004, "P5")
        assert (slow.network.queueing, slow.shape.tp) == (Queueing.FIFO, 4)
        (found,) = named(slow)
        assert [(link.dp_rank, link.pp_rank) for link in found.where.links] == [(2, 1)]

    def test_congestion_on_a_slow_card_keeps_its_share_of_what_both_cost(self):
        """A transfer that passes the card while it hangs takes 5 x 12 times as long: each repair leaves the other."""
        card, congestion = SlowNic(2, 5.0), Congestion(3, 0.04, 12.0)
        slow = job(card, congestion, shape=Shape(dp=4, pp=4, microbatches=12, steps=10))
        by_kind = {found.kind: found for found in named(slow)}
        assert set(by_kind) == {"slow-nic", "congestion"}
        for cause, kind in ((card, "slow-nic"), (congestion, "congestion")):
            found, alone = by_kind[kind], job(cause, shape=slow.shape)
            assert share(slow, found.saved_s) == pytest.approx(share(slow, costs(slow, cause)), abs=0.02)
            assert share(slow, found.alone_s) == pytest.approx(share(slow, costs(alone, cause)), abs=0.02)

    def test_faster_collectives_free_what_waits_for_the_same_cards_and_nothing_else(self):
        """Half of the bytes: at least what halved collectives save, at most what the job without them saves."""
        shape = Shape(dp=4, pp=4, vpp=2, microbatches=8, steps=4)
        network = replace(BUSY, queueing=Queueing.FIFO, parameter_bytes=12e9)
        of = job(network=network, shape=shape, overlap_dp=True, schedule=Schedule.INTERLEAVED)
        trace = simulate(of).trace
        replay = JobReplay.from_trace(trace)
        evidence = PipelineSubject.of(trace, replay)
        traffic, half = traffic_of(evidence), np.full(traffic_of(evidence).rings.shape, 0.5)
        assert traffic.shared_s.max() > traffic.usual_s.max()
        assert traffic.shared_with(half) == pytest.approx(traffic.shared_s / 2)
        together, alone, gone = (
            float(step_times(evidence.replay, (change,)).mean())
            for change in (
                rings_faster(traffic, half),
                Scale(collectives(evidence), np.array(0.5)),
                rings_faster(traffic, 0 * half),
            )
        )
        assert gone < together <= alone


class TestSteps:
    def test_a_worker_that_ends_late_and_begins_late_waits_for_no_data(self):
        """Starts that count from each step do not tell how far steps overlap. How late the worker begins does."""
        cause = SlowWorkers(frozenset({(1, 2)}), 10.0, part=Part.OPTIMIZER)
        slow = job(cause, shape=replace(PIPELINE, steps=8))
        found = tracekit.job_of(without_step_starts(simulate(slow).trace)).analysis.diagnosis
        assert {one.kind for one in found.causes if one.priced} <= {"slow-optimizer"}
        priced = sum(one.saved_s for one in found.causes)
        assert share(slow, priced) == pytest.approx(share(slow, costs(slow, cause)), abs=LARGEST_PRICE_ERROR)

    def test_what_the_next_step_may_hide_is_priced_as_a_bound(self):
        """Starts that count from the worker's own step do not show whether it begins late."""
        cause = SlowWorkers(frozenset({(1, 0)}), 10.0, part=Part.OPTIMIZER)
        slow = job(cause, shape=replace(FLAT, steps=6))
        trace = simulate(slow).trace
        ops = trace.ops.with_columns(start=pl.col("start") - pl.col("start").min().over("step", "rank"))
        found = tracekit.job_of(Trace.from_frame(ops, trace.layout, name="own zero", metadata=trace.metadata)).whatif()
        (fix,) = [fix for fix in found.fixes if fix.cause == "slow-optimizer"]
        assert fix.bound

    def test_a_stall_seen_twice_has_the_price_of_this_trace(self):
        """Twice in twelve steps says what it costs whenever it comes, not how often it comes."""
        cause = Checkpoints(every=5, phase=2, stall_s=1.0)
        slow = job(cause, shape=Shape(dp=2, pp=2, microbatches=8, steps=12))
        (fix,) = [fix for fix in report(slow).fixes if fix.kind == "async-checkpoint"]
        assert (fix.bound, fix.withheld) == (False, None)
        assert fix.assumes is not None
        assert "2 steps" in fix.assumes
        assert share(slow, fix.saved_s) == pytest.approx(share(slow, costs(slow, cause)), abs=LARGEST_PRICE_ERROR)


def test_a_group_of_slow_ranks_needs_no_names_of_hosts():
    slow = job(SlowWorkers(frozenset({(0, 0), (1, 0)}), 1.15), shape=FLAT, noise=Noise(op=0.01, worker=0.002))
    trace = simulate(slow).trace
    found = tracekit.job_of(replace(trace, metadata={})).analysis.diagnosis
    assert [(cause.kind, cause.where.dp_ranks) for cause in found.causes] == [("slow-rank-group", (0, 1))]


def test_backwards_that_a_stopped_process_lengthens_make_no_slow_steps() -> None:
    """In most steps the median backward of the stopped rank holds a stop and the median forward none: the workload, of
    which the rank's slowness is taken off, never had it.
    """
    assert {cause.kind for cause in named(draw_job(9_770_000, "P17-stops"))} == {"process-pauses"}


def test_backwards_that_a_stopped_process_lengthens_by_turns_make_no_slow_steps() -> None:
    """Stops hit three of its four backwards in most steps, two in the others: those look slow beside the usual step."""
    assert {cause.kind for cause in named(draw_job(10_060_005, "P17-stops"))} == {"process-pauses"}


def test_slow_backwards_and_a_few_pauses_are_no_stopped_process() -> None:
    """Random pauses hit three forwards of the worker whose backwards are slow, all of them by one factor."""
    found = {(cause.kind, str(cause.where)) for cause in named(draw_job(10_060_004, "three"))}
    assert found == {
        ("bad-worker", "worker (13,0)"),
        ("process-pauses", "whole job"),
        ("python-gc", "whole job"),
    }


@pytest.mark.parametrize(
    ("every", "shape", "noise"),
    [
        # Each is measured by the other one, so that the rank that is not slow looks fast for a while.
        (4, Shape(dp=2, pp=2, tp=1, microbatches=4, steps=20), Noise(op=0.002, worker=0.001)),
        # Each is slow in every second step, so that half of what either computes is slow: no more work than others.
        (2, Shape(dp=2, pp=4, tp=1, microbatches=4, steps=12), Noise()),
        # Without a pipeline; in every third step, neither is slow.
        (3, Shape(dp=2, pp=1, tp=1, microbatches=4, steps=20), Noise()),
    ],
)
def test_two_ranks_that_are_slow_in_turn_are_the_causes(every: int, shape: Shape, noise: Noise) -> None:
    turns = tuple(SlowWorkers(frozenset({(rank, 0)}), 1.5, When(every=every, phase=rank)) for rank in range(2))
    causes = named(Job(shape=shape, noise=noise, causes=turns))
    assert sorted((cause.kind, str(cause.where)) for cause in causes) == [
        ("bad-worker", "worker (0,0)"),
        ("bad-worker", "worker (1,0)"),
    ]


def at_random(ranks: int, share: float, *, stage: int = 0) -> tuple[SlowWorkers, ...]:
    """DP ranks of a stage that are each slow in this share of the steps, drawn for each."""
    times = (When(burst=share, burst_steps=1, seed=seed) for seed in range(ranks))
    return tuple(SlowWorkers(frozenset({(rank, stage)}), 1.5, when) for rank, when in enumerate(times))


@pytest.mark.parametrize(
    ("shape", "share_of_steps"),
    [
        (Shape(dp=4, pp=4, tp=1, microbatches=6, steps=24), 0.6),
        (Shape(dp=2, pp=4, tp=1, microbatches=6, steps=24), 0.75),  # in more than half of the steps, both
        (Shape(dp=4, pp=1, tp=1, microbatches=6, steps=24), 0.6),
        (Shape(dp=8, pp=2, tp=1, microbatches=6, steps=8), 0.6),  # too short to show both levels of each
    ],
)
def test_ranks_of_which_most_are_slow_at_random_are_the_causes(shape: Shape, share_of_steps: float) -> None:
    """The usual worker of a step is slow. Together they cost what the job saves without them."""
    slow = Job(shape=shape, causes=at_random(shape.dp, share_of_steps))
    explained = report(slow)
    assert {cause.kind for cause in explained.findings if cause.priced} == {"bad-worker"}
    hit = {(worker.dp_rank, worker.pp_rank) for cause in explained.findings for worker in cause.where.workers}
    assert hit == {(rank, 0) for rank in range(shape.dp)}
    saved_s = mean_step_s(slow) - mean_step_s(without(slow, *slow.causes))
    assert share(slow, explained.verdict.lost_s) == pytest.approx(share(slow, saved_s), abs=2 * LARGEST_PRICE_ERROR)


def test_a_stage_of_which_all_are_slow_in_the_same_steps_has_no_slow_workers() -> None:
    shape = Shape(dp=4, pp=4, tp=1, microbatches=6, steps=24)
    causes = named(Job(shape=shape, causes=(SlowWorkers(stage_of(shape), 1.5, When(every=2)),)))
    assert not {"bad-worker", "slow-host", "slow-rank-group"} & {cause.kind for cause in causes}


def stage_of(shape: Shape) -> frozenset[tuple[int, int]]:
    return frozenset((rank, 1) for rank in range(shape.dp))


def test_what_hardly_any_step_shows_is_not_trusted() -> None:
    """Eight workers of a stage, each slow in nine steps of ten: a stage with more work looks like that, too."""
    of = Job(shape=Shape(dp=8, pp=2, tp=1, microbatches=6, steps=20), causes=at_random(8, 0.9, stage=1))
    explained = report(of)
    assert not explained.trust.trustworthy
    assert any("of stage 1 are slow in turn" in reason for reason in explained.trust.reasons)
    assert all(fix.withheld is not None for fix in explained.fixes if fix.cause is not None)


def test_a_host_of_which_two_workers_are_slow_in_turn_is_not_slow() -> None:
    """Each of two of its workers is slow in every second step, the one after the other."""
    shape = Shape(dp=4, pp=2, tp=4, microbatches=4, steps=12)
    turns = tuple(SlowWorkers(frozenset({(rank, 0)}), 1.5, When(every=2, phase=rank)) for rank in range(2))
    causes = named(Job(shape=shape, causes=turns))
    assert sorted((cause.kind, str(cause.where)) for cause in causes) == [
        ("bad-worker", "worker (0,0)"),
        ("bad-worker", "worker (1,0)"),
    ]


def test_the_only_host_of_a_job_is_not_slow_beside_others():
    """Two ranks of one host, the one slow in the first half of the steps, the other in the second."""
    halves = [
        SlowWorkers(frozenset({(0, 0)}), 1.5, When(until=15)),
        SlowWorkers(frozenset({(1, 0)}), 1.5, When(since=15)),
    ]
    slow = job(*halves, shape=Shape(dp=2, pp=1, tp=1, microbatches=4, steps=30))
    assert {(cause.kind, str(cause.where)) for cause in named(slow)} == {
        ("bad-worker", "worker (0,0)"),
        ("bad-worker", "worker (1,0)"),
    }
