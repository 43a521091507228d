"""Results of a study: how many jobs straggle, what is lost, to what, where, which fixes save most; the paper's figures
next to ours.

In: a study. Out: `FleetFigures`, plain numbers and tables, which terminal and page show. Every share is given
twice: of jobs, and of GPU-hours. Intervals come from the bootstrap over jobs: jobs are drawn with replacement, as
many as there are; all figures use the same draws, which are the same every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.attribution.patterns import SpaceShape, TimeShape
from tracekit.analysis.numeric.arrays import Floats
from tracekit.fleet.study import Study
from tracekit.fleet.study_tables import BY_TIME, EVERYWHERE
from tracekit.fleet.tasks import Rule
from tracekit.report.findings import AppliedFix
from tracekit.report.tables import plain

#: Upper ends of the classes of job sizes, GPUs.
SIZES = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
#: Quantiles of a curve.
CURVE = tuple((index + 1) / 200 for index in range(200))
MOST_FIXES = 10
_WEEK_S = 7 * 86_400
#: A job has a cause if the cause costs it at least this share of the step.
SMALLEST_SHARE = 0.01
#: Total number of draws, so that 100,000 jobs take half a second; the smallest and largest number of samples.
_DRAWS, _FEWEST, _MOST = 40_000_000, 200, 2000
#: Number of samples to sum at once: a product of matrices is several times as fast as one product per vector.
_AT_ONCE = 16
CONFIDENCE = 0.95
CITATION = (
    "Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI'25: 3,079 jobs of 128"
    " GPUs and more over five months"
)
AS_REPORTED = "as reported"
#: The smallest job in the paper's study, GPUs.
SMALLEST_JOB = 128
SHARE, SLOWDOWN = "share", "S"


@dataclass(frozen=True, slots=True)
class JobsLeftOut:
    """Number of jobs that a rule leaves out: all to which it applies, and those that no earlier rule has left out."""

    rule: Rule
    scope: str
    jobs: int
    first: int


@dataclass(frozen=True, slots=True)
class FixOfFleet:
    """A kind of fix over all jobs. `gpu_hours`: saved; `share`: of all GPU-hours. `bound`: an upper bound.

    `for_causes`: for causes found in these jobs, as opposed to fixes that any job can try. `example`: the fix of that
    kind that saves most, and its job.
    """

    kind: str
    jobs: int
    gpu_hours: float
    share: Interval
    bound: bool
    for_causes: bool
    example: str
    example_job: str


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The figures of a study. GPU-hours are those of the jobs that count.

    `straggling_jobs`, `straggling_hours`: share of jobs, and of GPU-hours of jobs, with S >= 1.1. `lost`: share of
    GPU-hours. `quantiles`: `quantile`, and those of S and waste: `slowdown_jobs`, `slowdown_hours`, `waste_jobs`,
    `waste_hours`. `groups`: the rows of `grouped`, by the name of a grouping. `applied`: fixes that a store knows.
    """

    sources: int
    contents: int
    copies: int
    jobs: int
    gpu_hours: float
    lost_gpu_hours: float
    straggling_jobs: Interval
    straggling_hours: Interval
    lost: Interval
    samples: int
    left_out: tuple[JobsLeftOut, ...]
    analyses: tuple[str, ...]
    quantiles: pl.DataFrame
    causes: pl.DataFrame
    groups: Mapping[str, pl.DataFrame]
    patterns: pl.DataFrame
    fixes: tuple[FixOfFleet, ...]
    paper: tuple[PaperFigure, ...]
    applied: tuple[AppliedFix, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plain(self) | {"confidence": CONFIDENCE}


def counted_jobs(study: Study) -> pl.DataFrame:
    """The rows of `jobs` that no rule leaves out, by `job`. Raises StudyError."""
    study.check()
    return study.read("jobs").filter(~pl.col("job").is_in(left_out_jobs(study).implode())).sort("job")


def left_out_jobs(study: Study) -> pl.Series:
    """The jobs that a rule leaves out of everything."""
    out = study.read("exclusions", ["job", "scope"]).filter(pl.col("scope") == EVERYWHERE)
    return out["job"].drop_nulls().unique()


def figures_of(study: Study) -> FleetFigures:
    """All figures of a study. Raises StudyError if there is none."""
    jobs = counted_jobs(study)
    sources = study.read("sources")
    fixes, titles = _fixes_by_job(study, jobs)
    hours, lost = _column(jobs, "gpu_hours"), _column(jobs, "lost_gpu_hours")
    straggling = _column(jobs, "straggling")
    columns = [np.ones(len(hours)), hours, straggling, straggling * hours, lost]
    columns += [of_jobs(jobs, fixes.filter(kind=kind), "gpu_hours") for kind in titles["kind"]]
    sums = bootstrapped(np.stack(columns, axis=1)) if jobs.height else np.empty((0, len(columns)))
    jobs_in_sample, hour_sums, slow_sums, slow_hours, lost_sums = (sums[:, column] for column in range(5))
    return FleetFigures(
        sources=sources.height + study.read("exclusions", ["job"])["job"].null_count(),
        contents=sources["job"].n_unique(),
        copies=sources.height - sources["job"].n_unique(),
        jobs=jobs.height,
        gpu_hours=float(hours.sum()),
        lost_gpu_hours=float(lost.sum()),
        straggling_jobs=ratio(straggling, columns[0], slow_sums, jobs_in_sample),
        straggling_hours=ratio(columns[3], hours, slow_hours, hour_sums),
        lost=ratio(lost, hours, lost_sums, hour_sums),
        samples=samples_of(jobs.height),
        left_out=tuple(_left_out(study)),
        analyses=tuple(sorted(jobs["analysis"].unique())),
        quantiles=quantiles(jobs, QUANTILES),
        causes=_causes(study, jobs),
        groups=_groups(study, jobs),
        patterns=_patterns(study, jobs),
        fixes=tuple(_fixes(titles, columns[5:], hours, sums[:, 5:], hour_sums)),
        paper=tuple(_beside_paper(jobs, study)),
    )


def _column(jobs: pl.DataFrame, name: str) -> Floats:
    return jobs[name].cast(pl.Float64).fill_null(0.0).fill_nan(0.0).to_numpy()


def of_jobs(jobs: pl.DataFrame, rows: pl.DataFrame, column: str) -> Floats:
    """A column of `rows`, which have one for each of some jobs, in the order of `jobs`; 0 for the others, [jobs]."""
    joined = jobs.select("job").join(rows.select("job", column), on="job", how="left", maintain_order="left")
    return _column(joined, column)


def _left_out(study: Study) -> Sequence[JobsLeftOut]:
    """Every rule with the jobs that it leaves out; a job counts as first under its first rule."""
    order = {str(rule): index for index, rule in enumerate(Rule)}
    rows = study.read("exclusions").with_columns(
        who=pl.coalesce("job", "source"), order=pl.col("rule").replace_strict(order, return_dtype=pl.Int64)
    )
    first = rows.filter(pl.col("scope") == EVERYWHERE).group_by("who").agg(pl.col("order").min())["order"]
    rules = []
    for rule, number in order.items():
        jobs = rows.filter(rule=rule)["who"].n_unique()
        scope = BY_TIME if rule == Rule.CLOCK else EVERYWHERE
        rules.append(
            JobsLeftOut(Rule(rule), scope, jobs, int((first == number).sum()) if scope == EVERYWHERE else jobs)
        )
    return [rule for rule in rules if rule.jobs]


def quantiles(jobs: pl.DataFrame, shares: Sequence[float]) -> pl.DataFrame:
    """Quantiles of S and waste, by jobs and by GPU-hours: the smallest value that covers each share."""
    columns: dict[str, Any] = {"quantile": list(shares)}
    for figure in ("slowdown", "waste"):
        measured = jobs.select(figure, "gpu_hours").drop_nulls().sort(figure)
        values = measured[figure].to_numpy()
        for name, weights in (("jobs", np.ones(len(values))), ("hours", measured["gpu_hours"].to_numpy())):
            reached = np.cumsum(weights) / weights.sum() if len(values) else values
            places = np.searchsorted(reached, np.asarray(shares) - 1e-12).clip(0, max(len(values) - 1, 0))
            columns[f"{figure}_{name}"] = values[places] if len(values) else np.full(len(shares), np.nan)
    return pl.DataFrame(columns)


def grouped(jobs: pl.DataFrame, by: pl.Expr) -> pl.DataFrame:
    """`group`, `jobs`, `straggling` (a share), `gpu_hours`, `lost_gpu_hours`, `lost` (a share), most lost first."""
    return (
        jobs.with_columns(group=by)
        .group_by("group")
        .agg(
            jobs=pl.len(),
            straggling=pl.col("straggling").cast(pl.Float64).mean(),
            gpu_hours=pl.col("gpu_hours").sum(),
            lost_gpu_hours=pl.col("lost_gpu_hours").sum(),
        )
        .with_columns(lost=pl.col("lost_gpu_hours") / pl.col("gpu_hours"))
        .sort("lost_gpu_hours", "group", descending=[True, False], nulls_last=True)
    )


def _groups(study: Study, jobs: pl.DataFrame) -> dict[str, pl.DataFrame]:
    ends = pl.Series([float(size) for size in SIZES])
    names = [f"up to {SIZES[0]:,}", *(f"{low + 1:,} to {high:,}" for low, high in pairwise(SIZES)),
             f"above {SIZES[-1]:,}"]  # fmt: skip
    size = pl.Series(names)[ends.search_sorted(jobs["gpus"].cast(pl.Float64), side="left")]
    order = {name: index for index, name in enumerate(names)}
    sizes = grouped(jobs.with_columns(size=size), pl.col("size")).sort(pl.col("group").replace_strict(order))
    timed = jobs.filter(pl.col("started_at").is_not_null())
    week = pl.from_epoch((pl.col("started_at") // _WEEK_S * _WEEK_S).cast(pl.Int64)).dt.strftime("%Y-%m-%d")
    unknown = pl.lit("unknown")
    return {
        "size": sizes,
        "week": grouped(timed, week).sort("group"),
        "gpu_model": grouped(jobs, pl.col("gpu_model").fill_null(unknown)),
        "team": grouped(jobs, pl.col("team").fill_null(unknown)),
        "host": _hosts(study, jobs),
    }


def _hosts(study: Study, jobs: pl.DataFrame) -> pl.DataFrame:
    """GPU-hours by host: the cost of the costliest cause of each job, if the cause concerns a machine."""
    hit = study.table("machines").filter((pl.col("kind") == "host") & pl.col("part").is_not_null())
    return (
        hit.select("job", "machine", "cost_s")
        .collect()
        .join(jobs.select("job", "recorded_s", "gpu_hours"), on="job")
        .with_columns(lost=pl.col("cost_s").cast(pl.Float64) / pl.col("recorded_s") * pl.col("gpu_hours"))
        .group_by(group=pl.col("machine"))
        .agg(jobs=pl.len(), lost_gpu_hours=pl.col("lost").sum())
        .sort("lost_gpu_hours", "group", descending=[True, False])
    )


def _causes(study: Study, jobs: pl.DataFrame) -> pl.DataFrame:
    """`kind`, `title`, `jobs`, `lost_gpu_hours`, `lost` (share of all GPU-hours), most lost first."""
    rows = study.table("causes").select("job", "kind", "title", "lost_gpu_hours").collect()
    all_hours = float(jobs["gpu_hours"].sum()) or float("nan")
    largest = (
        rows.join(jobs.select("job", hours=pl.col("gpu_hours")), on="job")
        .group_by("job", "kind", "hours", maintain_order=True)
        .agg(pl.col("title").first(), pl.col("lost_gpu_hours").sum())
        .filter(pl.col("lost_gpu_hours") >= SMALLEST_SHARE * pl.col("hours"))
    )
    return (
        largest.group_by("kind")
        .agg(title=pl.col("title").mode().min(), jobs=pl.len(), lost_gpu_hours=pl.col("lost_gpu_hours").sum())
        .with_columns(lost=pl.col("lost_gpu_hours") / all_hours)
        .sort("lost_gpu_hours", "kind", descending=[True, False])
    )


def _patterns(study: Study, jobs: pl.DataFrame) -> pl.DataFrame:
    """`group`, `pattern`, `jobs` (a share), `hours` (a share of GPU-hours), `lost_gpu_hours`.

    Patterns over steps and over workers; for straggling jobs, whether the slowest 3 % of workers or the last stage
    explain at least half; sequence lengths; garbage collection.
    """
    slow = pl.col("straggling")
    collecting = study.table("causes").filter(kind="python-gc").select("job").unique().collect()["job"].to_list()
    correlated = pl.col("forward_backward_correlation") >= 0.9
    wanted = [
        *(("over steps", str(shape), pl.col("time_pattern") == str(shape)) for shape in TimeShape),
        *(("over workers", str(shape), pl.col("space_pattern") == str(shape)) for shape in SpaceShape),
        ("straggling because of", "the slowest 3% of workers, half of it or more", slow & (pl.col("m_w") >= 0.5)),
        ("straggling because of", "the last stage, half of it or more", slow & (pl.col("m_s") >= 0.5)),
        ("straggling because of", "sequence lengths (r >= 0.9)", slow & correlated),
        ("straggling because of", "garbage collection (a cause)", slow & pl.col("job").is_in(collecting)),
    ]
    hours = pl.col("gpu_hours").sum()
    rows = []
    for group, name, condition in wanted:
        matching = jobs.filter(condition.fill_null(value=False))
        shares = {
            "jobs": matching.height / max(jobs.height, 1),
            "hours": float(matching.select(hours).item()) / (float(jobs.select(hours).item()) or float("nan")),
            "lost_gpu_hours": float(matching["lost_gpu_hours"].sum()),
        }
        if matching.height:
            rows.append({"group": group, "pattern": name, **shares})
    schema = {"group": pl.String, "pattern": pl.String, "jobs": pl.Float64, "hours": pl.Float64,
              "lost_gpu_hours": pl.Float64}  # fmt: skip
    return pl.DataFrame(rows, schema)


def _fixes_by_job(study: Study, jobs: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`job`, `kind`, `gpu_hours` of the best fix of each kind of each job; and the kinds that save most.

    First the kinds for causes, then what any job can try. A combination of fixes is not a kind of its own.
    """
    rows = (
        study.table("fixes")
        .filter(pl.col("saved_gpu_hours").is_not_null() & (pl.col("kind") != "combination"))
        .select("job", "kind", "title", "bound", "cause", gpu_hours="saved_gpu_hours")
        .collect()
        .join(jobs.select("job", "name"), on="job")
        .sort("gpu_hours", descending=True, maintain_order=True)
        .unique(["job", "kind"], keep="first", maintain_order=True)
    )
    titles = (
        rows.group_by("kind", maintain_order=True)
        .agg(pl.len().alias("jobs"), pl.col("gpu_hours").sum(), pl.col("bound").all(), pl.col("title").first(),
             pl.col("name").first(), for_causes=pl.col("cause").is_not_null().all())
        .sort("for_causes", "bound", "gpu_hours", "kind", descending=[True, False, True, False])
        .head(MOST_FIXES)
    )  # fmt: skip
    return rows, titles


def _fixes(
    titles: pl.DataFrame, columns: Sequence[Floats], hours: Floats, sums: Floats, weight: Floats
) -> Iterator[FixOfFleet]:
    """A row for each kind of `titles`. `columns`: GPU-hours by job; `sums`, `weight`: those and all, in each sample."""
    for index, row in enumerate(titles.iter_rows(named=True)):
        low, high = interval(sums[:, index] / weight)
        yield FixOfFleet(
            kind=row["kind"],
            jobs=row["jobs"],
            gpu_hours=row["gpu_hours"],
            share=Interval(float(columns[index].sum()) / float(hours.sum()), low, high),
            bound=row["bound"],
            for_causes=row["for_causes"],
            example=row["title"],
            example_job=row["name"],
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the ends of its interval."""

    value: float
    low: float
    high: float


def samples_of(jobs: int) -> int:
    """The number of samples to draw for this many jobs."""
    return int(np.clip(_DRAWS // max(jobs, 1), _FEWEST, _MOST))


def bootstrapped(columns: Floats, seed: int = 0) -> Floats:
    """Sums of `columns`, [jobs, figures], in each sample, [samples, figures].

    Jobs are drawn with replacement, as many as there are; all figures use the same draws, which are the same every
    time.
    """
    jobs, samples = len(columns), samples_of(len(columns))
    generator = np.random.default_rng(seed)
    sums = np.empty((samples, columns.shape[1]))
    sampled = np.empty((_AT_ONCE, jobs))
    for first in range(0, samples, _AT_ONCE):
        count = min(_AT_ONCE, samples - first)
        for sample in sampled[:count]:
            sample[:] = np.bincount(generator.integers(0, jobs, jobs, dtype=np.int64), minlength=jobs)
        sums[first : first + count] = sampled[:count] @ columns
    return sums


def ratio(part: Floats, total: Floats, part_samples: Floats, total_samples: Floats) -> Interval:
    """A ratio of two sums. `part`, `total`: columns, [jobs]; the others: their sums in each sample, [samples]."""
    total_sum = float(total.sum())
    if not total_sum > 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = interval(part_samples / total_samples)
    return Interval(float(part.sum()) / total_sum, low, high)


def interval(samples: Floats) -> tuple[float, float]:
    """The ends between which `CONFIDENCE` of the samples lie; undefined samples do not count."""
    tail = (1 - CONFIDENCE) / 2
    defined = samples[np.isfinite(samples)]
    if not len(defined):
        return float("nan"), float("nan")
    low, high = np.quantile(defined, (tail, 1 - tail))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One figure of both fleets. `unit`: `share` or `S`. `jobs`: our jobs behind it; `ours`: None if there are none."""

    name: str
    paper: float
    ours: float | None
    unit: str
    jobs: int
    status: str = AS_REPORTED


def _beside_paper(jobs: pl.DataFrame, study: Study) -> Iterator[PaperFigure]:
    """The paper's figures, as reported, and ours of jobs as large as those in the paper."""
    large = jobs.filter(pl.col("gpus") >= SMALLEST_JOB)
    slow = large.filter("straggling")
    single = slow.filter(pl.col("m_w") >= 0.5)
    long = large.filter(pl.col("forward_backward_correlation") >= 0.9)
    hours = float(large["gpu_hours"].sum())
    yield _share("jobs with S >= 1.1", 0.425, slow, large)
    lost = float(large["lost_gpu_hours"].sum()) / hours if hours else None
    yield PaperFigure("GPU-hours lost", 0.104, lost, SHARE, large.height)
    yield _waste(large, 0.9, 0.213)
    yield _waste(large, 0.99, 0.45)
    yield _share("straggling jobs with M_W >= 50%", 0.017, single, slow)
    yield _mean("mean S of those", 3.04, single)
    yield _share("jobs with M_S >= 50% (the last stage)", 0.393, large.filter(pl.col("m_s") >= 0.5), large)
    yield _share("jobs with forward-backward correlation >= 0.9", 0.214, long, large)
    yield _mean("mean S of those", 1.34, long)
    planned = (
        study.table("fixes")
        .filter(kind="planned-gc")
        .select("job", "saved_s")
        .collect()
        .join(large.filter(pl.col("dp") >= 128).select("job", "recorded_s"), on="job")
    )
    saved = (planned["saved_s"] / planned["recorded_s"]).median()
    yield PaperFigure(
        "step time given back by planned gc, jobs of 128 DP ranks and more (paper: one job; ours: the median)",
        0.126, None if saved is None else float(str(saved)), SHARE, planned.height,
    )  # fmt: skip


def _share(name: str, paper: float, part: pl.DataFrame, total: pl.DataFrame) -> PaperFigure:
    return PaperFigure(name, paper, part.height / total.height if total.height else None, SHARE, total.height)


def _mean(name: str, paper: float, jobs: pl.DataFrame) -> PaperFigure:
    slowdowns = jobs["slowdown"].to_numpy()
    return PaperFigure(name, paper, float(slowdowns.mean()) if len(slowdowns) else None, SLOWDOWN, jobs.height)


def _waste(jobs: pl.DataFrame, quantile: float, paper: float) -> PaperFigure:
    waste = jobs["waste"].drop_nulls().quantile(quantile, "lower")
    return PaperFigure(f"lost at least by the worst {1 - quantile:.0%} of jobs", paper, waste, SHARE, jobs.height)
