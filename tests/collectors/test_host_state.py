"""What the kernel counts where a rank runs: read, recorded, and a witness of the job's diagnosis."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tests.cases import case
from tests.collectors.conftest import collect, forks
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.collectors.record import machine_state
from tracekit.collectors.record.machine_state import Sampler, host_reader, throttled_us, waited_us
from tracekit.trace.facts import SAMPLED

PRESSURE = "node_pressure_cpu_waiting_seconds_total"
#: By so much, the wall clock may be set while a job runs whose samples are timed by the monotonic one.
WALL_CLOCK_S = 1.0


def waiting(total_us: int) -> str:
    return f"some avg10=0.12 avg60=0.00 avg300=0.00 total={total_us}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"


def test_totals_are_read_from_both_versions_of_cgroups() -> None:
    assert waited_us(waiting(16_964_277_869)) == 16_964_277_869
    assert throttled_us("usage_usec 5\nnr_periods 3\nnr_throttled 1\nthrottled_usec 70\n") == 70
    assert throttled_us("nr_periods 33\nnr_throttled 27\nthrottled_time 784659643\n") == 784_659
    for text in ("", "usage_usec 5\n", "some avg10=0.00"):
        with case(text), pytest.raises((ValueError, LookupError)):
            throttled_us(text)


def test_the_own_cgroup_comes_before_the_host_and_what_is_not_counted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group counts CPU and memory alone; the limit is in a group of version 1; nothing at all samples nothing."""
    group, limit, host = tmp_path / "group", tmp_path / "limit", tmp_path / "host"
    for folder in (group, limit, host):
        folder.mkdir()
    (group / "cpu.pressure").write_text(waiting(10))
    (group / "memory.pressure").write_text(waiting(30))
    (limit / "cpu.stat").write_text("nr_periods 1\nthrottled_time 5000\n")
    for resource in ("cpu", "io"):
        (host / resource).write_text(waiting(99))
    monkeypatch.setattr(machine_state, "_HOST_PRESSURE", host)
    facts = list[dict[str, Any]]()

    def sampled(*folders: Path) -> object:
        monkeypatch.setattr(machine_state, "cgroup_folders", lambda: iter(folders))
        read = host_reader(facts.append)
        return None if read is None else read()

    assert sampled(limit, group) == [10, None, 30, 5]
    assert sampled(limit) == [99, 99, None, 5]
    assert [fact["pressure"] is None for fact in facts] == [False, True]
    assert facts[0]["limit"] == facts[1]["limit"] != facts[0]["pressure"]
    for file in host.iterdir():
        file.unlink()
    assert sampled() is None


def test_a_reader_that_fails_ends_the_samples_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = iter([1, 2])

    sampler = Sampler(tmp_path / "rank-000001.host", 0.0, lambda: lambda: [next(answers)])
    sampler.begin()
    assert sampler._thread is not None
    sampler._thread.join()
    sampler.close()
    samples = [json.loads(line)[1] for line in (tmp_path / "rank-000001.host").read_text().splitlines()]
    assert (samples, capfd.readouterr()) == ([1, 2], ("", ""))


def test_this_process_has_cgroups_or_is_on_a_kernel_without() -> None:
    assert all(folder.is_absolute() for folder in machine_state.cgroup_folders())


@pytest.mark.slow
def test_pressure_is_recorded_of_the_rank_that_waits_for_its_core(tmp_path: Path) -> None:
    """Rank 0 never waits; before step n, rank 1 has waited for n ms. Step 0 and the last are sampled."""
    recorded = collect(tmp_path, forks(2, "pressed.py"))
    sampled = recorded.trace.metadata[SAMPLED][PRESSURE]
    host = recorded.trace.hosts[0]
    assert {name: series["ranks"] for name, series in sampled.items()} == {f"{host}:rank {at}": [at] for at in (0, 1)}
    assert set(sampled[f"{host}:rank 0"]["value"]) == {0.0}
    time, value = (sampled[f"{host}:rank 1"][name] for name in ("time", "value"))
    assert value == sorted(value)
    assert {0.0, 0.003} <= set(value) <= {0.0, 0.001, 0.002, 0.003}
    (said,) = re.findall(r"from (\S+) to (\S+)", recorded.process.stdout)
    began_s, ended_s = map(float, said)
    assert time == sorted(time)
    assert began_s - WALL_CLOCK_S < time[0] <= time[-1] < ended_s + WALL_CLOCK_S


def test_recorded_pressure_confirms_what_slows_a_rank_down() -> None:
    """Rank 1 waits for a core for 0.4 of the second half, in which computes take 1 / (1 - 0.4) of the usual time."""
    began_s = 1.7e9
    time = np.arange(0.0, 60.0, 0.1)
    values = {"n0:rank 0": np.zeros(len(time)), "n0:rank 1": 0.4 * np.maximum(time - 30.0, 0.0)}
    sampled = {
        name: {"time": (began_s + time).tolist(), "value": value.tolist(), "ranks": [rank]}
        for rank, (name, value) in enumerate(values.items())
    }
    slower = [(kind, took_s / (1 - 0.4)) for kind, took_s in (FORWARD, BACKWARD)]
    job = replace(
        data_parallel_job([[FORWARD, BACKWARD], slower], steps=8),
        metadata={"hosts": {"0": "n0", "1": "n0"}, SAMPLED: {PRESSURE: sampled}},
        step_starts={step: began_s + 31.0 + 3.5 * step for step in range(8)},
    )
    report = PipelineJob(job).report
    assert report.metrics
    (test,) = report.metrics.tests
    assert (test.host, test.verdict, test.metric) == ("n0:rank 1", "confirmed", PRESSURE)
    assert "by metrics: processes waiting for a CPU" in (report.answer.why or "")
