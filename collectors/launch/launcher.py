"""Runs the user's command with the recorder injected and passes everything else through.

In: the command and options. Out: its exit code, and a run directory full of segments. stdin, stdout and stderr are the
command's own. Signals sent to tracekit are forwarded; a Ctrl-C at the terminal reaches the command directly.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tracekit.atomic_write import Kind, Place, write_text
from tracekit.collectors.launch.inject import write_injection
from tracekit.collectors.launch.signals import START_RECORDING, STEERING, WATCHED, hold, release
from tracekit.collectors.run_directory.clock_pings import EchoServer, append_sample, measure
from tracekit.collectors.run_directory.launchers import announce, announce_end, running_launchers
from tracekit.collectors.run_directory.steering import announced, first_common_step, write_schedule
from tracekit.collectors.run_directory.writing import RUN_FILE, write_left_over
from tracekit.collectors.runtime.nccl_wire_format import ENV_MASK, ENV_PLUGIN
from tracekit.collectors.runtime.ring import RingStore
from tracekit.collectors.runtime.wire_format import (
    ENV_DIRECTORY,
    ENV_OPTIONS,
    ENV_RINGS,
    IDLE,
    RING_CAPACITY,
    RuntimeOptions,
    Schedule,
)
from tracekit.errors import OutputError

#: How often the launcher checks on the command, seconds.
POLL_S = 0.5
#: How long the first launcher waits for those of other nodes, seconds.
OTHER_NODES_TIMEOUT_S = 30.0
#: How often the launcher signals a watch on another host that it is alive, and measures the reference clock, seconds.
BEAT_PERIOD_S = 10.0
CLOCK_PERIOD_S = 10.0
NOTHING_RECORDED = (
    "nothing was recorded: no process of the command trained with torch in this Python environment (python -I and -S,"
    " or an overwritten PYTHONPATH, keep the recorder out)"
)
#: Variables that an outer launcher or a user's shell may have left in the environment.
_OURS = frozenset({ENV_DIRECTORY, ENV_OPTIONS, ENV_RINGS, ENV_PLUGIN, ENV_MASK})
_CLOCK_FILE = "clock-server.json"


def _is_run_file(file: BinaryIO) -> bool:
    try:
        content = json.loads(file.read())
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"command", "options"} <= content.keys()


_RUN_KIND = Kind("the record of a run of `tracekit collect`", _is_run_file)


@dataclass(frozen=True)
class LaunchResult:
    """`exit_code` is what a shell would report: 128 + number for a command that a signal ended.

    `first`: this launcher was the first of the run, so it merges for all.
    """

    exit_code: int
    wall_s: float
    first: bool


def prepare_run(directory: Path, options: RuntimeOptions, command: Sequence[str]) -> dict[str, str]:
    """Write the run directory's frame; returns the environment of the command.

    Variables of ours that it would inherit are removed. Launchers of several nodes share the directory: the first one
    writes. Raises OutputError if it cannot be written, or belongs to a finished run.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        run_file = directory / RUN_FILE
        if Place(run_file, _RUN_KIND).check() and json.loads(run_file.read_text(encoding="utf-8")).get("finished"):
            raise OutputError(f"{directory}: holds the segments of a finished run; choose another --segments folder")
        write_text(run_file, json.dumps({"command": list(command), "options": options.to_dict()}), _RUN_KIND)
        inject = write_injection(directory)
    except OSError as error:
        raise OutputError(
            f"{directory}: cannot be written: {error.strerror or error}; choose another place with --segments"
        ) from None
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(inject) if not inherited else f"{inject}{os.pathsep}{inherited}"
    environment[ENV_DIRECTORY] = str(directory)
    environment[ENV_OPTIONS] = json.dumps(options.to_dict())
    return environment


def finish_run(directory: Path) -> None:
    """Mark the run as finished, so that no other run writes into its directory. Raises OutputError."""
    run_file = directory / RUN_FILE
    state = json.loads(run_file.read_text(encoding="utf-8"))
    write_text(run_file, json.dumps({**state, "finished": True}), _RUN_KIND)


def launched_elsewhere(directory: Path) -> bool:
    """Whether another launcher was the first of the run."""
    return (directory / _CLOCK_FILE).exists()


def await_other_launchers(directory: Path) -> None:
    """Wait for the launchers on other nodes to finish; ranks of those that are late are reported as missing."""
    deadline = time.monotonic() + OTHER_NODES_TIMEOUT_S
    while running_launchers(directory) and time.monotonic() < deadline:
        time.sleep(0.1)


def run_command(
    command: Sequence[str],
    environment: dict[str, str],
    directory: Path,
    on_poll: Callable[[], bool],
    name: str = "",
) -> LaunchResult:
    """Run the command to its end. Raises OutputError if it cannot be started.

    `on_poll` is called every `POLL_S` while the command runs; if it returns True, the command is asked to end. Records
    that killed ranks had not written are written here. `name`: how `tracekit attach` finds the job.
    """
    begin = time.monotonic()
    hold()
    presence, code = announce(directory), None
    rings = RingStore(RING_CAPACITY)
    try:
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                env={**environment, ENV_RINGS: rings.path},
                preexec_fn=release,  # noqa: PLW1509
            )
        except OSError as error:
            raise OutputError(
                f"{command[0]}: cannot be started: {error.strerror or error}; check the command"
            ) from None
        with _ClockKeeper(directory) as clocks, announced(name or Path(command[0]).name, directory):
            beat_at = 0.0
            while process.poll() is None:
                received = signal.sigtimedwait(WATCHED, POLL_S)
                if received is not None:
                    _act_on(received, process, directory)
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + BEAT_PERIOD_S
                    with contextlib.suppress(OSError):  # the folder is gone
                        os.utime(presence)
                with contextlib.suppress(OSError):  # a monitoring error must not stop the job
                    clocks.tick()
                    if on_poll():
                        process.terminate()
        code = process.returncode
        for left in rings.left_over():
            with contextlib.suppress(
                OutputError
            ):  # a full disk: the rank has reported it, or its missing end will show
                write_left_over(directory, left)
    finally:
        rings.close()
        announce_end(presence, code)
        while signal.sigtimedwait(WATCHED, 0) is not None:  # drop pending signals before the merge
            continue
        release()
    return LaunchResult(code if code >= 0 else 128 - code, time.monotonic() - begin, clocks.first)


def _act_on(received: signal.struct_siginfo, process: subprocess.Popen[bytes], directory: Path) -> None:
    """Start or stop recording on the signals for that; forward other signals that were sent to the launcher."""
    if received.si_signo in STEERING:
        start = received.si_signo == START_RECORDING
        with contextlib.suppress(OSError, OutputError):  # the disk is full: the job continues unchanged
            write_schedule(directory, Schedule(first_common_step(directory)) if start else IDLE)
    elif received.si_signo != signal.SIGCHLD and received.si_pid > 0:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            process.send_signal(received.si_signo)


class _ClockKeeper:
    """Serves the reference clock in the first launcher of a run; launchers on other hosts measure against it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._host = socket.gethostname()
        self._server: EchoServer | None = None
        self._due = 0.0

    def __enter__(self) -> _ClockKeeper:
        try:
            with (self._directory / _CLOCK_FILE).open("x", encoding="utf-8") as file:
                self._server = EchoServer()
                json.dump({"host": self._host, "port": self._server.port}, file)
        except FileExistsError:
            pass
        except OSError:
            # The command removed the folder at once, or the disk is full: no other launcher will find this clock.
            self._server = self._server or EchoServer()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.close()
        elif self._due:
            with contextlib.suppress(OSError):
                self._measure()

    @property
    def first(self) -> bool:
        """Whether this launcher holds the reference clock."""
        return self._server is not None

    def tick(self) -> None:
        """Measure when it is time to."""
        if self._server is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + CLOCK_PERIOD_S
            self._measure()

    def _measure(self) -> None:
        text = (self._directory / _CLOCK_FILE).read_text(encoding="utf-8")
        if not text:  # the first launcher is about to write it
            return
        server = json.loads(text)
        if server["host"] == self._host:
            return
        sample = measure(server["host"], int(server["port"]))
        if sample is not None:
            append_sample(self._directory, self._host, sample)
