"""Prometheus metrics about the jobs of a store and about a watch: for the dashboard, `tracekit watch --metrics-port`.

In: a store. Out: metric families, from stored findings alone. There is a fixed number of series per job, and a few
for each open incident: never one per worker. A watch waits until its last metrics have been scraped: otherwise,
Prometheus cannot distinguish the end of the watch from a kill.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

import polars as pl
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tracekit.base.errors import SelectionError, TracekitError
from tracekit.base.text import printable
from tracekit.collectors.record.process_facts import VARIABLES
from tracekit.live.incident_words import incident_texts, page_of
from tracekit.store import Incident, Store

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from tracekit.live.watch import Watch

#: Limits of open incidents with series, per job and in total. A job with more than that has many of one kind.
MOST_INCIDENTS, MOST_INCIDENTS_IN_ALL = 5, 1000
#: Longest value of a label, characters.
LONGEST_LABEL = 400

#: Prometheus itself uses the label `job`, for the scrape target.
LABEL = "training_job"
#: A label of the user, as `scheduler_facts` names it.
_IS_LABEL = re.compile(r"label_[a-z0-9_]{1,100}\Z")
_GPU_SECONDS_PER_GPU_HOUR = 3600.0
#: Gauges: metric, help text, expression over the columns of `LiveTables.live_jobs`.
_GAUGES = (
    ("tracekit_job_slowdown_ratio", "Slowdown S of the newest window: T(original) / T(ideal)", pl.col("slowdown")),
    ("tracekit_job_waste_ratio", "1 - 1/S: share of the GPU time that the ideal job would not need", pl.col("waste")),
    ("tracekit_job_lost_gpus", "Number of GPUs whose time is lost, to stragglers or anything else",
     pl.col("lost_gpu_hours_per_day").clip(0) / 24),
    ("tracekit_job_confidence_ratio", "Confidence in the leading cause, 0 to 1", pl.col("confidence")),
    ("tracekit_job_fix_saves_gpus", "Number of GPUs whose time the best fix would give back",
     pl.col("saved_gpu_hours_per_day") / 24),
    ("tracekit_job_step_seconds", "Mean step time as recorded", pl.col("recorded_s")),
    ("tracekit_job_trustworthy", "1 if the replay explains the recording, else 0", pl.col("trustworthy")),
    ("tracekit_job_watched", "1 while the job is cut into windows, 0 once it has ended", pl.col("watched")),
    ("tracekit_job_ranks_missing", "Ranks without a whole step in the newest window", pl.col("ranks_missing")),
    ("tracekit_job_window_lag_seconds", "Time from the start of a window's last step until the window was stored",
     pl.col("added_at") - pl.col("ended_at")),
    ("tracekit_job_window_seconds", "Time from the first to the last step of the newest window",
     pl.col("ended_at") - pl.col("started_at")),
    ("tracekit_job_last_window_timestamp_seconds", "When the newest window was stored, Unix time", pl.col("added_at")),
)  # fmt: skip
#: Counters, without their `_total`.
_COUNTERS = (
    ("tracekit_job_windows", "Windows stored", pl.col("windows")),
    ("tracekit_job_lost_gpu_seconds", "GPU time lost in the windows stored",
     pl.col("lost_gpu_hours") * _GPU_SECONDS_PER_GPU_HOUR),
    ("tracekit_job_dropped_records", "Records that recorders dropped because their ring was full",
     pl.col("dropped_records")),
)  # fmt: skip
#: A client that has not scraped for this many of its intervals has stopped.
INTERVALS = 2.0
#: A client's interval is the longest of its last gaps, this many: one late scrape makes the next one look early.
GAPS = 5
#: The longest wait for all clients, seconds.
LONGEST_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class JobStates:
    """One state of a store. `jobs`: as `LiveTables.live_jobs`; `incidents`: the open ones of running jobs."""

    jobs: pl.DataFrame
    incidents: tuple[Incident, ...]

    @classmethod
    def of(cls, store: Store) -> JobStates:
        """The store as it is now. Raises StoreError."""
        with store.reading() as catalogue:
            return cls(catalogue.live.live_jobs(), catalogue.live.incidents(only_open=True))


class StoreMetrics(Collector):
    """All figures at the time of the scrape. `page`: address of the dashboard, "" if there is none."""

    def __init__(self, states: Callable[[], JobStates], page: str = "") -> None:
        self._states, self._page = states, page.rstrip("/")

    def collect(self) -> Iterator[Metric]:
        """Yield one family per figure; if the store cannot be read, only `tracekit_store_readable`."""
        readable = GaugeMetricFamily("tracekit_store_readable", "1 if the store could be read, else 0")
        try:
            states = self._states()
        except TracekitError:
            readable.add_metric([], 0)
            yield readable
            return
        readable.add_metric([], 1)
        yield readable
        yield from _job_metrics(states.jobs)
        yield from _incident_metrics(states.incidents, self._page)


def _job_metrics(jobs: pl.DataFrame) -> Iterator[Metric]:
    total = GaugeMetricFamily("tracekit_jobs", "Jobs in the store", labels=["analysed"])
    analysed = jobs["slowdown"].drop_nulls().len()
    total.add_metric(["yes"], analysed)
    total.add_metric(["no"], jobs.height - analysed)
    yield total
    for kind, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for metric, says, expression in figures:
            family = kind(metric, says, labels=[LABEL])
            for name, value in (
                jobs.select("name", expression.cast(pl.Float64).alias("value")).drop_nulls("value").iter_rows()
            ):
                family.add_metric([name], value)
            yield family
    info = InfoMetricFamily("tracekit_job", "What the scheduler says of the job, and its labels", labels=[LABEL])
    for name, metadata in jobs.select("name", "metadata").iter_rows():
        info.add_metric([name], _identity(metadata))
    yield info
    verdicts = GaugeMetricFamily(
        "tracekit_job_verdict", "1 for the kind of loss that costs most", labels=[LABEL, "verdict"]
    )
    for labels in jobs.select("name", "verdict").drop_nulls("verdict").iter_rows():
        verdicts.add_metric(labels, 1)
    yield verdicts


def _identity(metadata: str) -> dict[str, str]:
    """The labels of the series that says which job of the scheduler this is."""
    labels = {key: value for key, value in json.loads(metadata).items() if isinstance(value, str)}
    return {key: _label(value) for key, value in labels.items() if key in VARIABLES.values() or _IS_LABEL.match(key)}


def _incident_metrics(incidents: Sequence[Incident], page: str) -> Iterator[Metric]:
    labels = [LABEL, "incident", "cause", "part"]
    lost = GaugeMetricFamily(
        "tracekit_incident_lost_ratio", "Share of the step that the cause of an open incident costs", labels=labels
    )
    windows = GaugeMetricFamily(
        "tracekit_incident_windows", "Windows from the first to the last that shows it; 0 for a hang", labels=labels
    )
    info = InfoMetricFamily("tracekit_incident", "An open incident in words", labels=[LABEL, "incident"])
    costliest = _costliest(incidents)
    for incident in costliest:
        cause, identity = incident.cause, [incident.job, str(incident.incident_id)]
        values = [*identity, cause.kind, cause.part or cause.kind]
        lost.add_metric(values, cause.share)
        windows.add_metric(values, incident.windows)
        address = page_of(incident, page)  # in full: a link that is cut off leads nowhere
        texts = {name: _label(text) for name, text in incident_texts(incident, page).items()}
        info.add_metric(identity, {**texts, "page": address})
    left_out = GaugeMetricFamily(
        "tracekit_incidents_left_out",
        "Open incidents without series, because others cost more",
        len(incidents) - len(costliest),
    )
    yield from (lost, windows, info, left_out)


def _costliest(incidents: Sequence[Incident]) -> list[Incident]:
    """Return the incidents that get series: the costliest of every job first, then the second of every job, etc."""
    ranked: list[tuple[int, Incident]] = []
    counts: dict[str, int] = {}
    for incident in sorted(incidents, key=lambda pair: -pair.cause.share):
        place = counts[incident.job] = counts.get(incident.job, 0) + 1
        if place <= MOST_INCIDENTS:
            ranked.append((place, incident))
    ranked.sort(key=lambda pair: pair[0])
    return [incident for _, incident in ranked[:MOST_INCIDENTS_IN_ALL]]


def _label(text: str) -> str:
    label = printable(text)
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 3]}..."


def remembered(store: Store) -> Callable[[], JobStates]:
    """Return a function that returns the state of a store, and rereads it only if it has changed."""
    cached: list[tuple[str, JobStates]] = []

    def states() -> JobStates:
        state = store.state()
        if not cached or cached[0][0] != state:
            cached[:] = [(state, JobStates.of(store))]
        return cached[0][1]

    return states


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
            failed = {"analysis": counts.failed, "storing": run.queue.lost}
            without = "Windows that are stored without findings: the analysis failed"
            figures = [
                ("windows_failed", "Windows that are not in the store", "reason", failed),
                ("windows_unanalysed", without, "", {"": counts.unanalysed}),
                ("ranks_left_out", "Ranks whose segments are unusable", "", {"": counts.left_out}),
                ("late_records", "Records of steps that were stored before", "", {"": counts.late_records}),
            ]
        if notifier is not None:
            says = "Messages to --notify, by what became of them"
            figures.append(("notifications", says, "outcome", notifier.counts))
        for name, says, label, values in figures:
            family = CounterMetricFamily(f"tracekit_watch_{name}", says, labels=[label] if label else [])
            for value, count in values.items():
                family.add_metric([value] if label else [], count)
            yield family


@dataclass(slots=True)
class Scrapes:
    """`last`: when each address scraped last, on the monotonic clock; `gaps`: between its last scrapes, seconds.

    Unless Prometheus scrapes the end of the job, it cannot distinguish the end of the watch from a kill.
    """

    last: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, deque[float]] = field(default_factory=dict)
    _asked: threading.Condition = field(default_factory=threading.Condition)

    def note(self, address: str, asked_at: float) -> None:
        """Note that a scrape of `asked_at` has been answered."""
        with self._asked:
            if address in self.last:
                self.gaps.setdefault(address, deque(maxlen=GAPS)).append(asked_at - self.last[address])
            self.last[address] = asked_at
            self._asked.notify_all()

    def wait_for_all(self, stop: threading.Event) -> None:
        """Wait until every regular client has scraped again or has stopped, or `stop` is set."""
        since = time.monotonic()
        with self._asked:
            while not stop.is_set() and (remaining_s := self._patience(since, time.monotonic())) > 0:
                self._asked.wait(min(remaining_s, 0.5))  # a signal sets `stop` without notifying the condition

    def _patience(self, since: float, now: float) -> float:
        """Longest time that clients without a scrape since `since` may still take, seconds; 0 if there are none."""
        due = [self.last[job] + INTERVALS * max(gaps) for job, gaps in self.gaps.items() if self.last[job] < since]
        return max(0.0, min(max(due, default=now), since + LONGEST_WAIT_S) - now)


@contextmanager
def serving_metrics(host: str, port: int, store: Store, watch: Watch, page: str) -> Iterator[tuple[int, Scrapes]]:
    """Serve /metrics meanwhile; yields the port and the scrapes. Raises SelectionError if the port cannot be used."""
    registry, scrapes = CollectorRegistry(), Scrapes()
    for collector in (StoreMetrics(remembered(store), page), WatchMetrics(watch)):
        registry.register(collector)

    def answer(environment: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        asked_at = time.monotonic()
        body = generate_latest(registry)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST), ("Content-Length", str(len(body)))])
        yield body
        # Only now: the watch must not end until the answer is sent.
        scrapes.note(str(environment.get("REMOTE_ADDR")), asked_at)

    try:
        server, thread = start_http_server(port, host)
    except (OSError, OverflowError) as error:
        raise SelectionError(f"cannot listen on {host}, port {port}: {error}; choose another --metrics-port") from None
    assert isinstance(server, WSGIServer)
    server.set_app(answer)
    try:
        yield int(server.server_port), scrapes
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
