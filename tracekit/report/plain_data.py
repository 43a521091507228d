"""The JSON object of a report, as docs/report-schema.md documents it.

In: a `Report`. Out: plain data without nan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.report.pipeline import Report
    from tracekit.trace.model import Worker

#: Version of the JSON object; increased by one with every change that could break a reader of the version before.
REPORT_VERSION = 1
#: Tables that the JSON object carries row by row.
JSON_TABLES = (
    "by_kind",
    "by_pp_rank",
    "by_dp_rank",
    "by_worker",
    "by_step",
    "critical_path",
    "critical_workers",
    "by_label",
    "forward_backward_correlation",
    "questions",
)


def report_as_dict(report: Report) -> dict[str, Any]:
    """Everything in the report, as JSON data."""
    found = report.attribution
    content = {
        "report_version": REPORT_VERSION,
        "job": {
            "name": report.name,
            "layout": report.layout.to_dict(),
            "steps": len(found.steps),
            "ops": report.ops,
        },
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
        "trust": _trust(report),
        "coverage": _coverage(report),
        "step_time_s": {"recorded": found.recorded_s, "original": found.original_s, "ideal": found.ideal_s},
        "slowdown": found.slowdown,
        "waste": found.waste,
        "straggling": found.straggling,
        "wasted_gpu_hours": max(found.wasted_gpu_hours, 0.0),
        "wasted_gpu_hours_per_day": max(found.wasted_gpu_hours_per_day, 0.0),
        "assumptions": [report.rate_assumption],
        "m_w": found.m_w.removal,
        "m_s": found.m_s.removal,
        "slowest_workers": [_worker(one) for one in found.slowest_workers],
    }
    content |= {name: report.table(name).to_dicts() for name in JSON_TABLES}
    content |= report.diagnosis.to_dict()
    plain: dict[str, Any] = without_nan(content)
    return plain


def _clocks(report: Report) -> dict[str, Any]:
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


def _trust(report: Report) -> dict[str, Any]:
    trust, found = report.trust, report.attribution
    return {
        "replay_error": trust.replay_error,
        "discrepancy": trust.discrepancy,
        "unexplained": trust.unexplained,
        "trustworthy": trust.trustworthy,
        "reasons": list(trust.reasons),
        "clamped_transfers": found.clamped_transfers,
        "clamped_delays": found.clamped_delays,
    }


def _coverage(report: Report) -> dict[str, Any]:
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
