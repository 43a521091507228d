"""The tables of a pipeline: who and what costs how much, of the mean step for reports, and of each step.

In: an `Attribution`, the rank of each worker and the node of each rank, and the replay. Out: rows of a report; frames
and files with a row per step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.attribution import Attribution, waste
from tracekit.analysis.numeric.arrays import Floats, number
from tracekit.analysis.replay.engine import JobReplay
from tracekit.base.atomic_write import Kind, parquet_with, replacing
from tracekit.report.tables import Contribution, Correlation, OfWorker, OnPath
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.report.findings import WorkerSlowdowns

#: Key in the metadata of a Parquet file of `write_parquet`; its value is the name of the table.
TABLE_KEY = "tracekit_table"
#: The kind of file that `write_parquet` replaces.
TABLE_FILE = Kind("a table that tracekit wrote with --parquet", parquet_with(TABLE_KEY))


def rows_of_pipeline(attribution: Attribution, ranks: Mapping[Worker, int], hosts: Mapping[int, str]) -> dict[str, Any]:
    """The rows of each table, by its key in the report."""
    rows = {f"by_{name}": _contributions(attribution, name, *times) for name, times in _sets(attribution).items()}
    return {
        **rows,
        "by_kind": sorted(rows["by_kind"], key=lambda row: row.slowdown or 0.0, reverse=True),
        "by_worker": _by_worker(attribution, ranks, hosts),
        "critical_path": _critical_path(attribution),
        "critical_workers": _critical_workers(attribution),
        "forward_backward_correlation": [Correlation(stage, number(r)) for stage, r in attribution.correlation.items()],
    }


def _sets(attribution: Attribution) -> dict[str, tuple[Sequence[Any], Floats, Floats | None, Floats | None]]:
    """The sets of ops by kind, stage and DP rank: the value of each, and step times of replays, [steps, sets]: of the
    ideal job with one set as recorded, and of the original one with only its launch delays, and with only the set
    idealised; None: replays are too expensive.
    """
    kinds = list(attribution.by_kind)
    added, delayed, removed = (
        np.stack([times[kind] for kind in kinds], axis=1)
        for times in (attribution.by_kind, attribution.delayed_by_kind, attribution.removed_by_kind)
    )
    stages, dp_ranks = range(attribution.stages), attribution.dp_ranks
    return {
        "kind": (kinds, added, delayed, removed),
        "pp_rank": (stages, attribution.by_stage, attribution.delayed_by_stage, attribution.removed_by_stage),
        "dp_rank": (dp_ranks, attribution.by_dp_rank, attribution.delayed_by_dp_rank, attribution.removed_by_dp_rank),
    }


def _contributions(
    attribution: Attribution,
    name: str,
    values: Sequence[Any],
    added: Floats,
    delayed: Floats | None,
    removed: Floats | None,
) -> list[Contribution]:
    """One row per set of ops: S and waste, and what idealising it alone would give. For the times, see `_sets`."""
    unknown = [None] * len(values)
    slowdowns = (_means(added) / attribution.ideal_s).tolist()
    late = unknown if delayed is None else (_means(delayed) / attribution.original_s).tolist()
    fixed = unknown if removed is None else _means(removed).tolist()
    errors = attribution.errors(np.ascontiguousarray(added)).tolist() if len(values) else []
    return [
        Contribution(
            **{name: value},
            slowdown=number(slowdown),
            slowdown_error=number(error),
            waste=number(waste(slowdown)),
            launch_delay_slowdown=number(delay),
            fixed_step_time_s=number(fixed_s),
            saved_s=None if fixed_s is None else number(attribution.original_s - fixed_s),
        )
        for value, slowdown, error, delay, fixed_s in zip(values, slowdowns, errors, late, fixed, strict=True)
    ]


def _by_worker(attribution: Attribution, ranks: Mapping[Worker, int], hosts: Mapping[int, str]) -> list[OfWorker]:
    """Exact S of every worker beside the paper's approximation min(S_dp, S_pp), worst first."""
    workers = [Worker(dp_rank, stage) for dp_rank in attribution.dp_ranks for stage in range(attribution.stages)]
    errors = attribution.errors(attribution.by_worker.reshape(len(attribution.steps), -1))
    nodes = [(rank, None if rank is None else hosts.get(rank)) for rank in map(ranks.get, workers)]
    figures = (attribution.worker_slowdown.ravel(), errors, attribution.worker_slowdown_approx.ravel())
    rows = [
        OfWorker(worker.dp_rank, worker.pp_rank, rank, host, slowdown, number(error), approx)
        for worker, (rank, host), slowdown, error, approx in zip(
            workers, nodes, *(column.tolist() for column in figures), strict=True
        )
    ]
    return sorted(rows, key=lambda row: row.slowdown, reverse=True)


def _critical_path(attribution: Attribution) -> list[OnPath]:
    """Seconds per step that ops of each kind take on the critical path; kind None: launch delays (nothing ran)."""
    recorded, original, ideal = (attribution.critical[name] for name in ("recorded", "original", "ideal"))
    rows = [
        *(OnPath(kind=kind, recorded_s=recorded.by_kind[kind], original_s=original.by_kind[kind],
                 ideal_s=ideal.by_kind[kind]) for kind in attribution.by_kind),
        OnPath(kind=None, recorded_s=recorded.delay_s, original_s=original.delay_s, ideal_s=ideal.delay_s),
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row.recorded_s, reverse=True)


def _critical_workers(attribution: Attribution) -> list[OnPath]:
    """Seconds per step that the critical path spends on each worker; only workers on the path."""
    recorded, original = (attribution.critical[name].by_worker for name in ("recorded", "original"))
    rows = [
        OnPath(
            dp_rank=worker.dp_rank,
            pp_rank=worker.pp_rank,
            recorded_s=recorded.get(worker, 0.0),
            original_s=original.get(worker, 0.0),
        )
        for worker in sorted({*recorded, *original})
    ]
    return sorted(rows, key=lambda row: row.recorded_s, reverse=True)


def _means(times: Floats) -> Floats:
    """The mean of each column of [steps, sets]; numpy adds up contiguous values pairwise, which loses least."""
    means: Floats = np.ascontiguousarray(times.T).mean(axis=1)
    return means


class WorkerLanes(Struct, frozen=True, eq=False):
    """The lanes of an analysed pipeline: `attribution`, whose arrays have every step, and `replay`, which draws single
    steps and may have only the steps that causes follow from.
    """

    attribution: Attribution
    replay: JobReplay

    def worker_slowdowns(self) -> WorkerSlowdowns:
        """Exact S of each worker in each step."""
        from tracekit.report.findings import WorkerSlowdowns  # only stores keep them

        attribution = self.attribution
        return WorkerSlowdowns(
            steps=np.array(attribution.steps, np.int64),
            dp_ranks=np.array(attribution.dp_ranks, np.int64),
            slowdown=attribution.by_worker / attribution.ideal[:, None, None],
        )

    def frames(self) -> dict[str, pl.DataFrame]:
        """S of each op kind, stage, DP rank and worker in each step, a long table each."""
        attribution = self.attribution
        workers = {
            "dp_rank": np.repeat(attribution.dp_ranks, attribution.stages),
            "pp_rank": np.tile(np.arange(attribution.stages), len(attribution.dp_ranks)),
        }
        tables = {
            f"by_{name}_per_step": self._per_step({name: values}, added)
            for name, (values, added, *_) in _sets(attribution).items()
        }
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
