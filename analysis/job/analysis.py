"""The analysis of a job: its report, and what is too live for a report.

In: what a reader asks for. Out: `Analysis`, which jobs make and surfaces with a replay draw from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.base.errors import SelectionError
from tracekit.base.text import short
from tracekit.report.report import Report

if TYPE_CHECKING:
    from tracekit.analysis.experts.expert_loads import RebalancePlan
    from tracekit.analysis.experts.loads import Loads
    from tracekit.analysis.gpu.measured_steps import MeasuredSteps
    from tracekit.analysis.hardware.question import HardwareQuestion
    from tracekit.analysis.job.job import Job
    from tracekit.analysis.job.worker_lanes import WorkerLanes
    from tracekit.analysis.metrics.samples import MetricSource


class ReportOptions(Struct, frozen=True, kw_only=True):
    """What a reader asks for beyond the report that every job has: see `Job.whatif`."""

    fix: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    bubbles: bool = False
    schedules: tuple[str, ...] = ()
    overlap: bool = False
    experts: bool = False
    expert_loads: Loads | None = None
    plans: tuple[RebalancePlan, ...] = ()
    hardware: HardwareQuestion | None = None
    metrics: MetricSource | None = None
    measured: MeasuredSteps | None = None

    @property
    def wants_bubbles(self) -> bool:
        """Whether the idle time of stages is asked for."""
        return self.bubbles or bool(self.schedules)

    @property
    def wants_experts(self) -> bool:
        """Whether the loads of experts are asked for."""
        return self.experts or bool(self.plans)

    def refuse_measured(self, name: str, source: str) -> None:
        """Raise SelectionError if steps without a profiler are given for the job `name`, which no profiler recorded."""
        if self.measured is not None:
            raise SelectionError(
                f"--unprofiled is for recordings of torch.profiler; {short(name)} is {source}: leave it out"
            )


class Analysis(Struct, frozen=True, eq=False):
    """One analysed job. `diagnosis`: what the report's findings and fixes were made of, with the changes that priced
    them. `lanes`: of a pipeline, what single steps are drawn from; None for other jobs.
    """

    report: Report
    diagnosis: Diagnosis
    lanes: WorkerLanes | None = None


def hardware_question(gpus: Sequence[str], gpu_from: str | None, precision: str | None) -> HardwareQuestion | None:
    """What was asked about other GPUs, None if nothing was. Raises FormatError or SelectionError."""
    if not gpus and gpu_from is None and precision is None:
        return None
    from tracekit.analysis.hardware.question import HardwareQuestion

    return HardwareQuestion.parse(gpus, gpu_from, precision)


def measured_steps(unprofiled: Job | None) -> MeasuredSteps | None:
    """The steps of a job that ran without a profiler. Raises SelectionError if `tracekit collect` did not record it."""
    if unprofiled is None:
        return None
    from tracekit.analysis.gpu.measured_steps import MeasuredSteps

    return MeasuredSteps.of(unprofiled.trace)
