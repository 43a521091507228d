"""Convert input times to those of a trace: seconds, with `start` counted from the start of its step.

In: a frame whose times may be in another unit, and whose starts may come from a clock that runs across steps (seconds
since 1970, a monotonic clock). Out: the same frame in seconds from the start of each step, and the absolute starts of
the steps. Integers are shifted as integers and floats by exact subtraction, so no digit is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.errors import TraceError
from tracekit.trace.magnitudes import LONGEST_S
from tracekit.trace.model import TimeUnit
from tracekit.trace.schema import OF_RANKS, POSTED, RESUMED, Origin

#: Values between these, seconds since 1970, count as clock times: 2001 to 2100.
EARLIEST_S, LATEST_S = 1e9, 4.1e9
#: A step's start in the metadata is the zero of its ops if the first of them begins this close to it, seconds.
SAME_START_S = 1.0
#: A rank may begin a step this long before it has ended the one before, seconds.
SAME_END_S = 1e-3
#: A clock that runs across steps shows in at least this many steps; in each, it has advanced by this share of the step
#: before.
FEWEST_STEPS = 3
SMALLEST_SHARE = 0.5


def spans_of(raw: pl.DataFrame) -> pl.DataFrame:
    """The `first` start and the last `end` of each rank in each step, of ops with their `step`, `rank`, `start` and
    `duration`.
    """
    end = (pl.col("start").cast(pl.Float64) + pl.col("duration")).max()
    return raw.group_by("step", "rank").agg(first=pl.col("start").min(), end=end)


def in_seconds(
    ops: pl.DataFrame, unit: TimeUnit | None, step_starts: Mapping[int, float], source: Origin
) -> tuple[pl.DataFrame, Mapping[int, float]]:
    """`ops` with times in seconds from the start of their step; and when steps start, as far as known, seconds since
    1970 or of the clock that runs across steps. `unit`: of the input times; None means seconds.

    Columns without times are left for `checked_columns` to report. Raises TraceError if starts are clock times in
    another unit than `unit`.
    """
    start, duration = (raw_times(ops, name) for name in ("start", "duration"))
    if start is None or duration is None or "step" not in ops.columns or not ops["step"].dtype.is_integer():
        return ops, step_starts
    ranked = "rank" in ops.columns and ops["rank"].dtype.is_integer() and not ops["rank"].null_count()
    rank = ops["rank"] if ranked else pl.repeat(0, ops.height, eager=True)
    raw = pl.DataFrame({"step": ops["step"], "rank": rank, "start": start, "duration": duration})
    per_second = (unit or TimeUnit.S).per_second
    of_one_rank = spans_of(raw.filter((rank == rank[0]) & ranked))
    if on_clock(float(start.max()), of_one_rank, per_second):  # type: ignore[arg-type]
        spans = spans_of(raw)
        zeros, step_starts = zeros_of_steps(spans, unit, step_starts, source, start.to_numpy())
        start -= zeros[spans["step"].unique().sort().search_sorted(raw["step"])]
    elif per_second == 1:
        return ops, step_starts
    times = (start * (1 / per_second)).alias("start"), (duration * (1 / per_second)).alias("duration")
    return optional_in_seconds(ops, per_second).with_columns(times), step_starts


def optional_in_seconds(ops: pl.DataFrame, per_second: int) -> pl.DataFrame:
    """`ops` with the optional columns of times divided by `per_second`."""
    times: list[pl.Series | pl.Expr] = []
    times += [pl.col(name) / per_second for name in (POSTED, RESUMED) if ops.schema.get(name, pl.String).is_numeric()]
    for name in OF_RANKS:
        if isinstance(ops.schema.get(name), pl.List):
            times.append(ops.select(pl.col(name).list.eval(pl.element() / per_second)).to_series())
    return ops.with_columns(times)


def raw_times(ops: pl.DataFrame, name: str) -> pl.Series | None:
    """A column of times as Int64 or Float64; None if a value is missing, infinite or not a number."""
    if name not in ops.columns or not (column := ops[name]).dtype.is_numeric():
        return None
    column = column.cast(pl.Int64 if column.dtype.is_integer() else pl.Float64, strict=False)
    if column.null_count() or not len(column) or (column.dtype != pl.Int64 and not column.is_finite().all()):
        return None
    return column


def on_clock(latest: float, of_one_rank: pl.DataFrame, per_second: int) -> bool:
    """Whether starts may be clock times: the `latest` is beyond any step, or those of one rank advance from step to
    step. `of_one_rank`: its `spans_of`.
    """
    return latest > LONGEST_S * per_second or _runs_on(_by_step(of_one_rank))


def _by_step(spans: pl.DataFrame) -> pl.DataFrame:
    """First start and last end of each step, ascending. `spans`: those of its ranks."""
    return spans.group_by("step").agg(pl.col("first").min(), pl.col("end").max()).sort("step")


def _runs_on(steps: pl.DataFrame) -> bool:
    """Whether each step continues on the clock of the one before instead of starting at its own zero."""
    if steps.height < FEWEST_STEPS:
        return False
    first, end = steps["first"].cast(pl.Float64).to_numpy(), steps["end"].to_numpy()
    length = end - first
    moved_on = first[1:] - first[:-1] >= SMALLEST_SHARE * length[:-1]
    return bool(moved_on.all() and (length > 0).all() and first[-1] > length.max())


def zeros_of_steps(
    spans: pl.DataFrame,
    unit: TimeUnit | None,
    step_starts: Mapping[int, float],
    source: Origin,
    start: npt.NDArray[Any],
) -> tuple[npt.NDArray[Any], Mapping[int, float]]:
    """From when the starts of each step count, ascending, in `unit`; and when the steps start, seconds of the clock
    across steps. `spans`: the `spans_of` all ops, whose starts `start` has. Raises TraceError as `in_seconds`.
    """
    per_second, spans = (unit or TimeUnit.S).per_second, spans.sort("step", "rank")
    steps = _by_step(spans)
    runs_on = _runs_on(steps)
    starts: dict[int, float] = dict(step_starts)
    zeros: list[float] = []
    for step, first, lap in zip(steps["step"], steps["first"], _laps(spans, steps, per_second), strict=True):
        since_1970 = EARLIEST_S * per_second <= first <= LATEST_S * per_second
        if first > LATEST_S * per_second:
            _refuse_other_clock(start, int(first), unit, source)
        if not since_1970 and not runs_on:
            zeros.append(0)
            continue
        recorded = starts.get(step, math.inf) * per_second
        near = abs(recorded - first) <= SAME_START_S * per_second
        base, offset = (0, recorded) if near else (first, lap)
        zero = base + (round(offset) if isinstance(first, int) else offset)  # to integers, only integers may be added
        zeros.append(zero)
        starts[step] = float(zero) / per_second
    return np.array(zeros, start.dtype), starts


def _laps(spans: pl.DataFrame, steps: pl.DataFrame, per_second: int) -> list[float]:
    """How long after its first op each step starts: when the last op of the step before it has ended.

    Ranks of a late stage begin while an early one still finishes; counted twice, that time would make steps longer than
    the distance between them. If the step before was not traced, the usual value is used. If ranks overlap with
    themselves, no clock ran from that step to the next.
    """
    again_s = spans.with_columns(
        again=pl.when(pl.col("step").diff().over("rank") == 1).then(
            pl.col("end").shift().over("rank") - pl.col("first")
        )
    )
    again = again_s.group_by("step").agg(pl.col("again").median()).sort("step")["again"].fill_null(0.0).to_numpy()
    number, end = steps["step"].cast(pl.Float64).to_numpy(), steps["end"].to_numpy()
    first = steps["first"].cast(pl.Float64).to_numpy()
    laps = np.full(len(first), np.nan)
    laps[1:] = np.where(np.diff(number) == 1, np.maximum(end[:-1] - first[1:], 0.0), np.nan)
    laps[again > SAME_END_S * per_second] = 0.0
    finite = laps[~np.isnan(laps)]
    usual = float(np.median(finite)) if len(finite) else 0.0
    filled: list[float] = np.where(np.isnan(laps), usual, laps).tolist()
    return filled


def _refuse_other_clock(start: npt.NDArray[Any], first: float, unit: TimeUnit | None, source: Origin) -> None:
    """Raise TraceError if `first` would be a clock time in another unit."""
    for other in TimeUnit:
        if other is not (unit or TimeUnit.S) and EARLIEST_S * other.per_second <= first <= LATEST_S * other.per_second:
            row = int((start >= first).argmax())
            taken_as = f"with --unit {unit}" if unit else "in seconds"
            raise TraceError(
                f"{source}: {source.column('start')}, row {row}: {start[row].item()!r} {taken_as} is not a time since"
                f" 1970, but in {other.word} it is; pass --unit {other} (unit={str(other)!r} in Python)"
            )
