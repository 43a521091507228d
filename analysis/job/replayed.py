"""A job whose graph is built: everything that a report needs from it.

In: a job's graph, and an outline of its trace. Out: `AnalysedPipeline`, and from it an `Analysis`. The ops of a trace
take as much memory as their replay, and nothing reads them again once the graph exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from tracekit.analysis.attribution.attribute import attribute, slowdown_of
from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.attribution.stalls import stalls_of
from tracekit.analysis.diagnosis.diagnose import diagnose
from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
from tracekit.analysis.evidence.exchanges import exchanges_of
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.fixes.known_layers import check_layers
from tracekit.analysis.graph.rules.posting import Posting
from tracekit.analysis.job.analysis import Analysis, ReportOptions
from tracekit.analysis.job.pipeline_report import AnalysedPipeline, PublishedView
from tracekit.analysis.replay.engine import JobGraph, JobReplay
from tracekit.analysis.replay.ideal import OCCASIONAL, OCCASIONAL_BY_STAGE
from tracekit.analysis.replay.method import Method
from tracekit.analysis.whatif.interventions import mean_step_time
from tracekit.analysis.whatif.paper import IDEAL
from tracekit.report.clocks import ClockReport, WorkerClock
from tracekit.trace.canonical import Trace
from tracekit.trace.step_values import step_values

if TYPE_CHECKING:
    from tracekit.report.hardware import OnGpu
    from tracekit.report.question import ByLabel, Question

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
