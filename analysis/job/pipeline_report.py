"""The report on a pipeline whose graph is built.

In: a job's graph, and an outline of its trace. Out: `Analysis`, with a `Report`. The ops of a trace take as much memory
as their replay, and nothing reads them again once the graph exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET, Struct, structs

from tracekit.analysis.attribution.attribute import attribute, slowdown_of
from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.patterns import stalls_of
from tracekit.analysis.diagnosis.diagnose import diagnose
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
from tracekit.analysis.evidence.exchanges import exchanges_of
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.fixes.plan import check_layers
from tracekit.analysis.graph.posting import Posting, PostingRule
from tracekit.analysis.job import experts
from tracekit.analysis.job import pipeline_words as words
from tracekit.analysis.job.build import SourceFigures, build
from tracekit.analysis.job.job import Analysis, ReportOptions
from tracekit.analysis.job.pipeline_tables import WorkerLanes, rows_of_pipeline
from tracekit.analysis.numeric.arrays import number
from tracekit.analysis.replay.engine import JobGraph, JobReplay
from tracekit.analysis.replay.ideal import OCCASIONAL, OCCASIONAL_BY_STAGE
from tracekit.analysis.replay.method import Method
from tracekit.analysis.whatif.interventions import IDEAL, mean_step_time
from tracekit.report.hardware import OnGpu, hardware_table
from tracekit.report.questions import Bubbles, ByLabel, Experts, Question, label_table, question_table
from tracekit.report.report import StepTimes
from tracekit.report.tables import (
    BarTimeline,
    ClockReport,
    Coverage,
    CoverageGap,
    MethodUsed,
    Outline,
    Section,
    Table,
    Times,
    WorkerClock,
)
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import Fact, StepValues, TraceCoverage, step_values
from tracekit.trace.model import Layout, Worker

if TYPE_CHECKING:
    from tracekit.report.hardware import OnGpu
    from tracekit.report.questions import ByLabel, Question


class PublishedView(Struct, frozen=True):
    """S by the published method, and why it can differ from tracekit's."""

    slowdown: float
    reasons: tuple[str, ...]


class AnalysedPipeline(Struct, frozen=True, kw_only=True, eq=False):
    """Everything that is known of an analysed pipeline.

    `layout`, `ops`: its parallel sizes, how many ops were analysed. `coverage`: what the trace lacks; `dropped_lanes`:
    (step, dp_rank) that lack a stage, `left_out_steps`: steps that some DP ranks lack, or that were cut; both are left
    out. `ranks`: the global rank of each worker, `hosts`: the node of each rank, as far as the trace names them.
    `attribution`: what stragglers cost, and who they are. `method`: the rules of the analysis. `clocks`: which clocks
    were corrected. `posting`: when receives are posted, as inferred from the recording. `published`: S by the published
    method, None if it cannot differ. `replay`: the source of the figures of single steps. `exchanges`: the all-to-alls
    and the work between them, None without any. `evidence_steps`: causes, fixes and answers follow from so many steps,
    None for all; `replay` has only these. `asked`, `questions`, `labels`: what a reader asked for, and answers.
    """

    name: str
    layout: Layout
    ops: int
    coverage: TraceCoverage
    dropped_lanes: tuple[tuple[int, int], ...]
    left_out_steps: tuple[int, ...]
    ranks: Mapping[Worker, int]
    hosts: Mapping[int, str]
    attribution: Attribution
    diagnosis: Diagnosis
    method: Method
    clocks: ClockReport
    posting: PostingRule
    replay: JobReplay
    published: PublishedView | None
    exchanges: GraphSubject | None
    step_values: StepValues
    asked: ReportOptions
    questions: tuple[Question, ...]
    labels: tuple[ByLabel, ...]
    on_gpus: Sequence[OnGpu] = ()
    evidence_steps: int | None = None

    def analysis(self) -> Analysis:
        """The report, and the lanes behind it. Raises SelectionError for a schedule that does not exist."""
        report = build(self._source(), self.diagnosis, self.questions, self.labels)
        return Analysis(report, self.diagnosis, WorkerLanes(self.attribution, self.replay))

    def _source(self) -> SourceFigures:
        attribution, bubbles = self.attribution, self._bubbles()
        loads = experts.asked_experts(self.exchanges, self.asked, self.diagnosis.causes)
        daily = all(lack.fact is not Fact.COMPUTE for lack in self.diagnosis.lacks)
        overview = _bubble_tables(bubbles)
        return SourceFigures(
            job=self._outline(),
            times=StepTimes(
                np.asarray(attribution.steps, np.int32), attribution.recorded, attribution.original, attribution.ideal
            ),
            mean=Times(
                attribution.recorded_s,
                attribution.original_s,
                attribution.ideal_s,
                float(attribution.with_delays.mean()),
            ),
            slowdown=attribution.slowdown,
            daily=daily,
            wasted_gpu_hours=attribution.wasted_gpu_hours,
            remarks=[
                *words.pipeline_remarks(self),
                *_bubble_remarks(bubbles),
                *experts.remarks(None, loads, self.asked),
            ],
            overview=overview,
            sections=[*overview, *self._picture(bubbles), *([] if self.asked.wants_experts else experts.loads(loads))],
            asked=self._asked_tables(loads, daily=daily),
            trust={"clamped_transfers": attribution.clamped_transfers, "clamped_delays": attribution.clamped_delays},
            keys=self._keys(bubbles, loads),
            step_values=self.step_values,
        )

    def _outline(self) -> Outline:
        return Outline(
            name=self.name,
            source="pipeline",
            whole="step",
            sizes=words.pipeline_sizes(self),
            gpus=self.layout.world_size,
            steps=len(self.attribution.steps),
            layout=self.layout,
            ops=self.ops,
            evidence_steps=UNSET if self.evidence_steps is None else self.evidence_steps,
        )

    def _bubbles(self) -> Bubbles | None:
        """Where stages are idle, with the prices of schedules; None if nobody asked."""
        if not self.asked.wants_bubbles:
            return None
        from tracekit.analysis.bubbles.bubbles import find_bubbles

        return find_bubbles(self.replay, self.asked.schedules)

    def _picture(self, bubbles: Bubbles | None) -> list[BarTimeline]:
        """The slowest step, as recorded and under the schedules that were priced."""
        if bubbles is None or bubbles.window_s is None:
            return []
        from tracekit.analysis.bubbles.picture import draw_step, timeline_of
        from tracekit.analysis.job.bubbles_words import summary

        step = int(self.attribution.steps[self.attribution.recorded.argmax()])
        drawn = draw_step(
            self.replay, step, schedules=[row.schedule for row in bubbles.schedules if row.refused is None]
        )
        return [timeline_of(f"Pipeline, step {step}", drawn, summary(drawn))]

    def _asked_tables(self, loads: Experts | None, *, daily: bool) -> list[Section]:
        answers = [question_table(self.questions, "step", daily=daily)] if self.questions else []
        gpus = [hardware_table(self.on_gpus)] if self.on_gpus else []
        return [*gpus, *answers, *map(label_table, self.labels), *experts.asked_tables(None, loads, self.asked)]

    def _keys(self, bubbles: Bubbles | None, loads: Experts | None) -> dict[str, Any]:
        attribution, published = self.attribution, self.published
        gaps = [
            CoverageGap(gap.kind, gap.worker.dp_rank, gap.worker.pp_rank, gap.ops, sorted(set(gap.steps)))
            for gap in attribution.gaps
        ]
        return {
            "method": MethodUsed(
                self.method,
                None if published is None else number(published.slowdown),
                [] if published is None else list(published.reasons),
            ),
            "clocks": self.clocks,
            "posting": self.posting,
            "coverage": Coverage(
                workers_expected=self.coverage.workers_expected,
                workers_traced=self.coverage.workers_traced,
                worker_steps_expected=self.coverage.worker_steps_expected,
                worker_steps_traced=self.coverage.worker_steps_traced,
                missing_workers=list(self.coverage.missing_workers),
                gaps=gaps,
                slowdown_as_recorded=number(attribution.slowdown_as_recorded),
                hidden_slowdown=number(attribution.hidden_slowdown),
                left_out_steps=list(self.left_out_steps),
                dropped=[{"step": step, "dp_rank": dp_rank} for step, dp_rank in self.dropped_lanes],
                inferred_transfers=self.replay.graph.inferred_transfers,
            ),
            "bubbles": bubbles,
            **({} if loads is None else {"experts": loads}),
            **({"gpus": self.on_gpus} if self.on_gpus else {}),
            "m_w": number(attribution.m_w.removal),
            "m_s": number(attribution.m_s.removal),
            "slowest_workers": list(attribution.slowest_workers),
            **rows_of_pipeline(attribution, self.ranks, self.hosts),
        }


def _bubble_tables(bubbles: Bubbles | None) -> list[Table]:
    if bubbles is None:
        return []
    from tracekit.analysis.job import bubbles_words

    return list(bubbles_words.tables(bubbles))


def _bubble_remarks(bubbles: Bubbles | None) -> Iterator[tuple[str, str]]:
    if bubbles is not None:
        from tracekit.analysis.job import bubbles_words

        yield "Bubbles", bubbles_words.sentence(bubbles)


Progress = Callable[[str], None]


class ReplayedJob(Struct, frozen=True):
    """What a report needs of a job.

    `trace`: an outline (`Trace.outline`); `ops`: the number of ops in the whole trace. `published`: see
    `published_graph`.
    """

    trace: Trace
    ops: int
    graph: JobGraph
    published: JobGraph | None

    @property
    def replay(self) -> JobReplay:
        """The job with the cost of each op."""
        return self.graph.replay

    def analyse(
        self,
        asked: ReportOptions,
        progress: Progress | None = None,
        *,
        attribution: Callable[[], Attribution] | None = None,
    ) -> Analysis:
        """Analyse the job. As `Job.analyse`; `attribution`: returns the attribution, which may be known already."""
        return self.analysed(asked, progress, attribution=attribution).analysis()

    def analysed(
        self,
        asked: ReportOptions,
        progress: Progress | None = None,
        *,
        attribution: Callable[[], Attribution] | None = None,
    ) -> AnalysedPipeline:
        """Everything from which the report follows."""
        check_layers(self.trace, asked.layers)
        asked.refuse_measured(self.trace.name, "a pipeline trace")
        graph, method, loads = self.graph.graph, self.graph.method, asked.expert_loads
        gpus = self.trace.layout.world_size
        questions: list[Question] = []
        keeping: list[Question] = []
        labels: list[ByLabel] = []
        if asked.fix or asked.keep or asked.by:
            from tracekit.analysis.job.questions import answer_keep, by_labels, check

            check(self.replay, asked.fix)
            keeping = [answer_keep(self.replay, text, gpus) for text in asked.keep]
            labels += [by_labels(self.replay, *text.split(",")) for text in asked.by]
        attributed = attribute(self.replay, progress=progress) if attribution is None else attribution()
        subject = structs.replace(PipelineSubject.of(self.trace, self.replay, lambda: attributed), expert_loads=loads)
        on_gpus: Sequence[OnGpu] = ()
        if asked.hardware is not None:
            from tracekit.analysis.hardware.on_other_gpus import on_other_gpus

            on_gpus = on_other_gpus(subject, asked.hardware)
        if asked.fix:
            from tracekit.analysis.job.questions import answer_fix, pipeline_edits

            questions = [answer_fix(self.replay, text, gpus, subject, pipeline_edits) for text in asked.fix]
        if progress is not None:
            progress("causes and fixes")
        exchanges = exchanges_of(subject)
        if loads is not None and exchanges is None:
            raise loads.without_experts(self.trace.name)
        return AnalysedPipeline(
            name=self.trace.name,
            layout=self.trace.layout,
            ops=self.ops,
            coverage=self.trace.coverage(),
            dropped_lanes=graph.dropped_lanes,
            left_out_steps=self.replay.left_out_steps,
            ranks=self.trace.worker_ranks(),
            hosts=self.trace.hosts,
            attribution=attributed,
            diagnosis=diagnose(
                PipelineAssessment(subject, stalls_of(self.replay, attributed), asked.layers, method), asked.metrics
            ),
            method=method,
            clocks=_clock_report(self.replay, method),
            posting=graph.posting,
            replay=self.replay,
            published=_published_view(self.graph, self.published),
            exchanges=exchanges,
            step_values=step_values(self.trace.metadata),
            asked=asked,
            questions=(*questions, *keeping),
            labels=tuple(labels),
            on_gpus=on_gpus,
        )


def _clock_report(replay: JobReplay, method: Method) -> ClockReport:
    """Which clocks were off, and which could not be compared."""
    clocks, graph = replay.clocks, replay.graph
    offsets = [
        WorkerClock(
            graph.dp_ranks[int(dp_index)],
            int(stage),
            float(clocks.offset_s[stage, dp_index]),
            float(clocks.error_s[stage, dp_index]),
            float(clocks.drift[stage, dp_index]),
            float(clocks.jump_s[stage, dp_index]),
            int(clocks.jump_step[stage, dp_index]) if clocks.jump_s[stage, dp_index] else None,
        )
        for stage, dp_index in zip(*clocks.off.nonzero(), strict=True)
    ]
    untied = clocks.untied(graph.dp_ranks) if method is Method.TRACEKIT else None
    return ClockReport(tuple(sorted(offsets, key=lambda row: row.worker)), untied)


def published_graph(trace: Trace, job: JobGraph) -> JobGraph | None:
    """The graph by the published method, None if it follows from that of the job. `trace`: with all ops."""
    same_rules = job.graph.posting.rule is Posting.SAME_DIRECTION
    other = job.clocks.any_off or job.graph.reconstructed or (job.left_out_steps and not same_rules)
    return JobGraph.from_trace(trace, Method.PUBLISHED) if other and job.method is Method.TRACEKIT else None


def _published_view(job: JobGraph, other: JobGraph | None) -> PublishedView | None:
    """The result of the published method, None if it cannot differ. `other`: see `published_graph`."""
    if job.method is Method.PUBLISHED:
        return None
    graph = job.graph
    occasional = sorted((OCCASIONAL | OCCASIONAL_BY_STAGE) & set(graph.kinds))
    same_rules = graph.posting.rule is Posting.SAME_DIRECTION
    reasons = []
    if job.clocks.any_off:
        reasons.append("it takes the clocks as they are")
    if graph.reconstructed:
        reasons.append("it leaves out members of collectives that were not recorded")
    if not same_rules:
        reasons.append("it posts each receive behind the previous compute of its direction")
    if occasional:
        reasons.append(
            f"it sets {', '.join(occasional)} against the mean of such ops, not against the time peers spend so"
        )
    if not reasons:
        return None
    if other is not None:
        published = other.replay
    elif same_rules:  # the same graph and costs, different ideals
        published = job.replay.with_ideals(Method.PUBLISHED)
    else:
        published = job.replay.with_published_rules()
    if not mean_step_time(published, IDEAL):  # no slowdown; the attribution reports it
        return None
    return PublishedView(slowdown_of(published), tuple(reasons))
