"""Hangs of running jobs: what is said, what is not called a hang, what is left on disk."""

import json
import os
from pathlib import Path

import pytest

from tests.collectors.conftest import SCRIPTS, collect, python
from tracekit.collectors.launch.hang import HangWatcher
from tracekit.collectors.runtime.wire_format import (
    FACTS_SUFFIX,
    HANG_REQUEST,
    PULSE,
    PULSE_SUFFIX,
    STACKS_SUFFIX,
    rank_stem,
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watcher(tmp_path, clock):
    (tmp_path / "attempt-000").mkdir()
    return HangWatcher(tmp_path, hang_after_s=20.0, reports=tmp_path / "reports", now=clock)


def pulse(folder, rank, count):
    """What a rank of this process's host shows."""
    stem = folder / "attempt-000" / rank_stem(rank)
    stem.with_suffix(PULSE_SUFFIX).write_bytes(PULSE.pack(count, os.getpid(), 0, 2))
    facts = {"kind": "process", "value": {"host": os.uname().nodename}}
    stem.with_suffix(FACTS_SUFFIX).write_text(json.dumps(facts) + "\n")


def ranks(*arguments):
    """The command that runs `hangs.py` on two ranks."""
    return python("ranks.py", "2", str(SCRIPTS / "hangs.py"), *arguments)


def requests(folder):
    """The folders that ranks were asked to answer to."""
    request = folder / "attempt-000" / HANG_REQUEST
    return [Path(request.read_text()).name] if request.exists() else []


def test_ranks_are_asked_once_nobody_has_moved_for_the_stated_time(watcher, clock, tmp_path):
    for rank in (0, 1):
        pulse(tmp_path, rank, 5)
    for clock.now in (1.0, 15.0, 20.5):
        watcher.tick()
    assert requests(tmp_path) == []
    clock.now = 21.5
    watcher.tick()
    assert requests(tmp_path) == ["hang-001"]


def test_a_job_in_which_one_rank_moves_is_slow_not_hung(watcher, clock, tmp_path):
    pulse(tmp_path, 0, 5)
    for clock.now in range(0, 200, 10):
        pulse(tmp_path, 1, int(clock.now))
        watcher.tick()
    assert requests(tmp_path) == []


def test_before_the_first_rank_has_begun_there_is_no_hang(watcher, clock, tmp_path):
    for clock.now in (0.0, 1000.0, 2000.0):
        watcher.tick()
    assert requests(tmp_path) == []


def test_a_rank_that_does_not_answer_is_looked_at_from_outside(watcher, clock, tmp_path, monkeypatch):
    """A process that lives and does not answer: its stack is what faulthandler wrote."""
    monkeypatch.setattr("tracekit.collectors.launch.hang.subprocess.Popen", lambda *_args, **_more: None)
    for rank in (0, 1):
        pulse(tmp_path, rank, 5)
    watcher.tick()
    clock.now = 30.0
    watcher.tick()
    (tmp_path / "hang-001" / "rank_0.json").write_text("{}")
    stacks = (tmp_path / "attempt-000" / rank_stem(1)).with_suffix(STACKS_SUFFIX)
    stacks.write_text(
        'Thread 0x01 (most recent call first):\n  File "/lib/threading.py", line 3 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/job/train.py", line 7 in step\n'
    )
    for clock.now in (31.0, 34.0, 34.5):
        watcher.tick()
    about = json.loads((tmp_path / "hang-001" / "rank_1.json").read_text())["tracekit"]
    assert about["stack"] == ["/job/train.py:7 step"]
    assert "lives and does not answer" in about["process"]


def test_a_long_checkpoint_is_no_hang_and_a_locked_interpreter_is_one(tmp_path):
    """A real job of two ranks. Rank 1 first saves for long, then locks the interpreter: no Python runs in it any more,
    so its stack comes by signal.
    """
    process = collect(tmp_path, ranks("checkpoint-gil", "1"), "--hang-after", "2", "--on-hang", "stop").process
    assert process.returncode != 0
    assert "which is no hang: rank 1 is in a checkpoint" in process.stderr
    (folder,) = tmp_path.glob("hang-*")
    report = json.loads((folder / "report.json").read_text())
    (culprit,) = report["culprits"]
    assert (culprit["rank"], culprit["class"]) == (1, "process gone or interpreter locked")
    assert any(frame.endswith(" breaks") for frame in culprit["stack"])
    assert [one["rank"] for one in report["waiting"]] == [0]
    assert "rank 1 on" in process.stderr
    assert "stopping the command" in process.stderr
