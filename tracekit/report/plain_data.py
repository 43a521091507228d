"""The JSON object of a report, as docs/report-schema.md documents it.

In: a `Report`. Out: plain data without nan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.report.pipeline import PipelineReport
    from tracekit.report.report import Report
    from tracekit.trace.model import Worker

#: Tables that the JSON object carries row by row.
JSON_TABLES = (
    "by_kind",
    "by_pp_rank",
    "by_dp_rank",
    "by_worker",
    "critical_path",
    "critical_workers",
    "forward_backward_correlation",
)


def report_as_dict(report: Report) -> dict[str, Any]:
    """Return everything in the report as JSON data."""
    from tracekit.report.report import REPORT_VERSION

    found = report.details()
    wasted_a_day = report.waste * report.gpus * 24
    content = {
        "report_version": REPORT_VERSION,
        "job": {
            "name": report.name,
            "whole": report.whole,
            "gpus": report.gpus,
            "sizes": report.sizes,
            **found.pop("job"),
        },
        "trust": {
            "replay_error": report.trust.replay_error,
            "discrepancy": report.trust.discrepancy,
            "unexplained": report.trust.unexplained,
            "trustworthy": report.trust.trustworthy,
            "reasons": list(report.trust.reasons),
            **found.pop("trust"),
        },
        "step_time_s": report.times_s,
        "slowdown": report.slowdown,
        "waste": report.waste,
        "straggling": report.straggling,
        "wasted_gpu_hours": max(found.pop("wasted_gpu_hours"), 0.0),
        "wasted_gpu_hours_per_day": max(wasted_a_day, 0.0),
        "assumptions": [report.rate_assumption],
        "remarks": [{"name": name, "words": words} for name, words in report.remarks()],
        "sections": [
            {"title": table.title, "heads": list(table.heads), "rows": [list(row) for row in table.rows]}
            for table in report.sections(full=True)
        ],
        **{name: report.table(name).to_dicts() for name in ("by_step", "questions", "by_label")},
        **found,
        **report.diagnosis.to_dict(),
    }
    plain: dict[str, Any] = without_nan(content)
    return plain


def pipeline_details(report: PipelineReport) -> dict[str, Any]:
    """Return the part of the JSON object that only pipelines have."""
    found = report.attribution
    return {
        "job": {"source": "pipeline", "layout": report.layout.to_dict(), "steps": len(found.steps), "ops": report.ops},
        "trust": {"clamped_transfers": found.clamped_transfers, "clamped_delays": found.clamped_delays},
        "wasted_gpu_hours": found.wasted_gpu_hours,
        "method": {
            "name": str(report.method),
            "published_slowdown": None if report.published is None else report.published.slowdown,
            "differs_because": [] if report.published is None else list(report.published.reasons),
        },
        "clocks": _clocks(report),
        "posting": {
            "rule": str(report.posting.posting),
            "obeyed": report.posting.obeyed,
            "telling": report.posting.telling,
        },
        "coverage": _coverage(report),
        "m_w": found.m_w.removal,
        "m_s": found.m_s.removal,
        "slowest_workers": [_worker(one) for one in found.slowest_workers],
        **{name: report.table(name).to_dicts() for name in JSON_TABLES},
    }


def _clocks(report: PipelineReport) -> dict[str, Any]:
    return {
        "offsets": [
            _worker(row.worker)
            | {
                "offset_s": row.offset_s,
                "error_s": row.error_s,
                "drift": row.drift,
                "jump_s": row.jump_s,
                "jump_step": row.jump_step,
            }
            for row in report.clocks.offsets
        ],
        "untied": report.clocks.untied,
    }


def _coverage(report: PipelineReport) -> dict[str, Any]:
    coverage, found = report.coverage, report.attribution
    return {
        "workers_expected": coverage.workers_expected,
        "workers_traced": coverage.workers_traced,
        "worker_steps_expected": coverage.worker_steps_expected,
        "worker_steps_traced": coverage.worker_steps_traced,
        "missing_workers": [_worker(one) for one in coverage.missing_workers],
        "gaps": [
            {"kind": str(gap.kind)} | _worker(gap.worker) | {"ops": gap.ops, "steps": sorted(set(gap.steps))}
            for gap in found.gaps
        ],
        "slowdown_as_recorded": found.slowdown_as_recorded,
        "hidden_slowdown": found.hidden_slowdown,
        "left_out_steps": list(report.left_out_steps),
        "dropped": [{"step": step, "dp_rank": dp_rank} for step, dp_rank in report.dropped_lanes],
    }


def _worker(worker: Worker) -> dict[str, Any]:
    return {"dp_rank": worker.dp_rank, "pp_rank": worker.pp_rank}


def without_nan(value: Any) -> Any:
    """The same nested data with nan and infinities as None, because JSON has neither."""
    match value:
        case dict():
            return {key: without_nan(item) for key, item in value.items()}
        case list():
            return [without_nan(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
