"""What one GPU did, in figures, and the parts of a rank's time. All times in seconds.

In: what `times.py` measures. Out: `GpuTimes`, part of the JSON report and of what an op trace keeps of a recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field


class NamedTime(Struct, frozen=True):
    """Time of what a name says. `where`: the innermost line of Python outside of torch, "" if unknown."""

    name: str
    seconds: float
    where: str = ""


class IdleTime(Struct, frozen=True):
    """Idle time of one reason (`IdleReason`), in so many gaps between GPU ops. `names`: longest first."""

    reason: str
    seconds: float
    gaps: int
    names: tuple[NamedTime, ...]


class BeforeFirst(Struct, frozen=True):
    """The time before the first GPU op, by what the thread did that launched it."""

    seconds: float
    by_reason: dict[str, float]
    names: tuple[NamedTime, ...]


class KernelTime(Struct, frozen=True):
    """GPU ops of one name. `occupancy`: mean share of the threads of the card, by time, None if not recorded."""

    name: str
    count: int
    seconds: float
    of_class: str = field(name="class")
    occupancy: float | None = None


class ShapeTime(Struct, frozen=True):
    """GPU time of an operator with inputs of these sizes; what it computes and moves a second, None if unknown.

    `roofline_s`: how long it takes at the peak of the card.
    """

    dims: str
    dtype: str
    count: int
    seconds: float
    flops_s: float | None = None
    bytes_s: float | None = None
    roofline_s: float | None = None


class OpTime(Struct, frozen=True):
    """GPU time of what an innermost operator launched. `module`: the nn.Module with most of it, None if unknown."""

    name: str
    gpu_ops: int
    seconds: float
    module: str | None
    shapes: tuple[ShapeTime, ...]


class Synchronisation(Struct, frozen=True):
    """Calls that wait for the GPU. `idle_after_s`: of gaps that begin inside them; `saves_s`: without them."""

    call: str
    op: str | None
    where: str
    count: int
    blocked_s: float
    idle_after_s: float
    saves_s: float | None = None


class Transfer(Struct, frozen=True):
    """Copies of one kind. `exposed_s`: while no kernel ran."""

    kind: str
    pageable: bool
    count: int
    bytes: int
    seconds: float
    exposed_s: float


class Launches(Struct, frozen=True):
    """Calls that launched GPU ops, and kernels shorter than 10 microseconds."""

    calls: int
    call_s: float
    short_kernels: int
    short_s: float
    kernels: int
    kernel_s: float


class MarkedSteps(Struct, frozen=True):
    """Steps that the profiler marked; `mean_s` None if there are none."""

    count: int
    mean_s: float | None


class MemoryPoint(Struct, frozen=True):
    """Bytes that torch's allocator has given out, seconds after the recording began."""

    seconds: float
    bytes: int


class MemoryTimes(Struct, frozen=True):
    """Memory of the GPU, in bytes: most of it given out (`peak_bytes`) and kept (`reserved_bytes`) at a time. `points`:
    most of each interval of the recording in which it changed.
    """

    peak_bytes: int
    reserved_bytes: int
    points: tuple[MemoryPoint, ...]


class GpuTimes(Struct, frozen=True):
    """One rank: from its first event to its last (`recording_s`); from its first GPU op to the end of its last
    (`span_s`), of which it is busy or idle; and what is before and after.
    """

    rank: int
    recording_s: float
    span_s: float
    busy_s: float
    idle_s: float
    after_last_s: float
    before_first: BeforeFirst
    idle_by_reason: tuple[IdleTime, ...]
    idle_opened_by: dict[str, float]
    kernels: tuple[KernelTime, ...]
    ops: tuple[OpTime, ...]
    synchronisations: tuple[Synchronisation, ...]
    transfers: tuple[Transfer, ...]
    launch: Launches
    steps: MarkedSteps
    stacks: bool
    shapes: bool
    memory: MemoryTimes | None


class GroupMatches(Struct, frozen=True):
    """One process group: number of `matched` instances, `unmatched` kernels by rank, shifts by rank.

    `inside`: of the unmatched kernels, those between matched ones. `transfers`: whether these are transfers from one
    rank to another.
    """

    group: str
    ranks: tuple[int, ...]
    matched: int
    unmatched: Mapping[int, int]
    shifts: Mapping[int, int]
    inside: int = 0
    transfers: bool = False


class Part(StrEnum):
    """The parts of a rank's time that are compared with those of its peers."""

    COMPUTE = "compute"
    HOST = "host"  #: between the calls of its host threads
    INPUT = "input"  #: waiting for its data loader
    GC = "gc"
    SYNC_CALLS = "sync-calls"  #: calls in which its host waits for the GPU
    TRANSFERS = "transfers"  #: once all ranks are there
