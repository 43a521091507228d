"""The launchers of a run: their files in its directory, which of them live, how their commands ended, and the pings
that compare the clocks of their hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tracekit.base.atomic_write import Kind, replacing, starting_with, write_text
from tracekit.base.errors import OutputError
from tracekit.base.text import printable
from tracekit.collectors.record.small_file import create, read_small
from tracekit.collectors.record.wire_format import (
    HEADER,
    LEFT_OVER_SEGMENT,
    MAGIC,
    RECORD,
    SEALED_SUFFIX,
    VERSION,
    LeftOver,
    attempt_directory,
    segment_stem,
)

_RUNNING, _DONE = ".running", ".done"
#: Characters of an exit code.
_LONGEST_CODE = 12
#: Exit codes above it are of commands that a signal ended, as shells report them.
_SHELL_SIGNALS = 128


def announce(directory: Path) -> Path:
    """Announce that a launcher in this process runs a command; return the file of the announcement, which is touched
    now and then, and renamed at the end.
    """
    presence = directory / f"launcher-{socket.gethostname()}-{os.getpid()}{_RUNNING}"
    create(presence, append=True).close()
    return presence


def announce_end(presence: Path, code: int | None) -> None:
    """Announce that its command has ended with `code`, negative for a signal; None if unknown."""
    if code is not None:
        with contextlib.suppress(OSError), create(presence, append=True) as file:  # the disk is full
            file.write(str(code).encode())
    with contextlib.suppress(OSError):  # the folder is gone: the exit code is unaffected
        presence.rename(presence.with_suffix(_DONE))


def hosts_of_launchers(directory: Path) -> set[str]:
    """The hosts whose launchers record in this run directory."""
    return {_owner(presence)[0] for presence in running_launchers(directory)}


def running_launchers(directory: Path) -> list[Path]:
    """The launchers whose command has not ended yet."""
    return sorted(directory.glob(f"launcher-*{_RUNNING}"))


def have_ended(directory: Path) -> bool:
    """True if there were launchers, and the commands of all of them have ended."""
    return not running_launchers(directory) and any(directory.glob(f"launcher-*{_DONE}"))


def last_sign_ns(presence: Path) -> int:
    """The time of a launcher's last sign of life, by the clock of the file system, ns; 0 if unknown."""
    try:
        return presence.stat().st_mtime_ns
    except OSError:
        return 0


def is_dead(presence: Path) -> bool:
    """True if a launcher of this host was killed before it could announce the end of its command."""
    host, number = _owner(presence)
    if host != socket.gethostname() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user
        return False
    return False


@dataclass(frozen=True)
class Ending:
    """The end of a job, in words that fit "the job ended with exit code 1"."""

    words: str
    failed: bool


def how_ended(directory: Path) -> Ending | None:
    """The end of the job; None if unknown.

    Of several launchers, the first whose command failed counts: the others ended because of it.
    """
    ends = []
    for path in directory.glob(f"launcher-*{_DONE}"):
        try:
            ends.append((last_sign_ns(path), int(read_small(path, _LONGEST_CODE)), _owner(path)[0]))
        except (OSError, ValueError):  # of an older tracekit, or of one whose disk was full
            continue
    if not ends:
        return None
    _, code, host = min(ends, key=lambda end: (end[1] == 0, end[0]))
    where = f" on {host}" if code and len(ends) > 1 else ""
    return Ending(f"{_words(code)}{where}", code != 0)


def _words(code: int) -> str:
    if code < 0:
        return f"was killed by {_signal(-code) or f'signal {-code}'}"
    name = _signal(code - _SHELL_SIGNALS)
    return f"ended with exit code {code}" + (f" ({name})" if name else "")


def _signal(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def _owner(presence: Path) -> tuple[str, str]:
    """Host and process id."""
    host, _, number = presence.stem.removeprefix("launcher-").rpartition("-")
    return host, number


MANIFEST = "manifest.json"
RUN_FILE = "run.json"
#: It holds the command, and a command line can be long; a larger file is not one of ours.
RUN_FILE_BYTES = 4 << 20
_MANIFEST_KIND = Kind("a manifest of `tracekit collect`", starting_with(b'{"version": '))
_SEGMENT_KIND = Kind("a segment of `tracekit collect`", starting_with(MAGIC))
#: A segment or the facts of a rank: its number and, of a segment, that of the segment.
RANK_FILE = re.compile(r"rank-(\d+)(?:-(\d+)\.(?:ops|open)|\.facts)$")
_ATTEMPT = re.compile(r"attempt-(\d+)$")


def attempts(directory: str | os.PathLike[str]) -> list[int]:
    """The attempts a run directory holds, ascending."""
    matches = (_ATTEMPT.match(entry.name) for entry in Path(directory).iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def ranks_in(directory: Path) -> set[int]:
    """The ranks with files in the directory of an attempt."""
    matches = (RANK_FILE.match(entry.name) for entry in directory.iterdir())
    return {int(match.group(1)) for match in matches if match}


def why_unrecorded(directory: Path) -> str | None:
    """The message of the first process that could not be recorded; None if all were."""
    from tracekit.collectors.record.inject._tracekit_recorder import REASON_FILE  # only needed where ranks start

    try:
        return printable(read_small(directory / REASON_FILE).decode("utf-8", "replace"))
    except OSError:
        return None


def write_manifest(directory: Path) -> dict[str, Any]:
    """Write the manifest of an attempt: the files of its ranks. Raises OutputError."""
    _check_no_link(directory)
    files = [path.name for path in sorted(directory.iterdir()) if RANK_FILE.match(path.name)]
    manifest = {"version": VERSION, "files": {name: (directory / name).stat().st_size for name in files}}
    write_text(directory / MANIFEST, json.dumps(manifest), _MANIFEST_KIND)
    return manifest


def write_left_over(directory: Path, records: LeftOver) -> None:
    """Write the records that a dead rank left in memory as a segment of their own. Raises OutputError."""
    attempt = attempt_directory(directory, records.attempt)
    _check_no_link(attempt)
    path = attempt / f"{segment_stem(records.rank, LEFT_OVER_SEGMENT)}{SEALED_SUFFIX}"
    head = HEADER.pack(MAGIC, VERSION, RECORD.size, records.rank, records.attempt, records.process_id)
    with replacing(path, _SEGMENT_KIND) as temporary:
        temporary.write_bytes(head + records.records)


def _check_no_link(attempt: Path) -> None:
    if attempt.is_symlink():
        raise OutputError(f"{attempt}: is a link, which is not followed; no rank made it")


#: The token of the run, and a number that only this ping has.
_PING = struct.Struct("<16s8s")
#: That number, and the reference clock.
_ECHO = struct.Struct("<8sq")
TOKEN_BYTES = 16
#: Pings per measurement; the one with the shortest way there and back counts.
ROUNDS = 12
#: Seconds to wait for an echo.
ECHO_TIMEOUT_S = 0.5

Clock = Callable[[], int]


@dataclass(frozen=True)
class ClockSample:
    """One measurement: at `local_ns` on this host the reference clock was ahead by `offset_ns`."""

    local_ns: int
    offset_ns: int
    round_trip_ns: int


class EchoServer:
    """Answers pings that carry its `token` with the reference clock, until closed; ignores everything else.

    It listens on all interfaces, because which one leads to other hosts is unknown. Raises OSError, or RuntimeError if
    the process may start no more threads.
    """

    def __init__(self, host: str = "", clock: Clock = time.monotonic_ns) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._clock = clock
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._over, self._end = os.pipe()
        try:
            self._socket.bind((host, 0))
            self._socket.setblocking(False)
            self._thread = threading.Thread(target=self._answer, name="tracekit-clock", daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    @property
    def port(self) -> int:
        """The port of the server."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop answering."""
        os.write(self._end, b"!")
        self._thread.join()
        self._release()

    def _release(self) -> None:
        self._socket.close()
        os.close(self._over)
        os.close(self._end)

    def _answer(self) -> None:
        watched = [self._over, self._socket.fileno()]
        while self._over not in select.select(watched, [], [])[0]:
            with contextlib.suppress(OSError):  # the sender is unreachable by now
                ping, sender = self._socket.recvfrom(_PING.size + 1)
                if len(ping) != _PING.size:
                    continue
                token, number = _PING.unpack(ping)
                if secrets.compare_digest(token, self.token):
                    self._socket.sendto(_ECHO.pack(number, self._clock()), sender)


def measure(
    host: str, port: int, token: bytes, clock: Clock = time.monotonic_ns, *, rounds: int = ROUNDS
) -> ClockSample | None:
    """Ping the echo server `rounds` times; None if it did not answer. Raises OSError if it cannot be reached."""
    best: ClockSample | None = None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((host, port))  # others cannot answer
        for _ in range(rounds):
            sample = _ping(asker, token, clock)
            if sample is None and best is None:
                return None
            if sample is not None and (best is None or sample.round_trip_ns < best.round_trip_ns):
                best = sample
    return best


def _ping(asker: socket.socket, token: bytes, clock: Clock) -> ClockSample | None:
    number = secrets.token_bytes(8)
    deadline = time.monotonic() + ECHO_TIMEOUT_S
    sent_ns = clock()
    try:
        asker.send(_PING.pack(token, number))
        while (remaining_s := deadline - time.monotonic()) > 0:
            asker.settimeout(remaining_s)
            answer = asker.recv(_ECHO.size + 1)
            received_ns = clock()
            if len(answer) == _ECHO.size and answer[:8] == number:
                middle_ns = (sent_ns + received_ns) // 2
                return ClockSample(middle_ns, _ECHO.unpack(answer)[1] - middle_ns, received_ns - sent_ns)
    except (socket.timeout, ConnectionRefusedError):
        pass
    return None


def append_sample(directory: Path, host: str, sample: ClockSample) -> None:
    """Add one measurement of this host to the run directory."""
    with create(directory / f"clock-{host}.samples", append=True) as file:
        file.write(f"{json.dumps(asdict(sample))}\n".encode())
