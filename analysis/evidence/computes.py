"""The computes of a job: their costs as a table, the factors behind them, and their pauses.

In: a `JobReplay`, and the `Lockstep` of the ranks inside workers. Out: `Computes`; each part is computed once, on first
use. The waits of the other ranks show directly which rank holds up its worker. That delay is removed first; workers, DP
ranks and stages are compared by the rest.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR, ComputeProfile, profile_computes
from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.evidence.lockstep import Lockstep
from tracekit.analysis.evidence.pauses import Pauses, find_pauses
from tracekit.analysis.graph.op_grid import op_grid
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.robust import lower_median, safe
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import Intervention, Scale, changed
from tracekit.trace.model import OpKind


class Computes(Struct, frozen=True, eq=False, dict=True):
    """The computes of a job. They do not depend on its launch delays."""

    replay: JobReplay
    lockstep: Lockstep | None = None

    @cached_property
    def table(self) -> ComputeTable:
        """Their costs, as if no rank inside a worker were slower than the others."""
        return self._after(*self._inside_workers)

    @cached_property
    def _inside_workers(self) -> tuple[Intervention, ...]:
        """Changes that make the ranks inside workers as fast as each other; empty if none is slow."""
        if self.lockstep is None or not (slow := self.lockstep.slow(SMALLEST_FACTOR)).any():
            return ()
        return (self.lockstep.as_fast_as_peers(slow),)

    def _after(self, *changes: Intervention) -> ComputeTable:
        """Their costs after some changes."""
        if not changes:
            return ComputeTable.of(self.replay)
        blocks = changed(self.replay, changes).cost
        return ComputeTable.of(self.replay, tuple(block.matrix() for block in blocks))

    @cached_property
    def profile(self) -> ComputeProfile | None:
        """The factors behind their costs; None if the job has neither forwards nor backwards."""
        return None if self.table.empty else profile_computes(self.table, self.optimizer)

    @cached_property
    def optimizer(self) -> Floats | None:
        """The optimizer of each worker over that of its peers, [stages, steps, dp_ranks]; None if not recorded."""
        grid = op_grid(self.replay.graph, (OpKind.OPTIMIZER,))
        if grid.empty:
            return None
        cost = np.nansum(grid.gather(self.replay.durations.cost), axis=1)
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
            table = self._after(*self._inside_workers, Scale(table, 1 / factor))
        return find_pauses(table, suspects)
