"""Metrics are made of what is stored: base units, a bounded number of series, and what a person needs of incidents."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.handmade import slow_trace
from tests.test_incidents import LATE, SLOW
from tests.test_store_windows import window
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.live import metrics
from tracekit.live.metrics import MOST_INCIDENTS, JobStates, StoreMetrics, WatchMetrics, remembered
from tracekit.store import Incident, Incoming, Store

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "jobs.store")


def samples(states: Any, page: str = "") -> list[Any]:
    text = generate_latest(StoreMetrics(states, page)).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(store: Store, name: str, **labels: str) -> float:
    (found,) = [one for one in samples(remembered(store)) if one.name == name and labels.items() <= one.labels.items()]
    return float(found.value)


@pytest.mark.slow
def test_figures_of_a_job_are_those_of_its_newest_window_and_counters_add_up_all(store: Store) -> None:
    store.append(window(0, analysed=True))
    store.append(window(1, analysed=True))
    row = store.job_list().row(0, named=True)
    assert value(store, "tracekit_job_slowdown_ratio") == pytest.approx(15.5 / 13.5)
    assert value(store, "tracekit_job_step_seconds") == pytest.approx(15.5)
    assert value(store, "tracekit_job_windows_total") == 2
    # two windows of two steps on 4 GPUs, each of which loses 3.5 s beside peers that are fast
    assert value(store, "tracekit_job_lost_gpu_seconds_total") == pytest.approx(2 * 3600 * row["lost_gpu_hours"])
    assert value(store, "tracekit_job_verdict", verdict="straggler") == 1
    assert value(store, "tracekit_job_last_window_timestamp_seconds") == pytest.approx(row["imported_at"])
    assert value(store, "tracekit_job_watched") == 0
    store.begin_watch("live", "torchrun")
    assert value(store, "tracekit_job_watched") == 1
    store.end_watch("live")
    assert value(store, "tracekit_job_watched") == 0


def test_what_is_missing_and_dropped_is_counted(store: Store) -> None:
    trace = slow_trace(metadata={"missing_ranks": [7, 9], "dropped_records": 12})
    store.append(Incoming(trace, "live", "x", PipelineJob(trace).stored()))
    assert value(store, "tracekit_job_ranks_missing") == 2
    assert value(store, "tracekit_job_dropped_records_total") == 12


def test_an_open_incident_has_what_a_person_needs_and_a_closed_one_nothing(store: Store) -> None:
    store.append(window(0, analysed=True))
    (incident,) = store.incidents()
    labels = {"training_job": "live", "incident": "1", "cause": "bad-worker", "part": "compute"}
    assert value(store, "tracekit_incident_lost_ratio", **labels) == pytest.approx(incident.cause.share)
    assert value(store, "tracekit_incident_windows", **labels) == 1
    (info,) = [one for one in samples(remembered(store), "https://dash/") if one.name == "tracekit_incident_info"]
    said = incident.cause
    assert (info.labels["what"], info.labels["who"], info.labels["check"]) == (said.what, said.who, said.check)
    assert info.labels["page"] == "https://dash/job?job=live&window=0"
    store.end_watch("live")
    assert not [one for one in samples(remembered(store)) if one.name.startswith("tracekit_incident_")]


def test_a_job_with_many_incidents_has_series_for_the_costliest(store: Store) -> None:
    """Never one per worker, whatever goes wrong."""
    store.append(window(0))
    jobs = JobStates.of(store).jobs
    many = tuple(
        Incident(number, "live", structs.replace(SLOW, ranks=(number,), share=number / 1000), NOON, 0, 0)
        for number in range(1, 1000)
    )
    other = Incident(1000, "other", LATE, NOON, 0, 0)
    found = [one for one in samples(lambda: JobStates(jobs, (*many, other))) if one.name == "tracekit_incident_info"]
    shown = [(one.labels["training_job"], int(one.labels["incident"])) for one in found]
    assert sorted(shown) == [("live", 1000 - place) for place in range(MOST_INCIDENTS, 0, -1)] + [("other", 1000)]


def test_all_jobs_together_have_a_bounded_number_of_series(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two jobs with two incidents each, three may be told: the costliest of each job, then that of the rest."""
    monkeypatch.setattr(metrics, "MOST_INCIDENTS_IN_ALL", 3)
    store.append(window(0))
    shares = {1: ("one", 0.9), 2: ("one", 0.8), 3: ("two", 0.1), 4: ("two", 0.05)}
    many = tuple(
        Incident(number, job, structs.replace(SLOW, share=share), NOON, 0, 0) for number, (job, share) in shares.items()
    )
    found = samples(lambda: JobStates(JobStates.of(store).jobs, many))
    assert {one.labels["incident"] for one in found if one.name == "tracekit_incident_info"} == {"1", "2", "3"}
    assert [one.value for one in found if one.name == "tracekit_incidents_left_out"] == [1]


def test_a_job_may_have_any_name(store: Store) -> None:
    store.append(replace(window(0, analysed=True), name='a "job"\\ of\nmine'))
    assert value(store, "tracekit_job_windows_total", training_job='a "job"\\ of\nmine') == 1


def test_the_link_of_an_incident_is_whole_however_long_the_name_of_its_job(store: Store) -> None:
    name = "\N{GREEK SMALL LETTER PI}" * 300
    store.append(replace(window(0, analysed=True), name=name))
    (info,) = [one for one in samples(remembered(store), "https://dash") if one.name == "tracekit_incident_info"]
    assert info.labels["page"] == f"https://dash/job?job={'%CF%80' * 300}&window=0"


def test_a_store_that_cannot_be_read_is_a_metric(store: Store) -> None:
    found = samples(remembered(store))
    assert [(one.name, one.value) for one in found] == [("tracekit_store_readable", 0)]


def test_names_and_units_are_prometheus_own(store: Store) -> None:
    store.append(window(0, analysed=True))
    for family in text_string_to_metric_families(generate_latest(StoreMetrics(remembered(store))).decode()):
        assert family.name.startswith("tracekit_")
        assert family.documentation
        assert (family.type == "counter") == all(one.name.endswith("_total") for one in family.samples)
        assert not family.name.endswith(("_ms", "_hours", "_percent", "_minutes"))


def test_what_a_watch_lost_is_counted_by_what_became_of_it() -> None:
    counts = SimpleNamespace(failed=1, unanalysed=2, left_out=3, late_records=4)
    run = SimpleNamespace(counts=counts, queue=SimpleNamespace(lost=5))
    for watch, expected in (
        (SimpleNamespace(run=None, notifier=None), []),
        (
            SimpleNamespace(run=run, notifier=SimpleNamespace(counts={"sent": 6})),
            [
                ("windows_failed", {"reason": "analysis"}, 1),
                ("windows_failed", {"reason": "storing"}, 5),
                ("windows_unanalysed", {}, 2),
                ("ranks_left_out", {}, 3),
                ("late_records", {}, 4),
                ("notifications", {"outcome": "sent"}, 6),
            ],
        ),
    ):
        found = [sample for family in WatchMetrics(watch).collect() for sample in family.samples]
        names = [(f"tracekit_watch_{name}_total", labels, count) for name, labels, count in expected]
        assert [(one.name, one.labels, one.value) for one in found] == names
