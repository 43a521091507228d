"""One yardstick for a pipeline job: the selected ops as fast as their peers, all else as recorded.

In: a pipeline and a selection. Out: an intervention. The computes of a worker are compared as causes and fixes compare
them, so that the same repair has the same price: by how much slower it is than its peers beyond chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.computes import stopped_cells
from tracekit.analysis.evidence.congestion import card_as_usual
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject, communicating, optimizers
from tracekit.analysis.evidence.slow_workers import cells_as_fast_as_peers, slowness_with_data
from tracekit.analysis.evidence.transfers import traffic_of
from tracekit.analysis.graph.compiled import Mask
from tracekit.analysis.graph.op_grid import ComputeTable, OpGrid
from tracekit.analysis.numeric.arrays import Bools
from tracekit.analysis.numeric.statistics import safe
from tracekit.analysis.whatif.interventions import Intervention, Scale, Together
from tracekit.analysis.whatif.peers import ops_at_the_pace_of_peers
from tracekit.analysis.whatif.selection import Selection, masks_of


def as_fast_as_peers(job: PipelineSubject, selection: Selection) -> Intervention:
    """The selected ops as fast as their peers.

    If all forwards and backwards of a worker in a step are selected, they lose what exceeds its peers beyond chance,
    and their pauses; so does its optimizer. Communication belongs to others, too: if all of a worker's is selected,
    only a slow network card is repaired. All other ops take the time of their peers, see `analysis.whatif.peers`.
    """
    replay = job.replay
    masks = masks_of(selection, replay.graph, replay.durations)
    workers, changes = _Cells.of(communicating(job), masks, (1,)), list[Intervention]()
    others = workers.removed_from(masks)
    for card in traffic_of(job).cards if workers.whole.any() else ():
        passes = job.cells_of(card.workers)[:, None] & card.steps[:, None]
        if (workers.whole | ~passes).all():
            changes.append(card_as_usual(traffic_of(job), card))
    if job.profile is not None:
        computes = _Cells.of(job.table, masks, (2, 3))
        steps_of_optimizers = _Cells.of(optimizers(job), masks, (1,))
        slowness = slowness_with_data(job)
        changes.append(_without_pauses(job, computes.whole))
        changes.append(cells_as_fast_as_peers(job, slowness, computes.whole, steps_of_optimizers.whole))
        others = steps_of_optimizers.removed_from(computes.removed_from(others))
    changes.append(ops_at_the_pace_of_peers(replay.graph, replay.durations.cost, others))
    return Together(tuple(changes))


def _without_pauses(job: PipelineSubject, where: Bools) -> Intervention:
    """The computes of cells `where` [kinds, stages, steps, dp_ranks] without the pauses that single ones have."""
    pauses, grid = job.pauses, job.table.grid
    assert pauses is not None, "a job with a profile has pauses, if only none"
    real = pauses.of_processes or pauses.spare_backwards
    stopped = stopped_cells(pauses.stopped, grid.shape)
    lost_s = np.where(stopped, np.fmax(grid - pauses.usual_s, 0.0), pauses.seconds if real else 0.0)
    return Scale(job.table, np.where(where[:, :, None, None] & (lost_s > 0), 1 - lost_s / safe(grid), 1.0))


class _Cells(Struct, frozen=True, eq=False):
    """Ops of workers in a grid, summed over `axes`; `whole`: all of a worker's in a step are selected, but not those of
    all its peers, [..., stages, steps, dp_ranks].
    """

    grid: OpGrid | ComputeTable
    axes: tuple[int, ...]
    whole: Bools

    @classmethod
    def of(cls, grid: OpGrid | ComputeTable, masks: Sequence[Mask], axes: tuple[int, ...]) -> _Cells:
        """Find the cells. `masks`: the selected ops."""
        selected = grid.gather([mask.astype(np.float64) for mask in masks])
        present: Bools = np.any(np.isfinite(selected), axis=axes)
        whole: Bools = present & np.all((selected > 0) | np.isnan(selected), axis=axes)
        peers = -1 if whole.shape[-1] > 1 else -3
        return cls(grid, axes, whole & ~np.all(whole | ~present, axis=peers, keepdims=True))

    def removed_from(self, masks: Sequence[Mask]) -> list[Mask]:
        """The masks without the ops of these cells."""
        rest = [mask.copy() for mask in masks]
        for part in self.grid.parts(np.where(np.expand_dims(self.whole, self.axes), 0.0, 1.0)):
            rows = part.rows if part.rows.ndim == 2 else part.rows[:, None]
            lanes = np.arange(part.values.shape[1])
            rest[part.block][rows, lanes] &= part.values != 0
        return rest
