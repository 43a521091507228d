"""What the page Workers shows, and how its address says so.

In: the state in the URL, written by anybody. Out: a `WorkerView`, whose parts exist in the job, and a sentence on what
did not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracekit.base.text import short
from tracekit.report.worker_map import WorkerMap
from tracekit.trace.model import Worker

_WORKER = re.compile(r"\(?\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*\)?")
_RANK = re.compile(r"(?:rank\s*)?([0-9]{1,9})", re.IGNORECASE)
_NUMBER = re.compile(r"-?[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the page shows of a job: a step by its position (None: all), a worker by its cell (None: nobody chosen),
    a host. `said`: what of the address could not be followed.
    """

    position: int | None = None
    cell: int | None = None
    host: str | None = None
    said: tuple[str, ...] = ()


def read_view(found: WorkerMap, step: str | None, worker: str | None, host: str | None) -> WorkerView:
    """The view that an address asks for; what it gets wrong is left out or moved to the nearest, and said."""
    view = WorkerView()
    if step:
        view = _read_step(found, step, view)
    if worker:
        view = choose_worker(found, worker, view)
    if host:
        known = host in found.hosts
        view = replace(view, host=host) if known else _say(view, f"No host {short(host)!r} in this job.")
    return view


def _read_step(found: WorkerMap, step: str, view: WorkerView) -> WorkerView:
    if not _NUMBER.fullmatch(step):
        return _say(view, f"{short(step)!r} is not a step number: all steps are shown.")
    position = int(np.abs(found.steps - int(step)).argmin())
    nearest = int(found.steps[position])
    view = replace(view, position=position)
    return view if nearest == int(step) else _say(view, f"Step {step} was not analysed: this is step {nearest}.")


def choose_worker(found: WorkerMap, worker: str, view: WorkerView) -> WorkerView:
    """`view` with the worker that a person wrote, or with a word about why not."""
    if rank := _RANK.fullmatch(worker.strip()):
        cell = found.cell_of_rank(int(rank[1]))
        return (
            replace(view, cell=cell) if cell is not None else _say(view, f"No rank {rank[1]} was analysed in this job.")
        )
    match = _WORKER.fullmatch(worker.strip())
    if match is None:
        return _say(view, f"{short(worker)!r} is no rank: write its number, or DP rank and stage, such as 1,2.")
    asked = Worker(int(match[1]), int(match[2]))
    cell = found.cell(asked)
    return (
        replace(view, cell=cell)
        if cell is not None
        else _say(view, f"The worker at {asked.coordinates} was not analysed in this job.")
    )


def _say(view: WorkerView, text: str) -> WorkerView:
    return replace(view, said=(*view.said, text))


def comma(worker: Worker) -> str:
    """A worker as the address and selections write it: `1,2`."""
    return f"{worker.dp_rank},{worker.pp_rank}"


def address(found: WorkerMap, view: WorkerView) -> dict[str, Any]:
    """The view as the address has it."""
    return {
        "step": None if view.position is None else int(found.steps[view.position]),
        "worker": None if view.cell is None else comma(found.worker(view.cell)),
        "host": view.host,
    }
