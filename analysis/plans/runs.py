"""The line through step times of whole runs that differ in their microbatches.

In: a CSV file with the columns `microbatches` and `step_time_s`, a row a run. Out: the line T = a m + b, and step times
on it with intervals. A run's error is relative. Where runs of one count agree better than the line is true, the line's
own error counts: across published runs of one model, others are off by up to 1 %.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.student import student_beyond
from tracekit.analysis.plans.model import content_of
from tracekit.base.errors import FormatError
from tracekit.report.plans import ConfidenceInterval, RunLine, RunOfMicrobatches, StepLine

#: How far true step times are from a line, relative, a standard deviation.
OFF_THE_LINE = 0.005
#: Degrees of freedom that stand for that figure where no runs do.
_FREEDOM = 30
_LARGEST = 1e9


class WholeRuns(Struct, frozen=True, eq=False):
    """Step times, seconds, of runs with so many microbatches: the median of each count, [counts]."""

    microbatches: Floats
    step_time_s: Floats

    @classmethod
    def read(cls, path: Path) -> WholeRuns:
        """Read a file. Raises FormatError if it has no such columns, or runs of fewer than two counts."""
        try:
            rows = list(csv.DictReader(content_of(path).decode("utf-8-sig").splitlines()))
        except (UnicodeDecodeError, csv.Error) as error:
            raise FormatError(f"{path}: {error}; expected a CSV file") from None
        by_count: dict[float, list[float]] = {}
        for number, row in enumerate(rows, 2):
            values = [row.get(name) for name in ("microbatches", "step_time_s")]
            if None in values:
                raise FormatError(f"{path}: no column microbatches or step_time_s; expected microbatches,step_time_s")
            count, step_s = (_number(value) for value in values)
            if not (1 <= count <= _LARGEST and count % 1 == 0 and 0 < step_s <= _LARGEST):
                raise FormatError(f"{path}, line {number}: {','.join(map(str, values))}; expected a count and seconds")
            by_count.setdefault(count, []).append(step_s)
        if len(by_count) < 2:
            many = f"one count of microbatches, {min(by_count):g}" if by_count else "no runs"
            raise FormatError(f"{path}: {many}; a line needs runs with two counts or more")
        counts = sorted(by_count)
        medians = np.array([np.median(by_count[count]) for count in counts])
        if medians[-1] <= medians[0]:
            raise FormatError(
                f"{path}: steps of {counts[-1]:g} microbatches take no longer than those of {counts[0]:g}"
            )
        return cls(np.array(counts), medians)

    def line(self, counts: Sequence[int]) -> RunLine:
        """The line, and step times of runs with these numbers of microbatches."""
        # A relative error: rows are weighted by the step time.
        rows = np.stack([self.microbatches, np.ones(len(self.microbatches))], axis=1) / self.step_time_s[:, None]
        inverse = np.linalg.inv(rows.T @ rows)
        a, b = inverse @ rows.sum(axis=0)
        freedom = len(rows) - 2
        off = float(np.sum((rows @ np.array([a, b]) - 1) ** 2))
        relative = math.sqrt((off + _FREEDOM * OFF_THE_LINE**2) / (freedom + _FREEDOM))
        times = []
        for count in counts:
            row = np.array([count, 1.0])
            value = float(row @ np.array([a, b]))
            error = (
                relative * math.sqrt(float(row @ inverse @ row) + value**2) * student_beyond(0.025, freedom + _FREEDOM)
            )
            times.append(RunOfMicrobatches(count, ConfidenceInterval(value, max(value - error, 0.0), value + error)))
        return RunLine(StepLine(float(a), float(b)), times)


def _number(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        return math.nan
