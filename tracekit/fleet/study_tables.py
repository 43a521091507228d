"""The tables of a study with their columns, and the rules by which it leaves out jobs, entirely or in part.
docs/fleet.md lists both. `job` is the digest of a trace's content, independent of where the trace is. The rules are
those of the paper: traces that cannot be analysed, too few steps, many restarts, a replay that misses the
recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import polars as pl

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.fleet.tasks import Rule

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
#: With fewer traced steps, one slow step can hardly be distinguished from a slow job.
FEWEST_STEPS = 3
#: A job that restarted more often than this is failing, not slow.
MOST_RESTARTS = 15
#: Starts before 2000 or from 2100 on come from a clock that was never set, or that counts from another origin.
EARLIEST_START_S, LATEST_START_S = 946_684_800.0, 4_102_444_800.0
#: A job is left out of everything, or only of figures over time.
EVERYWHERE, BY_TIME = "everywhere", "by-time"


def frame(table: str, columns: Mapping[str, object]) -> pl.DataFrame:
    """Columns, each a sequence, as that table; missing ones are null."""
    schema = TABLES[table]
    given = pl.DataFrame(columns, schema={name: schema[name] for name in columns}, strict=False)
    return given.select(
        pl.col(name) if name in columns else pl.lit(None, kind).alias(name) for name, kind in schema.items()
    )


@dataclass(frozen=True, slots=True)
class Exclusion:
    """The reason why one job is left out. `reason`: with the figure, and the expected value."""

    rule: Rule
    reason: str

    @property
    def scope(self) -> str:
        """The figures that the job is left out of."""
        return BY_TIME if self.rule is Rule.CLOCK else EVERYWHERE


def exclusions_of(job: Mapping[str, Any], first_start_s: float | None) -> Iterator[Exclusion]:
    """Every rule that applies to a row of `jobs`. `first_start_s`: as recorded, by any clock.

    The rules are those of the paper (docs/fleet.md).
    """
    if job["steps"] < FEWEST_STEPS:
        yield Exclusion(Rule.FEW_STEPS, f"{job['steps']} steps; expected {FEWEST_STEPS} or more")
    if (job["restarts"] or 0) > MOST_RESTARTS:
        yield Exclusion(Rule.RESTARTS, f"{job['restarts']} restarts; expected {MOST_RESTARTS} at most")
    if not abs(job["unexplained"]) <= VERDICT.largest_discrepancy:
        yield Exclusion(Rule.DISCREPANCY, f"{job['unexplained']:.1%} of the step is unexplained; expected at most 5%")
    elif not job["replay_error"] <= VERDICT.largest_discrepancy:
        yield Exclusion(Rule.REPLAY_ERROR, f"the replay misses the recording by {job['replay_error']:.1%}")
    elif not job["trustworthy"]:
        yield Exclusion(Rule.DOUBTFUL, job["doubts"] or "the report cannot be trusted")
    if first_start_s is not None and usable_start(first_start_s) is None:
        yield Exclusion(Rule.CLOCK, f"its clock shows {first_start_s:.0f} s since 1970: the time of the job is unknown")


def usable_start(start_s: float | None) -> float | None:
    """A start that a clock with the time of day can show, else None."""
    return start_s if start_s is not None and EARLIEST_START_S <= start_s < LATEST_START_S else None
