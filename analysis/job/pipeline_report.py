"""The report on a pipeline whose graph is built, and its tables: who and what costs how much, in mean and each step.

In: a job's graph, and an outline of its trace. Out: `Analysis`, with a `Report`; `WorkerLanes`, and from them frames
and files with a row per step. The ops of a trace take as much memory as their replay, and nothing reads them again once
the graph exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec import UNSET, Struct, structs

from tracekit.analysis.attribution.attribute import attribute, slowdown_of
from tracekit.analysis.attribution.attribution import Attribution, gaps_text, waste
from tracekit.analysis.attribution.patterns import StepTimes, stalls_of
from tracekit.analysis.detectors.trace_faults import TRACE_FAULTS
from tracekit.analysis.diagnosis.diagnosis import diagnose
from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.graph import Posting
from tracekit.analysis.job.build import Analysed, experts_of_job
from tracekit.analysis.job.job import Analysis, Progress, ReportOptions, by_labels
from tracekit.analysis.numeric.arrays import Floats, number
from tracekit.analysis.replay import Method
from tracekit.analysis.replay.engine import JobGraph, JobReplay
from tracekit.analysis.replay.pipeline_costs import OCCASIONAL, OCCASIONAL_BY_STAGE
from tracekit.analysis.whatif.interventions import IDEAL, mean_step_time
from tracekit.base.atomic_write import Kind, parquet_with, replacing
from tracekit.base.text import counted, listed, seconds
from tracekit.report.questions import Bubbles, ByLabel, Question
from tracekit.report.tables import (
    ClockReport,
    Contribution,
    Correlation,
    Coverage,
    CoverageGap,
    MethodUsed,
    OfWorker,
    OnPath,
    Outline,
    Section,
    Table,
    WorkerClock,
)
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import TraceCoverage, step_values
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    from tracekit.report.findings import WorkerSlowdowns

#: The number of clocks to name.
_MOST_CLOCKS = 3
#: Key in the metadata of a Parquet file of `write_parquet`; its value is the name of the table.
TABLE_KEY = "tracekit_table"
#: The kind of file that `write_parquet` replaces.
TABLE_FILE = Kind("a table that tracekit wrote with --parquet", parquet_with(TABLE_KEY))


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
        trace, replay = self.trace, self.replay
        trace.check_layers(asked.layers)
        asked.refuse_measured(trace.name, "a pipeline trace")
        gpus = trace.layout.world_size
        questions: list[Question] = []
        keeping: list[Question] = []
        labels: list[ByLabel] = []
        if asked.fix or asked.keep or asked.by:
            from tracekit.analysis.job.questions import answer_keep, check

            check(replay, asked.fix)
            keeping = [answer_keep(replay, text, gpus if len(replay.graph.steps) > 1 else None) for text in asked.keep]
            labels += [by_labels(replay, *text.split(",")) for text in asked.by]
        attributed = attribute(replay, progress=progress) if attribution is None else attribution()
        subject = PipelineSubject.of(trace, replay, lambda: attributed)
        subject = structs.replace(subject, expert_loads=asked.expert_loads)
        if asked.fix:
            from tracekit.analysis.job.questions import answer_fix

            questions = [answer_fix(replay, text, gpus, subject) for text in asked.fix]
        if progress is not None:
            progress("causes and fixes")
        if asked.expert_loads is not None and subject.exchanges is None:
            raise asked.expert_loads.without_experts(trace.name)
        assessed = PipelineAssessment(subject, stalls_of(replay, attributed), asked.layers, self.graph.method)
        return AnalysedPipeline(
            evidence=subject,
            diagnosis=diagnose(assessed, asked.metrics),
            asked=asked,
            questions=(*questions, *keeping),
            labels=labels,
            job=self,
            attribution=attributed,
            method=_method_used(self.graph, self.published),
            coverage=trace.coverage(),
            ranks=trace.worker_ranks(),
        )


class AnalysedPipeline(Analysed, frozen=True, kw_only=True, eq=False):
    """Everything that is known of an analysed pipeline.

    `attribution`: what stragglers cost, and who they are. `coverage`: what the trace lacks; `ranks`: the global rank of
    each worker. `evidence_steps`: causes, fixes and answers follow from so many steps, None for all; `job` has only
    these.
    """

    evidence: PipelineSubject
    job: ReplayedJob
    attribution: Attribution
    method: MethodUsed
    coverage: TraceCoverage
    ranks: Mapping[Worker, int]
    evidence_steps: int | None = None

    def analysis(self) -> Analysis:
        """Return the report, and the lanes behind it. Raises SelectionError for a schedule that does not exist."""
        return structs.replace(super().analysis(), lanes=WorkerLanes(self.attribution, self.job.replay))

    @property
    def times(self) -> StepTimes:
        """See `Analysed.times`."""
        attribution = self.attribution
        steps = np.asarray(attribution.steps, np.int32)
        return StepTimes(steps, attribution.recorded, attribution.original, attribution.ideal)

    def _outline(self) -> Outline:
        """What was analysed: layout, GPUs, steps, ops."""
        layout, ops, steps = self.job.trace.layout, self.job.ops, len(self.attribution.steps)
        others = ((name, getattr(layout, name)) for name in ("pp", "tp", "cp", "ep", "vpp"))
        sizes = [f"dp {layout.dp}"] + [f"{name} {size}" for name, size in others if size > 1]
        gpus = layout.world_size
        return Outline(
            name=self.job.trace.name,
            source="pipeline",
            whole="step",
            sizes=f"{' x '.join(sizes)} on {counted(gpus, 'GPU')}, {counted(steps, 'step')}, {ops:,} ops",
            gpus=gpus,
            steps=steps,
            layout=layout,
            ops=ops,
            evidence_steps=UNSET if self.evidence_steps is None else self.evidence_steps,
        )

    @cached_property
    def _bubbles(self) -> Bubbles | None:
        """Where stages are idle, with the prices of schedules; None if nobody asked."""
        if not self.asked.wants_bubbles:
            return None
        from tracekit.analysis.bubbles.bubbles import find_bubbles

        return find_bubbles(self.job.replay, self.asked.schedules)

    def _overview(self) -> Iterator[Table]:
        if self._bubbles is not None:
            from tracekit.analysis.bubbles.picture import bubbles_tables

            yield from bubbles_tables(self._bubbles)

    def _sections(self) -> Iterator[Section]:
        """See `Analysed`; the picture is of the slowest step, as recorded and under the schedules that were priced."""
        yield from self._overview()
        if self._bubbles is not None and self._bubbles.window_s is not None:
            from tracekit.analysis.bubbles.picture import draw_step, summary, timeline_of

            step = int(self.attribution.steps[self.attribution.recorded.argmax()])
            priced = [row.schedule for row in self._bubbles.schedules if row.refused is None]
            drawn = draw_step(self.job.replay, step, schedules=priced)
            yield timeline_of(f"Pipeline, step {step}", drawn, summary(drawn))

    def _keys(self) -> dict[str, Any]:
        attribution, graph = self.attribution, self.job.graph
        gaps = [
            CoverageGap(gap.kind, gap.worker.dp_rank, gap.worker.pp_rank, gap.ops, sorted(set(gap.steps)))
            for gap in attribution.gaps
        ]
        return {
            "trust": {"clamped_transfers": attribution.clamped_transfers, "clamped_delays": attribution.clamped_delays},
            "step_values": step_values(self.job.trace.metadata),
            "step_time_s": structs.replace(self.mean, with_delays=float(attribution.with_delays.mean())),
            "bubbles": self._bubbles,
            "experts": experts_of_job(self.evidence.exchanges, self.asked, self.diagnosis.causes),
            "method": self.method,
            "clocks": self._clock_report,
            "posting": graph.graph.posting,
            "coverage": Coverage(
                **structs.asdict(self.coverage),
                gaps=gaps,
                slowdown_as_recorded=number(attribution.slowdown_as_recorded),
                hidden_slowdown=number(attribution.hidden_slowdown),
                left_out_steps=list(graph.left_out_steps),
                dropped=[{"step": step, "dp_rank": dp_rank} for step, dp_rank in graph.graph.dropped_lanes],
                inferred_transfers=self.job.replay.graph.inferred_transfers,
            ),
            "m_w": number(attribution.m_w),
            "m_s": number(attribution.m_s),
            "slowest_workers": list(attribution.slowest_workers),
            **rows_of_pipeline(attribution, self.ranks, self.job.trace.hosts),
        }

    def _remarks(self) -> Iterator[tuple[str, str]]:
        few, steps = self.evidence_steps, len(self.attribution.steps)
        published = self.job.graph.method is Method.PUBLISHED
        remarks = {
            "Clocks": self._clocks(),
            "Method": "published: the rules of the OSDI'25 paper, nothing else" if published else "",
            "Causes": ""
            if few is None
            else f"they, fixes and answers follow from {few:,} of {steps:,} steps, evenly spread",
            "Missing": "; ".join(self._missing()),
        }
        yield from ((name, words) for name, words in remarks.items() if words)
        if self._bubbles is not None:
            from tracekit.analysis.bubbles.picture import bubbles_sentence

            yield "Bubbles", bubbles_sentence(self._bubbles)

    @cached_property
    def _clock_report(self) -> ClockReport:
        """Which clocks were off, and which could not be compared."""
        clocks, graph = self.job.replay.clocks, self.job.replay.graph
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
        untied = clocks.untied(graph.dp_ranks) if self.job.graph.method is Method.TRACEKIT else None
        return ClockReport(tuple(sorted(offsets, key=lambda row: row.worker)), untied)

    def _clocks(self) -> str:
        """Which clocks were off and were corrected, or that some could not be compared; empty if neither applies."""
        clocks = self._clock_report
        off = [row for row in clocks.offsets if max(abs(row.offset_s), abs(row.jump_s)) >= TRACE_FAULTS.offset_s]
        if off:
            return f"{listed(map(self._clock, off), _MOST_CLOCKS)}: corrected in all figures"
        if clocks.untied:
            return f"{clocks.untied} cannot be compared: no op ends on several of them at the same time"
        return ""

    def _clock(self, row: WorkerClock) -> str:
        """How one clock was off."""
        rank = self.ranks.get(row.worker)
        who = row.worker.coordinates if rank is None else f"rank {rank}"
        if row.jump_step is not None:
            way = "forward" if row.jump_s > 0 else "back"
            return f"{who} set {way} by {seconds(abs(row.jump_s))} at step {row.jump_step}"
        way = "ahead" if row.offset_s > 0 else "behind"
        drift = f", drifting by {row.drift * 1e6:+.0f} us/s" if row.drift else ""
        return f"{who} {way} by {seconds(abs(row.offset_s))} \u00b1 {seconds(row.error_s)}{drift}"

    def _missing(self) -> Iterator[str]:
        """Yield what is missing from the trace."""
        coverage, dropped, left_out = self.coverage, self.job.graph.graph.dropped_lanes, self.job.graph.left_out_steps
        if coverage.workers_traced < coverage.workers_expected:
            shown = "; ".join(worker.coordinates for worker in coverage.missing_workers[:4])
            more = coverage.workers_expected - coverage.workers_traced - 4
            missing = f"{shown} and {more} more" if more > 0 else shown
            yield f"{coverage.workers_traced} of {coverage.workers_expected} workers traced (missing {missing})"
        elif not coverage.complete:
            traced = f"{coverage.worker_steps_traced} of {coverage.worker_steps_expected} worker-steps traced"
            yield f"{traced}: some workers lack some steps"
        if dropped:
            ranks = sorted({dp_rank for _, dp_rank in dropped})
            named = f"{', '.join(map(str, ranks[:6]))}{' ...' if len(ranks) > 6 else ''}"
            yield f"left out {len(dropped)} DP-rank-steps that lack a stage (DP rank {named})"
        if left_out:
            steps = f"{len(left_out)} step{'s' * (len(left_out) > 1)}"
            yield f"left out {steps} that some DP ranks lack, or whose recording was cut"
        elif dropped or not coverage.complete:
            yield "waiting for untraced workers appears as slow communication"
        if gaps := self.attribution.gaps:
            done = "" if self.attribution.slowdown_as_recorded is None else ", reconstructed from their peers"
            yield f"not recorded{done}: {gaps_text(gaps)}"
        if self.job.replay.graph.inferred_transfers:
            computes = "inferred from the computes at both ends, where a stage waited for its input"
            yield f"transfers between stages: {computes}"


def published_graph(trace: Trace, job: JobGraph) -> JobGraph | None:
    """The graph by the published method, None if it follows from that of the job. `trace`: with all ops."""
    same_rules = job.graph.posting.rule is Posting.SAME_DIRECTION
    other = job.clocks.any_off or job.graph.reconstructed or (job.left_out_steps and not same_rules)
    return JobGraph.from_trace(trace, Method.PUBLISHED) if other and job.method is Method.TRACEKIT else None


def _method_used(job: JobGraph, other: JobGraph | None) -> MethodUsed:
    """The rules of the analysis, with S by the published ones if that can differ. `other`: see `published_graph`."""
    alone = MethodUsed(job.method, None, [])
    if job.method is Method.PUBLISHED:
        return alone
    graph = job.graph
    occasional = sorted((OCCASIONAL | OCCASIONAL_BY_STAGE) & set(graph.job.kinds))
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
        return alone
    if other is not None:
        published = other.replay
    elif same_rules:  # the same graph and costs, different ideals
        published = job.replay.with_ideals(Method.PUBLISHED)
    else:
        published = job.replay.with_published_rules()
    if not mean_step_time(published, IDEAL):  # no slowdown; the attribution reports it
        return alone
    return MethodUsed(job.method, number(slowdown_of(published)), reasons)


def rows_of_pipeline(attribution: Attribution, ranks: Mapping[Worker, int], hosts: Mapping[int, str]) -> dict[str, Any]:
    """The rows of each table, by its key in the report."""
    rows = {f"by_{name}": _contributions(attribution, name, *times) for name, times in _sets(attribution).items()}
    return {
        **rows,
        "by_kind": sorted(rows["by_kind"], key=lambda row: row.slowdown or 0.0, reverse=True),
        "by_worker": _by_worker(attribution, ranks, hosts),
        "critical_path": _critical_path(attribution),
        "critical_workers": _critical_workers(attribution),
        "forward_backward_correlation": [Correlation(stage, number(r)) for stage, r in attribution.correlation.items()],
    }


def _sets(attribution: Attribution) -> dict[str, tuple[Sequence[Any], Floats, Floats | None, Floats | None]]:
    """The sets of ops by kind, stage and DP rank: the value of each, and step times of replays, [steps, sets]: of the
    ideal job with one set as recorded, and of the original one with only its launch delays, and with only the set
    idealised; None: replays are too expensive.
    """
    kinds = list(attribution.by_kind)
    added, delayed, removed = (
        np.stack([times[kind] for kind in kinds], axis=1)
        for times in (attribution.by_kind, attribution.delayed_by_kind, attribution.removed_by_kind)
    )
    stages, dp_ranks = range(attribution.stages), attribution.dp_ranks
    return {
        "kind": (kinds, added, delayed, removed),
        "pp_rank": (stages, attribution.by_stage, attribution.delayed_by_stage, attribution.removed_by_stage),
        "dp_rank": (dp_ranks, attribution.by_dp_rank, attribution.delayed_by_dp_rank, attribution.removed_by_dp_rank),
    }


def _contributions(
    attribution: Attribution,
    name: str,
    values: Sequence[Any],
    added: Floats,
    delayed: Floats | None,
    removed: Floats | None,
) -> list[Contribution]:
    """One row per set of ops: S and waste, and what idealising it alone would give. For the times, see `_sets`."""
    unknown = [None] * len(values)
    slowdowns = (_means(added) / attribution.ideal_s).tolist()
    late = unknown if delayed is None else (_means(delayed) / attribution.original_s).tolist()
    fixed = unknown if removed is None else _means(removed).tolist()
    errors = attribution.errors(np.ascontiguousarray(added)).tolist() if len(values) else []
    return [
        Contribution(
            **{name: value},
            slowdown=number(slowdown),
            slowdown_error=number(error),
            waste=number(waste(slowdown)),
            launch_delay_slowdown=number(delay),
            fixed_step_time_s=number(fixed_s),
            saved_s=None if fixed_s is None else number(attribution.original_s - fixed_s),
        )
        for value, slowdown, error, delay, fixed_s in zip(values, slowdowns, errors, late, fixed, strict=True)
    ]


def _by_worker(attribution: Attribution, ranks: Mapping[Worker, int], hosts: Mapping[int, str]) -> list[OfWorker]:
    """Exact S of every worker next to the paper's approximation min(S_dp, S_pp), worst first."""
    workers = [Worker(dp_rank, stage) for dp_rank in attribution.dp_ranks for stage in range(attribution.stages)]
    errors = attribution.errors(attribution.by_worker.reshape(len(attribution.steps), -1))
    nodes = [(rank, None if rank is None else hosts.get(rank)) for rank in map(ranks.get, workers)]
    figures = (attribution.worker_slowdown.ravel(), errors, attribution.worker_slowdown_approx.ravel())
    rows = [
        OfWorker(worker.dp_rank, worker.pp_rank, rank, host, slowdown, number(error), approx)
        for worker, (rank, host), slowdown, error, approx in zip(
            workers, nodes, *(column.tolist() for column in figures), strict=True
        )
    ]
    return sorted(rows, key=lambda row: row.slowdown, reverse=True)


def _critical_path(attribution: Attribution) -> list[OnPath]:
    """Seconds per step that ops of each kind take on the critical path; kind None: launch delays (nothing ran)."""
    recorded, original, ideal = (attribution.critical[name] for name in ("recorded", "original", "ideal"))
    rows = [
        *(OnPath(kind=kind, recorded_s=recorded.by_kind[kind], original_s=original.by_kind[kind],
                 ideal_s=ideal.by_kind[kind]) for kind in attribution.by_kind),
        OnPath(kind=None, recorded_s=recorded.delay_s, original_s=original.delay_s, ideal_s=ideal.delay_s),
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row.recorded_s, reverse=True)


def _critical_workers(attribution: Attribution) -> list[OnPath]:
    """Seconds per step that the critical path spends on each worker; only workers on the path."""
    recorded, original = (attribution.critical[name].by_worker for name in ("recorded", "original"))
    rows = [
        OnPath(
            dp_rank=worker.dp_rank,
            pp_rank=worker.pp_rank,
            recorded_s=recorded.get(worker, 0.0),
            original_s=original.get(worker, 0.0),
        )
        for worker in sorted({*recorded, *original})
    ]
    return sorted(rows, key=lambda row: row.recorded_s, reverse=True)


def _means(times: Floats) -> Floats:
    """The mean of each column of [steps, sets]; numpy adds up contiguous values pairwise, which loses least."""
    means: Floats = np.ascontiguousarray(times.T).mean(axis=1)
    return means


class WorkerLanes(Struct, frozen=True, eq=False):
    """The lanes of an analysed pipeline: `attribution`, whose arrays have every step, and `replay`, which draws single
    steps and may have only the steps that causes follow from.
    """

    attribution: Attribution
    replay: JobReplay

    def worker_slowdowns(self) -> WorkerSlowdowns:
        """Exact S of each worker in each step."""
        from tracekit.report.findings import WorkerSlowdowns  # only stores keep them

        attribution = self.attribution
        return WorkerSlowdowns(
            steps=np.array(attribution.steps, np.int64),
            dp_ranks=np.array(attribution.dp_ranks, np.int64),
            slowdown=attribution.by_worker / attribution.ideal[:, None, None],
        )

    def frames(self) -> dict[str, pl.DataFrame]:
        """S of each op kind, stage, DP rank and worker in each step, a long table each."""
        attribution = self.attribution
        workers = {
            "dp_rank": np.repeat(attribution.dp_ranks, attribution.stages),
            "pp_rank": np.tile(np.arange(attribution.stages), len(attribution.dp_ranks)),
        }
        tables = {
            f"by_{name}_per_step": self._per_step({name: values}, added)
            for name, (values, added, *_) in _sets(attribution).items()
        }
        return tables | {
            "by_worker_per_step": self._per_step(workers, attribution.by_worker.reshape(len(attribution.steps), -1))
        }

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write exact S of every worker in every step (step, dp_rank, pp_rank, slowdown).

        Raises OutputError. An existing file is replaced only if this method wrote it.
        """
        with replacing(path, TABLE_FILE) as temporary, open(temporary, "wb") as file:
            self.frames()["by_worker_per_step"].write_parquet(file, metadata={TABLE_KEY: "by_worker_per_step"})

    def _per_step(self, names: Mapping[str, Any], times: Any) -> pl.DataFrame:
        """A long table from step times [steps, sets]."""
        attribution = self.attribution
        columns: dict[str, Any] = {"step": np.repeat(attribution.steps, times.shape[1])}
        columns |= {name: np.tile(np.asarray(values), len(attribution.steps)) for name, values in names.items()}
        columns["slowdown"] = (times / attribution.ideal[:, None]).ravel()
        return pl.DataFrame(columns)
