"""The rank that the others wait for, and for what it takes longer than they do.

In: a replay of an op trace, and the waits if collectives were recorded on several ranks. Out: `BlamedRank`, or None if
no rank stands out.

A rank is named if all of these agree: others wait for it; the job gets shorter when the rank works at the pace of its
peers; it gets shorter by more than the noise of the recording explains (`pace.py`); and no other rank would save half
as much. Two limits are choices: SMALLEST_SHARE is the smallest saving worth somebody's time; _NEXT separates one
culprit from two. If no rank is slower at anything recorded, a rank may still have come late into the recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.gpu.gpu_times import Part
from tracekit.analysis.gpu.pace import SMALLEST_SHARE, PaceOfPeers, causes_that_stand_out, stands_out_once
from tracekit.analysis.gpu.recorded import Waits
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.trace.gpu_activity import KernelClass

#: Coming late costs time once, and nothing is left to fix: name such a rank only if it costs at least this share of the
#: recording.
_LATE_SHARE = 0.05
#: No other rank may save more than this share of what the named one saves.
_NEXT = 0.5
#: Replay at most this many ranks at the pace of the others.
_MOST_RANKS = 64
#: Replay so many of them side by side.
_AT_ONCE = 8
#: Report a part if it costs at least this share of the costliest one.
_WORTH_TELLING = 0.25


#: The kinds of op that belong to a part, in recordings of GPUs and in op traces that people write; compute is the rest.
_KINDS: Mapping[Part, frozenset[str]] = {
    Part.HOST: frozenset({"host", "host-delay"}),
    Part.INPUT: frozenset({"input", "data-load"}),
    Part.GC: frozenset({"gc"}),
    Part.SYNC_CALLS: frozenset({"synchronise"}),
    Part.TRANSFERS: frozenset({str(KernelClass.COMMUNICATION)}),
}
#: Ops of this kind are no work: they stand for the time before a rank's first event.
_WINDOW = "window"


@dataclass(frozen=True, slots=True, eq=False)
class Behind:
    """A part of its time in which a rank is behind its peers.

    `saved_each_s`: what the job would save without it, seconds, [steps]. `ops`: the ops of that part, on all ranks,
    [ops].
    """

    part: Part
    saved_each_s: Floats
    ops: Bools

    @property
    def saved_s(self) -> float:
        """Seconds that the job would save without it, of the mean step."""
        return float(self.saved_each_s.mean())


@dataclass(frozen=True, slots=True)
class BlamedRank:
    """The rank that the others wait for. Seconds of the mean step; of a recording, in all.

    `saved_s`: what the job would save with this rank at the pace of its peers. `sole_delay_s`: how much later it begins
    collectives than the last but one; `waited_s`: how long all others wait for it; both nan if that is not recorded.
    `late_s`: how much later than on its peers its recording begins, None if that does not matter.
    """

    rank: int
    saved_s: float
    sole_delay_s: float
    waited_s: float
    behind: tuple[Behind, ...]
    late_s: float | None = None


def find_culprit(pace: PaceOfPeers, ops: pl.DataFrame, waits: Waits | None) -> BlamedRank | None:
    """Return the rank that stands out, if any. `ops`: of the op trace; `waits`: None if they were not recorded."""
    ranks = tuple(int(rank) for rank in pace.graph.ops.mesh.ranks)
    if len(ranks) < 2 or (waits is not None and not waits.sole_delay.sum() > 0):
        return None
    least = SMALLEST_SHARE * pace.recorded_s
    first, *others = sorted(_savings(pace, waits, least).items(), key=lambda item: -item[1]) or [(ranks[0], 0.0)]
    rank, saved_s = first
    others_wait = waits is None or waits.sole_delay[waits.ranks.index(rank)] > 0
    alone = all(seconds <= _NEXT * saved_s for _, seconds in others)
    if saved_s >= least and others_wait and alone:
        parts = parts_of(ops)
        if _beyond_noise(pace, rank, parts) >= least:
            return _culprit(waits, rank, saved_s, _behind(pace, rank, parts))
    return None if waits is None else _late_start(pace, ops, waits)


def _beyond_noise(pace: PaceOfPeers, rank: int, parts: Mapping[Part, Bools]) -> float:
    """Return the share of a rank's price that is due to parts beyond noise, seconds.

    Each part is tested separately: kernels that are certainly slower, by next to nothing, say nothing about the host.
    """
    proven = causes_that_stand_out(pace, rank, list(parts.values()))
    if not proven:
        return 0.0
    chosen = np.logical_or.reduce(proven)
    waits = parts.get(Part.SYNC_CALLS)
    freed = pace.without_extra_waits(rank) if waits is not None and chosen[waits].any() else None
    return pace.recorded_s - float((freed or pace).times([pace.costs(rank, chosen)])[0])


def _late_start(pace: PaceOfPeers, ops: pl.DataFrame, waits: Waits) -> BlamedRank | None:
    """Return the rank whose first recorded event is late, and with it the collectives in which others wait."""
    windows = ops.filter(kind=_WINDOW).sort("rank")["duration"].to_numpy()
    latest = int(windows.argmax())
    usual = float(np.median(np.delete(windows, latest)))
    saved_s = pace.recorded_s - float(pace.times([pace.with_window(waits.ranks[latest], usual)])[0])
    if (
        saved_s < _LATE_SHARE * pace.recorded_s
        or not waits.sole_delay[latest] > 0
        or not stands_out_once(windows, latest)
    ):
        return None
    return _culprit(waits, waits.ranks[latest], saved_s, (), float(windows[latest] - usual))


def _culprit(
    waits: Waits | None, rank: int, saved_s: float, behind: tuple[Behind, ...], late_s: float | None = None
) -> BlamedRank:
    if waits is None:
        return BlamedRank(rank, saved_s, float("nan"), float("nan"), behind, late_s)
    index = waits.ranks.index(rank)
    return BlamedRank(
        rank, saved_s, float(waits.sole_delay[index]), float(waits.waited_for[:, index].sum()), behind, late_s
    )


def exposed_s(pace: PaceOfPeers, ops: pl.DataFrame) -> float:
    """Return what the recording would save if transfers took no time once all ranks have arrived, seconds."""
    communicates = (ops["kind"] == str(KernelClass.COMMUNICATION)).to_numpy()
    return pace.recorded_s - float(pace.times([np.where(communicates, 0.0, pace.cost)])[0])


def _savings(pace: PaceOfPeers, waits: Waits | None, least_s: float) -> Mapping[int, float]:
    """Return what the job saves with a rank at the pace of the others, seconds, for each rank that may save `least_s`
    and enough to be compared with the best.

    Of many ranks, only those that delay the others most; without recorded waits, those that may save most.
    """
    ranks, most = pace.graph.ops.mesh.ranks.tolist(), pace.most_saved
    order = np.argsort(-(most if waits is None else waits.sole_delay), kind="stable")[:_MOST_RANKS].tolist()
    saved: dict[int, float] = {}
    for first in range(0, len(order), _AT_ONCE):
        floor_s = max(least_s, _NEXT * max(saved.values(), default=0.0))
        saved |= saved_by_rank(pace, [ranks[at] for at in order[first : first + _AT_ONCE] if most[at] >= floor_s])
    return saved


def saved_by_rank(pace: PaceOfPeers, ranks: Sequence[int]) -> Mapping[int, float]:
    """Return what the job saves with each of these ranks at the pace of the others, seconds."""
    if not ranks:
        return {}
    times = pace.times([pace.costs(rank) for rank in ranks]).tolist()
    for number, rank in enumerate(ranks):
        if (freed := pace.without_extra_waits(rank)) is not None:
            times[number] = float(freed.times([pace.costs(rank)])[0])
    return {rank: pace.recorded_s - time for rank, time in zip(ranks, times, strict=True)}


def parts_of(ops: pl.DataFrame) -> Mapping[Part, Bools]:
    """Return the ops of each part that the trace has, [ops] each."""
    kind = ops["kind"].cast(pl.String) if "kind" in ops.columns else pl.repeat("", ops.height, eager=True)
    masks = {part: kind.is_in(list(kinds)).to_numpy() for part, kinds in _KINDS.items()}
    if "rendezvous" in ops.columns:  # an op that meets others transfers, whatever its kind is called
        masks[Part.TRANSFERS] = masks[Part.TRANSFERS] | ops["rendezvous"].is_not_null().to_numpy()
    rest = ~np.logical_or.reduce(list(masks.values())) & (kind != _WINDOW).fill_null(value=True).to_numpy()
    return {part: chosen for part, chosen in {Part.COMPUTE: rest, **masks}.items() if chosen.any()}


def _behind(pace: PaceOfPeers, rank: int, parts: Mapping[Part, Bools]) -> tuple[Behind, ...]:
    """Return the parts in which a rank is behind its peers, the costliest first."""
    costs = [pace.costs(rank, chosen) for chosen in parts.values()]
    unchanged = pace.step_times([pace.cost])[0]
    saved = unchanged - pace.step_times(costs)
    if Part.SYNC_CALLS in parts and (freed := pace.without_extra_waits(rank)) is not None:
        row = list(parts).index(Part.SYNC_CALLS)
        saved[row] = unchanged - freed.step_times([costs[row]])[0]
    parts_behind = [Behind(part, each, ops) for (part, ops), each in zip(parts.items(), saved, strict=True)]
    parts_behind.sort(key=lambda part: -part.saved_s)
    return tuple(
        one for one in parts_behind if one.saved_s > 0 and one.saved_s >= _WORTH_TELLING * parts_behind[0].saved_s
    )
