"""Data model of fixes: what to do, how long the step takes afterwards, how certain the price is.

In: the replays of `price`. Out: `Fix`, one row of the table that `whatif` prints and that `--json` contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tracekit.analysis.causes.model import CauseKind, Where
from tracekit.analysis.evidence.changes import Change


class FixKind(StrEnum):
    """The kinds of fixes."""

    REPLACE_WORKERS = "replace-workers"
    DRAIN_HOST = "drain-host"
    REPARTITION = "repartition-stages"
    BALANCE_SEQUENCES = "balance-sequences"
    PLANNED_GC = "planned-gc"
    ASYNC_CHECKPOINT = "async-checkpoint"
    EVALUATE_ELSEWHERE = "evaluate-elsewhere"
    STOP_PAUSES = "stop-pauses"
    STEADY_STEPS = "steady-steps"
    REPAIR_LINK = "repair-link"
    REPAIR_NIC = "repair-nic"
    CALM_NETWORK = "calm-network"
    PREFETCH = "prefetch-data"
    SPEED_UP_HOST_CODE = "speed-up-host-code"
    HIDE_LAUNCHES = "hide-launch-delays"
    FREE_CORES = "free-cores"
    OVERLAP_DP = "overlap-dp-communication"
    COMPRESS_DP = "compress-dp-communication"
    MORE_MICROBATCHES = "more-microbatches"
    SHIFT_WORK = "shift-work-from-slow-worker"
    COMBINATION = "combination"


@dataclass(frozen=True)
class Fix:
    """One fix and its price.

    `new_step_s`: mean recorded step with the fix, seconds; `saved_s`: mean seconds saved per step, +- `error_s` (replay
    error and standard error of the saving over the steps). `bound`: True if `saved_s` is an upper bound. `withheld`:
    why no saving is reported, None if one is; `to_dict` then leaves the figures out. `cause`: the cause that the fix
    addresses, with `confidence` in that cause, 0 to 1; None for a fix that any job can try. `details`: the plan as
    plain data.
    """

    kind: FixKind
    title: str
    where: Where
    new_step_s: float
    saved_s: float
    saved_gpu_hours_per_day: float
    error_s: float
    bound: bool = False
    withheld: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    change: Change | None = field(default=None, repr=False, compare=False)
    cause: CauseKind | None = None
    confidence: float | None = None

    @property
    def assumes(self) -> str | None:
        """What the price assumes but the trace does not show; None if nothing."""
        assumed = self.details.get("assumes")
        return None if assumed is None else str(assumed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `whatif --json`."""
        promised = self.withheld is None
        return {
            "kind": str(self.kind),
            "title": self.title,
            "where": self.where.to_dict(),
            "where_text": str(self.where),
            "new_step_s": self.new_step_s if promised else None,
            "saved_s": self.saved_s if promised else None,
            "saved_gpu_hours_per_day": self.saved_gpu_hours_per_day if promised else None,
            "error_s": self.error_s,
            "bound": self.bound,
            "withheld": self.withheld,
            "assumes": self.assumes,
            "cause": None if self.cause is None else str(self.cause),
            "confidence": self.confidence,
            "details": dict(self.details),
        }
