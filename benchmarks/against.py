"""This tracekit against another version: the same `whatif` commands, in turn.

Other work on the machine slows both alike, so ratios hold where seconds do not. TRACEKIT_BEFORE is the path of the
`tracekit` command of the other environment.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.core import LONG_STEPS, WORKERS, Measured, write_traces
from benchmarks.measure import MeasuredRun, measure, table, tracekit

#: Rounds per trace.
ROUNDS = 5
QUICK = {"ROUNDS": 1, "LONG_STEPS": 100, "WORKERS": (32,)}
_HEADER = ["whatif of", "CPU s", "CPU s before", "ratio", "wall s", "wall s before", "peak MB", "before"]


def section() -> str | None:
    """The Markdown of this section; None if TRACEKIT_BEFORE is not set."""
    before = os.environ.get("TRACEKIT_BEFORE")
    if not before:
        print("against: set TRACEKIT_BEFORE to the tracekit command to compare with")
        return None
    with tempfile.TemporaryDirectory() as folder:
        rows = [_row(before, trace) for trace in write_traces(Path(folder), LONG_STEPS, WORKERS)]
    intro = (
        f"Whole processes in turn, {ROUNDS} rounds: medians, and the median of the rounds' ratios of CPU time (user"
        " and system). Above 1, this version is faster."
    )
    return f"## Speed against the version before\n\n{intro}\n\n{table(_HEADER, rows)}"


def _row(before: str, trace: Measured) -> list[str]:
    runs: dict[str, list[MeasuredRun]] = {"now": [], "before": []}
    for _ in range(ROUNDS):
        for name, command in (("now", tracekit(*trace.whatif)), ("before", (before, *trace.whatif))):
            runs[name].append(measure(*command, runs=1, warm_up=0))
    ratio = statistics.median(old.cpu_s / new.cpu_s for new, old in zip(runs["now"], runs["before"], strict=True))
    cpu, wall = (
        [f"{statistics.median(getattr(run, field) for run in found):.2f}" for found in runs.values()]
        for field in ("cpu_s", "wall_s")
    )
    return [trace.name, *cpu, f"{ratio:.2f}", *wall, *(_peak(found) for found in runs.values())]


def _peak(runs: Sequence[MeasuredRun]) -> str:
    return f"{max(run.peak_mb for run in runs):.0f}"
