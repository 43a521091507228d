"""The tables of a study and their columns. docs/fleet.md lists the same.

Nothing flows in or out: `rows` fills these tables, `study` stores them, `figures` reads them. `job` is the digest of a
trace's content, independent of where the trace is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import polars as pl

#: Version of the tables; it increases whenever readers of the last version could break.
STUDY_VERSION = 2

JOBS = pl.Schema(
    {
        "job": pl.String,
        "name": pl.String,
        "kind": pl.String,
        "analysis": pl.String,
        "started_at": pl.Float64,
        "team": pl.String,
        "gpu_model": pl.String,
        "framework": pl.String,
        "gpus": pl.Int64,
        "hosts": pl.Int64,
        "dp": pl.Int32,
        "pp": pl.Int32,
        "tp": pl.Int32,
        "cp": pl.Int32,
        "ep": pl.Int32,
        "vpp": pl.Int32,
        "workers": pl.Int64,
        "workers_traced": pl.Int64,
        "steps": pl.Int64,
        "ops": pl.Int64,
        "restarts": pl.Int64,
        "recorded_s": pl.Float64,
        "original_s": pl.Float64,
        "ideal_s": pl.Float64,
        "slowdown": pl.Float64,
        "waste": pl.Float64,
        "straggling": pl.Boolean,
        "gpu_hours": pl.Float64,
        "gpu_hours_stated": pl.Boolean,
        "lost_gpu_hours": pl.Float64,
        "verdict": pl.String,
        "headline": pl.String,
        "verdict_share": pl.Float64,
        "m_w": pl.Float64,
        "m_s": pl.Float64,
        "forward_backward_correlation": pl.Float64,
        "time_pattern": pl.String,
        "space_pattern": pl.String,
        "trustworthy": pl.Boolean,
        "replay_error": pl.Float64,
        "discrepancy": pl.Float64,
        "unexplained": pl.Float64,
        "doubts": pl.String,
    }
)
WORKERS = pl.Schema(
    {
        "job": pl.String,
        "dp_rank": pl.Int32,
        "pp_rank": pl.Int32,
        "rank": pl.Int32,
        "host": pl.String,
        "gpu": pl.String,
        "slowdown": pl.Float32,
        "slowest": pl.Boolean,
        "part": pl.String,
        "cost_s": pl.Float32,
        "confidence": pl.Float32,
    }
)
MACHINES = pl.Schema(
    {
        "job": pl.String,
        "kind": pl.String,
        "machine": pl.String,
        "part": pl.String,
        "cost_s": pl.Float32,
    }
)
STEPS = pl.Schema(
    {
        "job": pl.String,
        "step": pl.Int32,
        "started_at": pl.Float64,
        "recorded_s": pl.Float32,
        "original_s": pl.Float32,
        "ideal_s": pl.Float32,
    }
)
CAUSES = pl.Schema(
    {
        "job": pl.String,
        "order": pl.Int32,
        "kind": pl.String,
        "title": pl.String,
        "sentence": pl.String,
        "where": pl.String,
        "since_step": pl.Int64,
        "when": pl.String,
        "confidence": pl.Float64,
        "saved_s": pl.Float64,
        "alone_s": pl.Float64,
        "lost_gpu_hours": pl.Float64,
        "next_check": pl.String,
        "suggested_fix": pl.String,
    }
)
FIXES = pl.Schema(
    {
        "job": pl.String,
        "order": pl.Int32,
        "kind": pl.String,
        "title": pl.String,
        "where": pl.String,
        "cause": pl.String,
        "confidence": pl.Float64,
        "saved_s": pl.Float64,
        "error_s": pl.Float64,
        "saved_gpu_hours": pl.Float64,
        "bound": pl.Boolean,
        "withheld": pl.String,
        "assumes": pl.String,
    }
)
EXCLUSIONS = pl.Schema(
    {
        "job": pl.String,
        "source": pl.String,
        "rule": pl.String,
        "scope": pl.String,
        "reason": pl.String,
        "analysis": pl.String,
    }
)
SOURCES = pl.Schema({"source": pl.String, "job": pl.String})

#: Tables of analysis results. `exclusions` and `sources` also include traces that could not be read.
BY_JOB: Mapping[str, pl.Schema] = MappingProxyType(
    {"jobs": JOBS, "workers": WORKERS, "machines": MACHINES, "steps": STEPS, "causes": CAUSES, "fixes": FIXES}
)
TABLES: Mapping[str, pl.Schema] = MappingProxyType({**BY_JOB, "exclusions": EXCLUSIONS, "sources": SOURCES})


def frame(table: str, columns: Mapping[str, object]) -> pl.DataFrame:
    """Columns, each a sequence, as that table; missing ones are null."""
    schema = TABLES[table]
    given = pl.DataFrame(columns, schema={name: schema[name] for name in columns}, strict=False)
    return given.select(
        pl.col(name) if name in columns else pl.lit(None, kind).alias(name) for name, kind in schema.items()
    )
