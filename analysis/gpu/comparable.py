"""The ranks and steps of a recording that can be compared, and what its times contradict or leave unexplained.

In: a recording. Out: `Comparable`: the recording without ranks that lack what the comparison needs, and of the steps
that all other ranks recorded as a whole. If a rank with half of its events were compared, it would hide who is slow, or
be blamed for what its file lacks. A recording in which nothing is missing stays as it is.

The same kernel at the same place of the same step is equal work. Where the profiler did not mark steps, they are found:

- *On some ranks*, whose window began or ended inside a step. A step that other ranks mark fills the time between two
  neighbouring marks of such a rank, or before or after all of its marks.
- *On all ranks*. The collectives that all ranks take part in are anchors: between the same two anchors, ranks do equal
  work. If the kernels launched between anchors repeat, one period is taken as a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.gpu.matching import ClockOffsets, Matches, match_collectives, measure_offsets
from tracekit.analysis.gpu.pace import PACE
from tracekit.analysis.graph.op_graph import FoldedGraph, Why
from tracekit.analysis.numeric.arrays import Floats, Ints, or_null
from tracekit.analysis.replay.graph_replay import Durations
from tracekit.base.text import code_name, counted, ranks_text, seconds
from tracekit.trace.gpu_activity import Activity, KernelClass, LostOps
from tracekit.trace.op import GpuRecording


class ComparableThresholds(Struct, frozen=True):
    """When ranks of a recording can be compared."""

    #: A rank that lacks the launches of a larger share of its GPU ops shows nothing of its host. Definition: most.
    most_unlinked: float = 0.5
    #: A comparison over fewer steps does not show what a rank costs in the steps that are left out. Definition.
    fewest_steps: int = 2
    #: Sections between anchors repeat if this share of them looks like the section one period earlier. Chosen.
    alike_share: float = 0.9
    #: At most this share of a stream's ops overtakes others. Chosen: in no recording looked at does a single one.
    overtaking_share: float = 0.01
    #: No GPU has more work queued than this, seconds. Chosen.
    longest_queue_s: float = 10.0
    #: Rounding and clock noise may make the ends of an edge contradict it by this much, seconds. Chosen.
    noise_s: float = 5e-6


COMPARABLE = ComparableThresholds()


@dataclass(frozen=True, slots=True, eq=False)
class Comparable:
    """`recording`: what is compared, with the steps of all calls. `left_out`: why ranks with a file are not compared.

    `doubts`: why the comparison cannot be trusted.
    """

    recording: GpuRecording
    matches: Matches
    clocks: ClockOffsets
    left_out: Mapping[int, str]
    doubts: tuple[str, ...] = ()


def comparable_part(recording: GpuRecording) -> Comparable:
    """The part of a recording in which ranks can be compared. If fewer than two can be, all of it; or the only rank
    with launches alone.
    """
    unfit, lacking = _incomplete(recording), _without_launches(recording)
    if lacking and len(linked := [rank for rank in recording.ranks if rank not in lacking]) == 1:
        return _matched(_restricted_to_ranks(recording, linked), {**recording.left_out, **unfit})
    while len(ranks := [rank for rank in recording.ranks if rank not in unfit]) > 1:
        candidate = _matched(_restricted_to_ranks(recording, ranks), {**recording.left_out, **unfit})
        steps = _whole_steps(candidate.recording)
        recorded, common = set.union(*steps.values()), set.intersection(*steps.values())
        short = [rank for rank in ranks if steps[rank] != recorded or rank in recording.cut]
        if not short:
            return candidate
        if not recorded:
            doubt = f"the file of {ranks_text(short)} is cut off, and no steps are marked to compare"
            return replace(candidate, doubts=(doubt,))
        if common:
            return _restricted_to_steps(candidate, common, short)
        rank = min(steps, key=lambda rank: (len(steps[rank]), rank not in recording.cut))
        unfit[rank] = "it has no step as a whole that the other ranks recorded"
    doubts = [f"rank {rank} cannot be compared: {why}" for rank, why in unfit.items()]
    return _matched(recording, recording.left_out, doubts)


def _incomplete(recording: GpuRecording) -> dict[int, str]:
    """Why ranks cannot be compared: what others recorded is missing or damaged."""
    overlapping, unlinked = ranks_with_overlaps(recording), _beyond_peers(recording, recording.unlinked)
    # Of a file that is cut off, the steps before the cut are whole.
    lost = {rank: lost_events.share for rank, lost_events in recording.lost.items() if rank not in recording.cut}
    reasons = {rank: lost_in_words(recording.lost[rank]) for rank, _ in _beyond_peers(recording, lost)}
    reasons |= {rank: f"{share:.0%} of its GPU ops overlap the next one of their stream" for rank, share in overlapping}
    reasons |= {
        rank: f"for {share:.0%} of its GPU ops and launches, the other half is missing" for rank, share in unlinked
    }
    for rank, share in recording.damaged.items():
        if share > PACE.smallest_share:  # what is missing may be what a rank is named for
            reasons[rank] = f"up to {share:.0%} of its GPU ops or host calls are damaged"
    for table, why in (
        (recording.step_spans, "its file marks no steps"),
        (recording.calls, "its file has no calls of the host; record with activities=[CPU, CUDA] on all ranks"),
    ):
        present = set(table["rank"].unique().to_list())
        reasons |= {rank: why for rank in recording.ranks if present and rank not in present}
    hosts = set(recording.host["rank"].unique().to_list())
    return reasons | {rank: why for rank, why in _without_launches(recording).items() if rank in hosts}


def _without_launches(recording: GpuRecording) -> dict[int, str]:
    """Why ranks lack the launches of most GPU ops; empty if all ranks do, as from exporters that write no args."""
    missing = dict(recording.gpu_ops.group_by("rank").agg(pl.col("launch").is_null().mean()).iter_rows())
    shares = {rank: min(missing.get(rank, 0.0), recording.unlinked.get(rank, 0.0)) for rank in recording.ranks}
    if min(shares.values(), default=1.0) > COMPARABLE.most_unlinked:
        return {}
    return {
        rank: f"its events lack args: no correlation names the launches of {missing[rank]:.0%} of its GPU ops"
        for rank, share in shares.items()
        if share > COMPARABLE.most_unlinked
    }


def lost_in_words(lost: LostOps) -> str:
    """How many launches have no GPU op, and what share of the GPU's time they stand for."""
    return (
        f"{lost.without_op:,} of {lost.launches:,} launches have no GPU op in its file ({lost.share:.0%} of the GPU's"
        " time, by the other launches)"
    )


def ranks_with_overlaps(recording: GpuRecording) -> list[tuple[int, float]]:
    """Ranks with unusually many GPU ops that outlast the start of the next one of their stream, and their share."""
    following = pl.col("start").shift(-1).over("rank", "device", "stream")
    beyond = (pl.col("start") + pl.col("duration") > following + COMPARABLE.noise_s).fill_null(value=False)
    shares = recording.gpu_ops.select("rank", beyond=beyond).group_by("rank").agg(pl.col("beyond").mean()).sort("rank")
    return _beyond_peers(recording, dict(shares.iter_rows()))


def _beyond_peers(recording: GpuRecording, shares: Mapping[int, float]) -> list[tuple[int, float]]:
    """The ranks whose share exceeds what is usual on the others."""
    beyond = []
    for rank, share in shares.items():
        others = [shares.get(other, 0.0) for other in recording.ranks if other != rank]
        if others and share > float(np.median(others)) + PACE.smallest_share:
            beyond.append((rank, share))
    return beyond


def _matched(recording: GpuRecording, left_out: Mapping[int, str], doubts: Iterable[str] = ()) -> Comparable:
    matches = match_collectives(recording)
    clocks = measure_offsets(matches, recording.ranks)
    doubts = (*doubts, *mismatched(matches, clocks))
    return Comparable(with_steps(recording, matches), matches, clocks, left_out, doubts)


def mismatched(matches: Matches, clocks: ClockOffsets) -> list[str]:
    """Why not all matches can be right: some are missing between others, or ended before other members began."""
    groups = [group for group in matches.groups if group.matched and not group.transfers]
    ended = matches.end - clocks.of(matches.rank) < matches.begun(clocks)[1] - COMPARABLE.noise_s
    collective = np.array([not group.transfers for group in matches.groups], np.bool_)[matches.group_of]
    ended &= (matches.synchronising & collective)[matches.instance]
    count = int(ended.sum()) + sum(group.inside for group in groups)
    if count <= PACE.smallest_share * len(matches.row):
        return []
    recorded = dict.fromkeys(clocks.ranks, 0)
    for group in groups:
        for rank in group.ranks:
            recorded[rank] += group.matched + group.unmatched.get(rank, 0)
    fewest = [rank for rank in recorded if recorded[rank] == min(recorded.values())]
    who = f"{ranks_text(fewest)} recorded fewest"
    return [f"{count} kernels of collectives fit none on the other ranks at their time ({who}): some were not recorded"]


def _whole_steps(recording: GpuRecording) -> dict[int, set[int]]:
    """The steps that each rank recorded; without the one in which its file is cut off."""
    marked = [table.select("rank", "step").drop_nulls().unique() for table in (recording.calls, recording.gpu_ops)]
    whole = {}
    for rank in recording.ranks:
        called, ran = (set(table.filter(rank=rank)["step"].to_list()) for table in marked)
        last = min(max(called, default=-1), max(ran, default=-1)) if rank in recording.cut else np.inf
        whole[rank] = {step for step in called if step < last}
    return whole


def _restricted_to_ranks(recording: GpuRecording, ranks: Collection[int]) -> GpuRecording:
    """The recording of some ranks."""
    if len(ranks) == len(recording.ranks):
        return recording
    masks = [table["rank"].is_in(list(ranks)) for table in (recording.gpu_ops, recording.calls)]
    return replace(
        _restricted(recording, *masks),
        step_spans=recording.step_spans.filter(pl.col("rank").is_in(list(ranks))),
        host=recording.host.filter(pl.col("rank").is_in(list(ranks))),
        hosts={rank: host for rank, host in recording.hosts.items() if rank in ranks},
        files={rank: file for rank, file in recording.files.items() if rank in ranks},
        cut=tuple(rank for rank in recording.cut if rank in ranks),
    )


def _restricted(recording: GpuRecording, ops: pl.Series, calls: pl.Series) -> GpuRecording:
    """The recording with some of its GPU ops and calls."""
    row = pl.Series(np.append(np.where(calls, np.cumsum(calls) - 1, -1), -1))
    launch = row.gather(recording.gpu_ops["launch"].fill_null(recording.calls.height))
    return replace(
        recording,
        gpu_ops=recording.gpu_ops.with_columns(launch=launch.set(launch < 0, None)).filter(ops),
        calls=recording.calls.filter(calls),
    )


def _restricted_to_steps(comparable: Comparable, steps: Collection[int], short: Collection[int]) -> Comparable:
    """What was launched from the first of these steps to the last, on each rank by its own marks.

    `short`: the ranks that did not record the other steps.
    """
    recording, calls = comparable.recording, comparable.recording.calls
    begins = pl.concat(
        [calls.select("rank", "step", start="busy_since"), recording.step_spans.select("rank", "step", "start")]
    )
    begins = begins.filter(step=min(steps)).group_by("rank").agg(begin=pl.col("start").min())
    if min(steps) == calls["step"].min():
        begins = begins.with_columns(begin=pl.lit(-np.inf))
    ends = calls.filter(step=max(steps)).group_by("rank").agg(end=pl.col("start").max())
    limits = begins.join(ends, on="rank")

    def inside(table: pl.DataFrame) -> pl.Series:
        times = table.select("rank", "start").join(limits, on="rank", how="left", maintain_order="left")
        return times.select(pl.col("start").is_between("begin", "end")).to_series()

    called = inside(calls)
    ops = recording.gpu_ops.select(
        "rank",
        "start",
        "launch",
        kept=pl.concat([called, pl.Series([False])]).gather(recording.gpu_ops["launch"].fill_null(calls.height)),
    ).join(limits, on="rank", how="left", maintain_order="left")
    earlier = pl.col("launch").is_null() & pl.col("begin").is_infinite()
    last = pl.col("start").filter("kept").max().over("rank")
    in_steps = ops.select(pl.col("kept") | (earlier & (pl.col("start") <= last))).to_series()
    part = _restricted(recording, in_steps, called)
    spans, host = (table.filter(inside(table)) for table in (recording.step_spans, recording.host))
    note = f"compared over {ranks_text(steps, name='step')}: {ranks_text(short)} did not record the others as a whole"
    marked = spans.group_by("step").len().filter(pl.col("len") >= len(recording.ranks)).height
    few = (marked if recording.step_spans.height else len(steps)) < COMPARABLE.fewest_steps
    notes = recording.notes if few else (*recording.notes, note)
    part = replace(part, step_spans=spans, host=host, cut=(), notes=notes)
    compared = _matched(
        part, comparable.left_out, [f"a rank may cost more or less in other steps: {note}"] if few else []
    )
    return replace(compared, doubts=(*compared.doubts, *_disagreeing_marks(compared.matches)))


def _disagreeing_marks(matches: Matches) -> list[str]:
    """Why the steps of some ranks are not those of the others: as a whole, they have the same collectives."""
    groups = [group for group in matches.groups if not group.transfers]
    unmatched = sum(sum(group.unmatched.values()) for group in groups)
    if unmatched <= PACE.smallest_share * (len(matches.row) + unmatched):
        return []
    why = "ranks number their steps differently, or some kernels were not recorded"
    return [f"{unmatched} kernels of collectives in the compared steps fit none on the other ranks: {why}"]


class _StepSpan(NamedTuple):
    """A step of a rank; seconds, without the begin itself."""

    rank: int
    step: int
    begin: float
    end: float


def with_steps(recording: GpuRecording, matches: Matches) -> GpuRecording:
    """The recording with a step for calls, and what they launched, without one; existing marks stay as they are."""
    missing = _unmarked(recording, matches) if recording.step_spans.height else _repeated(recording, matches)
    if not missing:
        return recording
    calls = recording.calls
    step = calls["step"].fill_null(-1).to_numpy().copy()
    rank, start = calls["rank"].to_numpy(), calls["start"].to_numpy()
    for rank_number in recording.ranks:
        spans = sorted((span for span in missing if span.rank == rank_number), key=lambda span: span.begin)
        unmarked = np.flatnonzero((rank == rank_number) & (step < 0))
        # A step begins after the call that launched its anchor: other calls can have the same whole microsecond.
        span_of = np.searchsorted([span.begin for span in spans], start[unmarked], side="left") - 1
        inside = (span_of >= 0) & (start[unmarked] <= np.array([*(span.end for span in spans), -np.inf])[span_of])
        step[unmarked] = np.where(inside, np.array([*(span.step for span in spans), -1])[span_of], -1)
    of_launch = np.append(step, -1)[recording.gpu_ops["launch"].fill_null(-1).to_numpy()]
    return replace(
        recording,
        calls=calls.with_columns(step=or_null(step.astype(np.int32))),
        gpu_ops=recording.gpu_ops.with_columns(step=pl.coalesce("step", or_null(of_launch.astype(np.int32)))),
    )


def _unmarked(recording: GpuRecording, matches: Matches) -> list[_StepSpan]:
    """Spans of steps that a rank does not mark; only those whose place is certain.

    The time before the first mark of all ranks, and after the last, is a step if it launches at least half as many
    collectives as one. Steps that launch none, such as all behind the end of a file that is cut off, do not count.
    """
    spans = {
        (rank, step): (start, start + duration) for rank, step, start, duration in recording.step_spans.iter_rows()
    }
    marked = sorted({step for _, step in spans})
    launched = dict(zip(recording.ranks, _launch_times(recording, matches), strict=True))
    counts = [_count(launched[rank], *span) for (rank, _), span in spans.items()]
    usual = np.median([count for count in counts if count] or [1])
    earlier, later = marked[0] - 1, marked[-1] + 1
    around = zip([earlier, earlier, *marked], [earlier, *marked, later], [*marked, later, later], strict=True)
    unmarked = []
    for rank, (before, step, behind) in product(recording.ranks, around):
        begin = -np.inf if before == earlier else spans.get((rank, before), (None, None))[1]
        end = np.inf if behind == later else spans.get((rank, behind), (None, None))[0]
        if (rank, step) in spans or begin is None or end is None:
            continue
        if step in marked or 2 * _count(launched[rank], begin, end) >= usual:
            unmarked.append(_StepSpan(rank, step, begin, end))
    return unmarked


def _count(times: Floats, begin: float, end: float) -> int:
    """The number of times in a span."""
    return int(((times > begin) & (times <= end)).sum())


def _repeated(recording: GpuRecording, matches: Matches) -> list[_StepSpan]:
    """Spans from anchor to anchor; none if there are no anchors, or ranks differ in their order."""
    launched = _launch_times(recording, matches)
    if not launched.shape[1] or (np.diff(launched, axis=1) < 0).any():
        return []
    first = launched[:, :: _period(_sections(recording, launched[0]))]
    return [
        _StepSpan(rank, number, begin, end)
        for rank, begins in zip(recording.ranks, first.tolist(), strict=True)
        for number, (begin, end) in enumerate(zip(begins, [*begins[1:], np.inf], strict=True))
    ]


def _launch_times(recording: GpuRecording, matches: Matches) -> Floats:
    """When the calls that launched the collectives of all ranks began, in the order of the first rank, [ranks,
    anchors].
    """
    launch = recording.gpu_ops["launch"].fill_null(-1).to_numpy()[matches.row]
    called = np.append(recording.calls["start"].to_numpy(), np.nan)[launch]
    times = np.full((len(recording.ranks), matches.matched), np.nan)
    times[np.searchsorted(recording.ranks, matches.rank), matches.instance] = called
    times = times[:, np.isfinite(times).all(axis=0)]
    return times[:, np.argsort(times[0], kind="stable")]


def _sections(recording: GpuRecording, anchors: Floats) -> Ints:
    """A number for what the first rank launches between neighbouring anchors, [anchors - 1]; equal for equal names."""
    ops = recording.gpu_ops.filter(pl.col("launch").is_not_null() & pl.col("rank").eq(recording.ranks[0]))
    called = recording.calls["start"].gather(ops["launch"]).to_numpy()
    ops = ops.select("name", called=called, section=np.searchsorted(anchors, called, side="left") - 1)
    names = (
        ops.filter(pl.col("section").is_between(0, len(anchors) - 2))
        .sort("section", "called")
        .group_by("section", maintain_order=True)
        .agg(pl.col("name").str.join("\n"))
    )
    return names["name"].rank("dense").cast(pl.Int64).to_numpy()


def _period(sections: Ints) -> int:
    """The number of sections after which they repeat; more than their number if they do not."""
    alike = (
        shift
        for shift in range(1, len(sections) // 2 + 1)
        if (sections[shift:] == sections[:-shift]).mean() >= COMPARABLE.alike_share
    )
    return next(alike, len(sections) + 1)


def contradictions(recording: GpuRecording) -> Iterator[str]:
    """Yield what the times of each rank contradict.

    No GPU does what they say. Idle time, its reasons and what a fix saves are differences of such times, so nothing of
    them is trusted.
    """
    yield from _longer_than_all(recording)
    yield from _overtaking(recording)
    yield from _far_behind(recording)


def _longer_than_all(recording: GpuRecording) -> Iterator[str]:
    """Kernels without a launch that last longer than all that has one."""
    launched = recording.gpu_ops.filter(pl.col("launch").is_not_null())
    rest = pl.concat([table.select("rank", "start", "duration") for table in (recording.calls, launched)])
    rest = rest.group_by("rank").agg(rest_s=(pl.col("start") + pl.col("duration")).max() - pl.col("start").min())
    others = recording.gpu_ops.filter(pl.col("launch").is_null() & pl.col("activity").eq(str(Activity.KERNEL)))
    longer = others.join(rest, on="rank").filter(pl.col("duration") > pl.col("rest_s"))
    for (rank,), kernels in longer.group_by("rank", maintain_order=True):
        longest = kernels.sort("duration", descending=True)
        yield (
            f"rank {rank}: {counted(kernels.height, 'kernel')} such as {code_name(str(longest['name'][0]))} last"
            f" {seconds(longest['duration'][0])}, longer than all that was recorded from launch to end"
            f" ({seconds(longest['rest_s'][0])}): whether its GPU is idle meanwhile cannot be told"
        )


def _overtaking(recording: GpuRecording) -> Iterator[str]:
    """GPU ops that run before one of their stream that was launched earlier."""
    ops = recording.gpu_ops.filter(pl.col("launch").is_not_null())
    launched = recording.calls["start"].gather(ops["launch"]).alias("launched")
    launched_s, ran_s = (pl.col(name).diff().over("rank", "device", "stream") for name in ("launched", "start"))
    ordered = ops.select("rank", "device", "stream", "start", launched).sort("launched", "start", maintain_order=True)
    overtaking = ordered.select("rank", overtakes=(launched_s > 0) & (ran_s < -COMPARABLE.noise_s))
    counts = overtaking.group_by("rank").agg(pl.col("overtakes").sum(), pl.len()).sort("rank")
    for rank, count, _ in counts.filter(pl.col("overtakes") > COMPARABLE.overtaking_share * pl.col("len")).iter_rows():
        yield (
            f"rank {rank}: {counted(count, 'GPU op')} ran before one of the same stream that was launched earlier: its"
            " times are of several clocks, so neither idle time nor its reasons can be told"
        )


def _far_behind(recording: GpuRecording) -> Iterator[str]:
    """GPUs that begin what was launched only when the host had long finished."""
    ops = recording.gpu_ops.filter(pl.col("launch").is_not_null())
    calls = recording.calls.with_columns(end=pl.col("start") + pl.col("duration"))
    behind = ops.select("rank", behind_s=pl.col("start") - calls["end"].gather(ops["launch"]))
    hosts = calls.group_by("rank").agg(host_s=pl.col("end").max() - pl.col("start").min())
    least = behind.group_by("rank").agg(pl.col("behind_s").min()).join(hosts, on="rank").sort("rank")
    far = pl.col("behind_s") > pl.max_horizontal(pl.lit(COMPARABLE.longest_queue_s), "host_s")
    for rank, behind_s, host_s in least.filter(far).iter_rows():
        yield (
            f"rank {rank}: its GPU begins every op at least {seconds(behind_s)} after the launch, in a recording of"
            f" {seconds(host_s)}: the clocks of host and GPU differ, so what its GPU waits for cannot be told"
        )


@dataclass(frozen=True, slots=True)
class UnexplainedTime:
    """`communication_gap_s`, `compute_gap_s`: 99th percentile of the unexplained gap before GPU ops, seconds.

    `inferred`: number of edges inferred from the order of calls; `edges`: of all edges. `violations`: of edges that the
    recorded times contradict by more than `noise_s`.
    """

    communication_gap_s: float
    compute_gap_s: float
    edges: int
    inferred: int
    violations: int


def unexplained(graph: FoldedGraph, durations: Durations) -> UnexplainedTime:
    """Measure what the edges of `graph` leave unexplained."""
    ops = graph.ops
    delay = graph.of_ops(durations.launch_delay)
    kind = ops.labels["kind"]
    communicates = kind.where({str(KernelClass.COMMUNICATION)})
    computes = ~communicates & kind.where({str(kernel_class) for kernel_class in KernelClass})
    end = ops.start + ops.duration
    return UnexplainedTime(
        communication_gap_s=_percentile(delay[communicates]),
        compute_gap_s=_percentile(delay[computes]),
        edges=len(ops.before),
        inferred=int((ops.why == Why.INFERRED).sum()),
        violations=int((end[ops.before] > ops.start[ops.after] + COMPARABLE.noise_s).sum()),
    )


def _percentile(values: np.ndarray) -> float:
    return float(np.percentile(values, 99)) if len(values) else 0.0
