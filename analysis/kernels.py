"""How compiled functions are compiled: one decorator for all of them.

In: a function over arrays, in the subset of Python that numba compiles. Out: the same as machine code, compiled once
per machine, cached on disk, free of the interpreter's lock so that threads run it side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import config
from numba.core.registry import cpu_target


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call."""
    compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return compiled


def _start_lean() -> None:
    """Set numba up without optimising its own helpers.

    Every process compiles numba's memory-management helpers anew, cache or not. A dozen tiny functions gain nothing
    from the optimiser, but loading it costs 10 MB. Our kernels are compiled later, fully optimised.
    """
    settings: Any = config
    level = settings.OPT
    settings.OPT = type(level)(0)
    try:
        cpu_target.target_context.refresh()
    finally:
        settings.OPT = level


_start_lean()
