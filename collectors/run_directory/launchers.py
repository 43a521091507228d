"""The launchers of a run, each a file in its directory: which of them live, and how their commands ended.

In: `launcher-HOST-PID.running`, which its launcher touches now and then and renames to `.done` at the end, with the
exit code of the command in it. Out: the files, and the end of the run in words. Imports the standard library only: it
runs where the training does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from tracekit.collectors.record.small_file import create, read_small

_RUNNING, _DONE = ".running", ".done"
#: Characters of an exit code.
_LONGEST_CODE = 12
#: Exit codes above it are of commands that a signal ended, as shells report them.
_SHELL_SIGNALS = 128


def announce(directory: Path) -> Path:
    """Announce that a launcher in this process runs a command; return the file of the announcement."""
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
    return {_whose(presence)[0] for presence in running_launchers(directory)}


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
    host, number = _whose(presence)
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
            ends.append((last_sign_ns(path), int(read_small(path, _LONGEST_CODE)), _whose(path)[0]))
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


def _whose(presence: Path) -> tuple[str, str]:
    """Host and process id."""
    host, _, number = presence.stem.removeprefix("launcher-").rpartition("-")
    return host, number
