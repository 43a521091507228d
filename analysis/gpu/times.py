"""What one GPU did, and why it was idle: the times of each rank of a recording.

In: a `GpuRecording`. Out: `GpuTimes` and a `Breakdown` of each rank, and `IdleOfRank`: each gap between GPU ops divided
among reasons, which exclude each other and sum to the gap. Ops that run concurrently count once. Definitions:
docs/kineto.md.

A gap ends with the op that starts then; its launch began at `ls` and ended at `le`. Without a recorded launch, all of
it is `unknown`. If the launch began before the gap, work was there and the GPU had not begun it: `queued`, or
`launch-latency` where it began less than 10 us before, because no launch arrives faster. Otherwise the host was late:
`launch-call` until `le`, then `launch-latency`; and before `ls`, whatever the thread did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from tracekit.analysis.gpu.roofline import Card, shape_times
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints, or_null
from tracekit.report.hardware import (
    BeforeFirst,
    GpuTimes,
    IdleTime,
    KernelTime,
    Launches,
    MarkedSteps,
    MemoryPoint,
    MemoryTimes,
    NamedTime,
    OpTime,
    Synchronisation,
    Transfer,
)
from tracekit.trace.gpu_activity import Activity, IdleReason, KernelClass
from tracekit.trace.op import GpuRecording

#: At most so many kernels, operators, calls, and names of a reason.
MOST_ROWS, MOST_NAMES, MOST_SHAPES = 15, 8, 4
#: Kernels shorter than this, seconds, take less time than their launch. Chosen.
SHORT_S = 10e-6
#: Of the kernels of one name, those that take longer count more.
_MEAN_OCCUPANCY = (pl.col("occupancy") * pl.col("duration")).sum() / pl.col("duration").filter(
    pl.col("occupancy").is_not_null()
).sum()
_KIND_OF_COPY = r"([HDP]to[HDP])"
_REASONS = tuple(IdleReason)
_NUMBER = {str(reason): number for number, reason in enumerate(_REASONS)}
#: No launch arrives faster than this, seconds. Chosen.
ARRIVES_S = 10e-6
#: Times in seconds of whole microseconds differ by rounding.
ROUNDING_S = 1e-10
_SCHEMA = pl.Schema({"reason": pl.String, "name": pl.String, "where": pl.String, "seconds": pl.Float64})


def times_of(recording: GpuRecording, rank: int) -> GpuTimes:
    """The times of one rank."""
    gpu = recording.gpu_ops.filter(rank=rank)
    begin, end = recording.spans[rank]
    calls = recording.calls
    first, last = np.searchsorted(recording.host["rank"].to_numpy(), [rank, rank + 1]).tolist()
    idle = idle_of(gpu, calls, recording.host.slice(first, last - first), recording.whats, begin)
    launched = gpu.filter(pl.col("launch").is_not_null())
    launches = launched["launch"]
    around = launched.with_columns(
        op=calls["inner"].gather(launches),
        inputs=calls["inputs"].gather(launches),
        module=calls["module"].gather(launches),
    )
    kernels = gpu.filter(activity=str(Activity.KERNEL))
    short = kernels.filter(pl.col("duration") < SHORT_S - ROUNDING_S)
    steps = recording.step_spans.filter(rank=rank)
    own_calls = calls.with_row_index("row").filter(rank=rank)
    return GpuTimes(
        rank=rank,
        recording_s=end - begin,
        span_s=idle.last - idle.first,
        busy_s=idle.busy_s,
        idle_s=idle.last - idle.first - idle.busy_s,
        after_last_s=end - idle.last,
        before_first=BeforeFirst(idle.first - begin, dict(_totals(idle.before)), _names(idle.before)),
        idle_by_reason=tuple(_by_reason(idle)),
        idle_opened_by=dict(idle.gaps.group_by("opened_by").agg(pl.col("seconds").sum()).sort("opened_by").iter_rows()),
        kernels=tuple(
            KernelTime(name, count, seconds, of_class or "memory", None if occupancy is None else occupancy / 100)
            for name, count, seconds, of_class, occupancy in gpu.group_by("name")
            .agg(
                count=pl.len(),
                seconds=pl.col("duration").sum(),
                of_class=pl.col("kernel_class").first(),
                occupancy=_MEAN_OCCUPANCY.fill_nan(None),
            )
            .sort("seconds", "name", descending=[True, False])
            .head(MOST_ROWS)
            .iter_rows()
        ),
        ops=tuple(_ops(around, recording.device_name)),
        synchronisations=tuple(_synchronisations(own_calls, idle)),
        transfers=tuple(_transfers(gpu)),
        launch=Launches(
            calls=launches.n_unique(),
            call_s=float(calls["duration"].gather(launches.unique()).sum()),
            short_kernels=short.height,
            short_s=float(short["duration"].sum()),
            kernels=kernels.height,
            kernel_s=float(kernels["duration"].sum()),
        ),
        steps=MarkedSteps(
            steps["step"].n_unique(), None if steps.is_empty() else float(steps["duration"].to_numpy().mean())
        ),
        stacks=bool((recording.whats["where"] != "").any()) or bool(own_calls["module"].is_not_null().any()),
        shapes=bool((own_calls["inputs"].fill_null("") != "").any()),
        memory=_memory(recording.memory.filter(rank=rank), begin),
    )


def _memory(table: pl.DataFrame, begin: float) -> MemoryTimes | None:
    """The memory of a rank whose recording begins then; None if it was not recorded."""
    if table.is_empty():
        return None
    points = table.select(pl.col("start") - begin, "allocated").iter_rows()
    peak, reserved = table["allocated"].to_list(), table["reserved"].to_list()
    return MemoryTimes(max(peak), max(reserved), tuple(MemoryPoint(*point) for point in points))


def _names(table: pl.DataFrame) -> tuple[NamedTime, ...]:
    """What takes longest in a table of `name`, `where`, `seconds`, each with the line where most of it is."""
    by_name = (
        table.sort("seconds", "where", descending=True)
        .group_by("name", maintain_order=True)
        .agg(pl.col("seconds").sum(), pl.col("where").first())
        .sort("seconds", "name", descending=[True, False])
    )
    return tuple(NamedTime(*row) for row in by_name.head(MOST_NAMES).iter_rows())


def _by_reason(idle: IdleOfRank) -> Iterable[IdleTime]:
    """Yield the reasons, longest first."""
    for reason, seconds in _totals(idle.between):
        yield IdleTime(reason, seconds, idle.gaps_of[reason], _names(idle.between.filter(reason=reason)))


def _totals(table: pl.DataFrame) -> Iterable[tuple[str, float]]:
    """Yield the seconds of each reason, longest first."""
    totals = table.group_by("reason").agg(pl.col("seconds").sum())
    yield from totals.sort("seconds", "reason", descending=[True, False]).iter_rows()


def _ops(around: pl.DataFrame, device: str | None) -> Iterable[OpTime]:
    """Yield the operators with most GPU time; of what no operator launched, by what did."""
    card = Card.named(device)
    named = around.filter(pl.col("op").is_not_null())
    longest = (
        named.group_by("op").agg(pl.len(), pl.col("duration").sum()).sort("duration", "op", descending=[True, False])
    )
    for name, count, seconds in longest.head(MOST_ROWS).iter_rows():
        of_op = named.filter(op=name)
        module = of_op.filter(pl.col("module").is_not_null()).group_by("module").agg(pl.col("duration").sum())
        shapes = of_op.group_by("inputs").agg(count=pl.len(), seconds=pl.col("duration").sum())
        shapes = shapes.filter(pl.col("inputs").fill_null("") != "").sort("seconds", "inputs", descending=[True, False])
        yield OpTime(
            name=name,
            gpu_ops=count,
            seconds=seconds,
            module=None
            if module.is_empty()
            else module.sort("duration", "module", descending=[True, False])["module"][0],
            shapes=tuple(shape_times(name, row, card) for row in shapes.head(MOST_SHAPES).iter_rows()),
        )


def _synchronisations(calls: pl.DataFrame, idle: IdleOfRank) -> Iterable[Synchronisation]:
    """Yield the calls that wait, by name and innermost operator, those that wait longest first."""
    after = idle.gaps.group_by("call").agg(idle_s=pl.col("seconds").sum()).drop_nulls()
    waiting = calls.filter("waits").join(after, left_on="row", right_on="call", how="left")
    grouped = waiting.group_by("name", "inner").agg(
        pl.len(), pl.col("duration").sum(), pl.col("idle_s").fill_null(0.0).sum(),
        where=pl.col("own").drop_nulls().mode().sort().first(),
    ).sort("duration", "name", "inner", descending=[True, False, False])  # fmt: skip
    for name, inner, count, blocked_s, idle_s, where in grouped.head(MOST_ROWS).iter_rows():
        yield Synchronisation(name, inner, where or "", count, blocked_s, idle_s)


def _transfers(gpu: pl.DataFrame) -> Iterable[Transfer]:
    """Yield the copies by kind, longest first."""
    copies = gpu.filter(activity=str(Activity.MEMCPY)).with_columns(
        kind=pl.col("name").cast(pl.String).str.extract(_KIND_OF_COPY).fill_null("other"),
        pageable=pl.col("name").cast(pl.String).str.contains("Pageable"),
    )
    if copies.is_empty():
        return
    computing = union(gpu.filter(activity=str(Activity.KERNEL)))
    exposed = copies["duration"].to_numpy() - _covered(copies, computing)
    grouped = (
        copies.with_columns(exposed=pl.Series(exposed))
        .group_by("kind", "pageable")
        .agg(pl.len(), pl.col("bytes").fill_null(0).sum(), pl.col("duration").sum(), pl.col("exposed").sum())
        .sort("duration", "kind", descending=[True, False])
    )
    for row in grouped.iter_rows():
        yield Transfer(*row)


def _covered(ops: pl.DataFrame, intervals: np.ndarray) -> np.ndarray:
    """How much of each op lies in the `intervals`, as of `union`, seconds, [ops]."""
    begin, end = intervals.T
    length = np.append(0.0, np.cumsum(end - begin))

    def before(times: Floats) -> Floats:
        place = np.searchsorted(begin, times, side="right")
        return np.asarray(length[place] - np.maximum(np.append(-np.inf, end)[place] - times, 0.0))

    start = ops["start"].to_numpy()
    return np.asarray(before(start + ops["duration"].to_numpy()) - before(start))


@dataclass(frozen=True, slots=True, eq=False)
class IdleOfRank:
    """The idle time of one rank by `reason`, `name`, `where` (`seconds`), between its GPU ops and before the first one.

    `gaps_of`: the number of gaps with a part of each reason. `gaps`: of each, its `seconds`, `opened_by`, and the
    `call` (a row of calls) in which the host waited when it began, null for none. `busy_s`; `first`, `last`: start of
    the first GPU op and end of the last.
    """

    between: pl.DataFrame
    before: pl.DataFrame
    gaps_of: Mapping[str, int]
    gaps: pl.DataFrame
    busy_s: float
    first: float
    last: float


def idle_of(
    gpu: pl.DataFrame, calls: pl.DataFrame, host: pl.DataFrame, whats: pl.DataFrame, begin: float
) -> IdleOfRank:
    """Divide the idle time. `gpu`, `host`: of one rank; `calls`: all, which `gpu.launch` numbers; `begin`: of all."""
    start, end = gpu["start"].to_numpy(), (gpu["start"] + gpu["duration"]).to_numpy()
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    opens = np.flatnonzero(start[order][1:] > reached[:-1] + ROUNDING_S) + 1  # positions of ops that end a gap
    op, a, b = order[opens], reached[opens - 1], start[order][opens]
    threads, launch = _HostThreads(host, whats), gpu["launch"].gather(op)
    called = {name: calls[name].gather(launch) for name in ("start", "duration", "thread", "name")}
    ls, le = called["start"].to_numpy(), (called["start"] + called["duration"]).to_numpy()
    thread = called["thread"].fill_null(-1).to_numpy()
    unknown, queued = launch.is_null().to_numpy(), ls + ARRIVES_S <= a + ROUNDING_S
    late = ~unknown & (ls >= a - ROUNDING_S)
    begin_of_gap, done = np.minimum(ls, b), np.minimum(le, b)
    arrived = np.maximum(done, begin_of_gap)
    ends, blank = gpu["name"].gather(op).cast(pl.String), pl.repeat("", len(op), eager=True)
    call = called["name"].cast(pl.String).fill_null("")
    host_reasons, gaps_of = threads.activities_in(np.flatnonzero(late), thread, a, begin_of_gap)
    parts = [
        (IdleReason.UNKNOWN, blank, np.where(unknown, b - a, 0.0)),
        (IdleReason.QUEUED, ends, np.where(queued, b - a, 0.0)),
        (IdleReason.LAUNCH_LATENCY, ends, np.where(late, b - arrived, np.where(unknown | queued, 0.0, b - a))),
        (IdleReason.LAUNCH_CALL, call, np.where(late, done - begin_of_gap, 0.0).clip(min=0.0)),
    ]
    waits = pl.col("waits") & (pl.col("rank") == gpu["rank"][0])
    waiting = calls.select("rank", "thread", "start", "duration", "waits").with_row_index().filter(waits)
    waited = _waited_at(waiting, thread, a, late)
    opened = np.where(unknown, "unknown", np.where(queued, "queued", np.where(waited >= 0, "synchronise", "host")))
    first, before = int(order[0]), host_reasons.clear()
    launched = gpu["launch"][first]
    if launched is not None and calls["start"][launched] > begin:
        where = np.array([begin]), np.array([min(calls["start"][launched], start[first])])
        thread_of_launch = np.array([calls["thread"][launched]])
        before, _ = threads.activities_in(np.zeros(1, np.int64), thread_of_launch, *where, alone=True)
    return IdleOfRank(
        between=pl.concat([host_reasons, *(_of_reason(*part) for part in parts)]),
        before=before,
        gaps_of=gaps_of | {str(reason): int((spent > ROUNDING_S).sum()) for reason, _, spent in parts},
        gaps=pl.DataFrame({"seconds": b - a, "opened_by": opened, "call": or_null(waited)}),
        busy_s=float(reached[-1] - start[first] - (b - a).sum()),
        first=float(start[first]),
        last=float(reached[-1]),
    )


def _of_reason(reason: IdleReason, names: pl.Series, seconds: Floats) -> pl.DataFrame:
    """Idle time of one reason by name. `seconds`: of each gap."""
    by_name = (
        pl.DataFrame({"name": names, "seconds": seconds}).filter(pl.col("seconds") > ROUNDING_S).group_by("name").sum()
    )
    return by_name.with_columns(reason=pl.lit(str(reason)), where=pl.lit("")).select(_SCHEMA.names()).cast(_SCHEMA)


def _waited_at(calls: pl.DataFrame, thread: Ints, times: Floats, wanted: Bools) -> Ints:
    """The one of `calls` that wait in which a thread waited for the GPU at a time, -1 for none, [times]."""
    asked = pl.DataFrame({"thread": thread, "at": times}).with_row_index("gap").filter(pl.Series(wanted)).sort("at")
    begun = calls.with_columns(end=pl.col("start") + pl.col("duration")).sort("start", maintain_order=True)
    last = asked.join_asof(begun, left_on="at", right_on="start", by="thread", check_sortedness=False)
    inside = last.filter(pl.col("end") >= pl.col("at"))
    waited_in = np.full(len(times), -1, np.int64)
    waited_in[inside["gap"].to_numpy()] = inside["index"].to_numpy()
    return waited_in


class _HostThreads:
    """What the threads of a rank did at any time."""

    def __init__(self, host: pl.DataFrame, whats: pl.DataFrame) -> None:
        self.whats = whats
        self.busy = np.append(whats["busy"].to_numpy(), False)
        self.of: dict[int, tuple[Floats, Floats, Ints]] = {}
        thread, start = host["thread"].to_numpy(), host["start"].to_numpy()
        end, activity = start + host["duration"].to_numpy(), host["what"].to_numpy()
        firsts = np.flatnonzero(np.diff(thread, prepend=-1, append=-1))  # by thread and start
        for first, last in pairwise(firsts.tolist()):
            rows = slice(first, last)
            self.of[int(thread[first])] = _gapless(start[rows], end[rows], activity[rows])

    def activities_in(
        self, gap: Ints, thread: Ints, begin: Floats, end: Floats, *, alone: bool = False
    ) -> tuple[pl.DataFrame, dict[str, int]]:
        """What the threads did from `begin` to `end` of these gaps, in all; and the number of gaps of each reason.

        Where a thread did nothing, another one counts that works, unless `alone`.
        """
        pieces = [np.zeros((4, 0))]
        for thread_id in np.unique(thread[gap]):
            gaps = gap[(thread[gap] == thread_id) & (end[gap] > begin[gap])]
            if len(gaps):
                pieces.append(np.stack(self._of_thread(gaps, int(thread_id), begin, end)))
        all_pieces = np.concatenate(pieces, axis=1)
        number, start, seconds, activity = all_pieces[:, all_pieces[2] > ROUNDING_S]
        whats = activity.astype(np.int64)
        if not alone:
            self._fill_from_other_threads(start + seconds / 2, whats)
        named = self.whats.select("reason", "name", "where")
        named = pl.concat([named, pl.DataFrame([(str(IdleReason.PYTHON), "", "")], named.schema, orient="row")])
        whats = np.where(whats < 0, named.height - 1, whats)
        reason = np.array([_NUMBER[name] for name in named["reason"].to_list()])
        gap_reason = np.unique(number.astype(np.int64) * len(_REASONS) + reason[whats]) % len(_REASONS)
        counts = np.bincount(gap_reason, minlength=len(_REASONS))
        gaps_of = {str(name): int(count) for name, count in zip(_REASONS, counts, strict=True) if count}
        totals = named.with_columns(seconds=pl.Series(np.bincount(whats, seconds, named.height)))
        return totals.filter(pl.col("seconds") > 0).cast(_SCHEMA), gaps_of

    def _of_thread(self, gap: Ints, thread: int, begin: Floats, end: Floats) -> tuple[Ints, Floats, Floats, Ints]:
        starts, ends, activity = self.of.get(thread, _gapless(*(np.zeros(0),) * 2, np.zeros(0, np.int64)))
        first = np.searchsorted(ends, begin[gap], side="right")
        last = np.searchsorted(starts, end[gap], side="left")
        count = last - first
        number = np.repeat(np.arange(len(gap)), count)
        piece = np.arange(len(number)) - np.repeat(np.cumsum(count) - count - first, count)
        start = np.maximum(starts[piece], begin[gap][number])
        return gap[number], start, np.minimum(ends[piece], end[gap][number]) - start, activity[piece]

    def _fill_from_other_threads(self, times: Floats, what: Ints) -> None:
        """Replace "nothing" by what another thread does then, if that is inside an operator or a call."""
        for _, ends, theirs in self.of.values():
            free = np.flatnonzero(what == -1)
            if not len(free):
                return
            doing = theirs[np.searchsorted(ends, times[free], side="right")]
            what[free] = np.where(self.busy[doing], doing, -1)


def _gapless(start: Floats, end: Floats, what: Ints) -> tuple[Floats, Floats, Ints]:
    """The pieces of a thread, ascending, with pieces of -1 in between, before and after."""
    after = np.flatnonzero(start[1:] > end[:-1]) + 1
    holes = np.concatenate([[0], after, [len(start)]])
    begins = np.concatenate([[-np.inf], end[after - 1], end[-1:]])
    ends = np.concatenate([start[:1], start[after], [np.inf]])
    if not len(start):
        return np.array([-np.inf]), np.array([np.inf]), np.array([-1])
    return np.insert(start, holes, begins), np.insert(end, holes, ends), np.insert(what, holes, -1)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One rank, from the start of its first GPU op to the end of its last; seconds.

    `exposed_communication_s`: communication while no compute kernel ran. `memory_s`: copies and fills, overlapped or
    not. `idle_s`: nothing ran.
    """

    rank: int
    span_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    memory_s: float
    idle_s: float


def breakdowns(recording: GpuRecording) -> tuple[Breakdown, ...]:
    """A breakdown for each rank, ascending."""
    ops = recording.gpu_ops.select("rank", "start", "duration", "activity", "kernel_class")
    return tuple(_breakdown(rank, ops.filter(rank=rank)) for rank in recording.ranks)


def _breakdown(rank: int, ops: pl.DataFrame) -> Breakdown:
    kernel = ops["activity"] == str(Activity.KERNEL)
    communicates = kernel & (ops["kernel_class"] == str(KernelClass.COMMUNICATION))
    compute, communication, memory = (
        union(ops.filter(mask)) for mask in (kernel & ~communicates, communicates, ~kernel)
    )
    busy = union(ops)
    span = float(busy[-1, 1] - busy[0, 0]) if len(busy) else 0.0
    overlap = both(compute, communication)
    return Breakdown(
        rank=rank,
        span_s=span,
        compute_s=length(compute),
        communication_s=length(communication),
        exposed_communication_s=length(communication) - overlap,
        memory_s=length(memory),
        idle_s=span - length(busy),
    )


def grid_blocks() -> pl.Expr:
    """The number of blocks of a kernel, from its column `shape` such as "20x1x1/256x1x1"; null if not recorded."""
    grid = pl.col("shape").cast(pl.String).str.extract(r"^(\d[\dx]*)").str.split("x").cast(pl.List(pl.Int64))
    return grid.list.eval(pl.element().product()).list.first()


def union(ops: pl.DataFrame) -> Floats:
    """When any of the ops ran: begin and end of disjoint intervals, ascending, seconds, [intervals, 2]."""
    return _merged(ops.select("start", end=pl.col("start") + pl.col("duration")).to_numpy())


def _merged(intervals: Floats) -> Floats:
    if not len(intervals):
        return np.empty((0, 2))
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.concatenate([[True], ordered[1:, 0] > reached[:-1]])
    ends = np.append(np.flatnonzero(begins)[1:] - 1, len(ordered) - 1)
    return np.column_stack([ordered[begins, 0], reached[ends]])


def both(first: Floats, second: Floats) -> float:
    """How long intervals of two unions run at once, seconds."""
    return length(first) + length(second) - length(_merged(np.concatenate([first, second])))


def length(intervals: Floats) -> float:
    """The sum of disjoint intervals, [intervals, 2]; seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())
