"""The computes of a job: their costs as a table, the factors behind them, and their pauses.

In: a `JobReplay`, the waits of threads for a processor, and the `Lockstep` of the ranks inside workers. Out:
`Computes`; each part is computed once, on first use. The waits of the other ranks show directly which rank holds up its
worker. That delay is removed first, or waits for a processor; workers, DP ranks and stages are compared by the rest.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR, ComputeProfile, profile_computes
from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.evidence.cores import without_core_waits
from tracekit.analysis.evidence.lockstep import Lockstep
from tracekit.analysis.evidence.pauses import Pauses, find_pauses
from tracekit.analysis.graph.op_grid import op_grid
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Intervention, Scale, changed
from tracekit.trace.model import COMMUNICATION, OpKind

#: Work that shows how fast a core is, in addition to the computes.
OTHER_WORK = (OpKind.OPTIMIZER, OpKind.LOSS, OpKind.HOST_DELAY, OpKind.DATA_LOAD)


class Computes(Struct, frozen=True, eq=False, dict=True):
    """The computes of a job. They do not depend on its launch delays.

    `queued_s`: [stages, steps, dp_ranks], None: unknown. `on_shared_cores`: all ranks compute on the cores of one host.
    """

    replay: JobReplay
    lockstep: Lockstep | None = None
    queued_s: Floats | None = None
    on_shared_cores: bool = False

    @cached_property
    def table(self) -> ComputeTable:
        """Their costs, as if no rank inside a worker were slower than the others, or waited for a processor."""
        return ComputeTable.of(self.replay, self.costs)

    @cached_property
    def costs(self) -> tuple[Floats, ...]:
        """The costs of all ops behind the table, seconds, [rows, lanes] per block."""
        return self._after(*self._explained)

    @cached_property
    def _explained(self) -> tuple[Intervention, ...]:
        """Changes that make the ranks inside workers as fast as each other, or give each worker a processor."""
        if self.lockstep is not None and (slow := self.lockstep.slow(SMALLEST_FACTOR)).any():
            return (self.lockstep.as_fast_as_peers(slow),)
        if self.queued_s is None:
            return ()
        own = op_grid(self.replay.graph, frozenset(OpKind) - COMMUNICATION)
        return (without_core_waits(own, self.replay.durations.cost, self.queued_s),)

    def _after(self, *changes: Intervention) -> tuple[Floats, ...]:
        """The costs of all ops after some changes."""
        if not changes:
            return self.replay.durations.cost
        return tuple(block.matrix() for block in changed(self.replay, changes).cost)

    @cached_property
    def profile(self) -> ComputeProfile | None:
        """The factors behind their costs; None if the job has neither forwards nor backwards."""
        return None if self.table.empty else profile_computes(self.table, self.optimizer, self._other_work_s)

    @property
    def _other_work_s(self) -> Floats | None:
        """Seconds of `OTHER_WORK`, on shared cores, [kinds, stages, steps, dp_ranks]; else None."""
        if not self.on_shared_cores:
            return None
        grids = (op_grid(self.replay.graph, (kind,)) for kind in OTHER_WORK)
        shape = self.table.shape[1], *self.table.shape[4:]
        return np.stack(
            [np.zeros(shape) if grid.empty else np.nansum(grid.gather(self.costs), axis=1) for grid in grids]
        )

    @cached_property
    def optimizer(self) -> Floats | None:
        """The optimizer of each worker over that of its peers, [stages, steps, dp_ranks]; None if not recorded."""
        grid = op_grid(self.replay.graph, (OpKind.OPTIMIZER,))
        if grid.empty:
            return None
        cost = np.nansum(grid.gather(self.costs), axis=1)
        peers = lower_median(cost, axis=2)[..., None] if cost.shape[2] > 1 else lower_median(cost, axis=0)[None]
        return np.where(cost > 0, cost / safe(peers), 1.0)

    @cached_property
    def pauses(self) -> Pauses | None:
        """Their pauses; None if the job has neither forwards nor backwards."""
        profile = self.profile
        if profile is None:
            return None
        table, suspects = self.table, profile.slow_workers | profile.slow_ranks
        rising = profile.slow_workers & profile.workers.rises.reshape(suspects.shape)
        if rising.any():  # no process is stopped a little longer in each step
            factor = np.where(rising[None, :, None], profile.slow_worker, 1.0)[:, :, None, None]
            table = ComputeTable.of(self.replay, self._after(*self._explained, Scale(table, 1 / factor)))
        return find_pauses(table, suspects)
