"""Custom what-if questions, answered.

In: replays. Out: `Question` and `ByLabel`, as reports hold them.
"""

from __future__ import annotations

from msgspec import Struct

from tracekit.analysis.attribution.by_label import Share


class Question(Struct, frozen=True):
    """One custom what-if question and its answer.

    `step_time_s`: the mean recorded step after the edit, as fixes are priced; of `keep only`, T of its replay, without
    launch delays, and what it saves is compared with T(original).
    """

    question: str
    ops: int
    step_time_s: float
    saved_s: float
    saved_gpu_hours_per_day: float


class ByLabel(Struct, frozen=True):
    """What the ops of each value of a label, or of a combination of labels, cost; costliest first."""

    labels: tuple[str, ...]
    shares: tuple[Share, ...]
