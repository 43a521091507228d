"""The check against a real GPU: what it reads from a profile, and its one line where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_kernels_and_waiting_calls_of_a_profile_are_summed_up(tmp_path):
    """Kernels and copies 1.5 + 0.5 ms; the host waited once; a launch is no wait."""
    from benchmarks.gpu import read_profile

    events = [
        {"cat": "kernel", "name": "gemm", "dur": 1500},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 500},
        {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "dur": 30},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 5},
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    profiled = read_profile(path)
    assert profiled.kernels_ms == 2.0
    assert profiled.waits == {"cudaDeviceSynchronize": 1}


@pytest.mark.slow
def test_without_a_gpu_one_line_says_so_and_results_stay():
    results = ROOT / "benchmarks" / "RESULTS.md"
    before = results.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.startswith("gpu: not measured, torch finds no CUDA device here")
    assert done.stdout.count("\n") == 1
    assert results.read_text() == before
