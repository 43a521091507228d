"""The slowest steps of a job as spans, few enough for one page.

In: the report on a pipeline, and its lanes. Out: plain data for `page.js`: for each step, the recorded and the ideal
spans of the workers that matter most, with those of named causes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.analysis.job.worker_lanes import WorkerLanes
from tracekit.analysis.numeric.arrays import Ints
from tracekit.dashboards.figures.step_ops import Replay, StepOps, step_ops
from tracekit.dashboards.figures.worker_cells import workers_that_matter
from tracekit.report.report import Report
from tracekit.report.rows import OfWorker
from tracekit.trace.model import KINDS, OpKind, Worker

#: Steps on the page, workers, and spans in total; a span takes about 20 bytes.
MOST_STEPS, MOST_WORKERS, MOST_SPANS = 3, 24, 36_000
_REPLAYS = (Replay.RECORDED, Replay.IDEAL)
_FORWARD, _BACKWARD, _COMMUNICATION, _OTHER = range(4)
_CLASS = {
    OpKind.FORWARD_COMPUTE: _FORWARD,
    OpKind.LOSS: _FORWARD,
    OpKind.BACKWARD_COMPUTE: _BACKWARD,
    OpKind.BACKWARD_WEIGHT: _BACKWARD,
    **{kind: _COMMUNICATION for kind in KINDS if kind.is_communication},
}


def worst_steps(report: Report, lanes: WorkerLanes) -> dict[str, Any]:
    """`kinds`: name and class of each; `workers`: rows, with rank and S; `steps`: slowest first, with their spans.

    Spans are flat lists of row, kind, start and duration in whole microseconds of the step. `left_out`: number of spans
    that did not fit, the shortest ones.
    """
    attribution, replay = lanes.attribution, lanes.replay
    order = np.argsort(-attribution.recorded, kind="stable")
    order = order[np.isin(attribution.steps[order], replay.graph.steps)][:MOST_STEPS]
    steps = [step_ops(replay.only_steps([step])) for step in attribution.steps[order].tolist()]
    of_worker = len(_REPLAYS) * sum(len(ops.kind) // ops.workers for ops in steps)
    workers = workers_that_matter(report, min(MOST_WORKERS, max(1, MOST_SPANS // max(of_worker, 1))))
    grid = report.worker_grid()
    budget = MOST_SPANS // (len(steps) * len(_REPLAYS))
    left_out, drawn = 0, []
    for ops, position in zip(steps, order, strict=True):
        row = _rows(ops, workers)
        shown = np.flatnonzero(row >= 0)
        left_out += max(len(shown) - budget, 0)
        shown = shown[np.argsort(-ops.duration[Replay.RECORDED][shown], kind="stable")[:budget]]
        times = {
            "recorded_us": int(_us(attribution.recorded[position])),
            "ideal_us": int(_us(attribution.ideal[position])),
        }
        spans = {str(replay): _spans(ops, row, shown, replay) for replay in _REPLAYS}
        drawn.append({"step": ops.step, **times, **spans})
    return {
        "kinds": [{"name": kind, "class": _CLASS.get(kind, _OTHER)} for kind in KINDS],
        "workers": [_worker(grid.rows[worker]) for worker in workers],
        "steps": drawn,
        "left_out": left_out,
    }


def _rows(ops: StepOps, workers: list[Worker]) -> Ints:
    """The row of each op, -1 for ops of other workers."""
    rows = {(worker.dp_rank, worker.pp_rank): row for row, worker in enumerate(workers)}
    places = zip(ops.dp_rank.tolist(), ops.pp_rank.tolist(), strict=True)
    return np.repeat([rows.get(place, -1) for place in places], np.diff(ops.first))


def _spans(ops: StepOps, row: Ints, shown: Ints, replay: Replay) -> list[int]:
    columns = row, ops.kind, _us(ops.start[replay]), _us(ops.duration[replay])
    flat: list[int] = np.column_stack([column[shown] for column in columns]).ravel().tolist()
    return flat


def _worker(row: OfWorker) -> dict[str, Any]:
    return {"rank": row.rank, "dp_rank": row.dp_rank, "pp_rank": row.pp_rank, "slowdown": round(row.slowdown, 4)}


def _us(seconds: npt.ArrayLike) -> Ints:
    """Whole microseconds."""
    return np.rint(np.multiply(seconds, 1e6, dtype=np.float64)).astype(np.int64)
