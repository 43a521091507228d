"""Clocks of workers that were off and were corrected.

In: the replay of a pipeline. Out: `ClockReport`.
"""

from __future__ import annotations

from msgspec import Struct

from tracekit.trace.model import Worker


class WorkerClock(Struct, frozen=True):
    """How far a worker's clock was ahead on average, seconds, with its standard error and its drift per second.

    `jump_s`, `jump_step`: by how much it was set ahead in mid-trace, and the first step after that, None if it was not.
    """

    dp_rank: int
    pp_rank: int
    offset_s: float
    error_s: float
    drift: float
    jump_s: float
    jump_step: int | None

    @property
    def worker(self) -> Worker:
        """The worker."""
        return Worker(self.dp_rank, self.pp_rank)


class ClockReport(Struct, frozen=True):
    """Which clocks were off. `untied`: whose clocks could not be compared, None if all could be."""

    offsets: tuple[WorkerClock, ...]
    untied: str | None
