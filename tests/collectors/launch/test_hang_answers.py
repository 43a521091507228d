"""Ranks that give no answer, looked at from outside: real processes in the states that matter."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tracekit.collectors.launch import hang_answers
from tracekit.collectors.launch.hang_answers import gather, read_pulses
from tracekit.collectors.record.wire_format import (
    FACTS_SUFFIX,
    LAST_WORDS_SUFFIX,
    PULSE,
    PULSE_SUFFIX,
    STACKS_SUFFIX,
    rank_stem,
)

SIGNAL = signal.SIGRTMAX - 3
PROGRAM = f"""
import faulthandler, sys
def waits_for_ever():
    print("here", flush=True)
    sys.stdin.read()
with open(sys.argv[1], "wb", buffering=0) as stacks:
    faulthandler.register({int(SIGNAL)}, stacks, all_threads=True)
    waits_for_ever()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hang").mkdir()
    return tmp_path / "hang"


@pytest.fixture(autouse=True)
def without_py_spy(monkeypatch):
    monkeypatch.setattr(hang_answers.shutil, "which", lambda *_args, **_more: None)
    monkeypatch.setattr(hang_answers, "ANSWER_S", 0.0)


@pytest.fixture
def process(tmp_path):
    """A process that waits for ever and answers the signal."""
    stacks = tmp_path / f"{rank_stem(1)}{STACKS_SUFFIX}"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(stacks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout.readline()
        yield started
        started.kill()


def rank(attempt, process_id, host=None):
    """Rank 1, as it shows itself."""
    stem = attempt / rank_stem(1)
    stem.with_suffix(PULSE_SUFFIX).write_bytes(PULSE.pack(5, process_id, SIGNAL, 2))
    facts = {"kind": "process", "value": {"host": host or socket.gethostname()}}
    stem.with_suffix(FACTS_SUFFIX).write_text(json.dumps(facts) + "\n")


def answer(folder):
    return json.loads((folder / "rank_1.json").read_text())["tracekit"]


def test_a_process_that_lives_and_does_not_answer_writes_its_stack_by_signal(tmp_path, folder, process):
    rank(tmp_path, process.pid)
    gather(tmp_path, folder, {})
    assert "is alive but does not answer" in answer(folder)["process"]
    assert answer(folder)["stack"][0].endswith(" waits_for_ever")


def test_a_stopped_process_is_named_as_such(tmp_path, folder, process, monkeypatch):
    monkeypatch.setattr(hang_answers, "ANSWER_S", 60.0)  # it is not waited for
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    rank(tmp_path, process.pid)
    gather(tmp_path, folder, {})
    assert "is stopped" in answer(folder)["process"]


def test_a_process_that_has_ended_is_named_as_such(tmp_path, folder, process, monkeypatch):
    monkeypatch.setattr(hang_answers, "ANSWER_S", 60.0)
    process.kill()
    process.wait()
    rank(tmp_path, process.pid)
    gather(tmp_path, folder, {})
    assert answer(folder)["process"] == "its process has ended"


def test_last_words_are_the_answer_of_a_rank_that_is_leaving(tmp_path, folder, process, monkeypatch):
    monkeypatch.setattr(hang_answers, "ANSWER_S", 60.0)
    rank(tmp_path, process.pid)
    (tmp_path / f"{rank_stem(1)}{LAST_WORDS_SUFFIX}").write_text('{"tracekit": {"error": "OSError", "taken_ns": 5}}')
    gather(tmp_path, folder, {})
    assert answer(folder)["error"] == "OSError"


def test_a_rank_of_another_host_is_left_to_its_own_launcher(tmp_path, folder, process):
    rank(tmp_path, process.pid, host="elsewhere")
    gather(tmp_path, folder, {})
    assert not list(folder.iterdir())


def test_a_stack_of_py_spy_has_the_holder_of_the_lock_and_native_frames(tmp_path, folder, process, monkeypatch):
    """The form that py-spy 0.4 prints; frames without a symbol are left out."""
    frames = [
        {"name": "0x7f2c9eaa412b", "filename": "/lib/libc.so.6", "line": 0},
        {"name": "pthread_mutex_lock", "filename": "/lib/libc.so.6", "line": 0},
        {"name": "step", "filename": "/job/train.py", "line": 7},
    ]
    thread = {"thread_name": "MainThread", "os_thread_id": process.pid, "owns_gil": True, "frames": frames}
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho '{json.dumps([thread])}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(hang_answers.shutil, "which", lambda *_args, **_more: str(program))
    rank(tmp_path, process.pid)
    gather(tmp_path, folder, {})
    assert answer(folder)["stack"] == ["/lib/libc.so.6:0 pthread_mutex_lock", "/job/train.py:7 step"]
    assert "its thread MainThread holds the interpreter's lock" in answer(folder)["process"]


def test_a_process_without_a_handler_for_the_signal_is_not_sent_it(tmp_path, folder):
    """A pulse can name any process: one that took the number of a rank, or one that another user wants to end."""
    (tmp_path / f"{rank_stem(1)}{STACKS_SUFFIX}").touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        rank(tmp_path, other.pid)
        gather(tmp_path, folder, {})
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0
    assert answer(folder)["stack"] is None


def test_what_is_no_pulse_is_passed_over(tmp_path, folder, process):
    """A pipe is not waited for, and the ranks that show themselves are asked."""
    rank(tmp_path, process.pid)
    os.mkfifo(tmp_path / f"{rank_stem(0)}{PULSE_SUFFIX}")
    (tmp_path / f"{rank_stem(2)}{PULSE_SUFFIX}").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / f"{rank_stem(1)}{LAST_WORDS_SUFFIX}")
    (tmp_path / f"rank-x{PULSE_SUFFIX}").touch()
    assert read_pulses(tmp_path).keys() == {1}
