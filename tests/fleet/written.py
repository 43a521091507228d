"""Studies whose rows are written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tracekit.fleet.study import Study
from tracekit.fleet.study_tables import STUDY_VERSION, TABLES, frame


def write_study(path: Path, **rows: list[dict[str, Any]]) -> Study:
    """A study with these rows, each with what its table has by default."""
    usual = {"jobs": {"kind": "pipeline", "analysis": "one", "gpus": 128, "steps": 10, "recorded_s": 10.0}}
    path.mkdir()
    (path / "tracekit-study").write_text(json.dumps({"study_version": STUDY_VERSION}))
    for table in TABLES:
        full = [usual.get(table, {}) | row for row in rows.get(table, [])]
        columns = {name: [row.get(name) for row in full] for name in (full[0] if full else ("job",))}
        (path / table).mkdir()
        frame(table, columns).write_parquet(path / table / "part-0.parquet")
    return Study(path)


def job(name: str, slowdown: float, hours: float, **more: Any) -> dict[str, Any]:
    """A row of `jobs`."""
    lost = 1 - 1 / slowdown
    figures = {"slowdown": slowdown, "waste": lost, "straggling": slowdown >= 1.1, "gpu_hours": hours}
    return {"job": name, "name": name, **figures, "lost_gpu_hours": lost * hours, "team": None, **more}
