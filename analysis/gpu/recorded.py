"""What a recording of GPUs shows beside its ops: what was compared, who waited, what the GPUs did.

In: a `GpuRecording`. Out: `Recorded`, which evidence and reports read, and `Kept`, the part that its op trace keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import polars as pl
from msgspec import Struct

from tracekit.analysis.gpu.breakdown import Breakdown, breakdowns
from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.comparable import Comparable, lost_in_words
from tracekit.analysis.gpu.gpu_times import GpuTimes
from tracekit.analysis.gpu.late_rank import LateRanks
from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.gpu.one_clock import contradictions
from tracekit.analysis.gpu.times import times_of
from tracekit.analysis.gpu.waits import Waits
from tracekit.base.text import ranks_text
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.gpu_recording import GpuRecording
from tracekit.trace.profiler_cost import ProfilerCost

#: Of at most so many ranks the times are told; they are those of one job, so more would repeat them.
MOST_RANKS = 16
#: Key of the metadata of an op trace that was a recording.
KEPT = "recording"
#: If launches that stand for more of the GPU's time have no op, its idle time is not known. Whole recordings lack at
#: most 1 % of their launches.
LARGEST_LOST_SHARE = 0.05


class HostWhat(Struct, frozen=True):
    """What a host thread does: its reason (`IdleReason`), the name of it, and the line of Python, "" if unknown.

    `launches`: whether it is in an operator that launches kernels.
    """

    reason: str
    name: str
    where: str
    launches: bool = False


class Kept(Struct, frozen=True):
    """What the op trace of a recording keeps of it beside the ops, so that it can be diagnosed again.

    `steps`: the number of marked training steps, 0 for none. `matched`, `unmatched`: collectives, and kernels without
    one. `idle_s`: how long the busiest GPU was idle, seconds. `left_out`, `doubts`: as of `Comparable`. `gpus`: what
    the GPU of each rank did (of `MOST_RANKS` at most). `costs`: what recording costs the host of a rank. `whats`: what
    host ops consist of, by their column `did`. `lost`: how many launches have no GPU op, empty if few.
    `began_s`: when the first GPU op began, seconds since 1970, None if unknown.
    """

    steps: int
    world_size: int | None
    gpu: str | None
    gpu_ops: int
    without_launch: int
    matched: int
    unmatched: int
    idle_s: float
    left_out: dict[int, str]
    doubts: tuple[str, ...]
    notes: tuple[str, ...]
    late: LateRanks
    gpus: tuple[GpuTimes, ...] = ()
    costs: dict[int, ProfilerCost] = msgspec.field(default_factory=dict)
    whats: tuple[HostWhat, ...] = ()
    lost: str = ""
    without_stacks: tuple[int, ...] = ()
    began_s: float | None = None

    @classmethod
    def of(cls, whole: GpuRecording, part: Comparable, late: LateRanks, whats: pl.DataFrame) -> Kept:
        """What to keep of a recording that is compared in this part."""
        recording, matches = part.recording, part.matches
        left_out = [f"rank {rank} is left out: {why}" for rank, why in part.left_out.items()]
        alone = len(recording.ranks) > 1 and not matches.matched
        without_stacks = _without_stacks(recording)
        nothing = "no collective was found on several ranks: nobody is seen to wait; record ranks of one job together"
        return cls(
            steps=recording.step_spans["step"].n_unique(),
            world_size=recording.world_size,
            gpu=recording.device_name,
            gpu_ops=recording.gpu_ops.height,
            without_launch=recording.gpu_ops["launch"].null_count(),
            matched=matches.matched,
            unmatched=matches.unmatched,
            idle_s=min((one.idle_s for one in breakdowns(recording)), default=0.0),
            left_out=dict(part.left_out),
            doubts=(*part.doubts, *contradictions(recording)),
            notes=(*left_out, *recording.notes, *([nothing] if alone else []), *_lacking_stacks(without_stacks)),
            without_stacks=without_stacks,
            late=late,
            gpus=tuple(times_of(whole, rank) for rank in recording.ranks[:MOST_RANKS]),
            costs={rank: recording.costs[rank] for rank in recording.ranks if rank in recording.costs},
            lost=_lost(recording, () if len(recording.ranks) == 1 else whole.cut),
            whats=tuple(HostWhat(*row) for row in whats.drop("busy").iter_rows()),
            began_s=None if recording.began_s is None else recording.began_s + _first_s(recording),
        )

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Kept | None:
        """What the metadata of an op trace keeps of a recording; None if it was none, or if that is damaged."""
        try:
            return None if KEPT not in metadata else msgspec.convert(metadata[KEPT], cls, strict=False)
        except msgspec.ValidationError:
            return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the metadata of an op trace."""
        return {KEPT: msgspec.to_builtins(self, str_keys=True)}


def _first_s(recording: GpuRecording) -> float:
    """When the first GPU op begins."""
    first = recording.gpu_ops["start"].min()
    return first if isinstance(first, float) else 0.0


@dataclass(frozen=True)
class Recorded:
    """`part`: what of it is compared, and why; its matches and clocks. `summary`: what its op trace keeps.

    `skew_s`: how far the clock of each rank's host was ahead of its GPU's, seconds.
    """

    part: Comparable
    summary: Kept
    waits: Waits
    skew_s: Mapping[int, float]

    @property
    def recording(self) -> GpuRecording:
        """The part of the recording that is compared."""
        return self.part.recording

    @property
    def matches(self) -> Matches:
        """Which communication kernels of different ranks belong to the same collective."""
        return self.part.matches

    @property
    def clocks(self) -> ClockOffsets:
        """How far the clock of each rank is ahead."""
        return self.part.clocks

    @cached_property
    def breakdowns(self) -> tuple[Breakdown, ...]:
        """What the GPU of each rank spent its time on."""
        return breakdowns(self.recording)

    @property
    def kernel_time(self) -> pl.DataFrame:
        """`kernel_class`, `ops`, `seconds` over all ranks, most first."""
        return (
            self.recording.gpu_ops.group_by("kernel_class")
            .agg(ops=pl.len(), seconds=pl.col("duration").sum())
            .sort("seconds", "kernel_class", descending=[True, False])
        )

    @property
    def unknown_kernels(self) -> pl.DataFrame:
        """`name`, `ops`, `seconds` of kernels of no known class, most first."""
        other = self.recording.gpu_ops.filter(kernel_class=str(KernelClass.OTHER))
        return (
            other.group_by("name")
            .agg(ops=pl.len(), seconds=pl.col("duration").sum())
            .sort("seconds", "name", descending=[True, False])
        )


def _without_stacks(recording: GpuRecording) -> tuple[int, ...]:
    """The ranks that lack stacks that others have."""
    named = pl.any_horizontal(pl.col("own").is_not_null(), pl.col("module").is_not_null())
    functions = [rank for rank, cost in recording.costs.items() if cost.stacks]
    stacks = recording.calls.group_by("rank").agg(named.any().alias("stacks")).sort("rank")
    lacking = stacks.filter(~pl.col("stacks") & ~pl.col("rank").is_in(functions))["rank"].to_list()
    return tuple(lacking) if len(lacking) < stacks.height else ()


def _lacking_stacks(without_stacks: Sequence[int]) -> Iterator[str]:
    """Yield what follows where some ranks lack stacks."""
    if without_stacks:
        yield (
            f"{ranks_text(without_stacks)} recorded without stacks, the others with: lines of code are known of those"
            " only, and recording slows their hosts more; record all with the same options to compare hosts"
        )


def _lost(recording: GpuRecording, cut: Sequence[int]) -> str:
    """How many launches of the rank that lacks most have no GPU op, in words; empty if too few to matter.

    Ranks whose files are `cut` off are compared over whole steps only.
    """
    lost = {rank: one for rank, one in recording.lost.items() if rank in recording.ranks and rank not in cut}
    worst = max(lost, key=lambda rank: lost[rank].share, default=None)
    if worst is None or lost[worst].share <= LARGEST_LOST_SHARE:
        return ""
    return f"rank {worst}: {lost_in_words(lost[worst])}"
