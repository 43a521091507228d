"""Ctrl-C at a terminal, a real one: the keyboard's signal goes to every process in the foreground at once."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios

import pytest

from tests.collectors.conftest import TIMEOUT_S, environment, plain, python, torchrun
from tracekit.trace.canonical import read_parquet

pytestmark = pytest.mark.slow

CTRL_C = b"\x03"
#: Prints which signals each thread of its parent blocks, as a mask; the main thread waits for them, so it is left out.
PARENT_BLOCKS = """
import os, pathlib
for task in pathlib.Path(f"/proc/{os.getppid()}/task").iterdir():
    if int(task.name) != os.getppid():
        print("blocks", next(line.split()[1] for line in (task / "status").open() if line.startswith("SigBlk")))
"""


def at_terminal(command, directory, press_at, **variables):
    """Run a command at a terminal of its own and press Ctrl-C once its output matches; exit code and output."""
    master, slave = pty.openpty()

    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment(**variables),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=take_terminal,  # noqa: PLW1509  this process has no other thread
    ) as process:
        os.close(slave)
        output, pressed = "", False
        while True:
            if not select.select([master], [], [], TIMEOUT_S)[0]:
                process.kill()
                raise AssertionError(f"silent for {TIMEOUT_S} s: {output}")
            try:
                output += os.read(master, 65536).decode(errors="replace")
            except OSError:  # the last process has closed the terminal
                break
            if not pressed and re.search(press_at, output):
                os.write(master, CTRL_C)
                pressed = True
        process.wait(TIMEOUT_S)
    os.close(master)
    assert pressed, output
    return process.returncode, output


def under_collect(command):
    """The command under `tracekit collect`, trace in job.parquet."""
    return [sys.executable, "-m", "tracekit", "collect", "--no-store", "--out", "job.parquet", "--", *command]


def test_no_thread_of_the_launcher_takes_a_signal_of_the_command(tmp_path):
    """One that did would end the launcher while the job runs; the kernel may choose any thread that blocks it not."""
    under = [sys.executable, "-m", "tracekit", "collect", "--no-store", "--out", "job.parquet", "--"]
    said = plain([*under, sys.executable, "-c", PARENT_BLOCKS], tmp_path)
    masks = [int(mask, 16) for mask in re.findall(r"^blocks (\w+)$", said.stdout, re.MULTILINE)]
    assert len(masks) > 1, said  # the libraries' threads and the clock's
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        assert all(mask >> (number - 1) & 1 for mask in masks), (number, said.stdout)


def test_ctrl_c_ends_a_script_as_it_would_alone(tmp_path):
    """One traceback, the exit code that a shell reports, and the steps before."""
    code, said = at_terminal(under_collect(python("quick.py")), tmp_path, "ready", END="interrupt")
    assert code == 130
    assert said.count("Traceback (most recent call last)") == said.count("KeyboardInterrupt") == 1
    assert read_parquet(tmp_path / "job.parquet").steps.tolist() == [1, 2, 3]


def test_ctrl_c_ends_a_job_of_torchrun(tmp_path):
    """All ranks end, torchrun's exit code passes through, and the trace holds every step until then."""
    command = torchrun(2, "quick.py")
    code, said = at_terminal(under_collect(command), tmp_path, "ready", STEPS=1_000_000, READY=20, TMPDIR=tmp_path)
    assert code == 1, said
    assert "the command ended with exit code 1" in said
    trace = read_parquet(tmp_path / "job.parquet")
    assert trace.steps.tolist() == list(range(1, len(trace.steps) + 1))
    assert len(trace.steps) >= 10
    assert trace.ops["rank"].unique().sort().to_list() == [0, 1]
