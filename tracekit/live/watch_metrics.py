"""Metrics of the watch itself: its failures.

In: the watch. Out: metric families, counted since the process began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tracekit.live.watch import Watch


class WatchMetrics(Collector):
    """Counts of windows, ranks, records and notifications that were lost or left out."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """One family per figure."""
        if self._watch.run is not None:
            counts = self._watch.run.counts
            windows = CounterMetricFamily(
                "tracekit_watch_windows_failed", "Windows that are not in the store", labels=["reason"]
            )
            windows.add_metric(["analysis"], counts.failed)
            windows.add_metric(["storing"], counts.lost)
            yield windows
            unanalysed = CounterMetricFamily(
                "tracekit_watch_windows_unanalysed", "Windows that are stored without findings: the analysis failed"
            )
            unanalysed.add_metric([], counts.unanalysed)
            yield unanalysed
            left_out = CounterMetricFamily("tracekit_watch_ranks_left_out", "Ranks whose segments are unusable")
            left_out.add_metric([], counts.left_out)
            yield left_out
            late = CounterMetricFamily("tracekit_watch_late_records", "Records of steps that were stored before")
            late.add_metric([], counts.late_records)
            yield late
        if self._watch.notifier is not None:
            sent = self._watch.notifier.counts
            delivered = CounterMetricFamily(
                "tracekit_watch_notifications", "Messages to --notify, by what became of them", labels=["outcome"]
            )
            for outcome, count in (("sent", sent.sent), ("failed", sent.failed), ("dropped", sent.dropped)):
                delivered.add_metric([outcome], count)
            yield delivered
