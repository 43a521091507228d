"""Patterns in time and space, on series and maps written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.attribution.patterns import SpaceShape, TimeShape, pattern_of_series, space_pattern, time_pattern
from tracekit.analysis.replay.engine import JobReplay
from tracekit.synth import PythonGc, SequenceLengthImbalance, SlowHost, SlowLastStage, SlowWorker, SynthSpec, synthesize
from tracekit.trace.model import Layout, Worker

SPEC = SynthSpec(Layout(dp=6, pp=4, tp=4), steps=12, seed=5)


def noisy(series, seed=0, sigma=0.003):
    series = np.asarray(series, float)
    return series + np.random.default_rng(seed).normal(0, sigma, len(series))


def shape_of(series, steps=None):
    return pattern_of_series(noisy(series), list(range(len(series))) if steps is None else steps)


def attribution_of(*causes, **changes):
    trace = synthesize(replace(SPEC, causes=causes, **changes))
    hosts = {worker: trace.metadata["hosts"][str(rank)] for worker, rank in trace.worker_ranks().items()}
    return attribute(JobReplay.from_trace(trace)), hosts


class TestTime:
    def test_a_level_series_is_persistent_or_nothing(self):
        assert shape_of(np.full(20, 1.3)).shape is TimeShape.PERSISTENT
        assert shape_of(np.full(20, 1.0)).shape is TimeShape.NONE

    def test_a_jump_says_since_which_step(self):
        pattern = shape_of([1.02] * 12 + [1.25] * 8, steps=list(range(800, 820)))
        assert pattern.shape is TimeShape.CHANGED
        assert pattern.since_step == 812
        assert pattern.statistic > pattern.needed

    def test_a_jump_back_is_a_change_too(self):
        pattern = shape_of([1.4] * 9 + [1.02] * 11)
        assert (pattern.shape, pattern.since_step) == (TimeShape.CHANGED, 9)

    def test_a_steady_rise_is_a_drift(self):
        assert shape_of(1 + 0.02 * np.arange(20)).shape is TimeShape.DRIFTING

    def test_a_few_slow_steps_come_and_go(self):
        series = np.full(30, 1.05)
        series[[4, 17]] = 1.6
        pattern = shape_of(series)
        assert (pattern.shape, pattern.slow_steps) == (TimeShape.TRANSIENT, (4, 17))

    def test_what_is_there_in_all_steps_does_not_come_and_go_for_a_higher_one(self):
        series = np.full(30, 1.2)
        series[25] = 1.4
        assert shape_of(series).shape is TimeShape.PERSISTENT

    def test_every_fifth_step_is_a_period_even_where_steps_were_skipped(self):
        steps = np.array([*range(100, 120), *range(203, 223)])
        pattern = shape_of(np.where(steps % 5 == 0, 1.5, 1.02), steps=steps.tolist())
        assert (pattern.shape, pattern.period) == (TimeShape.PERIODIC, 5)

    @pytest.mark.slow
    def test_noise_has_no_shape(self):
        """Of a thousand noisy level series hardly any is called a change, a drift or a period."""
        shapes = [pattern_of_series(noisy(np.ones(20), seed, 0.01), list(range(20))).shape for seed in range(1000)]
        assert sum(shape is not TimeShape.NONE for shape in shapes) <= 20

    def test_two_steps_have_a_level_but_no_course(self):
        assert pattern_of_series(np.array([1.2, 1.9]), [1, 2]).shape is TimeShape.PERSISTENT

    @examples(25)
    @given(st.lists(st.floats(0.5, 5.0), min_size=1, max_size=40))
    def test_any_series_has_a_pattern(self, series):
        pattern = pattern_of_series(np.array(series), list(range(len(series))))
        assert set(pattern.slow_steps) <= set(range(len(series)))
        assert pattern.since_step is None or 0 < pattern.since_step < len(series)

    def test_of_a_job(self):
        attribution, _ = attribution_of(PythonGc(pause_s=0.05, rate=1.0, growth=0.4))
        assert time_pattern(attribution).shape is TimeShape.DRIFTING


class TestSpace:
    @pytest.mark.parametrize(
        ("causes", "shape", "workers"),
        [
            ((SlowWorker(dp_rank=4, pp_rank=1, factor=1.5),), SpaceShape.ONE_WORKER, {Worker(4, 1)}),
            ((SlowHost(host=1, factor=1.5),), SpaceShape.ONE_HOST, {Worker(2, 0), Worker(3, 0)}),
            ((SlowLastStage(factor=1.6),), SpaceShape.ONE_STAGE, {Worker(dp_rank, 3) for dp_rank in range(6)}),
            (
                tuple(SlowWorker(dp_rank=2, pp_rank=stage, factor=1.5) for stage in range(4)),
                SpaceShape.ONE_DP_RANK,
                {Worker(2, stage) for stage in range(4)},
            ),
            (
                tuple(SlowWorker(dp_rank=at, pp_rank=stage, factor=1.6) for at, stage in ((0, 0), (3, 2), (5, 1))),
                SpaceShape.SEVERAL_WORKERS,
                {Worker(0, 0), Worker(3, 2), Worker(5, 1)},
            ),
        ],
    )
    def test_the_map_shows_what_is_slow(self, causes, shape, workers):
        attribution, hosts = attribution_of(*causes)
        pattern = space_pattern(attribution, hosts)
        assert (pattern.shape, set(pattern.workers)) == (shape, workers)

    def test_a_host_is_named(self):
        attribution, hosts = attribution_of(SlowHost(host=1, factor=1.5))
        assert space_pattern(attribution, hosts).host == "host-0001"

    @pytest.mark.parametrize("cause", [PythonGc(pause_s=0.3, rate=0.1), SequenceLengthImbalance(quadratic_share=0.6)])
    def test_what_moves_from_step_to_step_is_diffuse(self, cause):
        attribution, hosts = attribution_of(cause)
        pattern = space_pattern(attribution, hosts)
        assert pattern.shape is SpaceShape.DIFFUSE
        assert pattern.stays < 0.5

    def test_a_healthy_map_has_no_shape(self):
        attribution, hosts = attribution_of()
        assert space_pattern(attribution, hosts).shape is SpaceShape.NONE


def test_pauses_that_wander_over_the_ranks_of_a_job_without_pipeline_are_diffuse():
    """All workers share one stage and one host there, which says nothing about where the pauses are."""
    spec = SynthSpec(layout=Layout(dp=8), steps=40, seed=5, causes=(PythonGc(),))
    replay = JobReplay.from_trace(synthesize(spec))
    one_host = {Worker(dp_rank, 0): "host" for dp_rank in range(8)}
    assert space_pattern(attribute(replay), one_host).shape is SpaceShape.DIFFUSE
