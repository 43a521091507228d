"""Timelines of op traces in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

In: the ops of a job, and when each replay ran them. Out: a `.json.gz` file: one process per replay and rank, one thread
per stream, one slice per op with its labels as args, and arrows along the critical path. Steps follow each other.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.atomic_write import replacing
from tracekit.chrome import END, MARK, OPS_MARK, SEPARATOR, TIMELINE_FILE, VERSION

_ROWS_AT_ONCE = 100_000
_GAP_S = 1e-3
_ARGS = ("step", "kind", "phase", "operator", "group", "profiler_step", "host")


@dataclass(frozen=True, slots=True)
class OpTimeline:
    """One replay of all ops, such as "recorded" or "ideal".

    `start` (from the start of the step), `duration`: seconds, [ops]. `critical_path`: positions of the ops on it, by
    step and time.
    """

    name: str
    start: npt.NDArray[np.float64]
    duration: npt.NDArray[np.float64]
    critical_path: npt.NDArray[np.int64]


def write_op_chrome(path: str | os.PathLike[str], name: str, ops: pl.DataFrame, timelines: Sequence[OpTimeline]) -> int:
    """Write the timelines; returns how many slices. Raises OutputError; leaves no half-written file.

    `ops`: of an op trace, in the order of the timelines.
    """
    tracks = _tracks(ops)
    names = [column for column in ("name", "kind", "peer") if column in ops.columns]
    drawn = tracks.with_columns(
        name=pl.coalesce(pl.col(column).cast(pl.String) for column in names) if names else pl.lit("op"),
        args=pl.struct(*(column for column in _ARGS if column in ops.columns), "rank"),
    )
    shifts = _step_shifts(ops, timelines)
    with (
        replacing(path, TIMELINE_FILE) as temporary,
        gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file,
    ):
        other = {"name": name, OPS_MARK: True, "timelines": [timeline.name for timeline in timelines]}
        head = f'{{"displayTimeUnit": "ms", "otherData": {{"{MARK}": {VERSION}, {json.dumps(other)[1:]}'
        file.write(f'{head}, "traceEvents": [\n')
        file.write(SEPARATOR.join(map(json.dumps, _track_names(tracks, timelines))))
        for number, timeline in enumerate(timelines):
            placed = drawn.with_columns(
                pid=pl.col("process") + number * drawn["process"].n_unique() + 1,
                ts=pl.Series(((timeline.start + shifts) * 1e6).round(3)),
                dur=pl.Series((timeline.duration * 1e6).round(3)),
            )
            for lines in (*_slices(placed), *_arrows(placed[timeline.critical_path])):
                file.write(SEPARATOR)
                file.write(lines)
        file.write(END)
    return ops.height * len(timelines)


def _tracks(ops: pl.DataFrame) -> pl.DataFrame:
    """The ops with the positions of rank and stream, `process` and `tid`, and the stream's name, `track`."""
    stream = pl.col("stream").fill_null("") if "stream" in ops.columns else pl.lit("")
    steps = ops if "step" in ops.columns else ops.with_columns(step=pl.lit(0))
    return steps.with_columns(
        process=pl.col("rank").rank("dense").cast(pl.Int64) - 1,
        track=pl.when(stream == "").then(pl.lit("ops")).otherwise(stream),
    ).with_columns(tid=pl.col("track").rank("dense").cast(pl.Int64))


def _step_shifts(ops: pl.DataFrame, timelines: Sequence[OpTimeline]) -> npt.NDArray[np.float64]:
    """When the step of each op begins: after the longest timeline of the one before, seconds, [ops]."""
    step = ops["step"].to_numpy() if "step" in ops.columns else np.zeros(ops.height, np.int64)
    _, number = np.unique(step, return_inverse=True)
    lasts = np.zeros(int(number.max(initial=0)) + 1)
    for timeline in timelines:
        np.maximum.at(lasts, number, timeline.start + timeline.duration)
    begins = np.concatenate([[0.0], np.cumsum(lasts + _GAP_S)[:-1]])
    return np.asarray(begins[number])


def _track_names(tracks: pl.DataFrame, timelines: Sequence[OpTimeline]) -> Iterator[dict[str, Any]]:
    ranks = tracks.select("process", "rank").unique().sort("process")
    streams = tracks.select("process", "tid", "track").unique().sort("process", "tid")
    for number, timeline in enumerate(timelines):
        first = number * ranks.height + 1
        for process, rank in ranks.iter_rows():
            named = {"name": f"{timeline.name}: rank {rank}"}
            yield {"ph": "M", "name": "process_name", "pid": first + process, "args": named}
            yield {"ph": "M", "name": "process_sort_index", "pid": first + process,
                   "args": {"sort_index": first + process}}  # fmt: skip
        for process, thread, track in streams.iter_rows():
            yield {"ph": "M", "name": "thread_name", "pid": first + process, "tid": thread, "args": {"name": track}}


def _slices(ops: pl.DataFrame) -> Iterator[str]:
    """JSON lines of ops, a chunk of rows at a time, formatted by polars."""
    line = pl.struct("pid", "tid", "ts", "dur", "name", "args", ph=pl.lit("X")).struct.json_encode()
    for part in ops.iter_slices(_ROWS_AT_ONCE):
        yield part.select(line.alias("line"))["line"].str.join(SEPARATOR)[0]


def _arrows(path: pl.DataFrame) -> Iterator[str]:
    """JSON lines of arrows from each op of the critical path to the next one of its step, if there are any."""
    end = pl.col("ts") + pl.col("dur")
    following = [pl.col(name).shift(-1).over("step").alias(f"next_{name}") for name in ("pid", "tid", "ts", "dur")]
    pairs = path.with_columns(*following).drop_nulls("next_pid").with_row_index("id")
    if not pairs.height:
        return
    called, number = pl.lit("critical path"), pl.col("id") + pl.col("pid") * 2**24
    leaves = pl.struct("pid", "tid", ph=pl.lit("s"), ts=end.round(3), name=called, cat=called, id=number)
    # An arrow arrives when its op ends, or when the next slice begins if that is later.
    arrival = pl.max_horizontal("next_ts", pl.min_horizontal(end, pl.col("next_ts") + pl.col("next_dur")))
    arrives = pl.struct(
        ph=pl.lit("f"), bp=pl.lit("e"), pid=pl.col("next_pid"), tid=pl.col("next_tid"), ts=arrival.round(3),
        name=called, cat=called, id=number,
    )  # fmt: skip
    lines = pairs.select(pl.concat_list(leaves.struct.json_encode(), arrives.struct.json_encode()).alias("line"))
    yield lines.explode("line")["line"].str.join(SEPARATOR)[0]
