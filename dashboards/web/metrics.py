"""The state of all jobs for Prometheus.

In: the list of jobs. Out: the text format. One series per job and figure, never per worker: a large job would have
thousands of those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import polars as pl
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: `job` itself is Prometheus' own label, for what it scrapes.
LABEL = "training_job"
#: Metric, what it says, the column it comes from.
_FIGURES = (
    ("tracekit_job_slowdown_ratio", "Slowdown S of the job: T(original) / T(ideal)", "slowdown"),
    ("tracekit_job_waste_ratio", "Share of the GPU time that stragglers cost", "waste"),
    ("tracekit_job_lost_gpus", "As many GPUs' worth of time is lost, to stragglers or anything else", "lost_gpus"),
    ("tracekit_job_step_seconds", "Mean step time as recorded", "recorded_s"),
    ("tracekit_job_trustworthy", "1 where the replay explains the recording, else 0", "trustworthy"),
)


class JobFigures(Collector):
    """The figures of all jobs at the time of asking."""

    def __init__(self, jobs: pl.DataFrame, now_s: float) -> None:
        self._jobs = jobs.with_columns(lost_gpus=pl.col("lost_gpu_hours_per_day").clip(0) / 24)
        self._now_s = now_s

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        total = GaugeMetricFamily("tracekit_jobs", "Jobs in the store", labels=["analysed"])
        analysed = self._jobs["slowdown"].drop_nulls().len()
        total.add_metric(["yes"], analysed)
        total.add_metric(["no"], self._jobs.height - analysed)
        yield total
        for metric, says, column in _FIGURES:
            yield self._family(metric, says, self._jobs[column].cast(pl.Float64))
        recorded_at = self._jobs["ended_at"].fill_null(self._jobs["imported_at"])
        yield self._family(
            "tracekit_job_trace_age_seconds", "Time since its last traced step", self._now_s - recorded_at
        )

    def _family(self, metric: str, says: str, values: pl.Series) -> Metric:
        family = GaugeMetricFamily(metric, says, labels=[LABEL])
        for name, value in zip(self._jobs["name"], values, strict=True):
            if value is not None:
                family.add_metric([name], value)
        return family


def exposition(jobs: Callable[[], pl.DataFrame]) -> bytes:
    """All figures in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(JobFigures(jobs(), time.time()))
    return generate_latest(registry)
