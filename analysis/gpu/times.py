"""What one GPU did, and why it was idle: the times of each rank of a recording.

In: a `GpuRecording`. Out: `GpuTimes` of a rank. Definitions: docs/kineto.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from tracekit.analysis.gpu.breakdown import union
from tracekit.analysis.gpu.gpu_times import (
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
from tracekit.analysis.gpu.idle import ROUNDING_S, IdleOfRank, idle_of
from tracekit.analysis.gpu.roofline import Card, shape_times
from tracekit.analysis.numeric.arrays import Floats
from tracekit.trace.gpu_activity import Activity
from tracekit.trace.gpu_recording import GpuRecording

#: At most so many kernels, operators, calls, and names of a reason.
MOST_ROWS, MOST_NAMES, MOST_SHAPES = 15, 8, 4
#: Kernels shorter than this, seconds, take less time than their launch.
SHORT_S = 10e-6
#: Of the kernels of one name, those that take longer count more.
_MEAN_OCCUPANCY = (pl.col("occupancy") * pl.col("duration")).sum() / pl.col("duration").filter(
    pl.col("occupancy").is_not_null()
).sum()
_KIND_OF_COPY = r"([HDP]to[HDP])"


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
