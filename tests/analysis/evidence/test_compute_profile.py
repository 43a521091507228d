"""Factors of compute costs, and the grids they are read from."""

from __future__ import annotations

import warnings
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.causes.disturbed import disturbed, one_worker, real_noise, table_of
from tests.properties import examples
from tracekit.analysis.attribution.attribute import forward_backward_correlation
from tracekit.analysis.evidence import computes
from tracekit.analysis.evidence.compute_profile import (
    BACKWARD,
    FORWARD,
    ComputeProfile,
    profile_computes,
)
from tracekit.analysis.evidence.computes import Computes, find_pauses
from tracekit.analysis.graph.op_grid import op_grid, transfer_grid
from tracekit.analysis.numeric.statistics import lower_median, median
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Scale, changed, step_times
from tracekit.synth import (
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
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, OpKind

SPEC = SynthSpec(Layout(dp=4, pp=4, tp=4), steps=8, seed=31)


def replay_of(*causes, **changes) -> JobReplay:
    return JobReplay.from_trace(synthesize(replace(SPEC, causes=causes, **changes)))


def profile_of(*causes, **changes):
    return profile_computes(table_of(replay_of(*causes, **changes)))


def workers_of(profile: ComputeProfile) -> np.ndarray:
    """Factor of each worker beside its peers, whoever it shares it with, [kinds, stages, dp_ranks]."""
    shared = profile.slow_rank if profile.slow_worker.shape[1] > 1 else 1.0
    return np.median(profile.slow_worker * shared, axis=2)


def in_parts(trace: Trace) -> Trace:
    """The same job with each forward and backward recorded as two ops, cut at three tenths of it."""
    split = pl.col("kind").is_in([str(OpKind.FORWARD_COMPUTE), str(OpKind.BACKWARD_COMPUTE)])
    computes, first = trace.ops.filter(split), 0.3 * pl.col("duration")
    parts = (
        computes.with_columns(seq=2 * pl.col("seq"), duration=first),
        computes.with_columns(
            seq=2 * pl.col("seq") + 1, start=pl.col("start") + first, duration=pl.col("duration") - first
        ),
    )
    return Trace.from_frame(pl.concat([trace.ops.filter(~split), *parts]), trace.layout, name="in parts")


class TestComputesInParts:
    """A compute that waited for a collective in its middle is one compute."""

    TRACE = synthesize(
        replace(SPEC, layout=Layout(dp=4, pp=1), causes=(SlowWorker(dp_rank=2, pp_rank=0), SequenceLengthImbalance()))
    )

    def test_they_have_the_factors_of_whole_ones(self):
        whole, parts = (
            profile_computes(table_of(JobReplay.from_trace(one))) for one in (self.TRACE, in_parts(self.TRACE))
        )
        np.testing.assert_allclose(parts.worker_by_step, whole.worker_by_step, rtol=1e-9)
        np.testing.assert_allclose(parts.base_s, whole.base_s, rtol=1e-9)
        assert parts.length_correlation == pytest.approx(whole.length_correlation)

    def test_a_change_is_made_to_all_parts(self):
        whole, parts = (JobReplay.from_trace(one) for one in (self.TRACE, in_parts(self.TRACE)))
        steps = []
        for replay in (whole, parts):
            table = table_of(replay)
            steps.append(step_times(replay, [Scale(table, np.linspace(0.5, 2, table.shape[3])[:, None, None])]))
        np.testing.assert_allclose(steps[1], steps[0], rtol=1e-9)

    def test_forwards_correlate_with_backwards_as_whole_ones_do(self):
        whole, parts = (
            forward_backward_correlation(JobReplay.from_trace(one)) for one in (self.TRACE, in_parts(self.TRACE))
        )
        assert parts[0] == pytest.approx(whole[0])


class TestMedians:
    @examples(40)
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
        expected = np.ones((2, 4, 4))
        expected[:, 2, 1] = 1.5
        assert workers_of(slow) == pytest.approx(expected, rel=0.02)
        assert slow.stage_s == pytest.approx(healthy.stage_s, rel=0.02)
        assert slow.rank_by_step == pytest.approx(1, abs=0.03)

        loss = profile_of(SlowLastStage(factor=1.5))
        assert loss.stage_s[:, 0] / loss.stage_s[0, 0] == pytest.approx([1, 1, 1, 1.5], rel=0.02)
        assert workers_of(loss) == pytest.approx(1, abs=0.02)

        warm = profile_of(SlowSteps(position=0, count=2, factor=1.4))
        assert warm.step[:2] == pytest.approx(1.4, rel=0.03)
        assert warm.step[2:] == pytest.approx(1, abs=0.03)

    def test_pauses_are_measured_in_forwards_and_nowhere_else(self):
        causes = (PythonGc(pause_s=0.2, rate=0.2), SequenceLengthImbalance(quadratic_share=0.7))
        pause = Computes(replay_of(*causes)).pauses.seconds
        assert not pause[BACKWARD].any()
        found = pause[FORWARD][pause[FORWARD] > 0]
        assert len(found) > 10
        assert found == pytest.approx(0.2, abs=0.02)

    def test_of_a_large_job_a_sample_and_the_suspects_show_whether_there_are_pauses(self, monkeypatch):
        """Of four DP ranks the first and the suspects are looked at: pauses of another one are not seen in them."""
        table, healthy = (table_of(replay_of(*causes)) for causes in ((PythonGc(pause_s=0.2, rate=0.2),), ()))
        nobody = np.zeros((table.grid.shape[1], table.grid.shape[-1]), np.bool_)
        whole = find_pauses(table, nobody)
        monkeypatch.setattr(computes, "LARGEST_SAMPLE", 1)
        assert np.array_equal(find_pauses(table, nobody).seconds, whole.seconds)
        none = find_pauses(healthy, nobody)
        assert not none.seconds.any()
        assert not none.stopped.any()
        assert (none.seconds.shape, none.stopped.shape, none.own_length) == (healthy.grid.shape, nobody.shape, False)
        later = SimpleNamespace(grid=np.where(np.arange(table.grid.shape[-1]) == 3, table.grid, healthy.grid))
        assert (find_pauses(later, nobody).seconds > 0).sum() == 0
        suspect = nobody.copy()
        suspect[0, 3] = True
        seen = find_pauses(later, suspect).seconds
        assert (seen > 0).any()
        assert not np.delete(seen, 3, axis=-1).any()

    def test_microbatch_factors_are_those_that_were_injected(self):
        from tracekit.synth.injected_causes import JobShape

        cause = SequenceLengthImbalance(quadratic_share=0.6)
        rng = np.random.default_rng([SPEC.seed, zlib.crc32(cause.NAME.encode()), 0])
        shape = JobShape(SPEC.layout, SPEC.steps, SPEC.microbatches, (1,) * 4)
        injected = cause.factor(shape, rng).reshape(8, 8, 4)
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
        assert workers_of(profile)[:, 0, 1] == pytest.approx(1.5, rel=0.03)


#: Few peers: with two DP ranks the middle of the peers lies between the fast and the slow one.
SHAPES = [Layout(dp=2, pp=2), Layout(dp=2), Layout(dp=4), Layout(dp=3, pp=4), Layout(dp=2, pp=2, vpp=2)]


def job_of(layout: Layout, **changes) -> JobReplay:
    schedule = Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B
    return replay_of(layout=layout, schedule=schedule, microbatches=4, **changes)


class TestWorkersSlowInOneKind:
    @pytest.mark.parametrize("layout", SHAPES, ids=str)
    @pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
    @pytest.mark.parametrize("at", ["first", "last"])
    def test_that_kind_of_that_worker_has_the_factor_and_nothing_else(self, layout, kind, at):
        stage, dp_index = (0, 0) if at == "first" else (layout.pp - 1, layout.dp - 1)
        replay = job_of(layout, steps=12, noise=0.01)
        slow = disturbed(replay, one_worker(replay, [kind], stage, dp_index, 1.6))
        computes = Computes(slow)
        expected = np.ones((2, layout.pp, layout.dp))
        expected[kind, stage, dp_index] = 1.6
        assert workers_of(computes.profile) == pytest.approx(expected, rel=0.02)
        assert not computes.pauses.of_processes
        assert not computes.pauses.spare_backwards

    @pytest.mark.parametrize("layout", SHAPES, ids=str)
    def test_all_stages_of_a_dp_rank_slow_in_backwards_make_nobody_elses_forwards_slow(self, layout):
        replay = job_of(layout, steps=12, noise=0.01)
        factor = np.ones(table_of(replay).shape)
        factor[BACKWARD, ..., 1] = 1.5
        profile = profile_computes(table_of(disturbed(replay, factor)))
        both = workers_of(profile)
        assert both[BACKWARD, :, 1] == pytest.approx(1.5, rel=0.02)
        both[BACKWARD, :, 1] = 1
        assert both == pytest.approx(1, abs=0.02)


class TestRealNoise:
    @pytest.mark.parametrize("layout", SHAPES, ids=str)
    def test_wandering_and_heavy_tails_are_no_slow_worker_and_hide_none(self, layout):
        """Two workers alone cannot always tell a walk of 24 steps from a level: then none is named."""
        replay, right = job_of(layout, steps=24, noise=0.01), 0
        for seed in range(5):
            noise = real_noise(replay, seed)
            healthy = profile_computes(table_of(disturbed(replay, noise)))
            assert not self.named(healthy).any(), seed
            slow = noise * one_worker(replay, [FORWARD, BACKWARD], 0, 1, 1.25)
            named = self.named(profile_computes(table_of(disturbed(replay, slow))))
            right += np.argwhere(named).tolist() == [[0, 1]]
        assert right >= (4 if layout.dp == 2 else 5)

    @staticmethod
    def named(profile) -> np.ndarray:
        return profile.slow_workers | profile.slow_ranks[None]

    def test_a_worker_that_slows_down_for_good_is_no_noise(self):
        replay = job_of(Layout(dp=4, pp=2), steps=24, noise=0.01)
        factor = np.ones(table_of(replay).shape)
        factor[:, 1, :, :, 8:, 2] = 1.4
        profile = profile_computes(table_of(disturbed(replay, factor)))
        assert np.argwhere(self.named(profile)).tolist() == [[1, 2]]
        assert np.argwhere(profile.slow_steps[1, :, 2]).ravel().tolist() == list(range(8, 24)), "and it says since when"


class TestGrids:
    @pytest.mark.parametrize("causes", [(), (MissingRanks(dp_rank=1, pp_rank=2),)])
    def test_the_table_holds_every_compute_once(self, causes):
        replay = replay_of(*causes)
        table = table_of(replay)
        cells = table.grid[np.isfinite(table.grid)]
        own = [
            matrix[np.isin(block.template.kind, [OpKind.FORWARD_COMPUTE.code, OpKind.BACKWARD_COMPUTE.code])].ravel()
            for block, matrix in zip(replay.graph.blocks, replay.durations.cost, strict=True)
        ]
        assert np.array_equal(np.sort(cells), np.sort(np.concatenate(own)))

    def test_scaling_all_computes_scales_what_the_table_gathers(self):
        replay = replay_of(layout=Layout(dp=2, pp=2, vpp=2), schedule=Schedule.INTERLEAVED, microbatches=4)
        table = table_of(replay)
        factor = np.random.default_rng(0).uniform(0.5, 2, table.shape)
        blocks = changed(replay, (Scale(table, factor),)).cost
        assert table.gather([block.matrix() for block in blocks]) == pytest.approx(table.grid * factor)

    def test_a_change_by_one_changes_nothing(self):
        replay = replay_of(SlowWorker())
        same = step_times(replay, (Scale(table_of(replay), np.ones((1,) * 6)),))
        assert np.array_equal(same, step_times(replay, ()))

    def test_transfers_are_found_by_link(self):
        replay = replay_of(SlowP2pLink(dp_rank=3, pp_rank=1, factor=50))
        grid = transfer_grid(replay.graph)
        seconds = grid.gather(replay.durations.cost)
        assert seconds.shape == (8, 8, 8, 4), "4 links x 2 directions, 8 microbatches, 8 steps, 4 DP ranks"
        assert np.isfinite(seconds).sum() == 3 * 2 * 8 * 8 * 4, "the wrap-around link is not used"
        assert np.argwhere(np.nan_to_num(np.median(seconds, axis=(1, 2))) > 0.01).tolist() == [[2, 3], [3, 3]]

    def test_collectives_are_found_by_stage(self):
        replay = replay_of(SlowNic(dp_rank=2, pp_rank=3, factor=5))
        grid = op_grid(replay.graph, (OpKind.PARAMS_ALL_GATHER, OpKind.GRADS_REDUCE_SCATTER))
        seconds = grid.gather(replay.durations.cost)
        assert seconds.shape == (4, 2, 8, 4)
        assert np.argwhere(np.median(seconds, axis=(1, 2)) > 0.1).tolist() == [[3, 2]]


class TestNoiseInOneKind:
    """Two ranks, 32 steps; the backwards of each vary by 12 % from step to step, the forwards by 2 %."""

    REPLAY = JobReplay.from_trace(synthesize(SynthSpec(Layout(dp=2, pp=1), steps=32, microbatches=2, seed=5)))

    def noise(self, seed: int) -> np.ndarray:
        spread = np.array([0.02, 0.12])[:, None, None]
        steps, dp_ranks = table_of(self.REPLAY).shape[-2:]
        logs = spread * np.random.default_rng(seed).normal(size=(2, steps, dp_ranks))
        return np.exp(logs)[:, None, None, None]

    @pytest.mark.parametrize("seed", range(4))
    def test_slow_forwards_show_whatever_the_backwards_do(self, seed):
        slow = one_worker(self.REPLAY, [FORWARD], 0, 1, 1.15)
        profile = profile_computes(table_of(disturbed(self.REPLAY, slow * self.noise(seed))))
        assert profile.slow_workers.tolist() == [[False, True]]
        assert float(profile.slow_worker[FORWARD, 0, :, 1].mean()) == pytest.approx(1.15, abs=0.02)

    @pytest.mark.parametrize("seed", range(4))
    def test_noise_of_one_kind_names_nobody(self, seed):
        profile = profile_computes(table_of(disturbed(self.REPLAY, self.noise(seed))))
        assert not profile.slow_workers.any()
