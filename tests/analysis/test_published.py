"""The numbers published with the OSDI'25 paper, reproduced from its traces."""

import json
import os
from pathlib import Path

import pytest

import tracekit
from tracekit.analysis.whatif.interventions import addition, mean_step_time, removal
from tracekit.analysis.whatif.selection import stage, worker

#: They are not part of tracekit: a folder with trace-AR.parquet, meta-AR.yaml, result-AR.json and so on.
REFERENCE = Path(os.environ.get("TRACEKIT_PUBLISHED", ""))

pytestmark = pytest.mark.published


@pytest.fixture(scope="module", params=["AR", "ST"])
def job(request):
    name = request.param
    trace, layout = REFERENCE / f"trace-{name}.parquet", REFERENCE / f"meta-{name}.yaml"
    read = tracekit.load(trace, layout=layout, method="published")
    published = json.loads((REFERENCE / f"result-{name}.json").read_text())
    for figure in ("mw", "ms"):
        published[figure] = json.loads((REFERENCE / f"{figure}-{name}.json").read_text())
    return read.attribution, published, read.replay


def close(value):
    return pytest.approx(value, rel=2e-6, abs=2e-6)


def test_step_times(job):
    found, published, _ = job
    for ours, theirs in (
        (found.recorded, "step_t_base"),
        (found.original, "step_t_nodelay"),
        (found.ideal, "step_t_noblk"),
    ):
        assert {str(step): close(time) for step, time in zip(found.steps, ours, strict=True)} == published[theirs]


def test_slowdowns(job):
    found, published, _ = job
    assert found.slowdown == close(published["blocking_slowdown"])
    assert found.trust.discrepancy + 1 == close(published["launch_slowdown"])
    assert {name: close(times.mean() / found.ideal_s) for name, times in found.by_kind.items()} == published[
        "blocking_decompose_by_optype"
    ]
    by_stage = published["blocking_decompose_by_stage"]
    assert {str(stage): close(value) for stage, value in enumerate(found.stage_slowdown)} == by_stage
    by_dp_rank = published["blocking_decompose_by_dp_rank"]
    assert {str(rank): close(value) for rank, value in enumerate(found.dp_rank_slowdown)} == by_dp_rank


def test_per_step_slowdowns(job):
    found, published, _ = job
    for at, step in enumerate(map(str, found.steps)):
        assert found.original[at] / found.ideal[at] == close(published["blocking_step_slowdown"][step])
        ideal = found.ideal[at]
        for name, value in published["blocking_decompose_by_optype_per_step"][step].items():
            assert found.by_kind[name][at] / ideal == close(value)
        for number, value in published["blocking_decompose_by_stage_per_step"][step].items():
            assert found.by_stage[at, int(number)] / ideal == close(value)
        for rank, value in published["blocking_decompose_by_dp_rank_per_step"][step].items():
            assert found.by_dp_rank[at, int(rank)] / ideal == close(value)


@pytest.mark.parametrize("figure", ["mw", "ms"])
def test_removal_and_addition(job, figure):
    found, published, replay = job
    chosen = {"mw": worker(*found.slowest_workers), "ms": stage(found.stages - 1)}[figure]
    removed_s, added_s = (mean_step_time(replay, question(chosen)) for question in (removal, addition))
    theirs = published[figure]
    assert (found.original_s, found.ideal_s) == (close(theirs["tori"]), close(theirs["tideal"]))
    assert (removed_s, added_s) == (close(theirs["trem"]), close(theirs["tadd"]))
    assert {"mw": found.m_w, "ms": found.m_s}[figure] == close(theirs["rem"])
    assert (added_s - found.ideal_s) / (found.original_s - found.ideal_s) == close(theirs["add"])
