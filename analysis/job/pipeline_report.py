"""The report on a pipeline.

In: an `Attribution` and a `Diagnosis` with the identity and the coverage of the trace. Out: `Analysis`, with a
`Report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET, Struct

from tracekit.analysis.attribution.attribution import Attribution
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.graph.rules.posting import PostingRule
from tracekit.analysis.job import experts
from tracekit.analysis.job import pipeline_words as words
from tracekit.analysis.job.analysis import Analysis, ReportOptions
from tracekit.analysis.job.build import SourceFigures, build
from tracekit.analysis.job.tables import rows_of_pipeline
from tracekit.analysis.job.worker_lanes import WorkerLanes
from tracekit.analysis.numeric.arrays import number
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.method import Method
from tracekit.report.bubbles import Bubbles
from tracekit.report.clocks import ClockReport
from tracekit.report.experts import Experts
from tracekit.report.hardware import OnGpu, hardware_table
from tracekit.report.outline import Coverage, CoverageGap, MethodUsed, Outline, Times
from tracekit.report.question import ByLabel, Question, label_table, question_table
from tracekit.report.report import StepTimes
from tracekit.report.section import BarTimeline, Section, Table
from tracekit.trace.coverage import TraceCoverage
from tracekit.trace.facts import Fact
from tracekit.trace.model import Layout, Worker
from tracekit.trace.step_values import StepValues


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
