"""Forward and backward costs of a job as one grid, and back.

In: a `JobReplay`. Out: a `ComputeTable`, which maps forward and backward computes to the cost matrices, so that costs
can be read and changed by (stage, chunk, microbatch, step, DP rank).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.compiled import GridPart
from tracekit.analysis.graph.dependency_graph import Block
from tracekit.analysis.graph.op_grid import ComputeRows, compute_rows
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.trace.model import OpKind

COMPUTE_KINDS = (OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE)


class _Placement(Struct, frozen=True, eq=False):
    """Ops of one kind and stage in one block.

    `step`, `dp_index`: positions of the block's lanes in the grid, [lanes].
    """

    block: int
    kind: int
    stage: int
    computes: ComputeRows
    step: Int32s
    dp_index: Ints


class ComputeTable(Struct, frozen=True, eq=False, dict=True):
    """Costs of computes as a grid [kinds, stages, chunks, microbatches, steps, dp_ranks]; kinds: forward, backward, or
    the only one that the job has.

    Cells that were not recorded are nan. If stages differ in their number of computes, the grid has one chunk, and
    "microbatch" counts the computes of a stage.
    """

    shape: tuple[int, int, int, int, int, int]
    placements: tuple[_Placement, ...]
    costs: tuple[Floats, ...]

    @classmethod
    def of(cls, replay: JobReplay, costs: tuple[Floats, ...] | None = None) -> ComputeTable:
        """Find every forward and backward of the job. `costs`: seconds, [rows, lanes] per block; None: as recorded."""
        graph = replay.graph
        kinds = [kind for kind in COMPUTE_KINDS if any(kind.code in block.template.kind for block in graph.blocks)]
        placements = [
            part
            for number, block in enumerate(graph.blocks)
            for part in _placements(block, number, kinds, np.array(graph.dp_ranks), graph.layout.pp)
        ]
        cells = {len(part.computes) for part in placements}
        chunks = graph.layout.vpp
        regular = len(cells) == 1 and not next(iter(cells)) % chunks
        split = (chunks, next(iter(cells)) // chunks) if regular else (1, max(cells, default=0))
        shape = (len(kinds), graph.layout.pp, *split, len(graph.steps), len(graph.dp_ranks))
        return cls(shape, tuple(placements), replay.durations.cost if costs is None else costs)

    @cached_property
    def grid(self) -> Floats:
        """Own costs, seconds, read-only."""
        return self.gather(self.costs)

    @property
    def empty(self) -> bool:
        """True if the job has neither forward nor backward computes."""
        return not self.placements

    def gather(self, costs: Sequence[Floats]) -> Floats:
        """`costs` (one [rows, lanes] matrix per block) as a grid."""
        kinds, stages, chunks, microbatches, steps, dp_ranks = self.shape
        grid = np.full((kinds, stages, chunks * microbatches, steps, dp_ranks), np.nan)
        for part in self.placements:
            seconds = part.computes.seconds(costs[part.block])
            grid[part.kind, part.stage, : len(part.computes), part.step, part.dp_index] = seconds.T
        return grid.reshape(self.shape)

    def parts(self, values: Floats) -> Iterator[GridPart]:
        """Factors, which broadcast to the grid's shape, as parts of the blocks; skips factors of 1."""
        _, _, chunks, microbatches, steps, dp_ranks = self.shape
        values = values[(None,) * (len(self.shape) - values.ndim)]
        by_stage = np.broadcast_to(values, (*self.shape[:2], *values.shape[2:]))
        for part in self.placements:
            of_stage = by_stage[part.kind, part.stage]
            if (of_stage == 1).all():
                continue
            # Chunks and microbatches share one axis of rows, steps and DP ranks one of lanes.
            wide = np.broadcast_to(of_stage, self.shape[2:]).reshape(chunks * microbatches, steps * dp_ranks)
            computes, lane = part.computes, part.step * dp_ranks + part.dp_index
            factor = wide[: len(computes)]
            if not np.array_equal(lane, np.arange(steps * dp_ranks)):
                factor = factor[:, lane]
            if computes.parts > 1:
                factor = np.repeat(factor, computes.parts, axis=0)
            rows = computes.rows[:, 0] if computes.rows.shape[1] == 1 else computes.rows
            yield GridPart(part.block, rows, factor)


def _placements(block: Block, number: int, kinds: Sequence[OpKind], dp_ranks: Ints, stages: int) -> list[_Placement]:
    dp_index = np.searchsorted(dp_ranks, block.dp_rank)
    placements = []
    for stage in range(stages):
        for kind_index, kind in enumerate(kinds):
            computes = compute_rows(block, stage, kind)
            if len(computes):
                placements.append(_Placement(number, kind_index, stage, computes, block.step, dp_index))
    return placements
