"""Changes from one study to the next, by cause and by team.

In: two studies, such as last week's and this week's. Out: a row for each figure with its change, and the interval of
the change by the bootstrap over the jobs of both. A change is worse or better if that interval excludes zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Floats
from tracekit.fleet.figures import Interval, bootstrapped, counted_jobs, interval, of_jobs
from tracekit.fleet.study import Study

_ORDER = ["all jobs", "GPU-hours lost to", "GPU-hours lost by team"]


class ChangeDirection(StrEnum):
    """The direction of a change."""

    WORSE = "worse"
    BETTER = "better"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class FleetChange:
    """One figure of both studies, a share. `group`: its subject. `change`: after - before, with its interval; more is
    worse, and unclear if the interval includes zero.
    """

    group: str
    name: str
    before: float
    after: float
    change: Interval
    direction: ChangeDirection


@dataclass(frozen=True, slots=True)
class FleetComparison:
    """`jobs_before`, `jobs_after`: number of jobs that count. `changes`: of all jobs, then by cause and by team."""

    jobs_before: int
    jobs_after: int
    changes: tuple[FleetChange, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """One study: for each figure, the sums whose ratio it is, over all jobs and in each sample."""

    jobs: int
    sums: dict[tuple[str, str], tuple[Floats, Floats]]

    def ratio(self, figure: tuple[str, str]) -> tuple[float, Floats]:
        """The figure, and its value in each sample; nan if there are no such jobs."""
        if figure not in self.sums:
            return float("nan"), np.empty(0)
        totals, samples = self.sums[figure]
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(totals[0] / totals[1]), samples[:, 0] / samples[:, 1]


def compare_studies(before: Study, after: Study) -> FleetComparison:
    """Compare two studies. Raises StudyError."""
    sides = _read_side(before, seed=1), _read_side(after, seed=2)
    figures = sorted({*sides[0].sums, *sides[1].sums}, key=lambda figure: (_ORDER.index(figure[0]), figure[1]))
    return FleetComparison(sides[0].jobs, sides[1].jobs, tuple(_changes(figures, *sides)))


def _changes(figures: list[tuple[str, str]], before: _Side, after: _Side) -> Iterator[FleetChange]:
    for figure in figures:
        (first, samples), (second, other_samples) = before.ratio(figure), after.ratio(figure)
        count = min(len(samples), len(other_samples))
        low, high = interval(other_samples[:count] - samples[:count])
        yield FleetChange(*figure, first, second, Interval(second - first, low, high), _direction(low, high))


def _direction(low: float, high: float) -> ChangeDirection:
    """The direction of a change between `low` and `high`."""
    if low > 0:
        return ChangeDirection.WORSE
    return ChangeDirection.BETTER if high < 0 else ChangeDirection.UNCLEAR


def _read_side(study: Study, seed: int) -> _Side:
    jobs = counted_jobs(study)
    hours = jobs["gpu_hours"].to_numpy()
    lost = jobs["lost_gpu_hours"].fill_null(0.0).to_numpy()
    columns: dict[tuple[str, str], tuple[Floats, Floats]] = {
        ("all jobs", "jobs that straggle"): (jobs["straggling"].cast(pl.Float64).to_numpy(), np.ones(len(hours))),
        ("all jobs", "GPU-hours lost"): (lost, hours),
    }
    causes = (
        study.table("causes")
        .filter(pl.col("lost_gpu_hours") > 0)
        .select("job", "kind", "lost_gpu_hours")
        .collect()
        .join(jobs.select("job"), on="job", how="semi")
    )
    for (kind,), rows in causes.group_by("kind"):
        lost_by_job = rows.group_by("job").agg(pl.col("lost_gpu_hours").sum())
        columns["GPU-hours lost to", str(kind)] = of_jobs(jobs, lost_by_job, "lost_gpu_hours"), hours
    for team in jobs["team"].drop_nulls().unique():
        in_team = jobs["team"].eq_missing(team).to_numpy()
        columns["GPU-hours lost by team", team] = np.where(in_team, lost, 0.0), np.where(in_team, hours, 0.0)
    if not jobs.height:
        return _Side(0, {})
    sums = bootstrapped(np.stack([column for pair in columns.values() for column in pair], axis=1), seed)
    return _Side(
        jobs.height,
        {
            figure: (np.array([part.sum(), total.sum()]), sums[:, 2 * index : 2 * index + 2])
            for index, (figure, (part, total)) in enumerate(columns.items())
        },
    )
