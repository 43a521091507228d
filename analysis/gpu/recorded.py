"""What a recording of GPUs shows beside its ops: what was compared, who waited, what the GPUs did.

In: a `GpuRecording`. Out: `Recorded`, which evidence and reports read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from tracekit.analysis.gpu.breakdown import Breakdown, breakdowns
from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.comparable import Comparable
from tracekit.analysis.gpu.late_rank import LateRanks, late_ranks
from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.gpu.trust import Unexplained
from tracekit.analysis.gpu.waits import Waits
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.kineto import GpuRecording


@dataclass(frozen=True, slots=True)
class Recorded:
    """`recording`: the part of it that is compared; `part`: why, and its matches and clocks.

    `skew_s`: how far the clock of each rank's host was ahead of its GPU's, seconds. `late`: who is late to collectives.
    """

    part: Comparable
    breakdowns: tuple[Breakdown, ...]
    waits: Waits
    late: LateRanks
    unexplained: Unexplained
    skew_s: Mapping[int, float]

    @classmethod
    def of(
        cls, whole: GpuRecording, part: Comparable, waits: Waits, left: Unexplained, skew_s: Mapping[int, float],
        recorded_s: float,
    ) -> Recorded:  # fmt: skip
        """Gather what a recording shows. `recorded_s`: how long its comparable part took, seconds."""
        return cls(part, breakdowns(part.recording), waits, late_ranks(whole, part, recorded_s), left, skew_s)

    @property
    def recording(self) -> GpuRecording:
        """The part of the recording that is compared."""
        return self.part.recording

    @property
    def matches(self) -> Matches:
        """Which communication kernels of different ranks belong to the same collective."""
        return self.part.matches

    @property
    def clocks(self) -> ClockOffsets:
        """How far the clock of each rank is ahead."""
        return self.part.clocks

    @property
    def marked_steps(self) -> int:
        """The number of marked training steps; 0 if the recording marks none."""
        return self.recording.step_spans["step"].n_unique()

    @property
    def kernel_time(self) -> pl.DataFrame:
        """`kernel_class`, `ops`, `seconds` over all ranks, most first."""
        return (
            self.recording.gpu_ops.group_by("kernel_class")
            .agg(ops=pl.len(), seconds=pl.col("duration").sum())
            .sort("seconds", "kernel_class", descending=[True, False])
        )

    @property
    def unknown_kernels(self) -> pl.DataFrame:
        """`name`, `ops`, `seconds` of kernels of no known class, most first."""
        other = self.recording.gpu_ops.filter(kernel_class=str(KernelClass.OTHER))
        return (
            other.group_by("name")
            .agg(ops=pl.len(), seconds=pl.col("duration").sum())
            .sort("seconds", "name", descending=[True, False])
        )

    @property
    def idle_s(self) -> float:
        """How long the busiest GPU was idle, seconds."""
        return min((one.idle_s for one in self.breakdowns), default=0.0)

    @property
    def without_launch(self) -> int:
        """The number of GPU ops whose launch is outside the recording."""
        return self.recording.gpu_ops["launch"].null_count()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was lost, left out or guessed while reading, which is no reason for distrust."""
        left_out = [f"rank {rank} is left out: {why}" for rank, why in self.part.left_out.items()]
        alone = len(self.recording.ranks) > 1 and not self.matches.matched
        nothing = "no collective was found on several ranks: nobody is seen to wait; record ranks of one job together"
        return (*left_out, *self.recording.notes, *([nothing] if alone else []))
