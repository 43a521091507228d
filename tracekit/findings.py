"""What the analysis of a trace found, in the form that is stored: a report, its figures, slowdowns of workers.

In: a report's JSON and an array. Out: columns of the catalogue, and rows. The analysis makes it, the store keeps it,
and neither needs to know the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.records import dataclass

#: Figures of a report that lists of jobs show, so that nobody parses a thousand reports.
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


@dataclass(frozen=True, slots=True)
class WorkerSlowdowns:
    """Exact slowdown of each worker in each step: `slowdown` is [steps, dp_ranks, stages].

    `steps` and `dp_ranks` name the first two axes.
    """

    steps: Sequence[int]
    dp_ranks: Sequence[int]
    slowdown: npt.NDArray[np.float64]

    def rows(self, step_starts: Mapping[int, float]) -> pl.DataFrame:
        """One row per step: `step`, `started_at`, `dp_ranks`, and `slowdown` with stages next to each other.

        `step_starts`: seconds since the epoch, where known.
        """
        steps, workers = len(self.steps), self.slowdown[0].size
        return pl.DataFrame(
            {
                "step": pl.Series(self.steps, dtype=pl.Int32),
                "started_at": pl.Series([step_starts.get(step) for step in self.steps], dtype=pl.Float64),
                "dp_ranks": pl.Series([list(self.dp_ranks)] * steps, dtype=pl.List(pl.Int32)),
                "slowdown": self.slowdown.astype(np.float32).reshape(steps, workers),
            },
            schema_overrides={"slowdown": pl.Array(pl.Float32, workers)},
        ).with_columns(pl.col("slowdown").arr.to_list())


@dataclass(frozen=True)
class Findings:
    """What the analysis of a trace found: `report` is its JSON; `workers`: None for a job of another shape."""

    report: str
    workers: WorkerSlowdowns | None = None

    @cached_property
    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.report)
        return content

    def figures(self) -> dict[str, Any]:
        """`FIGURES`, taken out of the report."""
        found = self._content
        # The report on an op trace has no such verdict; it states what stragglers cost instead.
        verdict = found.get("verdict") or {}
        if "lost_gpu_hours" not in verdict:
            verdict = {f"lost_{name}": found[f"wasted_{name}"] for name in ("gpu_hours", "gpu_hours_per_day")}
        times = found["recording_time_s"] if "recording_time_s" in found else found["step_time_s"]
        causes = [*(found.get("causes") or []), *_causes_of_culprit(found)]
        return {
            **{name: found[name] for name in ("slowdown", "waste", "straggling")},
            "trustworthy": found["trust"]["trustworthy"],
            **{f"{name}_s": times[name] for name in ("recorded", "original", "ideal")},
            **{name: verdict[name] for name in ("lost_gpu_hours", "lost_gpu_hours_per_day")},
            "cause_kinds": [cause["kind"] for cause in causes],
            "cause_places": [cause["where_text"] for cause in causes],
            "cause_hosts": [self._host_of(cause["where"]) for cause in causes],
        }

    def hosts(self) -> list[str]:
        """The hosts of the job, as far as they are known."""
        return sorted(set(self._host_of_worker.values()))

    @cached_property
    def _host_of_worker(self) -> dict[tuple[int, int], str]:
        rows = self._content.get("by_worker") or []
        return {(row["dp_rank"], row["pp_rank"]): row["host"] for row in rows if row.get("host")}

    def _host_of(self, where: Mapping[str, Any]) -> str | None:
        """The one host of a place; None where it has several, or none that is known."""
        if where.get("host"):
            return str(where["host"])
        cells = [(worker["dp_rank"], worker["pp_rank"]) for worker in where.get("workers") or ()]
        hosts = {self._host_of_worker.get(cell) for cell in cells}
        return hosts.pop() if len(hosts) == 1 else None


def _causes_of_culprit(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The causes that the report on a GPU recording names, as others write theirs."""
    culprit = (report.get("verdict") or {}).get("culprit") or {}
    return [
        {
            "kind": cause["cause"],
            "where_text": f"rank {culprit['rank']}",
            "where": {"host": culprit["host"]},
        }
        for cause in culprit.get("causes", ())
    ]


@dataclass(frozen=True, slots=True)
class Unanalysed:
    """Why a trace has no findings."""

    problem: str
