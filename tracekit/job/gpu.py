"""A GPU-recorded job for users of the library: a recording, and the questions it can answer.

In: traces of torch.profiler. Out: `GpuJob`, and from it a `GpuReport`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tracekit.analysis.gpu.breakdown import breakdowns
from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.comparable import Comparable, comparable_part
from tracekit.analysis.gpu.culprit import exposed_communication_s, find_culprit
from tracekit.analysis.gpu.late_rank import late_ranks
from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.gpu.op_trace import GpuOpTrace, gpu_op_trace
from tracekit.analysis.gpu.pace import PaceOfPeers
from tracekit.analysis.gpu.trust import unexplained
from tracekit.analysis.gpu.waits import measure_waits
from tracekit.analysis.graph.fold import FoldedGraph
from tracekit.base.errors import TraceError
from tracekit.collectors.importers.kineto.reader import read_kineto
from tracekit.job.op import OpJob
from tracekit.report.findings import Findings, Unanalysed
from tracekit.report.gpu import GpuReport
from tracekit.trace.kineto import GpuRecording
from tracekit.trace.op import OpTrace


@dataclass(frozen=True)
class GpuJob:
    """One GPU-recorded job. What can be compared, graph and replay are computed on first use.

    `recording`: what torch.profiler wrote on each rank, on one time axis.
    """

    recording: GpuRecording

    @cached_property
    def comparable(self) -> Comparable:
        """The ranks and steps of the recording that can be compared."""
        return comparable_part(self.recording)

    @property
    def matches(self) -> Matches:
        """Which communication kernels of different ranks belong to the same collective."""
        return self.comparable.matches

    @property
    def clocks(self) -> ClockOffsets:
        """How far the clock of each rank is ahead."""
        return self.comparable.clocks

    @cached_property
    def op_trace(self) -> GpuOpTrace:
        """The recording as ops of GPUs and hosts."""
        return gpu_op_trace(self.comparable.recording, self.matches, self.clocks)

    @cached_property
    def ops(self) -> OpJob:
        """The job as a graph of ops, ready to be replayed."""
        return OpJob(self.op_trace.trace)

    @property
    def trace(self) -> OpTrace:
        """The op trace that a store keeps of the recording."""
        return self.op_trace.trace

    @property
    def graph(self) -> FoldedGraph:
        """The job's op graph. Raises TraceError."""
        return self.ops.graph

    def export(self, path: str | os.PathLike[str], *, steps: Sequence[int] | None = None) -> int:
        """Write the recorded, replayed and ideal timeline, as `OpJob.export` does; `steps`: of the training loop."""
        return self.ops.export(path, steps=steps)

    def findings(self, progress: Callable[[str], None] | None = None) -> Findings | Unanalysed:
        """The findings that a store keeps; or the reason why the recording cannot be replayed."""
        try:
            return Findings(self.whatif(progress=progress).to_json())
        except TraceError as error:
            return Unanalysed(str(error))

    def whatif(
        self,
        *,
        fix: Sequence[str] = (),
        keep: Sequence[str] = (),
        by: Sequence[str] = (),
        progress: Callable[[str], None] | None = None,
    ) -> GpuReport:
        """The report: what each rank spent its time on, who waits for whom, who costs what, and why.

        `fix`, `keep`, `by`: as for `Job.whatif`, by the labels of the ops (docs/kineto.md). Raises SelectionError for a
        selection that cannot be understood or matches no op.
        """
        tell = progress or (lambda _: None)
        tell("matching collectives")
        waits = measure_waits(self.matches, self.clocks)
        tell("building the op graph")
        replay = self.ops.replay
        report = self.ops.whatif(fix=fix, keep=keep, by=by, progress=tell)
        tell("looking for causes")
        pace = PaceOfPeers(self.ops.graph, replay)
        return GpuReport(
            recording=self.comparable.recording,
            breakdowns=breakdowns(self.comparable.recording),
            matches=self.matches,
            clocks=self.clocks,
            left_out=self.comparable.left_out,
            not_comparable=self.comparable.doubts,
            late=late_ranks(self.recording, self.comparable, float(report.recorded.mean())),
            waits=waits,
            replayed=report,
            culprit=find_culprit(pace, self.op_trace.trace.ops, waits),
            exposed_communication_s=exposed_communication_s(pace, self.op_trace.trace.ops),
            unexplained=unexplained(self.ops.graph, replay.durations),
            skew_s=self.op_trace.skew_s,
        )


def load_gpu(
    *paths: str | os.PathLike[str], kernel_classes: Sequence[str] = (), progress: Callable[[str], None] | None = None
) -> GpuJob:
    """Read traces of torch.profiler (docs/kineto.md): files, and folders including their subfolders.

    `kernel_classes`: patterns of kernels, each `class=regular expression` or the path of a YAML file with such
    patterns. Raises FormatError if a file is not such a trace, or files contradict each other.
    """
    return GpuJob(read_kineto([Path(path) for path in paths], classes=kernel_classes, progress=progress))
