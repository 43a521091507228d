"""`tracekit doctor`: what it finds on this machine, and on one where something lacks."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.handmade import run
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
