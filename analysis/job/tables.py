"""The tables of a pipeline: who and what costs how much.

In: an `Attribution`, with the rank of each worker and the node of each rank. Out: rows of a report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracekit.analysis.attribution.attribution import Attribution, waste
from tracekit.analysis.numeric.arrays import Floats, number
from tracekit.report.rows import Contribution, Correlation, OfWorker, OnPath
from tracekit.trace.model import Worker


def rows_of_pipeline(attribution: Attribution, ranks: Mapping[Worker, int], hosts: Mapping[int, str]) -> dict[str, Any]:
    """The rows of each table, by its key in the report."""
    by_dp_rank = (attribution.by_dp_rank, attribution.delayed_by_dp_rank, attribution.removed_by_dp_rank)
    return {
        "by_kind": _by_kind(attribution),
        "by_pp_rank": _contributions(
            attribution,
            "pp_rank",
            range(attribution.stages),
            attribution.by_stage,
            attribution.delayed_by_stage,
            attribution.removed_by_stage,
        ),
        "by_dp_rank": _contributions(attribution, "dp_rank", attribution.dp_ranks, *by_dp_rank),
        "by_worker": _by_worker(attribution, ranks, hosts),
        "critical_path": _critical_path(attribution),
        "critical_workers": _critical_workers(attribution),
        "forward_backward_correlation": [Correlation(stage, number(r)) for stage, r in attribution.correlation.items()],
    }


def _by_kind(attribution: Attribution) -> list[Contribution]:
    """S and waste per op kind, worst first, and what idealising that kind alone would give."""
    kinds = list(attribution.by_kind)
    times = (attribution.by_kind, attribution.delayed_by_kind, attribution.removed_by_kind)
    rows = _contributions(
        attribution, "kind", kinds, *(np.stack([each[kind] for kind in kinds], axis=1) for each in times)
    )
    return sorted(rows, key=lambda row: row.slowdown or 0.0, reverse=True)


def _contributions(
    attribution: Attribution,
    name: str,
    values: Sequence[Any],
    added: Floats,
    delayed: Floats | None,
    removed: Floats | None,
) -> list[Contribution]:
    """One row per set of ops, from the step times of its replays, [steps, sets]; None: replays are too expensive."""
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
