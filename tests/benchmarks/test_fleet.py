"""Figures that the benchmark of fleets computes itself."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pytest

from benchmarks.fleet import enlarge, makespan, watched
from tests.fleet.written import job, write_study
from tracekit.fleet.figures import figures_of
from tracekit.fleet.study import PARTS, Study


def test_a_free_core_takes_the_longest_task_that_is_left() -> None:
    """From 1 on: 3 on one core, 2 and 2 on the other; alone 1 + 7."""
    assert makespan([2.0, 3.0, 2.0], 2, 1.0) == 5.0
    assert makespan([2.0, 3.0, 2.0], 1, 1.0) == 8.0


@pytest.mark.slow
def test_a_study_many_times_over_has_the_same_shares(tmp_path: Path) -> None:
    """Of 3 jobs one is left out; of the other two one straggles."""
    small = write_study(
        tmp_path / "small",
        jobs=[job(f"{digit}" * 32, slowdown, 100) for digit, slowdown in (("a", 2.0), ("b", 1.0), ("c", 4.0))],
        sources=[{"source": digit, "job": digit * 32} for digit in "abc"],
        exclusions=[{"job": "c" * 32, "source": "c", "rule": "too-few-steps", "scope": "everywhere"}],
    )
    assert enlarge(small, tmp_path / "large", 100) == 99
    found = figures_of(Study(tmp_path / "large"))
    assert (found.sources, found.jobs, found.gpu_hours) == (99, 66, 6600)
    assert (found.straggling_jobs.value, found.lost.value) == (0.5, 0.25)
    for part in PARTS:
        held = pl.read_parquet(tmp_path / "large" / "jobs" / f"part-{part}.parquet")["job"]
        assert set(held.str.slice(0, 1)) == {part}


@pytest.mark.slow
def test_processor_time_and_memory_of_descendants_count(tmp_path: Path) -> None:
    """A process that starts one that adds up for 1 s of processor time while it holds 100 MB."""
    inner = "import time; held = b'x' * 100_000_000\nwhile time.process_time() < 1: pass"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    found = watched((sys.executable, "-c", outer))
    assert found.cpu_s >= 1.0
    assert found.peak_mb == pytest.approx(115, abs=15)
