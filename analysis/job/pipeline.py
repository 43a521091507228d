"""A pipeline for users of the library.

In: a canonical trace. Out: `PipelineJob`, and from it an `Analysis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from tracekit.analysis.job.job import Analysis, Exported, Job, PathLike, Progress, ReportOptions
from tracekit.analysis.replay import Method
from tracekit.base.text import short
from tracekit.trace.canonical import Trace
from tracekit.trace.model import OpKind

if TYPE_CHECKING:
    from tracekit.analysis.attribution.attribution import Attribution
    from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
    from tracekit.analysis.job.pipeline_report import ReplayedJob
    from tracekit.analysis.replay.engine import JobGraph, JobReplay
    from tracekit.report.questions import Question


@dataclass(frozen=True, repr=False)
class PipelineJob(Job):
    """A pipeline. `trace`: its ops (`trace.ops`, a polars frame), layout and metadata. `method`: the rules of the
    analysis, tracekit's own or exactly the published ones.
    """

    trace: Trace
    method: Method = Method.TRACEKIT

    def __repr__(self) -> str:
        return f"<Job {short(self.trace.name)}: {self.trace.layout.world_size:,} GPUs, {self.trace.rows:,} ops>"

    @property
    def source(self) -> str:
        return "a pipeline trace"

    @cached_property
    def replay(self) -> JobReplay:
        """The job's dependency graph and durations. Raises GraphError if its ops contradict each other."""
        return self._graph.replay

    @cached_property
    def _graph(self) -> JobGraph:
        from tracekit.analysis.replay.engine import JobGraph

        return JobGraph.from_trace(self.trace, Method(self.method))

    @cached_property
    def attribution(self) -> Attribution:
        """What stragglers cost, and which ones."""
        from tracekit.analysis.attribution.attribute import attribute

        return attribute(self.replay)

    def analyse(self, asked: ReportOptions, progress: Progress | None = None) -> Analysis:
        attribution = None if progress is not None else lambda: self.attribution
        return self.lean().analyse(asked, progress, attribution=attribution)

    def lean(self) -> ReplayedJob:
        """Everything that `whatif` needs of the job, without its ops; dropping this job then frees their memory."""
        from tracekit.analysis.job.pipeline_report import ReplayedJob, published_graph

        return ReplayedJob(
            trace=self.trace.outline(),
            ops=self.trace.rows,
            graph=self._graph,
            published=published_graph(self.trace, self._graph),
        )

    def pipeline_evidence(self) -> PipelineSubject:
        return self.evidence

    def identity(self) -> dict[str, Any]:
        forwards = self.trace.ops.filter(self.trace.ops["kind"] == OpKind.FORWARD_COMPUTE).height
        return super().identity() | {"forward computes a step": round(forwards / len(self.trace.steps))}

    def redacted(self) -> PipelineJob:
        return PipelineJob(self.trace.redacted(), self.method)

    def without_steps(self, steps: Sequence[int]) -> PipelineJob:
        return PipelineJob(self.trace.without_steps(steps), self.method)

    def answer(self, selection: str, *, keep: bool = False) -> Question:
        """See `Job.answer`.

        "stage=3 and compute * 0.9 + worker=1,2" scales some ops and makes others as fast as their peers.
        """
        from tracekit.analysis.job.questions import answer_fix, answer_keep, check

        gpus = self.trace.layout.world_size
        if keep:
            return answer_keep(self.replay, selection, gpus if len(self.replay.graph.steps) > 1 else None)
        check(self.replay, (selection,))  # before the evidence is gathered
        return answer_fix(self.replay, selection, gpus, self.evidence)

    @cached_property
    def evidence(self) -> PipelineSubject:
        """What causes, fixes and answers rest on."""
        from tracekit.analysis.evidence.pipeline_subject import PipelineSubject

        return PipelineSubject.of(self.trace, self.replay, lambda: self.attribution)

    def export(self, path: PathLike, *, steps: Sequence[int] | None = None) -> Exported:
        from tracekit.analysis.attribution.critical_path import critical_ops
        from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, RECORDED
        from tracekit.analysis.whatif.timeline import timeline_frame
        from tracekit.trace.chrome import write_chrome

        replay = self.replay.only_steps(self._steps_to_draw() if steps is None else steps)
        drawn = [int(step) for step in replay.graph.steps]
        recorded = self.trace.ops.filter(pl.col("step").is_in(drawn))  # includes lanes that cannot be replayed
        timelines = {
            "recorded": (recorded, critical_ops(replay, RECORDED)),
            "original": (timeline_frame(replay, ORIGINAL), critical_ops(replay, ORIGINAL)),
            "ideal": (timeline_frame(replay, IDEAL), critical_ops(replay, IDEAL)),
        }
        slices = write_chrome(path, timelines, self.trace.worker_ranks(), self.trace.name)
        return Exported(steps=len(replay.graph.steps), steps_in_job=len(self.replay.graph.steps), slices=slices)

    def _steps_to_draw(self) -> Sequence[int]:
        """The slowest steps, as many as a browser can show, in order."""
        from tracekit.trace.chrome import MOST_SLICES

        graph = self.replay.graph
        fitting = max(1, MOST_SLICES * len(graph.steps) // (3 * graph.ops))
        slowest = self.replay.recorded_step_times().argsort()[::-1][:fitting]
        return [int(step) for step in graph.steps[sorted(slowest)]]
