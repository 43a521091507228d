"""When an op that runs on a device began and ended, without waiting for it.

The hooks take host times and are right for CPU and gloo ops. Ops of an accelerator go through a `DeviceTimer`: a mark
before and a mark after on the op's stream, drained a step or two later, oldest first, stopping at the first that is
not done. A runtime with CUDA events implements `Marks`; tests play the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

#: How long a base mark may serve, ns: elapsed times are float32 milliseconds and lose microseconds after that.
REBASE_AFTER_NS = 20_000_000_000


class Marks(Protocol):
    """Marks on a device's streams: pooled events."""

    def place(self) -> Any:
        """A mark on the current stream."""

    def done(self, mark: Any) -> bool:
        """Whether the device has passed the mark; never waits."""

    def elapsed_ms(self, earlier: Any, later: Any) -> float:
        """Milliseconds between two passed marks."""

    def release(self, mark: Any) -> None:
        """Give the mark back to the pool."""


@dataclass(frozen=True, slots=True)
class _Pending:
    begin: Any
    end: Any
    deliver: Callable[[int, int], None]


class DeviceTimer:
    """Times device ops on the host's monotonic clock.

    `pending_limit`: ops waiting to be drained; one more is dropped and counted in `dropped`.
    """

    def __init__(self, marks: Marks, clock: Callable[[], int], *, pending_limit: int = 8192) -> None:
        self.dropped = 0
        self._marks, self._clock, self._limit = marks, clock, pending_limit
        self._pending: deque[_Pending] = deque()
        self._base: Any = None
        self._base_ns = 0

    def begin(self) -> Any:
        """Mark the start of an op."""
        return self._marks.place()

    def end(self, begin: Any, deliver: Callable[[int, int], None]) -> None:
        """Mark the end of an op; `deliver(start_ns, end_ns)` is called when it has been drained."""
        if len(self._pending) >= self._limit:
            self.dropped += 1
            self._marks.release(begin)
            return
        self._pending.append(_Pending(begin, self._marks.place(), deliver))

    def rebase(self) -> None:
        """Place a new base mark when the device is idle enough to pass it at once; keep the old one otherwise."""
        if self._base is not None and self._clock() - self._base_ns < REBASE_AFTER_NS:
            return
        before = self._clock()
        mark = self._marks.place()
        if not self._marks.done(mark):
            self._marks.release(mark)
            return
        if self._base is not None:
            self.drain()
            if self._pending:  # they are measured from the old base
                self._marks.release(mark)
                return
            self._marks.release(self._base)
        self._base, self._base_ns = mark, (before + self._clock()) // 2

    def drain(self) -> int:
        """Deliver what is done, oldest first; returns how many. Never waits."""
        delivered = 0
        while self._base is not None and self._pending and self._marks.done(self._pending[0].end):
            op = self._pending.popleft()
            start_ns = self._base_ns + round(self._marks.elapsed_ms(self._base, op.begin) * 1e6)
            end_ns = start_ns + round(self._marks.elapsed_ms(op.begin, op.end) * 1e6)
            self._marks.release(op.begin)
            self._marks.release(op.end)
            op.deliver(start_ns, end_ns)
            delivered += 1
        return delivered
