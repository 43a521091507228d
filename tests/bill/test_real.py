"""The bill of a real job that saves, is killed and is restarted by torchrun: against what its script noted."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.collectors.conftest import collect, torchrun
from tracekit.bill.run import bill_of_run


def test_planted_checkpoints_and_restarts_are_measured_back(tmp_path: Path) -> None:
    """Each lies between what the script noted just outside of it and just inside."""
    segments, noted = tmp_path / "segments", tmp_path / "times"
    kept = ["--segments", str(segments)]
    collected = collect(tmp_path, torchrun(1, "saves.py", "--max-restarts", "1"), *kept, TIMES=noted)
    assert collected.process.returncode == 0, collected.process.stderr
    at: dict[str, list[float]] = defaultdict(list)
    for line in noted.read_text().splitlines():
        what, ns = line.split()
        at[what].append(int(ns) / 1e9)
    bill = bill_of_run(segments)
    found: dict[str, float] = defaultdict(float)
    causes: dict[str, float] = defaultdict(float)
    for row in bill.rows.iter_rows(named=True):
        found[row["part"]] += row["seconds"]
        causes[row["cause"]] += row["seconds"]
    (wall_s,) = bill.wall_s.values()
    assert sum(found.values()) == pytest.approx(wall_s, rel=1e-9)
    inside = sum(at["last-byte"]) - sum(at["first-byte"])
    assert inside <= found["checkpoints"] <= sum(at["saved"]) - sum(at["save"])
    # From the end of the checkpoint to the last thing before the kill, and on to the end of the next first step.
    assert at["step-3"][0] - at["saved"][0] <= causes["lost work"] <= at["step-4"][0] - at["last-byte"][0]
    assert at["step-0"][1] - at["step-4"][0] <= found["restarts"] <= at["step-0"][1] - at["last-byte"][0]
    assert found["start-up"] > 0
