"""What comes first is what gives back most; what hides needs all fixes together."""

from __future__ import annotations

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.synth import SlowLastStage, SlowWorker, SynthSpec, synthesize
from tracekit.trace.model import Layout


def test_a_worker_whose_repair_gives_back_more_comes_before_a_stage_that_costs_more():
    """The layers of the stage have to go somewhere: moving them gives back less than the stage costs."""
    causes = (SlowLastStage(factor=1.6), SlowWorker(dp_rank=1, pp_rank=1, factor=1.4))
    found = PipelineJob(synthesize(SynthSpec(Layout(dp=4, pp=2), causes=causes))).analysis.diagnosis
    worker, stage = found.causes
    assert (worker.kind, stage.kind) == ("bad-worker", "stage-imbalance")
    (moved,) = (fix for fix in found.fixes if fix.kind == "repartition-stages")
    assert stage.saved_s > worker.saved_s > moved.saved_s
    assert found.answer.headline.startswith("rank 5 on host-0000 costs ")
    assert found.answer.action is not None
    assert found.answer.action.startswith("Check rank 5 on host-0000 for throttled GPUs ")
    assert [one.kind for one in found.answer.accounts] == ["bad-worker", "stage-imbalance"]


def test_of_causes_that_hide_each_other_all_fixes_together_come_first():
    """Rank 0 computes 0.15 s longer, the others load for 0.15 s: only both fixes give anything back."""
    slow = [("forward-compute", 0.15), ("backward-compute", 0.3)]
    late = [("data-load", 0.15), FORWARD, BACKWARD]
    answer = PipelineJob(data_parallel_job([slow, late, late, late], steps=10)).whatif().answer
    assert answer.action is not None
    assert answer.action.startswith(
        "Fix all causes together, because one fix alone saves little; first raise num_workers "
    )
    assert len(answer.others) == 1
    assert answer.saves is not None
    assert answer.saves.startswith("saves 150.0 ms")
