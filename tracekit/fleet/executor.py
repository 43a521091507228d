"""What runs the analyses of a study: the words that executors and the driver share.

In: `Task`s, largest first. Out: an `Outcome` each, in whatever order they end. `local.LocalExecutor` runs processes of
this machine, `on_ray.RayExecutor` tasks of a Ray cluster; both call `analyse.analyse` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tracekit.fleet.sources import Source

#: Memory of a process that analyses nothing yet, and at most for each byte of a trace: Parquet takes some 10.
BASE_BYTES, BYTES_PER_BYTE = 220 << 20, 40
#: Environment of a process that analyses: one thread, so that sums are the same everywhere and cores are not contended.
ONE_THREAD = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Task:
    """One source to analyse. `study`: the folder that takes the result. `analysis`: which analysis the study is of."""

    source: Source
    study: str
    analysis: str

    @property
    def memory_bytes(self) -> int:
        """How much memory the analysis takes at most, by the size of the trace."""
        return BASE_BYTES + BYTES_PER_BYTE * self.source.bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended. `digest`: of the content, None where it could not be read.

    `rule`, `reason`: why there is no result that lasts, None where there is one. `died`: the process ended on it.
    `stamp`: of the source as it was read, "" where it can hide another content. `reused`: the result was there already.
    Seconds of wall-clock time: `read_s` to read and check the trace, `analyse_s` for its figures, `write_s`. Seconds of
    processor time, which busy neighbours do not change: `cpu_s` in all, `analyse_cpu_s` of them for the figures.
    """

    url: str
    digest: str | None = None
    stamp: str = ""
    rule: str | None = None
    reason: str | None = None
    died: bool = False
    reused: bool = False
    read_s: float = 0.0
    analyse_s: float = 0.0
    write_s: float = 0.0
    cpu_s: float = 0.0
    analyse_cpu_s: float = 0.0
    peak_bytes: int = 0


class Executor(Protocol):
    """Runs tasks. An outcome comes for each task, whatever happens to the process that runs it."""

    def run(self, tasks: Sequence[Task], *, alone: bool = False) -> Iterator[Outcome]:
        """The outcomes, as they come. `alone`: one at a time, each in a process of its own."""
