"""The slowest steps of a job as spans, few enough for one page.

In: a report. Out: plain data for `page.js`: for each step, the recorded and the ideal spans of the workers that
matter most, with those of named causes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.whatif.timeline import compared_frame
from tracekit.job.pipeline_report import PipelineReport
from tracekit.show.worker_cells import workers_that_matter
from tracekit.trace.model import KINDS, OpKind, Worker

#: Steps on the page, workers, and spans in total; a span takes about 20 bytes.
MOST_STEPS, MOST_WORKERS, MOST_SPANS = 3, 24, 36_000
_REPLAYS = ("recorded", "ideal")
_FORWARD, _BACKWARD, _COMMUNICATION, _OTHER = range(4)
_CLASS = {
    OpKind.FORWARD_COMPUTE: _FORWARD,
    OpKind.LOSS: _FORWARD,
    OpKind.BACKWARD_COMPUTE: _BACKWARD,
    OpKind.BACKWARD_WEIGHT: _BACKWARD,
}


def worst_steps(report: PipelineReport) -> dict[str, Any]:
    """`kinds`: name and class of each; `workers`: rows, with rank and S; `steps`: slowest first, with their spans.

    Spans are flat lists of row, kind, start and duration in whole microseconds of the step. `left_out`: number of spans
    that did not fit, the shortest ones.
    """
    found = report.attribution
    order = np.argsort(-found.recorded, kind="stable")
    order = order[np.isin(found.steps[order], report.replay.graph.steps)][:MOST_STEPS]
    steps = [int(step) for step in found.steps[order]]
    frame = compared_frame(report.replay.only_steps(sorted(steps))).with_columns(kind=pl.col("kind").cast(pl.String))
    rows = _rows(report, frame.height // max(_worker_count(frame), 1))
    placed = frame.join(_row_frame(rows), on=["dp_rank", "pp_rank"])
    kinds = sorted(set(placed["kind"].to_list()))
    budget = MOST_SPANS // (len(steps) * len(_REPLAYS))
    left_out, drawn = 0, []
    for step, at in zip(steps, order, strict=True):
        ops = placed.filter(pl.col("step") == step)
        left_out += max(ops.height - budget, 0)
        ops = ops.sort("recorded_duration", descending=True).head(budget)
        drawn.append(
            {"step": step, "recorded_us": _us(found.recorded[at]), "ideal_us": _us(found.ideal[at])}
            | {name: _spans(ops, name, kinds) for name in _REPLAYS}
        )
    return {
        "kinds": [{"name": kind, "class": _class_of(kind)} for kind in kinds],
        "workers": [_worker(report, worker) for worker in rows],
        "steps": drawn,
        "left_out": left_out,
    }


def _worker_count(frame: pl.DataFrame) -> int:
    return frame.select("dp_rank", "pp_rank").n_unique()


def _rows(report: PipelineReport, ops_of_worker: int) -> list[Worker]:
    """The workers to show: as many of those that matter most as fit."""
    fitting = max(1, MOST_SPANS // max(len(_REPLAYS) * ops_of_worker, 1))
    return workers_that_matter(report, min(MOST_WORKERS, fitting))


def _row_frame(rows: list[Worker]) -> pl.DataFrame:
    """The row of each worker, with types that can be joined with those of the ops."""
    return pl.DataFrame(
        {
            "dp_rank": pl.Series([worker.dp_rank for worker in rows], dtype=pl.Int32),
            "pp_rank": pl.Series([worker.pp_rank for worker in rows], dtype=pl.Int32),
            "row": range(len(rows)),
        }
    )


def _spans(ops: pl.DataFrame, name: str, kinds: list[str]) -> list[int]:
    numbers = ops.select(
        pl.col("row"),
        pl.col("kind").replace_strict({kind: at for at, kind in enumerate(kinds)}, return_dtype=pl.Int64),
        (pl.col(f"{name}_start") * 1e6).round().cast(pl.Int64).alias("start"),
        (pl.col(f"{name}_duration") * 1e6).round().cast(pl.Int64).alias("duration"),
    )
    flat: list[int] = numbers.to_numpy().ravel().tolist()
    return flat


def _class_of(kind: str) -> int:
    known = next((one for one in KINDS if str(one) == kind), None)
    if known is None or known in _CLASS:
        return _OTHER if known is None else _CLASS[known]
    return _COMMUNICATION if known.is_communication else _OTHER


def _worker(report: PipelineReport, worker: Worker) -> dict[str, Any]:
    found = report.attribution
    at = found.dp_ranks.index(worker.dp_rank), worker.pp_rank
    return {
        "rank": report.ranks.get(worker),
        "dp_rank": worker.dp_rank,
        "pp_rank": worker.pp_rank,
        "slowdown": round(float(found.worker_slowdown[at]), 4),
    }


def _us(value: float) -> int:
    return round(float(value) * 1e6)
