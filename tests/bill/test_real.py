"""A real job that saves, is killed and is restarted by torchrun: its trace, and its bill by what its script noted."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.collectors.conftest import Collected, collect, torchrun
from tests.handmade import read_any
from tracekit.bill.bill_of_run import bill_of_run


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    """One rank: restarted gloo groups of two often fail to connect by themselves."""
    folder = tmp_path_factory.mktemp("restarted")
    kept = ["--segments", str(folder / "segments")]
    collected = collect(folder, torchrun(1, "saves.py", "--max-restarts", "1"), *kept, TIMES=folder / "times")
    assert collected.process.returncode == 0, collected.process.stderr
    return collected


@pytest.mark.slow
def test_attempts_of_an_elastic_job_are_segments_of_one_trace(restarted: Collected) -> None:
    """Step 4 is killed before it has ended, so three steps of the first attempt are whole behind its step 0, and seven
    of the second. The first of those is the sixth number: one is left free.
    """
    first, second = restarted.summary["attempts"]
    assert (first["steps"], second["steps"]) == (3, 7)
    assert first["out"] == second["out"] == str(restarted.out)
    trace = restarted.trace
    assert trace.steps.tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert trace.metadata["segments"] == [
        {"attempt": 0, "first_step": 1, "last_step": 3, "numbered_from": 1, "missing_ranks": []},
        {"attempt": 1, "first_step": 5, "last_step": 11, "numbered_from": 1, "missing_ranks": []},
    ]
    starts = [trace.step_starts[step] for step in trace.steps.tolist()]
    assert starts == sorted(starts)
    folder = restarted.out.parent
    assert read_any(folder / "segments").ops.equals(trace.ops)
    assert not list(folder.glob("job.attempt-*"))


@pytest.mark.slow
def test_planted_checkpoints_and_restarts_are_measured_back(restarted: Collected) -> None:
    """Each lies between what the script noted just outside of it and just inside."""
    at: dict[str, list[float]] = defaultdict(list)
    for line in (restarted.out.parent / "times").read_text().splitlines():
        what, ns = line.split()
        at[what].append(int(ns) / 1e9)
    bill = bill_of_run(restarted.out.parent / "segments")
    found: dict[str, float] = defaultdict(float)
    causes: dict[str, float] = defaultdict(float)
    for row in bill.rows.iter_rows(named=True):
        found[row["part"]] += row["seconds"]
        causes[row["cause"]] += row["seconds"]
    (wall_s,) = bill.wall_s.values()
    assert sum(found.values()) == pytest.approx(wall_s, rel=1e-9)
    inside = sum(at["last-byte"]) - sum(at["first-byte"])
    # What the replay prices beyond that, because steps stop around it, has a cause of its own.
    assert inside <= causes["checkpoints"] <= sum(at["saved"]) - sum(at["save"])
    # From the end of the checkpoint to the last thing before the kill, and on to the end of the next first step.
    assert at["step-3"][0] - at["saved"][0] <= causes["lost work"] <= at["step-4"][0] - at["last-byte"][0]
    assert at["update-0"][1] - at["step-4"][0] <= found["restarts"] <= at["step-0"][1] - at["last-byte"][0]
    assert found["start-up"] > 0
