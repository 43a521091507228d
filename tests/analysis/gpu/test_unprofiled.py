"""The step without the profiler, against jobs that run with and without the cost of recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from judges.kinetosim import Job
from tests.analysis.gpu.jobs import loaded
from tests.analysis.gpu.recorded_job import RecordedJob, recorded, run_together
from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tracekit.analysis.evidence.gpu_losses import lost_in_production_s
from tracekit.analysis.evidence.graph_subject import profiler_s
from tracekit.analysis.gpu.measured_steps import StepsOfRecording
from tracekit.analysis.numeric.statistics import Estimate
from tracekit.report.finding import LossKind

JOBS = {
    "host-bound": RecordedJob(),
    "recording costs 2 us an operator": RecordedJob(gap_us=0.8),
    "recording costs 7 us an operator": RecordedJob(gap_us=3.0),
    "host-bound as recorded, GPU-bound in production": RecordedJob(kernel_us=30),
    "GPU-bound": RecordedJob(kernel_us=80),
    "waits for the GPU after every fifth kernel": RecordedJob(waits=5, kernel_us=15),
    "stacks": RecordedJob(stacks=True),
    "a host that is slow at times": RecordedJob(units=120, slow=(1, 1.6, 1.6, 1, 1.6)),
}


def plain_step_us(job: RecordedJob) -> float:
    """The step of the same job without a profiler, microseconds."""
    return replace(job, gap_us=0.0, events=[]).run()


def report_on(folder: Path) -> dict[str, Any]:
    return loaded(folder).whatif().to_dict()


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_step_is_that_of_the_job_without_a_profiler(job, tmp_path):
    folder, recorded_us = recorded(tmp_path, replace(job, events=[]))
    found = report_on(folder)["gpu"]["unprofiled"]
    plain_us, step = plain_step_us(job), found["step_s"]
    assert step["value"] * 1e6 == pytest.approx(plain_us, rel=0.01)
    assert step["low"] <= plain_us * 1e-6 * 1.001 <= step["high"] * 1.002
    assert found["overhead_s"] == pytest.approx(found["profiled_step_s"] - step["value"])
    assert recorded_us == pytest.approx(plain_us) if job.kernel_us == 80 else recorded_us > 1.5 * plain_us


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if set(job.slow) == {1.0}])
def test_what_an_operator_costs_to_record_is_measured(name, tmp_path):
    """2.3 times the gap that shows: 4.6, 1.84 and 6.9 us."""
    job = replace(JOBS[name], events=[])
    found = report_on(recorded(tmp_path, job)[0])["gpu"]["unprofiled"]
    assert found["per_operator_s"] * 1e6 == pytest.approx(job.operator_us, rel=0.01)
    assert f"{job.operator_us:.1f} us an operator" in found["how"]


def test_without_stacks_the_interval_is_wider(tmp_path):
    """Of 1,104 us that recording adds to 800 us, 30 % either way; with stacks 20 % of 1,133 us."""
    widths = []
    for stacks in (False, True):
        folder, _ = recorded(tmp_path / str(stacks), RecordedJob(stacks=stacks))
        step = report_on(folder)["gpu"]["unprofiled"]["step_s"]
        widths.append((step["high"] - step["low"]) * 1e6)
    assert widths == pytest.approx([2 * 0.3 * 1104, 2 * 0.2 * 1132.8], rel=0.02)


def test_a_fix_saves_nothing_where_the_gpu_is_the_limit_without_the_profiler(tmp_path):
    """As recorded, dispatch costs 1,904 - 1,200 us a step; in production the GPU takes 1,200 us anyway."""
    folder, _ = recorded(tmp_path, RecordedJob(kernel_us=30))
    report = report_on(folder)
    dispatch = next(one for one in report["gpu"]["findings"] if one["reason"] == "launch-bound")
    assert dispatch["saves_s"] * 1e6 == pytest.approx(5 * (1904 - 1200), rel=0.05)
    assert dispatch["saves_step_s"]["value"] * 1e6 == pytest.approx(0, abs=3)
    assert report["verdict"]["kind"] != "host-bound"
    assert not [one for one in report["fixes"] if one["withheld"] is None and one["cause"] == "host-bound-launch"]


def test_sentences_are_about_the_step_without_the_profiler(tmp_path):
    folder, _ = recorded(tmp_path, RecordedJob())
    answer = report_on(folder)["answer"]
    assert answer["headline"].startswith(
        "without the profiler, a step takes about 800 us (1.9 ms as recorded); the GPU waits"
    )
    assert answer["cost"].startswith("about 640 us of every step of about 800 us without the profiler, ")
    assert answer["saves"].startswith("saves about 640 us a step without the profiler (about 800 us to 160 us")


def test_the_marker_of_a_step_is_no_function_of_the_job(tmp_path):
    """A step is 50 operators of 20 us with 80 us of Python after each, of which only the step's marker is known."""
    events = []
    for step in range(3):
        for at in range(step * 5000, (step + 1) * 5000, 100):
            row = len(events)
            events += [
                event("cpu_op", "aten::mm", at, 20),
                launch(at + 5, row),
                kernel(GEMM, at + 12, 10, correlation=row),
            ]
        events.append(event("user_annotation", f"ProfilerStep#{step}", step * 5000, 4990))
    write(tmp_path / "rank0.json", document(events))
    gpu = report_on(tmp_path)["gpu"]
    assert [one["name"] for one in gpu["findings"] if one["reason"] == "python"] == ["Python without a name"]
    assert "ProfilerStep" not in json.dumps(gpu["idle_by_reason"])


def test_an_interval_that_reads_as_nothing_is_left_out():
    assert Estimate(2.1451e-3, 2.1447e-3, 2.1456e-3).words == "2.1 ms"
    assert Estimate(2.1451e-3, 1.9447e-3, 2.1456e-3).words == "2.1 ms (1.9 ms to 2.1 ms)"


def test_what_waits_is_to_go_before_launches_that_need_it_gone(tmp_path):
    """A CUDA graph holds no waits: dispatch saves more, but only once the waits have gone."""
    folder, _ = recorded(tmp_path, RecordedJob(waits=5, kernel_us=15))
    report = report_on(folder)
    first, second = report["gpu"]["findings"][:2]
    assert (first["reason"], second["reason"]) == ("synchronise", "launch-bound")
    assert first["saves_step_s"]["value"] < second["saves_step_s"]["value"]
    saved_us = plain_step_us(JOBS["waits for the GPU after every fifth kernel"]) - plain_step_us(
        RecordedJob(kernel_us=15)
    )
    assert first["saves_step_s"]["value"] * 1e6 == pytest.approx(saved_us, rel=0.1)


def test_what_the_host_costs_does_not_depend_on_what_recording_costs(tmp_path):
    """Five steps of a host-bound job take 4.0 ms; recorded, 6.8, 9.5 and 11.8 ms: that more is the profiler's."""
    costs_us = []
    for gap_us in (0.8, 2.0, 3.0):
        job = RecordedJob(gap_us=gap_us, events=[])
        folder, recorded_us = recorded(tmp_path / str(gap_us), job)
        subject = loaded(folder).evidence
        assert profiler_s(subject) * 1e6 == pytest.approx(5 * (recorded_us - plain_step_us(job)), rel=0.01)
        costs_us.append(lost_in_production_s(subject)[LossKind.HOST] * 1e6)
    assert costs_us == pytest.approx([costs_us[0]] * 3, rel=0.01)
    assert costs_us[0] > 2000


def test_several_ranks_lose_what_their_profiler_cost(tmp_path):
    """Rank 1 has half as much work again; recording costs its host more, too, and rank 0 waits for it."""
    jobs = [RecordedJob(units=units, work_us=30) for units in (40, 60)]
    plain = [replace(one, gap_us=0.0, events=[]) for one in jobs]
    recorded_us, plain_us = (float(np.median(run_together(each))) for each in (jobs, plain))
    for rank, one in enumerate(jobs):
        write(tmp_path / f"rank{rank}.json", document(one.events, rank))
    report = report_on(tmp_path)
    assert len(report["gpus"]) == 2
    for gpu in report["gpus"]:
        found = gpu["unprofiled"]
        assert found["profiled_step_s"] * 1e6 == pytest.approx(recorded_us, rel=0.02)
        assert found["step_s"]["value"] * 1e6 == pytest.approx(plain_us, rel=0.05)


def test_a_rank_that_only_its_recording_slows_is_not_blamed(tmp_path):
    """Rank 0 alone records stacks, which cost its host 48 us of 88 a unit; without the profiler both take 800 us."""
    jobs = [RecordedJob(stacks=stacks, function_gap_us=40.0) for stacks in (True, False)]
    run_together(jobs)
    for rank, one in enumerate(jobs):
        write(tmp_path / f"rank{rank}.json", document(one.events, rank))
    report = report_on(tmp_path)
    assert report["verdict"]["kind"] != "straggler"
    assert not report["trust"]["trustworthy"]
    assert "recording stacks alone slows a host" in report["trust"]["reasons"][0]
    assert report["gpus"][0]["unprofiled"]["step_s"]["value"] * 1e6 == pytest.approx(880, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "host_us"), [(1, 40.0), (2, 40.0), (2, 6.0)])
def test_simulated_jobs_take_as_long_as_without_recording(ranks, host_us, tmp_path):
    """Host-bound, with and without a rank that waits for another one; and as long as the GPU takes."""
    job = Job(ranks=ranks, steps=5, host_us=host_us, seed=81, recording_us=1.5)
    plain_us = replace(job, recording_us=0.0, call_us=job.call_us / 2).run().took_us / 5
    job.run().write(tmp_path)
    report = report_on(tmp_path)
    step = (report.get("gpus") or [report["gpu"]])[0]["unprofiled"]["step_s"]
    assert step["value"] * 1e6 == pytest.approx(plain_us, rel=0.02)


def test_times_in_whole_microseconds_are_averaged(tmp_path):
    """A gap of 0.7 us is recorded as 0 or 1, and so is all that is short."""
    job = RecordedJob(units=200, gap_us=0.7, work_us=20.3)
    plain_us, _ = plain_step_us(job), job.run()
    rounded = [
        {**one, "ts": float(int(one["ts"])), "dur": float(int(one["ts"] + one["dur"]) - int(one["ts"]))}
        for one in job.events
    ]
    write(tmp_path / "rank0.json", document(rounded, world=1))
    found = report_on(tmp_path)["gpu"]["unprofiled"]
    assert found["step_s"]["value"] * 1e6 == pytest.approx(plain_us, rel=0.1)


def test_too_few_operators_tell_nothing(tmp_path):
    events = [
        event("cpu_op", "aten::mm", 0, 12), launch(5, 1), kernel(GEMM, 20, 100, correlation=1),
        event("cpu_op", "aten::mm", 30, 12), launch(35, 2), kernel(GEMM, 300, 100, correlation=2),
    ]  # fmt: skip
    write(tmp_path / "rank0.json", document(events, world=1))
    report = report_on(tmp_path)
    assert report["gpu"]["unprofiled"] is None
    assert "too few" in report["gpu"]["unprofiled_reason"]
    assert all(one["saves_step_s"] is None for one in report["gpu"]["findings"])
    assert "profiler" not in report["answer"]["headline"]


def test_a_stored_recording_gives_the_same_step(tmp_path):
    """What recording cost is in the op trace that a store keeps."""
    from tracekit.analysis.job.graph import GraphJob

    folder, _ = recorded(tmp_path, RecordedJob())
    job = loaded(folder)
    again = GraphJob(job.trace)
    assert again.evidence.unprofiled_step == job.evidence.unprofiled_step


def test_a_step_begins_when_the_gpu_is_done_with_the_one_before():
    """A GPU works until 30 on what was launched before; steps end at 70 and 90, though hosts begin them at 0 and 10."""
    marked = pl.Series([None, 1, 1, 2, 2, None], dtype=pl.Int32)
    start, end = np.array([5.0, 0.0, 30.0, 10.0, 70.0, 95.0]), np.array([30.0, 10.0, 70.0, 20.0, 90.0, 99.0])
    on_gpu = np.array([True, False, True, False, True, False])
    steps = StepsOfRecording.of(marked, start, on_gpu, np.zeros(6))
    assert steps.lengths_s(start, end).tolist() == [40.0, 20.0]
