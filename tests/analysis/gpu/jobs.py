"""Small GPU jobs with known answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from tests.kineto_files import GEMM, all_reduce, document, event, kernel, launch, write
from tracekit.analysis.job.graph import RecordingJob
from tracekit.report.conclusions import Finding
from tracekit.report.report import Report
from tracekit.sources.load import load


def loaded(folder: Path) -> RecordingJob:
    """The job recorded in a folder."""
    job = load(folder)
    assert isinstance(job, RecordingJob)
    return job


def said(report: Report) -> tuple[str, ...]:
    """Notes on a recording, and why it is not trusted."""
    assert report.job.source == "recording"
    assert report.trust.notes is not UNSET
    return (*report.trust.notes, *report.trust.reasons)


def on_a_rank(report: Report) -> tuple[Finding, ...]:
    """The findings on a rank, the costliest first; others cost all ranks the same."""
    return tuple(one for one in report.findings if one.where.ranks)


def load_ranks(folder: Path, ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> RecordingJob:
    """A job of these events by rank."""
    for rank, events in ranks.items():
        write(folder / f"rank{rank}.json", document(events, rank, world=len(ranks)))
    return loaded(folder)


def waiting_events(gemm_us: float, ahead_us: float = 0.0) -> list[dict[str, Any]]:
    """A product that begins at 10 us, and an all-reduce behind it that ends at 100 us; the host is done at 17 us."""
    events = [
        event("cpu_op", "aten::mm", 0, 6), launch(0, 1), kernel(GEMM, 10, gemm_us, correlation=1),
        event("cpu_op", "record_param_comms", 8, 9), launch(12, 2, name="cudaLaunchKernelExC"),
        all_reduce(10 + gemm_us, 90 - gemm_us, correlation=2),
    ]  # fmt: skip
    return [{**one, "ts": one["ts"] + ahead_us} for one in events]


def waiting_job(folder: Path, ahead_us: float = 0.0) -> RecordingJob:
    """Rank 0 is done with its product after 30 us, rank 1 after 70."""
    return load_ranks(folder, {0: waiting_events(30), 1: waiting_events(70, ahead_us)})
