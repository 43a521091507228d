"""The rows that a study stores for one job.

In: an analysed job of any kind. Out: a frame for each table. Every sentence comes from the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.attribution.attribution import waste
from tracekit.base.text import encodable
from tracekit.fleet.exclusions import Exclusion, exclusions_of, usable_start
from tracekit.fleet.tables import frame
from tracekit.job.gpu import GpuJob
from tracekit.job.op import OpJob
from tracekit.job.pipeline import Job
from tracekit.report.gpu import GpuReport
from tracekit.report.op import OpReport
from tracekit.report.pipeline import Report

Rows = dict[str, pl.DataFrame]
#: Free metadata that identifies who pays.
_TEAM_KEYS = ("team", "project")
#: Parts of a rank that concern its machine, as in `tracekit culprits --part`.
_MACHINE_PARTS = ("compute", "network", "process")
#: These are not losses.
_NO_LOSS = ("healthy", "unexplained")


def rows_of(job: Job | OpJob | GpuJob, digest: str, analysis: str) -> Rows:
    """The rows of a job, including those of `exclusions`. `digest`: of its content; `analysis`: version of the
    analysis.

    Raises TracekitError if the job cannot be analysed.
    """
    if isinstance(job, Job):
        tables, first_start_s = _pipeline(job)
    elif isinstance(job, GpuJob):
        tables, first_start_s = _gpus(job.whatif(), job.trace.metadata)
    else:
        tables, first_start_s = _ops(job.whatif(), job.trace.metadata)
    tables["machines"] = machines_of(tables["workers"])
    stamped = {"job": digest, "analysis": analysis, "started_at": usable_start(first_start_s)}
    row = tables["jobs"].with_columns(pl.lit(value, tables["jobs"].schema[name]).alias(name)
                                      for name, value in stamped.items())  # fmt: skip
    left_out = list(exclusions_of(row.row(0, named=True), first_start_s))
    rows = {name: table.with_columns(job=pl.lit(digest)) for name, table in tables.items()}
    rows["jobs"] = row
    rows["exclusions"] = exclusion_rows(digest, analysis, left_out)
    return rows


def machines_of(workers: pl.DataFrame) -> pl.DataFrame:
    """The rows of `machines` of one job: each of its hosts and GPUs, with the costliest cause on its ranks.

    Causes that do not concern a machine (data, garbage collection) do not count.
    """
    speaks = pl.col("part").is_in(_MACHINE_PARTS)
    hits = workers.with_columns(
        pl.when(speaks).then("part").alias("part"), pl.when(speaks).then("cost_s").alias("cost_s")
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
            "rule": [str(one.rule) for one in left_out],
            "scope": [one.scope for one in left_out],
            "reason": [encodable(one.reason) for one in left_out],
            "analysis": [analysis] * len(left_out),
        },
    )


def _pipeline(job: Job) -> tuple[Rows, float | None]:
    """The rows of a pipeline job, without its digest, and when it started."""
    report, metadata = job.whatif(), job.trace.metadata
    found, layout, verdict = report.attribution, report.layout, report.diagnosis.verdict
    hours, stated = _gpu_hours(metadata, layout.world_size, found.recorded)
    starts = [job.trace.step_starts.get(int(step)) for step in found.steps]
    known = [value for value in found.correlation.values() if value is not None and math.isfinite(value)]
    figures = {
        "kind": "pipeline",
        **_identity(report.name, metadata),
        "gpus": layout.world_size,
        "hosts": len(set(report.hosts.values())) or None,
        **{name: getattr(layout, name) for name in ("dp", "pp", "tp", "cp", "ep", "vpp")},
        "workers": report.coverage.workers_expected,
        "workers_traced": report.coverage.workers_traced,
        "steps": len(found.steps),
        "ops": report.ops,
        **_times(found.recorded_s, found.original_s, found.ideal_s, hours, stated=stated),
        "verdict": str(verdict.kind),
        "headline": report.diagnosis.answer.headline,
        "verdict_share": verdict.share,
        "m_w": found.m_w.removal,
        "m_s": found.m_s.removal if layout.pp > 1 else None,
        "forward_backward_correlation": float(np.median(known)) if known else None,
        "time_pattern": str(report.diagnosis.time.shape),
        "space_pattern": str(report.diagnosis.space.shape),
        **_trust(report.trust.trustworthy, report.trust.replay_error, report.trust.discrepancy,
                 report.trust.unexplained, report.trust.reasons),
    }  # fmt: skip
    steps = frame(
        "steps",
        {
            "step": found.steps,
            "started_at": [usable_start(start) for start in starts],
            "recorded_s": found.recorded,
            "original_s": found.original,
            "ideal_s": found.ideal,
        },
    )
    per_hour = hours / found.recorded_s
    rows = {
        "jobs": _one("jobs", figures),
        "workers": _workers(report, metadata.get("gpus")),
        "steps": steps,
        "causes": _causes(report, per_hour),
        "fixes": _fixes(report, per_hour),
    }
    return rows, min((start for start in starts if start is not None), default=None)


def _workers(report: Report, gpus: object) -> pl.DataFrame:
    """One row per worker, with what the costliest cause on it slows down. `gpus`: of the free metadata."""
    table = report.by_worker.select("dp_rank", "pp_rank", "rank", "host", "slowdown").sort("dp_rank", "pp_rank")
    slowest = {(worker.dp_rank, worker.pp_rank) for worker in report.attribution.slowest_workers}
    culprits: dict[tuple[int, int], Any] = {}
    for one in sorted(report.diagnosis.answer.culprits, key=lambda one: -one.cost_s):
        culprits.setdefault((one.dp_rank, one.pp_rank), one)
    cells = list(zip(table["dp_rank"].to_list(), table["pp_rank"].to_list(), strict=True))
    named = [culprits.get(cell) for cell in cells]
    return frame(
        "workers",
        {
            **{name: table[name] for name in ("dp_rank", "pp_rank", "rank", "host", "slowdown")},
            "gpu": [_uuid(gpus, rank) for rank in table["rank"]],
            "slowest": [cell in slowest for cell in cells],
            "part": [None if one is None else one.part for one in named],
            "cost_s": [None if one is None else one.cost_s for one in named],
            "confidence": [None if one is None else one.confidence for one in named],
        },
    )


def _uuid(gpus: object, rank: int | None) -> str | None:
    """The UUID of a rank's GPU, as far as the free metadata gives it."""
    gpu = gpus.get(str(rank)) if isinstance(gpus, dict) else None
    uuid = gpu.get("uuid") if isinstance(gpu, dict) else None
    return encodable(uuid) if isinstance(uuid, str) else None


def _causes(report: Report, per_hour: float) -> pl.DataFrame:
    """Why the job is slow. `per_hour`: GPU-hours for each second of a mean step."""
    rows = []
    for order, (cause, sentence) in enumerate(
        zip(report.diagnosis.causes, report.diagnosis.answer.causes, strict=True)
    ):
        lost = 0.0 if cause.kind in _NO_LOSS or cause.change is None else max(cause.saved_s, 0.0) * per_hour
        rows.append(
            {
                **{name: getattr(cause, name) for name in (
                    "title", "since_step", "when", "confidence", "saved_s", "alone_s", "next_check", "suggested_fix")},
                "order": order,
                "kind": str(cause.kind),
                "sentence": sentence,
                "where": str(cause.where),
                "lost_gpu_hours": lost,
            }
        )  # fmt: skip
    return _many("causes", rows)


def _fixes(report: Report, per_hour: float) -> pl.DataFrame:
    rows = []
    for order, fix in enumerate(report.diagnosis.fixes):
        promised = fix.withheld is None
        rows.append(
            {
                **{name: getattr(fix, name) for name in ("title", "confidence", "error_s", "bound", "withheld")},
                "assumes": fix.assumes,
                "order": order,
                "kind": str(fix.kind),
                "where": str(fix.where),
                "cause": None if fix.cause is None else str(fix.cause),
                "saved_s": fix.saved_s if promised else None,
                "saved_gpu_hours": fix.saved_s * per_hour if promised else None,
            }
        )  # fmt: skip
    return _many("fixes", rows)


def _ops(report: OpReport, metadata: Mapping[str, Any]) -> tuple[Rows, float | None]:
    """The rows of a job of any shape."""
    hours, stated = _gpu_hours(metadata, report.ranks, report.recorded)
    figures = {
        "kind": "ops",
        **_identity(report.name, metadata),
        "gpus": report.ranks,
        "workers": report.ranks,
        "workers_traced": report.ranks,
        "steps": len(report.steps),
        "ops": report.ops,
        **_times(report.recorded.mean(), report.original.mean(), report.ideal.mean(), hours, stated=stated),
        "verdict": "straggler" if report.straggling else None,
        "headline": report.verdict,
        **_trust(not report.doubts, report.replay_error, report.discrepancy, report.discrepancy, report.doubts),
    }
    steps = {
        "step": np.asarray(report.steps),
        "recorded_s": report.recorded,
        "original_s": report.original,
        "ideal_s": report.ideal,
    }
    ranks = next((group.shares for group in report.labels_asked if group.labels == ("rank",)), ())
    by_rank = sorted((int(share.values[0]), share.slowdown) for share in ranks)
    workers = {"rank": [rank for rank, _ in by_rank], "slowdown": [slowdown for _, slowdown in by_rank]}
    return {
        "jobs": _one("jobs", figures),
        "workers": frame("workers", workers),
        "steps": frame("steps", steps),
        "causes": _many("causes", []),
        "fixes": _many("fixes", []),
    }, None


def _gpus(report: GpuReport, metadata: Mapping[str, Any]) -> tuple[Rows, float | None]:
    """The rows of a GPU recording: those of its replay, whose one step is the recording, with the culprit."""
    rows, first_start_s = _ops(report.replayed, metadata)
    recording, culprit = report.recording, report.culprit
    steps = recording.step_spans["step"].n_unique()
    gpus = recording.world_size or len(recording.ranks)
    hours, stated = _gpu_hours(metadata, gpus, report.replayed.recorded)
    rows["jobs"] = rows["jobs"].with_columns(
        kind=pl.lit("gpus"),
        name=pl.lit(recording.name),
        gpu_model=pl.lit(recording.device_name, pl.String),
        gpus=pl.lit(gpus, pl.Int64),
        steps=pl.lit(steps, pl.Int64),
        gpu_hours=pl.lit(hours),
        gpu_hours_stated=pl.lit(stated),
        lost_gpu_hours=pl.col("waste").clip(0) * hours,
        headline=pl.lit(report.verdict),
        trustworthy=pl.lit(not report.doubts),
        doubts=pl.lit("; ".join(report.doubts) or None, pl.String),
    )
    hosts = {str(rank): host for rank, host in recording.hosts.items()}
    named = {row["rank"]: row for row in report.culprits}
    rows["workers"] = rows["workers"].with_columns(
        host=pl.col("rank").cast(pl.String).replace_strict(hosts, default=None, return_dtype=pl.String),
        part=pl.Series([named.get(rank, {}).get("part") for rank in rows["workers"]["rank"]], dtype=pl.String),
        cost_s=pl.when(pl.col("rank").is_in(list(named))).then(
            pl.lit(culprit.saved_s if culprit else None, pl.Float32)
        ),
    )
    if culprit is not None:
        per_hour = hours / report.recorded_s
        rows["causes"] = _many("causes", [
            {
                "order": order,
                "kind": str(cause.cause),
                "title": str(cause.cause),
                "sentence": cause.evidence,
                "where": f"rank {culprit.rank}",
                "saved_s": cause.saved_s,
                "lost_gpu_hours": max(cause.saved_s, 0.0) * per_hour,
            }
            for order, cause in enumerate(culprit.causes)
        ])  # fmt: skip
    return rows, first_start_s


def _identity(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the free metadata says about the job, as far as it is valid."""
    team = next((metadata[key] for key in _TEAM_KEYS if isinstance(metadata.get(key), str)), None)
    texts = {"name": name, "team": team, "gpu_model": metadata.get("gpu_model"), "framework": metadata.get("framework")}
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


def _times(recorded_s: float, original_s: float, ideal_s: float, hours: float, *, stated: bool) -> dict[str, Any]:
    slowdown = original_s / ideal_s if ideal_s else math.nan
    lost = waste(slowdown) if slowdown else math.nan
    return {
        "recorded_s": recorded_s,
        "original_s": original_s,
        "ideal_s": ideal_s,
        "slowdown": slowdown,
        "waste": lost,
        "straggling": slowdown >= 1.1,
        "gpu_hours": hours,
        "gpu_hours_stated": stated,
        "lost_gpu_hours": max(lost, 0.0) * hours,
    }


def _trust(
    trustworthy: bool, replay_error: float, discrepancy: float, unexplained: float, doubts: Sequence[str]
) -> dict[str, Any]:
    return {
        "trustworthy": trustworthy,
        "replay_error": replay_error,
        "discrepancy": discrepancy,
        "unexplained": unexplained,
        "doubts": "; ".join(doubts) or None,
    }


def _one(table: str, row: Mapping[str, Any]) -> pl.DataFrame:
    return frame(table, {name: [value] for name, value in row.items()}).with_columns(
        pl.selectors.float().fill_nan(None)
    )


def _many(table: str, rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    names = rows[0] if rows else ("job",)
    return frame(table, {name: [row[name] for row in rows] for name in names}).with_columns(
        pl.selectors.float().fill_nan(None)
    )
