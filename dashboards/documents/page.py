"""A report as one self-contained HTML page: answer, worker map, steps, causes and fixes, the slowest steps.

Names are escaped wherever they appear, and a content security policy forbids all requests.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.analysis.job.pipeline_report import WorkerLanes
from tracekit.analysis.numeric.arrays import Ints
from tracekit.base.atomic_write import Kind, starting_with
from tracekit.base.text import short
from tracekit.dashboards.documents import card as report_html
from tracekit.dashboards.figures.spans import Replay, StepOps, step_ops
from tracekit.dashboards.figures.worker_map import workers_that_matter
from tracekit.dashboards.words import tables
from tracekit.report.report import Report
from tracekit.report.tables import OfWorker
from tracekit.trace.model import KINDS, OpKind, Worker

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
#: How every page begins.
BEGINNING = "<!doctype html>\n<!-- tracekit whatif -->\n"
#: The kind of file that a page replaces.
PAGE_FILE = Kind("a page that `tracekit whatif --html` wrote", starting_with(BEGINNING.encode()))
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


def page(report: Report, lanes: WorkerLanes | None = None, *, gpu_hour: float | None = None) -> str:
    """The whole page. `lanes`: of a pipeline, to show its slowest steps op by op. `gpu_hour`: as for the terminal."""
    name = report_html.plain(short(report.name))
    brief, full = report.overview, report.tables_of_sections
    folded = f"<details><summary>All tables</summary>{report_html.sections(full)}</details>" if full != brief else ""
    return (
        f'{BEGINNING}<html lang="en" class="tracekit">{head(name)}<body><main>'
        f"<header><h1><bdi>{name}</bdi></h1><p>{report_html.plain(report.job.sizes)}</p></header>"
        f"{report_html.answer_of(report, gpu_hour=gpu_hour)}{report_html.pair(report) if report.by_worker else ''}"
        f"{report_html.sections((*report.pictures, *tables(report), *brief))}{folded}"
        f"{_FOOTER if lanes is None else _timeline(report, lanes)}</body></html>\n"
    )


def _timeline(report: Report, lanes: WorkerLanes) -> str:
    """The slowest steps, op by op, with the script that draws them; ends the main part of the page."""
    data = json.dumps(worst_steps(report, lanes), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"{_TIMELINE}<footer>Made by tracekit. Link to a rank and a step: <code>#rank=9&amp;step=105</code></footer>"
        f'</main><script type="application/json" id="worst-steps">{data}</script><script>{_asset("page.js")}</script>'
    )


_FOOTER = "<footer>Made by tracekit.</footer></main>"
_TIMELINE = (
    '<section id="timeline"><h2>Slowest steps, marked above</h2><p id="timeline-note" role="status"></p><div'
    ' class="controls" id="timeline-controls"></div><div class="canvas"><canvas id="timeline-canvas" tabindex="0"'
    ' role="img" aria-label="Recorded ops over ideal ones, a row a worker; arrow keys move, plus and minus zoom">'
    '</canvas></div><p id="timeline-op" aria-live="polite"></p><noscript>The timeline needs JavaScript.</noscript>'
    "</section>"
)


def _asset(name: str) -> str:
    return files("tracekit.dashboards.documents").joinpath(name).read_text(encoding="utf-8")


def head(title: str) -> str:
    """The head of a page, with its styles, and a policy that forbids all requests. `title`: HTML."""
    return (
        f'<head><meta charset="utf-8"><title>{title}: tracekit</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme"'
        f' content="light dark"><style>{report_html.style()}{_asset("page.css")}</style></head>'
    )


def worst_steps(report: Report, lanes: WorkerLanes) -> dict[str, Any]:
    """`kinds`: name and class of each; `workers`: rows, with rank and S; `steps`: slowest first, with their spans.

    Spans are flat lists of row, kind, start and duration in whole microseconds of the step. `left_out`: number of spans
    that did not fit, the shortest ones.
    """
    attribution, replay = lanes.attribution, lanes.replay
    order = np.argsort(-attribution.recorded, kind="stable")
    order = order[np.isin(attribution.steps[order], replay.graph.steps)][:MOST_STEPS]
    steps = [step_ops(replay.only_steps([step])) for step in attribution.steps[order].tolist()]
    spans_per_worker = len(_REPLAYS) * sum(len(ops.kind) // ops.workers for ops in steps)
    workers = workers_that_matter(report, min(MOST_WORKERS, max(1, MOST_SPANS // max(spans_per_worker, 1))))
    grid = report.worker_grid()
    budget = MOST_SPANS // (len(steps) * len(_REPLAYS))
    left_out, step_spans = 0, []
    for ops, position in zip(steps, order, strict=True):
        row = _rows(ops, workers)
        indices = np.flatnonzero(row >= 0)
        left_out += max(len(indices) - budget, 0)
        indices = indices[np.argsort(-ops.duration[Replay.RECORDED][indices], kind="stable")[:budget]]
        times = {
            "recorded_us": int(_us(attribution.recorded[position])),
            "ideal_us": int(_us(attribution.ideal[position])),
        }
        spans = {str(replay): _spans(ops, row, indices, replay) for replay in _REPLAYS}
        step_spans.append({"step": ops.step, **times, **spans})
    return {
        "kinds": [{"name": kind, "class": _CLASS.get(kind, _OTHER)} for kind in KINDS],
        "workers": [_worker(grid.rows[worker]) for worker in workers],
        "steps": step_spans,
        "left_out": left_out,
    }


def _rows(ops: StepOps, workers: list[Worker]) -> Ints:
    """The row of each op, -1 for ops of other workers."""
    rows = {(worker.dp_rank, worker.pp_rank): row for row, worker in enumerate(workers)}
    places = zip(ops.dp_rank.tolist(), ops.pp_rank.tolist(), strict=True)
    return np.repeat([rows.get(place, -1) for place in places], np.diff(ops.first))


def _spans(ops: StepOps, row: Ints, indices: Ints, replay: Replay) -> list[int]:
    columns = row, ops.kind, _us(ops.start[replay]), _us(ops.duration[replay])
    flat: list[int] = np.column_stack([column[indices] for column in columns]).ravel().tolist()
    return flat


def _worker(row: OfWorker) -> dict[str, Any]:
    return {"rank": row.rank, "dp_rank": row.dp_rank, "pp_rank": row.pp_rank, "slowdown": round(row.slowdown, 4)}


def _us(seconds: npt.ArrayLike) -> Ints:
    return np.rint(np.multiply(seconds, 1e6, dtype=np.float64)).astype(np.int64)
