"""The figures of two small jobs are those of a brute-force replay, stored with the traces (`brute_force.py`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tracekit
from tests.analysis.brute_force import FOLDER, JOBS, BruteForce
from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import addition, mean_step_time, removal
from tracekit.analysis.whatif.selection import stage, worker
from tracekit.trace.canonical import read_parquet

Job = tuple[Attribution, dict[str, Any], JobReplay]


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> Job:
    read = tracekit.load(FOLDER / f"{request.param}.parquet")
    assert isinstance(read, PipelineJob)
    return read.attribution, json.loads((FOLDER / f"{request.param}.json").read_text()), read.replay


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def test_step_times(job: Job) -> None:
    found, stored, _ = job
    for name in ("recorded", "original", "ideal"):
        times = getattr(found, name)
        assert {str(step): close(time) for step, time in zip(found.steps, times, strict=True)} == stored[name]


def test_slowdowns(job: Job) -> None:
    found, stored, _ = job
    assert found.slowdown == close(stored["slowdown"])
    for ours, name in ((found.stage_slowdown, "by_stage"), (found.dp_rank_slowdown, "by_dp_rank")):
        assert {str(at): close(value) for at, value in enumerate(ours)} == stored[name]
    workers = {f"{dp},{pp}": close(value) for (dp, pp), value in _cells(found.worker_slowdown)}
    assert workers == stored["by_worker"]
    of_kinds = stored["by_compute_kind"]
    assert {kind: close(found.by_kind[kind].mean() / found.ideal_s) for kind in of_kinds} == of_kinds


def _cells(table: Any) -> list[tuple[tuple[int, int], float]]:
    return [((dp, pp), table[dp, pp]) for dp in range(table.shape[0]) for pp in range(table.shape[1])]


@pytest.mark.parametrize("figure", ["m_w", "m_s"])
def test_removal_and_addition(job: Job, figure: str) -> None:
    found, stored, replay = job
    chosen = {"m_w": worker(*found.slowest_workers), "m_s": stage(found.stages - 1)}[figure]
    added_s, removed_s = (mean_step_time(replay, question(chosen)) for question in (addition, removal))
    assert (added_s, removed_s) == (close(stored[figure]["added_s"]), close(stored[figure]["removed_s"]))
    assert getattr(found, figure) == close((found.original_s - removed_s) / (found.original_s - found.ideal_s))


def test_the_numbers_are_those_of_the_brute_force_today() -> None:
    """What is stored was not typed: the smaller job's is made again."""
    stored = json.loads((FOLDER / "slow-worker.json").read_text())
    del stored["made_by"]
    again = json.loads(json.dumps(BruteForce(read_parquet(FOLDER / "slow-worker.parquet")).figures()))
    assert again == {name: pytest.approx(value, rel=1e-12) for name, value in stored.items()}
