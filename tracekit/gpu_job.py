"""A job recorded on its GPUs, as users of the library hold it: a recording, and what can be asked of it.

In: traces of torch.profiler. Out: `GpuJob`, and from it a `GpuReport`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tracekit.analysis.gpu.breakdown import breakdowns
from tracekit.analysis.gpu.clock_offsets import ClockOffsets, measure_offsets
from tracekit.analysis.gpu.matching import Matches, match_collectives
from tracekit.analysis.gpu.waits import measure_waits
from tracekit.collectors.importers.kineto.reader import read_kineto
from tracekit.gpu_recording import GpuRecording
from tracekit.gpu_report import GpuReport


@dataclass(frozen=True)
class GpuJob:
    """One job: its recording. Matches and clocks are measured on first use."""

    recording: GpuRecording

    @cached_property
    def matches(self) -> Matches:
        """Which communication kernels of different ranks are one collective."""
        return match_collectives(self.recording)

    @cached_property
    def clocks(self) -> ClockOffsets:
        """How far the clock of each rank is ahead."""
        return measure_offsets(self.matches, self.recording.ranks)

    def whatif(self, *, progress: Callable[[str], None] | None = None) -> GpuReport:
        """The report: what each rank spent its time on, who waits for whom."""
        tell = progress or (lambda _: None)
        tell("matching collectives")
        return GpuReport(
            recording=self.recording,
            breakdowns=breakdowns(self.recording),
            matches=self.matches,
            clocks=self.clocks,
            waits=measure_waits(self.matches, self.clocks),
        )


def load_gpu(
    *paths: str | os.PathLike[str], kernel_classes: Sequence[str] = (), progress: Callable[[str], None] | None = None
) -> GpuJob:
    """Read traces of torch.profiler (docs/kineto.md): folders, searched with all below them, and files.

    `kernel_classes`: patterns of kernels, each `class=regular expression` or the path of a YAML file of them. Raises
    FormatError where a file is no such trace, or files contradict each other.
    """
    return GpuJob(read_kineto([Path(path) for path in paths], classes=kernel_classes, progress=progress))
