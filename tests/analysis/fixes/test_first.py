"""What comes first is what gives back most."""

from __future__ import annotations

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
    assert found.answer.action is not None
    assert "rank 5 on host-0000" in found.answer.action
    assert [culprit.rank for culprit in found.answer.culprits] == [5]
    assert [one.kind for one in found.answer.accounts] == ["bad-worker", "stage-imbalance"]
