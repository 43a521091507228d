"""No request costs more than its length: a process that asks hostile ones ends within a generous CPU time."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.handmade import run
from tests.properties import LONG

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
#: Seconds, about ten times what all of them take.
MOST_CPU_S = 1000 if LONG else 120


@pytest.mark.slow
@pytest.mark.hypothesis
def test_hostile_requests_are_answered_at_once(tmp_path: Path) -> None:
    store = tmp_path / "jobs.store"
    assert run("import", SAMPLES / "gpu_slow_input", SAMPLES / "slow_worker.parquet", "--store", store).code == 0
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.hostile_requests", str(store)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S)),
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]
