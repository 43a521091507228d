"""A job of any shape for users of the library: an op trace, and the questions it can answer.

In: an op trace. Out: `OpJob`, and from it an `OpReport`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tracekit.analysis.attribution.chance import noisy_step_times_of_ops
from tracekit.analysis.attribution.critical_path import critical_path
from tracekit.analysis.graph.fold import FoldedGraph, fold
from tracekit.analysis.graph.labels import label_values
from tracekit.analysis.graph.rules.registry import op_graph
from tracekit.analysis.replay.costs import measure_op_durations
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.whatif.scenario import IDEAL, ORIGINAL, RECORDED, Scenario
from tracekit.base.errors import SelectionError, StoreError, TraceError
from tracekit.base.text import short
from tracekit.report.findings import Findings, Unanalysed
from tracekit.report.op import OpReport
from tracekit.report.questions import ByLabel, Question, answer, by_labels
from tracekit.trace.op import OpTrace, read_op_trace

if TYPE_CHECKING:
    from tracekit.trace.op_chrome import OpTimeline

#: The rule of traces made from GPU recordings, whose verdict is already known.
RECORDING_RULE = "kineto"
#: Labels by which a report attributes by default, if the job has them with more than one value.
USUAL_LABELS = ("kind", "phase", "stream", "host", "group")
#: A label with more values than this is attributed only on request.
MOST_VALUES_UNASKED = 512


@dataclass(frozen=True)
class OpJob:
    """One job of any shape. Graph and replay are built on first use.

    `trace`: its ops and what they wait for. `verdict`: who holds the others up, as found in the recording that the
    trace was made from; None if unknown.
    """

    trace: OpTrace
    verdict: str | None = None

    @cached_property
    def graph(self) -> FoldedGraph:
        """The job's op graph, laid out for replay. Raises TraceError, or GraphError if ops contradict each other."""
        try:
            return fold(op_graph(self.trace))
        except TraceError as error:
            raise type(error)(f"{short(self.trace.name)}: {error}") from None

    @cached_property
    def replay(self) -> GraphReplay:
        """The job ready to be replayed under any scenario."""
        return GraphReplay(self.graph, measure_op_durations(self.graph))

    def whatif(
        self,
        *,
        fix: Sequence[str] = (),
        keep: Sequence[str] = (),
        by: Sequence[str] = (),
        progress: Callable[[str], None] | None = None,
    ) -> OpReport:
        """The report: step times, S, who costs what, the critical path, and the answers to custom questions.

        `fix`, `keep`, `by`: as for `Job.whatif`. Raises SelectionError for a selection that cannot be understood or
        matches no op, or a label that the job does not have.
        """
        tell = progress or (lambda _: None)
        tell("step times")
        replay, ops = self.replay, self.graph.ops
        recorded, with_delays, original, ideal = (
            replay.recorded_step_times(), *(replay.step_times(scenario) for scenario in (RECORDED, ORIGINAL, IDEAL))
        )  # fmt: skip
        if original.mean() > 0 >= recorded.mean():
            raise TraceError(
                f"{short(self.trace.name)}: its steps end before they begin (at {(ops.start + ops.duration).max():.6g}"
                " s); 'start' counts from the start of the step"
            )
        if not min(recorded.mean(), original.mean()) > 0:
            raise TraceError(
                f"{short(self.trace.name)}: its steps take no time; expected ops with durations in seconds"
            )
        questions = [self.answer(text) for text in fix] + [self.answer(text, keep=True) for text in keep]
        tell("labels")
        labels = [self.attribute_by(*text.split(",")) for text in dict.fromkeys((*self._usual_labels(), *by))]
        tell("critical path")
        path = critical_path(replay, RECORDED)
        return OpReport(
            name=self.trace.name,
            ranks=len(ops.mesh.ranks),
            ops=len(ops.start),
            steps=ops.steps,
            recorded=recorded,
            with_delays=with_delays,
            original=original,
            ideal=ideal,
            noisy=noisy_step_times_of_ops(replay, self.graph),
            labels_asked=tuple(labels),
            critical_label=(by_kind := self._critical_label()),
            critical_peers={str(peer): seconds for (peer,), seconds in path.seconds_by([by_kind]).items()},
            critical_ranks={int(rank or 0): seconds for (rank,), seconds in path.seconds_by(["rank"]).items()},
            critical_delay_s=path.mean_delay_s,
            gaps=ops.gaps,
            clamped=replay.durations.clamped_transfers + replay.durations.clamped_delays,
            questions_asked=tuple(questions),
            of_recording=RECORDING_RULE in self.trace.rules,
            verdict=self.verdict,
        )

    def attribute_by(self, *labels: str) -> ByLabel:
        """Exact S_x for each value of a label of the ops, or for each combination of values of several labels.

        Raises SelectionError for a label that the job does not have, or one with too many values.
        """
        return by_labels(self.replay, *labels)

    def answer(self, selection: str, *, keep: bool = False) -> Question:
        """What if the selected ops were as fast as their peers? With `keep`: what if only they were as recorded?"""
        return answer(self.replay, selection, len(self.graph.ops.mesh.ranks), keep=keep)

    def _critical_label(self) -> str:
        """The label of the critical path: classes of comparable ops, or kinds if the classes are numbers."""
        numbers = self.trace.ops["peer"].dtype.is_integer() if "peer" in self.trace.ops.columns else False
        return "kind" if numbers and "kind" in self.graph.ops.labels else "peer"

    def export(self, path: str | os.PathLike[str], *, steps: Sequence[int] | None = None) -> int:
        """Write the recorded, replayed and ideal timeline for ui.perfetto.dev, as .json.gz; returns the number of
        slices.

        The replayed timeline has no launch delays. `steps`: only these, by the label `profiler_step` if ops have it.
        Raises SelectionError if the job has none of them or there are too many slices for a browser, and OutputError.
        """
        from tracekit.trace.chrome import MOST_SLICES
        from tracekit.trace.op_chrome import OpTimeline, write_op_chrome

        ops, kept = self.trace.ops, np.ones(self.trace.ops.height, np.bool_)
        if steps is not None:
            label = next((name for name in ("profiler_step", "step") if name in ops.columns), None)
            kept = kept & (label is not None and ops[label].is_in(list(steps)).fill_null(value=False).to_numpy())
            if not kept.any():
                raise SelectionError(f"{short(self.trace.name)} has none of these steps")
        if (slices := 3 * int(kept.sum())) > MOST_SLICES:
            raise SelectionError(
                f"{slices:,} slices are too many for a browser (at most {MOST_SLICES:,}); choose fewer steps with"
                " --steps"
            )
        timelines = [self._timeline("recorded", RECORDED), self._timeline("replayed", ORIGINAL),
                     self._timeline("ideal", IDEAL)]  # fmt: skip
        place = np.cumsum(kept) - 1
        return write_op_chrome(
            path,
            self.trace.name,
            ops.filter(kept),
            [
                OpTimeline(one.name, one.start[kept], one.duration[kept],
                           place[one.critical_path[kept[one.critical_path]]])
                for one in timelines
            ],
        )  # fmt: skip

    def _timeline(self, name: str, scenario: Scenario) -> OpTimeline:
        """When each op ran in a replay, and the critical path; for `recorded`, in the recording."""
        from tracekit.trace.op_chrome import OpTimeline

        graph, path = self.graph, critical_path(self.replay, scenario)
        start, end = graph.ops.start.copy(), graph.ops.start + graph.ops.duration
        if scenario is not RECORDED:
            for block, timeline in zip(graph.blocks, self.replay.timelines(scenario), strict=True):
                start[block.op], end[block.op] = timeline.start, timeline.end
        on_path = np.empty(len(path.row), np.int64)
        for number, block in enumerate(graph.blocks):
            here = path.block == number
            on_path[here] = block.op[path.row[here], path.lane[here]]
        return OpTimeline(name, start, end - start, on_path)

    def findings(self, progress: Callable[[str], None] | None = None) -> Findings | Unanalysed:
        """The findings that a store keeps; or the reason why the trace cannot be replayed."""
        try:
            return self.whatif(progress=progress).findings()
        except TraceError as error:
            return Unanalysed(str(error))

    def _usual_labels(self) -> list[str]:
        wanted = ("rank", *self.graph.ops.mesh.axes, *USUAL_LABELS)
        there = [name for name in dict.fromkeys(wanted) if name in self.graph.label_names]
        return [name for name in there if 1 < len(label_values(self.graph, name)) <= MOST_VALUES_UNASKED]


def load_ops(path: str | os.PathLike[str]) -> OpJob:
    """Read an op trace (docs/op-trace.md). Raises FormatError if the file is not one."""
    return OpJob(read_op_trace(path))


def load_ops_from_store(name: str, *, store: str | os.PathLike[str] | None = None, window: int | None = None) -> OpJob:
    """Read an op trace from a store, by default the newest window in the default store.

    Raises StoreError, also for a pipeline trace.
    """
    from tracekit.store import Store, default_store

    opened = Store(Path(store) if store is not None else default_store())
    trace = opened.load(name, window)
    if not isinstance(trace, OpTrace):
        raise StoreError(f"{opened.path}: job {name!r} is a pipeline trace; `load_from_store` reads it")
    return OpJob(trace)
