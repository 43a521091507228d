"""How long the training thread was ready to run and had no processor.

In: the kernel's own accounting, read once a step. Out: nanoseconds of which only differences mean anything. Where the
kernel does not account (no Linux, no `schedstat`), nothing is known.
"""

from __future__ import annotations

import os


class RunQueue:
    """The waits of the thread that makes this object."""

    def __init__(self) -> None:
        try:
            self._accounts = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._accounts = -1

    def waited_ns(self) -> int | None:
        """Time spent waiting for a processor so far, ns; None where nobody counts."""
        if self._accounts < 0:
            return None
        return int(os.pread(self._accounts, 64, 0).split()[1])
