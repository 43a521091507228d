"""Plans of recorded jobs: the promised step time against a simulation of the plan, and jobs that have no plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.bubbles.simulated import random_lanes, zb_h1
from tests.analysis.bubbles.simulated import trace as bubbles_trace
from tests.handmade import run
from tracekit.analysis.job.best_plans import optimize_job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import SelectionError, TraceError
from tracekit.report.questions import Optimum
from tracekit.synth import Schedule, SlowWorker, SynthSpec, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

MIB = 1 << 20
SPEC = SynthSpec(Layout(dp=2, pp=4), layers=(9, 6, 6, 3), steps=6, noise=0.005)
KEPT = ("schedule", "microbatches")


def _optimum(trace: Trace, **asked: Any) -> Optimum:
    job = PipelineJob(trace)
    return optimize_job(job, job.whatif(), **asked)


def _recorded_s(trace: Trace) -> float:
    return float(PipelineJob(trace).replay.recorded_step_times().mean())


def test_a_better_split_takes_what_was_promised() -> None:
    trace = synthesize(SPEC)
    result = _optimum(trace, keep=KEPT)
    best = result.plans[0]
    assert result.step_time_s.now == pytest.approx(_recorded_s(trace), rel=1e-6)
    assert best.saved_s > 0.1 * result.step_time_s.now
    simulated_s = _recorded_s(synthesize(replace(SPEC, layers=tuple(best.split))))
    assert best.step_time_s == pytest.approx(simulated_s, rel=0.03)


def test_twice_the_microbatches_take_what_was_promised() -> None:
    spec = replace(SPEC, layers=(6, 6, 6, 6))
    result = _optimum(synthesize(spec), keep=("split", "schedule"))
    more = next(plan for plan in result.plans if plan.microbatches == 16)
    halves = replace(spec.costs, forward_s=spec.costs.forward_s / 2, backward_s=spec.costs.backward_s / 2)
    simulated_s = _recorded_s(synthesize(replace(spec, microbatches=16, costs=halves)))
    assert more.step_time_s == pytest.approx(simulated_s, rel=0.03)


def test_a_slow_worker_gets_fewer_layers() -> None:
    trace = synthesize(replace(SPEC, layers=(8, 8, 8, 8), causes=(SlowWorker(dp_rank=1, pp_rank=2, factor=1.5),)))
    result = _optimum(trace, keep=KEPT)
    split = result.plans[0].split
    assert split[2] == min(split) < 8
    assert {move.kind for move in result.moves} >= {"shift-work-from-slow-worker"}


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("layers", [(9, 6, 6, 3), (8, 8, 8, 8)])
def test_a_split_takes_as_long_as_the_same_change_of_the_job(dp: int, layers: tuple[int, ...]) -> None:
    slow = (SlowWorker(dp_rank=0, pp_rank=2, factor=1.5),) if layers[0] == layers[3] else ()
    job = PipelineJob(synthesize(replace(SPEC, layout=Layout(dp=dp, pp=4), layers=layers, causes=slow, noise=0.02)))
    report = job.whatif()
    result = optimize_job(job, report, keep=KEPT)
    assert result.plans[0].saved_s > 0.05 * result.step_time_s.now
    assert result.plans[0].split[2] == (5 if slow else 6)
    for plan in result.plans:
        asked = job.answer(f"layers={','.join(map(str, layers))}>{','.join(map(str, plan.split))}")
        assert plan.saved_s == pytest.approx(asked.saved_s, rel=1e-9, abs=1e-12)
        assert plan.step_time_s == pytest.approx(asked.step_time_s, rel=1e-9)
        assert plan.bound_s <= plan.step_time_s
    (fix,) = [fix.edit for fix in report.fixes if fix.kind != "combination" and (fix.edit or "").startswith("layers=")]
    assert fix == f"layers={','.join(map(str, layers))}>{','.join(map(str, result.plans[0].split))}"


def test_nothing_to_gain_within_the_error_of_the_replay() -> None:
    result = _optimum(synthesize(replace(SPEC, layers=(6, 6, 6, 6))), keep=KEPT)
    assert result.plans[0].bound_s <= result.step_time_s.now
    assert all(
        plan.tied == (plan.step_time_s <= result.plans[0].step_time_s * (1 + result.error)) for plan in result.plans
    )


def _with(gradients: dict[str, Any]) -> Trace:
    """A job of DistributedDataParallel with six layers of 20 MiB, and these figures."""
    trace = synthesize(SynthSpec(Layout(dp=4), steps=6, noise=0.005, microbatches=2))
    figures = {"bytes": [[20 * MIB] * 6], "bucket_cap_mb": 25.0, **gradients}
    return replace(trace, metadata={**trace.metadata, "layers": None, "gradients": figures})


def _ddp(*, reductions: list[tuple[int, float]]) -> Trace:
    alone = [(size, seconds, 0.0, 0.01 * number) for number, (size, seconds) in enumerate(reductions, 1)]
    return _with({"reductions": alone})


def test_buckets_follow_the_cost_of_reductions() -> None:
    cheap, dear = ([(size * MIB, fixed_s + size * 1e-5) for size in (10, 20, 40)] for fixed_s in (1e-6, 0.01))
    many, few = (_optimum(_ddp(reductions=reductions)).plans[0] for reductions in (cheap, dear))
    assert many.buckets[0][-1] < few.buckets[0][-1]  # what nothing hides
    assert many.settings.bucket_cap_mb is not None
    assert sum(many.buckets[0]) == 6


def test_a_size_that_saves_no_more_than_the_error_is_kept() -> None:
    few = [(20 * MIB, 20 * 1e-6), (40 * MIB, 40 * 1e-6)]
    result = _optimum(_ddp(reductions=few))
    assert result.nothing_to_gain
    assert result.plans[0].settings.bucket_cap_mb == 25.0
    assert result.plans[0].saved_s == pytest.approx(0)
    assert any("no other size of buckets" in note for note in result.notes)


def test_a_gain_is_no_surer_than_how_much_reductions_delay_the_backward() -> None:
    """They run at half their speed beside it; whether they delay it is known exactly, or within 39 ms."""
    service_s = [1e-4 + size * 2e-4 for size in (20, 40, 60)]
    beside = [(20 * MIB, 0, 2 * service_s[0], 0.02), (40 * MIB, 0, 2 * service_s[1], 0.045)]
    rows = [*beside, (60 * MIB, service_s[2], 0, 0.06)]
    sure, unsure = (_optimum(_with({"reductions": rows, "delay_error_s": each})) for each in (0.0, 0.02))
    assert (sure.plans[0].settings.bucket_cap_mb, unsure.plans[0].settings.bucket_cap_mb) == (20.0, 25.0)
    assert sure.error < sure.plans[0].saved_s / sure.step_time_s.now < unsure.error


def test_reductions_of_one_size_show_no_cost_of_a_byte() -> None:
    result = _optimum(_ddp(reductions=[(20 * MIB, 0.01)]))
    assert result.plans[0].settings.bucket_cap_mb is None
    assert any("reductions of one size" in note for note in result.notes)


def test_one_rank_reduces_nothing() -> None:
    result = _optimum(synthesize(SynthSpec(Layout(), steps=6, noise=0.005)))
    assert any("one data-parallel rank" in note for note in result.notes)
    assert any("by time only" in note for note in result.notes)


def test_plans_that_a_trace_cannot_show() -> None:
    interleaved = SynthSpec(Layout(dp=2, pp=2, vpp=2), schedule=Schedule.INTERLEAVED, steps=4)
    with pytest.raises(TraceError, match="another order"):
        _optimum(synthesize(interleaved))
    with pytest.raises(TraceError, match="its replay is not trusted"):
        _optimum(bubbles_trace(random_lanes(1, zb_h1(3, 6), ranks=2, steps=3)))
    with pytest.raises(SelectionError, match="buckets"):
        _optimum(synthesize(SPEC), keep=("buckets",))


def test_the_command_reads_a_trace(tmp_path: Path) -> None:
    synthesize(SPEC).write_parquet(tmp_path / "job.parquet")
    ran = run("optimize", tmp_path / "job.parquet", "--keep", "schedule", "--keep", "microbatches")
    assert ran.code == 0, ran.err
    assert "The best plan takes" in ran.out
    refused = run("optimize", tmp_path / "job.parquet", "--model", tmp_path / "m.json")
    assert refused.code == 2
