"""Workers for display: the map in cells, pooled and in levels of slowness, and the few workers that matter most.

In: S of each worker, or a `Report`. Out: workers, and `WorkerCells`, DP ranks down, stages across, which terminal and
documents draw in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats
from tracekit.model import Worker

if TYPE_CHECKING:
    from tracekit.report import Report

#: Where levels begin, as a share of the range from S = 1 to the largest.
_SHARES = (0.1, 0.25, 0.45, 0.65, 0.85)
#: The largest S of a scale is at least this, so that a map of healthy workers stays blank.
_LEAST_TOP = 1.1


class WorkerCells(Struct, frozen=True):
    """`slowdown`: the largest exact S_w of each patch of workers, [rows, columns]; `patch`: DP ranks and stages per
    patch.

    `dp_ranks`: the first DP rank of each row. `bounds`: the S at which each level but the lowest begins.
    """

    slowdown: Floats
    patch: tuple[int, int]
    dp_ranks: tuple[int, ...]
    bounds: tuple[float, ...]

    def level(self, slowdown: float) -> int:
        """The level of slowness, 0 to the number of bounds."""
        return int(np.searchsorted(self.bounds, slowdown, side="right"))


def worker_cells(values: Floats, dp_ranks: Sequence[int], largest: tuple[int, int]) -> WorkerCells:
    """S of workers, [dp_ranks, stages], pooled by maximum to at most `largest` rows and columns."""
    patch = tuple(-(-size // limit) for size, limit in zip(values.shape, largest, strict=True))
    rows, columns = (-(-size // step) for size, step in zip(values.shape, patch, strict=True))
    padded = np.full((rows * patch[0], columns * patch[1]), -np.inf)
    padded[: values.shape[0], : values.shape[1]] = values
    return WorkerCells(
        slowdown=padded.reshape(rows, patch[0], columns, patch[1]).max(axis=(1, 3)),
        patch=(patch[0], patch[1]),
        dp_ranks=tuple(dp_ranks[row * patch[0]] for row in range(rows)),
        bounds=level_bounds(float(values.max())),
    )


def workers_that_matter(report: Report, most: int) -> list[Worker]:
    """The workers of causes, then the slowest, at most `most`; in order of DP rank and stage."""
    analysed = set(report.attribution.dp_ranks)
    named = report.diagnosis.answer.culprits
    culprits = [Worker(one.dp_rank, one.pp_rank) for one in named if one.dp_rank in analysed]
    slowest = report.by_worker.select("dp_rank", "pp_rank").head(most).iter_rows()
    return sorted(list(dict.fromkeys([*culprits, *(Worker(*place) for place in slowest)]))[:most])


def level_bounds(largest: float) -> tuple[float, ...]:
    """The S at which each level but the lowest begins, on a map whose largest S_w is `largest`."""
    top = max(largest, _LEAST_TOP)
    return tuple(1.0 + (top - 1.0) * share for share in _SHARES)
