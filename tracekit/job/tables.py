"""The tables of a report: who and what costs how much, as frames and as files.

In: an attribution, its diagnosis and the answers to custom questions. Out: polars frames (`tables.by_worker`), pandas
frames (`tables.pandas("by_worker")`), CSV and Parquet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import polars as pl

from tracekit.analysis.attribution.attribution import Attribution, waste
from tracekit.analysis.numeric.arrays import Floats
from tracekit.base.atomic_write import Kind, parquet_with, replacing
from tracekit.report.bubbles import Bubbles, IdleOfStage, LostTo, PricedSchedule, StageBubbles
from tracekit.report.report import COMMON_TABLES, Report
from tracekit.trace.model import Worker

#: Tables that the JSON object carries row by row.
JSON_TABLES = (
    "by_kind",
    "by_pp_rank",
    "by_dp_rank",
    "by_worker",
    "critical_path",
    "critical_workers",
    "forward_backward_correlation",
)
PER_STEP_TABLES = ("by_kind_per_step", "by_pp_rank_per_step", "by_dp_rank_per_step", "by_worker_per_step")
#: Key in the metadata of a Parquet file of `write_parquet`; its value is the name of the table.
TABLE_KEY = "tracekit_table"
#: The kind of file that `write_parquet` replaces.
TABLE_FILE = Kind("a table that tracekit wrote with --parquet", parquet_with(TABLE_KEY))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReportTables(Report):
    """What was found, as tables. Frames are built on first use.

    `ranks`: the global rank of each worker, `hosts`: the node of each rank, as far as the trace names them.
    `attribution`: what stragglers cost, and who they are. `diagnosis`: why, and what to do. `questions_asked`,
    `labels_asked`: the answers to custom questions.
    """

    table_names: ClassVar[tuple[str, ...]] = (*JSON_TABLES, *COMMON_TABLES, *PER_STEP_TABLES)
    ranks: Mapping[Worker, int]
    hosts: Mapping[int, str]
    attribution: Attribution

    @cached_property
    def by_kind(self) -> pl.DataFrame:
        """S and waste per op kind, worst first, and what idealising that kind alone would give.

        `launch_delay_slowdown`: T(original, this kind's launch delays kept) / T(original).
        """
        found = self.attribution
        names = list(found.by_kind)
        return self._contributions(
            {"kind": names},
            [found.by_kind[name] for name in names],
            [found.delayed_by_kind[name] for name in names],
            [found.removed_by_kind[name] for name in names],
        ).sort("slowdown", descending=True, maintain_order=True)

    @cached_property
    def by_pp_rank(self) -> pl.DataFrame:
        """S and waste per pipeline stage."""
        found = self.attribution
        return self._contributions(
            {"pp_rank": list(range(found.stages))},
            list(found.by_stage.T),
            list(found.delayed_by_stage.T),
            list(found.removed_by_stage.T),
        )

    @cached_property
    def by_dp_rank(self) -> pl.DataFrame:
        """S and waste per data-parallel rank. Columns that need a replay per rank are null if that is too expensive."""
        found = self.attribution
        delayed = None if found.delayed_by_dp_rank is None else list(found.delayed_by_dp_rank.T)
        removed = None if found.removed_by_dp_rank is None else list(found.removed_by_dp_rank.T)
        return self._contributions({"dp_rank": list(found.dp_ranks)}, list(found.by_dp_rank.T), delayed, removed)

    @cached_property
    def by_worker(self) -> pl.DataFrame:
        """Exact S of every worker beside the paper's approximation min(S_dp, S_pp), worst first."""
        found = self.attribution
        workers = [Worker(dp_rank, stage) for dp_rank in found.dp_ranks for stage in range(found.stages)]
        ranks = [self.ranks.get(worker) for worker in workers]
        return pl.DataFrame(
            {
                "dp_rank": [worker.dp_rank for worker in workers],
                "pp_rank": [worker.pp_rank for worker in workers],
                "rank": pl.Series(ranks, dtype=pl.Int64),
                "host": pl.Series([self.hosts.get(-1 if rank is None else rank) for rank in ranks], dtype=pl.String),
                "slowdown": found.worker_slowdown.ravel(),
                "slowdown_error": found.errors(found.by_worker.reshape(len(found.steps), -1)),
                "slowdown_approx": found.worker_slowdown_approx.ravel(),
            }
        ).sort("slowdown", descending=True, maintain_order=True)

    @cached_property
    def critical_path(self) -> pl.DataFrame:
        """Seconds per step that ops of each kind take on the critical path; kind null: launch delays (nothing ran)."""
        paths = self.attribution.critical
        kinds = list(self.attribution.by_kind)
        columns: dict[str, Any] = {"kind": pl.Series([*kinds, None], dtype=pl.String)}
        for name, path in paths.items():
            columns[f"{name}_s"] = [*(path.by_kind[kind] for kind in kinds), path.delay_s]
        return pl.DataFrame(columns).sort("recorded_s", descending=True, maintain_order=True)

    @cached_property
    def critical_workers(self) -> pl.DataFrame:
        """Seconds per step that the critical path spends on each worker; only workers on the path."""
        paths = self.attribution.critical
        workers = sorted({*paths["recorded"].by_worker, *paths["original"].by_worker})
        columns: dict[str, Any] = {
            "dp_rank": [worker.dp_rank for worker in workers],
            "pp_rank": [worker.pp_rank for worker in workers],
        }
        for name in ("recorded", "original"):
            columns[f"{name}_s"] = [paths[name].by_worker.get(worker, 0.0) for worker in workers]
        return pl.DataFrame(columns).sort("recorded_s", descending=True, maintain_order=True)

    @cached_property
    def by_kind_per_step(self) -> pl.DataFrame:
        """S of each op kind in each step."""
        found = self.attribution
        return self._per_step({"kind": list(found.by_kind)}, np.stack(list(found.by_kind.values()), axis=1))

    @cached_property
    def by_pp_rank_per_step(self) -> pl.DataFrame:
        """S of each stage in each step."""
        return self._per_step({"pp_rank": list(range(self.attribution.stages))}, self.attribution.by_stage)

    @cached_property
    def by_dp_rank_per_step(self) -> pl.DataFrame:
        """S of each DP rank in each step."""
        return self._per_step({"dp_rank": list(self.attribution.dp_ranks)}, self.attribution.by_dp_rank)

    @cached_property
    def by_worker_per_step(self) -> pl.DataFrame:
        """Exact S of each worker in each step."""
        found = self.attribution
        names = {
            "dp_rank": np.repeat(found.dp_ranks, found.stages),
            "pp_rank": np.tile(np.arange(found.stages), len(found.dp_ranks)),
        }
        return self._per_step(names, found.by_worker.reshape(len(found.steps), -1))

    @cached_property
    def forward_backward_correlation(self) -> pl.DataFrame:
        """Correlation of forward and backward durations of the same microbatch per stage; null where undefined."""
        found = self.attribution.correlation
        return pl.DataFrame({"pp_rank": list(found), "r": pl.Series(list(found.values()), dtype=pl.Float64)})

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write exact S of every worker in every step (step, dp_rank, pp_rank, slowdown).

        Raises OutputError. An existing file is replaced only if this method wrote it.
        """
        with replacing(path, TABLE_FILE) as temporary, open(temporary, "wb") as file:
            self.by_worker_per_step.write_parquet(file, metadata={TABLE_KEY: "by_worker_per_step"})

    def _contributions(
        self,
        names: Mapping[str, Sequence[Any]],
        added: Sequence[Floats],
        delayed: Sequence[Floats] | None,
        removed: Sequence[Floats] | None,
    ) -> pl.DataFrame:
        """One row per set of ops, from the step times of its replays ([sets] of [steps])."""
        found = self.attribution
        slowdowns = _means(added) / found.ideal_s
        errors = found.errors(np.stack(added, axis=1)) if len(added) else np.zeros(0)
        columns: dict[str, Any] = {
            **names,
            "slowdown": slowdowns,
            "slowdown_error": errors,
            "waste": list(map(waste, slowdowns.tolist())),
        }
        unknown = [None] * len(added)
        late = unknown if delayed is None else _means(delayed) / found.original_s
        fixed = pl.Series(unknown if removed is None else _means(removed), dtype=pl.Float64)
        columns["launch_delay_slowdown"] = pl.Series(late, dtype=pl.Float64)
        columns["fixed_step_time_s"] = fixed
        columns["saved_s"] = found.original_s - fixed
        return pl.DataFrame(columns)

    def _per_step(self, names: Mapping[str, Any], times: Any) -> pl.DataFrame:
        """A long table from step times [steps, sets]."""
        found = self.attribution
        sets = times.shape[1]
        columns: dict[str, Any] = {"step": np.repeat(found.steps, sets)}
        columns |= {name: np.tile(np.asarray(values), len(found.steps)) for name, values in names.items()}
        columns["slowdown"] = (times / found.ideal[:, None]).ravel()
        return pl.DataFrame(columns)


def bubble_frames(found: Bubbles) -> dict[str, pl.DataFrame]:
    """Where each stage is idle, why, and what schedules would cost; of each schedule the most microbatches held."""
    from tracekit.report.plain_data import frame_of

    rows = {stage.pp_rank: frame_of(stage.places, IdleOfStage) for stage in found.by_stage}
    rows = rows or {0: frame_of([], IdleOfStage)}
    held = [max(row.peak_microbatches) if row.peak_microbatches else None for row in found.schedules]
    return {
        "bubbles_stages": frame_of(found.by_stage, StageBubbles),
        "bubbles_places": pl.concat(
            frame.select(pl.lit(stage, pl.Int64).alias("pp_rank"), pl.all()) for stage, frame in rows.items()
        ),
        "bubbles_causes": frame_of(found.causes, LostTo),
        "bubbles_schedules": frame_of(found.schedules, PricedSchedule).with_columns(
            peak_microbatches=pl.Series(held, dtype=pl.Float64)
        ),
    }


def _means(sets: Sequence[Floats]) -> Floats:
    """The mean of each of [sets] of [steps]."""
    return np.stack(sets).mean(axis=1) if len(sets) else np.zeros(0)
