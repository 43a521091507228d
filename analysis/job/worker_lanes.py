"""What is too large for the report on a pipeline: S of every worker, stage and kind in each step, and the replay.

In: an `Attribution` and the replay behind it. Out: tables per step, as frames and files, and what a store keeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.atomic_write import Kind, parquet_with, replacing
from tracekit.report.findings import WorkerSlowdowns

#: Key in the metadata of a Parquet file of `write_parquet`; its value is the name of the table.
TABLE_KEY = "tracekit_table"
#: The kind of file that `write_parquet` replaces.
TABLE_FILE = Kind("a table that tracekit wrote with --parquet", parquet_with(TABLE_KEY))


class WorkerLanes(Struct, frozen=True, eq=False):
    """The lanes of an analysed pipeline: `attribution`, whose arrays have every step, and `replay`, which draws single
    steps and may have only the steps that causes follow from.
    """

    attribution: Attribution
    replay: JobReplay

    def worker_slowdowns(self) -> WorkerSlowdowns:
        """Exact S of each worker in each step."""
        attribution = self.attribution
        return WorkerSlowdowns(
            steps=[int(step) for step in attribution.steps],
            dp_ranks=[int(dp_rank) for dp_rank in attribution.dp_ranks],
            slowdown=attribution.by_worker / attribution.ideal[:, None, None],
        )

    def frames(self) -> dict[str, pl.DataFrame]:
        """S of each op kind, stage, DP rank and worker in each step, a long table each."""
        attribution = self.attribution
        workers = {
            "dp_rank": np.repeat(attribution.dp_ranks, attribution.stages),
            "pp_rank": np.tile(np.arange(attribution.stages), len(attribution.dp_ranks)),
        }
        times = {
            "kind": np.stack(list(attribution.by_kind.values()), axis=1),
            "pp_rank": attribution.by_stage,
            "dp_rank": attribution.by_dp_rank,
        }
        names = {
            "kind": list(attribution.by_kind),
            "pp_rank": range(attribution.stages),
            "dp_rank": attribution.dp_ranks,
        }
        tables = {f"by_{name}_per_step": self._per_step({name: names[name]}, each) for name, each in times.items()}
        return tables | {
            "by_worker_per_step": self._per_step(workers, attribution.by_worker.reshape(len(attribution.steps), -1))
        }

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write exact S of every worker in every step (step, dp_rank, pp_rank, slowdown).

        Raises OutputError. An existing file is replaced only if this method wrote it.
        """
        with replacing(path, TABLE_FILE) as temporary, open(temporary, "wb") as file:
            self.frames()["by_worker_per_step"].write_parquet(file, metadata={TABLE_KEY: "by_worker_per_step"})

    def _per_step(self, names: Mapping[str, Any], times: Any) -> pl.DataFrame:
        """A long table from step times [steps, sets]."""
        attribution = self.attribution
        columns: dict[str, Any] = {"step": np.repeat(attribution.steps, times.shape[1])}
        columns |= {name: np.tile(np.asarray(values), len(attribution.steps)) for name, values in names.items()}
        columns["slowdown"] = (times / attribution.ideal[:, None]).ravel()
        return pl.DataFrame(columns)
