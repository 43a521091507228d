"""How long the training thread slept: neither ran nor waited for a processor.

In: the kernel's own accounting, read where a hook asks. Out: nanoseconds of which only differences mean anything.
A busy machine does not add to them, so that what a script waits for by itself (a sleep, a file, a lock) can be told
from work that takes long. Where the kernel does not account (no Linux, no `schedstat`), nobody ever slept.
"""

from __future__ import annotations

import os
import time


class Asleep:
    """The sleep of the thread that makes this object."""

    def __init__(self) -> None:
        try:
            self._accounts = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._accounts = -1

    def ns(self) -> int:
        """Time asleep so far, ns; of the thread that made this object only."""
        if self._accounts < 0:
            return 0
        waited = int(os.pread(self._accounts, 64, 0).split()[1])  # for a processor; what it ran is a tick old there
        return time.monotonic_ns() - time.thread_time_ns() - waited
