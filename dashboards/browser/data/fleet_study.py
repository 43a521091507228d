"""The report of a study of many jobs next to the store, cached per state of the study.

In: the folder of a study. Out: a `FleetReport`. Building it takes seconds for 100,000 jobs, so it is built when the
server starts and rebuilt after a run has changed the study.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tracekit.base.errors import TracekitError
from tracekit.fleet.figures import CURVE, FleetFigures, counted_jobs, figures_of, quantiles
from tracekit.fleet.recurring_culprits import FALSE_DISCOVERY_RATE, recurring_culprits
from tracekit.fleet.study import Study


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Figures of a study. `curves`: quantiles as of `figures.quantiles`; `culprits`: recurring ones at that `rate`.

    `jobs`: those that count, with `causes`, their kinds of cause; the job that loses most first.
    """

    name: str
    figures: FleetFigures
    curves: pl.DataFrame
    culprits: pl.DataFrame
    rate: float
    jobs: pl.DataFrame


class FleetStudy:
    """The study in a folder. Its report stays in memory until the study changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._study = Study(path)
        self._making = threading.Lock()
        self._kept: tuple[object, FleetReport] | None = None

    def report(self) -> FleetReport:
        """Return the report of the study as it is now. Raises StudyError if there is no study."""
        with self._making:
            state = self._study.state()
            if self._kept is None or self._kept[0] != state:
                self._kept = state, self._report()
            return self._kept[1]

    def of_job(self, job: str) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the causes of a job, and its fixes that save something, by its number in the study."""
        causes, fixes = (self._study.table(name).filter(pl.col("job") == job).collect() for name in ("causes", "fixes"))
        return causes, fixes.drop_nulls("saved_gpu_hours")

    def read_ahead(self) -> None:
        """Build the report in the background, so that the first request finds it ready."""
        threading.Thread(target=self._tried, daemon=True, name="fleet report").start()

    def _tried(self) -> None:
        with suppress(TracekitError):  # the page will show the error
            self.report()

    def _report(self) -> FleetReport:
        jobs = counted_jobs(self._study)
        causes = self._study.table("causes").group_by("job").agg(causes=pl.col("kind").unique()).collect()
        return FleetReport(
            self.path.name,
            figures_of(self._study),
            quantiles(jobs, CURVE),
            recurring_culprits(self._study, FALSE_DISCOVERY_RATE),
            FALSE_DISCOVERY_RATE,
            jobs.join(causes, on="job", how="left").sort(
                "lost_gpu_hours", "job", descending=[True, False], nulls_last=True
            ),
        )
