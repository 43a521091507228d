"""Times of a trace in seconds from the start of their step, and whether they can be what they claim to be.

In: a frame whose times may be in another unit, and whose starts may come from a clock that runs across steps. Out:
seconds with `start` counted from the start of its step, or one TraceError that names the likely unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from tracekit.base.errors import TraceError
from tracekit.base.text import seconds
from tracekit.trace.model import DP_COLLECTIVES, EARLIEST_S, KINDS, LATEST_S, LONGEST_S, P2P, OpKind, TimeUnit
from tracekit.trace.schema import OF_RANKS, POSTED, RESUMED, Origin, violation

#: A step's start in the metadata is the zero of its ops if the first of them begins this close to it, seconds.
SAME_START_S = 1.0
#: A rank may begin a step this long before it has ended the one before, seconds.
SAME_END_S = 1e-3
#: A clock that runs across steps has advanced in each by this share of the step before, at least. In so many steps that
#: is enough, because each begins later than the one before; in fewer, every rank has to begin where it ended.
SMALLEST_SHARE = 0.5
FEWEST_STEPS = 3


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
    rank_spans = spans_of(raw.filter((rank == rank[0]) & ranked))
    if on_clock(float(start.to_numpy().max()), rank_spans, per_second):
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


def on_clock(latest: float, spans: pl.DataFrame, per_second: int) -> bool:
    """Whether starts may be clock times: the `latest` is beyond any step, or those of one rank advance from step to
    step. `spans`: its `spans_of`.
    """
    return latest > LONGEST_S * per_second or _runs_on(spans, per_second)


def _by_step(spans: pl.DataFrame) -> pl.DataFrame:
    """First start and last end of each step, ascending. `spans`: those of its ranks."""
    return spans.group_by("step").agg(pl.col("first").min(), pl.col("end").max()).sort("step")


def _runs_on(spans: pl.DataFrame, per_second: int) -> bool:
    """Whether each step continues on the clock of the one before instead of starting at its own zero.

    On its own zero, each step begins at about the same time, early in a step. On a clock that runs on, it begins after
    the one before. The last step says nothing by its length: however long, none begins after it.
    """
    steps = _by_step(spans)
    first, end = steps["first"].cast(pl.Float64).to_numpy(), steps["end"].to_numpy()
    length = end - first
    if steps.height < 2 or not (length > 0).all():
        return False
    if _begin_where_they_ended(spans, per_second):
        return True
    moved_on = first[1:] - first[:-1] >= SMALLEST_SHARE * length[:-1]
    return steps.height >= FEWEST_STEPS and bool(moved_on.all() and first[-1] > length[:-1].max())


def _begin_where_they_ended(spans: pl.DataFrame, per_second: int) -> bool:
    """Whether every rank begins each of its steps when it has ended the one before, or later."""
    in_turn = spans.sort("rank", "step").select(
        pl.col("first").cast(pl.Float64),
        before=pl.col("first").cast(pl.Float64).shift().over("rank"),
        ended=pl.col("end").shift().over("rank"),
    )
    again = pl.min_horizontal(SAME_END_S * per_second, (1 - SMALLEST_SHARE) * (pl.col("ended") - pl.col("before")))
    follows = in_turn.drop_nulls().select(pl.col("first") >= pl.col("ended") - again).to_series()
    return bool(len(follows) and follows.all())


def zeros_of_steps(
    spans: pl.DataFrame,
    unit: TimeUnit | None,
    step_starts: Mapping[int, float],
    source: Origin,
    start: npt.NDArray[Any],
) -> tuple[npt.NDArray[Any], Mapping[int, float]]:
    """From when the starts of each step count, ascending, in `unit`; and when the steps start, seconds of the clock
    across steps. `spans`: the `spans_of` all ops, whose starts `start` has. Raises TraceError as `in_seconds`.

    Integers are shifted as integers and floats by exact subtraction, so no digit is lost.
    """
    per_second, spans = (unit or TimeUnit.S).per_second, spans.sort("step", "rank")
    steps = _by_step(spans)
    runs_on = _runs_on(spans, per_second)
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
    overlap_s = again_s.group_by("step").agg(pl.col("again").median()).sort("step")["again"].fill_null(0.0).to_numpy()
    number, end = steps["step"].cast(pl.Float64).to_numpy(), steps["end"].to_numpy()
    first = steps["first"].cast(pl.Float64).to_numpy()
    laps = np.full(len(first), np.nan)
    laps[1:] = np.where(np.diff(number) == 1, np.maximum(end[:-1] - first[1:], 0.0), np.nan)
    laps[overlap_s > SAME_END_S * per_second] = 0.0
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


class Usual(Struct, frozen=True):
    """The usual duration of ops of `kinds`, seconds.

    Their median is compared with both ends; that of communication, which includes waiting, only with the lower end, and
    the fastest op of each step with the upper end.
    """

    what: str
    kinds: frozenset[OpKind]
    low: float
    high: float
    waits: bool


#: What is judged, and why its usual range is that wide. Checkpoints, evaluation, gc, data loading and host time can
#: last from nothing to hours, a step as long as its microbatches are many: they say nothing of the unit.
#:
#: statistic          from    to      because
#: a compute          2 us    3 s     one microbatch on one stage: an element-wise op on a CPU .. a 70B model with
#:                                    recomputation and a long context
#: the optimizer      1 us    10 s    one scalar .. states off-loaded to the host
#: transfer at best   0.2 us  200 ms  a kernel alone is 1 us and more; 200 MB at 1 GB/s
#: collective at best 0.2 us  10 s    all gradients of a large model over Ethernet, nothing overlapped
USUAL = (
    Usual(
        "a forward or backward",
        frozenset({OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE}),
        low=2e-6,
        high=3.0,
        waits=False,
    ),
    Usual("an optimizer", frozenset({OpKind.OPTIMIZER}), low=1e-6, high=10.0, waits=False),
    Usual("the quickest transfer of a step", P2P, low=2e-7, high=0.2, waits=True),
    Usual("the quickest collective of a step", DP_COLLECTIVES | {OpKind.ALL_TO_ALL}, low=2e-7, high=10.0, waits=True),
)
#: Decades beyond the usual that raise an alarm: a factor of four. Whole seconds, which no clock gives, need less. A
#: stated unit is believed up to a factor of forty; stated seconds are always believed.
ALARM, ALARM_OF_INTEGERS, ALARM_OF_STATED = 0.6, 0.3, 1.6
#: A step's length over the time until the next step begins is between these: pauses can be long, overlaps are short.
SHORTEST_STEP, LONGEST_OVERLAP = 0.02, 30.0
#: Kinds that take every worker about equally long, whatever its stage: no rank (or step) of a job takes this many
#: decades longer for all of them.
SAME_WORK = frozenset({OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.OPTIMIZER})
OTHER_UNIT = 2.4
MOST_NAMED = 4
#: Upper limits of what is looked at.
MOST_STEPS, MOST_OPS, MOST_MEDIAN = 8, 1_000_000, 50_000


class _Statistic(Struct, frozen=True):
    """A statistic and its usual range: `value` is compared with the upper end, `typical` with the lower."""

    what: str
    value: float
    typical: float
    low: float
    high: float
    is_ratio: bool = False

    def beyond(self, factor: float = 1.0) -> float:
        """Decades outside the usual range if all times were multiplied by `factor`."""
        return max(
            math.log10(self.low) - math.log10(self.typical) - math.log10(factor),
            math.log10(self.value) + math.log10(factor) - math.log10(self.high),
            0.0,
        )

    def __str__(self) -> str:
        if self.is_ratio:
            return f"{self.what} lasts {self.value:.3g} times as long (usual: {self.low:.3g} to {self.high:.3g})"
        value = self.value if self.value > self.high else self.typical
        return f"{self.what} takes {_time(value)} (usual: {_time(self.low)} to {_time(self.high)})"


def check_magnitudes(
    ops: pl.DataFrame,
    steps: Sequence[int],
    step_starts: Mapping[int, float],
    source: Origin,
    *,
    stated: TimeUnit | None,
    unit: TimeUnit | None,
    integers: bool,
) -> None:
    """Raise TraceError if another unit than seconds would explain the times far better.

    `ops`: canonical columns, at least of these `steps` (see `judged_steps`) and of the rank of the first row.
    `stated`: the original unit of the times, if stated. `unit`: that of the input, which a canonical file, in seconds,
    does not state again. `integers`: True if the input had integers.

    Uses medians, or the fastest op of each step (its median over steps), never a single op: a two-hour checkpoint, an
    evaluation, one hung step or one slow link cannot raise an alarm (`USUAL`). Each statistic outside its usual range
    adds its distance in decades; the error is raised if another unit would reduce the sum by `ALARM` or more. A trace
    whose times are usual in two units is ambiguous and passes.
    """
    if stated is TimeUnit.S:
        return
    is_judged = pl.col("step").is_in(list(steps)) & (pl.col("duration") > 0)
    few = ops.select("step", "rank", "kind", "duration").filter(is_judged)
    _check_same_unit(few, source)
    statistics = [*_statistics(few), *_overlap(ops, step_starts)]
    _check_usual(statistics, source, stated, unit, integers=integers)


def check_bounds(ops: pl.DataFrame, source: Origin) -> None:
    """Raise TraceError if a time is beyond all bounds. `ops`: canonical columns."""
    for name in ("start", "duration"):
        times = ops[name].to_numpy()
        low, high = float(times.min()), float(times.max())
        if max(-low, high) > LONGEST_S:
            row = int((np.abs(times) > LONGEST_S).argmax())
            expected = "seconds from the start of the step" if name == "start" else "seconds"
            raise violation(source, ops[name], row, f"expected {expected}; convert the column")


def _check_usual(
    statistics: list[_Statistic], source: Origin, stated: TimeUnit | None, unit: TimeUnit | None, *, integers: bool
) -> None:
    """Raise TraceError if the statistics are far from usual and another unit would bring them back."""
    distance = sum(statistic.beyond() for statistic in statistics)
    alarm = ALARM_OF_INTEGERS if integers else ALARM
    if stated:
        alarm = ALARM_OF_STATED
    if distance < alarm:
        return
    factors = [1000.0**power for power in (-3, -2, -1, 1, 2, 3)]
    best = min(factors, key=lambda factor: (sum(statistic.beyond(factor) for statistic in statistics), -factor))
    if distance - sum(statistic.beyond(best) for statistic in statistics) < alarm:
        return
    worst = sorted(statistics, key=lambda statistic: -statistic.beyond())[:2]
    listed = ", ".join(str(statistic) for statistic in worst if statistic.beyond())
    raise TraceError(f"{source}: {listed}; {_advice(best, unit)}")


def _advice(factor: float, stated: TimeUnit | None) -> str:
    """The likely unit, and what to do. `factor`: makes the times usual."""
    used = TimeUnit.S if stated is None else stated
    for unit in TimeUnit:
        if math.isclose(unit.per_second * factor, used.per_second, rel_tol=1e-6):
            put = f" taken for {used.word}" if stated is None else f", not the {used.word} that were stated"
            otherwise = ", or --unit s if they are seconds" if stated is None else ""
            return f"the times look like {unit.word}{put}: pass --unit {unit} (unit={str(unit)!r} in Python){otherwise}"
    return (
        f"the times look like seconds divided by {factor:.0e}, or like another unit converted twice: multiply start and"
        f" duration by {factor:g}, or pass --unit s if they are seconds"
    )


def _statistics(few: pl.DataFrame) -> list[_Statistic]:
    """Every statistic of `USUAL` that ops of a few steps have."""
    quickest = _durations(few.group_by("step", "kind").agg(pl.col("duration").min()))
    durations = _durations(few.gather_every(max(1, few.height // MOST_MEDIAN)))
    statistics = []
    for usual in USUAL:
        kinds = [kind for kind in usual.kinds if kind in durations]
        if not kinds:
            continue
        if usual.waits:
            typical = max(_median(durations[kind]) for kind in kinds)
            value = min(_median(quickest[kind]) for kind in kinds)
        else:
            typical = value = _median(np.concatenate([durations[kind] for kind in kinds]))
        statistics.append(_Statistic(usual.what, value, typical, usual.low, usual.high))
    return statistics


def _durations(ops: pl.DataFrame) -> dict[OpKind, npt.NDArray[np.float64]]:
    """The durations of each kind of op in the trace."""
    codes, durations = ops["kind"].cat.physical().to_numpy(), ops["duration"].to_numpy()
    return {KINDS[code]: durations[codes == code] for code in np.flatnonzero(np.bincount(codes))}


def _median(values: npt.NDArray[np.float64]) -> float:
    return float(np.median(values))


def judged_steps(steps: npt.NDArray[np.int32], ops: int) -> list[int]:
    """A few of the step numbers, evenly spaced. `ops`: how many all of them have."""
    few = max(1, min(MOST_STEPS, MOST_OPS * len(steps) // ops))
    judged: list[int] = steps[np.linspace(0, len(steps) - 1, few).astype(np.int64)].tolist()
    return judged


def _check_same_unit(few: pl.DataFrame, source: Origin) -> None:
    """Raise TraceError if some ranks, or some steps, take a thousand times as long as others for the same work."""
    same_work = few.filter(pl.col("kind").to_physical().is_in(sorted(kind.code for kind in SAME_WORK)))
    for part in ("rank", "step"):
        usual = same_work.group_by(part, "kind").agg(pl.col("duration").median())
        excess = usual.with_columns(excess=(pl.col("duration") / pl.col("duration").min().over("kind")).log10())
        fastest = excess.group_by(part).agg(pl.col("excess").min()).sort(part)
        longer = fastest.filter(pl.col("excess") >= OTHER_UNIT)
        if longer.height in (0, fastest.height):
            continue
        factor = 1000 ** max(1, round(_median(longer["excess"].to_numpy()) / 3))
        raise TraceError(
            f"{source}: {_named(part, longer[part].to_list())}: all work takes about {factor:,} times as long as"
            f" {'on' if part == 'rank' else 'in'} the other {part}s: these times are in another unit; divide their"
            f" start and duration by {factor:,}, or pass --unit s if they are right"
        )


def _named(part: str, numbers: list[int]) -> str:
    """Some ranks or steps by number. Only some of the steps were looked at."""
    listed = ", ".join(map(str, numbers[:MOST_NAMED])) + (" ..." if len(numbers) > MOST_NAMED else "")
    if part == "step":
        return f"steps such as {listed}"
    return f"{part}{'s' * (len(numbers) > 1)} {listed}"


def _overlap(ops: pl.DataFrame, step_starts: Mapping[int, float]) -> list[_Statistic]:
    """The length of a step over the time until the next one begins; empty if unknown."""
    starts = sorted((step, start) for step, start in step_starts.items() if math.isfinite(start))
    if len(starts) < 2:
        return []
    numbers = np.array([step for step, _ in starts], np.float64)
    distances = np.diff(np.array([start for _, start in starts])) / np.diff(numbers)
    distances = distances[distances > 0]
    rank_ops = ops.filter(pl.col("rank") == ops["rank"][0])
    end = (pl.col("start") + pl.col("duration")).max()
    length = rank_ops.group_by("step").agg(length=end - pl.col("start").min())["length"].median()
    if not len(distances) or not isinstance(length, float) or not 0 < length < LONGEST_S:
        return []
    ratio = length / float(np.median(distances))
    return [
        _Statistic(
            "a step beside the time until the next one", ratio, ratio, SHORTEST_STEP, LONGEST_OVERLAP, is_ratio=True
        )
    ]


def _time(value: float) -> str:
    if 0 < value < 5e-7:
        return f"{value * 1e9:.3g} ns"
    return f"{value / 60:.3g} min" if value > 600 else seconds(value)
