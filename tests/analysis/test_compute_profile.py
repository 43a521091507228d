"""Factors of compute costs, clock offsets, and the grids they are read from."""

from __future__ import annotations

import warnings
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.analysis.changes import Scale, step_times_with
from tracekit.analysis.clocks import clock_offsets, with_clocks_set
from tracekit.analysis.compute_profile import BACKWARD, FORWARD, lower_median, median, profile_computes
from tracekit.analysis.compute_table import ComputeTable
from tracekit.analysis.job_replay import JobReplay
from tracekit.analysis.op_grid import op_grid, transfer_grid
from tracekit.model import Layout, OpKind
from tracekit.synth import (
    ClockOffset,
    MissingRanks,
    PythonGc,
    Schedule,
    SequenceLengthImbalance,
    SlowLastStage,
    SlowNic,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    SynthSpec,
    synthesize,
)

SPEC = SynthSpec(Layout(dp=4, pp=4, tp=4), steps=8, seed=31)


def replay_of(*causes, **changes) -> JobReplay:
    return JobReplay.from_trace(synthesize(replace(SPEC, causes=causes, **changes)))


def profile_of(*causes, **changes):
    return profile_computes(ComputeTable.of(replay_of(*causes, **changes)))


class TestMedians:
    @settings(max_examples=100, deadline=None)
    @given(seed=st.integers(0, 2**32), holes=st.floats(0, 0.9), axes=st.sampled_from([(0,), (1,), (0, 2), (1, 2)]))
    def test_with_holes_they_are_those_of_the_values_that_are_there(self, seed, holes, axes):
        rng = np.random.default_rng(seed)
        values = rng.normal(size=(3, 4, 5))
        values[rng.random(values.shape) < holes] = np.nan
        values[0, 0, 0] = 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert np.allclose(median(values, axes), np.nanmedian(values, axis=axes), equal_nan=True)
            lower = np.nanquantile(values, 0.5, axis=axes[0], method="lower")
        assert np.allclose(lower_median(values, axes[0]), lower, equal_nan=True)

    def test_the_lower_one_ignores_a_slow_half(self):
        assert lower_median(np.array([1.0, 9.0]), 0) == 1.0
        assert lower_median(np.array([1.0, 1.1, 9.0, 9.0]), 0) == 1.1


class TestFactors:
    def test_each_cause_moves_its_own_factor_only(self):
        healthy = profile_of()
        slow = profile_of(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5))
        assert slow.worker[2, 1] == pytest.approx(1.5, rel=0.02)
        others = np.ones((4, 4), bool)
        others[2, 1] = False
        assert slow.worker[others] == pytest.approx(1, abs=0.02)
        assert slow.stage_s == pytest.approx(healthy.stage_s, rel=0.02)
        assert slow.dp_rank == pytest.approx(1, abs=0.02)

        loss = profile_of(SlowLastStage(factor=1.5))
        assert loss.stage_s[:, 0] / loss.stage_s[0, 0] == pytest.approx([1, 1, 1, 1.5], rel=0.02)
        assert loss.worker == pytest.approx(1, abs=0.02)

        warm = profile_of(SlowSteps(position=0, count=2, factor=1.4))
        assert warm.step[:2] == pytest.approx(1.4, rel=0.03)
        assert warm.step[2:] == pytest.approx(1, abs=0.03)

    def test_pauses_are_measured_in_forwards_and_nowhere_else(self):
        causes = (PythonGc(pause_s=0.2, rate=0.2), SequenceLengthImbalance(quadratic_share=0.7))
        pause = profile_of(*causes).pause_s
        assert not pause[BACKWARD].any()
        found = pause[FORWARD][pause[FORWARD] > 0]
        assert len(found) > 10
        assert found == pytest.approx(0.2, abs=0.02)

    def test_microbatch_factors_are_those_that_were_injected(self):
        from tracekit.synth_job import JobShape, Seeded

        cause = SequenceLengthImbalance(quadratic_share=0.6)
        rng = np.random.default_rng([SPEC.seed, zlib.crc32(cause.NAME.encode()), 0])
        shape = JobShape(SPEC.layout, SPEC.steps, SPEC.microbatches, (1,) * 4)
        injected = cause.effect(Seeded(shape, rng)).factor.reshape(8, 8, 4)
        profile = profile_of(cause)
        assert profile.microbatch == pytest.approx(injected, rel=0.08)
        assert profile.length_correlation > 0.97

    def test_noise_alone_correlates_with_nothing(self):
        assert abs(profile_of(noise=0.05).length_correlation) < 0.2

    @pytest.mark.parametrize(
        "changes",
        [
            {"layout": Layout(dp=4, pp=2, vpp=2), "schedule": Schedule.INTERLEAVED, "microbatches": 4},
            {"layout": Layout(dp=4, pp=2, vpp=2), "schedule": Schedule.INTERLEAVED, "record_no_ops": True},
            {"layout": Layout(dp=4, pp=2), "schedule": Schedule.GPIPE},
            {"layout": Layout(dp=4)},
        ],
    )
    def test_a_slow_worker_in_any_schedule(self, changes):
        profile = profile_of(SlowWorker(dp_rank=1, pp_rank=0, factor=1.5), **changes)
        assert (profile.worker * profile.dp_rank)[0, 1] == pytest.approx(1.5, rel=0.03)


class TestGrids:
    @pytest.mark.parametrize("causes", [(), (MissingRanks(dp_rank=1, pp_rank=2),)])
    def test_the_table_holds_every_compute_once(self, causes):
        replay = replay_of(*causes)
        table = ComputeTable.of(replay)
        cells = table.grid[np.isfinite(table.grid)]
        own = [
            matrix[np.isin(block.template.kind, [OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code])].ravel()
            for block, matrix in zip(replay.graph.blocks, replay.durations.own, strict=True)
        ]
        assert np.array_equal(np.sort(cells), np.sort(np.concatenate(own)))

    def test_scaling_all_computes_scales_what_the_table_gathers(self):
        replay = replay_of(layout=Layout(dp=2, pp=2, vpp=2), schedule=Schedule.INTERLEAVED, microbatches=4)
        table = ComputeTable.of(replay)
        factor = np.random.default_rng(0).uniform(0.5, 2, table.shape)
        from tracekit.analysis.changes import Draft

        draft = Draft.recorded(replay)
        Scale(table, factor).make(draft)
        assert table.gather(draft.own) == pytest.approx(table.grid * factor)

    def test_a_change_by_one_changes_nothing(self):
        replay = replay_of(SlowWorker())
        same = step_times_with(replay, (Scale(ComputeTable.of(replay), np.ones((1,) * 6)),))
        assert np.array_equal(same, step_times_with(replay, ()))

    def test_transfers_are_found_by_link(self):
        replay = replay_of(SlowP2pLink(dp_rank=3, pp_rank=1, factor=50))
        grid = transfer_grid(replay)
        seconds = grid.gather(replay.durations.own)
        assert seconds.shape == (8, 8, 8, 4), "4 links x 2 directions, 8 microbatches, 8 steps, 4 DP ranks"
        assert np.isfinite(seconds).sum() == 3 * 2 * 8 * 8 * 4, "the wrap-around link is not used"
        assert np.argwhere(np.nan_to_num(np.median(seconds, axis=(1, 2))) > 0.01).tolist() == [[2, 3], [3, 3]]

    def test_collectives_are_found_by_stage(self):
        replay = replay_of(SlowNic(dp_rank=2, pp_rank=3, factor=5))
        grid = op_grid(replay, (OpKind.PARAMS_ALL_GATHER, OpKind.GRADS_REDUCE_SCATTER))
        seconds = grid.gather(replay.durations.own)
        assert seconds.shape == (4, 2, 8, 4)
        assert np.argwhere(np.median(seconds, axis=(1, 2)) > 0.1).tolist() == [[3, 2]]


class TestClocks:
    def test_an_offset_is_measured_and_taken_out(self):
        wrong = replay_of(ClockOffset(dp_rank=1, pp_rank=3, offset_s=0.02))
        offsets = clock_offsets(wrong)
        assert np.argwhere(offsets.offset_s).tolist() == [[3, 1]]
        assert offsets.offset_s[3, 1] == pytest.approx(0.02, abs=0.001)
        right = with_clocks_set(wrong, offsets.offset_s)
        healthy = replay_of()
        for mine, theirs in zip(right.durations.own, healthy.durations.own, strict=True):
            assert mine == pytest.approx(theirs, abs=0.001)

    @pytest.mark.parametrize("noise", [0.01, 0.05])
    def test_clocks_in_step_are_left_alone(self, noise):
        assert not clock_offsets(replay_of(noise=noise)).any

    def test_a_slow_worker_is_no_clock_error(self):
        assert not clock_offsets(replay_of(SlowWorker(factor=3))).any
