"""Which rank the others wait for, what it costs, and why.

In: a replay of a GPU op trace, and the waits. Out: a `Culprit`, or None if no rank stands out.

A rank is named if all of these agree: others wait for it; the recording gets shorter when the rank works at the pace of
its peers; it gets shorter by more than the noise of the recording explains (`noise.py`); and no other rank would save
half as much. Two limits are choices: SMALLEST_SHARE is the smallest saving worth somebody's time; _NEXT separates one
culprit from two. If no rank is slower at anything recorded, a rank may still have come late into the recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import polars as pl

from tracekit.analysis.gpu.noise import causes_that_stand_out, stands_out_once
from tracekit.analysis.gpu.pace import PaceOfPeers
from tracekit.analysis.gpu.waits import Waits
from tracekit.trace.gpu_activity import KernelClass

#: A rank that would save less than this share of the recording is not named, even if it is certainly slower: ranks are
#: never exactly equal, and a healthy job names nobody.
SMALLEST_SHARE = 0.01
#: Coming late costs time once, and nothing is left to fix: name such a rank only if it costs at least this share of the
#: recording.
_LATE_SHARE = 0.05
#: No other rank may save more than this share of what the named one saves.
_NEXT = 0.5
#: Replay at most this many ranks at the pace of the others.
_MOST_RANKS = 64
#: Report a cause if it costs at least this share of the costliest one.
_WORTH_TELLING = 0.25
_COMPUTE = tuple(str(one) for one in KernelClass if one is not KernelClass.COMMUNICATION)


class GpuCause(StrEnum):
    """Why a rank is late."""

    SLOW_GPU = "slow-gpu"  #: its kernels take longer than the same ones of its peers
    UNEVEN_WORK = "uneven-work"  #: it runs kernels that its peers do not
    HOST_BOUND = "host-bound"  #: its host threads take longer between calls
    LATE_INPUT = "late-input"  #: it waits for its data loader
    GC = "gc"  #: Python collects garbage
    SYNC_CALLS = "sync-calls"  #: its host waits for the GPU more often than its peers
    SLOW_LINK = "slow-link"  #: its transfers take longer once all are there
    LATE_START = "late-start"  #: its recording begins after those of its peers, which wait for it


@dataclass(frozen=True, slots=True)
class CauseFound:
    """One cause: seconds that the recording would save without it, and the evidence for it."""

    cause: GpuCause
    saved_s: float
    evidence: str


@dataclass(frozen=True, slots=True)
class Culprit:
    """The rank that the others wait for. Seconds over the recording.

    `saved_s`: what the recording would save with this rank at the pace of its peers. `sole_delay_s`: how much later it
    begins collectives than the last but one. `waited_s`: how long all others wait for it.
    """

    rank: int
    saved_s: float
    sole_delay_s: float
    waited_s: float
    causes: tuple[CauseFound, ...]


def find_culprit(pace: PaceOfPeers, ops: pl.DataFrame, waits: Waits) -> Culprit | None:
    """The rank that stands out, if any. `ops`: of the op trace."""
    if len(waits.ranks) < 2 or not waits.sole_delay.sum() > 0:
        return None
    saved, covered = saved_by_rank(pace, waits), _covered(ops)
    rank = max(saved, key=lambda one: saved[one])
    least = SMALLEST_SHARE * pace.recorded_s
    others_wait = waits.sole_delay[waits.ranks.index(rank)] > 0
    alone = all(seconds <= _NEXT * saved[rank] for one, seconds in saved.items() if one != rank)
    if saved[rank] >= least and others_wait and alone and _beyond_noise(pace, ops, rank, covered) >= least:
        return _culprit(waits, rank, saved[rank], _causes(pace, ops, rank, pace.recorded_s, covered))
    return _late_start(pace, ops, waits)


def _beyond_noise(pace: PaceOfPeers, ops: pl.DataFrame, rank: int, covered: Mapping[GpuCause, Sequence[str]]) -> float:
    """The part of a rank's price that is due to causes beyond noise, seconds.

    Each cause is tested separately: kernels that are certainly slower, by next to nothing, say nothing about the host.
    """
    causes = [ops["kind"].is_in(list(kinds)).to_numpy() for kinds in covered.values()]
    proven = causes_that_stand_out(pace, rank, causes)
    if not proven:
        return 0.0
    chosen = np.logical_or.reduce(proven)
    freed = _freed(pace, rank) if chosen[(ops["kind"] == "synchronise").to_numpy()].any() else None
    return pace.recorded_s - float((freed or pace).times([pace.costs(rank, chosen)])[0])


def _late_start(pace: PaceOfPeers, ops: pl.DataFrame, waits: Waits) -> Culprit | None:
    """The rank whose first recorded event is late, and with it the collectives in which others wait."""
    windows = ops.filter(kind="window").sort("rank")["duration"].to_numpy()
    at = int(windows.argmax())
    usual = float(np.median(np.delete(windows, at)))
    saved_s = pace.recorded_s - pace.time_with_window(waits.ranks[at], usual)
    if saved_s < _LATE_SHARE * pace.recorded_s or not waits.sole_delay[at] > 0 or not stands_out_once(windows, at):
        return None
    evidence = f"its first recorded event is {(windows[at] - usual) * 1e3:.1f} ms after those of its peers"
    return _culprit(waits, waits.ranks[at], saved_s, (CauseFound(GpuCause.LATE_START, saved_s, evidence),))


def _culprit(waits: Waits, rank: int, saved_s: float, causes: tuple[CauseFound, ...]) -> Culprit:
    at = waits.ranks.index(rank)
    return Culprit(rank, saved_s, float(waits.sole_delay[at]), float(waits.waited_for[:, at].sum()), causes)


def exposed_communication_s(pace: PaceOfPeers, ops: pl.DataFrame) -> float:
    """What the recording would save if transfers took no time once all ranks have arrived, seconds."""
    communicates = (ops["kind"] == str(KernelClass.COMMUNICATION)).to_numpy()
    return pace.recorded_s - float(pace.times([np.where(communicates, 0.0, pace.cost)])[0])


def saved_by_rank(pace: PaceOfPeers, waits: Waits) -> Mapping[int, float]:
    """What the recording saves with each rank at the pace of the others, seconds; of many ranks, only those that delay
    most.
    """
    order = np.argsort(-waits.sole_delay, kind="stable")[:_MOST_RANKS]
    ranks = [waits.ranks[at] for at in order.tolist()]
    times = pace.times([pace.costs(rank) for rank in ranks]).tolist()
    for number, rank in enumerate(ranks):
        if (freed := _freed(pace, rank)) is not None:
            times[number] = float(freed.times([pace.costs(rank)])[0])
    return {rank: pace.recorded_s - time for rank, time in zip(ranks, times, strict=True)}


def _freed(pace: PaceOfPeers, rank: int) -> PaceOfPeers | None:
    """The job without this rank's calls that wait for its GPU beyond those of its peers, if it waits long in them."""
    return pace.without_extra_waits(rank, SMALLEST_SHARE * pace.recorded_s)


def _covered(ops: pl.DataFrame) -> Mapping[GpuCause, Sequence[str]]:
    """The op kinds that each cause lengthens, as far as the trace has them."""
    there = set(ops["kind"].unique().to_list())
    parts = {
        GpuCause.SLOW_GPU: _COMPUTE,
        GpuCause.HOST_BOUND: ("host",),
        GpuCause.LATE_INPUT: ("input",),
        GpuCause.GC: ("gc",),
        GpuCause.SYNC_CALLS: ("synchronise",),
        GpuCause.SLOW_LINK: (str(KernelClass.COMMUNICATION),),
    }
    found = {cause: [kind for kind in kinds if kind in there] for cause, kinds in parts.items()}
    return {cause: kinds for cause, kinds in found.items() if kinds}


def _causes(
    pace: PaceOfPeers, ops: pl.DataFrame, rank: int, recorded_s: float, covered: Mapping[GpuCause, Sequence[str]]
) -> tuple[CauseFound, ...]:
    """Why a rank is late, costliest cause first."""
    costs = [pace.costs(rank, ops["kind"].is_in(list(some)).to_numpy()) for some in covered.values()]
    saved = recorded_s - pace.times(costs)
    if GpuCause.SYNC_CALLS in covered and (freed := _freed(pace, rank)) is not None:
        at = list(covered).index(GpuCause.SYNC_CALLS)
        saved[at] = recorded_s - freed.times([costs[at]])[0]
    found = []
    for (cause, some), seconds in zip(covered.items(), saved.tolist(), strict=True):
        named, evidence = _evidence(cause, ops, rank, some)
        found.append(CauseFound(named, seconds, evidence))
    found.sort(key=lambda one: -one.saved_s)
    return tuple(one for one in found if one.saved_s > 0 and one.saved_s >= _WORTH_TELLING * found[0].saved_s)


def _evidence(cause: GpuCause, ops: pl.DataFrame, rank: int, kinds: Sequence[str]) -> tuple[GpuCause, str]:
    """The evidence for a cause, in words; longer kernels may turn out to be different kernels."""
    here = ops.filter(pl.col("kind").is_in(list(kinds)))
    total = here.group_by("rank").agg(seconds=pl.col("duration").sum(), count=pl.len()).sort("rank")
    mine = total.filter(rank=rank)
    theirs = total.filter(pl.col("rank") != rank)
    seconds = float(mine["seconds"].sum())
    usual = _median(theirs["seconds"])
    if cause is GpuCause.SLOW_GPU:
        return _kernels_compared(here, rank)
    if cause is GpuCause.SYNC_CALLS:
        return cause, f"{int(mine['count'].sum())} calls wait for the GPU, {_median(theirs['count']):.0f} on its peers"
    if cause is GpuCause.SLOW_LINK:
        return cause, "its transfers take longer than their peers once all ranks are there"
    text = f"{seconds * 1e3:.1f} ms {_SPENT[cause]}, {usual * 1e3:.1f} ms on its peers"
    return cause, text + (_where(here, rank) if cause is GpuCause.HOST_BOUND else "")


_SPENT = {
    GpuCause.HOST_BOUND: "of host work between calls",
    GpuCause.LATE_INPUT: "in its data loader",
    GpuCause.GC: "collecting garbage",
}


def _where(host: pl.DataFrame, rank: int) -> str:
    """The phase and the operator in which a rank's host work exceeds that of its peers most."""
    if "operator" not in host.columns:
        return ""
    key = [pl.col("phase").fill_null("?"), pl.col("operator").fill_null("Python, outside operators")]
    spent = host.with_columns(key).group_by("rank", "phase", "operator").agg(pl.col("duration").sum())
    others = host["rank"].n_unique() - 1
    excess = (
        spent.group_by("phase", "operator")
        .agg(
            mine=pl.col("duration").filter(pl.col("rank") == rank).sum(),
            theirs=pl.col("duration").filter(pl.col("rank") != rank).sum() / max(others, 1),
        )
        .with_columns(more=pl.col("mine") - pl.col("theirs"))
        .sort("more", descending=True)
    )
    first = excess.row(0, named=True)
    return (
        f"; most of it in {first['phase']}: {first['operator']} (+{first['more'] * 1e3:.1f} ms)"
        if excess.height
        else ""
    )


def _kernels_compared(kernels: pl.DataFrame, rank: int) -> tuple[GpuCause, str]:
    """Whether a rank's kernels are slower than the same ones of its peers, or different ones."""
    ranks = kernels["rank"].n_unique()
    shared = kernels.with_columns(on=pl.col("rank").n_unique().over("peer"))
    common, own = shared.filter(pl.col("on") == ranks), shared.filter(pl.col("on") < ranks)
    mine = float(common.filter(rank=rank)["duration"].sum())
    theirs = float(common.filter(pl.col("rank") != rank)["duration"].sum()) / max(ranks - 1, 1)
    extra = float(own.filter(rank=rank)["duration"].sum())
    usual = float(own.filter(pl.col("rank") != rank)["duration"].sum()) / max(ranks - 1, 1)
    ratio = mine / theirs if theirs else 1.0
    if extra - usual > mine - theirs:
        count = own.filter(rank=rank).height
        return (
            GpuCause.UNEVEN_WORK,
            f"{count} kernels ({extra * 1e3:.1f} ms) of shapes or counts that not all peers have",
        )
    return GpuCause.SLOW_GPU, f"its kernels take {ratio:.2f} times as long as the same ones of its peers"


def _median(values: pl.Series) -> float:
    return float(np.median(values.to_numpy())) if len(values) else 0.0
