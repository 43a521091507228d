"""Run callbacks of collectives on gloo's threads without deadlocks at the end of a process group or a process.

A process group joins its threads when it ends, and its last owner may hold the GIL meanwhile: the C++ part of
DistributedDataParallel does. A thread that then needs the GIL, for a callback or to release a work and what torch keeps
with it, never returns: the rank hangs. When the interpreter shuts down, such a thread is killed, and the process with
it ("terminate called without an active exception"). Both can happen in torch alone, rarely; callbacks make them
more likely because its threads need the GIL for longer. This module ensures that neither can happen to a recorded job.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

#: Threads of a gloo process group: this many works can end at once.
GLOO_THREADS = 2
#: How long to wait for callbacks at the end, and how often to check, seconds. Callbacks of finished collectives take a
#: moment; those of unfinished ones never run.
TIMEOUT_S, POLL_S = 2.0, 0.0005


class Callbacks:
    """The callbacks of one rank."""

    def __init__(self) -> None:
        self._alive: dict[int, None] = {}
        # Keeps gloo's threads from being the last owners of their latest works.
        self._latest: defaultdict[int, deque[Any]] = defaultdict(functools.partial(deque, maxlen=GLOO_THREADS))

    def add(self, future: Any, tell: Callable[..., Any], *args: Any) -> None:
        """Call `tell(*args)` when `future` completes."""
        future.add_done_callback(_Callback(self._alive, tell, args))

    def hold(self, group: int, work: Any) -> None:
        """Keep a gloo work alive until its process group has started some more."""
        self._latest[group].append(work)

    def wait_for_all(self) -> None:
        """Let gloo's threads finish the callbacks while they can still acquire the GIL."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._alive and time.monotonic() < deadline:
            time.sleep(POLL_S)


class _Callback:
    """Listed in `alive` until the thread that called it has released it."""

    __slots__ = ("_alive", "_args", "_tell")

    def __init__(self, alive: dict[int, None], tell: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._alive, self._tell, self._args = alive, tell, args
        alive[id(self)] = None

    def __call__(self, _future: Any) -> None:
        self._tell(*self._args)

    def __del__(self) -> None:
        self._alive.pop(id(self), None)
