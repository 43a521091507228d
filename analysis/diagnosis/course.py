"""When a cause acts, in words.

In: its place and its time pattern. Out: what a report says of them.
"""

from __future__ import annotations

from tracekit.analysis.attribution.patterns import TimePattern
from tracekit.report.finding import Place


def since_step(where: Place, time: TimePattern | None) -> int | None:
    """First step of a lasting change or of a run of slow steps; None: from the beginning."""
    if time is not None and time.since_step is not None:
        return time.since_step
    return where.steps[0] if where.steps else None


def when(where: Place, time: TimePattern | None, whole: str, *, by_chance: bool) -> str:
    """When it acts. `whole`: what seconds are of, "step" or "recording"; `by_chance`: no step is certain to have it."""
    if time is not None and time.period is not None:
        return f"every {time.period} steps"
    if time is not None and time.since_step is not None:
        return f"since step {time.since_step}"
    steps = where.steps or (() if time is None else time.slow_steps)
    if steps:
        return f"in {len(steps)} steps, {steps[0]} the first" if len(steps) > 1 else f"in step {steps[0]}"
    if whole != "step":
        return f"over the {whole}"
    return "again and again" if by_chance else "in every step"
