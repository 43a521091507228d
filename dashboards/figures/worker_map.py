"""The map of exact S_w, ready to be drawn: where each worker is, what is known of it, and the map in cells."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Ints
from tracekit.dashboards.theme import LOST_LEVELS
from tracekit.dashboards.words import worker_name
from tracekit.report.report import Report
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.report.findings import WorkerSlowdowns

#: S_w of steps is kept in 32 bits.
Floats = npt.NDArray[np.floating]
#: Do not point at workers below this S_w: analysis/attribution/patterns.py treats less than 2 % as noise.
WORTH_NAMING = 1.02
#: The S_w at which each level of `LOST_LEVELS` begins.
LEVELS = tuple(1 / (1 - share) for share in LOST_LEVELS)
#: Pool maps with more cells or rows: a screen cannot show them, and a browser draws them slowly.
MOST_CELLS, MOST_MAP_ROWS = 20_000, 160
#: Marks a rank or host that the trace does not name.
UNKNOWN = -1


def lost_alone(slowdown: Floats) -> Floats:
    """The share of a step that workers alone cost, from their S_w."""
    return 1 - 1 / slowdown


class HostLoad(Struct, frozen=True):
    """One host: its workers, the worst S_w among them and where, and the sum of what each alone costs of a step."""

    name: str
    workers: int
    worst: Worker
    worst_slowdown: float
    summed: float


class WorkerMap(Struct, frozen=True, eq=False):
    """Exact S_w of every analysed worker. Arrays are [dp_ranks, stages] unless stated otherwise.

    `dp_ranks`: those analysed, ascending, [dp_ranks]. `rank`: global rank, `host`: index into `hosts`; both UNKNOWN if
    the trace does not name them. `table`: the same as rows, worst first. `steps`: step numbers, [steps]. `per_step`:
    exact S_w, [steps, dp_ranks, stages], nan if the DP rank was left out.

    Figures on two pages share this map, so that none of them searches 65,536 rows for a worker.
    """

    table: pl.DataFrame
    dp_ranks: Ints
    slowdown: Floats
    rank: Ints
    host: Ints
    hosts: tuple[str, ...]
    steps: Ints
    per_step: Floats

    @classmethod
    def of(cls, report: Report, workers: WorkerSlowdowns) -> WorkerMap:
        """The map of a report on a pipeline and of the steps behind it."""
        dropped = [(lane["step"], lane["dp_rank"]) for lane in (report.coverage.dropped if report.coverage else ())]
        return cls.build(report.table("by_worker"), workers.steps, workers.dp_ranks, workers.slowdown, dropped)

    @classmethod
    def build(
        cls,
        by_worker: pl.DataFrame,
        steps: Ints,
        dp_ranks: Ints,
        per_step: Floats,
        dropped: Collection[tuple[int, int]],
    ) -> WorkerMap:
        """`dropped`: the (step, dp_rank) pairs that were left out of the analysis."""
        shape = per_step.shape[1:]
        where = np.searchsorted(dp_ranks, by_worker["dp_rank"].to_numpy()), by_worker["pp_rank"].to_numpy()
        host_names = by_worker["host"].cast(pl.String)
        hosts = tuple(host_names.drop_nulls().unique().sort())
        numbers = dict(zip(hosts, range(len(hosts)), strict=True))

        def spread(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            cells = np.zeros(shape, values.dtype)
            cells[where] = values
            return cells

        without_dropped = per_step.astype(np.float32, copy=True)
        lanes = [(step, dp_rank) for step, dp_rank in dropped if step in set(steps.tolist()) and dp_rank in dp_ranks]
        for step, dp_rank in lanes:
            without_dropped[np.searchsorted(steps, step), np.searchsorted(dp_ranks, dp_rank)] = np.nan
        return cls(
            table=by_worker,
            dp_ranks=dp_ranks,
            slowdown=spread(by_worker["slowdown"].to_numpy()),
            rank=spread(by_worker["rank"].cast(pl.Int64).fill_null(UNKNOWN).to_numpy()),
            host=spread(np.array([UNKNOWN if name is None else numbers[name] for name in host_names])),
            hosts=hosts,
            steps=steps,
            per_step=without_dropped,
        )

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.slowdown.shape[1])

    @property
    def only_host(self) -> str | None:
        """The host of all workers; None if there are several, or some worker's is unknown."""
        return self.hosts[0] if len(self.hosts) == 1 and not (self.host == UNKNOWN).any() else None

    def values(self, position: int | None) -> Floats:
        """S_w in the step at that index; over all steps for None."""
        return self.slowdown if position is None else self.per_step[position]

    def worker(self, cell: int) -> Worker:
        """The worker of a flat cell number."""
        row, stage = divmod(cell, self.stages)
        return Worker(int(self.dp_ranks[row]), stage)

    def cell(self, worker: Worker) -> int | None:
        """The inverse of `worker`; None if it is not on the map."""
        row = int(np.searchsorted(self.dp_ranks, worker.dp_rank))
        if row == len(self.dp_ranks) or self.dp_ranks[row] != worker.dp_rank or worker.pp_rank >= self.stages:
            return None
        return row * self.stages + worker.pp_rank

    def host_name(self, cell: int) -> str | None:
        """The host of a flat cell number."""
        number = int(self.host.ravel()[cell])
        return None if number == UNKNOWN else self.hosts[number]

    def rank_of(self, cell: int) -> int | None:
        """The global rank of a flat cell number."""
        rank = int(self.rank.ravel()[cell])
        return None if rank == UNKNOWN else rank

    def name(self, cell: int) -> str:
        """The name of the worker of a flat cell number: `rank 9 on host-0001`; its coordinates if unknown."""
        return worker_name(self.worker(cell), self.rank_of(cell), self.host_name(cell))

    def full_name(self, cell: int) -> str:
        """The name followed by the coordinates: `rank 9 on host-0001 (dp 1, stage 2)`."""
        if self.rank_of(cell) is None:
            return self.name(cell)
        return f"{self.name(cell)} ({self.worker(cell).coordinates})"

    def label(self, cell: int) -> str:
        """Its name on an axis or in a table of a host: `rank 9`."""
        return worker_name(self.worker(cell), self.rank_of(cell))

    def cell_of_rank(self, rank: int) -> int | None:
        """The flat cell number of the worker that this global rank recorded; None if there is none."""
        cells = np.flatnonzero(self.rank.ravel() == rank)
        return int(cells[0]) if cells.size and rank != UNKNOWN else None

    def worst(self, position: int | None, most: int) -> list[int]:
        """Flat cell numbers of the slowest workers, slowest first; excludes those left out of the step."""
        values = np.nan_to_num(self.values(position).ravel(), nan=-np.inf)
        order = np.argsort(-values, kind="stable")[:most]
        return [int(cell) for cell in order if np.isfinite(values[cell])]

    def place(self, cell: int) -> int:
        """The number of workers at least as slow, including this one: 1 is the slowest."""
        values = self.slowdown.ravel()
        return int((values > values[cell]).sum()) + 1

    def host_loads(self) -> list[HostLoad]:
        """The known hosts, the one with the worst worker first."""
        cells = np.flatnonzero(self.host.ravel() != UNKNOWN)
        numbers, values = self.host.ravel()[cells], self.slowdown.ravel()[cells]
        summed = np.bincount(numbers, np.clip(lost_alone(values), 0, None), len(self.hosts))
        counts = np.bincount(numbers, minlength=len(self.hosts))
        order = np.argsort(-values, kind="stable")
        first, position = np.unique(numbers[order], return_index=True)
        worst = dict(zip(first.tolist(), order[position].tolist(), strict=True))
        loads = [
            HostLoad(
                name=name,
                workers=int(counts[number]),
                worst=self.worker(int(cells[worst[number]])),
                worst_slowdown=float(values[worst[number]]),
                summed=float(summed[number]),
            )
            for number, name in enumerate(self.hosts)
        ]
        return sorted(loads, key=lambda load: (-load.worst_slowdown, -load.summed))


class Pooled(Struct, frozen=True, eq=False):
    """A map with blocks of cells reduced to their largest value; arrays are [blocks down, blocks across].

    `row`, `column`: where in the map that value was. `row_block`, `column_block`: cells per block.
    """

    values: Floats
    row: Ints
    column: Ints
    row_block: int
    column_block: int

    @property
    def levels(self) -> Ints:
        """The level of slowness of each cell, as of `level_of`."""
        return np.searchsorted(LEVELS, self.values, side="right")


def blocks_that_fit(rows: int, columns: int, most: int = MOST_CELLS) -> tuple[int, int]:
    """Cells per block down and across, so that at most about `most` blocks are left: the longer side is pooled first.

    Rows are pooled above MOST_MAP_ROWS in any case, so that each stays visible.
    """
    factor = -(-rows * columns // most)
    down, across = (factor, 1) if rows >= columns else (1, factor)
    return max(down, -(-rows // MOST_MAP_ROWS)), across


def pool(values: Floats, row_block: int, column_block: int) -> Pooled:
    """Pool by maximum, so that one slow cell stays visible among thousands; nan only where a whole block is nan."""
    rows, columns = values.shape
    down, across = -(-rows // row_block), -(-columns // column_block)
    padded = np.full((down * row_block, across * column_block), -np.inf)
    padded[:rows, :columns] = np.nan_to_num(values, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    blocks = padded.reshape(down, row_block, across, column_block).transpose(0, 2, 1, 3).reshape(down, across, -1)
    inside = blocks.argmax(axis=2)
    largest = np.take_along_axis(blocks, inside[:, :, None], axis=2)[:, :, 0]
    return Pooled(
        values=np.where(np.isfinite(largest), largest, np.nan),
        row=np.minimum(np.arange(down)[:, None] * row_block + inside // column_block, rows - 1),
        column=np.minimum(np.arange(across)[None, :] * column_block + inside % column_block, columns - 1),
        row_block=row_block,
        column_block=column_block,
    )


def pooled_to(values: Floats, rows: int, columns: int) -> Pooled:
    """Pool to at most so many rows and columns."""
    return pool(values, -(-values.shape[0] // rows), -(-values.shape[1] // columns))


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
