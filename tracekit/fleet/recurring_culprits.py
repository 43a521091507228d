"""Hosts and GPUs that hold up one job after another, beyond chance.

In: a study. Out: a row for each host and GPU of several jobs, with how often a cause was on it and how likely that is
by chance. If causes hit all hosts of a job with equal probability, host h would be hit in job j with probability (hit
hosts of j) / (hosts of j), independently of other jobs: the number of hits is Poisson-binomial. The p-values of all
machines of a kind are converted to q-values (Benjamini and Hochberg 1995): among machines with q <= 5 %, at most 5 %
are expected to be named by chance. Causes that do not concern a machine (data, garbage collection) do not count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.fleet.figures import counted_jobs, left_out_jobs
from tracekit.fleet.study import Study

#: A machine with fewer jobs cannot recur, so it is not tested.
FEWEST_JOBS = 2
#: Default for the share of named machines that are expected to be named by chance.
FALSE_DISCOVERY_RATE = 0.05
#: Columns of the table.
CULPRITS = ("kind", "machine", "jobs", "hit", "expected", "p_value", "q_value", "lost_gpu_hours", "parts", "last_seen",
            "last_job")  # fmt: skip


def recurring_culprits(study: Study, rate: float = FALSE_DISCOVERY_RATE) -> pl.DataFrame:
    """CULPRITS rows with q <= `rate`, most certain first. Raises StudyError."""
    jobs = counted_jobs(study).select("job", "name", "started_at", "recorded_s", "gpu_hours")
    machines, left_out = study.table("machines"), left_out_jobs(study)
    tested = [
        _tested(kind, machines.filter(pl.col("kind") == kind).drop("kind"), jobs, left_out) for kind in ("host", "gpu")
    ]
    return pl.concat(tested).filter(pl.col("q_value") <= rate).sort("q_value", "p_value", "machine")


def _tested(kind: str, rows: pl.LazyFrame, jobs: pl.DataFrame, left_out: pl.Series) -> pl.DataFrame:
    """All machines of a kind that had several of the `jobs`. `rows`: of `machines`, of that kind.

    Jobs in which no machine was hit cannot add evidence, so they only count. A study has a row for each machine of each
    job, many millions: all are counted, but only those of jobs with hits are read, using Parquet's own filter.
    """
    hits = rows.filter(pl.col("part").is_not_null()).collect().join(jobs.select("job"), on="job", how="semi")
    in_hit_jobs = _rows_of_jobs(rows, hits["job"].unique()).select("job", "machine").collect()
    seen = _jobs_of_each(rows, left_out).filter(pl.col("jobs") >= FEWEST_JOBS)
    chance = (
        in_hit_jobs.group_by("job")
        .agg(machines=pl.len())
        .join(hits.group_by("job").agg(hit=pl.len()), on="job")
        .select("job", chance=pl.col("hit") / pl.col("machines"))
    )
    chances = in_hit_jobs.join(chance, on="job", maintain_order="left")
    chances_of_hit = chances.join(hits.select("machine"), on="machine", how="semi", maintain_order="left")
    machines = (
        seen.join(_summed(hits, jobs), on="machine", how="left")
        .join(chances.group_by("machine").agg(expected=pl.col("chance").sum()), on="machine", how="left")
        .join(chances_of_hit.group_by("machine").agg(chances="chance"), on="machine", how="left")
        .with_columns(pl.col("hit", "expected", "lost_gpu_hours").fill_null(0), pl.col("parts").fill_null(""))
        .sort("machine")
    )
    hits_of_machines = machines.select("hit", "chances").iter_rows()
    p_values = [poisson_binomial_tail(np.asarray(chances), hit) if hit else 1.0 for hit, chances in hits_of_machines]
    values = np.array(p_values, np.float64)
    return machines.with_columns(
        kind=pl.lit(kind), p_value=pl.Series(values, dtype=pl.Float64), q_value=pl.Series(q_values(values))
    ).select(CULPRITS)


def _rows_of_jobs(rows: pl.LazyFrame, jobs: pl.Series) -> pl.LazyFrame:
    return rows.filter(pl.col("job").is_in(jobs.implode()))


def _jobs_of_each(rows: pl.LazyFrame, left_out: pl.Series) -> pl.DataFrame:
    """`machine`, and its number of `jobs`, except those left out."""
    count = pl.len().cast(pl.Int64)
    without = _rows_of_jobs(rows, left_out).group_by("machine").agg(left_out=count).collect()
    return (
        rows.group_by("machine")
        .agg(jobs=count)
        .collect()
        .join(without, on="machine", how="left")
        .select("machine", jobs=pl.col("jobs") - pl.col("left_out").fill_null(0))
    )


def _summed(hits: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """One row per machine that was hit: how often, its cost, its causes, and the last time."""
    return (
        hits.join(jobs.with_columns(per_hour=pl.col("gpu_hours") / pl.col("recorded_s")), on="job")
        .sort("machine", "started_at", "job", nulls_last=False)
        .group_by("machine", maintain_order=True)
        .agg(
            hit=pl.len().cast(pl.Int64),
            lost_gpu_hours=(pl.col("cost_s").cast(pl.Float64) * pl.col("per_hour")).sum(),
            parts=pl.col("part").unique().sort().str.join(" "),
            last_seen=pl.col("started_at").last(),
            last_job=pl.col("name").last(),
        )
    )


def poisson_binomial_tail(chances: npt.NDArray[np.float64], least: int) -> float:
    """The probability that at least `least` of independent events with these probabilities happen."""
    if least == 0:
        return 1.0
    fewer = np.zeros(least)  # probabilities that exactly 0, 1, ... least - 1 have happened
    fewer[0] = 1.0
    reached = 0.0  # ... and at least `least`
    for chance in chances:
        reached += fewer[-1] * chance
        fewer[1:] = fewer[1:] * (1 - chance) + fewer[:-1] * chance
        fewer[0] *= 1 - chance
    return float(min(reached, 1.0))


def q_values(p_values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each test the smallest false-discovery rate at which it is a discovery (Benjamini and Hochberg 1995)."""
    count = len(p_values)
    order = np.argsort(p_values, kind="stable")
    scaled = p_values[order] * count / np.arange(1, count + 1)
    lowest = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1.0)
    values = np.empty(count)
    values[order] = lowest
    return values
