"""Jobs of any shape for users of the library: op traces, and recordings of GPUs.

In: an op trace, or traces of torch.profiler. Out: `GraphJob` or `RecordingJob`, and from them an `Analysis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec import structs

from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.diagnosis.diagnosis import diagnose
from tracekit.analysis.diagnosis.of_graph import graph_assessment
from tracekit.analysis.evidence.graph_subject import GraphSubject, GraphTimes, RecordingSubject
from tracekit.analysis.gpu.comparable import Comparable, comparable_part
from tracekit.analysis.gpu.op_trace import GpuOpTrace, gpu_op_trace
from tracekit.analysis.gpu.recorded import KEPT, Kept, Recorded, late_ranks, measure_waits
from tracekit.analysis.graph.compiled import label_values, shown_values
from tracekit.analysis.graph.op_graph import FoldedGraph, fold
from tracekit.analysis.graph.op_rules import op_graph
from tracekit.analysis.job.graph_report import AnalysedGraph, AnalysedRecording
from tracekit.analysis.job.job import Analysis, Exported, Job, PathLike, Progress, ReportOptions
from tracekit.analysis.replay.graph_replay import GraphReplay, measure_op_durations
from tracekit.analysis.whatif.interventions import IDEAL, ORIGINAL, RECORDED, Changes, timelines
from tracekit.base.errors import SelectionError, TraceError
from tracekit.base.text import short
from tracekit.report.questions import Question
from tracekit.trace.op import GpuRecording, OpTrace

if TYPE_CHECKING:
    from tracekit.trace.chrome import DrawnTimeline

#: Labels by which a report attributes by default, if the job has them with more than one value.
USUAL_LABELS = ("kind", "phase", "stream", "host", "group")
#: A label with more values than this is attributed only on request.
MOST_VALUES_UNASKED = 512
#: Columns of a recording's GPU ops that reports read besides the op trace.
_READ_OF_GPU_OPS = (
    "rank", "start", "duration", "name", "activity", "kernel_class", "shape", "launch", "collective", "received",
)  # fmt: skip


class OfGraph(Job):
    """A job whose ops form any graph."""

    @cached_property
    def graph(self) -> FoldedGraph:
        """The job's op graph, laid out for replay. Raises TraceError, or GraphError if ops contradict each other."""
        try:
            return fold(op_graph(self.ops))
        except TraceError as error:
            raise type(error)(f"{short(self.ops.name)}: {error}") from None

    @property
    def ops(self) -> OpTrace:
        """The job as an op trace."""
        raise NotImplementedError

    @cached_property
    def replay(self) -> GraphReplay:
        """The job ready to be replayed under any scenario."""
        return GraphReplay(self.graph, measure_op_durations(self.graph))

    def recorded(self) -> Recorded | None:
        """Return what a recording of GPUs shows besides its ops; None for other op traces."""
        return None

    @cached_property
    def evidence(self) -> GraphSubject:
        """What diagnosis and prices are made from. Raises TraceError if the steps of the job take no time."""
        return GraphSubject.of(self.ops, self.graph, self.replay, self.times, self.recorded())

    def validate(self) -> None:
        """See `Job.validate`: the ops are validated when the graph is built."""
        _ = self.graph

    def analyse(self, asked: ReportOptions, progress: Progress | None = None) -> Analysis:
        self.refuse_pipeline_options(asked)
        tell = progress or (lambda _: None)
        tell("building the op graph")
        replay, evidence = self.replay, self.evidence
        if asked.expert_loads is not None:
            evidence = structs.replace(evidence, expert_loads=asked.expert_loads)
        if asked.measured is not None and isinstance(evidence, RecordingSubject):
            asked.measured.check(self.ops.name, evidence.ranks_of_job, evidence.summary.gpu)
            evidence = structs.replace(evidence, measured=asked.measured)
        else:
            asked.refuse_measured(self.ops.name, self.source)
        questions: list[Question] = []
        if asked.fix or asked.keep:
            # Most reports answer none.
            from tracekit.analysis.job.questions import answer_fix, answer_keep, check

            check(replay, asked.fix)
            questions += [answer_fix(replay, text, self._gpus, evidence) for text in asked.fix]
            questions += [answer_keep(replay, text, self._gpus if evidence.daily else None) for text in asked.keep]
        tell("labels")
        labels = [self.attribute_by(*text.split(",")) for text in dict.fromkeys((*self._usual_labels(), *asked.by))]
        tell("critical path")
        path = critical_path(replay, RECORDED)
        tell("looking for causes")
        diagnosis = diagnose(graph_assessment(evidence), asked.metrics)
        analysed: type[AnalysedGraph] = AnalysedRecording if isinstance(evidence, RecordingSubject) else AnalysedGraph
        return analysed(
            evidence=evidence, diagnosis=diagnosis, asked=asked, questions=questions, labels=labels, path=path
        ).analysis()

    @cached_property
    def times(self) -> GraphTimes:
        """The step times of the job. Raises TraceError if its steps take no time."""
        times, ops = GraphTimes.of(self.graph, self.replay), self.graph.ops
        if times.original.mean() > 0 >= times.recorded.mean():
            raise TraceError(
                f"{short(self.ops.name)}: its steps end before they begin (at {(ops.start + ops.duration).max():.6g}"
                " s); 'start' counts from the start of the step"
            )
        if not min(times.recorded.mean(), times.original.mean()) > 0:
            raise TraceError(f"{short(self.ops.name)}: its steps take no time; expected ops with durations in seconds")
        return times

    def identity(self) -> dict[str, Any]:
        recorded = {"source": "a recording of GPUs"} if "profiler_step" in self.graph.label_names else {}
        return super().identity() | recorded | {"GPU": self.trace.metadata.get(KEPT, {}).get("gpu")}

    @property
    def _gpus(self) -> int:
        return len(self.graph.ops.mesh.ranks)

    def answer(self, selection: str, *, keep: bool = False) -> Question:
        from tracekit.analysis.job.questions import answer_fix, answer_keep, check

        _ = self.times  # or the error that there are none
        if keep:
            return answer_keep(self.replay, selection, self._gpus if self.evidence.daily else None)
        check(self.replay, (selection,))
        return answer_fix(self.replay, selection, self._gpus, self.evidence)

    def export(self, path: PathLike, *, steps: Sequence[int] | None = None) -> Exported:
        """See `Job.export`. `steps`: by the label `profiler_step` if ops have it."""
        from tracekit.trace.chrome import MOST_SLICES, DrawnTimeline, write_op_chrome

        ops, drawn_ops = self.ops.ops, np.ones(self.ops.ops.height, np.bool_)
        label = next((name for name in ("profiler_step", "step") if name in ops.columns), None)
        marked = [] if label is None else ops[label].drop_nulls().unique().sort().to_list()
        if steps is not None:
            steps_of_job = f"it has {shown_values(marked)}" if marked else "no step is marked; leave --steps out"
            if not {*steps} & {*marked} or label is None:
                raise SelectionError(f"{short(self.ops.name)} has none of these steps: {steps_of_job}")
            drawn_ops = ops[label].is_in(list(steps)).fill_null(value=False).to_numpy()
        if (slices := 3 * int(drawn_ops.sum())) > MOST_SLICES:
            raise SelectionError(
                f"{slices:,} slices are too many for a browser (at most {MOST_SLICES:,}); choose fewer steps with"
                " --steps"
            )
        drawn = [self._timeline("recorded", RECORDED), self._timeline("replayed", ORIGINAL),
                 self._timeline("ideal", IDEAL)]  # fmt: skip
        place = np.cumsum(drawn_ops) - 1
        written = write_op_chrome(
            path,
            self.ops.name,
            ops.filter(drawn_ops),
            [
                DrawnTimeline(timeline.name, timeline.slices.filter(drawn_ops),
                              place[timeline.critical_path[drawn_ops[timeline.critical_path]]])
                for timeline in drawn
            ],
        )  # fmt: skip
        return Exported(len({*marked} & {*(marked if steps is None else steps)}), len(marked), written)

    def _timeline(self, name: str, changes: Changes) -> DrawnTimeline:
        """When each op ran in a replay, and the critical path; for `recorded`, in the recording."""
        from tracekit.trace.chrome import DrawnTimeline

        graph, path = self.graph, critical_path(self.replay, changes)
        start, end = graph.ops.start, graph.ops.start + graph.ops.duration
        if changes is not RECORDED:
            drawn = timelines(self.replay, changes)
            start, end = (graph.of_ops([getattr(line, name) for line in drawn]) for name in ("start", "end"))
        times = pl.DataFrame({"start": start, "duration": end - start})
        return DrawnTimeline(name, times, path.ops_of([block.op for block in graph.blocks]))

    def _usual_labels(self) -> list[str]:
        wanted = ("rank", *self.graph.ops.mesh.axes, *USUAL_LABELS)
        labels = [name for name in dict.fromkeys(wanted) if name in self.graph.label_names]
        return [name for name in labels if 1 < len(label_values(self.graph, name)) <= MOST_VALUES_UNASKED]


@dataclass(frozen=True, repr=False)
class GraphJob(OfGraph):
    """A job of any shape. `trace`: its ops and what they wait for."""

    trace: OpTrace

    def __repr__(self) -> str:
        return f"<Job {short(self.trace.name)}: {self.trace.ops.height:,} ops>"

    @property
    def source(self) -> str:
        return "an op trace (docs/traces.md)"

    @property
    def ops(self) -> OpTrace:
        return self.trace

    def redacted(self) -> Job:
        """See `Job.redacted`; op traces are not redacted."""
        raise SelectionError(
            f"--redact is for pipeline traces and torch.profiler; {short(self.trace.name)} is {self.source}"
        )


@dataclass(frozen=True, repr=False)
class RecordingJob(OfGraph):
    """A job recorded by torch.profiler. What can be compared, graph and replay are computed on first use.

    `recording`: what torch.profiler wrote on each rank, on one time axis.
    """

    recording: GpuRecording

    def __repr__(self) -> str:
        ranks = len(self.recording.ranks)
        return f"<Job {short(self.recording.name)}: {ranks:,} ranks, {self.recording.gpu_ops.height:,} GPU ops>"

    @property
    def source(self) -> str:
        return "of torch.profiler (docs/kineto.md)"

    @property
    def trace(self) -> OpTrace:  # type: ignore[override]
        """The recording as ops of GPUs and hosts, which is what a store keeps."""
        return replace(self.op_trace.trace, metadata=self.kept_of_recording.to_dict())

    @property
    def ops(self) -> OpTrace:
        return self.op_trace.trace

    @cached_property
    def comparable(self) -> Comparable:
        """The ranks and steps of the recording that can be compared."""
        return comparable_part(self.recording)

    @cached_property
    def op_trace(self) -> GpuOpTrace:
        """The recording as ops of GPUs and hosts."""
        part = self.comparable
        return gpu_op_trace(part.recording, part.matches, part.clocks)

    @cached_property
    def kept_of_recording(self) -> Kept:
        """What an op trace keeps of the recording."""
        part, ops = self.comparable, self.ops.ops
        recorded_s = float((ops["start"] + ops["duration"]).to_numpy().max())
        late = late_ranks(self.recording, part, recorded_s)
        return Kept.of(self.recording, part, late, self.op_trace.whats)

    def recorded(self) -> Recorded:
        part = self.comparable
        return Recorded(part, self.kept_of_recording, measure_waits(part.matches, part.clocks), self.op_trace.skew_s)

    def lean(self) -> RecordingJob:
        """See `Job.lean`: what reports read of the recording, once ops and `kept` are made from it."""
        whole = self.comparable.recording
        read = replace(whole, host=whole.host.clear(), calls=whole.calls.select("annotated"),
                       gpu_ops=whole.gpu_ops.select(_READ_OF_GPU_OPS))  # fmt: skip
        job = RecordingJob(read)
        part = replace(self.comparable, recording=read)
        vars(job).update(comparable=part, op_trace=self.op_trace, kept_of_recording=self.kept_of_recording)
        return job

    def redacted(self) -> RecordingJob:
        return RecordingJob(self.recording.redacted())
