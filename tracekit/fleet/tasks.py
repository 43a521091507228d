"""Tasks of a study, their outcomes, and the interface of executors.

In: `Task`s, largest first. Out: a `TaskOutcome` for each, in the order in which they end. Nothing here imports polars:
a worker decides first how it allocates, and with how many threads it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tracekit.fleet.sources import StudySource

#: Memory of an idle analysis process, and an upper bound for each byte of a trace: Parquet takes about 10.
BASE_BYTES, BYTES_PER_BYTE = 220 << 20, 40
#: Environment of an analysis process: one thread, so that sums are the same everywhere and cores are not contended.
ONE_THREAD = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Rule(StrEnum):
    """Reasons for leaving out a job. A job counts under the first rule that applies, in this order.

    The first four may be temporary: nothing lasting is known about such a source, and the next run tries it again.
    """

    UNREADABLE = "unreadable"  #: the source cannot be read: permission, network, gone
    CHANGED = "changed-while-read"  #: another trace replaced it meanwhile
    CRASHED = "crashed"  #: its analysis ended the process, twice
    NOT_STORED = "not-stored"  #: its rows could not be written: the disk is full
    NO_TRACE = "no-trace"  #: not of a format that tracekit reads, or damaged
    INVALID = "failed-validation"  #: the ops do not fit together
    FEW_STEPS = "too-few-steps"
    RESTARTS = "many-restarts"
    DISCREPANCY = "discrepancy"  #: launch delays that nothing explains add more than 5 %
    REPLAY_ERROR = "replay-error"  #: the replay misses the recording by more than 5 %
    DOUBTFUL = "doubtful"  #: the report cannot be trusted for another reason
    CLOCK = "clock"  #: the job counts, but not by time


@dataclass(frozen=True, slots=True)
class Task:
    """One source to analyse. `study`: the folder for the result. `analysis`: the version of the analysis."""

    source: StudySource
    study: str
    analysis: str

    @property
    def memory_bytes(self) -> int:
        """Upper bound for the memory of the analysis, bytes, given the size of the trace."""
        return BASE_BYTES + BYTES_PER_BYTE * self.source.bytes

    @property
    def name(self) -> str:
        """The name that people know it by."""
        return self.source.url


@dataclass(frozen=True, slots=True)
class Batch:
    """Some steps of one job to analyse: number `number` of the batches in `folder`, see `batches`."""

    folder: str
    number: int
    memory_bytes: int

    @property
    def name(self) -> str:
        """The name that people know it by."""
        return str(self.number)


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The outcome of a task. `url`: its name. `digest`: of the content, None if it could not be read.

    `rule`, `reason`: why there is no lasting result, None if there is one. `died`: the process ended while working on
    it. `stamp`: of the source as it was read, "" if other content could have the same. `reused`: the result existed
    already. Wall clock, seconds: `read_s` to read and check the trace, `analyse_s` for its figures, `write_s`.
    Processor time, seconds, which other load does not change: `cpu_s` in all, `analyse_cpu_s` of them for the figures.
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


AnyTask = Task | Batch


class Executor(Protocol):
    """Runs tasks. Yields an outcome for each task, even if its process dies."""

    def run(self, tasks: Sequence[AnyTask], *, alone: bool = False) -> Iterator[TaskOutcome]:
        """The outcomes, as tasks end. `alone`: one task at a time, each in a process of its own."""
