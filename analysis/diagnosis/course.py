"""When a cause acts, in words.

In: its place and its time pattern. Out: what a report says of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.report.finding import Place


def since_step(where: Place, time: TimePattern | None) -> int | None:
    """First step of a lasting change or of a run of slow steps; None: from the beginning."""
    if time is not None and time.since_step is not None:
        return time.since_step
    return where.steps[0] if where.steps else None


def is_run(steps: Sequence[int]) -> bool:
    """Whether these are several steps in a row."""
    return len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1


def steps_words(steps: Sequence[int]) -> str:
    """Ascending steps: "step 7", "steps 7 to 12", or "6 steps, 7 the first"."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"steps {steps[0]} to {steps[-1]}" if is_run(steps) else f"{len(steps)} steps, {steps[0]} the first"


def when(where: Place, time: TimePattern | None, whole: str, *, by_chance: bool) -> str:
    """When it acts. `whole`: what seconds are of, "step" or "recording"; `by_chance`: no step is certain to have it."""
    if time is not None and time.period is not None:
        return f"every {time.period} steps"
    if time is not None and time.since_step is not None:
        return f"since step {time.since_step}"
    steps = where.steps or (() if time is None else time.slow_steps)
    if steps:
        return f"in {steps_words(steps)}"
    if whole != "step":
        return f"over the {whole}"
    return "again and again" if by_chance else "in every step"
