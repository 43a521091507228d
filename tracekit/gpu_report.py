"""The report on a job recorded on its GPUs, as data.

In: breakdown, matches, clocks and waits. Out: `GpuReport`, and one JSON object of it (docs/kineto.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.analysis.gpu.breakdown import Breakdown
from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.gpu.waits import Waits
from tracekit.gpu_recording import GpuRecording, KernelClass
from tracekit.report import without_nan

#: Kernels of no class that are listed.
_MOST_UNKNOWN = 20


@dataclass(frozen=True)
class GpuReport:
    """What `GpuJob.whatif` found out."""

    recording: GpuRecording
    breakdowns: Sequence[Breakdown]
    matches: Matches
    clocks: ClockOffsets
    waits: Waits

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
    def without_launch(self) -> int:
        """GPU ops whose launch lies outside the recording."""
        return self.recording.gpu_ops["launch"].null_count()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; nan becomes null."""
        content = {
            "job": self._job(),
            "by_rank": self._by_rank(),
            "collectives": {
                "matched": self.matches.matched,
                "unmatched": self.matches.unmatched,
                "by_group": [
                    {
                        "group": group.group,
                        "ranks": list(group.ranks),
                        "matched": group.matched,
                        "unmatched": {str(rank): count for rank, count in group.unmatched.items()},
                        "shifts": {str(rank): shift for rank, shift in group.shifts.items()},
                    }
                    for group in self.matches.groups
                ],
            },
            "clocks": [
                {"rank": rank, "ahead_s": ahead, "uncertainty_s": uncertainty, "collectives": count}
                for rank, ahead, uncertainty, count in zip(
                    self.clocks.ranks,
                    self.clocks.ahead.tolist(),
                    self.clocks.uncertainty.tolist(),
                    self.clocks.collectives.tolist(),
                    strict=True,
                )
            ],
            "wait_for": [
                {"group": of_group.group, "rank": rank, "for_rank": other, "wait_s": float(of_group.waited[at, by])}
                for of_group in self.waits.by_group
                for at, rank in enumerate(self.waits.ranks)
                for by, other in enumerate(self.waits.ranks)
                if of_group.waited[at, by] > 0
            ],
            "kernel_classes": self.kernel_time.to_dicts(),
            "unknown_kernels": self.unknown_kernels.head(_MOST_UNKNOWN).to_dicts(),
            "notes": list(self.recording.notes),
        }
        plain: dict[str, Any] = without_nan(content)
        return plain

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def _job(self) -> dict[str, Any]:
        recording = self.recording
        return {
            "name": recording.name,
            "ranks": len(recording.ranks),
            "world_size": recording.world_size,
            "gpu": recording.device_name,
            "steps": recording.step_spans["step"].n_unique(),
            "gpu_ops": recording.gpu_ops.height,
            "gpu_ops_without_launch": self.without_launch,
            "host_calls": recording.calls.height,
        }

    def _by_rank(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": one.rank,
                "host": self.recording.hosts.get(one.rank),
                "span_s": one.span_s,
                "compute_s": one.compute_s,
                "communication_s": one.communication_s,
                "exposed_communication_s": one.exposed_communication_s,
                "memory_s": one.memory_s,
                "idle_s": one.idle_s,
                "wait_s": wait,
                "sole_delay_s": sole_delay,
                "slowdown": None,
            }
            for one, wait, sole_delay in zip(
                self.breakdowns, self.waits.wait.tolist(), self.waits.sole_delay.tolist(), strict=True
            )
        ]
