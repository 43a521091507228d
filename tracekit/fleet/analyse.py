"""One trace of a study: read it, analyse it, write its rows next to the study. Executors run this.

In: a `Task`. Out: an `TaskOutcome`, and a file with the rows of each table. Any problem with a trace becomes an
outcome and never ends the run.
"""

from __future__ import annotations

import errno
import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.job.job import Job
from tracekit.base.errors import FormatError, OutputError, TracekitError, UnsafeFileError
from tracekit.base.stderr import hushed_panics
from tracekit.base.text import encodable, printable
from tracekit.costs import team_of
from tracekit.fleet.sources import Fetched, fetched
from tracekit.fleet.study import Study
from tracekit.fleet.study_tables import CAUSES, FIXES, Exclusion, exclusions_of, frame, usable_start
from tracekit.fleet.tasks import Rule, Task, TaskOutcome
from tracekit.report.conclusions import Culprit, Finding, Fix
from tracekit.report.report import Report
from tracekit.report.tables import OfRank, OfWorker
from tracekit.trace.facts import gpu_uuids
from tracekit.trace.model import Worker

_LONGEST_REASON = 400
Rows = dict[str, pl.DataFrame]
#: Parts of a rank that concern its machine, as in `tracekit culprits --part`.
_MACHINE_PARTS = ("compute", "network", "process")
#: Columns that a finding and a fix have as attributes of the same name.
_OF_CAUSE = tuple(name for name in CAUSES if name in {*Finding.__struct_fields__})
_OF_FIX = tuple(name for name in FIXES if name in {*Fix.__struct_fields__})


class _Clock(NamedTuple):
    """A moment on the wall clock, and in processor time of this process, seconds."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> _Clock:
        return cls(time.perf_counter(), time.process_time())


def analyse(task: Task) -> TaskOutcome:
    """Read and analyse a source, unless its content has been analysed before."""
    began = _Clock.now()
    try:
        with fetched(task.source) as local:
            outcome = TaskOutcome(task.source.url, local.digest, local.stamp if local.settled else "")
            study = Study(Path(task.study))
            if study.has(local.digest, task.analysis):
                return replace(outcome, reused=True)
            outcome = _analysed(task, local, study, outcome, began)
            return replace(outcome, peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    except OSError as error:
        return TaskOutcome(task.source.url, rule=str(Rule.UNREADABLE), reason=_reason(error))


def _analysed(task: Task, local: Fetched, study: Study, outcome: TaskOutcome, began: _Clock) -> TaskOutcome:
    from tracekit.sources.load import load_trace
    from tracekit.store import Store
    from tracekit.store.folder import is_store_folder

    read = analysed = _Clock.now()
    try:
        if is_store_folder(Path(local.path)):
            Store(Path(local.path)).jobs()  # says why it could not be searched
        with hushed_panics(telling=False):
            job = load_trace(local.path, layout=local.layout)
        if local.changed(task.source):
            return replace(outcome, digest=None, stamp="", rule=str(Rule.CHANGED),
                           reason="another trace replaced it while it was being read")  # fmt: skip
        read = _Clock.now()
        rows = rows_of(job, local.digest, task.analysis)
    except TracekitError as error:
        rule = Rule.NO_TRACE if isinstance(error, FormatError) else Rule.INVALID
        # The path differs between copies, the reason does not.
        reason = str(error).replace(f"{local.path}: ", "").replace(str(local.path), task.source.url)
        rows = {"exclusions": exclusion_rows(local.digest, task.analysis, [Exclusion(rule, _short(reason))])}
    analysed = _Clock.now()
    try:
        study.write_result(local.digest, task.analysis, rows)
    except (OSError, OutputError, UnsafeFileError) as error:
        return replace(outcome, digest=None, stamp="", rule=str(Rule.NOT_STORED), reason=_reason(error))
    written = _Clock.now()
    return replace(
        outcome,
        read_s=read.wall_s - began.wall_s,
        analyse_s=analysed.wall_s - read.wall_s,
        write_s=written.wall_s - analysed.wall_s,
        cpu_s=written.cpu_s - began.cpu_s,
        analyse_cpu_s=analysed.cpu_s - read.cpu_s,
    )


def _reason(error: OSError | TracekitError) -> str:
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        return error.strerror or str(error)
    return _short(str(error))


def _short(text: str) -> str:
    return printable(text)[:_LONGEST_REASON]


def rows_of(job: Job, digest: str, analysis: str) -> Rows:
    """Return the rows of a job, including those of `exclusions`. `digest`: of its content; `analysis`: version of the
    analysis.

    Raises TracekitError if the job cannot be analysed.
    """
    metadata, starts = job.trace.metadata, getattr(job.trace, "step_starts", {})
    report = job.whatif()
    times = report.step_times()
    hours, stated = _gpu_hours(metadata, report.job.gpus or job.trace.sizes["world_size"], times.recorded)
    per_hour = hours / report.step_time_s.recorded
    tables = {
        "jobs": _frame("jobs", [{**_figures(report, metadata, hours, stated=stated), **_pipeline_row(job, report)}]),
        "workers": _workers(report, gpu_uuids(metadata)),
        "steps": _steps(report, starts),
        "causes": _causes(report, per_hour),
        "fixes": _fixes(report, per_hour),
    }
    tables["machines"] = machines_of(tables["workers"])
    first_start_s = min((starts[int(step)] for step in times.steps if int(step) in starts), default=None)
    stamped = {"job": digest, "analysis": analysis, "started_at": usable_start(first_start_s)}
    row = tables["jobs"].with_columns(
        pl.lit(value, tables["jobs"].schema[name]).alias(name) for name, value in stamped.items()
    )
    left_out = list(exclusions_of(row.row(0, named=True), first_start_s))
    rows = {name: table.with_columns(job=pl.lit(digest)) for name, table in tables.items()}
    rows["jobs"] = row
    rows["exclusions"] = exclusion_rows(digest, analysis, left_out)
    return rows


def machines_of(workers: pl.DataFrame) -> pl.DataFrame:
    """The rows of `machines` of one job: each of its hosts and GPUs, with the costliest cause on its ranks.

    Causes that do not concern a machine (data, garbage collection) do not count.
    """
    about_machine = pl.col("part").is_in(_MACHINE_PARTS)
    hits = workers.with_columns(
        pl.when(about_machine).then("part").alias("part"), pl.when(about_machine).then("cost_s").alias("cost_s")
    )
    kinds = [
        hits.filter(pl.col(kind).is_not_null())
        .sort("cost_s", "part", descending=[True, False], nulls_last=True, maintain_order=True)
        .group_by(machine=kind, maintain_order=True)
        .agg(pl.col("part", "cost_s").first())
        .sort("machine")
        .with_columns(kind=pl.lit(kind))
        for kind in ("host", "gpu")
    ]
    rows = pl.concat(kinds)
    return frame("machines", {name: rows[name] for name in ("kind", "machine", "part", "cost_s")})


def exclusion_rows(digest: str, analysis: str, left_out: Sequence[Exclusion]) -> pl.DataFrame:
    """The rows of `exclusions` of one job."""
    return frame(
        "exclusions",
        {
            "job": [digest] * len(left_out),
            "rule": [str(exclusion.rule) for exclusion in left_out],
            "scope": [exclusion.scope for exclusion in left_out],
            "reason": [encodable(exclusion.reason) for exclusion in left_out],
            "analysis": [analysis] * len(left_out),
        },
    )


def _figures(report: Report, metadata: Mapping[str, Any], hours: float, *, stated: bool) -> dict[str, Any]:
    verdict, workers, about = report.verdict, _worker_rows(report), report.job
    return {
        "kind": about.source,
        **_identity(report.name, {"gpu_model": about.gpu or None, **metadata}),
        "gpus": about.gpus,
        "hosts": len({row.host for row in workers if row.host}) or None,
        "workers": len(workers),
        "workers_traced": len(workers),
        "steps": about.steps,
        "ops": about.ops or about.gpu_ops or None,
        **{f"{name}_s": getattr(report.step_time_s, name) for name in ("recorded", "original", "ideal")},
        "slowdown": report.slowdown,
        "waste": report.waste,
        "straggling": report.straggling,
        "gpu_hours": hours,
        "gpu_hours_stated": stated,
        "lost_gpu_hours": max(report.waste or 0.0, 0.0) * hours,
        "verdict": str(verdict.kind),
        "headline": report.answer.headline,
        "verdict_share": verdict.share,
        "trustworthy": report.trust.trustworthy,
        "replay_error": report.trust.replay_error,
        "discrepancy": report.trust.discrepancy,
        "unexplained": report.trust.unexplained,
        "doubts": "; ".join(report.trust.reasons) or None,
    }


def _pipeline_row(job: Job, report: Report) -> dict[str, Any]:
    layout, coverage = report.job.layout, report.coverage
    if not layout or not coverage:
        return {}
    correlations = [row.r for row in report.forward_backward_correlation or () if row.r is not None]
    time, space = report.patterns.time, report.patterns.space
    return {
        **{name: getattr(layout, name) for name in ("dp", "pp", "tp", "cp", "ep", "vpp")},
        "hosts": len(set(getattr(job.trace, "hosts", {}).values())) or None,
        "workers": coverage.workers_expected,
        "workers_traced": coverage.workers_traced,
        "m_w": report.m_w,
        "m_s": report.m_s if layout.pp > 1 else None,
        "forward_backward_correlation": float(np.median(correlations)) if correlations else None,
        "time_pattern": None if time is None else str(time.shape),
        "space_pattern": None if space is None else str(space.shape),
    }


def _worker_rows(report: Report) -> list[OfWorker | OfRank]:
    """The workers of a pipeline by place, the ranks of another job; none of post-training, whose rows are by phase."""
    if report.job.basis:
        return []
    return [*sorted(report.by_worker or (), key=lambda row: row.worker), *(report.by_rank or ())]


def _steps(report: Report, starts: Mapping[int, float]) -> pl.DataFrame:
    times = report.step_times()
    return frame(
        "steps",
        {
            "step": times.steps,
            "started_at": [usable_start(starts.get(int(step))) for step in times.steps],
            "recorded_s": times.recorded,
            "original_s": times.original,
            "ideal_s": times.ideal,
        },
    )


def _workers(report: Report, uuids: Mapping[str, str]) -> pl.DataFrame:
    """One row per worker, with the part that the costliest cause on it slows down. `uuids`: of GPUs, by rank."""
    rows, slowest = _worker_rows(report), set(report.slowest_workers or ())
    culprits: dict[Worker | int | None, Culprit] = {}
    for culprit in sorted(report.answer.culprits, key=lambda culprit: -culprit.cost_s):
        culprits.setdefault(culprit.worker or culprit.rank, culprit)
    places = [row.worker if isinstance(row, OfWorker) else row.rank for row in rows]
    culprit_ranks = [culprits.get(place) for place in places]
    columns = {name: [getattr(row, name, None) for row in rows] for name in ("dp_rank", "pp_rank", "rank")}
    return frame(
        "workers",
        {
            **columns,
            "host": [row.host or None for row in rows],
            "slowdown": [row.slowdown for row in rows],
            "gpu": [uuids.get(str(rank)) for rank in columns["rank"]],
            "slowest": [place in slowest for place in places],
            **{
                figure: [None if culprit is None else getattr(culprit, figure) for culprit in culprit_ranks]
                for figure in ("part", "cost_s", "confidence")
            },
        },
    )


def _causes(report: Report, per_hour: float) -> pl.DataFrame:
    """Why the job is slow. `per_hour`: GPU-hours for each second of a mean step."""
    rows = [
        {
            **{name: getattr(cause, name) for name in _OF_CAUSE},
            "order": order,
            "sentence": sentence,
            "where": cause.where_text,
            "lost_gpu_hours": max(cause.saved_s, 0.0) * per_hour if cause.priced else 0.0,
        }
        for order, (cause, sentence) in enumerate(zip(report.findings, report.answer.causes, strict=True))
    ]
    return _frame("causes", rows)


def _fixes(report: Report, per_hour: float) -> pl.DataFrame:
    rows = [
        {
            **{name: getattr(fix, name) for name in _OF_FIX},
            "order": order,
            "where": fix.where_text,
            "saved_gpu_hours": None if fix.saved_s is None else fix.saved_s * per_hour,
        }
        for order, fix in enumerate(report.fixes)
    ]
    return _frame("fixes", rows)


def _identity(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    texts = {
        "name": name,
        "team": team_of(metadata),
        "gpu_model": metadata.get("gpu_model"),
        "framework": metadata.get("framework"),
    }
    restarts = metadata.get("restarts", metadata.get("attempt"))
    return {
        **{key: encodable(value) if isinstance(value, str) else None for key, value in texts.items()},
        "restarts": restarts if isinstance(restarts, int) and 0 <= restarts < 2**31 else None,
    }


def _gpu_hours(metadata: Mapping[str, Any], gpus: int, recorded: Any) -> tuple[float, bool]:
    """GPU-hours of the job, and whether its metadata states them; otherwise those of the traced steps."""
    stated = metadata.get("gpu_hours")
    if isinstance(stated, int | float) and math.isfinite(stated) and stated > 0:
        return float(stated), True
    return float(recorded.sum()) * gpus / 3600, False


def _frame(table: str, rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    names = rows[0] if rows else ("job",)
    return frame(table, {name: [row[name] for row in rows] for name in names}).with_columns(
        pl.selectors.float().fill_nan(None)
    )
