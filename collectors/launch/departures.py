"""Find the process of a job that left first.

A rank that ends silently (`sys.exit`, `os._exit`, the OOM killer) makes the others fail with errors of their own, and
the launcher of the ranks blames one of those. In: the processes of this host while they live, and the last words of
ranks. Out: the rank that left first, if it left without an error and others failed after it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from tracekit.collectors.launch.hang_pulses import Pulse
from tracekit.collectors.record.small_file import MOST_DUMP_BYTES, read_small
from tracekit.collectors.record.wire_format import LAST_WORDS_SUFFIX, rank_stem


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
    """The rank that left first, if that explains why others failed. A rank that ended with an error of its own has
    reported it itself.

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
