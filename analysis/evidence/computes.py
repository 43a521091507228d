"""The computes of a job: their costs as a table, the factors behind them, and their pauses.

In: a `JobReplay`. Out: `Computes`; each part is computed once, on first use.
"""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct

from tracekit.analysis.evidence.compute_profile import ComputeProfile, profile_computes
from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.evidence.pauses import Pauses, find_pauses
from tracekit.analysis.replay.engine import JobReplay


class Computes(Struct, frozen=True, eq=False, dict=True):
    """The computes of a job. They do not depend on its launch delays."""

    replay: JobReplay

    @cached_property
    def table(self) -> ComputeTable:
        """Their costs."""
        return ComputeTable.of(self.replay)

    @cached_property
    def profile(self) -> ComputeProfile | None:
        """The factors behind their costs; None if the job has no forwards or no backwards."""
        return None if self.table.empty else profile_computes(self.table)

    @cached_property
    def pauses(self) -> Pauses | None:
        """Their pauses; None if the job has no forwards or no backwards."""
        if self.profile is None:
            return None
        return find_pauses(self.table, self.profile.slow_workers | self.profile.slow_ranks)
