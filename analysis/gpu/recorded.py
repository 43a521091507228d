"""What a recording of GPUs shows besides its ops: what was compared, who waited, what the GPUs did.

In: a `GpuRecording`, its matches and clocks. Out: `Recorded`, which evidence and reports read; `Kept`, the part that
its op trace keeps; `Waits` and `LateRanks`.

A rank that begins a collective before the last one waits for it. The rank that is last most often need not cost most: a
rank alone is responsible only for how much later it begins than the one before it. A report that does not name the rank
that the others wait for, whatever keeps it, leaves something unexplained. No price follows from that rank: one that is
late once is late at every collective of the step. Transfers between two ranks do not count, because a receiver waits
for its sender by schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.attribution.attribution import VERDICT
from tracekit.analysis.gpu.comparable import (
    Comparable,
    contradictions,
    lost_in_words,
    mismatched,
    ranks_with_overlaps,
    with_steps,
)
from tracekit.analysis.gpu.matching import (
    CONVINCING,
    UNNAMED_GROUP,
    ClockOffsets,
    Matches,
    match_collectives,
    measure_offsets,
)
from tracekit.analysis.gpu.pace import is_behind
from tracekit.analysis.gpu.times import Breakdown, breakdowns, times_of
from tracekit.analysis.numeric.arrays import Floats, Ints, dense, numbered
from tracekit.base.text import ranks_text, seconds
from tracekit.report.hardware import GpuTimes
from tracekit.trace.gpu_activity import KernelClass, ProfilerCost
from tracekit.trace.op import GpuRecording

#: Of at most so many ranks the times are told; they are those of one job, so more would repeat them.
MOST_RANKS = 16
#: Key of the metadata of an op trace that was a recording.
KEPT = "recording"
#: If launches that stand for more of the GPU's time have no op, its idle time is not known. Whole recordings lack at
#: most 1 % of their launches. Chosen.
LARGEST_LOST_SHARE = 0.05


class HostActivity(Struct, frozen=True):
    """What a host thread does: its reason (`IdleReason`), the name of it, and the line of Python, "" if unknown.

    `launches`: whether it is in an operator that launches kernels.
    """

    reason: str
    name: str
    where: str
    launches: bool = False


class Kept(Struct, frozen=True):
    """What the op trace of a recording keeps of it besides the ops, so that it can be diagnosed again.

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
    whats: tuple[HostActivity, ...] = ()
    lost: str = ""
    without_stacks: tuple[int, ...] = ()
    began_s: float | None = None

    @classmethod
    def of(cls, whole: GpuRecording, part: Comparable, late: LateRanks, whats: pl.DataFrame) -> Kept:
        """What to keep of a recording that is compared in this part."""
        recording, matches = part.recording, part.matches
        left_out = [f"rank {rank} is left out: {why}" for rank, why in part.left_out.items()]
        without_stacks, notes = _without_stacks(recording), [*left_out, *recording.notes]
        if len(recording.ranks) > 1 and not matches.matched:
            notes.append(
                "no collective was found on several ranks: nobody is seen to wait; record ranks of one job together"
            )
        return cls(
            steps=recording.step_spans["step"].n_unique(),
            world_size=recording.world_size,
            gpu=recording.device_name,
            gpu_ops=recording.gpu_ops.height,
            without_launch=recording.gpu_ops["launch"].null_count(),
            matched=matches.matched,
            unmatched=matches.unmatched,
            idle_s=min((breakdown.idle_s for breakdown in breakdowns(recording)), default=0.0),
            left_out=dict(part.left_out),
            doubts=(*part.doubts, *contradictions(recording)),
            notes=(*notes, *_lacking_stacks(without_stacks)),
            without_stacks=without_stacks,
            late=late,
            gpus=tuple(times_of(whole, rank) for rank in recording.ranks[:MOST_RANKS]),
            costs={rank: recording.costs[rank] for rank in recording.ranks if rank in recording.costs},
            lost=_lost(recording, () if len(recording.ranks) == 1 else whole.cut),
            whats=tuple(HostActivity(*row) for row in whats.drop("busy").iter_rows()),
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
    lost = {rank: events for rank, events in recording.lost.items() if rank in recording.ranks and rank not in cut}
    worst = max(lost, key=lambda rank: lost[rank].share, default=None)
    if worst is None or lost[worst].share <= LARGEST_LOST_SHARE:
        return ""
    return f"rank {worst}: {lost_in_words(lost[worst])}"


@dataclass(frozen=True, slots=True)
class Lateness:
    """`late_s`: how much later than all others a rank comes, at the collective of each step in which that is most,
    seconds, summed over the steps.
    """

    rank: int
    late_s: float


@dataclass(frozen=True, slots=True)
class LateRanks:
    """`compared`: the late rank among those that are compared. `left_out`: among those that are not.

    `accounted`: ranks that are left out of the comparison, but whose collectives show whether they are late.
    """

    compared: Lateness | None
    left_out: Lateness | None = None
    accounted: frozenset[int] = frozenset()


def late_ranks(recording: GpuRecording, part: Comparable, recorded_s: float) -> LateRanks:
    """Who is late in a recording, and in the part of it that is compared, which takes `recorded_s`."""
    least_s = VERDICT.headline_share * recorded_s
    compared = late_rank(part.recording, part.matches, part.clocks, least_s)
    left_out = [rank for rank in part.left_out if rank in recording.ranks]
    if not left_out:
        return LateRanks(compared)
    matches = match_collectives(recording)
    clocks = measure_offsets(matches, recording.ranks)
    if mismatched(matches, clocks):
        return LateRanks(compared)
    late = late_rank(with_steps(recording, matches), matches, clocks, least_s)
    of_rank = np.unique(part.matches.rank, return_counts=True)[1]
    usual = float(np.median(of_rank)) if len(of_rank) else 0.0  # of one rank, nothing is matched
    contradict = {rank for rank, _ in ranks_with_overlaps(recording)}
    seen = [rank for rank in left_out if (matches.rank == rank).sum() >= CONVINCING * usual > 0]
    hidden = late if late is not None and late.rank in left_out else None
    return LateRanks(compared, hidden, frozenset(seen) - contradict)


def unexplained_waits(late: LateRanks, waits: Waits, named: int | None, recorded_s: float) -> list[str]:
    """What collectives show and a report that blames rank `named` does not explain; `waits`: of what is compared."""
    sentences, straggler = [], late.compared
    if straggler is not None and straggler.rank != named:
        waited = waits.waited_for[:, waits.ranks.index(straggler.rank)]
        ranks = int((waited > 0).sum())
        sentences.append(
            f"{ranks} rank{'s wait' if ranks > 1 else ' waits'} up to {seconds(float(waited.max()))} of the"
            f" {seconds(recorded_s)} recorded for rank {straggler.rank}, and nothing recorded says for what"
        )
    straggler = late.left_out
    if straggler is not None:
        sentences.append(f"the others wait {seconds(straggler.late_s)} for rank {straggler.rank}, which is left out")
    return sentences


def late_rank(recording: GpuRecording, matches: Matches, clocks: ClockOffsets, least_s: float = 0.0) -> Lateness | None:
    """The rank that is later than all others by `least_s` and by more than chance. `recording`: with steps."""
    collective = np.array([not group.transfers for group in matches.groups], np.bool_)[matches.group_of]
    chosen = np.flatnonzero(matches.synchronising & collective)
    if len(clocks.ranks) < 2 or not len(chosen):
        return None
    late, steps = _behind_the_others(matches, clocks)[:, chosen], _steps(recording, matches)[chosen]
    by_step = np.zeros((len(late), int(steps.max()) + 1))
    for step in range(by_step.shape[1]):
        by_step[:, step] = late[:, steps == step].max(axis=1)
    late_s = np.maximum(by_step, 0.0).sum(axis=1)
    latest = int(late_s.argmax())
    if not late_s[latest] > 0 or late_s[latest] < least_s:
        return None
    # Without steps, each collective is a sample.
    behind = is_behind(by_step if by_step.shape[1] > 1 else late, latest)
    return Lateness(clocks.ranks[latest], float(late_s[latest])) if behind else None


def _behind_the_others(matches: Matches, clocks: ClockOffsets) -> Floats:
    """How much later each rank begins collectives than the last of the others, seconds, [ranks, instances].

    0 for ranks that are not in a collective's group.
    """
    start = np.full((len(clocks.ranks), matches.matched), -np.inf)
    start[np.searchsorted(clocks.ranks, matches.rank), matches.instance] = matches.start - clocks.of(matches.rank)
    second, last = np.partition(start, -2, axis=0)[-2:]
    others = np.where(start == last, second, last)
    return np.where(np.isfinite(start) & np.isfinite(others), start - others, 0.0)


def _steps(recording: GpuRecording, matches: Matches) -> Ints:
    """The number of the step that launched each collective on the rank where it is known, [instances]."""
    step = np.full(matches.matched, -1, np.int64)
    np.maximum.at(step, matches.instance, recording.gpu_ops["step"].fill_null(-1).to_numpy()[matches.row])
    return dense(step)


@dataclass(frozen=True, slots=True, eq=False)
class WaitsOfGroup:
    """Seconds that each rank (first axis) waited for each other rank (second axis) in a group, [ranks, ranks]."""

    group: str
    waited: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """Seconds over all matched collectives, [ranks].

    `wait`: last start - own start. `sole_delay`: last start - second-last start, credited to the last. `last`: how
    often a rank was last. `by_group`: which rank waited for which.
    """

    ranks: tuple[int, ...]
    wait: Floats
    sole_delay: Floats
    last: Ints
    by_group: tuple[WaitsOfGroup, ...]

    def each(self) -> Iterator[tuple[float, int, int, str]]:
        """Yield how long a rank waited, seconds, the rank, the one it waited for, and the group."""
        for group in self.by_group:
            for waiting, by in zip(*np.nonzero(group.waited > 0), strict=True):
                yield float(group.waited[waiting, by]), self.ranks[waiting], self.ranks[by], group.group

    @property
    def waited_for(self) -> Floats:
        """Seconds that each rank (first axis) waited for each other rank, over all groups, [ranks, ranks]."""
        zeros = np.zeros((len(self.ranks), len(self.ranks)))
        return np.asarray(sum((group.waited for group in self.by_group), zeros))


def measure_waits(matches: Matches, clocks: ClockOffsets) -> Waits:
    """Which rank waited for which, by corrected clocks."""
    start, groups = matches.start - clocks.of(matches.rank), [group.group for group in matches.groups]
    return _waits(clocks.ranks, matches.rank, start, matches.instance, matches.group_of, groups)


def waits_of_ops(ops: pl.DataFrame, ranks: tuple[int, ...]) -> Waits:
    """As `measure_waits`, from the op trace of a recording, whose clocks are corrected."""
    met = ops.filter(pl.col("rendezvous").is_not_null()) if "rendezvous" in ops.columns else ops.clear()
    group = met.get_column("group", default=pl.Series([None] * met.height, dtype=pl.String)).fill_null(UNNAMED_GROUP)
    instance, of_group = (numbered(column) for column in (met.get_column("rendezvous", default=group), group))
    _, first = np.unique(instance, return_index=True)
    names = [str(name) for name in group.gather(np.unique(of_group, return_index=True)[1])]
    return _waits(ranks, met["rank"].to_numpy(), met["start"].to_numpy(), instance, of_group[first], names)


def _waits(
    ranks: tuple[int, ...], rank: np.ndarray, start: Floats, instance: Ints, group_of: Ints, groups: Sequence[str]
) -> Waits:
    """The waits of members of collectives, `rank`, `start` and `instance` [members]; `group_of` [instances]."""
    count, instances = len(ranks), len(group_of)
    rank, order = np.searchsorted(ranks, rank), np.lexsort((start, instance))
    instance, start, rank = instance[order], start[order], rank[order]
    ends = np.cumsum(np.bincount(instance, minlength=instances)) - 1
    last, late = rank[ends], start[ends]
    waited = late[instance] - start
    waits_of: list[WaitsOfGroup] = []
    for number, group in enumerate(groups):
        table = np.zeros((count, count))
        of_group = group_of[instance] == number
        np.add.at(table, (rank[of_group], last[instance[of_group]]), waited[of_group])
        waits_of.append(WaitsOfGroup(group, table))
    sole = late - start[ends - 1] if instances else np.zeros(0)
    wait: Floats = np.bincount(rank, weights=waited, minlength=count).astype(np.float64)
    return Waits(
        ranks=ranks,
        wait=wait,
        sole_delay=np.bincount(last, weights=sole, minlength=count).astype(np.float64),
        last=np.bincount(last, minlength=count),
        by_group=tuple(waits_of),
    )
