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
        run, notifier = self._watch.run, self._watch.notifier
        figures: list[tuple[str, str, str, dict[str, int]]] = []
        if run is not None:
            counts = run.counts
            failed = {"analysis": counts.failed, "storing": counts.lost}
            without = "Windows that are stored without findings: the analysis failed"
            figures = [
                ("windows_failed", "Windows that are not in the store", "reason", failed),
                ("windows_unanalysed", without, "", {"": counts.unanalysed}),
                ("ranks_left_out", "Ranks whose segments are unusable", "", {"": counts.left_out}),
                ("late_records", "Records of steps that were stored before", "", {"": counts.late_records}),
            ]
        if notifier is not None:
            sent = {name: getattr(notifier.counts, name) for name in ("sent", "failed", "dropped")}
            figures.append(("notifications", "Messages to --notify, by what became of them", "outcome", sent))
        for name, says, label, values in figures:
            family = CounterMetricFamily(f"tracekit_watch_{name}", says, labels=[label] if label else [])
            for value, count in values.items():
                family.add_metric([value] if label else [], count)
            yield family
