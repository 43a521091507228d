"""A run whose GPUs nobody stated: its report has no GPU-hours, and no bill, list or verdict invents any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from judges import rlsim
from tests.handmade import LAYOUT, run, slow_trace
from tracekit.bill.account import bill_of_store, run_of_job
from tracekit.bill.ledger import Bill
from tracekit.store import Store

#: Of the slow job in `tests/handmade.py`.
GPUS = LAYOUT.world_size


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of post-training in one store, and with a pipeline in another."""
    monkeypatch.chdir(tmp_path)
    rlsim.record(rlsim.draw("engines", 1), Path("rl.jsonl"))
    slow_trace(range(4)).write_parquet("slow.parquet")
    assert run("import", "rl.jsonl", "--store", "rl.store").code == 0
    assert run("import", "rl.jsonl", "slow.parquet", "--store", "both.store").code == 0
    return tmp_path


def bill(folder: Path, name: str) -> Bill:
    return bill_of_store(Store(folder / name))


def cells(*command: str) -> list[str]:
    """The cells of the run in the table that a command prints."""
    (row,) = [line.split() for line in run(*command).out.splitlines() if line.startswith(" rl.jsonl ")]
    return row


def test_its_bill_is_in_hours(folder: Path) -> None:
    alone = bill(folder, "rl.store")
    (wall_s,) = alone.wall_s.values()
    assert (alone.gpu_hours, alone.unit, alone.total) == (None, "hours", pytest.approx(wall_s / 3600))
    assert alone.rows["gpu_hours"].is_null().all()
    by_part = alone.by("part")
    assert by_part["spent"].to_list() == by_part["hours"].to_list()
    assert alone.notes == ("rl.jsonl: how many GPUs it has is not known, so it has no GPU-hours",)
    shown = run("bill", "rl.store", "--gpu-hour", "2").out
    assert f"of {alone.total:.3g} hours were useful" in shown
    assert "GPU-hours, " not in shown
    assert json.loads(run("bill", "rl.store", "--json").out)["gpu_hours"] is None


def test_beside_another_job_the_bill_has_the_gpu_hours_of_that_one(folder: Path) -> None:
    both = bill(folder, "both.store")
    of_slow = both.wall_s["slow job"] * GPUS / 3600
    assert (both.unit, both.gpu_hours) == ("GPU-hours", pytest.approx(of_slow))
    by_job = {job: (spent, useful) for job, spent, useful in both.by("job").select("job", "spent", "useful").rows()}
    assert by_job["rl.jsonl"] == (None, None)
    assert by_job["slow job"][0] == pytest.approx(of_slow)
    assert cells("bill", "both.store", "--by", "job")[-2:] == ["-", "-"]


def test_its_verdict_has_seconds_and_no_gpu_hours(folder: Path) -> None:
    verdict = run_of_job(Store(folder / "rl.store"), "rl.jsonl")
    assert verdict.lost_s > 0
    assert verdict.gpu_hours_lost is None
    assert {cause.gpu_hours_lost for cause in verdict.causes} == {None}
    slow = run_of_job(Store(folder / "both.store"), "slow job")
    assert slow.gpu_hours_lost == pytest.approx(slow.lost_s * GPUS / 3600)


def test_a_list_of_jobs_does_not_count_its_gpus(folder: Path) -> None:
    assert {job.name: job.gpus for job in Store(folder / "both.store").jobs()} == {"rl.jsonl": None, "slow job": GPUS}
    assert cells("store", "list", "both.store")[:3] == ["rl.jsonl", "-", "-"]
