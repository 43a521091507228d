"""The library's front door: one job, loaded and ready for questions.

    import tracekit
    job = tracekit.load("job.parquet")
    job                         # in a notebook: what slows it down, who, why, what to do
    job.report.findings         # why it is slow, the costliest first
    job.answer("worker=5,2")    # what if that worker were fine?

In: whatever `tracekit.load` read. Out: `Job`, and from it reports, answers and timelines.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tracekit.base.errors import SelectionError, TraceError
from tracekit.base.text import short
from tracekit.report.questions import ByLabel
from tracekit.report.report import Report

if TYPE_CHECKING:
    import pandas

    from tracekit.analysis.attribution.by_label import SpentPhases, StepsSpent
    from tracekit.analysis.diagnosis.diagnosis import Diagnosis
    from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
    from tracekit.analysis.experts.expert_loads import RebalancePlan
    from tracekit.analysis.experts.loads import Loads
    from tracekit.analysis.gpu.measured_steps import MeasuredSteps
    from tracekit.analysis.hardware.passport import HardwareQuestion
    from tracekit.analysis.job.pipeline_report import ReplayedJob, WorkerLanes
    from tracekit.analysis.metrics.samples import MetricSource
    from tracekit.analysis.replay.graph_replay import GraphReplay
    from tracekit.report.conclusions import Finding
    from tracekit.report.findings import Findings, Unanalysed
    from tracekit.report.questions import Question
    from tracekit.store.catalogue_rows import AnyTrace

#: What a trace may say of its job that makes runs different ones.
SAME_JOB = ("model", "layers", "gpu_model", "schedule", "microbatches")

PathLike = str | os.PathLike[str]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: how many of the job's marked steps, 0 if there are none, and how many slices."""

    steps: int
    steps_in_job: int
    slices: int


class Job(ABC):
    """One job, whatever its source; graph, replay and report are computed on first use and kept.

        job = tracekit.load("job.parquet")  # or a folder of torch.profiler, an op trace, a store, ...
        job.report                          # what slows it down, who, why, and what each fix saves
        job.findings                        # why it is slow, the costliest first
        job.answer("rank=3").saved_s        # seconds a step, were that rank ideal
        job.attribute_by("host")            # exact S of each host
        job.export("timeline.json.gz")      # for ui.perfetto.dev

    A notebook shows a job as it shows its report. `trace`: what a store keeps of the job.
    """

    trace: AnyTrace

    @property
    @abstractmethod
    def source(self) -> str:
        """What the job was read from, in words: "a pipeline trace"."""

    @property
    @abstractmethod
    def replay(self) -> GraphReplay:
        """The job ready to be replayed under any scenario. Raises TraceError if it cannot be."""

    @abstractmethod
    def analyse(self, asked: ReportOptions, progress: Progress | None = None) -> Analysis:
        """Return the analysis; `progress` is called with the name of each stage of the work. Raises as `whatif`."""

    def whatif(
        self,
        *,
        fix: str | Sequence[str] = (),
        keep: str | Sequence[str] = (),
        by: str | Sequence[str] = (),
        layers: tuple[int, ...] | None = None,
        bubbles: bool = False,
        schedules: str | Sequence[str] = (),
        overlap: bool = False,
        experts: bool = False,
        expert_loads: Loads | None = None,
        plans: Sequence[RebalancePlan] = (),
        gpus: str | Sequence[str] = (),
        gpu_from: str | None = None,
        precision: str | None = None,
        metrics: MetricSource | None = None,
        unprofiled: Job | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Return the whole report: what is lost, findings, fixes, and the answers to custom questions.

        Options of several texts take one by itself, too.

        `fix`: selections to idealise in the job as it ran. `keep`: selections to leave as recorded in the ideal job.
        `by`: labels, or several joined by commas, such as "host" or "dp_rank,stage", to attribute the slowdown to.
        `layers`: transformer layers per stage of a pipeline, by default those in the trace's metadata, else equal ones.
        `bubbles`: where its stages are idle; `schedules`: with the price of these, such as "1f1b",
        "interleaved:chunks=2" or "zb-h1,weight=0.4". `overlap`: of a recording of GPUs, what communication compute
        hides. `experts`: the loads of experts; `expert_loads`: tokens of each expert, as the job logged them; `plans`:
        with the price of these. `gpus`: other GPUs, as files of passports, names, or "FILE on rank=0-7"; `gpu_from`:
        that of the trace, by default a known one of its name; `precision`: with matrix products in it. `metrics`: what
        to ask about the machines of culprits (`tracekit.collectors.importers.metrics.open_metrics`).
        `unprofiled`: of a recording of torch.profiler, the same job as `tracekit collect` recorded it. Raises
        SelectionError for a selection that cannot be understood or matches no op, layers that do not fit, a schedule
        that does not exist, or a GPU that is not known; FormatError for loads of another job, or no passport.
        """
        from tracekit.analysis.whatif.selection_text import texts_of

        asked = ReportOptions(
            fix=texts_of("fix", fix),
            keep=texts_of("keep", keep),
            by=texts_of("by", by),
            layers=layers,
            bubbles=bubbles,
            schedules=texts_of("schedules", schedules),
            overlap=overlap,
            experts=experts,
            expert_loads=expert_loads,
            plans=tuple(plans),
            hardware=hardware_question(texts_of("gpus", gpus), gpu_from, precision),
            metrics=metrics,
            measured=measured_steps(unprofiled),
        )
        return self.analyse(asked, progress).report

    @abstractmethod
    def answer(self, selection: str, *, keep: bool = False) -> Question:
        """Return the answer to a question: what if the selected ops were ideal? With `keep`: what if only they were as
        recorded?
        """

    def build(self) -> None:
        """Build now what answers are made from, which takes long."""
        _ = self.replay

    def pipeline_evidence(self) -> PipelineSubject:
        """Return the evidence that plans follow from. Raises TraceError for a job that is no pipeline."""
        raise TraceError(f"{short(self.trace.name)}: no pipeline of microbatches; plans need a pipeline trace")

    def attribute_by(self, *labels: str) -> ByLabel:
        """Return exact S_x for each value of a label of the ops, or for each combination of values of several labels.

        Raises SelectionError for a label that the job does not have, or one with too many values.
        """
        return by_labels(self.replay, *labels)

    @abstractmethod
    def export(self, path: PathLike, *, steps: Sequence[int] | None = None) -> Exported:
        """Write the recorded, replayed and ideal timeline for ui.perfetto.dev, as .json.gz. Raises OutputError.

        `steps`: step numbers to write; by default all, or the slowest ones if all are too many for a browser. Raises
        SelectionError if none of `steps` is in the job.
        """

    @abstractmethod
    def redacted(self) -> Job:
        """Return the same job without names of hosts, users and files."""

    def without_steps(self, steps: Sequence[int]) -> Job:
        """Return the same job as if these steps had not been recorded. Raises SelectionError if nothing is left."""
        del steps
        raise SelectionError(f"{short(self.trace.name)} is {self.source}: only pipelines can leave out steps")

    def spent(self, ignored: Collection[int] = ()) -> StepsSpent | SpentPhases:
        """Return what each step takes, and each of its parts, but for the `ignored` steps. Raises TraceError."""
        from tracekit.analysis.attribution.by_label import StepsSpent

        return StepsSpent(self.replay, ignored)

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for two runs to be comparable, by the words for it; None if it is not known."""
        metadata = self.trace.metadata
        return {"source": self.source, **self.trace.sizes, **{name: metadata.get(name) for name in SAME_JOB}}

    def refuse_pipeline_options(self, asked: ReportOptions) -> None:
        """Raise SelectionError if layers, workers or bubbles are asked for: only pipelines have stages and
        microbatches.
        """
        for option, is_asked, why in (
            ("--layers", asked.layers is not None, ""),
            ("--parquet", asked.worker_steps, ""),
            ("--bubbles", asked.wants_bubbles, ", whose stages and microbatches are not known"),
        ):
            if is_asked:
                raise SelectionError(f"{option} is for pipeline traces; {short(self.trace.name)} is {self.source}{why}")

    def validate(self) -> None:  # noqa: B027
        """Raise GraphError if the ops of the job contradict each other and its report would not say so."""

    def lean(self) -> Job | ReplayedJob:
        """Return the part of the job that a report needs; the rest of its memory can be freed."""
        return self

    @cached_property
    def analysis(self) -> Analysis:
        """The analysis without custom questions. Raises TraceError if the trace cannot be replayed."""
        return self.analyse(ReportOptions())

    @property
    def report(self) -> Report:
        """`whatif()` without custom questions. Raises TraceError if the trace cannot be replayed."""
        return self.analysis.report

    @property
    def findings(self) -> list[Finding]:
        """Why the job is slow, the costliest first."""
        return self.report.findings

    def pandas(self, table: str) -> pandas.DataFrame:
        """Return a table of the report as a pandas frame."""
        return self.report.pandas(table)

    def stored(self, progress: Progress | None = None, metrics: MetricSource | None = None) -> Findings | Unanalysed:
        """Return what a store keeps of the report, or the reason why the trace cannot be replayed.

        `metrics`: what to ask about the machines of culprits.
        """
        from tracekit.report.findings import Findings, Unanalysed

        try:
            analysis = self.analyse(ReportOptions(metrics=metrics), progress)
        except TraceError as error:
            return Unanalysed(str(error))
        return Findings(analysis.report, None if analysis.lanes is None else analysis.lanes.worker_slowdowns())

    def _repr_html_(self) -> str:
        from tracekit.dashboards.documents.card import card  # the one import upwards

        return card(self)


def by_labels(replay: GraphReplay, *labels: str) -> ByLabel:
    """Exact S_x for each value of a label of the ops, or for each combination of values of several labels.

    Raises SelectionError for a label that the job does not have, or one with too many values.
    """
    from tracekit.analysis.attribution.by_label import attribute_by

    names = tuple(label.strip() for label in labels)
    return ByLabel(names, attribute_by(replay, names))


class ReportOptions(Struct, frozen=True, kw_only=True):
    """What a reader asks for beyond the report that every job has: see `Job.whatif`. `worker_steps`: a file with S of
    each worker in each step.
    """

    fix: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    worker_steps: bool = False
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
    from tracekit.analysis.hardware.passport import HardwareQuestion

    return HardwareQuestion.parse(gpus, gpu_from, precision)


def measured_steps(unprofiled: Job | None) -> MeasuredSteps | None:
    """The steps of a job that ran without a profiler. Raises SelectionError if `tracekit collect` did not record it."""
    if unprofiled is None:
        return None
    from tracekit.analysis.gpu.measured_steps import MeasuredSteps

    return MeasuredSteps.of(unprofiled.trace)
