"""Our fleet compared with the paper's.

In: jobs of a study. Out: the figures that "Understanding Stragglers in Large Model Training Using What-if Analysis"
(Lin et al., OSDI'25, https://www.usenix.org/conference/osdi25/presentation/lin-jinkun) reports, each with ours. The
paper's figures have not been checked against its text here: all are shown as reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from tracekit.fleet.study import Study

CITATION = (
    "Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI'25: 3,079 jobs of 128"
    " GPUs and more over five months"
)
AS_REPORTED = "as reported"
#: The number of jobs in the paper's study, and its smallest job in GPUs.
PAPER_JOBS, SMALLEST_JOB = 3079, 128
SHARE, SLOWDOWN = "share", "S"


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """One figure of both fleets. `unit`: `share` or `S`. `jobs`: our jobs behind it; `ours`: None if there are none."""

    name: str
    paper: float
    ours: float | None
    unit: str
    jobs: int
    status: str = AS_REPORTED


def beside_paper(jobs: pl.DataFrame, study: Study) -> tuple[PaperFigure, ...]:
    """The paper's figures and ours, for jobs of 128 GPUs and more, as in the paper."""
    return tuple(_figures(jobs.filter(pl.col("gpus") >= SMALLEST_JOB), study))


def _figures(large: pl.DataFrame, study: Study) -> Iterator[PaperFigure]:
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


def _share(name: str, paper: float, part: pl.DataFrame, whole: pl.DataFrame) -> PaperFigure:
    return PaperFigure(name, paper, part.height / whole.height if whole.height else None, SHARE, whole.height)


def _mean(name: str, paper: float, jobs: pl.DataFrame) -> PaperFigure:
    slowdowns = jobs["slowdown"].to_numpy()
    return PaperFigure(name, paper, float(slowdowns.mean()) if len(slowdowns) else None, SLOWDOWN, jobs.height)


def _waste(jobs: pl.DataFrame, quantile: float, paper: float) -> PaperFigure:
    waste = jobs["waste"].drop_nulls().quantile(quantile, "lower")
    return PaperFigure(f"lost at least by the worst {1 - quantile:.0%} of jobs", paper, waste, SHARE, jobs.height)
