"""The ops of one step as spans on tracks, no more of them than a screen can show.

In: `StepOps`. Out: the spans of some workers in a window of time, an overview of all workers, sums by kind, and the
slowest ops as a table. A track is one worker's line: one stream of one replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.dashboards.figures.step_ops import Replay, StepOps
from tracekit.trace.model import KINDS

_COMMUNICATES = np.array([kind.is_communication for kind in KINDS])
#: The overview stores a ratio in a byte, in this many steps per 1; 0 is "no op".
OVERVIEW_STEPS = 50


@dataclass(frozen=True, slots=True)
class Line:
    """One track of every worker."""

    replay: Replay
    stream: str


@dataclass(frozen=True, slots=True)
class Window:
    """The start and end, seconds from the start of the step, and the number of pixel columns that show it."""

    start_s: float
    end_s: float
    columns: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans ordered by track and start.

    `first`: where the spans of each track begin, [tracks + 1]; track = index of the worker x lines + line. `wait`: the
    first part of the span, spent waiting for peers, seconds. `ratio`: own cost over that of the peers. `covers`: total
    seconds of the spans that this one represents, or its own duration if it represents only itself.
    """

    first: npt.NDArray[np.uint32]
    start: Floats
    duration: npt.NDArray[np.float32]
    wait: npt.NDArray[np.float32]
    ratio: npt.NDArray[np.float32]
    covers: npt.NDArray[np.float32]
    seq: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    kind: npt.NDArray[np.uint8]


def spans(ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window | None, rows: Ints | None = None) -> Spans:
    """The spans of these workers (indices in `ops`), track by track.

    `rows`: the row of each worker, ascending, if several workers share a row; by default, each has its own.
    With a window, only spans that touch it; of those narrower than a pixel column, only the longest and the slowest of
    each column and track, so slow spans never disappear.
    """
    chosen = _ops_of(ops, workers)
    rows = np.arange(len(workers)) if rows is None else rows
    position = np.repeat(rows, ops.first[workers + 1] - ops.first[workers])
    parts = [_part(ops, chosen, position, lines, replay, window) for replay in dict.fromkeys(x.replay for x in lines)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns["covers"] = columns["duration"].astype(np.float64)
    if window is not None:
        columns = _thinned(columns, window)
    order = np.lexsort((columns["start"], columns["track"]))
    ordered = {name: values[order] for name, values in columns.items()}
    tracks = np.arange((rows.max(initial=-1) + 1) * len(lines) + 1)
    return Spans(
        first=np.searchsorted(ordered["track"], tracks).astype(np.uint32),
        start=ordered["start"],
        duration=ordered["duration"],
        wait=ordered["wait"],
        ratio=ordered["ratio"].astype(np.float32),
        covers=ordered["covers"].astype(np.float32),
        seq=ordered["seq"],
        microbatch=ordered["microbatch"],
        kind=ordered["kind"],
    )


def count(ops: StepOps, workers: Ints, lines: Sequence[Line]) -> int:
    """The number of spans of these workers on these lines."""
    streams = np.bincount(ops.stream(_ops_of(ops, workers)), minlength=len(ops.stream_names))
    return int(sum(streams[ops.stream_names.index(line.stream)] for line in lines))


def _ops_of(ops: StepOps, workers: Ints) -> Ints:
    """The ops of these workers, in their order."""
    begin, length = ops.first[workers], ops.first[workers + 1] - ops.first[workers]
    chosen: Ints = np.arange(length.sum()) + np.repeat(begin - (np.cumsum(length) - length), length)
    return chosen


def _part(
    ops: StepOps, chosen: Ints, position: Ints, lines: Sequence[Line], replay: Replay, window: Window | None
) -> dict[str, npt.NDArray[Any]]:
    """The spans of one replay as columns, with their track."""
    line_of_stream = np.full(len(ops.stream_names), -1)
    for number, line in enumerate(lines):
        if line.replay is replay:
            line_of_stream[ops.stream_names.index(line.stream)] = number
    line_of_op = line_of_stream[ops.stream(chosen)]
    wanted = line_of_op >= 0
    if window is not None:
        start = ops.start[replay][chosen]
        wanted &= (start <= window.end_s) & (start + ops.duration[replay][chosen] >= window.start_s)
    drawn = chosen[wanted]
    kind, duration = ops.kind[drawn], ops.duration[replay][drawn]
    wait = np.clip(duration - ops.cost[replay][drawn], 0.0, duration)
    return {
        "track": position[wanted] * len(lines) + line_of_op[wanted],
        "start": ops.start[replay][drawn],
        "duration": duration,
        "wait": np.where(_COMMUNICATES[kind], wait, np.float32(0.0)),
        "ratio": ops.ratios(drawn, replay),
        "seq": ops.seq[drawn],
        "microbatch": ops.microbatch[drawn],
        "kind": kind,
    }


def _thinned(columns: dict[str, npt.NDArray[Any]], window: Window) -> dict[str, npt.NDArray[Any]]:
    """Remove the spans narrower than a pixel column that are neither the longest nor the slowest in theirs."""
    width = (window.end_s - window.start_s) / window.columns
    narrow = np.flatnonzero(columns["duration"] < width)
    if not len(narrow):
        return columns
    pixel = np.floor((columns["start"][narrow] - window.start_s) / width).astype(np.int64)
    cell = columns["track"][narrow] * (window.columns + 2) + np.clip(pixel, -1, window.columns) + 1
    duration, ratio = columns["duration"][narrow], columns["ratio"][narrow]
    longest = _last_of_each(np.lexsort((duration, cell)), cell)
    slowest = _last_of_each(np.lexsort((duration, ratio, cell)), cell)
    _, begins = np.unique(np.sort(cell), return_index=True)
    covered = np.add.reduceat(duration[np.argsort(cell, kind="stable")].astype(np.float64), begins)
    columns["covers"][narrow[longest]] = covered
    keep = np.ones(len(columns["track"]), np.bool_)
    keep[narrow] = False
    keep[narrow[longest]] = True
    keep[narrow[slowest]] = True
    return {name: values[keep] for name, values in columns.items()}


def _last_of_each(order: Ints, cell: Ints) -> Ints:
    """The last item of each cell, cells ascending, if `order` sorts the items by cell."""
    ordered = cell[order]
    last: Ints = order[np.append(np.flatnonzero(np.diff(ordered)), len(order) - 1)]
    return last


def overview(ops: StepOps, workers: Ints, replay: Replay, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """The highest ratio among the computes of each part of the step, for these workers top to bottom, [rows, columns].

    The columns go from `ops.begin()` to the end of the replay. In steps of 1 / OVERVIEW_STEPS, at most 255; 0 where
    nothing computes. Workers are pooled evenly if there are more of them than rows.
    """
    chosen = _ops_of(ops, workers)
    position = np.repeat(np.arange(len(workers)), ops.first[workers + 1] - ops.first[workers])
    computes = ops.computes(chosen)
    chosen, position = chosen[computes], position[computes]
    width = max(ops.end(replay) - ops.begin(), 1e-9) / columns
    start = ops.start[replay][chosen] - ops.begin()
    begin = np.clip((start / width).astype(np.int64), 0, columns - 1)
    last = np.clip(((start + ops.duration[replay][chosen]) / width).astype(np.int64), begin, columns - 1)
    value = np.clip(ops.ratios(chosen, replay) * OVERVIEW_STEPS, 1, 255).astype(np.uint8)
    touched = last - begin + 1
    column = np.arange(touched.sum()) - np.repeat(np.cumsum(touched) - touched - begin, touched)
    row = position * rows // max(len(workers), 1)
    picture = np.zeros(rows * columns, np.uint8)
    np.maximum.at(picture, np.repeat(row, touched) * columns + column, np.repeat(value, touched))
    return picture.reshape(rows, columns)


def _largest(values: npt.NDArray[Any], most: int) -> Ints:
    """Indices of the `most` largest values, largest first, equal ones in order; without sorting all of them."""
    if len(values) <= most:
        return np.argsort(-values, kind="stable")
    bound = np.partition(values, len(values) - most)[len(values) - most]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")[:most]]


def sums(ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window, words: str = "") -> pl.DataFrame:
    """Time by kind of the ops that the first replay of `lines` shows in a window, largest first.

    Columns: kind, ops, seconds (of all workers, within the window). `words`: only ops that these name.
    """
    chosen, replay = _in_view(ops, workers, lines, window, words), lines[0].replay
    start = ops.start[replay][chosen]
    inside = np.minimum(start + ops.duration[replay][chosen], window.end_s) - np.maximum(start, window.start_s)
    frame = pl.DataFrame({"kind": ops.kinds(chosen), "seconds": inside})
    totals = frame.group_by("kind").agg(pl.len().alias("ops"), pl.col("seconds").sum())
    return totals.sort("seconds", "kind", descending=[True, False])


def _in_view(ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window | None, words: str) -> Ints:
    """The ops of these workers that the first replay of `lines` shows in a window, if these words name them."""
    replay = lines[0].replay
    streams = [ops.stream_names.index(line.stream) for line in lines if line.replay is replay]
    chosen = _ops_of(ops, workers)
    wanted = np.isin(ops.stream(chosen), streams) & ops.named(chosen, words)
    if window is not None:
        start = ops.start[replay][chosen]
        wanted &= (start <= window.end_s) & (start + ops.duration[replay][chosen] >= window.start_s)
    return chosen[wanted]


def slowest(
    ops: StepOps, workers: Ints, lines: Sequence[Line], window: Window | None, most: int, words: str = ""
) -> pl.DataFrame:
    """The ops that exceed their peers most, among those that the first replay of `lines` shows; at most `most`.

    `words`: only ops that these name. Times in seconds. `beyond_peers_s`: own cost minus that of the peers; the whole
    cost if there are none.
    """
    replay, chosen = lines[0].replay, _in_view(ops, workers, lines, window, words)
    ratio, peers = ops.ratios(chosen, replay), ops.peers(chosen, replay)
    beyond = ops.cost[replay][chosen] - np.where(np.isinf(ratio), 0.0, peers)
    order = _largest(beyond, most)
    chosen = chosen[order]
    worker = ops.worker_of(chosen)
    return pl.DataFrame(
        {
            "dp_rank": ops.dp_rank[worker],
            "pp_rank": ops.pp_rank[worker],
            "kind": [str(KINDS[code]) for code in ops.kind[chosen]],
            "seq": ops.seq[chosen],
            "microbatch": ops.microbatch[chosen],
            "start_s": ops.start[replay][chosen],
            "duration_s": ops.duration[replay][chosen].astype(np.float64),
            "cost_s": ops.cost[replay][chosen].astype(np.float64),
            "peer_median_s": np.where(np.isinf(ratio[order]), np.nan, peers[order]),
            "ratio": ratio[order],
            "beyond_peers_s": beyond[order].astype(np.float64),
            "launch_delay_s": ops.launch_delay[chosen].astype(np.float64),
        },
        schema_overrides={"kind": pl.String},
    ).with_columns(
        pl.col("peer_median_s").fill_nan(None),
        pl.when(pl.col("ratio").is_finite()).then("ratio").alias("ratio"),
        pl.when(pl.col("microbatch") >= 0).then("microbatch").alias("microbatch"),
    )
