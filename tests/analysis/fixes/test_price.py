"""Fixes: predicted step times against the simulated truth, plans against exhaustive search."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from msgspec import structs

import tracekit
from benchmarks.eventsim import judged_job
from judges.eventsim.cases import draw_job
from judges.eventsim.run import simulate
from tests.analysis.fixes.price_truth import checked_fixes
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.diagnosis.diagnosis import diagnose
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
from tracekit.analysis.diagnosis.price import fixes_of
from tracekit.analysis.evidence.computes import Computes
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.fixes import fewest_that_suffice, split_again
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import step_times
from tracekit.base.errors import SelectionError
from tracekit.report.tables import plain
from tracekit.synth import (
    BaseCosts,
    LateDataLoading,
    PythonGc,
    SequenceLengthImbalance,
    SlowLastStage,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    SynthSpec,
    synthesize,
)
from tracekit.trace.model import Layout

SPEC = SynthSpec(Layout(dp=4, pp=4, tp=4), steps=10, seed=21)


def assessed(*causes, **changes):
    trace = synthesize(replace(SPEC, causes=causes, **changes))
    replay = JobReplay.from_trace(trace)
    return PipelineAssessment(PipelineSubject(trace, replay, replay, partial(attribute, replay), Computes(replay)))


def fixes(*causes, **changes):
    evidence = assessed(*causes, **changes)
    return {fix.kind: fix for fix in reversed(fixes_of(evidence, causes_of(evidence)))}


class TestPrices:
    @pytest.mark.slow
    def test_predicted_step_times_are_those_of_the_fixed_jobs(self):
        """Held-out seeds; each fixed job is simulated with the same seed and the cause removed."""
        checked = list(checked_fixes(first_seed=660_000, repeats=1))
        errors = np.array([each.error for each in checked])
        kinds = {each.fix.kind for each in checked}
        assert kinds == {
            "replace-workers", "drain-host", "repartition-stages", "balance-sequences", "planned-gc", "steady-steps",
            "repair-link", "repair-nic", "calm-network", "prefetch-data", "compress-dp-communication",
            "shift-work-from-slow-worker",
        }  # fmt: skip
        assert np.median(errors) < 0.03
        worst = checked[int(errors.argmax())]
        assert errors.max() < 0.08, f"{worst.fix.title}: {worst.fix.new_step_s} for {worst.truth_s}, {worst.spec}"

    def test_a_job_without_changes_takes_what_it_took(self):
        evidence = assessed(SlowWorker(factor=1.5))
        assert evidence.job.unchanged_s == pytest.approx(evidence.job.attribution.recorded_s, rel=0.01)

    def test_pricing_changes_no_recorded_cost(self):
        evidence = assessed(SlowWorker(factor=1.5), PythonGc(pause_s=0.3), LateDataLoading())
        before = [cost.copy() for cost in evidence.job.replay.durations.cost]
        delays = [delay.copy() for delay in evidence.job.replay.durations.launch_delay]
        fixes_of(evidence, causes_of(evidence))
        for mine, recorded in zip(before, evidence.job.replay.durations.cost, strict=True):
            assert np.array_equal(mine, recorded)
        for mine, recorded in zip(delays, evidence.job.replay.durations.launch_delay, strict=True):
            assert np.array_equal(mine, recorded)

    def test_bounds_are_marked_and_come_after_what_can_be_had(self):
        found = list(fixes(SlowWorker(factor=2)).values())
        assert {fix.kind for fix in found if fix.bound} >= {"overlap-dp-communication", "more-microbatches"}

    def test_compression_and_overlap_bound_each_other(self):
        found = fixes(costs=BaseCosts(all_gather_s=0.1, reduce_scatter_s=0.1))
        assert found["compress-dp-communication"].saved_s == pytest.approx(
            found["overlap-dp-communication"].saved_s / 2, rel=0.05
        )
        assert found["compress-dp-communication"].saved_s == pytest.approx(0.1, rel=0.1)

    def test_garbage_planned_less_often_costs_less(self):
        fix = fixes(PythonGc(pause_s=0.4, rate=0.2))["planned-gc"]
        sweep = [entry["new_step_s"] for entry in fix.details["sweep"]]
        assert sweep == sorted(sweep, reverse=True)
        assert sweep[0] - sweep[1] == pytest.approx(0.2, rel=0.05), "a pause of 0.4 s every step or every second"

    def test_gpu_hours_follow_from_the_saved_share(self):
        fix = fixes(SlowWorker(factor=2))["replace-workers"]
        step_s = fix.new_step_s + fix.saved_s
        assert fix.saved_gpu_hours_per_day == pytest.approx(fix.saved_s / step_s * 64 * 24)


class TestPromises:
    def test_nothing_is_promised_below_its_error(self):
        # Pauses in a few steps only: what one gets back varies from step to step.
        evidence = assessed(PythonGc(pause_s=0.15, rate=0.01), SlowWorker(factor=1.2), steps=6)
        for fix in fixes_of(evidence, causes_of(evidence)):
            assert (fix.withheld is None) == (fix.saved_s >= fix.error_s)

    def test_nothing_is_promised_where_launch_delays_stay_unexplained(self):
        evidence = assessed(SlowWorker(factor=2), costs=BaseCosts(launch_delay_s=0.004))
        withheld = fixes_of(evidence, [])
        assert withheld
        assert all("no cause explains" in (fix.withheld or "") for fix in withheld)
        shown = withheld[0].fix
        assert (shown.saved_s, shown.new_step_s) == (None, None)

    def test_a_cause_that_explains_more_than_the_launch_delays_withholds_nothing(self):
        """Delays of some ops can be negative, so one cause may explain more than all of them add up to."""
        evidence = assessed(SlowWorker(factor=2), LateDataLoading(delay_s=0.4))
        found = causes_of(evidence)
        late = [structs.replace(cause, saved_s=evidence.job.attribution.original_s) for cause in found]
        assert all("no cause explains" not in (fix.withheld or "") for fix in fixes_of(evidence, late))

    def test_launch_delays_that_late_data_explains_withhold_nothing(self):
        found = fixes(LateDataLoading(delay_s=0.4))
        assert found["prefetch-data"].withheld is None

    def test_a_healthy_job_has_nothing_to_repair(self):
        assert set(fixes()) <= {"compress-dp-communication", "overlap-dp-communication", "more-microbatches"}


class TestPlans:
    def test_the_layers_are_split_as_the_loss_layer_demands(self):
        found = fixes(SlowLastStage(factor=1.5), layers=(8, 8, 8, 8))
        fix = found["repartition-stages"]
        # 32 layers + a loss of 4 layers' cost over 4 stages: 9, 9, 9 and 5 + 4.
        assert fix.details["layers_then"] == [9, 9, 9, 5]
        assert fix.details["layers_assumed"] is False
        assert fix.details["loss_s"] / fix.details["layer_s"] == pytest.approx(4, rel=0.02)
        assert sum(fix.details["loss_alone"]["layers"]) == 32

    def test_layers_given_by_the_user_win(self):
        evidence = assessed(SlowLastStage(factor=1.5))
        causes = causes_of(evidence)
        given = {fix.kind: fix for fix in fixes_of(structs.replace(evidence, layers=(4, 4, 4, 4)), causes)}
        assert sum(given["repartition-stages"].details["layers_then"]) == 16
        with pytest.raises(SelectionError, match="expected 4 counts"):
            fixes_of(structs.replace(evidence, layers=(9, 9, 9)), causes)

    @pytest.mark.parametrize("cause", [SlowWorker(dp_rank=1, pp_rank=2, factor=1.8), SlowLastStage(factor=1.5)])
    def test_a_split_is_named_only_where_somebody_stated_the_layers(self, cause):
        evidence = assessed(cause)
        named = causes_of(evidence)
        guessed = fixes_of(evidence, named)
        assert not any("layers_then" in fix.details or "split" in fix.title.lower() for fix in guessed)
        stated = fixes_of(structs.replace(evidence, layers=(8, 8, 8, 8)), named)
        assert any("split the layers" in fix.title.lower() for fix in stated)

    def test_where_layers_are_unknown_a_fix_says_how_much_less_work(self):
        """A worker of 1.6 in one of four stages: its stage takes (1 / 1.6) / (3 + 1 / 1.6) of the work."""
        evidence = assessed(SlowWorker(dp_rank=1, pp_rank=2, factor=1.6))
        fix = next(fix for fix in fixes_of(evidence, causes_of(evidence)) if "work_then" in fix.details)
        then, now = np.array(fix.details["work_then"]), np.array(fix.details["work_now"])
        assert then[2] / now[2] == pytest.approx(4 / 1.6 / (3 + 1 / 1.6), rel=0.03)
        assert then.sum() == pytest.approx(now.sum()), "work is moved, not saved"
        assert "move layers off stage 2: about 31% less work there" in fix.title
        assert fix.assumes is not None
        # What whole layers can reach of it.
        split = next(
            other
            for other in fixes_of(structs.replace(evidence, layers=(16,) * 4), causes_of(evidence))
            if "layers_then" in other.details
        )
        assert fix.new_step_s == pytest.approx(split.new_step_s, rel=0.02)

    def test_every_fix_says_what_its_price_assumes_and_how_sure_its_cause_is(self):
        evidence = assessed(SlowWorker(factor=2), PythonGc(pause_s=0.3, rate=0.1))
        causes = {cause.kind: cause for cause in causes_of(evidence)}
        found = fixes_of(evidence, list(causes.values()))
        by_kind = {fix.kind: plain(fix.fix) for fix in reversed(found)}
        assert by_kind["replace-workers"]["assumes"] is None  # its title says it
        assert by_kind["replace-workers"]["title"].endswith(" as fast as its peers")
        assert by_kind["planned-gc"]["assumes"] == "collections as long as now"
        assert by_kind["compress-dp-communication"]["assumes"] == "transfer time follows bytes"
        assert (
            by_kind["compress-dp-communication"]["cause"] is by_kind["compress-dp-communication"]["confidence"] is None
        )
        for fix in found:
            if fix.cause is not None:
                assert fix.confidence == causes[fix.cause].confidence
        combined = by_kind["combination"]
        assert combined["confidence"] == min(cause.confidence for cause in causes.values())
        assert "collections as long as now" in combined["assumes"]

    def test_fixes_for_a_cause_come_before_what_any_job_could_try(self):
        found = [fix for fix in fixes_of(*self._slow()) if fix.kind != "combination"]
        general = [fix.cause is None for fix in found]
        assert general == sorted(general)
        assert any(general)
        assert not all(general)

    def _slow(self):
        evidence = assessed(SlowWorker(factor=1.2), costs=BaseCosts(all_gather_s=0.3, reduce_scatter_s=0.3))
        return evidence, causes_of(evidence)

    def test_work_moves_off_a_worker_that_stays_slow(self):
        evidence = assessed(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5))
        shifts = [fix for fix in fixes_of(evidence, causes_of(evidence)) if fix.kind == "shift-work-from-slow-worker"]
        replaced = fixes(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5))["replace-workers"]
        assert len(shifts) == 2
        assert all(0 < fix.saved_s < replaced.saved_s for fix in shifts)
        assert {fix.cause for fix in shifts} == {"bad-worker"}
        known = fixes_of(structs.replace(evidence, layers=(8, 8, 8, 8)), causes_of(evidence))
        layers = next(fix for fix in known if "layers_then" in fix.details)
        assert layers.details["layers_then"][2] < 8

    def test_balanced_sequences_come_near_the_bound_of_equal_microbatches(self):
        evidence = assessed(SequenceLengthImbalance(quadratic_share=0.6))
        found = {fix.kind: fix for fix in fixes_of(evidence, causes_of(evidence))}
        fix = found["balance-sequences"]
        assert fix.details["busiest_over_mean_best"] < 1.01 < fix.details["busiest_over_mean_now"]
        assert fix.details["busiest_over_mean_best"] <= fix.details["busiest_over_mean_then"] < 1.02
        assert fix.details["bound_step_s"] < fix.new_step_s < evidence.job.attribution.recorded_s

    def test_a_combination_adds_up_marginal_gains_not_single_ones(self):
        found = fixes(SlowWorker(dp_rank=1, pp_rank=1, factor=1.6), SlowP2pLink(dp_rank=2, pp_rank=0, factor=80))
        fix = found["combination"]
        sequence = fix.details["sequence"]
        assert sum(entry["marginal_saved_s"] for entry in sequence) == pytest.approx(fix.saved_s)
        assert fix.saved_s > fix.details["sum_of_single_savings_s"] * 1.05, "each hides the other's gain"
        assert fix.saved_s > max(other.saved_s for kind, other in found.items() if kind != "combination")

    def test_the_fewest_slow_workers_to_replace_are_as_few_as_exhaustive_search_finds(self):
        causes = (
            SlowWorker(dp_rank=0, pp_rank=0, factor=1.8),
            SlowWorker(dp_rank=1, pp_rank=1, factor=1.5),
            SlowWorker(dp_rank=2, pp_rank=2, factor=1.12),
            SlowWorker(dp_rank=3, pp_rank=3, factor=1.11),
        )
        evidence = assessed(*causes, noise=0.01)
        named = causes_of(evidence)
        (cause,) = named
        assert len(cause.where.workers) == 4
        proposed = [fix for fix in fixes_of(evidence, named) if fix.kind == "replace-workers" and "enough" in fix.title]
        from tracekit.analysis.evidence.slow_workers import as_fast_as_peers
        from tracekit.analysis.fixes import WORKER_FIXES

        target_s = (
            WORKER_FIXES.target_slowdown
            * evidence.job.attribution.ideal_s
            * evidence.job.unchanged_s
            / evidence.job.attribution.original_s
        )

        def suffices(chosen) -> bool:
            return float(step_times(evidence.job.replay, (as_fast_as_peers(evidence.job, chosen),)).mean()) <= target_s

        fewest = next(
            size
            for size in range(1, 5)
            if any(suffices(chosen) for chosen in itertools.combinations(cause.where.workers, size))
        )
        assert [len(fix.where.workers) for fix in proposed] == [fewest] == [2]
        assert suffices(proposed[0].where.workers)

    def test_the_fewest_that_suffice_against_all_subsets(self):
        weights = {"a": 5, "b": 4, "c": 4, "d": 1}

        for needed in range(1, 15):
            chosen = fewest_that_suffice("abcd", lambda items, needed=needed: sum(weights[i] for i in items) >= needed)
            fewest = next(
                size
                for size in range(1, 5)
                if any(sum(weights[i] for i in some) >= needed for some in itertools.combinations("abcd", size))
            )
            assert chosen is not None
            assert len(chosen) == fewest
        assert fewest_that_suffice("abcd", lambda items: len(items) > 4) is None
        assert fewest_that_suffice("abcd", lambda items: {"a", "c"} <= set(items)) == ("a", "c")

    @pytest.mark.slow
    def test_no_repair_where_the_target_is_met_without_one(self):
        """Slow workers in a job that is hardly slow: there were plans to replace nobody."""
        assert fewest_that_suffice("abcd", lambda _: True) is None
        assert not judged_job(9_900_002, "slow-host").wrong


class TestDiagnosis:
    def test_all_of_it_is_plain_data(self):
        trace = synthesize(replace(SPEC, causes=(SlowWorker(factor=2), PythonGc(pause_s=0.3, rate=0.1))))
        replay = JobReplay.from_trace(trace)
        found = diagnose(PipelineAssessment(PipelineSubject.of(trace, replay)))
        assert plain(found.patterns.space)["shape"] == "one-worker"
        assert {plain(cause.finding)["kind"] for cause in found.causes} == {"bad-worker", "python-gc"}
        assert plain(found.fixes[-1].fix)["kind"] == "combination"

    def test_it_is_what_its_parts_say(self):
        trace = synthesize(replace(SPEC, causes=(SlowLastStage(factor=1.5),)))
        replay = JobReplay.from_trace(trace)
        attribution = attribute(replay)
        whole = diagnose(PipelineAssessment(PipelineSubject.of(trace, replay, lambda: attribution)))
        alike = PipelineAssessment(PipelineSubject.of(trace, replay, lambda: attribution))
        causes = causes_of(alike)
        assert [cause.finding for cause in whole.causes] == [cause.finding for cause in causes]
        fixes = fixes_of(alike, causes)
        assert [fix.fix for fix in whole.fixes] == [fix.fix for fix in fixes]


def test_where_dealing_sequences_gives_back_nothing_what_helps_anyway_comes_first():
    """Of the one cause there are no "other causes" to wait for."""
    answer = tracekit.job_of(simulate(draw_job(9_920_000, "sequences")).trace).whatif().answer
    assert answer.fix.startswith("Run twice as many microbatches of half the size; saves at most ")


def test_of_uneven_sequences_in_steps_of_one_microbatch_the_fix_groups_those_of_similar_length():
    """No deal within a step changes which microbatch is its longest, so that none is offered."""
    answer = tracekit.job_of(
        synthesize(SynthSpec(Layout(dp=4, pp=1), microbatches=1, steps=20, seed=3, causes=(SequenceLengthImbalance(),)))
    ).whatif()
    (fix,) = (fix for fix in answer.fixes if fix.cause == "sequence-length-imbalance")
    assert (fix.kind, answer.first_fix, answer.answer.action) == ("group-sequences", fix, fix.title)
    assert 0.5 * answer.findings[0].saved_s < fix.saved_s < answer.findings[0].saved_s


def test_a_slow_worker_of_one_dp_rank_is_no_work_of_its_stage():
    """Stage 3 has half as much work again, rank 0 is slow. Layers go from stage 3 to all others, and a combination
    moves them once: with rank 0 repaired, too, the step is that of the job with a healthy rank 0 whose layers move.
    """
    uneven, slow = SlowLastStage(factor=1.5), SlowWorker(dp_rank=0, pp_rank=0, factor=1.5)
    by_kind = []
    for causes in ((uneven, slow), (uneven,)):
        job = structs.replace(assessed(*causes, layout=Layout(dp=1, pp=4), steps=20, seed=0), layers=(8, 8, 8, 8))
        by_kind.append({fix.kind: fix for fix in reversed(fixes_of(job, causes_of(job)))})
    both, healthy = by_kind
    assert both["repartition-stages"].details["layers_then"] == [9, 9, 9, 5]
    assert both["shift-work-from-slow-worker"].details["layers_then"] == [6, 10, 10, 6]
    subject = assessed(uneven, slow, layout=Layout(dp=1, pp=4), steps=20, seed=0).job
    again = split_again(subject, (8, 8, 8, 8), (6, 10, 10, 6))  # as its edit, layers=8,8,8,8>6,10,10,6
    assert both["shift-work-from-slow-worker"].saved_s == pytest.approx(
        subject.unchanged_s - subject.step_times((again,)).mean(), rel=1e-9
    )
    combined = both["combination"]
    assert [fix["kind"] for fix in combined.details["sequence"]] == ["replace-workers", "repartition-stages"]
    assert combined.new_step_s == pytest.approx(healthy["repartition-stages"].new_step_s, rel=0.01)


def test_a_cause_of_two_steps_is_priced_as_often_as_in_the_trace_with_the_error_of_that() -> None:
    """Two of 20 steps are slow: how much they lose is known to a few per cent, how often they return is not."""
    spec = SynthSpec(Layout(dp=4, pp=4), steps=20, seed=4, causes=(SlowSteps(),))
    report = tracekit.job_of(synthesize(spec)).whatif()
    fix = next(one for one in report.fixes if one.cause == "slow-steps")
    assert fix.assumes == "as often as in this trace (2 steps)"
    assert (fix.bound, fix.withheld) == (False, None)
    assert fix.saved_s is not None
    assert fix.error_s is not None
    assert 0 < fix.error_s < fix.saved_s
    assert not [one for one in report.fixes if one.saved_s is not None and one.saved_s < one.error_s]
