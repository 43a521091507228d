"""The library's front door: one job, loaded and ready for questions.

    import tracekit
    job = tracekit.load("job.parquet")
    job                         # in a notebook: what slows it down, who, why, what to do
    job.report.by_worker        # a polars frame
    job.answer("worker=5,2")    # what if that worker were fine?

In: a file or a store. Out: `Job`, and from it reports, answers and timelines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from tracekit.analysis.replay.method import Method
from tracekit.base.errors import TraceError
from tracekit.base.text import printable, short
from tracekit.trace.canonical import Trace

if TYPE_CHECKING:
    from tracekit.analysis.attribution.attribution import Attribution
    from tracekit.analysis.evidence.evidence import Evidence
    from tracekit.analysis.replay.engine import JobReplay
    from tracekit.analysis.whatif.scenario import Scenario
    from tracekit.job.replayed import ReplayedJob
    from tracekit.report.findings import Findings, Unanalysed
    from tracekit.report.pipeline import Report
    from tracekit.report.questions import ByLabel, Question
    from tracekit.trace.model import Unit

PathLike = str | os.PathLike[str]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: how many of the job's steps, and how many slices."""

    steps: int
    steps_in_job: int
    slices: int


@dataclass(frozen=True, repr=False)
class Job:
    """One job's trace; graph, replay, attribution and report are computed on first use and kept.

        job = tracekit.load("job.parquet")
        job.report                          # what slows it down, who, why, and what each fix saves
        job.answer("worker=5,2").saved_s    # seconds a step, were that worker as fast as its peers
        job.attribute_by("host")            # exact S of each host
        job.export("timeline.json.gz")      # for ui.perfetto.dev

    A notebook shows a job as it shows its report. `trace`: ops (`trace.ops`, a polars frame), layout and metadata.
    `method`: the rules of the analysis, tracekit's own or exactly the published ones.
    """

    trace: Trace
    method: Method = Method.TRACEKIT

    def __repr__(self) -> str:
        return f"<Job {short(self.trace.name)}: {self.trace.layout.world_size:,} GPUs, {self.trace.ops.height:,} ops>"

    def _repr_html_(self) -> str:
        try:
            return self.report._repr_html_()
        except TraceError as error:
            from html import escape

            return f"<p>{escape(repr(self))}<br>{escape(printable(str(error)))}</p>"

    @cached_property
    def report(self) -> Report:
        """`whatif()` without custom questions. Raises TraceError if the trace cannot be replayed."""
        return self.whatif()

    @cached_property
    def replay(self) -> JobReplay:
        """The job's dependency graph and durations. Raises GraphError if its ops contradict each other."""
        from tracekit.analysis.replay.engine import JobReplay

        return JobReplay.from_trace(self.trace, Method(self.method))

    @cached_property
    def attribution(self) -> Attribution:
        """What stragglers cost, and which ones."""
        return self.attribute()

    def attribute(self, progress: Progress | None = None) -> Attribution:
        """Like `attribution`; calls `progress` with the name of each stage of the work."""
        from tracekit.analysis.attribution.attribute import attribute

        return attribute(self.replay, progress=progress)

    def whatif(
        self,
        *,
        fix: Sequence[str] = (),
        keep: Sequence[str] = (),
        by: Sequence[str] = (),
        layers: tuple[int, ...] | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """The whole report: attribution, causes, fixes, and the answers to custom questions.

        `fix`: selections to make as fast as their peers, or edits, see `answer`. `keep`: selections to leave as
        recorded in the ideal job.
        `by`: labels, or several joined by commas, such as "host" or "dp_rank,stage", to attribute the slowdown to.
        `layers`: transformer layers per stage, by default those in the trace's metadata, else equal ones.
        Raises SelectionError for a selection that cannot be understood or matches no op, or layers that do not fit.
        """
        known = None if progress is not None else lambda: self.attribution
        return self.replayed().whatif(fix=fix, keep=keep, by=by, layers=layers, attribution=known, progress=progress)

    def replayed(self) -> ReplayedJob:
        """Everything that `whatif` needs of the job, without its ops; dropping this job then frees their memory."""
        from tracekit.job.replayed import ReplayedJob, published_view

        return ReplayedJob(
            trace=self.trace.outline(),
            ops=self.trace.ops.height,
            replay=self.replay,
            method=Method(self.method),
            published=published_view(self.trace, self.replay, Method(self.method)),
        )

    def attribute_by(self, *labels: str) -> ByLabel:
        """Exact S_x for each value of a label of the ops, or for each combination of values of several labels.

        Raises SelectionError for a label that the job does not have, or one with too many values.
        """
        from tracekit.report.questions import by_labels

        return by_labels(self.replay, *labels)

    def findings(self, progress: Progress | None = None) -> Findings | Unanalysed:
        """The findings that a store keeps; or the reason why the trace cannot be replayed."""
        from tracekit.report.findings import Unanalysed

        try:
            return self.whatif(progress=progress).findings()
        except TraceError as error:
            return Unanalysed(str(error))

    def without_steps(self, steps: Sequence[int]) -> Job:
        """The same job as if these steps had not been recorded. Raises SelectionError if nothing is left."""
        return Job(self.trace.without_steps(steps), self.method)

    def answer(self, selection: str, *, keep: bool = False) -> Question:
        """What if the selected ops were as fast as their peers? With `keep`: what if only they were as recorded?

        "stage=3 and compute * 0.9 + worker=1,2" scales some ops and makes others as fast as their peers.
        """
        from tracekit.report.questions import answer, check

        check(self.replay, () if keep else (selection,))
        evidence = None if keep else self.evidence
        return answer(self.replay, selection, self.trace.layout.world_size, keep=keep, evidence=evidence)

    @cached_property
    def evidence(self) -> Evidence:
        """What causes, fixes and answers rest on."""
        from tracekit.analysis.evidence.evidence import Evidence

        return Evidence.of(self.trace, self.replay, self.attribution)

    def step_time(self, scenario: Scenario) -> float:
        """T(scenario), the mean step time in seconds."""
        return self.replay.mean_step_time(scenario)

    def export(self, path: PathLike, *, steps: Sequence[int] | None = None) -> Exported:
        """Write the recorded, original and ideal timeline for ui.perfetto.dev, as .json.gz. Raises OutputError.

        The recorded timeline, with the file's data about the job, is a trace of these steps: `load` reads it back.
        `steps`: step numbers to write; by default all, or the slowest ones if all are too many for a browser. Raises
        SelectionError if none of `steps` is in the job.
        """
        from tracekit.analysis.attribution.critical_path import critical_ops
        from tracekit.analysis.whatif.scenario import IDEAL, ORIGINAL
        from tracekit.analysis.whatif.scenario import RECORDED as AS_RECORDED
        from tracekit.analysis.whatif.timeline import timeline_frame
        from tracekit.trace.chrome import RECORDED, ExportedTimeline, write_chrome

        replay = self.replay.only_steps(self._steps_to_draw() if steps is None else steps)
        drawn = [int(step) for step in replay.graph.steps]
        recorded = self.trace.ops.filter(pl.col("step").is_in(drawn))  # includes lanes that cannot be replayed
        timelines = (
            ExportedTimeline(RECORDED, recorded, critical_ops(replay, AS_RECORDED)),
            ExportedTimeline("original", timeline_frame(replay, ORIGINAL), critical_ops(replay, ORIGINAL)),
            ExportedTimeline("ideal", timeline_frame(replay, IDEAL), critical_ops(replay, IDEAL)),
        )
        starts = self.trace.step_starts
        header = {
            "name": self.trace.name,
            "layout": self.trace.layout.to_dict(),
            "step_starts": {str(step): starts[step] for step in drawn if step in starts},
            "metadata": dict(self.trace.metadata),
        }
        slices = write_chrome(path, timelines, self.trace.worker_ranks(), header)
        return Exported(steps=len(replay.graph.steps), steps_in_job=len(self.replay.graph.steps), slices=slices)

    def _steps_to_draw(self) -> Sequence[int]:
        """The slowest steps, as many as a browser can show, in order."""
        from tracekit.trace.chrome import MOST_SLICES

        graph = self.replay.graph
        fitting = max(1, MOST_SLICES * len(graph.steps) // (3 * graph.ops))
        slowest = self.replay.recorded_step_times().argsort()[::-1][:fitting]
        return [int(step) for step in graph.steps[sorted(slowest)]]


def load(
    path: PathLike,
    *,
    layout: PathLike | None = None,
    importer: str | None = None,
    unit: str | None = None,
    method: Method | str = Method.TRACEKIT,
) -> Job:
    """Read a trace: canonical Parquet, a published trace with its YAML `layout` file, or any format that an importer
    reads.

    `layout` also gives the sizes of collected segments if the ranks do not.

    `importer`: its name (`tracekit import --format` lists them), by default the first that recognises the path. `unit`:
    of the times in a canonical or published trace, one of s, ms, us, ns; by default seconds, which must be plausible.
    `method`: "published" analyses by the published rules only. Raises FormatError, TraceError or LayoutError, each
    naming file, place and next step; ValueError for an unknown method.
    """
    from tracekit.trace.model import unit_of_time

    known = None if unit is None else unit_of_time(unit)
    return Job(_read(Path(os.fsdecode(path)), layout, importer, known), Method(method))


def _read(file: Path, layout: PathLike | None, importer: str | None, unit: Unit | None) -> Trace:
    """The trace in `file`, by whatever reads it."""
    if importer is None and layout is None and file.suffix == ".parquet":  # avoids importing every importer
        from tracekit.trace.canonical import read_parquet

        return read_parquet(file, unit=unit)
    if importer is None and layout is not None and not file.is_dir():
        from tracekit.collectors.importers.published import read_published

        return read_published(file, layout, unit=unit)
    from tracekit.collectors.importers.registry import read_any

    return read_any(file, name=importer, layout=None if layout is None else Path(layout), unit=unit)


def load_from_store(
    name: str | None = None,
    *,
    store: PathLike | None = None,
    window: int | None = None,
    method: Method | str = Method.TRACEKIT,
) -> Job:
    """Read a job from a store, by default the newest one in the default store. `method` as in `load`.

    `window`: its number, if the job has several; by default the newest. Raises StoreError, also for an op trace;
    ValueError for an unknown method.
    """
    from tracekit.base.errors import StoreError
    from tracekit.store import Store, default_store
    from tracekit.trace.op import OpTrace

    opened = Store(Path(store) if store is not None else default_store())
    trace = opened.load(opened.newest() if name is None else name, window)
    if isinstance(trace, OpTrace):
        raise StoreError(f"{opened.path}: job {trace.name!r} is an op trace; `load_ops_from_store` reads it")
    return Job(trace, Method(method))
