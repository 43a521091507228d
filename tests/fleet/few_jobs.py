"""Small jobs in a folder, and studies of them as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.handmade import LAYOUT, healthy_frame, slow_trace
from tracekit.fleet.executors import LocalExecutor, work
from tracekit.fleet.sources import find_sources
from tracekit.fleet.study import RunSummary, Study, run_study
from tracekit.fleet.study_tables import TABLES
from tracekit.fleet.tasks import Task, TaskOutcome
from tracekit.trace.canonical import Trace

STEPS = range(4)
GIB = 1 << 30


def write_jobs(folder: Path, count: int = 5) -> Path:
    """The slow job `count` times under other names, the healthy one, a copy, and a file that is no trace."""
    folder.mkdir()
    for number in range(count):
        slow_trace(STEPS, name=f"slow {number}").write_parquet(folder / f"slow{number}.parquet")
    Trace.from_frame(healthy_frame(STEPS), LAYOUT, name="healthy").write_parquet(folder / "healthy.parquet")
    (folder / "copy.parquet").write_bytes((folder / "slow0.parquet").read_bytes())
    (folder / "torn.parquet").write_bytes((folder / "slow0.parquet").read_bytes()[:2000])
    return folder


def study_of(*sources: Path, out: Path, processes: int = 2) -> RunSummary:
    """Run a study with processes of this machine."""
    return run_study(Study(out), find_sources(map(str, sources)), LocalExecutor(processes, 2 * GIB))


class Here:
    """An executor without a process of its own."""

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> Iterator[TaskOutcome]:
        del alone
        yield from map(work, tasks)


def study_here(*sources: Path, out: Path) -> RunSummary:
    """Run a study in this process, where processes are not the point."""
    return run_study(Study(out), find_sources(map(str, sources)), Here())


def tables(study: Path) -> dict[str, bytes]:
    """Every file of the tables."""
    return {
        f"{name}/{path.name}": path.read_bytes() for name in TABLES for path in sorted((study / name).glob("*.parquet"))
    }
