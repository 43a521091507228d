"""What the analysis of a trace found, in the form that is stored: figures that lists need, and slowdowns of workers.

In: a report's JSON and an array. Out: the columns and rows of the tables `report` and `worker_slowdown`. The analysis
makes it, the store keeps it, and neither needs to know the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

#: Columns of the table `report` that are taken out of the JSON.
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
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the analysis of a trace found: `report` is its JSON, `worker_slowdown` [steps, dp_ranks, stages].

    `steps` and `dp_ranks` name the first two axes.
    """

    report: str
    steps: Sequence[int]
    dp_ranks: Sequence[int]
    worker_slowdown: npt.NDArray[np.float64]

    def columns(self) -> dict[str, Any]:
        """The columns of the table `report` that are taken out of the JSON, and the JSON."""
        found = json.loads(self.report)
        return {
            "report": self.report,
            **{name: found[name] for name in ("slowdown", "waste", "straggling")},
            "trustworthy": found["trust"]["trustworthy"],
            **{f"{name}_s": found["step_time_s"][name] for name in ("recorded", "original", "ideal")},
            **{name: found["verdict"][name] for name in ("lost_gpu_hours", "lost_gpu_hours_per_day")},
            "cause_kinds": [cause["kind"] for cause in found["causes"]],
            "cause_places": [cause["where_text"] for cause in found["causes"]],
        }

    def worker_rows(self) -> pl.DataFrame:
        """One row per step, as the table `worker_slowdown` has it."""
        steps, workers = len(self.steps), self.worker_slowdown[0].size
        return pl.DataFrame(
            {
                "step": pl.Series(self.steps, dtype=pl.Int32),
                "dp_ranks": pl.Series([list(self.dp_ranks)] * steps, dtype=pl.List(pl.Int32)),
                "slowdown": self.worker_slowdown.astype(np.float32).reshape(steps, workers),
            },
            schema_overrides={"slowdown": pl.Array(pl.Float32, workers)},
        ).with_columns(pl.col("slowdown").arr.to_list())


@dataclass(frozen=True, slots=True)
class Unanalysed:
    """Why a trace has no findings."""

    problem: str
