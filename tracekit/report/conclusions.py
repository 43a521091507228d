"""What the diagnosis concludes, as a report has it: trust, verdict, findings, fixes.

In: a `Diagnosis`, whose objects also carry what prices them. Out: plain data, with every sentence that a reader sees.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct

from tracekit.analysis.attribution import patterns
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.report.finding import Place, SeenOnce, Spent, Unit
from tracekit.report.plain_data import Maybe, Number
from tracekit.report.verdict import LossKind
from tracekit.trace.model import Worker


class Trust(Struct, frozen=True):
    """Whether to believe the report."""

    replay_error: Number
    discrepancy: Number
    unexplained: Number
    trustworthy: bool
    reasons: list[str]
    clamped_transfers: Maybe[int] = UNSET
    clamped_delays: Maybe[int] = UNSET
    notes: Maybe[list[str]] = UNSET
    start_gap_p99_s: Maybe[dict[str, Number]] = UNSET
    edges: Maybe[int] = UNSET
    inferred_edges: Maybe[int] = UNSET
    violations: Maybe[int] = UNSET
    host_ahead_of_gpu_s: Maybe[dict[int, float]] = UNSET


class Loss(Struct, frozen=True):
    """What one kind of loss costs. `causes`: places in the report's causes, in the order in which to address them;
    `explained_s`: what goes when they go.
    """

    kind: LossKind
    lost_s: float
    causes: list[int]
    explained_s: float


class Parts(Struct, frozen=True):
    """What the loss that S measures consists of."""

    lost_s: float
    explained_s: float
    noise_s: float
    unexplained_s: float
    error_s: float


class CauseOfCulprit(Struct, frozen=True):
    """One cause on the rank that the others wait for."""

    cause: str
    saved_s: float
    evidence: str
    effect: str
    action: str


class RankToBlame(Struct, frozen=True):
    """The rank that the others wait for."""

    rank: int
    host: str | None
    saved_s: float
    sole_delay_s: Number
    waited_s: Number
    causes: list[CauseOfCulprit]


class Verdict(Struct, frozen=True):
    """What kind of loss the job has, and how much."""

    kind: LossKind
    label: str
    headline_s: float
    lost_s: float
    share: float
    lost_gpu_hours: float
    lost_gpu_hours_per_day: float
    sentence: str
    confidence: float | None
    losses: list[Loss]
    parts: Parts
    of_mean_ops: bool
    first_fix: int | None
    who: str | None
    cost: str | None
    action: str | None
    exposed_communication_s: Maybe[float] = UNSET
    culprit: Maybe[RankToBlame | None] = UNSET


class TimePattern(Struct, frozen=True):
    """How a slowdown runs over the steps."""

    shape: patterns.TimeShape
    statistic: Number
    needed: float
    since_step: int | None
    period: int | None
    slow_steps: list[int]


class SpacePattern(Struct, frozen=True):
    """How the slowdown is spread over the workers."""

    shape: patterns.SpaceShape
    workers: list[Worker]
    host: str | None
    stays: Number


class Patterns(Struct, frozen=True):
    """How the slowdown runs over steps and workers; null for jobs that are no pipelines."""

    time: TimePattern | None
    space: SpacePattern | None


class Figure(Struct, frozen=True):
    """A figure that supports a cause."""

    name: str
    value: Number
    needed: float
    unit: Unit
    words: str


class Finding(Struct, frozen=True):
    """Why the job is slow."""

    kind: str
    title: str
    where: Place
    where_text: str
    since_step: int | None
    when: str
    time: TimePattern | None
    signature: str
    effect: str
    evidence: list[Figure]
    confidence: float
    saved_s: float
    alone_s: float
    bound: bool
    saved_when_acting_s: float | None
    refuted_by: str
    next_check: str
    suggested_fix: str
    spent: Spent | None
    saves_step_s: Estimate | None
    once: SeenOnce | None
    costs: str
    priced: bool


class Fix(Struct, frozen=True):
    """What to do, and what that saves."""

    kind: str
    title: str
    where: Place
    where_text: str
    new_step_s: float | None
    saved_s: float | None
    saved_gpu_hours_per_day: float | None
    error_s: float
    bound: bool
    withheld: str | None
    assumes: str | None
    cause: str | None
    confidence: float | None
    edit: str | None
    details: dict[str, Any]
    saves_step_s: Estimate | None
    unprofiled_step_s: float | None

    @property
    def worth_s(self) -> float:
        """By what fixes are ordered: what a step saves without the profiler, if the job was recorded with one."""
        return (self.saved_s or 0.0) if self.saves_step_s is None else self.saves_step_s.value
