"""The headline names the kind of loss that costs most, whoever shares it, and never contradicts the figures below."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from msgspec import structs

from judges.eventsim.cases import draw_job
from judges.eventsim.causes import LateData, SlowWorkers
from judges.eventsim.model import Job, Shape
from judges.eventsim.run import simulate
from judges.eventsim.truth import mean_step_s, without
from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job, of_steps
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.job.graph import GraphJob
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import step_times
from tracekit.base.text import main_clause
from tracekit.costs.of_report import costs_of
from tracekit.report.conclusions import Verdict
from tracekit.report.finding import LossKind
from tracekit.report.report import Report
from tracekit.synth import PythonGc, SequenceLengthImbalance, SlowNic, SlowWorker, SynthSpec, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.compute_order import Schedule
from tracekit.trace.model import Layout
from tracekit.trace.op import OpTrace, ProcessGroup


def report_of(trace: Trace) -> Report:
    return PipelineJob(trace).whatif()


def verdict_of(trace: Trace) -> Verdict:
    return report_of(trace).verdict


def test_one_process_that_waits_for_data_loses_that_time():
    """26 of 30 ms: the fix saves what the headline says is lost."""
    program = [("data-load", 0.026), ("forward-compute", 0.001), ("backward-compute", 0.003)]
    report = report_of(of_steps([[program]] * 8))
    verdict = report.verdict
    assert report.slowdown == pytest.approx(1.0)
    assert verdict.kind is LossKind.INPUT
    assert verdict.lost_s == pytest.approx(0.026)
    assert verdict.share == pytest.approx(26 / 30)
    assert verdict.lost_gpu_hours == pytest.approx(0.026 * 8 / 3600)
    (fix,) = [fix for fix in report.fixes if fix.cause == "late-data-loading"]
    assert fix.saved_s == pytest.approx(verdict.lost_s)
    assert fix.saved_gpu_hours_per_day == pytest.approx(verdict.lost_gpu_hours_per_day)


def test_all_ranks_that_wait_for_data_are_input_bound():
    assert verdict_of(data_parallel_job([[("data-load", 0.4), FORWARD, BACKWARD]] * 4)).kind is LossKind.INPUT


def test_host_work_on_all_ranks_is_host_bound():
    verdict = verdict_of(data_parallel_job([[FORWARD, ("host-delay", 0.3), BACKWARD]] * 4))
    assert verdict.kind is LossKind.HOST
    assert verdict.headline_s == pytest.approx(0.3)


def test_communication_that_nothing_hides_is_communication_bound():
    """0.4 s of reduction behind 0.3 s of compute."""
    verdict = verdict_of(data_parallel_job([[FORWARD, BACKWARD]] * 4, transfer_s=0.4))
    assert verdict.kind is LossKind.COMMUNICATION
    assert verdict.headline_s == pytest.approx(0.4)


def test_a_slow_worker_loses_what_goes_with_it_which_is_more_than_s_says():
    """0.3 s beside its peers; beside the mean, which it is part of, a quarter less."""
    slow = [("forward-compute", 0.2), ("backward-compute", 0.4)]
    report = report_of(data_parallel_job([[FORWARD, BACKWARD]] * 3 + [slow], steps=8))
    verdict = report.verdict
    assert verdict.kind is LossKind.STRAGGLER
    assert report.step_time_s.original - report.step_time_s.ideal == pytest.approx(0.225)
    assert verdict.lost_s == pytest.approx(0.3)
    assert verdict.share == pytest.approx(0.3 / report.step_time_s.recorded)
    assert verdict.confidence == report.findings[0].confidence


def test_a_balanced_job_loses_nothing():
    verdict = verdict_of(data_parallel_job([[FORWARD, BACKWARD]] * 4))
    assert (verdict.kind, verdict.lost_s, verdict.losses) == (LossKind.BALANCED, 0.0, [])


def test_s_below_one_is_a_contradiction_and_not_trusted():
    trace = data_parallel_job([[FORWARD, BACKWARD]] * 2)
    found = attribute(JobReplay.from_trace(trace))
    contradictory = structs.replace(
        found, original=np.asarray(found.original * 0.9), recorded=np.asarray(found.recorded * 0.9)
    )
    assert not contradictory.trust.trustworthy
    assert any(reason.startswith("the slowdown is 0.90") for reason in contradictory.trust.reasons)


def test_the_largest_of_several_losses_is_the_headline():
    """0.3 s of waiting for data on all ranks, 0.1 s of a slow worker."""
    load, slow = ("data-load", 0.3), [("forward-compute", 0.15), ("backward-compute", 0.25)]
    programs = [[load, FORWARD, BACKWARD]] * 3 + [[load, *slow]]
    verdict = verdict_of(data_parallel_job(programs, steps=8))
    assert [loss.kind for loss in verdict.losses] == [LossKind.INPUT, LossKind.STRAGGLER]
    assert verdict.kind is LossKind.INPUT
    assert verdict.lost_s == pytest.approx(0.4)


def test_causes_that_hide_each_other_are_the_headline_together():
    """One rank computes 0.15 s longer, the others load for 0.15 s: neither costs anything until the other is gone."""
    slow = [("forward-compute", 0.15), ("backward-compute", 0.3)]
    report = report_of(data_parallel_job([slow] + [[("data-load", 0.15), FORWARD, BACKWARD]] * 3, steps=10))
    verdict = report.verdict
    assert verdict.kind in {LossKind.INPUT, LossKind.STRAGGLER}
    assert verdict.lost_s == pytest.approx(0.15)
    combination = report.fixes[-1]
    assert combination.saved_s == pytest.approx(0.15)
    assert {fix.cause for fix in report.fixes} >= {"bad-worker", "late-data-loading"}


def test_steps_that_the_slow_rank_lacks_are_left_out():
    slow = [("forward-compute", 0.3), ("backward-compute", 0.4)]
    trace = data_parallel_job([[FORWARD, BACKWARD]] * 3 + [slow], steps=8)
    seen = trace.ops.filter((pl.col("dp_rank") < 3) | (pl.col("step") % 2 == 0))
    replay = JobReplay.from_trace(replace(trace, ops=seen))
    assert replay.left_out_steps == (1, 3, 5, 7)
    found, whole = attribute(replay), attribute(JobReplay.from_trace(trace))
    assert found.trust.trustworthy
    assert found.slowdown == pytest.approx(whole.slowdown)


def test_many_times_below_zero_are_not_trusted():
    """What ran 0.05 s before all it waits for had ended cannot have waited for it."""
    found = attribute(JobReplay.from_trace(data_parallel_job([[FORWARD, BACKWARD]] * 2)))
    assert structs.replace(found, clamped_transfers=0).trust.trustworthy
    assert not structs.replace(found, clamped_transfers=4).trust.trustworthy
    # On one clock, what they do is in the replay error.
    assert structs.replace(found, clamped_transfers=4, one_clock=True).trust.trustworthy
    missed = structs.replace(found, clamped_transfers=4, one_clock=True, with_delays=1.06 * found.recorded).trust
    assert any("4 transfers or launch delays" in reason for reason in missed.reasons)


def test_a_replay_that_many_ops_contradict_promises_no_saving() -> None:
    """The slow rank's backward begins 0.02 s before its forward has ended."""
    slow = [("forward-compute", 0.4), ("backward-compute", 0.5)]
    trace = data_parallel_job([slow] + [[FORWARD, BACKWARD]] * 3, steps=8)
    assert all(fix.withheld is None for fix in report_of(trace).fixes if fix.cause)
    early = (pl.col("dp_rank") == 0) & (pl.col("kind") == "backward-compute")
    earlier = pl.when(early).then(0.02).otherwise(0.0)
    moved = trace.ops.with_columns(start=pl.col("start") - earlier, duration=pl.col("duration") + earlier)
    report = report_of(replace(trace, ops=moved))
    assert any("lie more than 10 ms below zero" in reason for reason in report.trust.reasons)
    assert {fix.withheld for fix in report.fixes if fix.cause} == {"too many ops contradict the replay"}


def test_steps_without_computes_are_not_trusted() -> None:
    """Each rank waits 0.3 s for data and reduces gradients: what else it did, nobody recorded."""
    trace = data_parallel_job([[("data-load", 0.3), FORWARD, BACKWARD]] * 4, steps=8)
    without = trace.ops.filter(~pl.col("kind").is_in(["forward-compute", "backward-compute"]))
    assert report_of(trace).trust.trustworthy
    trust = report_of(replace(trace, ops=without)).trust
    assert not trust.trustworthy
    assert any("neither forwards nor backwards" in reason for reason in trust.reasons)


def test_the_cost_of_one_step_of_ops_ends_without_a_semicolon() -> None:
    """Rank 1 takes 0.06 s longer in the one step there is, half of it longer than the mean."""
    ops = [(0, 0, "forward", 0.0, 0.1, [], None), (0, 1, "forward", 0.0, 0.16, [], None)]
    ops += [(0, rank, "all-reduce", 0.16 - 0.06 * (1 - rank), 0.03 + 0.06 * (1 - rank), [rank], 0) for rank in (0, 1)]
    columns = ["step", "rank", "kind", "start", "duration", "waits_for", "rendezvous"]
    frame = pl.DataFrame(ops, columns, orient="row").with_columns(group=pl.lit("dp"))
    report = GraphJob(OpTrace(frame, name="two", groups=(ProcessGroup("dp", (0, 1)),))).report
    assert report.answer.cost == "30.0 ms of the one 190.0 ms step recorded, compared with mean ops"


def unrecorded(trace: Trace, kind: str) -> Trace:
    """The trace without its ops of a kind, whose time becomes launch delays."""
    return replace(trace, ops=trace.ops.filter(pl.col("kind") != kind))


def test_launch_delays_that_a_cause_explains_do_not_count_against_the_replay():
    """0.4 s before the first forward of each 0.7 s step are late data, whether the loading was recorded or not."""
    job = PipelineJob(unrecorded(data_parallel_job([[("data-load", 0.4), FORWARD, BACKWARD]] * 4), "data-load"))
    report = job.report
    assert [str(cause.kind) for cause in report.findings] == ["late-data-loading"]
    assert report.trust.discrepancy == pytest.approx(0.4 / 0.31)
    assert report.trust.unexplained == pytest.approx(0.0)
    assert report.trust.trustworthy
    assert not job.attribution.trust.trustworthy  # as published


def test_data_that_is_late_for_the_gathering_of_parameters_is_late_data() -> None:
    """A loop fetches its data at its top: rank 1 begins its all-gather 0.2 s after the others, who wait for it."""
    gather, late = ("params-all-gather", 0.25), ("params-all-gather", 0.05)
    programs = [[gather, FORWARD, BACKWARD]] * 3 + [[("data-load", 0.2), late, FORWARD, BACKWARD]]
    report = report_of(unrecorded(data_parallel_job(programs, steps=8), "data-load"))
    (cause,) = report.findings
    assert (str(cause.kind), str(cause.where)) == ("late-data-loading", "dp 3")
    assert cause.saved_s == pytest.approx(0.2)
    assert report.trust.trustworthy


def test_a_checkpoint_before_the_gathering_of_parameters_is_what_that_waits_for() -> None:
    """All ranks write for 0.5 s at the top of every fourth step, then gather; nothing is late but for that."""
    work = [("params-all-gather", 0.05), FORWARD, BACKWARD]
    steps = [[[("checkpoint", 0.5), *work] if step % 4 == 0 else work] * 3 for step in range(12)]
    (cause,) = report_of(of_steps(steps)).findings
    assert (str(cause.kind), cause.when) == ("checkpoint-stalls", "every 4 steps")
    assert cause.saved_s == pytest.approx(0.5 / 4)


def test_what_is_gathered_before_the_data_in_some_steps_waits_for_them_in_the_others():
    """Rank 1 loads for 0.4 s, then all gather; in every fourth step a metric is gathered at the top as well."""
    quick = [("data-load", 0.001), ("params-all-gather", 0.409), FORWARD, BACKWARD]
    slow = [("data-load", 0.4), ("params-all-gather", 0.01), FORWARD, BACKWARD]
    metric = ("params-all-gather", 0.02)
    steps = [[[metric, *quick], [metric, *slow]] if step % 4 == 0 else [quick, slow] for step in range(12)]
    report = report_of(of_steps(steps))
    (cause,) = report.findings
    assert (str(cause.kind), cause.where.dp_ranks) == ("late-data-loading", (1,))
    assert cause.saved_s == pytest.approx(0.399)
    assert report.trust.trustworthy


def test_launch_delays_that_no_cause_explains_are_not_trusted():
    """0.1 s before each backward of each rank can be the host's, or waiting for what was not recorded."""
    program = [("forward-compute", 0.107), ("host-delay", 0.1), ("backward-compute", 0.193)]
    report = report_of(unrecorded(data_parallel_job([program] * 4), "host-delay"))
    assert report.trust.unexplained == pytest.approx(report.trust.discrepancy) == pytest.approx(0.1 / 0.31)
    assert not report.trust.trustworthy
    (reason,) = report.trust.reasons
    assert reason.startswith("launch delays add 32.3% to the step")


def test_what_pauses_cost_beside_a_slow_worker_is_not_the_worker_s():
    """S has both in it. The worker hides behind the pauses, so they come first; it costs what it does without them."""
    slow, pauses = SlowWorker(dp_rank=3, pp_rank=1, factor=1.5), PythonGc()
    report = PipelineJob(synthesize(SynthSpec(Layout(dp=8, pp=4), causes=(slow, pauses)))).whatif()
    (worker,) = (cause for cause in report.findings if cause.kind == "bad-worker")
    (stragglers,) = (loss for loss in report.verdict.losses if loss.kind is LossKind.STRAGGLER)
    straggling = report.step_time_s.original - report.step_time_s.ideal
    assert worker.saved_s < worker.alone_s < 0.8 * straggling
    assert stragglers.alone_s == pytest.approx(worker.alone_s)
    assert report.verdict.kind is LossKind.STALLS
    assert report.verdict.lost_s > stragglers.lost_s
    (other,) = report.answer.others
    assert f" {worker.alone_s * 1e3:.1f} ms " in other
    assert report.fixes[0].kind == "planned-gc"


def test_the_first_line_says_what_the_first_cause_costs_alone_and_what_all_of_them_do():
    slow, card = SlowWorker(dp_rank=1, pp_rank=2, factor=1.5), SlowNic(dp_rank=3, pp_rank=0)
    job = PipelineJob(synthesize(SynthSpec(Layout(dp=4, pp=4), causes=(slow, card))))
    found, step_s = job.analysis.diagnosis, job.report.step_time_s.recorded
    first, second = found.causes
    without_both_s = step_times(job.replay, [cause.change for cause in found.causes if cause.change]).mean()
    assert min(first.saved_s, second.saved_s) > 0.05 * step_s
    assert f" {first.saved_s / step_s:.0%} of each step: {main_clause(first.effect)}" in found.verdict.sentence
    assert found.verdict.sentence.endswith(f"; {1 - without_both_s / step_s:.0%} together with another cause")


def test_a_small_cause_does_not_hide_that_communication_binds_the_job():
    """0.4 s of reduction behind 0.3 s of compute, and one rank that loads for 0.02 s."""
    loads = [("data-load", 0.02), FORWARD, BACKWARD]
    verdict = verdict_of(data_parallel_job([[FORWARD, BACKWARD]] * 3 + [loads], steps=8, transfer_s=0.4))
    assert verdict.kind is LossKind.COMMUNICATION
    assert {loss.kind for loss in verdict.losses} == {LossKind.COMMUNICATION, LossKind.INPUT}


def test_what_hides_behind_the_next_step_is_not_lost_for_unknown_reasons() -> None:
    """An optimizer is 92 ms longer than its peers'; half of that the next step hides, as launch delays."""
    slow = draw_job(9_920_000, "P16-optimizer")
    (cause,) = slow.causes
    verdict = verdict_of(simulate(slow).trace)
    costs_s = mean_step_s(slow) - mean_step_s(without(slow, cause))
    assert verdict.lost_s == pytest.approx(costs_s, rel=0.02)
    assert "does not know" not in verdict.sentence


def test_a_checkpoint_of_rank_0_is_named_first_and_no_part_of_what_stragglers_cost():
    """0.2 s in every fifth step, for which the others wait; computes scatter in a way that shows no signature.

    Half of what scatters costs is less than the 0.04 s of the checkpoint, less where rank 0 is early.
    """
    draw = np.random.default_rng(0)
    steps = []
    for step in range(20):
        programs = [
            [(kind, lasts * np.exp(draw.normal(0, 0.15))) for kind, lasts in (FORWARD, BACKWARD)] for _ in "abcd"
        ]
        if step % 5 == 0:
            programs[0].insert(0, ("checkpoint", 0.2))
        steps.append(programs)
    report = report_of(of_steps(steps))
    verdict = report.verdict
    assert report.slowdown > 1.2
    assert verdict.kind is LossKind.STALLS
    assert [(cause.kind, cause.when) for cause in report.findings if cause.priced] == [
        ("checkpoint-stalls", "every 5 steps")
    ]
    stalls, stragglers = verdict.losses
    assert stalls.lost_s == pytest.approx(0.04, rel=0.3)
    assert not stragglers.causes
    scatter = report_of(
        of_steps([[[op for op in program if op[0] != "checkpoint"] for program in one] for one in steps])
    )
    assert stragglers.alone_s == pytest.approx(scatter.verdict.lost_s, rel=1e-9)
    assert not report.answer.culprits


def test_what_a_cause_explains_is_not_told_again_as_noise() -> None:
    """Uneven sequences make ops noisy, so noise alone would explain the same loss."""
    causes = (SlowWorker(dp_rank=2, pp_rank=0, factor=1.4), SequenceLengthImbalance())
    spec = SynthSpec(Layout(dp=4, tp=2), Schedule.GPIPE, 4, 3, overlap_dp=True, noise=0.005, seed=203535, causes=causes)
    report = PipelineJob(synthesize(spec)).whatif()
    assert {cause.kind for cause in report.findings} == {"sequence-length-imbalance", "bad-worker"}
    assert "noise" not in report.answer.headline


def test_kinds_of_loss_that_share_time_have_their_shares_of_it():
    """A slow worker, and data that is late on another DP rank: each hides a part of what the other costs."""
    causes = (SlowWorkers(frozenset({(0, 1)}), 1.5), LateData(7, 0.3, frozenset({1})))
    job = Job(shape=Shape(dp=2, pp=2, microbatches=4, steps=8), causes=causes)
    report = report_of(simulate(job).trace)
    straggler, late = sorted(report.verdict.losses, key=lambda loss: loss.kind is LossKind.INPUT)
    assert {straggler.kind, late.kind} == {LossKind.STRAGGLER, LossKind.INPUT}
    assert straggler.lost_s + late.lost_s == pytest.approx(report.verdict.lost_s)
    # Each has half of what it costs beside the other and half of what it costs once the other is gone.
    for loss in report.verdict.losses:
        (cause,) = [report.findings[place] for place in loss.causes]
        assert loss.lost_s == pytest.approx((cause.saved_s + cause.alone_s) / 2, rel=0.02)
        assert loss.alone_s != pytest.approx(loss.lost_s, rel=0.02)
    billed = costs_of(report)
    for loss in report.verdict.losses:
        of_kind = [each for each in billed.losses if each.kind is loss.kind]
        assert sum(each.seconds + each.planned_s for each in of_kind) == pytest.approx(loss.lost_s)
