"""The computes of a job: their costs as a table, the factors behind them, and their pauses.

In: a `JobReplay`, and the `Lockstep` of the ranks inside workers. Out: `Computes`; each part is computed once, on first
use. The waits of the other ranks show directly which rank holds up its worker. That delay is removed first; workers, DP
ranks and stages are compared by the rest.
"""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct

from tracekit.analysis.evidence.changes import CostOverlay
from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR, ComputeProfile, profile_computes
from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.evidence.lockstep import Lockstep
from tracekit.analysis.evidence.pauses import Pauses, find_pauses
from tracekit.analysis.replay.engine import JobReplay


class Computes(Struct, frozen=True, eq=False, dict=True):
    """The computes of a job. They do not depend on its launch delays."""

    replay: JobReplay
    lockstep: Lockstep | None = None

    @cached_property
    def table(self) -> ComputeTable:
        """Their costs, as if no rank inside a worker were slower than the others."""
        if self.lockstep is None or not (slow := self.lockstep.slow(SMALLEST_FACTOR)).any():
            return ComputeTable.of(self.replay)
        overlay = CostOverlay.recorded(self.replay)
        self.lockstep.as_fast_as_peers(slow).make(overlay)
        return ComputeTable.of(self.replay, tuple(changed.matrix() for changed in overlay.cost))

    @cached_property
    def profile(self) -> ComputeProfile | None:
        """The factors behind their costs; None if the job has neither forwards nor backwards."""
        return None if self.table.empty else profile_computes(self.table)

    @cached_property
    def pauses(self) -> Pauses | None:
        """Their pauses; None if the job has neither forwards nor backwards."""
        if self.profile is None:
            return None
        return find_pauses(self.table, self.profile.slow_workers | self.profile.slow_ranks)
