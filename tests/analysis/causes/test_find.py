"""Causes: found where they were injected, and nothing named on healthy jobs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.analysis.causes.corpus import (
    STRENGTHS,
    VERDICTS,
    case_of,
    expected_kind,
    found_in,
    location_is_right,
    specs,
)
from tests.analysis.causes.disturbed import disturbed, one_worker
from tracekit.analysis.attribution.attribute import forward_backward_correlation
from tracekit.analysis.detectors.detector import own_detectors
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import step_times
from tracekit.collectors.importers.published import read_published
from tracekit.report.tables import plain
from tracekit.synth import (
    BaseCosts,
    ClockOffset,
    FlappingNetwork,
    LateDataLoading,
    MissingRanks,
    PythonGc,
    SequenceLengthImbalance,
    SlowHost,
    SlowLastStage,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    SynthSpec,
    synthesize,
)
from tracekit.trace.canonical import DEVICE_CLOCK, Trace, read_parquet
from tracekit.trace.model import Layout, Worker

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = ROOT / "sample_traces"
REFERENCE = Path(os.environ.get("TRACEKIT_PUBLISHED", ""))
SPEC = SynthSpec(Layout(dp=4, pp=4, tp=4), steps=10, seed=11)
#: Reasons for the clock of a GPU, as shares of its samples.
HOT, CAPPED = {"hw-thermal-slowdown": 0.75}, {"sw-power-cap": 0.9}


def job(*causes, **changes) -> Trace:
    return synthesize(replace(SPEC, causes=causes, **changes))


def of_gpus(trace: Trace, gpus: dict[str, dict[str, object]]) -> Trace:
    """The job with these samples of its GPUs, by rank."""
    return Trace.from_frame(trace.ops, trace.layout, name="job", metadata={"gpus": gpus})


def kinds(trace: Trace) -> list[str]:
    return [cause.kind for cause in found_in(trace)]


class TestEveryCause:
    """One job for each cause; how many of hundreds of drawn jobs are read right is a figure of `make bench`."""

    @pytest.mark.parametrize("cause", [strengths[1] for strengths in STRENGTHS], ids=lambda cause: cause.NAME)
    def test_it_is_found_where_it_is_and_nothing_else(self, cause):
        trace = job(cause)
        (label,) = trace.metadata["labels"]
        found = [one for one in found_in(trace) if one.kind not in VERDICTS]
        assert [one.kind for one in found] == [expected_kind(label, trace)]
        assert location_is_right(label, found[0], trace)


@pytest.mark.published
class TestPublished:
    def found(self, name):
        trace = read_published(REFERENCE / f"trace-{name}.parquet", REFERENCE / f"meta-{name}.yaml")
        return found_in(trace)

    def test_the_slowed_worker_is_the_only_cause_of_ar(self):
        (cause,) = self.found("AR")
        assert cause.kind == "bad-worker"
        assert cause.where.workers == (Worker(0, 0),)
        assert cause.confidence > 0.9

    def test_the_last_stage_is_the_only_cause_of_st(self):
        (cause,) = self.found("ST")
        assert cause.kind == "stage-imbalance"
        assert cause.where.pp_ranks == (3,)


class TestCollected:
    """The same job of four real processes, with and without one of them slowed by 6 ms in each forward."""

    def test_the_slowed_worker_is_the_only_cause_and_surely_so(self):
        (cause,) = found_in(read_parquet(SAMPLES / "collected.parquet"))
        assert (cause.kind, cause.where.workers) == ("bad-worker", (Worker(1, 1),))
        assert cause.confidence > 0.95
        # 6 ms of 8 + 16 ms that its peers' device time takes, and a little for their arithmetic.
        assert 6 / 27 < cause.evidence[0].value < 6 / 24

    def test_the_healthy_run_has_no_cause(self):
        assert kinds(read_parquet(SAMPLES / "collected_healthy.parquet")) == ["healthy"]


class TestSlowInOneKind:
    @pytest.mark.parametrize("layout", [Layout(dp=2, pp=2), Layout(dp=2), Layout(dp=4), Layout(dp=4, pp=2)], ids=str)
    @pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
    def test_the_worker_is_named_and_costs_what_the_job_loses(self, layout, kind):
        trace = job(layout=layout, noise=0.01)
        replay = JobReplay.from_trace(trace)
        slow = disturbed(replay, one_worker(replay, [kind], layout.pp - 1, 1, 1.7))
        (cause,) = causes_of(PipelineAssessment(PipelineSubject.of(trace, slow)))
        assert (cause.kind, cause.where.workers) == ("bad-worker", (Worker(1, layout.pp - 1),))
        assert cause.confidence > 0.95
        lost_s = (step_times(slow, ()) - step_times(replay, ())).mean()
        assert cause.saved_s == pytest.approx(lost_s, rel=0.03)


class TestTellingApart:
    def test_one_slow_worker_correlates_forward_and_backward_but_is_no_sequence_imbalance(self):
        trace = job(SlowWorker(dp_rank=1, pp_rank=2, factor=2))
        correlation = forward_backward_correlation(JobReplay.from_trace(trace))[2]
        assert correlation is not None
        assert correlation > 0.99, "above the published threshold of 0.9"
        assert kinds(trace) == ["bad-worker"]

    def test_imbalance_of_stage_and_of_sequences_hold_together(self):
        trace = job(SlowLastStage(factor=1.6), SequenceLengthImbalance(quadratic_share=0.5))
        assert set(kinds(trace)) == {"stage-imbalance", "sequence-length-imbalance"}

    def test_two_equally_slow_workers_that_hide_each_other_are_both_named(self):
        slow = (SlowWorker(dp_rank=0, pp_rank=1, factor=1.6), SlowWorker(dp_rank=3, pp_rank=2, factor=1.6))
        (cause,) = found_in(job(*slow))
        assert cause.where.workers == (Worker(0, 1), Worker(3, 2))

    def test_beside_a_slow_worker_one_that_costs_next_to_nothing_is_not_named(self):
        """A tenth more of the computes is a tenth more of the step, or hardly any where gradients take most of it."""
        slow = (SlowWorker(dp_rank=0, pp_rank=0, factor=1.5), SlowWorker(dp_rank=2, pp_rank=1, factor=1.1))
        gradients = BaseCosts(all_gather_s=1.2, reduce_scatter_s=1.2)
        computing, reducing = job(*slow, noise=0.01), job(*slow, noise=0.01, costs=gradients)
        assert [cause.where.workers for cause in found_in(computing)] == [(Worker(0, 0), Worker(2, 1))]
        assert [cause.where.workers for cause in found_in(reducing)] == [(Worker(0, 0),)]

    def test_causes_that_hide_each_other_cost_more_alone_than_fixing_one_saves(self):
        trace = job(SlowWorker(dp_rank=1, pp_rank=1, factor=1.6), SlowP2pLink(dp_rank=2, pp_rank=0, factor=80))
        found = {cause.kind: cause for cause in found_in(trace)}
        assert set(found) == {"bad-worker", "slow-p2p-link"}
        assert all(cause.alone_s > cause.saved_s for cause in found.values())

    def test_a_slow_host_is_named_once_and_not_by_its_workers(self):
        (cause,) = found_in(job(SlowHost(host=2, factor=1.5)))
        assert cause.kind == "slow-host"
        assert cause.where.host == "host-0002"
        assert cause.where.workers == (Worker(0, 1), Worker(1, 1))

    def test_without_hosts_in_the_metadata_the_workers_are_named(self):
        trace = job(SlowHost(host=2, factor=1.5))
        anonymous = replace(trace, metadata={})
        (cause,) = found_in(anonymous)
        assert cause.kind == "bad-worker"
        assert cause.where.workers == (Worker(0, 1), Worker(1, 1))

    @pytest.mark.parametrize("offset_s", [0.004, -0.012, 0.25])
    def test_a_wrong_clock_is_named_and_its_rank_not_blamed(self, offset_s):
        trace = job(ClockOffset(dp_rank=2, pp_rank=1, offset_s=offset_s))
        first, verdict = found_in(trace)
        assert first.kind == "clock-error"
        assert first.where.workers == (Worker(2, 1),)
        assert first.evidence[0].value == pytest.approx(abs(offset_s), rel=0.1)
        assert verdict.kind == "healthy"

    def test_a_slow_worker_is_found_behind_a_wrong_clock(self):
        trace = job(ClockOffset(dp_rank=2, pp_rank=1, offset_s=0.05), SlowWorker(dp_rank=0, pp_rank=3, factor=1.5))
        found = {cause.kind: cause.where.workers for cause in found_in(trace)}
        assert found == {"clock-error": (Worker(2, 1),), "bad-worker": (Worker(0, 3),)}

    def test_a_slow_worker_without_a_pipeline_is_found(self):
        trace = job(SlowWorker(dp_rank=5, pp_rank=0, factor=1.4), layout=Layout(dp=8, tp=8), microbatches=4)
        (cause,) = found_in(trace)
        assert (cause.kind, cause.where.workers) == ("bad-worker", (Worker(5, 0),))

    @pytest.mark.parametrize("dp", [2, 8])
    def test_uneven_sequences_without_a_pipeline_hide_no_slow_worker(self, dp):
        """No other stage shows what its microbatches cost: the worker stands out by its cheapest ones.

        With one peer and ten steps chance may make as much of it; then nobody is named.
        """
        causes = (SequenceLengthImbalance(quadratic_share=0.5), SlowWorker(dp_rank=1, pp_rank=0, factor=1.4))
        named = []
        for seed in range(4):
            found = found_in(job(*causes, layout=Layout(dp=dp), seed=seed, noise=0.03))
            named += [cause.where.workers for cause in found if cause.kind == "bad-worker"]
        assert set(named) == {(Worker(1, 0),)}
        assert len(named) >= (3 if dp == 2 else 4)

    @pytest.mark.slow
    def test_of_two_by_two_workers_uneven_sequences_bring_no_healthy_one_along(self):
        """What the worker across costs is as uncertain as what its microbatches cost."""
        for factor, fewest in ((1.3, 1), (1.6, 4)):
            causes = (SequenceLengthImbalance(quadratic_share=0.5), SlowWorker(dp_rank=1, pp_rank=0, factor=factor))
            jobs = [job(*causes, layout=Layout(dp=2, pp=2), seed=seed, microbatches=6) for seed in range(6)]
            found = [cause for trace in jobs for cause in found_in(trace) if cause.kind == "bad-worker"]
            assert {cause.where.workers for cause in found} == {(Worker(1, 0),)}
            assert len(found) >= fewest

    def test_late_data_names_its_dp_rank_and_late_data_everywhere_none(self):
        one = found_in(job(LateDataLoading(dp_rank=2, delay_s=0.3)))
        everywhere = found_in(job(LateDataLoading(delay_s=0.3, everywhere=True)))
        assert [(cause.kind, cause.where.dp_ranks) for cause in one] == [("late-data-loading", (2,))]
        assert [(cause.kind, cause.where.dp_ranks) for cause in everywhere] == [("late-data-loading", ())]

    def test_launch_delays_everywhere_are_a_host_that_cannot_keep_up(self):
        trace = job(costs=BaseCosts(launch_delay_s=0.002))
        assert kinds(trace) == ["host-bound-launch"]

    def test_long_forwards_are_no_garbage_collection_where_none_was_seen_in_them(self):
        trace = job(PythonGc(pause_s=0.3, rate=0.1))
        for nested, named in (({"gc": 10_000}, True), ({}, False), ("no counts", True)):
            again = Trace.from_frame(trace.ops, trace.layout, name="job", metadata={"collect": {"nested": nested}})
            assert ("python-gc" in kinds(again)) is named

    @pytest.mark.parametrize(
        ("own", "peers", "advice"),
        [
            ({"sm_mhz": {"median": 1980}}, {}, "ran at the clock of the others"),
            ({"sm_mhz": {"median": 1900}}, {}, "ran at the clock of the others"),  # 4 % of the 50 %
            ({"sm_mhz": {"median": 1320}}, {}, "Raise the GPU clocks of rank"),  # 1980 / 1320 is all of the 50 %
            ({"sm_mhz": {"median": 1320}, "reasons": HOT}, {}, "because the GPUs of ranks 36-39"),
            ({"sm_mhz": None, "reasons": HOT}, {}, "because the GPUs of ranks 36-39"),
            ({"sm_mhz": {"median": float("nan")}}, {}, "nvidia-smi -q -d PERFORMANCE"),
            ({"sm_mhz": "fast"}, {}, "nvidia-smi -q -d PERFORMANCE"),
            # Every GPU under load reaches its power cap, and a hot one that runs as fast as the others is not slow.
            ({"sm_mhz": {"median": 1980}, "throttled": 0.9, "reasons": CAPPED}, {}, "ran at the clock of the others"),
            ({"sm_mhz": {"median": 1980}, "reasons": HOT}, {}, "ran at the clock of the others"),
            # All GPUs are as hot, so heat does not explain why one is slow.
            ({"sm_mhz": None, "reasons": HOT}, {"reasons": HOT}, "nvidia-smi -q -d PERFORMANCE"),
            # No peer of its model.
            ({"model": "L40S", "sm_mhz": {"median": 1320}}, {}, "nvidia-smi -q -d PERFORMANCE"),
            # Its peers compute on the very same GPU.
            (
                {"sm_mhz": {"median": 1320}, "reasons": HOT, "uuid": "GPU-1"},
                {"uuid": "GPU-1"},
                "both compute on one GPU",
            ),
        ],
    )
    def test_gpus_are_blamed_only_against_others_of_their_model(self, own, peers, advice):
        trace = job(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5))
        ranks = trace.worker_ranks()
        usual = {"model": "H100", "throttled": 0.0, "sm_mhz": {"median": 1980}, "reasons": {}}
        gpus = {str(rank): {**usual, "uuid": f"GPU of {rank}", **peers} for rank in ranks.values()}
        slow = str(ranks[Worker(1, 2)])
        gpus[slow] = {**usual, "uuid": f"GPU of {slow}", **own}
        answer = PipelineJob(of_gpus(trace, gpus)).report.answer
        assert advice in answer.fix
        assert answer.culprits[0].hardware is ("because the GPUs" in advice)

    def test_a_worker_that_is_slow_in_its_forwards_alone_has_a_healthy_gpu(self):
        trace = job(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5))
        slow = str(trace.worker_ranks()[Worker(1, 2)])
        forwards_alone = trace.ops.with_columns(
            duration=pl.when(
                (pl.col("kind") == "backward-compute") & (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 2)
            )
            .then(pl.col("duration") / 1.5)
            .otherwise("duration")
        )
        gpus = {"0": {"model": "H100", "reasons": {}}, slow: {"model": "H100", "reasons": HOT}}
        both, alone = (of_gpus(replace(trace, ops=ops), gpus) for ops in (trace.ops, forwards_alone))
        answers = [PipelineJob(one).report.answer for one in (both, alone)]
        assert [answer.culprits[0].hardware for answer in answers] == [True, False]
        assert "what runs only there" in answers[1].fix

    def test_a_job_whose_gpus_timed_it_is_trusted_where_the_host_explains_all_gaps(self):
        trace = job(layout=Layout(dp=4, pp=1), costs=BaseCosts(launch_delay_s=0.004))
        on_gpus = Trace.from_frame(trace.ops, trace.layout, name="job", metadata={DEVICE_CLOCK: {}})
        reports = [PipelineJob(one).analysis.diagnosis for one in (trace, on_gpus)]
        assert [one.trust.trustworthy for one in reports] == [False, True]
        assert {one.verdict.kind for one in reports} == {"host-bound"}


class TestTime:
    def test_slow_steps_say_which_and_since_when(self):
        (cause,) = found_in(job(SlowSteps(position=6, count=2, factor=2)))
        assert cause.where.steps == (106, 107)
        assert cause.since_step == 106

    def test_a_leak_makes_pauses_drift(self):
        (cause,) = found_in(job(PythonGc(pause_s=0.05, rate=0.8, growth=0.3), steps=20))
        assert cause.kind == "python-gc"
        assert cause.time.shape == "drifting"


class TestVerdicts:
    def test_a_healthy_job_is_called_healthy(self):
        (cause,) = found_in(job())
        assert cause.kind == "healthy"
        assert cause.saved_s == 0

    def test_a_slow_job_without_a_known_signature_is_called_unexplained(self):
        (cause,) = found_in(job(noise=0.35))
        assert cause.kind == "unexplained"

    def test_missing_workers_and_single_steps_are_too_little(self):
        missing = found_in(job(MissingRanks(dp_rank=1, pp_rank=2)))[0]
        assert missing.kind == "too-little-trace"
        assert missing.where.workers == (Worker(1, 2),)
        assert found_in(job(steps=1))[0].kind == "too-little-trace"

    @pytest.mark.parametrize(
        ("layout", "microbatches"), [(Layout(), 1), (Layout(pp=4), 1), (Layout(dp=4), 1), (Layout(pp=3), 4)]
    )
    def test_the_smallest_jobs_are_healthy_too(self, layout, microbatches):
        found = kinds(job(layout=layout, microbatches=microbatches, steps=5))
        assert found == ["healthy"]

    def test_steps_of_different_structure_are_read_together(self):
        """Ranks that lack ops in some steps put those steps into a block of their own."""
        few = job(SlowWorker(dp_rank=1, pp_rank=2, factor=1.6), microbatches=4)
        many = job(SlowWorker(dp_rank=1, pp_rank=2, factor=1.6), microbatches=8)
        ops = few.ops.vstack(many.ops.with_columns((many.ops["step"] + 1000).alias("step")))
        trace = Trace.from_frame(ops, few.layout, name="two structures", metadata=dict(few.metadata))
        replay = JobReplay.from_trace(trace)
        assert len(replay.graph.blocks) == 2
        (cause,) = causes_of(PipelineAssessment(PipelineSubject.of(trace, replay)))
        assert (cause.kind, cause.where.workers) == ("bad-worker", (Worker(1, 2),))


class TestDeclared:
    def test_every_rule_says_what_the_paper_says_and_what_to_do_next(self):
        assert len({detector.kind for detector in own_detectors()}) == len(own_detectors())
        assert {detector.kind for detector in own_detectors()} > VERDICTS
        for one in own_detectors():
            assert "Paper:" in (type(one).__doc__ or ""), one.kind
            if one.kind in VERDICTS:
                continue
            for text in (one.title, one.signature, one.refuted_by, one.next_check, one.suggested_fix):
                assert text, one.kind

    def test_a_cause_is_plain_data(self):
        cause = found_in(job(SlowWorker(dp_rank=1, pp_rank=2, factor=2)))[0]
        found = plain(cause.finding)
        assert found["kind"] == "bad-worker"
        assert found["where"]["workers"] == [{"dp_rank": 1, "pp_rank": 2}]
        assert found["where_text"] == "worker (1,2)"
        assert found["saved_s"] > 0
        assert found["evidence"][0]["value"] == pytest.approx(1.0, abs=0.05)

    def test_the_order_of_rows_does_not_matter(self):
        trace = job(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5), PythonGc(pause_s=0.3, rate=0.1))
        shuffled = trace.ops.sample(fraction=1.0, shuffle=True, seed=5)
        again = Trace.from_frame(shuffled, trace.layout, name=trace.name, metadata=dict(trace.metadata))
        ours, theirs = found_in(trace), found_in(again)
        assert [cause.kind for cause in ours] == [cause.kind for cause in theirs]
        assert np.allclose([cause.saved_s for cause in ours], [cause.saved_s for cause in theirs], rtol=1e-9)


def test_pauses_stand_out_of_the_tail_of_noise_and_impossible_starts_of_steps_are_no_stalls():
    """Of 47 computes that stand out, 13 are paused by 0.25 s and the others by noise, forwards and backwards alike.

    The steps of this job are said to begin evenly spaced, some of them before the one before has ended.
    """
    spec = next(spec for spec in specs(8_100_000, 4, 0) if spec.seed == 8_100_085)
    assert [found.kind for found in found_in(case_of(spec).trace)] == ["python-gc"]


def test_a_slow_step_is_told_by_its_number_and_lasts_no_longer():
    (cause,) = found_in(job(SlowSteps(position=6, count=1, factor=2)))
    (step,) = cause.where.steps
    assert cause.when == f"in step {step}"


def test_single_transfers_that_take_long_act_again_and_again():
    (cause,) = found_in(synthesize(replace(SPEC, steps=20, causes=(FlappingNetwork(),))))
    assert (cause.kind, cause.when) == ("congestion", "again and again")
