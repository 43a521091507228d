"""The words of the store: jobs, windows, and the parts that a window consists of.

Here because the catalogue, the folder and the single file of older stores all speak of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tracekit.findings import Findings, Unanalysed
from tracekit.model import Layout
from tracekit.op_trace import OpTrace
from tracekit.trace import Trace

AnyTrace = Trace | OpTrace


class TraceKind(StrEnum):
    """What kind of trace a window holds: of a pipeline (version 1), or of ops of any shape (version 2)."""

    PIPELINE = "pipeline"
    OPS = "ops"


class Part(StrEnum):
    """What a window consists of, each a file: its ops, the report on them, the slowdown of each worker in each step."""

    OPS = "ops"
    REPORT = "report"
    WORKERS = "workers"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """How large a file is, and the CRC-32 of its bytes."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the store knows of a job without reading its ops; `steps` and `ops` of all its windows together.

    `layout`: None for op traces. `ranks`: GPUs of the layout, or ranks of an op trace.
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


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """One window of a job, as the catalogue has it.

    `slowdown`: S, None where it was not analysed. `problem`: why it could not be. `files`: its parts; without
    `Part.OPS` its ops were pruned.
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
    files: Mapping[Part, StoredFile]


@dataclass(frozen=True, slots=True)
class Incoming:
    """A trace on its way into the store.

    `name`: the job's name there. `source`: where the trace came from. `findings`: of its analysis, if that was asked.
    """

    trace: AnyTrace
    name: str
    source: str
    findings: Findings | Unanalysed | None = None


def trace_kind(trace: AnyTrace) -> TraceKind:
    """Which kind of trace this is."""
    return TraceKind.OPS if isinstance(trace, OpTrace) else TraceKind.PIPELINE
