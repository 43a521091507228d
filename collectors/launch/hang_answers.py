"""Finds the positions of the ranks of a hanging job: from their answers, or from outside if they do not answer.

In: an attempt whose ranks were requested to answer. Out: a dump per rank in one folder. A rank of this host that does
not answer is inspected from outside: has its process ended, is it stopped, or is it alive with the interpreter locked?
Its stack comes from py-spy, native frames included, if that is installed and permitted, else from a signal that
`faulthandler` answers without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tracekit.collectors.record.small_file import MOST_BYTES, MOST_DUMP_BYTES, open_regular, read_small, write_whole
from tracekit.collectors.record.wire_format import (
    FACTS_SUFFIX,
    HANG_DUMP,
    LAST_WORDS_SUFFIX,
    PULSE,
    PULSE_SUFFIX,
    STACKS_SUFFIX,
    rank_stem,
)

#: A rank checks four times a second for a request. One that has not answered after this many seconds is inspected
#: from outside. On a busy machine all answer late, so each has at least `PATIENCE` times as long as the slowest answer.
ANSWER_S, PATIENCE = 1.5, 2
#: Polling period of the folder, and time limit for a stack, seconds.
LOOK_S, STACK_S = 0.05, 2.0

_ENDED, _STOPPED = "its process has ended", "its process is stopped (SIGSTOP, or a debugger)"
_STATES = {None: _ENDED, "Z": _ENDED, "X": _ENDED, "T": _STOPPED, "t": _STOPPED}
_LOCKED = "its process is alive but does not answer: the interpreter is locked, or waits in a system call"
_LEFT_FIRST = "its process ended before all others, by os._exit or a signal (such as the OOM killer's)"
_HOLDS_LOCK = "its process is alive but does not answer: its thread {thread} holds the interpreter's lock"


def write_departure(attempt: Path, folder: Path, ended_ns: Mapping[int, int]) -> bool:
    """Write the dumps of the rank that left first, and of those that failed after it, to `folder`; return whether there
    is one. Raises OSError.
    """
    departure = find_departure(attempt, read_pulses(attempt), ended_ns)
    if departure is None:
        return False
    for rank in departure.failed:
        _copy_last_words(attempt, rank, folder)
    if not _copy_last_words(attempt, departure.rank, folder):
        _write(folder, departure.rank, socket.gethostname(), _LEFT_FIRST, None)
    return True


def gather(attempt: Path, folder: Path, ended_ns: Mapping[int, int]) -> None:
    """Write a dump of every rank of this host that can hold the job up to `folder`. Raises OSError.

    If a rank has left and others failed after it, processes that have ended were stopped by their launcher.
    """
    somebody_left = write_departure(attempt, folder, ended_ns)
    pulses, host = read_pulses(attempt), socket.gethostname()
    ranks_here = {rank for rank in pulses if host_of(attempt, rank) == host}
    started_at, slowest = time.monotonic(), 0.0
    missing = _missing(folder, pulses)
    while missing and time.monotonic() - started_at < max(ANSWER_S, PATIENCE * slowest):
        for rank in missing:  # a process that is about to end no longer answers
            _copy_last_words(attempt, rank, folder)
        states = {rank: _STATES.get(state_of(pulses[rank].process_id)) for rank in missing & ranks_here}
        cannot = {rank: state for rank, state in states.items() if state}
        if somebody_left:
            ranks_here -= {rank for rank, state in cannot.items() if state == _ENDED}
            pulses = {rank: pulse for rank, pulse in pulses.items() if cannot.get(rank) != _ENDED}
        for rank in _missing(folder, pulses) & cannot.keys():
            stack = _stack_of_stopped(pulses[rank]) if cannot[rank] == _STOPPED else None
            _write(folder, rank, host, cannot[rank], stack)
        still = _missing(folder, pulses)
        if len(still) < len(missing - cannot.keys()):
            slowest = time.monotonic() - started_at
        missing = still
        if missing:
            time.sleep(LOOK_S)
    for rank in sorted(missing & ranks_here):
        process, stack = _seen_from_outside(attempt, rank, pulses[rank])
        if rank in _missing(folder, pulses):  # it may have answered meanwhile
            _write(folder, rank, host, process, stack)


def _copy_last_words(attempt: Path, rank: int, folder: Path) -> bool:
    """Copy what a rank wrote as its process ended, as its answer; return whether it wrote anything."""
    try:
        words = read_small(attempt / f"{rank_stem(rank)}{LAST_WORDS_SUFFIX}", MOST_DUMP_BYTES)
    except FileNotFoundError:
        return False
    write_whole(folder / HANG_DUMP.format(rank=rank), words)
    return True


def _missing(folder: Path, pulses: Mapping[int, Pulse]) -> set[int]:
    return {rank for rank in pulses if not (folder / HANG_DUMP.format(rank=rank)).exists()}


def _write(folder: Path, rank: int, host: str, process: str, stack: list[str] | None) -> None:
    about = {"rank": rank, "host": host, "process": process, "stack": stack}
    content = {"version": "2.10", "entries": [], "tracekit": about}
    write_whole(folder / HANG_DUMP.format(rank=rank), json.dumps(content).encode())


def _seen_from_outside(attempt: Path, rank: int, pulse: Pulse) -> tuple[str, list[str] | None]:
    """Describe the state of a live process that does not answer, with the stack of its main thread, innermost first."""
    for options in (("--native",), ()):
        threads = _py_spy(pulse.process_id, *options)
        if threads:
            holder = next((thread["thread_name"] for thread in threads if thread.get("owns_gil")), None)
            process = _LOCKED if holder is None else _HOLDS_LOCK.format(thread=holder)
            return process, _frames_of_main(threads, pulse.process_id)
    return _LOCKED, _stack_by_signal(attempt / f"{rank_stem(rank)}{STACKS_SUFFIX}", pulse)


def _stack_of_stopped(pulse: Pulse) -> list[str] | None:
    """The stack of a stopped process, read without its help."""
    threads = _py_spy(pulse.process_id, "--nonblocking")
    return _frames_of_main(threads, pulse.process_id) if threads else None


def _py_spy(process_id: int, *options: str) -> list[dict[str, Any]]:
    """The threads of a process from `py-spy dump --json`; none if it is not installed or not permitted."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603  no shell; a program of the user's own path, and a number
            [program, "dump", "--json", *options, "--pid", str(process_id)],
            capture_output=True,
            timeout=STACK_S,
            check=True,
        )
        threads: list[dict[str, Any]] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return threads


def _frames_of_main(threads: list[dict[str, Any]], process_id: int) -> list[str] | None:
    """The main thread's frames; its number is that of the process."""
    main = next((thread for thread in threads if thread.get("os_thread_id") in (process_id, None)), None)
    if main is None:
        return None
    frames = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in main["frames"]]
    named = [frame for frame in frames if " 0x" not in frame]  # native frames without a symbol tell nothing
    return named or frames


def _stack_by_signal(path: Path, pulse: Pulse) -> list[str] | None:
    """Have the process write its stacks, if it supports that; returns the stack of the main thread."""
    if not path.exists() or not handles(pulse.process_id, pulse.signal):
        return None
    before = path.stat().st_size
    try:
        os.kill(pulse.process_id, pulse.signal)
    except OSError:  # it has ended, or belongs to another user
        return None
    end = time.monotonic() + STACK_S
    while (stack := _last_stack(path, before)) is None and time.monotonic() < end:
        time.sleep(LOOK_S)
    return stack


def _last_stack(path: Path, begin: int) -> list[str] | None:
    """The stack of the main thread, which `faulthandler` writes last; None until it is complete."""
    with open(open_regular(path), "rb") as file:
        file.seek(begin)
        text = file.read(MOST_DUMP_BYTES).decode("utf-8", "replace")
    frames: list[str] = []
    for line in text.splitlines():
        if line.startswith(("Thread", "Current thread")):
            frames = []
        elif line.startswith("  File "):
            frames.append(_frame(line))
    return frames if frames and text.endswith("\n") else None


def _frame(line: str) -> str:
    place, _, rest = line.strip().removeprefix("File ").rpartition(", line ")
    number, _, function = rest.partition(" in ")
    return f"{place.strip(chr(34))}:{number} {function}"


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life of a rank. `count` grows while it moves. `signal` makes it write its stacks; 0: none does."""

    count: int
    process_id: int
    signal: int
    world_size: int


def read_pulses(attempt: Path) -> dict[int, Pulse]:
    """The pulse of each rank that has begun."""
    pulses: dict[int, Pulse] = {}
    for path in attempt.glob(f"rank-{'[0-9]' * 6}*{PULSE_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, struct.error):  # no pulse, or not whole yet
            pulses[int(path.stem.removeprefix("rank-"))] = Pulse(*PULSE.unpack(read_small(path)))
    return pulses


def all_began(pulses: Mapping[int, Pulse]) -> bool:
    """True if every rank of the job has a pulse; False if other nodes write theirs elsewhere."""
    return bool(pulses) and len(pulses) == max(pulse.world_size for pulse in pulses.values())


def host_of(attempt: Path, rank: int) -> str | None:
    """The host on which a rank runs; None if unknown."""
    try:
        with open(open_regular(attempt / f"{rank_stem(rank)}{FACTS_SUFFIX}"), "rb") as file:
            fact = json.loads(file.readline(MOST_BYTES))  # the first one describes the process
        return str(fact["value"]["host"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def state_of(process_id: int) -> str | None:
    """The state letter of a process (proc(5)); None if there is none."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None


def handles(process_id: int, number: int) -> bool:
    """True if a process has a handler for a signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8", errors="replace")
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return False
    return number > 0 and bool(caught >> (number - 1) & 1)


class Departures:
    """Records when processes end, in a thread that sleeps until one does."""

    def __init__(self) -> None:
        self.ended_ns: dict[int, int] = {}
        self._followed: set[int] = set()
        self._processes: dict[int, int] = {}
        self._poll: select.epoll | None = None

    def follow(self, process_ids: Iterable[int]) -> None:
        """Follow processes of this host from now on, except those that have ended or are hidden."""
        for process_id in set(process_ids) - self._followed:
            self._followed.add(process_id)
            try:
                descriptor = os.pidfd_open(process_id)
            except (AttributeError, OSError):  # an old kernel; it has ended
                continue
            self._processes[descriptor] = process_id
            if self._poll is None:
                self._poll = select.epoll()
                threading.Thread(target=self._watch, args=(self._poll,), name="departures", daemon=True).start()
            self._poll.register(descriptor, select.EPOLLIN)

    def _watch(self, poll: select.epoll) -> None:
        while True:
            for descriptor, _ in poll.poll():
                self.ended_ns[self._processes[descriptor]] = time.time_ns()
                poll.unregister(descriptor)
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Departure:
    """`rank` left first, without an error; `failed` are the ranks that ended with an error after it."""

    rank: int
    failed: frozenset[int]


def find_departure(attempt: Path, pulses: Mapping[int, Pulse], ended_ns: Mapping[int, int]) -> Departure | None:
    """The rank that left first, if that explains why others failed: one that ends silently (`sys.exit`, the OOM killer)
    makes them fail with errors of their own. A rank that ended with an error has reported it itself.

    `ended_ns`: when processes were seen to end. The last words of a rank come before its connections close, and so
    before its peers can fail. Raises OSError.
    """
    words = {rank: last for rank in pulses if (last := _last_words(attempt, rank)) is not None}
    left_ns = {rank: ended_ns[pulse.process_id] for rank, pulse in pulses.items() if pulse.process_id in ended_ns}
    left_ns |= {rank: last.taken_ns for rank, last in words.items()}
    failed = frozenset(rank for rank, last in words.items() if last.error is not None)
    if not left_ns or not failed:
        return None
    first = min(left_ns, key=left_ns.__getitem__)
    return None if first in failed else Departure(first, failed)


class _LastWords(Struct):
    """What a rank left behind as its process ended. `error`: of the rank itself."""

    taken_ns: int
    error: str | None = None


class _Dump(Struct):
    tracekit: _LastWords


def _last_words(attempt: Path, rank: int) -> _LastWords | None:
    """The last words of a rank; None if there are none, or if they are damaged."""
    try:
        content = read_small(attempt / f"{rank_stem(rank)}{LAST_WORDS_SUFFIX}", MOST_DUMP_BYTES)
        return msgspec.json.decode(content, type=_Dump).tracekit
    except (FileNotFoundError, msgspec.DecodeError):
        return None
