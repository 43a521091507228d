"""Custom what-if questions about jobs of any shape: what if these ops were ideal, who costs how much.

In: a replay, and questions as people type them. Out: `Question`s and `ByLabel`s, answered.
"""

from __future__ import annotations

from msgspec import Struct

from tracekit.analysis.attribution.by_label import Share, attribute_by
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.scenario import ORIGINAL, Scenario
from tracekit.analysis.whatif.selection import count_selected
from tracekit.analysis.whatif.selection_text import checked_selection


class Question(Struct, frozen=True):
    """One custom what-if question and its answer; `step_time_s` is the mean step time of its replay."""

    question: str
    ops: int
    step_time_s: float
    saved_s: float
    saved_gpu_hours_per_day: float


class ByLabel(Struct, frozen=True):
    """What the ops of each value of a label, or of a combination of labels, cost; costliest first."""

    labels: tuple[str, ...]
    shares: tuple[Share, ...]


def answer(replay: GraphReplay, selection: str, gpus: int, *, keep: bool = False) -> Question:
    """What if the selected ops were ideal? With `keep`: what if only they were as recorded?

    Raises SelectionError for a selection that cannot be understood or matches no op.
    """
    chosen = checked_selection(selection, replay.graph, replay.durations)
    original = replay.mean_step_time(ORIGINAL)
    step_time = replay.mean_step_time(Scenario.addition(chosen) if keep else Scenario.removal(chosen))
    return Question(
        question=f"keep only {selection}" if keep else f"fix {selection}",
        ops=count_selected(chosen, replay.graph, replay.durations),
        step_time_s=step_time,
        saved_s=original - step_time,
        saved_gpu_hours_per_day=(1 - step_time / original) * gpus * 24,
    )


def by_labels(replay: GraphReplay, *labels: str) -> ByLabel:
    """Exact S_x for each value of a label of the ops, or for each combination of values of several labels.

    Raises SelectionError for a label that the job does not have, or one with too many values.
    """
    names = tuple(label.strip() for label in labels)
    return ByLabel(names, attribute_by(replay, names))
