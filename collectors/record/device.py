"""Times ops on a GPU with CUDA events, without ever waiting for one.

In: the marks that hooks place in streams. Out: records on the device's own clock, flagged as such, and readings of that
clock against the host's, which the merge uses to convert device times to host times. If torch is built without CUDA,
there is no `DeviceClock` and the hooks take host times. They also do so if torch has CUDA but the process does not use
it, as on a machine without a driver: until the process uses CUDA, only `is_initialized` is called.

Everything runs in the training threads, nothing in the writer: querying an event while another thread captures a CUDA
graph can invalidate the capture, and only the training thread can know that no capture is under way. It queries ops at
the boundaries of steps, oldest first, and stops at the first that is not done; an op is therefore queried a step or two
after its launch, when it is done. The end of a step waits in the same queue: a step is complete when all its ops are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from .recorder import Record
from .wire_format import Category, Flag

#: A host time in ns, or a `Mark`. Any, because without a device they are added and subtracted without a check.
Instant = Any
#: category, flags, name number, step, microbatch, stage index, peer or group number.
Head = tuple[int, int, int, int, int, int, int]

#: How often the clock is read and the base of elapsed times renewed, ns. Elapsed times are float32 milliseconds, which
#: are exact to half a microsecond up to 16 s. The first readings come sooner, so that short runs know their drift.
REBASE_NS = 10_000_000_000
FIRST_REBASE_NS = 1_000_000_000
#: How often finished ops are drained within long steps, ns.
DRAIN_NS = 1_000_000_000
#: Maximum number of ops that wait to be drained; further ones are dropped and counted, as when a GPU hangs.
PENDING_LIMIT = 1 << 15
#: Events kept for reuse.
POOL_LIMIT = 1 << 12
#: Take this many readings at a time and keep the narrowest; query each this many times before leaving it for later.
READINGS, QUERIES = 3, 64


class Mark:
    """A place in a stream. Its event returns to the pool when the mark is released."""

    __slots__ = ("_pool", "event", "host_ns")

    def __init__(self, event: Any, host_ns: int, pool: deque[Any]) -> None:
        self.event, self.host_ns, self._pool = event, host_ns, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


class _Base(NamedTuple):
    """An event that the device passed at `device_ns` of its clock, between `before_ns` and `after_ns` on the host."""

    mark: Mark
    device_ns: int
    before_ns: int
    after_ns: int


class _Pending(NamedTuple):
    """A record that waits for the device; without a `base` it has host times and waits only for earlier records."""

    head: Head
    begin: Instant
    end: Instant
    extra: Instant
    base: _Base | None


class DeviceClock:
    """Times the ops of one rank on the clock of its GPU; a rank has one GPU, ops on others are timed on the host.

    `cuda`: `torch.cuda`, of which it uses streams, events and what is current.
    `deliver` takes finished records, `tell` readings of the clock: device ns, host ns before, host ns after. `opened`
    is called when the clock starts, `failed` with the error if CUDA fails: from then on, host times are used.
    Device times count from the host time of the first reading, so they are host times but for drift.
    """

    def __init__(
        self,
        cuda: Any,
        deliver: Callable[[Record], None],
        tell: Callable[[tuple[int, int, int]], None],
        *,
        opened: Callable[[int], None],
        failed: Callable[[BaseException], None],
        host_clock: Callable[[], int] = time.monotonic_ns,
        pending_limit: int = PENDING_LIMIT,
    ) -> None:
        self.dropped = 0
        self.off = False
        self._cuda, self._deliver, self._tell = cuda, deliver, tell
        self._opened, self._failed, self._host_clock, self._limit = opened, failed, host_clock, pending_limit
        self._thread = threading.get_ident()
        self._pool: deque[Any] = deque(maxlen=POOL_LIMIT)
        self._pending: deque[_Pending] = deque()
        self._index = -1
        self._side: Any = None
        self._candidate: Mark | None = None
        self._base: _Base | None = None
        self._rebase_after_ns = FIRST_REBASE_NS
        self._drained_ns = 0
        self._compute_ns = 0
        self._dropped_steps: set[int] = set()

    @property
    def active(self) -> bool:
        """True if ops are timed on the device now."""
        return self._base is not None and not self.off

    def owns(self, tensor: Any) -> bool:
        """True if the tensor is on a GPU."""
        return bool(getattr(tensor, "is_cuda", False))

    @property
    def used(self) -> bool:
        """True if the process has used a GPU so far."""
        return self._base is not None or self._cuda.is_initialized()

    def capturing(self) -> bool:
        """True if a graph is being captured on the current stream, or if CUDA fails to answer: then call nothing else.

        A process that has not used CUDA captures nothing. It is not queried then: without a driver, the call raises.
        """
        try:
            return bool(self._cuda.is_initialized() and self._cuda.is_current_stream_capturing())
        except Exception as error:
            self._switch_off(error)
            return True

    def instant(self) -> Instant:
        """A mark on the current stream; the host's time while a graph is captured and on another device."""
        host_ns = self._host_clock()
        try:
            if not self.active or self._cuda.is_current_stream_capturing():
                return host_ns
            stream = self._cuda.current_stream()
            if stream.device_index != self._index:
                return host_ns
            mark = self._new_mark(host_ns)
            mark.event.record(stream)
        except Exception as error:
            self._switch_off(error)
            return host_ns
        return mark

    def keep(self, head: Head, begin: Instant, end: Instant, extra: Instant) -> None:
        """Accept a record: if both ends are marks, deliver it later, on the device's clock; else now, on the host's."""
        timed = isinstance(begin, Mark) and isinstance(end, Mark)
        if self.off or not (timed or (head[0] == Category.STEP and self._pending)):
            self._deliver(self._host_record(head, begin, end, extra))
            return
        if len(self._pending) >= self._limit:
            self.dropped += 1
            self._dropped_steps.add(head[3])
            return
        self._pending.append(_Pending(head, begin, end, extra, self._base if timed else None))
        if timed and end.host_ns - self._drained_ns > DRAIN_NS and threading.get_ident() == self._thread:
            self.tick()

    def take_compute_ns(self) -> int:
        """Device time inside computes drained since the last call, ns."""
        compute_ns, self._compute_ns = self._compute_ns, 0
        return compute_ns

    def tick(self) -> None:
        """Open the clock if CUDA is in use by now, drain finished ops, read the clock if due. Never waits."""
        if self.off:
            return
        try:
            if not self._cuda.is_initialized() or self._cuda.is_current_stream_capturing():
                return
            self._drain()
            now_ns = self._drained_ns = self._host_clock()
            if self._base is None or now_ns - self._base.after_ns >= self._rebase_after_ns:
                self._read_clock()
        except Exception as error:
            self._switch_off(error)

    def close(self) -> int:
        """Drain finished ops and read the clock a last time; returns the number of ops given up."""
        self._rebase_after_ns = 0
        self.tick()
        unfinished = sum(op.base is not None for op in self._pending)
        self.off = True
        self._pending.clear()
        return unfinished

    def _new_mark(self, host_ns: int) -> Mark:
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        return Mark(event, host_ns, self._pool)

    def _drain(self) -> None:
        """Deliver what the device has passed, oldest first."""
        pending = self._pending
        while pending:
            op = pending[0]
            if op.base is not None and not op.end.event.query():
                break
            try:
                record = self._record_of(op)
            except RuntimeError:
                marks = (mark for mark in (op.begin, op.end, op.extra) if isinstance(mark, Mark))
                if all(mark.event.query() for mark in marks):  # the device has passed them
                    raise
                break  # it began on a stream that the stream of its end did not wait for
            self._deliver(record)
            pending.popleft()

    def _record_of(self, op: _Pending) -> Record:
        head, base = op.head, op.base
        if base is None:
            return self._host_record(head, op.begin, op.end, op.extra)
        begin_ns = base.device_ns + round(base.mark.event.elapsed_time(op.begin.event) * 1e6)
        end_ns = begin_ns + round(op.begin.event.elapsed_time(op.end.event) * 1e6)
        extra = op.extra
        if isinstance(extra, Mark):
            extra = begin_ns + round(op.begin.event.elapsed_time(extra.event) * 1e6)
        if head[0] == Category.COMPUTE:
            self._compute_ns += end_ns - begin_ns
        head = self._completed(head)
        return (head[0], head[1] | Flag.DEVICE_CLOCK, *head[2:], begin_ns, end_ns, extra)

    def _host_record(self, head: Head, begin: Instant, end: Instant, extra: Instant) -> Record:
        return (*self._completed(head), host_ns(begin), host_ns(end), host_ns(extra))

    def _completed(self, head: Head) -> Head:
        """The head of a record; a step whose ops were dropped is not complete."""
        if head[0] == Category.STEP and head[3] in self._dropped_steps:
            self._dropped_steps.discard(head[3])
            return (head[0], head[1] & ~Flag.COMPLETE, *head[2:])
        return head

    def _read_clock(self) -> None:
        """Pair the two clocks: record an event on an otherwise empty stream of our own, between two host times.

        The event is done in microseconds unless the GPU has one queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1).
        In that case it is queried again at the next step, and the two times lie far apart; the clock fit allows for it.
        """
        if self._side is None:
            self._index = self._cuda.current_device()
            self._side = self._cuda.Stream(priority=-1)
        best: _Base | None = None
        for _ in range(READINGS):
            reading = self._reading()
            if reading is None:
                if (
                    best is not None
                ):  # if queried again when the next is due, it would be as wide as the time until then
                    self._candidate = None
                break
            if best is None or reading.after_ns - reading.before_ns < best.after_ns - best.before_ns:
                best = reading
        if best is None:
            return
        if self._base is None:
            self._opened(self._index)
        else:
            self._rebase_after_ns = min(REBASE_NS, 2 * self._rebase_after_ns)
        self._base = best
        self._tell((best.device_ns, best.before_ns, best.after_ns))

    def _reading(self) -> _Base | None:
        """One reading; None if the device has not passed the event yet."""
        if self._candidate is None:
            self._candidate = self._new_mark(self._host_clock())
            self._candidate.event.record(self._side)
        mark = self._candidate
        for _ in range(QUERIES):
            if mark.event.query():
                break
        else:
            return None
        after_ns = self._host_clock()
        self._candidate = None
        if self._base is None:
            device_ns = (mark.host_ns + after_ns) // 2
        else:
            device_ns = self._base.device_ns + round(self._base.mark.event.elapsed_time(mark.event) * 1e6)
        return _Base(mark, device_ns, mark.host_ns, after_ns)

    def _switch_off(self, error: BaseException) -> None:
        """Use host times from now on, also for ops that wait, because CUDA failed."""
        if self.off:
            return
        self.off = True
        with contextlib.suppress(IndexError):  # empty: another thread may be draining
            while True:
                op = self._pending.popleft()
                self._deliver(self._host_record(op.head, op.begin, op.end, op.extra))
        self._failed(error)


def host_ns(instant: Instant) -> int:
    """The host's time of an instant."""
    return instant.host_ns if isinstance(instant, Mark) else int(instant)
