"""What metrics say of a culprit stands in its words, and decides whether hardware is blamed."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from judges.kinetosim import Job, Trouble
from tests.analysis.gpu.jobs import loaded
from tests.analysis.metrics.fleet import BEGAN, CLOCK, RATE, Fault, fleet
from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tests.handmade import run
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.metrics.samples import TimeSpan
from tracekit.base.errors import FormatError
from tracekit.report.conclusions import nodes_of
from tracekit.report.findings import Findings
from tracekit.report.hardware import MetricVerdict
from tracekit.report.report import Report
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import SAMPLED

#: Rank 3 of eight, each on a node of its own, takes 1.5 times as long, from 300 s to 540 s of the fleet.
JOB = replace(
    data_parallel_job(
        [
            [FORWARD, BACKWARD] if rank != 3 else [("forward-compute", 0.15), ("backward-compute", 0.3)]
            for rank in range(8)
        ],
        steps=8,
    ),
    metadata={"hosts": {str(rank): f"NODE-{rank:02}.cluster.local" for rank in range(8)}},
    step_starts={step: BEGAN + 300 + 30 * step for step in range(8)},
)
LOW_CLOCK = Fault(3, "compute", 0.5, 300, 540)
PRESSURE = Fault(3, "process", 0.5, 300, 540)


class Given:
    """Samples as a source."""

    name = "samples"

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame, self.asked = frame, list[Any]()

    def samples(
        self, metrics: Collection[str] | None, window: TimeSpan | None, hosts: Collection[str] | None
    ) -> pl.DataFrame:
        self.asked.append((metrics, window, hosts))
        return self.frame


class Broken(Given):
    """A server that is down."""

    def samples(self, *_: object) -> pl.DataFrame:
        raise FormatError("http://prometheus: no answer within 30 s")


def reported(*faults: Fault, trace: Trace = JOB) -> Report:
    return PipelineJob(trace).whatif(metrics=Given(fleet(1, *faults, hosts=8)))


def test_a_confirmed_clock_is_told_everywhere_and_its_node_may_be_swapped() -> None:
    report = reported(LOW_CLOCK)
    (test,) = report.metrics.tests if report.metrics else ()
    assert (test.verdict, test.host, test.device) == (MetricVerdict.CONFIRMED, "NODE-03.cluster.local", "0")
    assert (test.shows, test.predicts) == (pytest.approx(0.5), pytest.approx(0.5, abs=0.05))
    assert test.sentence.startswith("confirmed by metrics: SM clock 1,")
    told = (report.answer.why, report.answer.accounts[0].why, report.findings[0].effect)
    assert all(words is not None and words.endswith(test.sentence) for words in told)
    assert [remark.words for remark in report.remarks if remark.name == "Metrics"] == [test.sentence]
    assert report.answer.action is not None
    assert report.answer.action.startswith("Swap NODE-03.cluster.local for a spare, because metrics confirm")
    assert nodes_of(report.answer.culprits, trusted=True).drain == ("NODE-03.cluster.local",)


def test_a_clock_as_that_of_its_peers_blames_no_hardware_though_the_recording_does() -> None:
    gpus = {str(rank): {"model": "H100", "sm_mhz": {"median": 1900.0}, "reasons": {}} for rank in range(8)}
    gpus["3"] = {"model": "H100", "sm_mhz": {"median": 1200.0}, "reasons": {"hw-slowdown": 1.0}}
    trace = replace(JOB, metadata={**JOB.metadata, "gpus": gpus})
    throttled = PipelineJob(trace).report
    assert throttled.answer.action is not None
    assert throttled.answer.action.startswith("Swap ")
    report = reported(trace=trace)
    assert report.answer.action is not None
    assert report.answer.action.startswith("Profile rank 3 on NODE-03.cluster.local and a peer")
    assert "refuted by metrics: SM clock 1," in (report.answer.why or "")
    assert nodes_of(report.answer.culprits, trusted=True).drain == ()


def test_a_wrong_cause_is_corrected_and_a_busy_cpu_is_no_broken_machine() -> None:
    report = reported(PRESSURE)
    assert "corrected, not the SM clock by metrics: processes waiting for a CPU " in (report.answer.why or "")
    assert report.answer.action is not None
    assert report.answer.action.startswith("Stop what else runs on the cores of NODE-03.cluster.local")
    assert nodes_of(report.answer.culprits, trusted=True).drain == ()


def test_what_cannot_be_tested_names_the_line_to_add_and_advice_stays() -> None:
    without = fleet(1, LOW_CLOCK, hosts=8).filter(pl.col("metric") != CLOCK)
    report = PipelineJob(JOB).whatif(metrics=Given(without))
    why = report.answer.why or ""
    assert (
        "NODE-03.cluster.local not testable with these metrics: node-03 has no samples of DCGM_FI_DEV_SM_CLOCK" in why
    )
    assert why.endswith("add to dcgm-exporter: DCGM_FI_DEV_SM_CLOCK, gauge, SM clock frequency (in MHz).")
    assert report.answer.action == PipelineJob(JOB).report.answer.action


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        (replace(JOB, step_starts={}), "does not say at what time of day it was recorded"),
        (
            replace(
                JOB, metadata={**JOB.metadata, "gpus": {str(rank): {"uuid": f"GPU-{rank // 2}"} for rank in range(8)}}
            ),
            "two ranks compute on one GPU",
        ),
    ],
)
def test_traces_that_no_metric_can_confirm_say_so(trace: Trace, why: str) -> None:
    report = reported(LOW_CLOCK, trace=trace)
    assert report.metrics
    assert [test.verdict for test in report.metrics.tests] == [MetricVerdict.NOT_TESTABLE]
    assert why in report.metrics.tests[0].sentence


HOT = {"hw-thermal-slowdown": 0.9}


@pytest.mark.parametrize(
    ("own_mhz", "reasons", "verdict", "does"),
    [
        (1300, None, "confirmed", "Swap NODE-03"),
        (1300, HOT, "confirmed", "Swap NODE-03"),
        (1300, {}, "confirmed", "Raise the GPU clocks of rank 3 on NODE-03"),
        (1950, HOT, "refuted", "Profile rank 3 on NODE-03"),
    ],
)
def test_clocks_that_were_sampled_while_the_job_was_recorded_are_a_source(
    own_mhz: int, reasons: dict[str, float] | None, verdict: str, does: str
) -> None:
    """Eight GPUs, each a peer of the others; the recording is all there is, so that none has another past. A low clock
    that the GPU gives no fault as a reason for is a setting.
    """
    times = [BEGAN + 300 + 2.0 * at for at in range(110)]

    def gpu(rank: int) -> dict[str, Any]:
        mhz = [own_mhz if rank == 3 else 1950 + 15 * ((at + rank) % 3 - 1) for at in range(110)]
        return {"ranks": [rank], "time": times, "value": mhz}

    def report_on(series: dict[str, Any]) -> Report:
        sampled = {SAMPLED: {CLOCK: series, "x": 1, RATE: {"y": 2}}}
        if reasons is not None:
            sampled["gpus"] = {
                str(rank): {"model": "H100", "reasons": reasons if rank == 3 else {}} for rank in range(8)
            }
        return PipelineJob(replace(JOB, metadata={**JOB.metadata, **sampled})).report

    series = {f"NODE-{rank:02}:rank {rank}": gpu(rank) for rank in range(8)}
    report = report_on(series | {"x": {"ranks": [9], "time": "x"}})
    assert report.metrics
    (test,) = report.metrics.tests
    assert (test.host, test.verdict) == ("NODE-03:rank 3", verdict)
    assert report.answer.action is not None
    assert report.answer.action.startswith(does)
    assert report.answer.culprits[0].hardware is does.startswith("Swap")
    few = dict(list(series.items())[2:4])
    assert not report_on(few).metrics  # nothing to compare with, so nothing is said


@pytest.mark.slow
def test_a_recording_of_gpus_is_tested_at_the_time_of_day_at_which_it_was_made(tmp_path: Path) -> None:
    """The GPU of rank 3 takes 1.3 times as long, in a recording of 24 s that begins at `BEGAN`."""
    recording = Job(ranks=6, layers=6, bucket=2, host_us=30.0, seed=3, troubles=(Trouble(3, gpu=1.3),)).run()
    slowed = 24e6 / recording.took_us
    for rank in range(6):
        document = recording.document(rank)
        events = [
            one | {name: slowed * one[name] for name in ("ts", "dur") if name in one} for one in document["traceEvents"]
        ]
        named = {"traceName": f"NODE-{rank:02}_1.2.pt.trace.json", "traceEvents": events}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document | named))
    source = Given(fleet(1, Fault(3, "compute", 0.3, 0, 60), hosts=6))
    report = loaded(tmp_path).whatif(metrics=source)
    assert report.metrics
    (test,) = report.metrics.tests
    assert (test.host, test.verdict, test.device) == ("NODE-03", "confirmed", "0")
    assert test.shows == pytest.approx(0.3, abs=0.01)
    ((_, window, _),) = source.asked
    assert BEGAN < window.since < BEGAN + 24 < window.until + 1 < BEGAN + 60


def test_only_the_hosts_and_the_time_of_the_job_are_asked_for_and_a_healthy_job_asks_nothing() -> None:
    source = Given(fleet(1, LOW_CLOCK, hosts=8))
    PipelineJob(JOB).whatif(metrics=source)
    ((_, window, hosts),) = source.asked
    assert (window.since, hosts) == (BEGAN + 300, {*JOB.metadata["hosts"].values()})
    assert BEGAN + 510 < window.until < BEGAN + 512
    healthy = Given(source.frame)
    report = PipelineJob(data_parallel_job([[FORWARD, BACKWARD]] * 4)).whatif(metrics=healthy)
    assert report.metrics
    assert (report.metrics.tests, healthy.asked) == ([], [])


def test_a_window_whose_metrics_cannot_be_read_is_stored_with_its_findings() -> None:
    stored = PipelineJob(JOB).stored(metrics=Broken(pl.DataFrame()))
    assert isinstance(stored, Findings)
    assert "not testable with these metrics: http://prometheus: no answer" in stored.report.answer.accounts[0].why
    assert stored.report.metrics
    assert stored.report.metrics.problem == "http://prometheus: no answer within 30 s"


def test_the_command_prints_the_report_even_if_nothing_can_be_read(tmp_path: Path) -> None:
    JOB.write_parquet(tmp_path / "job.parquet")
    fleet(1, LOW_CLOCK, hosts=8).write_parquet(tmp_path / "metrics.parquet")
    asked = run("whatif", tmp_path / "job.parquet", "--metrics", tmp_path / "metrics.parquet", "--json")
    assert json.loads(asked.out)["metrics"]["tests"][0]["verdict"] == "confirmed"
    shown = run("whatif", tmp_path / "job.parquet", "--metrics", tmp_path / "metrics.parquet")
    assert "Metrics" in shown.out
    down = run("whatif", tmp_path / "job.parquet", "--metrics", "http://127.0.0.1:1")
    assert (down.code, down.err) == (2, "tracekit: http://127.0.0.1:1: cannot be asked: Connection refused\n")
    assert "STRAGGLER" in down.out
    assert "not testable" in down.out
    absent = run("whatif", tmp_path / "job.parquet", "--metrics", tmp_path / "absent")
    assert (absent.code, absent.out) == (2, "")
    assert run("whatif", tmp_path / "job.parquet", "--redact", "--metrics", tmp_path / "metrics.parquet").code == 2
