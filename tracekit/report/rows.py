"""The rows of a report's tables: what each kind of op, stage, rank, worker, step or label costs.

In: figures of an attribution, a critical path or a recording. Out: plain data; a key that a source lacks is absent.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct

from tracekit.analysis.gpu.gpu_times import GroupMatches
from tracekit.report.plain_data import Maybe, Number
from tracekit.trace.model import Worker


class OfLabel(Struct, frozen=True):
    """What the ops of one value of a label cost."""

    labels: str
    value: str
    ops: int
    slowdown: Number
    slowdown_error: Number
    added_s: float
    saved_s: float


class OnPath(Struct, frozen=True, kw_only=True):
    """Time of ops of one kind, of comparable ops, of a rank or of a worker on the critical path."""

    kind: Maybe[str | None] = UNSET
    peer: Maybe[str | None] = UNSET
    rank: Maybe[int] = UNSET
    dp_rank: Maybe[int] = UNSET
    pp_rank: Maybe[int] = UNSET
    recorded_s: float
    original_s: Maybe[float] = UNSET
    ideal_s: Maybe[float] = UNSET


class Contribution(Struct, frozen=True, kw_only=True):
    """What ops of one kind, a pipeline stage or a data-parallel rank cost."""

    kind: Maybe[str] = UNSET
    pp_rank: Maybe[int] = UNSET
    dp_rank: Maybe[int] = UNSET
    ops: Maybe[int] = UNSET
    slowdown: Number
    slowdown_error: Number
    waste: Maybe[Number] = UNSET
    launch_delay_slowdown: Maybe[Number] = UNSET
    fixed_step_time_s: Maybe[Number] = UNSET
    saved_s: Number


class OfWorker(Struct, frozen=True):
    """What a worker costs."""

    dp_rank: int
    pp_rank: int
    rank: int | None
    host: str | None
    slowdown: float
    slowdown_error: Number
    slowdown_approx: float

    @property
    def worker(self) -> Worker:
        """The worker."""
        return Worker(self.dp_rank, self.pp_rank)


class OfStep(Struct, frozen=True):
    """One step."""

    step: int
    slowdown: Number
    recorded_s: float
    original_s: float
    ideal_s: float
    lost_s: Number
    tokens: Maybe[Number] = UNSET
    loss: Maybe[Number] = UNSET


class MarkedStep(Struct, frozen=True):
    """A step that the profiler marked: from the end of the one before to its own, on all ranks."""

    step: int
    recorded_s: float


class Correlation(Struct, frozen=True):
    """How forwards and backwards of a stage go together."""

    pp_rank: int
    r: Number


class OfRank(Struct, frozen=True):
    """One rank, and what it costs."""

    rank: int
    slowdown: Number
    slowdown_error: Number
    host: Maybe[str | None] = UNSET
    span_s: Maybe[float] = UNSET
    compute_s: Maybe[float] = UNSET
    communication_s: Maybe[float] = UNSET
    exposed_communication_s: Maybe[float] = UNSET
    memory_s: Maybe[float] = UNSET
    idle_s: Maybe[float] = UNSET
    wait_s: Maybe[float] = UNSET
    sole_delay_s: Maybe[float] = UNSET


class Collectives(Struct, frozen=True):
    """Which kernels belong to the same collective."""

    matched: int
    unmatched: int
    groups: list[GroupMatches] = msgspec.field(name="by_group")


class WaitFor(Struct, frozen=True):
    """How long a rank waited for another one."""

    group: str
    rank: int
    for_rank: int
    wait_s: float


class Kernels(Struct, frozen=True):
    """The kernels of one class or of one name."""

    ops: int
    seconds: float
    kernel_class: Maybe[str] = UNSET
    name: Maybe[str] = UNSET
