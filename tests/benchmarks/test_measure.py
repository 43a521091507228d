"""Measuring whole processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.measure import measure


def test_memory_of_the_measuring_process_does_not_count() -> None:
    """A bare Python takes about 10 MB, this process more than 200."""
    held = b"x" * 200_000_000
    assert measure(sys.executable, "-S", "-c", "pass", runs=1, warm_up=0).peak_mb < 50
    assert len(held) == 200_000_000


def test_an_unexpected_exit_code_is_an_error() -> None:
    fails = (sys.executable, "-S", "-c", "raise SystemExit(4)")
    assert measure(*fails, runs=1, warm_up=0, code=4).wall_s > 0
    with pytest.raises(subprocess.CalledProcessError, match="status 4"):
        measure(*fails, runs=1, warm_up=0)
