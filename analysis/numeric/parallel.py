"""Work on large arrays on all cores.

In: functions that spend their time in numpy or in compiled kernels, both of which release the GIL. Out: the results
that they give one after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

Part = TypeVar("Part")
First = TypeVar("First")
Second = TypeVar("Second")

#: Below this many numbers, threads cost more than they save.
WORTH_THREADS = 1_000_000

_here = threading.local()


def each(
    run: Callable[[Part], object], parts: Sequence[Part], *, numbers: int = WORTH_THREADS, threads: int | None = None
) -> None:
    """Call `run` with every part, on as many threads as there are cores; on one if there are few numbers to read."""
    inside = getattr(_here, "inside", False)  # else a thread of the pool would wait for its own pool for ever
    alone = len(parts) == 1 or inside or numbers < WORTH_THREADS
    workers = 1 if alone else threads or os.cpu_count() or 1
    if workers == 1:
        for part in parts:
            run(part)
    else:
        try:
            running = _pool(workers).map(run, parts)
        except RuntimeError:  # the interpreter is ending and starts no threads
            each(run, parts, threads=1)
        else:
            list(running)


def both(first: Callable[[], First], second: Callable[[], Second], *, numbers: int) -> tuple[First, Second]:
    """Call two functions, at the same time if they read many numbers, and return both results."""
    results: dict[int, Any] = {}
    each(lambda which: results.__setitem__(which, (first, second)[which]()), range(2), numbers=numbers)
    return results[0], results[1]


def slices(length: int, numbers: int) -> list[slice]:
    """Split an axis into one slice per core; into one only if the array has few numbers."""
    count = 1 if numbers < WORTH_THREADS else max(1, min(os.cpu_count() or 1, length))
    bounds = [length * part // count for part in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="arrays", initializer=lambda: setattr(_here, "inside", True))


os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads stay with the parent
