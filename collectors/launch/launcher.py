"""Runs the user's command with the recorder injected, keeps the clock of the run, and passes all else through.

stdin, stdout and stderr are the command's own. Signals sent to tracekit are forwarded; a Ctrl-C at the terminal reaches
the command directly.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tracekit.base.atomic_write import Kind, OutputPlace, starting_with, write_text
from tracekit.base.errors import OutputError
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.collectors.record.recorder import RingStore
from tracekit.collectors.record.small_file import create, read_small
from tracekit.collectors.record.wire_format import (
    ENV_DIRECTORY,
    ENV_MASK,
    ENV_OPTIONS,
    ENV_PLUGIN,
    ENV_RINGS,
    IDLE,
    RING_CAPACITY,
    RecordingSchedule,
    RuntimeOptions,
)
from tracekit.collectors.run_directory.launchers import (
    RUN_FILE,
    RUN_FILE_BYTES,
    EchoServer,
    announce,
    announce_end,
    append_sample,
    hosts_of_launchers,
    measure,
    running_launchers,
    why_unrecorded,
    write_left_over,
)
from tracekit.collectors.run_directory.steering import announced, first_common_step, write_schedule

#: How often the launcher checks on the command, seconds.
POLL_S = 0.5
#: How long the first launcher waits for those of other nodes, seconds.
OTHER_NODES_TIMEOUT_S = 30.0
#: How often the launcher signals a watch on another host that it is alive, seconds.
BEAT_PERIOD_S = 10.0
#: The folder with the module that every Python of the command loads first.
INJECTED = Path(__file__).parents[1] / "record" / "inject"
#: Variables that an outer launcher or a user's shell may have left in the environment.
_OURS = frozenset({ENV_DIRECTORY, ENV_OPTIONS, ENV_RINGS, ENV_PLUGIN, ENV_MASK})


def _is_run_file(file: BinaryIO) -> bool:
    try:
        content = json.loads(file.read(RUN_FILE_BYTES))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"command", "options"} <= content.keys()


_RUN_KIND = Kind("the record of a run of `tracekit collect`", _is_run_file)


@dataclass(frozen=True)
class LaunchResult:
    """`exit_code` is what a shell would report: 128 + number for a command that a signal ended.

    `first`: this launcher was the first of the run, so it merges for all. `ended_ns`: by the wall clock.
    """

    exit_code: int
    wall_s: float
    first: bool
    ended_ns: int


def prepare_run(directory: Path, options: RuntimeOptions, command: Sequence[str]) -> dict[str, str]:
    """Write the run directory's frame; returns the environment of the command.

    Variables of ours that it would inherit are removed. Launchers of several nodes share the directory: the first one
    writes. Raises OutputError if it cannot be written, or belongs to a finished run.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        run_file = directory / RUN_FILE
        before = _state(run_file) if OutputPlace(run_file, _RUN_KIND).check() else {}
        if before.get("finished"):
            raise OutputError(f"{directory}: holds the segments of a finished run; choose another --segments folder")
        times = {"started_ns": before.get("started_ns", time.time_ns())}
        run = {"command": list(command), "options": asdict(options), **times}
        write_text(run_file, json.dumps(run), _RUN_KIND)
    except OSError as error:
        raise OutputError(
            f"{directory}: cannot be written: {error.strerror or error}; choose another place with --segments"
        ) from None
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
        say(f"tracekit: WARNING: {printable(str(directory))}: other users can write there, and falsify the recording")
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(INJECTED) if not inherited else f"{INJECTED}{os.pathsep}{inherited}"
    environment[ENV_DIRECTORY] = str(directory)
    environment[ENV_OPTIONS] = json.dumps(asdict(options))
    return environment


def why_nothing_was_recorded(directory: Path) -> str:
    """The reason that a process gave for recording nothing, if any."""
    reason = why_unrecorded(directory) or (
        "no process of the command trained with torch, or `python -E`, `-I` or `-S`, or an overwritten PYTHONPATH, kept"
        " the recorder out"
    )
    return f"nothing was recorded: {reason}"


def _state(run_file: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(read_small(run_file, RUN_FILE_BYTES))
    return state


def finish_run(directory: Path, ended_ns: int) -> None:
    """Mark the run as finished, so that no other run writes into its directory. Raises OutputError."""
    run_file = directory / RUN_FILE
    write_text(run_file, json.dumps({**_state(run_file), "finished": True, "ended_ns": ended_ns}), _RUN_KIND)


def await_other_launchers(directory: Path) -> None:
    """Wait for the launchers on other nodes to finish; ranks of those that are late are reported as missing."""
    deadline = time.monotonic() + OTHER_NODES_TIMEOUT_S
    while running_launchers(directory) and time.monotonic() < deadline:
        time.sleep(0.1)


def run_command(
    command: Sequence[str],
    environment: dict[str, str],
    directory: Path,
    tasks: Mapping[str, Callable[[], object]],
    name: str = "",
) -> LaunchResult:
    """Run the command to its end. Raises OutputError if it cannot be started.

    `tasks`: functions to call every `POLL_S` while the command runs, by their name in messages; if one returns True,
    the command is asked to end. Records that killed ranks had not written are written here. `name`: the name for
    `tracekit attach`.
    """
    begin = time.monotonic()
    hold()
    presence, code, rings, first = None, None, _rings(), True
    try:
        memory = {} if rings is None else {ENV_RINGS: rings.path}
        try:
            presence = announce(directory)
        except OSError as error:
            raise OutputError(f"{directory}: cannot be written: {error.strerror or error}") from None
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                env={**environment, **memory},
                preexec_fn=release,  # noqa: PLW1509
            )
        except OSError as error:
            raise OutputError(
                f"{command[0]}: cannot be started: {error.strerror or error}; check the command"
            ) from None
        with unharmed("what runs beside the command"):
            clocks = ClockKeeper(directory)
            first = clocks.first
            with announced(name or Path(command[0]).name, directory):
                _await(process, _SideTasks(directory, presence, clocks, tasks))
        code, ended_ns = process.wait(), time.time_ns()
        with unharmed("writing what killed ranks recorded last"):
            for left_over in () if rings is None else rings.left_over():
                # A full disk: the rank has reported it, or its missing end will show.
                with contextlib.suppress(OutputError):
                    write_left_over(directory, left_over)
    finally:
        with unharmed("the end of the run directory"):
            if presence is not None:
                announce_end(presence, code)
            if rings is not None:
                rings.close()
        while signal.sigtimedwait(WATCHED, 0) is not None:  # drop pending signals before the merge
            continue
        release()
    return LaunchResult(code if code >= 0 else 128 - code, time.monotonic() - begin, first, ended_ns)


def script_name(command: Sequence[str]) -> str:
    """The name of a command: its script, or its program."""
    return next((Path(word).stem for word in command if word.endswith(".py")), Path(command[0]).name)


def _rings() -> RingStore | None:
    """Memory for the records of the ranks. Without, each rank has its own, which is lost if it is killed."""
    try:
        return RingStore(RING_CAPACITY)
    except Exception:  # no memory, or a system without memfd_create
        return None


def _await(process: subprocess.Popen[bytes], side_tasks: _SideTasks) -> None:
    """Return once the command has ended; forward signals to it meanwhile."""
    while process.poll() is None:
        received = signal.sigtimedwait(WATCHED, POLL_S)
        if received is not None:
            with unharmed("a signal"):
                _act_on(received, process, side_tasks.directory)
        if side_tasks.tick():
            process.terminate()
    side_tasks.close()


@contextlib.contextmanager
def unharmed(what: str) -> Iterator[None]:
    """Report a failure of tracekit's own in one line: the command goes on, and its exit code is what counts."""
    try:
        yield
    except Exception as error:
        _say_failed(what, error)


def _say_failed(what: str, error: Exception) -> None:
    why = printable(str(error))[:200]
    say(f"tracekit: {what} failed ({type(error).__name__}: {why}); the command is not affected")


@dataclass
class _SideTasks:
    """Work of the launcher while the command runs. A task that fails is reported once, and left out from then on."""

    directory: Path
    presence: Path
    clocks: ClockKeeper
    tasks: Mapping[str, Callable[[], object]]
    beat_at: float = 0.0
    failed: set[str] = field(default_factory=set)

    def tick(self) -> bool:
        """Do what is due; return True if the command must end."""
        own_tasks = {"the sign of life": self._beat, "the clock of the run": self.clocks.tick}
        return True in [self._attempt(what, body) for what, body in {**own_tasks, **self.tasks}.items()]

    def close(self) -> None:
        """Clean up after the command has ended."""
        self._attempt("the clock of the run", self.clocks.close)

    def _attempt(self, what: str, body: Callable[[], object]) -> object:
        if what in self.failed:
            return None
        try:
            return body()
        except (OSError, OutputError):  # the folder is gone or the disk full, perhaps for a moment
            return None
        except Exception as error:
            self.failed.add(what)
            _say_failed(what, error)
            return None

    def _beat(self) -> None:
        if time.monotonic() >= self.beat_at:
            self.beat_at = time.monotonic() + BEAT_PERIOD_S
            os.utime(self.presence, follow_symlinks=False)


def _act_on(received: signal.struct_siginfo, process: subprocess.Popen[bytes], directory: Path) -> None:
    """Start or stop recording on the signals for that; forward other signals that were sent to the launcher."""
    if received.si_signo in STEERING:
        start = received.si_signo == START_RECORDING
        with contextlib.suppress(OSError, OutputError):  # the disk is full: the job continues unchanged
            write_schedule(directory, RecordingSchedule(first_common_step(directory)) if start else IDLE)
    elif received.si_signo != signal.SIGCHLD and received.si_pid > 0:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            process.send_signal(received.si_signo)


#: How often launchers measure the reference clock, or look whether another host needs one, seconds.
CLOCK_PERIOD_S = 10.0
_LOOK_PERIOD_S = 1.0
_CLOCK_FILE = "clock-server.json"
_CLOCK_KIND = Kind("the address of a run's reference clock", starting_with(b'{"host": '))


def launched_elsewhere(directory: Path) -> bool:
    """True if another launcher was the first of the run."""
    return (directory / _CLOCK_FILE).exists()


class ClockKeeper:
    """Serves or measures the clock. `first`: this launcher is the first of the run. `tick` does what is due.

    The clock is served once a launcher on another host records; the file with its address and the token that a ping
    must carry can be read by this user alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _CLOCK_FILE
        self._host = socket.gethostname()
        self._server: EchoServer | None = None
        self._due = 0.0
        self.first = self._claim()

    def _claim(self) -> bool:
        try:
            with create(self._path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps({"host": self._host}).encode())
        except FileExistsError:
            return False
        except OSError:  # the command removed the folder at once, or the disk is full: no other launcher finds this one
            return True
        return True

    def tick(self) -> None:
        """Measure, or serve, if it is time to. Raises OSError, ValueError, OutputError and errors of a damaged file."""
        if self._server is not None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + (_LOOK_PERIOD_S if self.first else CLOCK_PERIOD_S)
        if not self.first:
            self._measure()
        elif hosts_of_launchers(self._directory) - {self._host}:
            self._serve()

    def close(self) -> None:
        """Measure for the last time, or stop serving."""
        if self._server is not None:
            self._server.close()
        elif not self.first and self._due:
            self._measure()

    def _serve(self) -> None:
        server = EchoServer()
        about = {"host": self._host, "port": server.port, "token": server.token.hex()}
        try:
            write_text(self._path, json.dumps(about), _CLOCK_KIND)
        except OutputError:
            server.close()
            raise
        self._server = server

    def _measure(self) -> None:
        server = json.loads(read_small(self._path) or b"{}")  # the first launcher is about to write it
        if server.get("host") == self._host:
            return
        if "token" not in server:  # it has not seen this launcher yet
            self._due = time.monotonic() + _LOOK_PERIOD_S
            return
        sample = measure(str(server["host"]), int(server["port"]), bytes.fromhex(server["token"]))
        if sample is not None:
            append_sample(self._directory, self._host, sample)


#: Signals that are forwarded to the command.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Signals to the launcher that start and stop recording: `kill -s RTMIN+1 PID`. They are not forwarded.
START_RECORDING, STOP_RECORDING = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
STEERING = (START_RECORDING, STOP_RECORDING)
#: Signals the launcher waits for.
WATCHED = (*FORWARDED, *STEERING, signal.SIGCHLD)

_before: set[int] | None = None
#: True if exits of children were ignored, as some supervisors do: the command's exit code would be lost.
_ignored = False


def hold() -> None:
    """Block the signals in this thread and those it starts, and have exits of children reported. Calls nest: `release`
    restores the state before the first.

    A signal goes to any thread that does not block it, also to those that numpy and polars start when they are
    imported, and Python would then end the launcher while the job runs. So this comes before those imports.
    """
    global _before, _ignored  # noqa: PLW0603  a process has one mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    if _before is None:
        _before = set(mask)
        _ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        if _ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def release() -> None:
    """Restore the state before the first `hold`; does nothing without one."""
    global _before  # noqa: PLW0603  a process has one mask
    if _before is not None:
        if _ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, _before)
        _before = None
