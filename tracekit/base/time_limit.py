"""A limit to the time that a question of somebody else may take.

In: seconds, around the work; looks at the time inside, where work proceeds in pieces. Out: TimeLimitError once the time
is over. The limit holds in the thread that set it; without one, nothing is limited.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tracekit.base.errors import TimeLimitError

#: Until when, by the monotonic clock, and how many seconds that were; the latter for the message.
_limit: ContextVar[tuple[float, float] | None] = ContextVar("limit", default=None)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let the work inside take at most that long, until it next calls `check_time`."""
    before = _limit.set((time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _limit.reset(before)


def check_time() -> None:
    """Raise TimeLimitError if the time of this thread's `time_limit` is over."""
    limit = _limit.get()
    if limit is not None and time.monotonic() > limit[0]:
        raise TimeLimitError(
            f"it took longer than {limit[1]:g} s; ask for less at a time, such as `worker=1,2` or `step=100-105`"
        )
