"""Timelines of op traces in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

In: the ops of a job, and when each replay ran them. Out: a `.json.gz` file: one process per replay and rank, one thread
per stream, one slice per op with its labels as args, and arrows along the critical path. Steps follow each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.trace.chrome import GAP_S, OPS_MARK, DrawnTimeline, Tracks, write_timelines

_ARGS = ("step", "kind", "phase", "operator", "group", "profiler_step", "host")


@dataclass(frozen=True, slots=True)
class OpTimeline:
    """One replay of all ops, such as "recorded" or "ideal".

    `start` (from the start of the step), `duration`: seconds, [ops]. `critical_path`: indices of the ops on it, by step
    and time.
    """

    name: str
    start: npt.NDArray[np.float64]
    duration: npt.NDArray[np.float64]
    critical_path: npt.NDArray[np.int64]


def write_op_chrome(path: str | os.PathLike[str], name: str, ops: pl.DataFrame, timelines: Sequence[OpTimeline]) -> int:
    """Write the timelines; returns the number of slices. Raises OutputError; leaves no half-written file.

    `ops`: of an op trace, in the order of the timelines.
    """
    tracks = _tracks(ops)
    names = [column for column in ("name", "kind", "peer") if column in ops.columns]
    drawn = tracks.with_columns(
        name=pl.coalesce(pl.col(column).cast(pl.String) for column in names) if names else pl.lit("op"),
        args=pl.struct(*(column for column in _ARGS if column in ops.columns), "rank"),
    )
    shifts = _step_shifts(ops, timelines)
    processes = drawn["process"].n_unique()

    def placed(number: int, timeline: OpTimeline) -> DrawnTimeline:
        slices = drawn.with_columns(
            pid=pl.col("process") + number * processes + 1,
            ts=pl.Series(((timeline.start + shifts) * 1e6).round(3)),
            dur=pl.Series((timeline.duration * 1e6).round(3)),
        )
        return DrawnTimeline(slices, slices[timeline.critical_path])

    other = {"name": name, OPS_MARK: True, "timelines": [timeline.name for timeline in timelines]}
    return write_timelines(
        path, other, _names(tracks, timelines), (placed(number, one) for number, one in enumerate(timelines))
    )


def _tracks(ops: pl.DataFrame) -> pl.DataFrame:
    """The ops with the indices of rank and stream, `process` and `tid`, and the stream's name, `track`."""
    stream = pl.col("stream").fill_null("") if "stream" in ops.columns else pl.lit("")
    steps = ops if "step" in ops.columns else ops.with_columns(step=pl.lit(0))
    return steps.with_columns(
        process=pl.col("rank").rank("dense").cast(pl.Int64) - 1,
        track=pl.when(stream == "").then(pl.lit("ops")).otherwise(stream),
    ).with_columns(tid=pl.col("track").rank("dense").cast(pl.Int64))


def _step_shifts(ops: pl.DataFrame, timelines: Sequence[OpTimeline]) -> npt.NDArray[np.float64]:
    """When the step of each op begins: after the longest timeline of the step before, seconds, [ops]."""
    step = ops["step"].to_numpy() if "step" in ops.columns else np.zeros(ops.height, np.int64)
    _, number = np.unique(step, return_inverse=True)
    lasts = np.zeros(int(number.max(initial=0)) + 1)
    for timeline in timelines:
        np.maximum.at(lasts, number, timeline.start + timeline.duration)
    begins = np.concatenate([[0.0], np.cumsum(lasts + GAP_S)[:-1]])
    return np.asarray(begins[number])


def _names(tracks: pl.DataFrame, timelines: Sequence[OpTimeline]) -> Tracks:
    ranks = tracks.select("process", "rank").unique().sort("process")
    streams = tracks.select("process", "tid", "track").unique().sort("process", "tid")
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for number, timeline in enumerate(timelines):
        first = number * ranks.height + 1
        processes |= {first + process: f"{timeline.name}: rank {rank}" for process, rank in ranks.iter_rows()}
        threads |= {(first + process, tid): track for process, tid, track in streams.iter_rows()}
    return Tracks(processes, threads)
