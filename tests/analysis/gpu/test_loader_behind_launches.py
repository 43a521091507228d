"""A loader that leaves the GPU idle stands before launches, which a faster host would hide it behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tracekit import load
from tracekit.report.report import Report

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def report_on(folder: Path, *, loader_us: float, dispatch_us: float, kernel_us: float = 400) -> Report:
    """Twelve steps of ten operators, each of `dispatch_us` with one kernel; the loader comes first in each."""
    events, at, free, number = [], 0.0, 0.0, 0
    for step in range(12):
        begin = at
        events.append(event("user_annotation", LOADER, at, loader_us))
        at += loader_us
        for _ in range(10):
            number += 1
            called = at + dispatch_us - 10
            events += [event("cpu_op", "aten::mm", at, dispatch_us - 2), launch(called, number)]
            start = max(free, called + 10)
            free = start + kernel_us
            events.append(kernel(GEMM, start, kernel_us, correlation=number))
            at += dispatch_us
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, at - begin))
    write(folder / "rank0.json", document(events, world=1))
    return load(folder).whatif()


def reasons(report: Report) -> list[str]:
    return [one.spent.reason for one in report.findings if one.spent is not None and one.priced]


def test_a_loader_that_opens_most_of_the_idle_time_is_first(tmp_path: Path) -> None:
    """3,000 us of the loader, 4,500 us of dispatch and 4,000 us of kernels a step of 7,500 us.

    Launches gone, the host runs ahead of the GPU, which becomes the limit at 4,000 us; without the loader, dispatch
    is, at 4,500 us. Yet launches open 500 us of the 3,500 us in which the GPU is idle.
    """
    report = report_on(tmp_path, loader_us=3000, dispatch_us=450)
    saved = {one.spent.reason: one.saved_s for one in report.findings if one.spent is not None}
    assert saved["loader"] == pytest.approx(12 * 3000e-6, rel=0.02)
    assert saved["launch-bound"] > saved["loader"]
    assert reasons(report)[0] == "loader"
    assert "num_workers" in report.findings[0].suggested_fix


def test_launches_that_open_most_of_it_stay_first(tmp_path: Path) -> None:
    """400 us of the loader, 8,000 us of dispatch, 1,000 us of kernels."""
    assert reasons(report_on(tmp_path, loader_us=400, dispatch_us=800, kernel_us=100))[0] == "launch-bound"
