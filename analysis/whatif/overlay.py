"""A job while changes are applied to it: what each op costs and how late it is launched.

In: a replay, and interventions that change its `CostOverlay`. Out: the `Costs` of each block, and the replay with them.
An overlay knows which rows of a block are recorded, constant in all lanes, or replaced, so that a question about kinds
or stages copies no matrix and never changes a recorded one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec import Struct, field

from tracekit.analysis.graph.compiled import Mask
from tracekit.analysis.graph.op_grid import GridPart
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, LanesToReplay, Timeline
from tracekit.analysis.whatif.selection import Context, Selection

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tracekit.analysis.graph.op_graph import FoldedGraph


class ChangedRows(Struct):
    """Costs or launch delays of a block, seconds: a matrix `base` [rows, lanes] of which some rows are replaced.

    `constant`: the value of a row in all lanes, nan for the others, [rows]. `rows`: row number -> its values, [lanes].
    """

    base: Floats
    constant: Floats
    rows: dict[int, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, base: Floats, zero: Bools | None = None) -> ChangedRows:
        """The matrix as it is, but for rows that are 0 in all lanes, [rows]."""
        constant = np.full(len(base), np.nan)
        if zero is not None:
            constant[zero] = 0.0
        return cls(base, constant)

    @property
    def as_recorded(self) -> bool:
        """True if nothing was replaced."""
        return not self.rows and bool(np.isnan(self.constant).all())

    def put(self, mask: Mask, values: Floats) -> None:
        """Replace what `mask` selects by `values`; both broadcast to [rows, lanes]."""
        if mask.shape[1] == values.shape[1] == 1:
            chosen = np.broadcast_to(mask[:, 0], len(self.base))
            self.constant = np.where(chosen, values[:, 0], self.constant)
            self.rows = {row: value for row, value in self.rows.items() if not chosen[row]}
            return
        if len(mask) == 1 < mask.shape[1]:  # whole lanes; the others stay as they are
            lanes = np.flatnonzero(mask[0])
            matrix = self._matrix_to_change()
            matrix[:, lanes] = np.broadcast_to(values, self.base.shape)[:, lanes]
            return
        touched = np.flatnonzero(np.broadcast_to(mask.any(axis=1), len(self.base)))
        if len(touched) == len(self.base):
            np.copyto(self._matrix_to_change(), values, where=mask)
            return
        changed = self._values(touched)
        np.copyto(changed, values if len(values) == 1 else values[touched], where=mask[touched])
        self._replace(dict(zip(touched.tolist(), changed, strict=True)))

    def scale(self, part: GridPart) -> None:
        """Multiply the values of a part; a row that is 0 in all lanes stays constant."""
        if part.rows.ndim == 1:
            for row, factor in zip(part.rows.tolist(), part.values, strict=True):
                if row in self.rows:
                    self.rows[row] *= factor
                elif self.constant[row] != 0:
                    same = not np.isnan(self.constant[row])
                    self._replace({row: (self.constant[row] if same else self.base[row]) * factor})
            return
        rows = np.unique(part.rows)
        values, place = self._values(rows), np.searchsorted(rows, part.rows)
        np.put_along_axis(values, place, np.take_along_axis(values, place, axis=0) * part.values, axis=0)
        zero = (self.constant[rows] == 0).tolist()
        self._replace(
            {row: of_row for row, of_row, stays in zip(rows.tolist(), values, zero, strict=True) if not stays}
        )

    def set(self, part: GridPart) -> None:
        """Replace the values of a part by those that are not nan."""
        values = np.where(np.isnan(part.values), self._values(part.rows), part.values)
        self._replace(dict(zip(part.rows.tolist(), values, strict=True)))

    def laid_out(self) -> tuple[Floats, Ints, Floats]:
        """The matrix, the row of it that each row reads (-1: constant), and the rows that follow those of the matrix,
        as in `Costs`.
        """
        source = np.where(np.isnan(self.constant), np.arange(len(self.base)), -1)
        source[list(self.rows)] = len(self.base) + np.arange(len(self.rows))
        if (source < 0).all():
            return NO_MATRIX, source, NO_MATRIX
        return self.base, source, np.stack(list(self.rows.values())) if self.rows else NO_MATRIX

    def matrix(self) -> Floats:
        """The whole matrix; `base` itself if nothing changed."""
        return self.base if self.as_recorded else self._values(np.arange(len(self.base)))

    def _matrix_to_change(self) -> Floats:
        """The whole matrix as a new `base`, which may be changed in place."""
        self.base = self._values(np.arange(len(self.base)))
        self.constant, self.rows = np.full(len(self.base), np.nan), {}
        return self.base

    def _values(self, rows: Ints) -> Floats:
        """A copy of some rows, [rows, lanes]."""
        values, constant = self.base[rows], self.constant[rows]
        same = ~np.isnan(constant)
        values[same] = constant[same, None]
        if self.rows:
            for place, row in enumerate(rows.tolist()):
                if row in self.rows:
                    values[place] = self.rows[row]
        return values

    def _replace(self, rows: dict[int, Floats]) -> None:
        self.constant[list(rows)] = np.nan
        self.rows.update(rows)


class CostOverlay(Struct):
    """A job while interventions are applied.

    `replay`: the job; `cost` and `delay`: own costs and kept launch delays per block. `stalled_s`, `overlap_s`: seconds
    of each step in which the job stalls, and that it shares with the next, [steps]. `op_cost`, `op_delay`: of an op
    graph, the own cost and launch delay of each op, [ops], in place of `cost` and `delay`; blocks look them up only as
    they are replayed, so that many overlays fit into memory. `sampled`: the same changes to `JobReplay.sampled`.
    """

    replay: GraphReplay
    cost: list[ChangedRows]
    delay: list[ChangedRows]
    stalled_s: Floats
    overlap_s: Floats
    op_cost: Floats | None = None
    op_delay: Floats | None = None
    sampled: CostOverlay | None = None

    @classmethod
    def recorded(cls, replay: GraphReplay) -> CostOverlay:
        """The job as it ran."""
        cost = [ChangedRows.of(matrix) for matrix in replay.durations.cost]
        delay = [ChangedRows.of(matrix, ~kept) for matrix, kept in replay.kept_delays]
        return cls(replay, cost, delay, *replay.between_steps_s())

    def masks(self, selection: Selection) -> Iterator[tuple[int, Mask]]:
        """The number of each block and the mask of its ops in a selection, which broadcasts to [rows, lanes]."""
        graph, remembered = self.replay.graph, dict["Hashable", Any]()
        for number in range(len(graph.blocks)):
            yield number, selection.mask(Context(graph, self.replay.durations, number, remembered))

    def cost_of_ops(self) -> Floats:
        """The own cost of each op of an op graph, seconds, [ops]."""
        if self.op_cost is not None:
            return self.op_cost
        return self._of_ops(self.cost, self.replay.cost_of_ops)

    def delay_of_ops(self) -> Floats:
        """The launch delay of each op of an op graph, seconds, [ops]."""
        if self.op_delay is not None:
            return self.op_delay
        return self._of_ops(self.delay, self.replay.delay_of_ops)

    def cost_of_blocks(self) -> list[ChangedRows]:
        """The own costs of each block, for interventions to change."""
        if self.op_cost is not None:
            self.cost, self.op_cost = [ChangedRows.of(matrix) for matrix in self._looked_up(self.op_cost)], None
        return self.cost

    def costs(self) -> list[Costs]:
        """The costs of each block for its replay."""
        cost = self.cost if self.op_cost is None else map(ChangedRows.of, self._looked_up(self.op_cost))
        delay = self.delay if self.op_delay is None else map(ChangedRows.of, self._looked_up(self.op_delay))
        return [_costs(*block) for block in zip(cost, delay, strict=True)]

    def step_times(self) -> Floats:
        """The duration of each step, seconds, [steps]."""
        return self.replay.step_times(self.costs(), self.sampled_costs()) + self.stalled_s - self.overlap_s

    def timelines(self) -> tuple[Timeline, ...]:
        """Times of every op, one timeline per block of the graph."""
        return self.replay.timelines(self.costs(), self.sampled_costs())

    def lanes(self) -> list[LanesToReplay]:
        """The lanes of each block with their costs."""
        return self.replay.lanes(self.costs(), self.sampled_costs())

    def sampled_costs(self) -> Sequence[Costs]:
        """The costs of the steps of the whole job that tell when stages begin; none if these are some of the graph."""
        return () if self.sampled is None else self.sampled.costs()

    def _looked_up(self, values: Floats) -> Iterator[Floats]:
        """Values of ops as a matrix for each block."""
        return (values.take(block.op) for block in cast("FoldedGraph", self.replay.graph).blocks)

    def _of_ops(self, blocks: Sequence[ChangedRows], recorded: Floats) -> Floats:
        if all(block.as_recorded for block in blocks):
            return recorded
        return cast("FoldedGraph", self.replay.graph).of_ops([block.matrix() for block in blocks])


def _costs(cost: ChangedRows, delay: ChangedRows) -> Costs:
    matrix, matrix_row, changed_cost = cost.laid_out()
    delays, delay_row, changed_delay = delay.laid_out()
    return Costs(matrix, matrix_row, np.nan_to_num(cost.constant), delays, delay_row, changed_cost,
                 changed_delay=changed_delay)  # fmt: skip
