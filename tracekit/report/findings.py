"""The stored result of analysing a trace: a report, its figures, slowdowns of workers; and fixes that were applied.

In: a report and an array. Out: columns of the catalogue, and rows. The analysis creates it, the store keeps it,
and neither needs to know the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.base.text import seconds, with_error
from tracekit.report.finding import Place
from tracekit.report.report import Report
from tracekit.trace.model import Worker

#: Figures of a report that lists of jobs show, stored separately so that nobody parses a thousand reports.
FIGURES = (
    "slowdown",
    "waste",
    "straggling",
    "trustworthy",
    "recorded_s",
    "original_s",
    "ideal_s",
    "lost_gpu_hours",
    "lost_gpu_hours_per_day",
    "cause_kinds",
    "cause_places",
    "cause_hosts",
)


class WorkerSlowdowns(Struct, frozen=True):
    """Exact slowdown of each worker in each step: `slowdown` is [steps, dp_ranks, stages].

    `steps` and `dp_ranks` name the first two axes.
    """

    steps: npt.NDArray[np.int64]
    dp_ranks: npt.NDArray[np.int64]
    slowdown: npt.NDArray[np.floating[Any]]

    @classmethod
    def of_rows(cls, rows: pl.DataFrame) -> WorkerSlowdowns:
        """The inverse of `rows`."""
        dp_ranks = rows["dp_ranks"][0].to_numpy().astype(np.int64)
        slowdown = rows["slowdown"].explode().to_numpy().reshape(rows.height, len(dp_ranks), -1)
        return cls(rows["step"].to_numpy().astype(np.int64), dp_ranks, slowdown)

    def rows(self, step_starts: Mapping[int, float]) -> pl.DataFrame:
        """One row per step: `step`, `started_at`, `dp_ranks`, and `slowdown`, in which stages vary fastest.

        `step_starts`: seconds since the epoch, if known.
        """
        steps, workers = len(self.steps), self.slowdown[0].size
        return pl.DataFrame(
            {
                "step": pl.Series(self.steps, dtype=pl.Int32),
                "started_at": pl.Series([step_starts.get(step) for step in self.steps.tolist()], dtype=pl.Float64),
                "dp_ranks": pl.Series([self.dp_ranks.tolist()] * steps, dtype=pl.List(pl.Int32)),
                "slowdown": self.slowdown.astype(np.float32).reshape(steps, workers),
            },
            schema_overrides={"slowdown": pl.Array(pl.Float32, workers)},
        ).with_columns(pl.col("slowdown").arr.to_list())


class Findings(Struct, frozen=True, dict=True):
    """What a store keeps of an analysis: the report, and S of workers, None for a job without that layout."""

    report: Report
    workers: WorkerSlowdowns | None = None

    def figures(self) -> dict[str, Any]:
        """The `FIGURES` from the report."""
        report = self.report
        verdict, times, causes = report.verdict, report.step_time_s, report.findings
        return {
            **{name: getattr(report, name) for name in ("slowdown", "waste", "straggling")},
            "trustworthy": report.trust.trustworthy,
            "recorded_s": times.recorded,
            "original_s": times.original,
            "ideal_s": times.ideal,
            "lost_gpu_hours": verdict.lost_gpu_hours,
            "lost_gpu_hours_per_day": verdict.lost_gpu_hours_per_day,
            "cause_kinds": [cause.kind for cause in causes],
            "cause_places": list(report.answer.places),
            "cause_hosts": [self._host_of(cause.where) for cause in causes],
        }

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of the mean step, at the rate of the steps that log tokens; None if none does."""
        rate = self.report.tokens_per_s
        return None if rate is None else rate * self.report.step_time_s.recorded

    def with_code(self, rank: int, words: str) -> Findings:
        """The findings, with the line of code of what slows a rank down (`CauseInWords.code`)."""
        answer = self.report.answer
        new = tuple(replace(account, code=words) if rank in account.ranks else account for account in answer.accounts)
        return replace(self, report=replace(self.report, answer=replace(answer, accounts=new)))

    def hosts(self) -> list[str]:
        """The hosts of the job, as far as they are known."""
        return sorted(set(self._known_hosts.values()))

    @cached_property
    def _known_hosts(self) -> dict[Worker | int, str]:
        """The host of each worker, or of each rank of a job without workers."""
        hosts: dict[Worker | int, str] = {row.worker: row.host for row in self.report.by_worker or () if row.host}
        return hosts | {row.rank: row.host for row in self.report.by_rank or () if row.host}

    def _host_of(self, where: Place) -> str | None:
        """The only host of a place; None if it has several, or no known one."""
        if where.host:
            return where.host
        places: Sequence[Worker | int] = where.workers or where.ranks
        hosts = {self._known_hosts.get(place) for place in places}
        return hosts.pop() if len(hosts) == 1 else None


class Unanalysed(Struct, frozen=True):
    """Why a trace has no findings."""

    problem: str


class AppliedFix(Struct, frozen=True):
    """A fix for the job `before`, applied in the job `after`.

    `noted_at`: seconds since the epoch. `expected_s`, +- `error_s`: what the report on `before` promised, seconds a
    `whole`. `got_s`: by how much `after` is faster, with its 95 % interval; None if there are too few steps.
    `expected_gpu_hours_per_day`: the same saving at the rate of `before`.
    """

    noted_at: float = msgspec.field(name="at")
    by: str
    before: str
    after: str
    kind: str
    title: str
    whole: str
    expected_s: float
    error_s: float
    got_s: float
    low_s: float | None
    high_s: float | None
    expected_gpu_hours_per_day: float

    @property
    def got_gpu_hours_per_day(self) -> float:
        """What it gives back at the rate of the job before."""
        return self.expected_gpu_hours_per_day * self.got_s / self.expected_s if self.expected_s else 0.0

    @property
    def outcome(self) -> str:
        """Expected and got, without naming the jobs."""
        saving = f"{seconds(self.got_s)} less" if self.got_s >= 0 else f"{seconds(-self.got_s)} more"
        if self.low_s is not None and self.high_s is not None:
            saving += f" (95% interval {seconds(self.low_s)} to {seconds(self.high_s)})"
        return f"expected {with_error(self.expected_s, self.error_s)} less a {self.whole}, got {saving}"
