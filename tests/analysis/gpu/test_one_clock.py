"""Recordings whose times cannot be those of one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.analysis.gpu.jobs import loaded
from tests.analysis.gpu.recorded_job import RecordedJob
from tests.kineto_files import document, write
from tracekit.report.report import Report


def events() -> list[dict[str, Any]]:
    """Five host-bound steps of 1,904 us, 40 kernels each."""
    job = RecordedJob()
    job.run()
    return job.events


def report_on(folder: Path, events: list[dict[str, Any]]) -> Report:
    write(folder / "rank0.json", document(events, world=1))
    return loaded(folder).report


def later(event: dict[str, Any], us: float) -> dict[str, Any]:
    return {**event, "ts": event["ts"] + us}


def test_one_clock_is_trusted(tmp_path: Path) -> None:
    assert report_on(tmp_path, events()).trust.trustworthy


def test_a_stream_whose_ops_overtake_each_other_has_several_clocks(tmp_path: Path) -> None:
    """Every other kernel is 100 us late, and the next one is launched 48 us later: 100 of 200 are overtaken."""
    kernels = [one for one in events() if one["cat"] == "kernel"]
    rest = [one for one in events() if one["cat"] != "kernel"]
    moved = [later(one, 100.0 * (place % 2)) for place, one in enumerate(kernels)]
    trust = report_on(tmp_path, rest + moved).trust
    assert not trust.trustworthy
    assert any("ran before one of the same stream that was launched earlier" in why for why in trust.reasons)


@pytest.mark.parametrize(("late_s", "believed"), [(5, True), (3600, False)])
def test_no_gpu_is_an_hour_behind_its_host(late_s: float, believed: bool, tmp_path: Path) -> None:
    """Of 5 s the recording cannot tell: a GPU may be busy with what it was given before."""
    moved = [later(one, late_s * 1e6) if one["cat"] == "kernel" else one for one in events()]
    report = report_on(tmp_path, moved)
    assert report.trust.trustworthy is believed
    assert believed or any("the clocks of host and GPU differ" in why for why in report.trust.reasons)


def test_causes_too_small_to_name_are_added_up(tmp_path: Path) -> None:
    """Kernels of 4 us wait 44 us for each other, 1 s after their launch: no gap is 5 % of a recording of 1 s."""
    moved = [later(one, 1e6) if one["cat"] == "kernel" else one for one in events()]
    answer = report_on(tmp_path, moved).answer
    assert "no single cause costs 5% of each step without the profiler, all together 9" in answer.headline
    assert "nothing costs" not in answer.headline


def test_what_costs_more_than_the_usual_step_is_part_of_the_recording(tmp_path: Path) -> None:
    """The work of the third step waits 1 s for something that is not recorded; the usual step takes 0.8 ms."""
    whole = events()
    third = [one for one in whole if one["name"].startswith("ProfilerStep")][2]["ts"] + 1000.0
    moved = [later(one, 1e6) if one["ts"] > third and one["cat"] == "kernel" else one for one in whole]
    cost = report_on(tmp_path, moved).answer.cost
    assert cost is not None
    assert "GPU-hours a day" not in cost
    assert cost.endswith("s recorded")
