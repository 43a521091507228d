"""The simulator: hand-computed schedules, the identity with the replay, causes that show where they were injected."""

from __future__ import annotations

import itertools
import re

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import case
from tests.properties import examples
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import RECORDED, timelines
from tracekit.base.errors import LayoutError, SelectionError
from tracekit.synth import (
    CAUSES,
    BaseCosts,
    ClockOffset,
    FlappingNetwork,
    LateDataLoading,
    MissingRanks,
    MissingSteps,
    PythonGc,
    Schedule,
    SequenceLengthImbalance,
    SlowHost,
    SlowLastStage,
    SlowNic,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    SynthSpec,
    parse_cause,
    synthesize,
)
from tracekit.synth.injected_causes import JobShape
from tracekit.trace.canonical import Trace
from tracekit.trace.compute_order import compute_order
from tracekit.trace.model import Layout, OpKind

F, B = OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE
#: Whole and quarter seconds, so that a step can be worked out on paper.
PAPER = BaseCosts(
    forward_s=1, backward_s=2, p2p_s=0.25, all_gather_s=0.5, reduce_scatter_s=0.5, separate_s=0.25, layernorm_s=0.5,
    embedding_s=0.5, clip_s=0.25, optimizer_s=1, launch_delay_s=0,
)  # fmt: skip


def paper(**changes: object) -> Trace:
    spec = {"layout": Layout(), "microbatches": 2, "steps": 1, "noise": 0.0, "costs": PAPER} | changes
    return synthesize(SynthSpec(**spec))  # type: ignore[arg-type]


def times(trace: Trace, kind: OpKind, pp_rank: int = 0, dp_rank: int = 0) -> list[tuple[float, float]]:
    """(start, end) of the ops of a kind on a worker in its first step."""
    ops = trace.ops.filter(
        (pl.col("kind") == str(kind))
        & (pl.col("pp_rank") == pp_rank)
        & (pl.col("dp_rank") == dp_rank)
        & (pl.col("step") == pl.col("step").min())
    ).sort("seq")
    return [(start, start + duration) for start, duration in ops.select("start", "duration").iter_rows()]


def job(causes: tuple = (), **changes: object) -> Trace:
    spec = {"layout": Layout(dp=4, pp=4, tp=2), "steps": 8, "seed": 3, "causes": causes} | changes
    return synthesize(SynthSpec(**spec))  # type: ignore[arg-type]


def worst_difference(trace: Trace) -> float:
    """Largest relative difference between recorded timestamps and the replay of the recording."""
    replay = JobReplay.from_trace(trace)
    worst = 0.0
    for block, timeline in zip(replay.graph.blocks, timelines(replay, RECORDED), strict=True):
        for mine, recorded in ((timeline.start, block.start), (timeline.end, block.start + block.duration)):
            worst = max(worst, float((np.abs(mine - recorded) / np.maximum(np.abs(recorded), 1e-3)).max()))
    return worst


class TestSchedules:
    def test_1f1b_of_two_stages_runs_as_worked_out_on_paper(self):
        trace = paper(layout=Layout(pp=2))
        assert times(trace, F, 0) == [(0, 1), (1, 2)]
        assert times(trace, OpKind.FORWARD_SEND, 0) == [(1, 1.25), (2, 2.5)]
        assert times(trace, OpKind.FORWARD_RECV, 1) == [(0, 1.25), (2.25, 2.5)]
        assert times(trace, F, 1) == [(1.25, 2.25), (4.25, 5.25)]
        assert times(trace, B, 1) == [(2.25, 4.25), (5.25, 7.25)]
        assert times(trace, OpKind.BACKWARD_SEND, 1) == [(4.25, 4.5), (7.25, 7.5)]
        # The first backward recv is posted after the forward two computes before the first backward.
        assert times(trace, OpKind.BACKWARD_RECV, 0) == [(1, 4.5), (6.5, 7.5)]
        assert times(trace, B, 0) == [(4.5, 6.5), (7.5, 9.5)]
        assert times(trace, OpKind.LAYERNORM_GRADS_ALL_REDUCE, 1) == [(7.25, 7.75)]
        assert times(trace, OpKind.EMBEDDING_GRADS_ALL_REDUCE, 1) == [(7.75, 10.5)]
        assert times(trace, OpKind.EMBEDDING_GRADS_ALL_REDUCE, 0) == [(10, 10.5)]
        assert times(trace, OpKind.OPTIMIZER_CLIP_MAIN_GRAD, 1) == [(10.5, 10.75)]
        assert times(trace, OpKind.OPTIMIZER, 0) == [(10.75, 11.75)]

    def test_gpipe_of_two_stages_runs_as_worked_out_on_paper(self):
        trace = paper(layout=Layout(pp=2), schedule=Schedule.GPIPE)
        assert times(trace, F, 1) == [(1.25, 2.25), (2.5, 3.5)]
        assert times(trace, B, 1) == [(3.5, 5.5), (5.5, 7.5)]
        assert times(trace, B, 0) == [(5.75, 7.75), (8, 10)]

    def test_plain_gradient_reduction_waits_for_the_slowest_dp_rank(self):
        trace = paper(layout=Layout(dp=2), microbatches=1, causes=(SlowWorker(dp_rank=1, pp_rank=0, factor=2),))
        assert times(trace, OpKind.PARAMS_ALL_GATHER) == [(0, 0.5)]
        assert times(trace, B) == [(1.5, 3.5)]
        assert times(trace, B, dp_rank=1) == [(2.5, 6.5)]
        assert times(trace, OpKind.GRADS_REDUCE_SCATTER) == [(4, 7.5)]
        assert times(trace, OpKind.GRADS_REDUCE_SCATTER, dp_rank=1) == [(7, 7.5)]
        assert times(trace, OpKind.OPTIMIZER, dp_rank=1) == [(7.75, 9.75)]

    def test_overlapped_reduction_starts_with_the_last_backward_of_each_chunk(self):
        trace = paper(layout=Layout(dp=2, vpp=2), schedule=Schedule.INTERLEAVED, microbatches=1, overlap_dp=True)
        # Chunks of half a second forward and one second backward; each gathers for a quarter of a second.
        assert times(trace, OpKind.PARAMS_ALL_GATHER) == [(0, 0.25), (0.25, 0.5)]
        assert times(trace, F) == [(0.25, 0.75), (0.75, 1.25)]
        assert times(trace, B) == [(1.25, 2.25), (2.25, 3.25)]
        assert times(trace, OpKind.GRADS_REDUCE_SCATTER) == [(2.25, 2.5), (3.25, 3.5)]
        chunks = trace.ops.filter(pl.col("kind") == "grads-reduce-scatter").sort("seq")["chunk"].to_list()
        assert chunks == [1, 1, 0, 0], "the last chunk's backwards end first"
        assert times(trace, OpKind.LAYERNORM_GRADS_ALL_REDUCE) == [(3.5, 4)]
        assert times(trace, OpKind.SEPARATE_GRADS_ALL_REDUCE) == [(4, 4.25)]

    def test_interleaved_order_is_that_of_megatron(self):
        def written(stage: int, microbatches: int) -> str:
            order = compute_order(Schedule.INTERLEAVED, Layout(pp=2, vpp=2), microbatches, stage)
            return " ".join(f"{'BF'[part.forward]}{part.microbatch}{part.chunk}" for part in order)

        assert written(0, 2) == "F00 F10 F01 F11 B01 B11 B00 B10"
        assert written(1, 2) == "F00 F10 F01 B01 F11 B11 B00 B10"
        assert written(0, 4) == "F00 F10 F01 F11 F20 B01 F30 B11 F21 B00 F31 B10 B21 B31 B20 B30"

    def test_without_pipeline_or_data_parallelism_their_communication_is_absent(self):
        kinds = set(paper(layout=Layout(tp=2)).ops["kind"].to_list())
        assert kinds == {
            "forward-compute", "backward-compute", "gc", "layernorm-grads-all-reduce", "optimizer-clip-main-grad",
            "optimizer",
        }  # fmt: skip

    def test_layers_share_the_compute_of_the_job(self):
        trace = paper(layout=Layout(pp=2), layers=(3, 1))
        assert times(trace, F, 0)[0] == (0, 1.5)
        assert times(trace, F, 1)[0] == (1.75, 2.25)

    def test_the_loss_layer_costs_the_same_wherever_the_layers_are(self):
        loss = SlowLastStage(factor=1.5)
        for layers, expected_s in (((1, 1), 1.5), ((3, 1), 1.0)):
            start, end = times(paper(layout=Layout(pp=2), layers=layers, causes=(loss,)), F, 1)[0]
            assert end - start == pytest.approx(expected_s)


SHAPES = [
    ("1f1b", {"dp": 2, "pp": 2}, 4, {}),
    ("1f1b", {"dp": 3, "pp": 4, "tp": 2}, 2, {"overlap_dp": True}),
    ("1f1b", {"dp": 2, "dsp": 2, "pp": 2}, 4, {}),
    ("1f1b", {"pp": 4}, 1, {}),
    ("1f1b", {"dp": 4}, 3, {"overlap_dp": True}),
    ("1f1b", {}, 1, {}),
    ("gpipe", {"dp": 2, "pp": 4}, 5, {}),
    ("gpipe", {"dp": 2, "pp": 2}, 1, {"overlap_dp": True}),
    ("interleaved", {"dp": 2, "pp": 4, "vpp": 2}, 8, {"overlap_dp": True}),
    ("interleaved", {"dp": 2, "pp": 4, "vpp": 3}, 4, {}),
    ("interleaved", {"dp": 2, "pp": 4, "vpp": 3}, 8, {"record_no_ops": True}),
    ("interleaved", {"pp": 2, "vpp": 4}, 6, {"overlap_dp": True, "record_no_ops": True}),
    ("interleaved", {"dp": 2, "vpp": 2}, 3, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "causes", [(), (SequenceLengthImbalance(), PythonGc(rate=0.3), SlowWorker(), LateDataLoading(delay_s=0.02))]
)
def test_the_replay_of_a_recording_returns_every_timestamp(causes):
    for schedule, sizes, microbatches, more in SHAPES:
        spec = {"layout": Layout(**sizes), "schedule": Schedule(schedule), "microbatches": microbatches, **more}
        trace = job(causes, steps=3, **spec)
        with case(spec):
            assert worst_difference(trace) < 1e-9
            trust = attribute(JobReplay.from_trace(trace)).trust
            assert trust.replay_error < 1e-9
            if not causes:
                assert 0.002 < trust.discrepancy < 0.02, "launch delays of a healthy job"


@examples(10)
@given(
    pp=st.integers(1, 5), vpp=st.integers(1, 3), groups=st.integers(1, 3), dp=st.integers(1, 3),
    gpipe=st.booleans(), overlap=st.booleans(), no_ops=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_any_job_replays_to_its_recording(pp, vpp, groups, dp, gpipe, overlap, no_ops, seed):
    flat = Schedule.GPIPE if gpipe else Schedule.ONE_F_ONE_B
    trace = synthesize(
        SynthSpec(
            layout=Layout(dp=dp, pp=pp, vpp=vpp),
            schedule=Schedule.INTERLEAVED if vpp > 1 else flat,
            microbatches=pp * groups if vpp > 1 else groups,
            steps=2,
            overlap_dp=overlap,
            seed=seed,
            noise=0.1,
            record_no_ops=no_ops,
        )
    )
    assert worst_difference(trace) < 1e-9


def test_transfers_that_never_ran_are_told_from_short_ones_of_any_length():
    """All costs are scaled with the forward, so that transfers take 25, 6 and 1 us."""
    usual = BaseCosts()
    for (pp, vpp), forward_s in itertools.product(((2, 2), (2, 3), (4, 2)), (1e-3, 250e-6, 50e-6)):
        scaled = {name: getattr(usual, name) * forward_s / usual.forward_s for name in BaseCosts.__slots__}
        spec = SynthSpec(
            layout=Layout(dp=2, pp=pp, vpp=vpp),
            schedule=Schedule.INTERLEAVED,
            microbatches=2 * pp,
            steps=3,
            costs=BaseCosts(**scaled),
            record_no_ops=True,
        )
        assert worst_difference(synthesize(spec)) < 1e-9, (pp, vpp, forward_s)


class TestTrace:
    def test_the_same_spec_gives_the_same_trace_and_another_seed_another(self):
        causes = (SlowWorker(), PythonGc(), SequenceLengthImbalance(), FlappingNetwork())
        first, again, other = job(causes), job(causes), job(causes, seed=4)
        assert first.ops.equals(again.ops)
        assert first.metadata == again.metadata
        assert not first.ops["duration"].equals(other.ops["duration"])

    def test_removing_a_cause_leaves_the_rest_of_the_job_as_it_was(self):
        """The truth against which a fix is priced: the same job without the cause."""
        with_gc = job((PythonGc(), SlowWorker(), SequenceLengthImbalance()))
        without = job((SlowWorker(), SequenceLengthImbalance()))
        assert with_gc.metadata["labels"][1:] == without.metadata["labels"]
        backward = pl.col("kind") == "backward-compute"
        mine, reference = (trace.ops.filter(backward)["duration"].to_numpy() for trace in (with_gc, without))
        assert mine == pytest.approx(reference, rel=1e-9)

    def test_the_order_of_causes_does_not_matter(self):
        causes = (PythonGc(), SlowWorker(), SequenceLengthImbalance(), SlowSteps())
        ops, reordered = job(causes).ops, job(causes[::-1]).ops
        assert ops["duration"].to_numpy() == pytest.approx(reordered["duration"].to_numpy(), rel=1e-9, abs=1e-12)

    def test_more_microbatches_keep_the_cost_of_the_first_ones(self):
        few, many = job(microbatches=4), job(microbatches=8)
        first = (pl.col("kind") == "forward-compute") & (pl.col("microbatch") < 4)
        assert few.ops.filter(first)["duration"].to_numpy() == pytest.approx(
            many.ops.filter(first)["duration"].to_numpy(), rel=1e-9
        )

    def test_ranks_hosts_and_steps_are_those_of_a_sampled_job(self):
        trace = job(layout=Layout(dp=2, pp=2, tp=4), steps=12)
        assert trace.coverage().complete
        assert {(worker.dp_rank, worker.pp_rank): rank for worker, rank in trace.worker_ranks().items()} == {
            (0, 0): 0, (1, 0): 4, (0, 1): 8, (1, 1): 12,
        }  # fmt: skip
        assert trace.metadata["hosts"] == {"0": "host-0000", "4": "host-0000", "8": "host-0001", "12": "host-0001"}
        assert trace.steps.tolist() == [*range(100, 110), 200, 201]
        starts = [trace.step_starts[int(step)] for step in trace.steps]
        assert starts == sorted(starts)

    def test_labels_travel_through_the_file(self, tmp_path):
        from tracekit.trace.canonical import read_parquet

        trace = job((SlowWorker(dp_rank=1, pp_rank=2, factor=1.5), SlowSteps(position=3)))
        trace.write_parquet(tmp_path / "job.parquet")
        assert read_parquet(tmp_path / "job.parquet").metadata["labels"] == [
            {"cause": "slow-worker", "location": {"dp_rank": 1, "pp_rank": 2}, "strength": {"factor": 1.5}},
            {"cause": "slow-steps", "location": {"position": 3}, "strength": {"count": 2, "factor": 1.5}},
        ]

    def test_workers_differ_by_their_spread_in_all_steps_alike(self):
        trace = job(noise=0.0, worker_spread=0.05, layout=Layout(dp=64, pp=1))
        mean = (
            trace.ops.filter(pl.col("kind") == "forward-compute")
            .group_by("dp_rank")
            .agg(pl.col("duration").mean().alias("mean"), pl.col("duration").std().alias("std"))
        )
        assert 0.03 < mean["mean"].log().std() < 0.07
        assert mean["std"].max() < 1e-9

    def test_a_thousand_steps_of_eight_workers(self):
        trace = job(layout=Layout(dp=4, pp=2), steps=1000, microbatches=2)
        assert len(trace.steps) == 1000
        assert trace.coverage().complete


class TestCauses:
    """Each cause shows in the attribution where it was injected."""

    def test_a_slow_worker_is_the_slowest_worker_and_explains_the_loss(self):
        found = attribute(JobReplay.from_trace(job((SlowWorker(dp_rank=2, pp_rank=1, factor=2),))))
        assert found.slowdown > 1.4
        assert np.unravel_index(found.worker_slowdown.argmax(), found.worker_slowdown.shape) == (2, 1)
        assert found.m_w > 0.9

    def test_a_slow_host_slows_all_its_workers_and_no_other(self):
        trace = job((SlowHost(host=1, factor=2),), layout=Layout(dp=4, pp=4, tp=4))
        slow = attribute(JobReplay.from_trace(trace)).worker_slowdown > 1.3
        hosts = trace.metadata["hosts"]
        assert {
            (worker.dp_rank, worker.pp_rank)
            for worker, rank in trace.worker_ranks().items()
            if hosts[str(rank)] == "host-0001"
        } == {(int(dp_rank), int(pp_rank)) for dp_rank, pp_rank in zip(*slow.nonzero(), strict=True)}

    def test_a_slow_last_stage_explains_the_loss(self):
        found = attribute(JobReplay.from_trace(job((SlowLastStage(factor=1.6),))))
        assert found.stage_slowdown.argmax() == 3
        assert found.m_s > 0.9
        assert found.slowdown > 1.15

    def test_long_sequences_slow_forward_and_backward_together(self):
        found = attribute(JobReplay.from_trace(job((SequenceLengthImbalance(quadratic_share=0.6),))))
        assert found.slowdown > 1.15
        assert all(r is not None and r > 0.97 for r in found.correlation.values())
        assert found.m_s < 0.5

    def test_garbage_collection_touches_forwards_only_and_moves_about(self):
        found = attribute(JobReplay.from_trace(job((PythonGc(pause_s=0.3, rate=0.15),))))
        assert found.by_kind["forward-compute"].mean() > 1.2 * found.ideal_s
        assert found.by_kind["backward-compute"].mean() < 1.05 * found.ideal_s
        worst = found.by_worker.reshape(len(found.steps), -1).argmax(axis=1)
        assert len(set(worst.tolist())) > 2

    def test_pauses_of_a_leak_grow(self):
        trace = job((PythonGc(pause_s=0.1, rate=1.0, growth=1.0),), steps=4)
        longest = trace.ops.filter(pl.col("kind") == "forward-compute").group_by("step").agg(pl.max("duration"))
        assert longest.sort("step")["duration"].to_numpy() == pytest.approx([0.12, 0.22, 0.32, 0.42], abs=0.005)

    def test_a_slow_link_shows_on_both_its_ends_only(self):
        trace = job((SlowP2pLink(dp_rank=1, pp_rank=2, factor=100),))
        replay = JobReplay.from_trace(trace)
        cost, block = replay.durations.cost[0], replay.graph.blocks[0]
        slow = np.unique(np.argwhere(cost > 0.025)[:, 0])
        p2p = [row for row in slow if block.template.kind[row] in {OpKind(kind).code for kind in P2P_KINDS}]
        ends = {(str(P2P_BY_CODE[int(block.template.kind[row])]), int(block.template.pp_rank[row])) for row in p2p}
        assert ends == {("forward-send", 2), ("forward-recv", 3), ("backward-send", 3), ("backward-recv", 2)}
        assert {int(block.dp_rank[lane]) for row in p2p for lane in np.flatnonzero(cost[row] > 0.025)} == {1}
        assert attribute(replay).dp_rank_slowdown.argmax() == 1

    def test_a_slow_network_card_shows_on_the_collectives_of_its_worker(self):
        found = attribute(JobReplay.from_trace(job((SlowNic(dp_rank=3, pp_rank=1, factor=8),))))
        assert np.unravel_index(found.worker_slowdown.argmax(), found.worker_slowdown.shape) == (3, 1)
        times = found.by_kind
        assert sorted(times, key=lambda kind: times[kind].mean())[-2:] == ["params-all-gather", "grads-reduce-scatter"]

    def test_a_flapping_network_is_a_few_long_transfers(self):
        replay = JobReplay.from_trace(job((FlappingNetwork(rate=0.02, factor=400),)))
        found = attribute(replay)
        transfer_s = max(found.by_kind[kind].mean() for kind in ("forward-pp-comm", "backward-pp-comm"))
        assert transfer_s > 1.15 * found.ideal_s
        block = replay.graph.blocks[0]
        transfers = replay.durations.cost[0][np.isin(block.template.kind, [OpKind(kind).code for kind in P2P_KINDS])]
        assert 0.01 < (transfers > 0.1).mean() < 0.03

    def test_late_data_is_a_launch_delay_of_its_dp_rank(self):
        found = attribute(JobReplay.from_trace(job((LateDataLoading(dp_rank=2, delay_s=0.3),))))
        assert found.delayed_by_dp_rank.mean(axis=0).argmax() == 2
        assert found.trust.discrepancy > 0.05
        assert found.slowdown < 1.05

    def test_late_data_everywhere_is_late_on_all_dp_ranks(self):
        late = attribute(JobReplay.from_trace(job((LateDataLoading(delay_s=0.3, everywhere=True),))))
        assert (late.delayed_by_dp_rank.mean(axis=0) > late.ideal_s + 0.2).all()

    def test_slow_steps_are_slow_and_no_others(self):
        found = attribute(JobReplay.from_trace(job((SlowSteps(position=2, count=3, factor=2),))))
        # The ideal is the mean over all steps, slow ones included, so the others come out below 1.
        slow = found.original > 1.3 * np.median(found.original)
        assert np.flatnonzero(slow).tolist() == [2, 3, 4]

    def test_a_clock_offset_moves_one_rank_only(self):
        healthy = job()
        for offset_s in (0.005, -0.005):
            offset = job((ClockOffset(dp_rank=1, pp_rank=2, offset_s=offset_s),))
            moved = offset.ops["start"].to_numpy() - healthy.ops["start"].to_numpy()
            here = ((offset.ops["dp_rank"] == 1) & (offset.ops["pp_rank"] == 2)).to_numpy()
            assert moved[here] == pytest.approx(offset_s)
            assert (moved[~here] == 0).all()
            assert worst_difference(offset) < 1e-9

    def test_missing_ranks_and_steps_show_in_the_coverage(self):
        coverage = job((MissingRanks(dp_rank=1, pp_rank=3, count=2),)).coverage()
        assert [str(worker) for worker in coverage.missing_workers] == ["(1,3)", "(2,0)"]
        coverage = job((MissingSteps(dp_rank=1, pp_rank=3, position=2, count=3),)).coverage()
        assert coverage.worker_steps_expected - coverage.worker_steps_traced == 3
        assert coverage.missing_workers == ()

    def test_exactly_the_ops_of_missing_ranks_and_steps_are_missing(self):
        def workers_and_steps(*causes):
            return set(job(causes).ops.select(pl.col("dp_rank", "pp_rank", "step").cast(pl.Int64)).unique().rows())

        whole = workers_and_steps()
        steps, workers = sorted({step for *_, step in whole}), sorted({row[:2] for row in whole})
        lost = whole - workers_and_steps(MissingSteps(dp_rank=1, pp_rank=3, position=2, count=3))
        assert lost == {(1, 3, step) for step in steps[2:5]}
        lost = whole - workers_and_steps(MissingSteps(count=1, dp_rank=0, pp_rank=0, position=0))
        assert lost == {(0, 0, steps[0])}
        last = workers[-1]
        lost = whole - workers_and_steps(MissingRanks(dp_rank=last[0], pp_rank=last[1], count=2))
        assert lost == {(*worker, step) for worker in (last, workers[0]) for step in steps}

    def test_packed_lengths_have_the_long_tail_of_real_corpora(self):
        from tracekit.synth.injected_causes import PACKED_TOKENS, packed_squares

        squares = packed_squares(np.random.default_rng(0), 4000)
        assert squares.max() <= PACKED_TOKENS**2
        assert squares.min() > 0
        assert 0.4 < squares.std() / squares.mean() < 1.2


P2P_KINDS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
P2P_BY_CODE = {OpKind(kind).code: OpKind(kind) for kind in P2P_KINDS}


class TestText:
    def test_text_says_the_same_as_the_dataclass(self):
        assert parse_cause("slow-worker:dp=5,pp=2,factor=1.5") == SlowWorker(dp_rank=5, pp_rank=2, factor=1.5)
        assert parse_cause("python-gc") == PythonGc()
        assert parse_cause("late-data-loading:everywhere=true,delay_s=0.5") == LateDataLoading(None, 0.5, True)
        assert parse_cause(" clock-offset : offset_s = -0.004 ".replace(" ", "")) == ClockOffset(offset_s=-0.004)

    def test_every_cause_has_a_place_drawn_from_the_seed_and_a_label(self):
        shape = JobShape(Layout(dp=4, pp=4), 8, 8, (1,) * 4)
        for name in CAUSES:
            located = parse_cause(name).located(shape, np.random.default_rng(1))
            label = located.label()
            with case(name):
                assert located == parse_cause(name).located(shape, np.random.default_rng(1))
                assert label["cause"] == name
                assert all(isinstance(value, int) for value in label["location"].values())
                assert label["strength"]

    def test_a_cause_that_cannot_be_understood_says_what_is_known(self):
        for text, says in (
            ("slow-wroker", "unknown cause 'slow-wroker'; known: slow-worker"),
            ("slow-worker:rank=3", "'rank=3'; slow-worker takes dp_rank=..., pp_rank=..., factor=..."),
            ("slow-worker:factor", "'factor'; slow-worker takes"),
            ("slow-worker:dp=x", "dp_rank is 'x'; expected an integer"),
            ("slow-worker:factor=fast", "factor is 'fast'; expected a number"),
            ("slow-worker:factor=0.5", "factor is 0.5; expected 1 to 1e+06"),
            ("slow-worker:factor=nan", "factor is nan; expected 1 to 1e+06"),
            ("slow-worker:dp=1,dp_rank=2", "dp_rank is given twice"),
            ("python-gc:rate=1.5", "rate is 1.5; expected 0 to 1"),
            ("late-data-loading:everywhere=yes", "everywhere is 'yes'; expected true or false"),
        ):
            with case(text), pytest.raises(SelectionError, match=re.escape(says)):
                parse_cause(text)


class TestBadSpecs:
    def test_a_job_that_cannot_be_says_why(self):
        for changes, error, says in (
            ({"microbatches": 0}, SelectionError, "microbatches is 0; expected 1 to 10,000,000"),
            ({"steps": -1}, SelectionError, "steps is -1; expected 1 to 10,000,000"),
            ({"seed": -1}, SelectionError, "seed is -1"),
            ({"noise": 1.5}, SelectionError, "noise is 1.5; expected 0 to 1"),
            ({"noise": float("nan")}, SelectionError, "noise is nan"),
            ({"worker_spread": -0.1}, SelectionError, "worker_spread is -0.1"),
            ({"layers": (4, 4)}, SelectionError, "layers are (4, 4); expected 4 counts"),
            ({"layers": (4, 4, 4, 0)}, SelectionError, "expected 4 counts of 1 or more"),
            ({"layout": Layout(pp=2, vpp=2)}, LayoutError, "schedule 1f1b has one model chunk per stage"),
            ({"schedule": Schedule.INTERLEAVED}, LayoutError, "needs at least 2 model chunks per stage"),
            (
                {"schedule": Schedule.INTERLEAVED, "layout": Layout(pp=4, vpp=2), "microbatches": 6},
                LayoutError,
                "6 is not a multiple of pp 4; use 4 or 8",
            ),
            ({"causes": (SlowWorker(dp_rank=9),)}, SelectionError, "dp_rank is 9; the job has 4 of them"),
            (
                {"causes": (SlowHost(host=4),)},
                SelectionError,
                "host is 4; the job has 4 of them, so host must be 0 to 3",
            ),
            ({"causes": (SlowSteps(position=8),)}, SelectionError, "position is 8; the job has 8"),
            ({"causes": (SlowP2pLink(),), "layout": Layout(dp=2)}, SelectionError, "the job has no pp_rank"),
            ({"causes": (SlowNic(),), "layout": Layout(pp=2)}, SelectionError, "the job has no dp_rank"),
            ({"causes": (MissingRanks(count=16),)}, SelectionError, "the job has 16 workers, keep at least one"),
            (
                {"causes": (MissingSteps(position=0, count=8),), "layout": Layout()},
                SelectionError,
                "one worker and 8 steps, keep at least one",
            ),
        ):
            with case(changes), pytest.raises(error, match=re.escape(says)):
                job(**changes)
        with pytest.raises(SelectionError, match="forward_s is -1; expected 0 or more"):
            BaseCosts(forward_s=-1)
