"""Independent streams that one hardware queue serialises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.analysis.gpu.jobs import load_ranks
from tests.kineto_files import event, kernel, launch
from tracekit.analysis.detectors.late_rank import joined
from tracekit.report.conclusions import Finding

PAIRS = 15


def events(*, one_queue: bool) -> list[dict[str, object]]:
    """Pairs of independent kernels on two streams, 400 and 100 us long, all launched at the beginning.

    With one queue, each begins when the one launched before it has ended; else each stream runs by itself.
    """
    found, now, ends = [event("user_annotation", "ProfilerStep#1", 0, 30_000)], 500.0, {7: 500.0, 9: 500.0}
    for number in range(2 * PAIRS):
        stream, lasts, name = (7, 400.0, "gemm_kernel") if number % 2 == 0 else (9, 100.0, "norm_kernel")
        begin = now if one_queue else ends[stream]
        found += [launch(10 * number, number + 1), kernel(name, begin, lasts, stream=stream, correlation=number + 1)]
        now = ends[stream] = begin + lasts
    return found


def findings(folder: Path, *, one_queue: bool) -> list[Finding]:
    found = load_ranks(folder, {0: events(one_queue=one_queue)}).whatif().findings
    return [one for one in found if one.kind == "one-launch-queue"]


def test_streams_in_one_queue_are_named_and_priced(tmp_path: Path) -> None:
    """By themselves, the long kernels take 6 ms and hide the short ones, which took 1.5 ms more."""
    (found,) = findings(tmp_path, one_queue=True)
    assert found.saved_s == pytest.approx(PAIRS * 100e-6, rel=0.05)
    assert found.bound
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in found.suggested_fix


def test_streams_that_run_by_themselves_are_none(tmp_path: Path) -> None:
    assert findings(tmp_path, one_queue=False) == []


def test_edges_between_rows_of_a_large_job_are_found() -> None:
    """Edges have row numbers of 32 bits: 50,000 x 60,000 rows are more than these count to."""
    first, second = np.array([7, 50_000, 50_001]), np.array([8, 50_001, 50_000])
    edge = np.array([[50_000, 50_001], [3, 4]], np.int32)
    assert joined(first, second, edge[:, 0], edge[:, 1], 60_000).tolist() == [False, True, False]
