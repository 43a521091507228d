"""Data model of the store: jobs, windows, and the parts of a window.

Shared by the catalogue and the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from tracekit.report.findings import Findings, Unanalysed
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, TraceKind
from tracekit.trace.op import OpTrace

AnyTrace = Trace | OpTrace


class WindowPart(StrEnum):
    """The parts of a window, each a file: its ops, the report on them, the slowdown of each worker in each step."""

    OPS = "ops"
    REPORT = "report"
    WORKERS = "workers"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The size of a file, and the CRC-32 of its bytes."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the store knows about a job without reading its ops; `steps` and `ops` are totals of all its windows.

    `layout`: None for op traces. `ranks`: GPUs of the layout, or ranks of an op trace. `gives_back`: GPU-hours a day
    that the first fix saves, None if the job was not analysed.
    """

    name: str
    source: str
    imported_at: datetime
    layout: Layout | None
    ranks: int
    steps: int
    ops: int
    windows: int
    kind: TraceKind
    gives_back: float | None


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """One window of a job, as in the catalogue.

    `slowdown`: S, None if it was not analysed. `problem`: why it could not be. `files`: its parts; without
    `WindowPart.OPS`, its ops were pruned.
    """

    job: str
    job_id: int
    number: int
    kind: TraceKind
    added_at: datetime
    first_step: int
    last_step: int
    ops: int
    slowdown: float | None
    problem: str | None
    files: Mapping[WindowPart, StoredFile]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A trace to be added to the store.

    `name`: the job's name there. `source`: where the trace came from. `findings`: of its analysis, if requested.
    """

    trace: AnyTrace
    name: str
    source: str
    findings: Findings | Unanalysed | None = None


@dataclass(frozen=True, slots=True)
class WrittenWindow:
    """A window whose `files` have been written, and which the catalogue does not name yet."""

    job_id: int
    number: int
    item: Incoming
    files: Mapping[WindowPart, StoredFile]
    added_at: datetime

    @property
    def key(self) -> dict[str, int]:
        """What its rows in the catalogue have in common."""
        return {"job_id": self.job_id, "number": self.number}


def known_starts(row: Mapping[str, Any]) -> dict[int, float]:
    """When the first and the last step of a window began, from its row in the catalogue: seconds since the epoch; none
    where unknown.
    """
    if row["started_at"] is None or row["ended_at"] is None:
        return {}
    return {row["first_step"]: row["started_at"], row["last_step"]: row["ended_at"]}
