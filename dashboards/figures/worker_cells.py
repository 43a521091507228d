"""Workers for display: the map in cells, pooled and in levels of slowness, and the few workers that matter most.

In: S of each worker, or a report. Out: workers, and `WorkerCells`, DP ranks down, stages across, which terminal and
documents draw in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tracekit.dashboards.figures.worker_map import LEVELS, Floats, pool
from tracekit.report.report import Report
from tracekit.trace.model import Worker


class WorkerCells(Struct, frozen=True):
    """`slowdown`: the largest exact S_w of each patch of workers, [rows, columns]; `patch`: DP ranks and stages per
    patch.

    `dp_ranks`: the first DP rank of each row.
    """

    slowdown: Floats
    patch: tuple[int, int]
    dp_ranks: tuple[int, ...]


def worker_cells(values: Floats, dp_ranks: Sequence[int], largest: tuple[int, int]) -> WorkerCells:
    """S of workers, [dp_ranks, stages], pooled by maximum to at most `largest` rows and columns."""
    down, across = (-(-size // limit) for size, limit in zip(values.shape, largest, strict=True))
    return WorkerCells(pool(values, down, across).values, (down, across), tuple(dp_ranks[::down]))


def workers_that_matter(report: Report, most: int) -> list[Worker]:
    """The workers of causes, then the slowest, at most `most`; in order of DP rank and stage."""
    rows = report.by_worker or []
    analysed = {row.worker for row in rows}
    culprits = [culprit.worker for culprit in report.answer.culprits if culprit.worker in analysed]
    slowest = [row.worker for row in rows[:most]]
    return sorted(list(dict.fromkeys([*filter(None, culprits), *slowest]))[:most])


def level_of(slowdown: float) -> int:
    """The level of slowness of a worker, 0 to the number of `LEVELS`."""
    return int(np.searchsorted(LEVELS, slowdown, side="right"))
