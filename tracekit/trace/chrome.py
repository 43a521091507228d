"""Timelines in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

In: ops and when each replay ran them. Out: a `.json.gz` file: one process per replay and worker (or rank), one thread
per stream, one slice per op with its columns as args, and arrows along the critical path. Steps follow each other; a
step begins at the same time in every replay, so that they can be compared.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.atomic_write import Kind, replacing
from tracekit.trace.model import KINDS, TIMELINE_MARK, OpKind, Worker

VERSION = 1
#: More slices than this make a browser stall.
MOST_SLICES = 2_000_000
#: Text after the last event; each event is a line.
END = "\n]}\n"
_SEPARATOR = ",\n"
_ROWS_AT_ONCE = 100_000
_BEGINNING = f'{{"displayTimeUnit": "ms", "otherData": {{"{TIMELINE_MARK}": '
#: Gap between the end of a step and the beginning of the next, seconds.
GAP_S = 1e-3
#: Columns of an op trace that its slices show.
_ARGS = ("step", "kind", "phase", "operator", "group", "profiler_step", "host")

#: The track an op kind is drawn on.
STREAMS: dict[OpKind, str] = {
    **dict.fromkeys(KINDS, "compute"),
    OpKind.FORWARD_SEND: "forward-send",
    OpKind.FORWARD_RECV: "forward-recv",
    OpKind.BACKWARD_SEND: "backward-send",
    OpKind.BACKWARD_RECV: "backward-recv",
    OpKind.PARAMS_ALL_GATHER: "data-parallel",
    OpKind.GRADS_REDUCE_SCATTER: "data-parallel",
    OpKind.SEPARATE_GRADS_ALL_REDUCE: "data-parallel",
    OpKind.ALL_REDUCE: "data-parallel",
    OpKind.LAYERNORM_GRADS_ALL_REDUCE: "model-parallel",
    OpKind.EMBEDDING_GRADS_ALL_REDUCE: "model-parallel",
    OpKind.OPTIMIZER_CLIP_MAIN_GRAD: "model-parallel",
}


@dataclass(frozen=True, slots=True)
class DrawnTimeline:
    """One timeline, such as "recorded" or "ideal". `slices`: when each op ran, `start` (from the beginning of its step)
    and `duration`, seconds, and what else the writer wants of them; `critical_path`: their rows on it, in order.
    """

    name: str
    slices: pl.DataFrame
    critical_path: npt.NDArray[np.integer[Any]]


def write_chrome(
    path: str | os.PathLike[str],
    timelines: Mapping[str, tuple[pl.DataFrame, pl.DataFrame]],
    ranks: Mapping[Worker, int],
    name: str,
) -> int:
    """Write the timelines; returns the number of slices. Raises OutputError.

    `timelines`: name -> all ops, and step, dp_rank, pp_rank, kind and seq of those on the critical path, in order.
    `ranks`: the global rank of each worker. `name`: of the job.
    """
    streams = list(dict.fromkeys(STREAMS.values()))
    thread = {str(kind): streams.index(STREAMS[kind]) for kind in KINDS}
    schema = next(iter(timelines.values()))[0].schema
    cells = pl.DataFrame(
        [(position, worker.dp_rank, worker.pp_rank) for position, worker in enumerate(ranks)],
        {"process": pl.Int64, "dp_rank": schema["dp_rank"], "pp_rank": schema["pp_rank"]},
        orient="row",
    )
    placed = []
    for title, (ops_of_all, on_path) in timelines.items():
        ops = ops_of_all.join(cells, on=["dp_rank", "pp_rank"], maintain_order="left").with_columns(
            tid=pl.col("kind").cast(pl.String).replace_strict(thread, return_dtype=pl.Int32),
            name=pl.col("kind").cast(pl.String),
            args=pl.struct("step", "dp_rank", "pp_rank", "seq", "microbatch", "chunk"),
        )
        rows = on_path.join(ops.with_row_index("row"), on=on_path.columns, maintain_order="left")["row"]
        placed.append(DrawnTimeline(title, ops, rows.to_numpy()))
    names = [f"dp {worker.dp_rank} pp {worker.pp_rank} (rank {rank})" for worker, rank in ranks.items()]
    threads = {(process, tid): stream for process in range(len(names)) for tid, stream in enumerate(streams)}
    return write_timelines(path, {"name": name}, placed, names, threads)


def write_op_chrome(
    path: str | os.PathLike[str], name: str, ops: pl.DataFrame, timelines: Sequence[DrawnTimeline]
) -> int:
    """Write the timelines; returns the number of slices. Raises OutputError; leaves no half-written file.

    `ops`: of an op trace, in the order of the timelines.
    """
    names = [column for column in ("name", "kind", "peer") if column in ops.columns]
    stream = pl.col("stream").fill_null("") if "stream" in ops.columns else pl.lit("")
    args = pl.struct(*(column for column in _ARGS if column in ops.columns), "rank")
    slices = ops.select(
        pl.col("step") if "step" in ops.columns else pl.lit(0).alias("step"),
        "rank",
        process=pl.col("rank").rank("dense").cast(pl.Int64) - 1,
        track=pl.when(stream == "").then(pl.lit("ops")).otherwise(stream),
        name=pl.coalesce(pl.col(column).cast(pl.String) for column in names) if names else pl.lit("op"),
        args=args,
    ).with_columns(tid=pl.col("track").rank("dense").cast(pl.Int64))
    ranks = slices["rank"].unique().sort()
    threads = slices.select("process", "tid", "track").unique().sort("process", "tid").iter_rows()
    placed = [replace(timeline, slices=slices.with_columns(timeline.slices)) for timeline in timelines]
    return write_timelines(
        path,
        {"name": name},
        placed,
        [f"rank {rank}" for rank in ranks],
        {(process, tid): track for process, tid, track in threads},
    )


def write_timelines(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    timelines: Sequence[DrawnTimeline],
    processes: Sequence[str],
    threads: Mapping[tuple[int, int], str],
) -> int:
    """Write the timelines; returns the number of slices, which have their place and what to show of them, too:
    `process`, `tid`, `step`, `name`, `args`. `processes`, `threads`: names in each of the timelines.

    `header`: plain JSON data stored as `otherData`. Raises OutputError; leaves no half-written file, and replaces only
    another timeline of tracekit.
    """
    starts = _step_starts(timelines)
    step_starts = {str(step): start for step, start in starts.iter_rows()}
    other = {**header, "timelines": [timeline.name for timeline in timelines], "step_starts_us": step_starts}
    slices = arrows = 0
    with (
        replacing(path, TIMELINE_FILE) as temporary,
        gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file,
    ):
        file.write(f'{_BEGINNING}{VERSION}, {json.dumps(other)[1:]}, "traceEvents": [\n')
        for number, timeline in enumerate(timelines):
            first = 1 + number * len(processes)
            lines = _SEPARATOR.join(map(json.dumps, _names(timeline.name, first, processes, threads)))
            file.write(_SEPARATOR + lines if number else lines)
        for number, timeline in enumerate(timelines):
            placed = timeline.slices.join(starts, on="step", maintain_order="left").select(
                "step", "tid", "name", "args",
                pid=pl.col("process") + (1 + number * len(processes)),
                ts=(pl.col("step_start_us") + pl.col("start") * 1e6).round(6),
                dur=(pl.col("duration") * 1e6).round(6),
            )  # fmt: skip
            for lines in (*_slices(placed), *_arrows(placed[timeline.critical_path], arrows)):
                file.write(_SEPARATOR + lines)
            slices += placed.height
            arrows += len(timeline.critical_path)
        file.write(END)
    return slices


def _names(
    timeline: str, first: int, processes: Sequence[str], threads: Mapping[tuple[int, int], str]
) -> Iterator[dict[str, Any]]:
    """The events that name the tracks of a timeline, and sort processes by their ids."""
    for pid, name in enumerate(processes, first):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{timeline}: {name}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (process, tid), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": first + process, "tid": tid, "args": {"name": name}}


def is_timeline(file: BinaryIO) -> bool:
    """Whether tracekit wrote this timeline; also true for an unpacked one."""
    head = file.read(4096)
    with contextlib.suppress(zlib.error):
        head = zlib.decompressobj(wbits=31).decompress(head, len(_BEGINNING))
    return head.startswith(_BEGINNING.encode())


#: The kind of file that `write_timelines` replaces.
TIMELINE_FILE = Kind("a timeline that tracekit wrote", is_timeline)


def _step_starts(timelines: Sequence[DrawnTimeline]) -> pl.DataFrame:
    """Where each step begins on the common axis, microseconds: after the slowest replay of the step before."""
    ends = pl.concat(timeline.slices.select("step", end=pl.col("start") + pl.col("duration")) for timeline in timelines)
    by_step = ends.group_by("step").agg(pl.col("end").max()).sort("step")
    return by_step.select("step", step_start_us=((pl.col("end") + GAP_S).cum_sum().shift(1, fill_value=0.0)) * 1e6)


def _slices(ops: pl.DataFrame) -> Iterator[str]:
    """JSON lines of slices, a batch of rows at a time, formatted by polars."""
    line = pl.struct("pid", "tid", "ts", "dur", "name", "args", ph=pl.lit("X")).struct.json_encode()
    for part in ops.iter_slices(_ROWS_AT_ONCE):
        yield part.select(line.alias("line"))["line"].str.join(_SEPARATOR)[0]


def _arrows(path: pl.DataFrame, first: int) -> Iterator[str]:
    """JSON lines of arrows, numbered from `first`, from each op of the critical path to the next one of its step.

    An arrow leaves at the end of a slice, and arrives at that time or, if it begins later, at the beginning of the
    next.
    """
    end = pl.col("ts") + pl.col("dur")
    following = [pl.col(name).shift(-1).over("step").alias(f"next_{name}") for name in ("pid", "tid", "ts", "dur")]
    pairs = path.with_columns(*following).drop_nulls("next_pid").with_row_index("id", first)
    if not pairs.height:
        return
    arrival = pl.max_horizontal("next_ts", pl.min_horizontal(end, pl.col("next_ts") + pl.col("next_dur")))
    called = pl.lit("critical path")
    leaves = pl.struct("pid", "tid", "id", ph=pl.lit("s"), ts=end.round(6), name=called, cat=called)
    arrives = pl.struct(
        "id", ph=pl.lit("f"), bp=pl.lit("e"), pid=pl.col("next_pid"), tid=pl.col("next_tid"), ts=arrival.round(6),
        name=called, cat=called,
    )  # fmt: skip
    lines = pairs.select(pl.concat_list(leaves.struct.json_encode(), arrives.struct.json_encode()).alias("line"))
    yield lines.explode("line")["line"].str.join(_SEPARATOR)[0]
