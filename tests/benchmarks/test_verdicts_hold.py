"""Diagnosis of jobs of the event-driven simulator: causes in computes are named, placed, timed and priced."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.eventsim import LARGEST_PRICE_ERROR, judged_job
from judges.eventsim import draw_job, simulate
from tracekit.analysis.job.pipeline import PipelineJob

#: Cases of one cause in the computes, and a seed of each.
CASES_IN_COMPUTES = (
    ("P1", 20001),
    ("P1-bad-worker", 20001),
    ("P2-every-third", 20000),
    ("P2-last-40%", 20000),
    ("P2-bursts", 20001),
    ("P3", 20002),
    ("P6", 30000),
    ("P10", 20001),
    ("P12", 20000),
    ("P13", 20001),
)


@pytest.mark.slow
def test_a_cause_in_the_computes_is_named_with_place_time_and_price():
    for case, seed in CASES_IN_COMPUTES:
        judged = judged_job(seed, case)
        assert judged.must, case
        assert (judged.missed, judged.wrong) == ((), ()), case
        assert not any(cause.mistimed for cause in judged.right), case
        assert max(judged.cause_errors) < LARGEST_PRICE_ERROR, case
        assert max(judged.fix_errors, default=0.0) < LARGEST_PRICE_ERROR, case


def test_a_bad_worker_on_the_dp_rank_with_skewed_data_has_a_price_of_its_own():
    judged = judged_job(30002, "P1-bad-worker")
    assert {str(truth.kind) for truth in judged.recalled} == {"data-skew", "bad-worker"}
    assert max(judged.cause_errors) < LARGEST_PRICE_ERROR


def test_drifting_speeds_accuse_no_worker_and_have_no_fix():
    for seed in (20001, 30003):
        report = PipelineJob(simulate(draw_job(seed, "P14")).trace).whatif().to_dict()
        accused = {cause["kind"] for cause in report["causes"]} - {"random-variation", "healthy", "unexplained"}
        assert not accused, seed
        assert not any(fix["cause"] for fix in report["fixes"]), seed


def test_drifting_speeds_are_named_and_priced_as_random_variation():
    judged = judged_job(20001, "P14")
    assert [str(truth.kind) for truth in judged.recalled] == ["random-variation"]
    assert max(judged.cause_errors) < LARGEST_PRICE_ERROR


@pytest.mark.slow
def test_noise_accuses_no_worker():
    for case, seed in (("P15", 20000), ("P19", 20001), ("healthy-noisy", 20001)):
        assert not judged_job(seed, case).named, case


def test_the_price_of_a_cause_that_acts_at_times_is_also_given_for_those_steps():
    job = draw_job(20000, "P2-every-third")
    causes = PipelineJob(simulate(job).trace).whatif().to_dict()["causes"]
    worker = next(cause for cause in causes if cause["kind"] == "bad-worker")
    assert worker["when"] == "every 3 steps"
    share = float(np.mean(job.causes[0].when.mask(job.shape.steps)))
    assert worker["saved_when_acting_s"] == pytest.approx(worker["saved_s"] / share, rel=0.02)


@pytest.mark.slow
def test_a_worker_slow_by_chance_is_no_cause_and_the_next_check_gives_the_steps_needed():
    """Two ranks on busy cores, three steps of them."""
    for seed in range(20000, 20020):
        trace = simulate(draw_job(seed, "P19")).trace
        steps = np.unique(trace.ops["step"].to_numpy())[:3]
        short = PipelineJob(
            type(trace).from_frame(trace.ops.filter(trace.ops["step"].is_in(steps)), trace.layout, name="short")
        )
        causes = short.whatif().to_dict()["causes"]
        assert not [cause for cause in causes if cause["kind"] == "bad-worker"], seed
        checks = [cause["next_check"] for cause in causes if "steps would tell" in cause["next_check"]]
        if checks:
            assert "slower, where noise alone makes" in checks[0]
            return
    raise AssertionError("no job in which somebody looks slow by chance")
