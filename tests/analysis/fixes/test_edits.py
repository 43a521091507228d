"""A fix as text: `whatif --fix EDIT` gives it the price of the report."""

from __future__ import annotations

import pytest

import tracekit
from tests.handmade import HEALTHY_STEP_S, slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import SelectionError
from tracekit.synth import SlowLastStage, SynthSpec, synthesize
from tracekit.trace.model import Layout


@pytest.fixture(scope="module")
def job() -> tracekit.Job:
    return tracekit.job_of(slow_trace(range(4)))


def test_the_edit_of_a_fix_has_its_price(job: tracekit.Job) -> None:
    """The slow worker like its peers takes 11.25 s; so does the fix by name."""
    fix = job.report.fixes[0]
    assert fix.edit == "worker=1,0 and kind=forward-compute,backward-compute,optimizer"
    assert job.answer(fix.edit).step_time_s == fix.new_step_s == pytest.approx(HEALTHY_STEP_S)
    assert job.answer("fix=replace-workers").step_time_s == fix.new_step_s


def test_a_fix_by_name_can_be_changed(job: tracekit.Job) -> None:
    assert job.answer("fix=replace-workers + all * 2").step_time_s == pytest.approx(2 * HEALTHY_STEP_S)


def test_only_a_fix_by_name_takes_the_attribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who costs how much takes most of the time of a report; other questions do not ask."""
    job = tracekit.job_of(slow_trace(range(4)))

    def refuse(_: PipelineJob) -> None:
        raise RuntimeError("asked who costs how much")

    monkeypatch.setattr(PipelineJob, "attribution", property(refuse))
    assert job.answer("worker=1,0").step_time_s == pytest.approx(HEALTHY_STEP_S)
    assert job.answer("all", keep=True).saved_s == 0.0
    with pytest.raises(RuntimeError, match="who costs"):
        job.answer("fix=replace-workers")


@pytest.mark.parametrize("name", ["repair-link", "replace-workers:7", "replace-workers:x", "more-microbatches", ""])
def test_a_fix_that_the_job_has_not_is_an_error_that_lists_those_it_has(job: tracekit.Job, name: str) -> None:
    with pytest.raises(SelectionError, match=r"the job has no such fix; it has .*replace-workers"):
        job.answer(f"fix={name}")


@pytest.mark.parametrize("edit", ["fix=repair-link * 2", "fix=repair-link and stage=1", "layers=4,4", "layers=4,4>x"])
def test_a_fix_stands_alone(job: tracekit.Job, edit: str) -> None:
    with pytest.raises(SelectionError, match="stands alone"):
        job.answer(edit)


def test_a_stage_of_too_many_layers_is_named(job: tracekit.Job) -> None:
    with pytest.raises(SelectionError, match="a stage has at most 999,999 layers, not 1000000"):
        job.answer("layers=4,4>7,1000000")


def test_one_stage_has_nowhere_to_move_its_layers() -> None:
    job = tracekit.job_of(synthesize(SynthSpec(Layout(dp=2), steps=3)))
    with pytest.raises(SelectionError, match="layers move between the stages of a pipeline; this job has none"):
        job.answer("layers=8>8")


def test_layers_are_moved_by_hand() -> None:
    """The split that the fix proposes has its price; moving two layers back costs time again."""
    trace = synthesize(SynthSpec(Layout(dp=2, pp=4), steps=6, seed=21, causes=(SlowLastStage(factor=1.5),)))
    job = tracekit.job_of(trace)
    report = job.whatif(layers=(8, 8, 8, 8)).to_dict()
    (fix,) = (fix for fix in report["fixes"] if fix["kind"] == "repartition-stages")
    assert fix["edit"] == "layers=8,8,8,8>9,9,9,5"
    assert job.answer(fix["edit"]).saved_s == fix["saved_s"]
    assert 0 < job.answer("layers=8,8,8,8>9,8,8,7").saved_s < fix["saved_s"]
    assert job.answer("layers=8,8,8,8>8,8,8,8").saved_s == 0.0
    for edit in ("layers=8,8,8,8>9,9,9,9", "layers=8,8>9,7", "layers=0,8,8,8>8,8,8,0"):
        with pytest.raises(SelectionError, match="expected"):
            job.answer(edit)
