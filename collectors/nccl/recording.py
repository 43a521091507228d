"""All rings of an attempt, each with the rank that wrote it.

In: the folder of an attempt and the processes of its ranks. Out: an `NcclRecording`: operations of every rank with
times on its host's clock, and which ranks form which communicator. Ranks are found by host and process id, because NCCL
only has places within a communicator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tracekit.base.errors import FormatError
from tracekit.collectors.nccl.clock import GpuClock, converted, fit_gpu_clock
from tracekit.collectors.nccl.operations import channels, count_proxy_steps, operations
from tracekit.collectors.nccl.ring_reader import NcclRing, is_ring, read_ring
from tracekit.collectors.record.nccl_wire_format import RING_SUFFIX
from tracekit.collectors.run_directory.segments import ProcessId


@dataclass(frozen=True, slots=True)
class RankOperations:
    """One rank's operations as of `operations.operations`, with GPU times on the host's monotonic clock. `clock`: None
    if no channel relates both clocks; the GPU times are then null.
    """

    rank: int
    host: str
    operations: pl.DataFrame
    clock: GpuClock | None
    overwritten: int
    dropped: int
    proxy_steps: int


@dataclass(frozen=True, slots=True)
class CommunicatorMembers:
    """A communicator: its size, and the ranks at its places as far as known."""

    size: int
    ranks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NcclRecording:
    """NCCL's events in one attempt. `unreadable`: rings that are damaged, or of no rank of the attempt, and why."""

    ranks: tuple[RankOperations, ...]
    communicators: Mapping[int, CommunicatorMembers]
    ranks_without_ring: tuple[int, ...]
    unreadable: tuple[str, ...]


def ring_files(directory: Path) -> list[Path]:
    """The rings of an attempt."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.glob(f"nccl-*{RING_SUFFIX}") if is_ring(path))


def read_nccl(directory: Path, processes: Mapping[int, ProcessId]) -> NcclRecording | None:
    """Read the rings of an attempt, by rank; None if there are none. Damaged ones are listed, not raised."""
    rank_of = {process: rank for rank, process in processes.items()}
    rings: dict[int, NcclRing] = {}
    unreadable = []
    files = ring_files(directory)
    for path in files:
        try:
            ring = read_ring(path)
        except (FormatError, OSError) as error:
            unreadable.append(str(error))
            continue
        rank = rank_of.get(ProcessId(ring.host, ring.process))
        if rank is None:
            unreadable.append(f"{path}: written by process {ring.process} on {ring.host}, which is not a recorded rank")
        else:
            rings[rank] = ring
    if not files:
        return None
    return NcclRecording(
        ranks=tuple(_of_rank(rank, rings[rank]) for rank in sorted(rings)),
        communicators=_members(rings),
        ranks_without_ring=tuple(sorted(rank for rank in rank_of.values() if rank not in rings)),
        unreadable=tuple(unreadable),
    )


def _of_rank(rank: int, ring: NcclRing) -> RankOperations:
    timed = channels(ring)
    timed_operations = operations(ring, timed)
    clock = fit_gpu_clock(timed, timed_operations)
    times = ("gpu_start_ns", "gpu_end_ns")
    if clock is None:
        timed_operations = timed_operations.with_columns(pl.lit(None, pl.Int64).alias(name) for name in times)
    else:
        timed_operations = converted(timed_operations, times, clock.to_host)
    return RankOperations(
        rank, ring.host, timed_operations, clock, ring.overwritten, ring.dropped, count_proxy_steps(ring)
    )


def _members(rings: Mapping[int, NcclRing]) -> dict[int, CommunicatorMembers]:
    """Map communicators to the places of ranks, as far as its ranks wrote rings."""
    sizes: dict[int, int] = {}
    places: dict[int, dict[int, int]] = {}
    for rank, ring in rings.items():
        for communicator in ring.communicators:
            sizes[communicator.id] = communicator.ranks
            places.setdefault(communicator.id, {})[communicator.rank] = rank
    return {identity: CommunicatorMembers(size, places[identity]) for identity, size in sizes.items()}
