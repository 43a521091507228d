"""Kernels take what they were compiled for and nothing else, and need no place to write to."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tracekit.analysis import native

ROOT = Path(__file__).parents[3]
RUN = """
import os, sys, tracekit
assert not os.access(os.path.dirname(tracekit.__file__), os.W_OK), "the installation can be written to"
print(round(tracekit.load(sys.argv[1]).whatif().slowdown, 3))
"""


def order_of(*edges: tuple[int, int], ops: int, dtype: type = np.int32, room: int | None = None) -> list[int]:
    """`ops` ops, each a group of its own, in replay order; shorter where a cycle is."""
    alone = np.arange(ops, dtype=np.int32)
    before, after = (np.array([edge[at] for edge in edges], np.int32) for at in (0, 1))
    order = np.argsort(before, kind="stable")
    ordered = np.empty(ops if room is None else room, dtype)
    count = native.replay_order(
        alone,
        alone,
        np.arange(ops + 1, dtype=np.int32),
        np.searchsorted(before[order], np.arange(ops + 1)).astype(np.int32),
        after[order],
        np.bincount(after, minlength=ops).astype(np.int32),
        ordered,
    )
    return ordered[:count].tolist()


def test_each_op_comes_after_all_it_waits_for() -> None:
    assert order_of((3, 1), (1, 0), (3, 2), (2, 0), ops=4) == [3, 1, 2, 0]
    assert order_of((0, 1), (1, 2), (2, 1), ops=3) == [0]


def test_arrays_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"replay_order: argument 7 has elements 'l', expected 'i'"):
        order_of((0, 1), ops=2, dtype=np.int64)


def test_arrays_that_are_not_contiguous_are_refused() -> None:
    rows, lanes = np.zeros(3, np.int32), np.zeros((3, 4))
    with pytest.raises(ValueError, match="not C-contiguous"):
        native.launch_delays(rows, rows, lanes[:, ::2], lanes, 0.0, lanes)


def test_an_array_that_cannot_be_written_to_is_refused_as_output() -> None:
    rows, lanes = np.zeros(4, np.int32), np.zeros((3, 4))
    frozen = lanes.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        native.launch_delays(rows, rows, lanes, lanes, 0.0, frozen)


def test_the_number_of_arguments_is_checked() -> None:
    rows = np.zeros(3, np.int32)
    with pytest.raises(TypeError, match="launch_delays takes 6 arguments, not 2"):
        native.launch_delays(*[rows, rows])


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Path]:
    """A copy of tracekit that cannot be written to."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "tracekit", site / "tracekit", ignore=shutil.ignore_patterns("__pycache__"))
    folders = [site, *(path for path in site.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield site
    for folder in folders:
        folder.chmod(0o755)


def obey_permissions() -> None:
    """Take from root the right to write anywhere: CAP_DAC_OVERRIDE, from the bounding set."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1)


@pytest.mark.slow
def test_it_runs_from_an_installation_that_cannot_be_written_to_without_a_home(
    installation: Path, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir(mode=0o555)
    trace = ROOT / "sample_traces" / "slow_worker.parquet"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(trace)],
        cwd=tmp_path / "work",
        env={"PATH": os.environ["PATH"], "HOME": "/proc/nobody", "TMPDIR": "/proc", "PYTHONPATH": str(installation)},
        capture_output=True,
        text=True,
        preexec_fn=obey_permissions,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) > 1.1
    assert list((tmp_path / "work").iterdir()) == []
