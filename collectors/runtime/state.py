"""What the hooks of collectives read of a session in each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.collectors.runtime.device import Instant


class PlainState:
    """The base of a session. `thread_id`: the training thread; the rest is described there.

    `callbacks`: compiled ones that gloo's threads have not called and released.
    """

    step: int
    busy: int
    optimizing: bool
    step_over: bool
    held: tuple[str, Instant, Instant, int, int, int] | None
    thread_id: int
    callbacks = 0


if TYPE_CHECKING:
    State = PlainState
else:
    try:
        from tracekit.collectors.runtime._native import State
    except ImportError:  # as in ring.py
        State = PlainState
