"""`tracekit doctor`: what it finds on this machine, and on one where something lacks."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import pytest

from tests.handmade import run, slow_trace
from tracekit.collectors.launch import doctor
from tracekit.collectors.launch.doctor import CheckOutcome, _judged, checks


@pytest.mark.slow
def test_collecting_works_where_the_tests_run(tmp_path: Path) -> None:
    """The trial is a real one: two ranks train, and all that a data-parallel step has is recorded."""
    ran = run("doctor", "--store", tmp_path / "jobs.store", "--json")
    found = json.loads(ran.out)
    outcomes = {check["subject"]: check["outcome"] for check in found["checks"]}
    assert (ran.code, found["works"]) == (0, True)
    assert {outcomes[subject] for subject in ("system", "torch", "store", "trial")} == {"ok"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prints", ["import nothing_like_it", "raise SystemExit('no torch for you')"])
def test_an_interpreter_without_torch(prints: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{prints}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    ran = run("doctor", "--python", python, "--store", tmp_path / "jobs.store")
    lines = {line.split()[1]: line for line in ran.out.splitlines()[:-2]}
    assert ran.code == 3
    assert lines["torch"].startswith("fails")
    assert lines["torch"].endswith("name the training's interpreter with --python")
    assert lines["trial"].endswith("not run without torch")
    assert ran.out.splitlines()[-1] == "Collecting will not work here yet."


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    occupied = tmp_path / "notes.txt"
    occupied.write_text("mine")
    found = {check.subject: check for check in checks(str(tmp_path / "nothing"), occupied)}
    assert found["store"].outcome is CheckOutcome.FAILS
    assert found["torch"].detail.startswith(f"{tmp_path / 'nothing'}: cannot be started: No such file or directory")
    assert occupied.read_text() == "mine"


@pytest.mark.parametrize(("stderr", "why"), [("first\nlast\n", "last"), ("", "it printed no error")])
def test_a_trial_that_fails_says_the_last_line_of_what_it_printed(stderr: str, why: str, tmp_path: Path) -> None:
    check = _judged(CompletedProcess([], 1, "", stderr), tmp_path / "job.parquet")
    assert (check.outcome, check.detail) == (CheckOutcome.FAILS, f"two ranks on gloo: {why}")


@pytest.mark.parametrize("of_attempt", [True, False])
def test_a_trial_without_a_trace_says_what_the_collection_says(of_attempt: bool, tmp_path: Path) -> None:
    problem = {"problem": "no rank reported anything"}
    summary = {"exit_code": 0, "attempts": [problem]} if of_attempt else {"exit_code": 0, "attempts": [], **problem}
    check = _judged(CompletedProcess([], 0, json.dumps(summary) + "\n", "a warning\n"), tmp_path / "job.parquet")
    assert (check.outcome, check.detail) == (CheckOutcome.FAILS, "two ranks on gloo: no rank reported anything")


#: What an interpreter with torch tells of itself.
PROBED = {
    "python": "3.12.1",
    "lacks": None,
    "torch": "2.9.0",
    "distributed": True,
    "cuda": None,
    "hip": None,
    "gpus": [],
    "gloo": True,
    "nccl": False,
}


def checked(
    probe: dict[str, Any], store: Path, free: int = 180 << 30, clock: str = "tsc\n"
) -> dict[str, tuple[str, str]]:
    """Outcome and detail by subject, of an interpreter that tells this; the trial records the hand-made slow job."""
    clock_source = store.with_name("clock")
    clock_source.write_text(clock)

    def answer(words: list[str], **_: Any) -> CompletedProcess[str]:
        if "collect" not in words:
            return CompletedProcess(words, 0, f"a warning\n{json.dumps(PROBED | probe)}\n", "")
        slow_trace().write_parquet(Path(words[words.index("--out") + 1]))
        attempt = {"steps": 8, "world_size": 2, "ops": 96, "problem": None, "notes": ["no clock of the GPU"]}
        return CompletedProcess(words, 0, json.dumps({"exit_code": 0, "attempts": [attempt]}) + "\n", "")

    with (
        mock.patch.object(doctor.subprocess, "run", answer),
        mock.patch.object(doctor.tempfile, "gettempdir", return_value=str(store.parent)),
        mock.patch.object(doctor.shutil, "disk_usage", return_value=mock.Mock(free=free)),
        mock.patch.object(doctor, "CLOCK_SOURCE", clock_source),
        mock.patch.object(doctor, "find_plugin", return_value=Path("/lib/plugin.so")),
        mock.patch.object(doctor, "installed_version", return_value=(2, 28, 3)),
    ):
        return {check.subject: (str(check.outcome), check.detail) for check in checks("py", store)}


def test_what_an_interpreter_tells_is_worded_and_judged(tmp_path: Path) -> None:
    """A record has 52 bytes: 180 GiB hold 3.72e9, which last 1,032 hours at 1000 ops a second."""
    store = tmp_path / "jobs.store"
    usual = checked({}, store)
    assert {subject: usual[subject] for subject in usual if subject not in ("system", "store")} == {
        "torch": ("ok", "2.9.0 (CPU only) on Python 3.12.1, py; gloo"),
        "recorder": ("ok", "loads in py"),
        "GPUs": ("note", "none; ops are timed on the host"),
        "NCCL plugin": ("note", "not needed: this torch has no NCCL"),
        "segments": ("ok", f"{tmp_path}: 193.3 GB free, enough for 1,032 hours of one rank at 1,000 ops a second"),
        "clock": ("ok", "tsc"),
        "trial": (
            "note",
            ("two ranks on gloo: 8 steps of 2 ranks, 96 ops; no all-reduce; no data-load; no clock of the GPU"),
        ),
    }
    gpus = ["H100", "A100", "H100"]
    on_gpus = checked({"cuda": "12.8", "gpus": gpus, "nccl": True}, store, free=(1 << 30) - 1, clock="hpet\n")
    assert on_gpus["torch"] == ("ok", "2.9.0 (CUDA 12.8) on Python 3.12.1, py; gloo and nccl")
    assert on_gpus["GPUs"] == ("ok", "2 x H100, 1 x A100; ops are timed by CUDA events")
    assert on_gpus["NCCL plugin"] == ("ok", "plugin.so is compiled")
    assert on_gpus["segments"] == (
        "note",
        (
            f"{tmp_path}: 1.1 GB free, enough for 6 hours of one rank at 1,000 ops a second;"
            " choose a larger disk with --segments or TMPDIR"
        ),
    )
    assert on_gpus["clock"] == ("note", "hpet is slow to read, so recording costs more; tsc is usual")
    no_driver = checked({"cuda": "12.8", "gloo": False}, store, free=1 << 30)
    assert no_driver["torch"] == ("ok", "2.9.0 (CUDA 12.8) on Python 3.12.1, py; no backend")
    assert no_driver["GPUs"] == (
        "note",
        "torch is built for GPUs but finds none: check the driver; ops are timed on the host",
    )
    assert no_driver["segments"][0] == "ok"
    alone = checked({"hip": "6.4", "distributed": False, "lacks": "Python 3.8 is too old"}, store)
    assert alone["torch"] == (
        "note",
        "2.9.0 (ROCm 6.4) on Python 3.12.1, py; built without torch.distributed: records single processes only",
    )
    assert alone["recorder"] == ("fails", "py cannot load it: Python 3.8 is too old")
    assert alone["trial"] == ("fails", "not run without the recorder")
