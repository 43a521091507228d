"""Hand-made reports: what a test states, and nothing in all other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tracekit.analysis.hang.hang_report import HangReport
from tracekit.report.report import REPORT_VERSION, Report

_PARTS = {"lost_s": 0.0, "explained_s": 0.0, "noise_s": 0.0, "unexplained_s": 0.0, "error_s": 0.0}
_ANSWER = {
    **dict.fromkeys(("headline", "trust"), ""),
    **dict.fromkeys(("cost", "who", "why", "check", "fix", "action", "saves")),
    **dict.fromkeys(("others", "stalls", "causes", "places", "culprits", "accounts"), ()),
}
_REPORT: dict[str, Any] = {
    "report_version": REPORT_VERSION,
    "job": {"name": "made", "source": "pipeline", "whole": "step", "sizes": "", "gpus": 4, "steps": 1},
    "answer": _ANSWER,
    "verdict": {
        "kind": "balanced", "label": "balanced", "headline_s": 0.0, "lost_s": 0.0, "share": 0.0, "lost_gpu_hours": 0.0,
        "lost_gpu_hours_per_day": 0.0, "sentence": "", "confidence": None, "losses": (), "parts": _PARTS,
        "of_mean_ops": False, "first_fix": None, "who": None, "cost": None, "action": None,
    },
    "trust": {"replay_error": 0.0, "discrepancy": 0.0, "unexplained": 0.0, "trustworthy": True, "reasons": ()},
    "step_time_s": {"recorded": 1.0, "original": 1.0, "ideal": 1.0},
    **dict.fromkeys(("slowdown", "slowdown_error", "waste", "wasted_gpu_hours", "wasted_gpu_hours_per_day")),
    "straggling": False,
    "patterns": {"time": None, "space": None},
    **dict.fromkeys(
        ("assumptions", "causes", "fixes", "stalls", "problems", "failed", "lacks", "questions", "by_label", "by_kind",
         "by_step", "critical_path", "remarks", "overview", "asked", "sections"), ()
    ),
}  # fmt: skip
_CAUSE: dict[str, Any] = {
    **dict.fromkeys(("kind", "title", "where_text", "when", "signature", "effect"), ""),
    **dict.fromkeys(("refuted_by", "next_check", "suggested_fix", "costs"), ""),
    **dict.fromkeys(("since_step", "time", "saved_when_acting_s", "spent", "saves_step_s", "once")),
    "where": {},
    "evidence": (),
    "confidence": 0.9,
    "saved_s": 0.0,
    "alone_s": 0.0,
    "bound": False,
    "priced": True,
}
_FIX: dict[str, Any] = {
    **dict.fromkeys(("kind", "title", "where_text"), ""),
    **dict.fromkeys(("new_step_s", "saved_s", "saved_gpu_hours_per_day", "withheld", "assumes", "cause", "confidence")),
    **dict.fromkeys(("edit", "saves_step_s", "unprofiled_step_s")),
    "where": {},
    "error_s": 0.0,
    "bound": False,
    "details": {},
}
_LOSS = {"causes": (), "explained_s": 0.0}
_ON_KIND = {"slowdown": None, "slowdown_error": None, "saved_s": None}


def report_with(**stated: Any) -> Report:
    """A report with these keys, as JSON has them; objects state only some of their keys."""
    content = _merged(_REPORT, stated)
    content["causes"] = [_merged(_CAUSE, cause) for cause in content["causes"]]
    content["fixes"] = [_merged(_FIX, fix) for fix in content["fixes"]]
    content["verdict"] |= {"losses": [_LOSS | loss for loss in content["verdict"]["losses"]]}
    for table in ("by_kind", "by_pp_rank"):
        content |= {table: [_ON_KIND | row for row in content[table]]} if table in content else {}
    return msgspec.convert(content, Report)


_HANG: dict[str, Any] = {
    "hang": True,
    "headline": "HANG",
    "first_step": None,
    "world_size": 8,
    "dumps": 8,
    **dict.fromkeys(("culprits", "undecided", "waiting", "groups", "stacks", "without_dump", "notes"), ()),
}
_CULPRIT: dict[str, Any] = {
    **dict.fromkeys(("host", "since_s", "since_unix_ns", "phase", "stack")),
    **dict.fromkeys(("group", "operation"), ""),
    "class": "host stuck",
    "stall": 0,
    "waiting": 7,
    "evidence": (),
}


def hang_with(*culprits: Mapping[str, Any], **stated: Any) -> HangReport:
    """A report on a hang with these culprits and keys, as JSON has them; culprits state only some of their keys."""
    return msgspec.convert(_HANG | {"culprits": [_CULPRIT | one for one in culprits]} | stated, HangReport)


def _merged(base: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    objects = {
        key for key, value in stated.items() if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **stated, **{key: _merged(base[key], stated[key]) for key in objects}}
