"""A job that records nothing until somebody asks: `collect --idle`, `tracekit attach`, signals to the launcher."""

import json
import os
import re
import select
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.writtenrun import WrittenRun
from tests.collectors.conftest import POLL_S, TIMEOUT_S, environment, forks
from tests.handmade import run
from tracekit.collectors.launch import attach
from tracekit.collectors.launch.launcher import START_RECORDING, STOP_RECORDING
from tracekit.collectors.record.wire_format import (
    IDLE,
    OPEN_SUFFIX,
    Flag,
    RecordingSchedule,
    attempt_directory,
    segment_stem,
)
from tracekit.collectors.run_directory.follow import AttemptFollower
from tracekit.collectors.run_directory.steering import Pace, announced, first_common_step, pace
from tracekit.trace.canonical import read_parquet


def control(folder) -> RecordingSchedule:
    """What the control file says."""
    return RecordingSchedule.parse((folder / "run" / "control.json").read_text())


def steered(folder, launcher, signal) -> RecordingSchedule:
    """The schedule that the launcher writes on a signal."""
    before = (folder / "run" / "control.json").stat().st_ino
    os.kill(launcher, signal)
    while (folder / "run" / "control.json").stat().st_ino == before:
        select.select([], [], [], POLL_S)
    return control(folder)


def recorded_from(folder, step):
    """Wait until both ranks have recorded a step from that one on."""
    follower = AttemptFollower(0, attempt_directory(folder / "run", 0), 0)
    while len(follower.good) < 2 or any(rank.whole < step for rank in follower.good.values()):
        select.select([], [], [], POLL_S)
        follower.update(0.0)


def test_only_steps_to_come_keep_others_from_recording():
    """Step 1 has ended; a recording without an end goes on beside others."""
    assert all(schedule.goes_on_after(1) for schedule in (RecordingSchedule(5, 9), RecordingSchedule(0, 3)))
    assert not any(schedule.goes_on_after(1) for schedule in (IDLE, RecordingSchedule(), RecordingSchedule(0, 2)))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a schedule; expected an object with some of every, first_step, last_step, length"),
        ('{"first": 1}', "not a schedule; expected an object with some of every, first_step, last_step, length"),
        ('{"every": 0}', "every is 0; expected an integer of at least 1"),
        ('{"length": 0}', "length is 0; expected an integer of at least 1"),
        ('{"first_step": -1}', "first_step is -1; expected an integer of at least 0"),
        ('{"first_step": null}', "first_step is None; expected an integer of at least 0"),
        ('{"last_step": true}', "last_step is True; expected an integer of at least 0"),
        ('{"last_step": 2.5}', "last_step is 2.5; expected an integer of at least 0"),
        ("[" * 100_000, "not a schedule, but JSON with thousands of brackets"),
    ],
)
def test_what_is_no_schedule_says_why(text, why):
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        RecordingSchedule.parse(text)


def test_a_schedule_names_the_steps_that_are_recorded():
    every_third = RecordingSchedule.parse('{"first_step": 2, "last_step": 9, "every": 3, "length": 2}')
    assert [step for step in range(12) if every_third.records(step)] == [2, 3, 5, 6, 8]
    assert RecordingSchedule.parse('{"last_step": null, "every": 1, "length": 1, "first_step": 0}').records(10**6)


@pytest.mark.slow
def test_an_idle_job_records_what_it_is_asked_for(tmp_path):
    """Twice by `attach`, once between two signals; the trace at the end has these steps, and not those behind them.

    On a busy machine, it may have some more before them: `attach` asks again where a rank did not record all in time.
    """
    under = [sys.executable, "-m", "tracekit", "collect", "--idle", "--name", "dormant", "--segments", "run", "--json"]
    with subprocess.Popen(
        [*under, "--no-store", "--out", "all.parquet", "--", *forks(2, "slow_on_demand.py")],
        cwd=tmp_path,
        env=environment(SLOW=tmp_path / "slow", STOP=tmp_path / "stop", DEVICE_MS=3),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "training\n"
            asked = []
            for number, named in enumerate(("dormant", str(process.pid))):
                out = tmp_path / f"{number}.parquet"
                ran = run("attach", named, "--steps", "4", "--out", out)
                assert ran.code == 0, ran.err
                trace = read_parquet(out)
                assert trace.name == "dormant"
                first = int(trace.steps[0])
                assert trace.steps.tolist() == list(range(first, first + 4))
                assert (trace.layout.dp, trace.coverage().complete) == (2, True)
                assert "recording costs " in ran.err or "the cost of recording is unknown: " in ran.err
                assert control(tmp_path) == IDLE
                asked += trace.steps.tolist()
            started = steered(tmp_path, process.pid, START_RECORDING)
            assert (started.last_step, started.every) == (None, 1)
            recorded_from(tmp_path, started.first_step)
            assert steered(tmp_path, process.pid, STOP_RECORDING) == IDLE
        finally:
            (tmp_path / "stop").touch()
            out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    steps = read_parquet(tmp_path / "all.parquet").steps.tolist()
    assert set(asked) <= set(steps)
    assert {asked[3] + 1, asked[7] + 1}.isdisjoint(steps)
    assert steps[steps.index(started.first_step) :] == list(range(started.first_step, steps[-1] + 1))
    assert json.loads(out.splitlines()[-1])["attempts"][0]["ranks"][0]["steps"] > len(steps)


def test_a_job_that_is_not_there_is_named_with_those_that_are(tmp_path, monkeypatch):
    """Not with one whose launcher was killed, though another process has its number by now."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with announced("mine", tmp_path / "a"):
        note = tmp_path / f"tracekit-jobs-{os.geteuid()}" / f"{os.getpid()}.json"
        killed = json.loads(note.read_text()) | {"name": "killed", "started": "1"}
        (note.parent / f"{os.getppid()}.json").write_text(json.dumps(killed))
        ran = run("attach", "yours")
    assert (ran.code, ran.out) == (2, "")
    assert f"no single job is called 'yours'; running on this host: mine ({os.getpid()}). Name one" in ran.err


def run_idle(job, steps):
    """Every rank tells only that these steps have ended."""
    for step in steps:
        for rank in range(job.ranks):
            told = job._written[rank]
            ended = job._step(rank, step, 1.0, job._now_ms + 65)[-1:]
            ended["flags"], ended["number"], job._written[rank] = Flag.COMPLETE, told + 1, told + 1
            job.write(rank, ended.tobytes())
        job._now_ms += 70


@pytest.mark.parametrize("missed", [range(3, 7), range(26, 30), range(28, 32)])
def test_steps_that_ranks_had_passed_when_they_were_told_are_recorded_later(tmp_path, monkeypatch, missed):
    """All four, or only the first two: the first steps of a job are slow, and those behind them come early."""
    job, told = WrittenRun(tmp_path, 2), []
    (tmp_path / "control.json").write_text(json.dumps(asdict(IDLE)))
    run_idle(job, range(30))
    firsts = iter([missed[0], 40])

    def first_common_step(_):
        first = next(firsts)
        if first < 40:
            job.run(range(30, missed[-1] + 1))
            run_idle(job, range(max(30, missed[-1] + 1), 40))
        else:
            job.run(range(40, 44))
        return first

    monkeypatch.setattr(attach, "first_common_step", first_common_step)
    found = attach.record_steps(tmp_path, 4, 60, told.append)
    assert found.first_step == 40
    assert [int((rank.records["step"] >= 40).sum()) for rank in found.recording.ranks.values()] == [4 * 7] * 2
    assert told[-2:] == [f"recording steps {first} to {first + 3}" for first in (missed[0], 40)]
    assert RecordingSchedule.parse((tmp_path / "control.json").read_text()) == IDLE


def test_steps_that_others_record_are_not_cut_short(tmp_path):
    job = WrittenRun(tmp_path, 2)
    job.run(range(4))
    (tmp_path / "control.json").write_text('{"first_step": 3, "last_step": 9}')
    ran = run("attach", str(tmp_path))
    assert ran.code == 2
    assert "steps up to 8 are already being recorded" in ran.err
    assert json.loads((tmp_path / "control.json").read_text())["last_step"] == 9


def test_the_job_ends_while_it_is_waited_for(tmp_path):
    job = WrittenRun(tmp_path, 2)
    job.run(range(4))
    (tmp_path / "control.json").write_text('{"first_step": 1, "last_step": 1}')
    job.end()
    ran = run("attach", str(tmp_path))
    assert ran.code == 2
    assert "2 of 2 ranks did not record step" in ran.err
    assert "before the job ended" in ran.err
    assert RecordingSchedule.parse((tmp_path / "control.json").read_text()) == IDLE


def test_how_far_a_run_is(tmp_path):
    """Steps of 70 ms: a second is 15 of them, behind the one that runs and the one some ranks may be at."""
    assert pace_of_nothing(tmp_path / "empty") is None
    job = WrittenRun(tmp_path, 3)
    job.run(range(30))
    begun = attempt_directory(tmp_path, 0) / f"{segment_stem(1, 1)}{OPEN_SUFFIX}"
    begun.touch()  # a segment without its header yet
    assert pace(tmp_path) == Pace(29, pytest.approx(0.070))
    assert first_common_step(tmp_path) == 29 + 2 + 15


def pace_of_nothing(directory):
    directory.mkdir()
    return pace(directory)
