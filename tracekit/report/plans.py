"""The best plan of a job, and what step times of whole runs say of others: plain data for JSON and all renderers.

In: what `analysis/plans/` found. Out: `Optimum` and `RunLine`. docs/plans.md explains the figures.
"""

from __future__ import annotations

from msgspec import Struct

from tracekit.report.conclusions import Fix


class PlanTimes(Struct, frozen=True):
    """Seconds: of the plan in use and of the best one, null if none fits."""

    now: float
    best: float | None


class PlanSettings(Struct, frozen=True):
    """A plan in the terms of frameworks. `bucket_cap_mb`: the one limit that comes closest to the buckets of the plan,
    with which DistributedDataParallel takes `step_time_s`; null without reductions. `layers`: of each stage;
    `recompute_layers`: their numbers, from 0. `paste`: framework -> settings to copy.
    """

    bucket_cap_mb: float | None
    step_time_s: float
    layers: list[int]
    microbatches: int
    recompute_layers: list[int]
    paste: dict[str, str]


class FrontPlan(Struct, frozen=True, kw_only=True):
    """A plan. `memory_gb`: of the fullest stage, null if unknown."""

    memory_gb: float | None
    step_time_s: float
    split: list[int]
    schedule: str
    microbatches: int
    recompute: list[bool]


class OptimizedPlan(FrontPlan, frozen=True, kw_only=True):
    """A plan of those found. `bound_s`: nothing in the space is faster. `buckets`: of each stage, how many layers each
    bucket holds, last layers first. `tied`: closer to the best plan than the replay can tell apart.
    """

    saved_s: float
    bound_s: float
    buckets: list[list[int]]
    settings: PlanSettings
    tied: bool


class Searched(Struct, frozen=True):
    """Plans of the space, before memory, and how many of them were replayed."""

    plans: int
    replayed: int


class Optimum(Struct, frozen=True):
    """What `tracekit optimize` found. `plans`: best first, none if nothing fits, with the `reason`. `nothing_to_gain`:
    the plan in use fits and no plan is faster than it. `gap`: by what share of its step a plan may still be faster than
    the best one: 0 if the space was searched to the end. `front`: the fastest plan at each size of memory, smallest
    first; none if memory is unknown. `limit_gb`: of memory, null: none; `now`: the plan in use. `error`: how far
    the replay is from the recording, relative; 0 for a model file. `notes`: what the figures rest on.
    `moves`: fixes in the report of a recorded job that change its plan.
    """

    step_time_s: PlanTimes
    plans: list[OptimizedPlan]
    nothing_to_gain: bool
    searched: Searched
    reason: str | None
    front: list[FrontPlan]
    limit_gb: float | None
    now: FrontPlan
    gap: float = 0.0
    error: float = 0.0
    notes: list[str] = []
    moves: list[Fix] = []


class StepLine(Struct, frozen=True):
    """A step takes `per_microbatch_s` for each microbatch of a pipeline, and `fixed_s`."""

    per_microbatch_s: float
    fixed_s: float


class ConfidenceInterval(Struct, frozen=True):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


class RunOfMicrobatches(Struct, frozen=True):
    """The step time of a run with so many microbatches."""

    microbatches: int
    step_time_s: ConfidenceInterval


class RunLine(Struct, frozen=True):
    """What `tracekit optimize --runs` found."""

    line: StepLine
    microbatches: list[RunOfMicrobatches]
