"""What the diagnosis concludes, as a report has it: trust, verdict, findings, fixes.

In: what the analysis found. Out: plain data, with every sentence that a reader sees. While the diagnosis is made, its
causes and fixes are these, too, and carry what prices them beside (`Cause`, `PricedFix`).
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct

from tracekit.analysis.attribution.patterns import SpacePattern, TimePattern
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.report.finding import Place, SeenOnce, Spent, Unit
from tracekit.report.plain_data import Maybe, Number
from tracekit.report.verdict import LossKind


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


class LossParts(Struct, frozen=True):
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
    """The kind of loss that costs most, and the total loss.

    `headline_s`: seconds of the mean step that `kind` costs; `lost_s`: that all losses cost together; `share`: the
    total loss over the recorded step. `label`: what readers see of the kind, which tells slow ranks from ranks with
    more work. `sentence`: the verdict in words, without its kind. `confidence`: that of the leading cause, 0 to 1, None
    if no cause is named. `parts`: what S consists of, with all causes. `of_mean_ops`: the loss is what S counts,
    compared with mean ops. `first_fix`: the place of the fix to begin with; `who`, `cost`, `action`: as of the answer.
    """

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
    parts: LossParts
    of_mean_ops: bool
    first_fix: int | None
    who: str | None
    cost: str | None
    action: str | None
    exposed_communication_s: Maybe[float] = UNSET
    culprit: Maybe[RankToBlame | None] = UNSET


class Patterns(Struct, frozen=True):
    """How the slowdown runs over steps and workers; null for jobs that are no pipelines."""

    time: TimePattern | None
    space: SpacePattern | None


class EvidenceFigure(Struct, frozen=True):
    """A figure that supports a cause."""

    name: str
    value: Number
    needed: float
    unit: Unit
    words: str


class Finding(Struct, frozen=True):
    """One cause of a job's slowness.

    `effect`: what it does, as a phrase with its size in it; `evidence`: the figures behind it. `time`: how it develops
    over the steps, None if that is meaningless; `since_step`: first step of a lasting change or of a run of slow steps,
    None: from the beginning; `when`: when it acts, in words. `saved_s`: mean step seconds saved if only this cause
    goes; `alone_s`: mean step seconds that it costs if all other named causes are gone. The two differ if causes hide
    each other. `bound`: `saved_s` is an upper bound. `saved_when_acting_s`: as `saved_s`, over the steps in which it
    acts, None if that is all of them. `confidence`: 0 to 1. `spent`: what the time of a recording is spent on.
    `saves_step_s`: what its end saves of a step as it runs without the profiler, seconds; None if that is not known, or
    if no profiler recorded the job. `once`: the steps in which it was seen, None if it returns. `costs`: what it costs,
    in words. `priced`: whether a replay tells what it costs; else the trace is at fault, or nothing is wrong.
    """

    kind: str
    title: str
    where: Place
    where_text: str
    since_step: int | None
    when: str
    time: TimePattern | None
    signature: str
    effect: str
    evidence: tuple[EvidenceFigure, ...]
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
    """One fix and its price.

    `new_step_s`: mean recorded step with the fix, seconds; `saved_s`: mean seconds saved per step, +- `error_s` (replay
    error, and half the 95 % interval of the saving over the steps). `bound`: True if `saved_s` is an upper bound.
    `withheld`: why no saving is reported, None if one is; the figures are then None. `assumes`: what the price assumes
    but the trace does not show, None if nothing. `cause`: the cause that the fix addresses, with `confidence` in that
    cause, 0 to 1; None for a fix that any job can try. `edit`: the fix as text that `whatif --fix` gives the same
    price, to be changed and asked again; None if it is no change of costs. `details`: the plan as plain data.
    `saves_step_s`: as of `Finding`; `unprofiled_step_s`: the step without the profiler, as it is.
    `saved_gpu_hours_per_day` is of that.
    """

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
