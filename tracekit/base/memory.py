"""How a process that analyses large arrays treats freed memory.

Each function must be called before the library it affects allocates anything. Only the command line calls them: in a
library, that decision is up to the user. A reader may do without garbage collection while it reads.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

#: Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _HEAPS = -1, -3, -8
_LARGEST_KEPT = 1 << 30
#: Options of jemalloc, which polars allocates with.
_POLARS, _SOON, _LATER = (
    "_RJEM_MALLOC_CONF",
    "dirty_decay_ms:50,muzzy_decay_ms:0",
    "dirty_decay_ms:500,muzzy_decay_ms:0",
)


def collect_seldom() -> None:
    """Run Python's garbage collector after half a million new objects. The default, 700, makes imports a tenth and
    reports a seventh slower for nothing: a report of a small job makes 100,000 objects, hardly any of them in cycles.
    """
    gc.set_threshold(500_000)


def return_soon() -> None:
    """Make polars return freed memory after 50 ms, when the next column has used it again.

    By default, polars keeps it for seconds, longer than most commands run.
    """
    os.environ.setdefault(_POLARS, _SOON)


def return_later() -> None:
    """Make polars keep freed memory for half a second, for reading many small pieces one after the other.

    Getting every piece anew from the system takes a third of the processor time of a report on 100,000 jobs.
    """
    if os.environ.get(_POLARS) == _SOON:  # else the user has decided
        os.environ[_POLARS] = _LATER


def reuse_large_arrays() -> None:
    """Let a new array reuse the memory of a freed one, where glibc would ask the system for zeroed pages each time.

    On a job of thousands of workers, that takes a tenth of the processor time; all threads allocate from one heap, so
    that one can use what another has freed: another twentieth. No effect on other systems.

    numpy asks for huge pages, which take the system longer to find and clear than they save here: in a virtual machine,
    a tenth of the processor time.
    """
    import ctypes

    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")

    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, _LARGEST_KEPT)
        mallopt(_HEAPS, 1)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: with millions of small objects without cycles, it would take longer than reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
