"""Measures how long the training thread was ready to run but had no processor.

In: the kernel's accounting, read once per step. Out: nanoseconds, of which only differences are meaningful; None if the
kernel has no `schedstat`.
"""

from __future__ import annotations

import os


class RunQueue:
    """The waits of the thread that creates this object."""

    def __init__(self) -> None:
        try:
            self._accounts = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._accounts = -1

    def waited_ns(self) -> int | None:
        """Total time spent waiting for a processor, ns; None if the kernel does not count it."""
        if self._accounts < 0:
            return None
        return int(os.pread(self._accounts, 64, 0).split()[1])
