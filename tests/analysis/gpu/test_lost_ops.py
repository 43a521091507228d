"""Recordings whose file lacks GPU ops that were launched: idle time is not known, and nothing is concluded from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tracekit
from tests.kineto_files import document, event, kernel, launch, write
from tracekit.report.finding import LossKind
from tracekit.report.report import Report

STEPS, PER_STEP = 4, 25


def events(*, graphs: bool = False) -> Iterator[dict[str, Any]]:
    """Steps of 10 ms in which the GPU is busy 99 %: 25 kernels of 0.4 ms, or one graph of 10 kernels of 1 ms."""
    for step in range(STEPS):
        begin = step * 10_000.0
        yield event("user_annotation", f"ProfilerStep#{step}", begin, 9_990)
        for number in range(1 if graphs else PER_STEP):
            correlation = 1 + step * PER_STEP + number
            name = "cudaGraphLaunch" if graphs else "cudaLaunchKernel"
            yield launch(begin + 10 + 6 * number, correlation, name=name)
            lasts = 1_000.0 if graphs else 400.0
            for piece in range(10 if graphs else 1):
                at = begin + 20 + lasts * (number + piece)
                yield kernel("gemm_kernel", at, lasts - 4, correlation=correlation)


def without(dropped: set[int], *, graphs: bool = False) -> list[dict[str, Any]]:
    """The events without the GPU ops of these launches, by their place."""
    correlations = [one["args"]["correlation"] for one in events(graphs=graphs) if one["cat"] == "cuda_runtime"]
    gone = {correlation for place, correlation in enumerate(correlations) if place in dropped}
    return [one for one in events(graphs=graphs) if one["cat"] != "kernel" or one["args"]["correlation"] not in gone]


def report_on(folder: Path, content: list[dict[str, Any]]) -> Report:
    return tracekit.load(write(folder / "rank-0.json", document(content, world=1))).whatif()


@pytest.mark.parametrize(
    ("dropped", "graphs", "told"),
    [
        (set(range(1, 100, 2)), False, "rank 0: 50 of 100 launches have no GPU op in its file (50% of the GPU's time"),
        (set(range(50, 100)), False, "rank 0: 50 of 100 launches have no GPU op in its file (50% of the GPU's time"),
        ({1, 2, 3}, True, "rank 0: 3 of 4 launches have no GPU op in its file (75% of the GPU's time"),
    ],
    ids=["every second op", "the second half", "graphs"],
)
def test_lost_gpu_ops_are_counted_and_forbid_what_needs_them(
    tmp_path: Path, dropped: set[int], *, graphs: bool, told: str
) -> None:
    report = report_on(tmp_path, without(dropped, graphs=graphs))
    assert report.answer.headline.startswith(told)
    assert report.verdict.kind is LossKind.CONTRADICTION
    assert not report.trust.trustworthy
    assert [lack.fact for lack in report.lacks] == ["ranks", "compute"]
    assert not [cause for cause in report.findings if cause.priced]
    assert "GPU" not in {remark.name: remark.words for remark in report.remarks}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_whole_recording_is_trusted(tmp_path: Path, *, graphs: bool) -> None:
    report = report_on(tmp_path, without(set(), graphs=graphs))
    assert report.trust.trustworthy
    assert [lack.fact for lack in report.lacks] == ["ranks"]


def test_a_few_lost_ops_change_little(tmp_path: Path) -> None:
    """3 of 100 launches of 0.4 ms: 3 % of the GPU's time, below the 5 % of all limits of trust."""
    assert report_on(tmp_path, without({3, 40, 77})).trust.trustworthy


def test_what_is_captured_into_a_graph_runs_later(tmp_path: Path) -> None:
    capture = [event("cuda_runtime", "cudaStreamBeginCapture", 40_000, 5, correlation=900)]
    capture += [launch(40_010 + 6 * number, 1000 + number) for number in range(80)]
    capture += [event("cuda_runtime", "cudaStreamEndCapture", 40_600, 5, correlation=901)]
    assert report_on(tmp_path, [*events(), *capture]).trust.trustworthy
    outside = [one for one in capture if "Capture" not in one["name"]]
    assert not report_on(tmp_path / "outside", [*events(), *outside]).trust.trustworthy


def test_of_several_ranks_the_one_that_lost_ops_is_left_out_by_name(tmp_path: Path) -> None:
    for rank in range(3):
        content = without(set(range(50, 100)) if rank == 1 else set())
        write(tmp_path / f"rank-{rank}.json", document(content, rank=rank, world=3))
    report = tracekit.load(tmp_path).whatif()
    words = " ".join(words for words in (remark.words for remark in report.remarks))
    assert "rank 1 is left out: 50 of 100 launches have no GPU op in its file (50% of the GPU's time" in words


def test_torch_1_calls_annotations_operators(tmp_path: Path) -> None:
    """Steps and the loader are known by name: the GPU waits 5 of every 10 ms for the next batch."""
    content = []
    for step in range(STEPS):
        begin = step * 10_000.0
        content += [
            event("Operator", f"ProfilerStep#{step}", begin, 9_990),
            event("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, 5_000),
            event("Operator", "aten::stack", begin + 100, 4_000),
            event("Runtime", "cudaLaunchKernel", begin + 5_010, 5, correlation=step + 1),
            {**kernel("gemm_kernel", begin + 5_020, 4_900, correlation=step + 1), "cat": "Kernel"},
        ]
    report = report_on(tmp_path, content)
    assert report.job.steps == STEPS
    assert report.verdict.kind is LossKind.INPUT
    assert report.findings[0].saved_s == pytest.approx(STEPS * 5e-3, rel=0.05)
