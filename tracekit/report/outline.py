"""Which job a report is about, how it was analysed, and how much of it was recorded.

In: a trace and its graph. Out: plain data; a key that a source lacks is absent.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct

from tracekit.analysis.replay.method import Method
from tracekit.report.plain_data import Maybe, Number
from tracekit.trace.model import Layout, OpKind, Worker


class Outline(Struct, frozen=True):
    """Which job. `format`, `trajectories`, `engines`, `basis`: of a run of post-training."""

    name: str
    source: Literal["pipeline", "ops", "recording", "rl"]
    whole: Literal["step", "recording"]
    sizes: str
    gpus: int
    steps: int
    layout: Maybe[Layout] = UNSET
    ops: Maybe[int] = UNSET
    evidence_steps: Maybe[int] = UNSET
    ranks: Maybe[int] = UNSET
    world_size: Maybe[int | None] = UNSET
    gpu: Maybe[str | None] = UNSET
    gpu_ops: Maybe[int] = UNSET
    gpu_ops_without_launch: Maybe[int] = UNSET
    host_calls: Maybe[int] = UNSET
    format: Maybe[str] = UNSET
    trajectories: Maybe[int] = UNSET
    engines: Maybe[int] = UNSET
    basis: Maybe[Literal["trajectories", "phases"]] = UNSET


class Times(Struct, frozen=True):
    """Seconds of the mean step."""

    recorded: float
    original: float
    ideal: float
    with_delays: Maybe[float] = UNSET


class MethodUsed(Struct, frozen=True):
    """The rules of the analysis."""

    name: Method
    published_slowdown: Number
    differs_because: list[str]


class ClockOfRank(Struct, frozen=True):
    """The clock of a rank in a recording."""

    rank: int
    ahead_s: float
    uncertainty_s: Number
    collectives: int


class CoverageGap(Struct, frozen=True):
    """Ops of collectives that a worker lacks although its peers recorded them."""

    kind: OpKind
    dp_rank: int
    pp_rank: int
    ops: int
    steps: list[int]


class Coverage(Struct, frozen=True):
    """How much of the job was traced."""

    workers_expected: int
    workers_traced: int
    worker_steps_expected: int
    worker_steps_traced: int
    missing_workers: list[Worker]
    gaps: list[CoverageGap]
    slowdown_as_recorded: Number
    hidden_slowdown: Number
    left_out_steps: list[int]
    dropped: list[dict[str, int]]
    inferred_transfers: bool
