"""The state of the page Workers and its form in the address.

In: the state in the URL, which is untrusted. Out: a `WorkerView` whose parts exist in the job, and a sentence on each
part that does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracekit.analysis.numeric.arrays import Ints
from tracekit.base.text import short
from tracekit.dashboards.figures.worker_map import WorkerMap, blocks_that_fit
from tracekit.trace.model import Worker

_WORKER = re.compile(r"(?:worker\s*)?\(?\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*\)?", re.IGNORECASE)
_RANK = re.compile(r"(?:rank\s*)?([0-9]{1,9})", re.IGNORECASE)
_RANGE = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?")
_NUMBER = re.compile(r"-?[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Box:
    """Several workers: those of some DP ranks and stages, the first and the last of each as text, such as `1-3`."""

    dp_ranks: str
    stages: str

    def cells(self, worker_map: WorkerMap) -> Ints:
        """The flat cell numbers of the workers of the map in it; none if the text is no range."""
        ranges = [_RANGE.fullmatch(text) for text in (self.dp_ranks, self.stages)]
        (rows, columns) = (
            np.zeros(len(values), np.bool_)
            if match is None
            else (values >= int(match[1])) & (values <= int(match[2] or match[1]))
            for match, values in zip(ranges, (worker_map.dp_ranks, np.arange(worker_map.stages)), strict=True)
        )
        return np.flatnonzero(rows[:, None] & columns)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The view of a job: the position of a step (None: all steps), the cell of a worker (None: none chosen), a host,
    several workers. `said`: remarks on invalid parts of the address.
    """

    position: int | None = None
    cell: int | None = None
    host: str | None = None
    box: Box | None = None
    said: tuple[str, ...] = ()


def read_view(worker_map: WorkerMap, state: Mapping[str, Any]) -> WorkerView:
    """Parse the view in `state`, as of `address`; invalid parts are dropped or moved to the nearest valid value, with a
    remark.
    """
    view = WorkerView()
    step, worker, host, dp_rank, stage = (state.get(name) for name in ("step", "worker", "host", "dp_rank", "stage"))
    if step is not None and step != "":
        view = choose_step(worker_map, str(step), view)
    if worker:
        view = choose_worker(worker_map, worker, view)
    if host:
        is_host = host in worker_map.hosts
        view = replace(view, host=host) if is_host else _say(view, f"No host {short(host)!r} in this job.")
    if dp_rank or stage:
        box = Box(dp_rank or "", stage or "")
        has_workers = len(box.cells(worker_map)) > 0
        words = f"No worker has DP rank {short(box.dp_ranks)!r} and stage {short(box.stages)!r}."
        view = replace(view, box=box) if has_workers else _say(view, words)
    return view


def choose_box(worker_map: WorkerMap, columns: tuple[int, int], rows: tuple[int, int], view: WorkerView) -> WorkerView:
    """Return `view` with the workers between these blocks of the drawn map, both ends included."""
    down, across = blocks_that_fit(*worker_map.slowdown.shape)
    ends = [[low * size, (high + 1) * size - 1] for (low, high), size in ((rows, down), (columns, across))]
    (top, bottom), (low_stage, high_stage) = np.clip(
        ends, 0, [[len(worker_map.dp_ranks) - 1], [worker_map.stages - 1]]
    ).tolist()
    return replace(
        view, box=Box(f"{worker_map.dp_ranks[top]}-{worker_map.dp_ranks[bottom]}", f"{low_stage}-{high_stage}")
    )


def choose_step(worker_map: WorkerMap, step: str, view: WorkerView) -> WorkerView:
    """Return `view` at the analysed step next to `step`, with a remark if that is another one."""
    if not _NUMBER.fullmatch(step):
        return _say(view, f"{short(step)!r} is not a step number: all steps are shown.")
    position = int(np.abs(worker_map.steps - int(step)).argmin())
    nearest = int(worker_map.steps[position])
    view = replace(view, position=position)
    return view if nearest == int(step) else _say(view, f"Step {step} was not analysed: this is step {nearest}.")


def choose_worker(worker_map: WorkerMap, worker: str, view: WorkerView) -> WorkerView:
    """Return `view` with the worker that the user typed, or with a remark if it is invalid."""
    if rank := _RANK.fullmatch(worker.strip()):
        cell = worker_map.cell_of_rank(int(rank[1]))
        return (
            replace(view, cell=cell) if cell is not None else _say(view, f"No rank {rank[1]} was analysed in this job.")
        )
    match = _WORKER.fullmatch(worker.strip())
    if match is None:
        return _say(view, f"{short(worker)!r} is no rank: write its number, or DP rank and stage, such as 1,2.")
    asked = Worker(int(match[1]), int(match[2]))
    cell = worker_map.cell(asked)
    return (
        replace(view, cell=cell)
        if cell is not None
        else _say(view, f"The worker at {asked.coordinates} was not analysed in this job.")
    )


def _say(view: WorkerView, text: str) -> WorkerView:
    return replace(view, said=(*view.said, text))


def comma(worker: Worker) -> str:
    """Format a worker as addresses and selections do: `1,2`."""
    return f"{worker.dp_rank},{worker.pp_rank}"


def address(worker_map: WorkerMap, view: WorkerView) -> dict[str, Any]:
    """Return the view as address text."""
    return {
        "step": None if view.position is None else int(worker_map.steps[view.position]),
        "worker": None if view.cell is None else comma(worker_map.worker(view.cell)),
        "host": view.host,
        "dp_rank": view.box and view.box.dp_ranks,
        "stage": view.box and view.box.stages,
    }
