"""Timelines in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

In: frames of ops (step, dp_rank, pp_rank, kind, seq, microbatch, chunk, start, duration), one per replay. Out: a
`.json.gz` file: one process per replay and worker, one thread per stream, one slice per op with all its columns as
args, and arrows along the critical path. Steps follow each other; a step begins at the same time in every replay, so
that they can be compared. `op_chrome.py` draws ops of any shape with the same `write_timelines`.
`collectors/importers/exported_timeline.py` reads the recorded timeline back.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import polars as pl

from tracekit.base.atomic_write import Kind, replacing
from tracekit.trace.model import KINDS, OpKind, Worker

#: First key of `otherData`, which identifies the file; its value is the version of the content.
MARK = "tracekit_timeline"
VERSION = 1
#: Key of `otherData` for slices that are ops of any shape (`op_chrome.py`), which are not read back.
OPS_MARK = "ops"
#: The name of the timeline that is read back.
RECORDED = "recorded"
#: More slices than this make a browser stall.
MOST_SLICES = 2_000_000
#: Text after the last event; each event is a line.
END = "\n]}\n"
_SEPARATOR = ",\n"
_ROWS_AT_ONCE = 100_000
_BEGINNING = f'{{"displayTimeUnit": "ms", "otherData": {{"{MARK}": '
#: Gap between the end of a step and the beginning of the next, seconds.
GAP_S = 1e-3

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
class ExportedTimeline:
    """One named timeline of all workers, such as "recorded" or "ideal".

    `critical_path`: step, dp_rank, pp_rank, kind and seq of the ops on it, in order.
    """

    name: str
    ops: pl.DataFrame
    critical_path: pl.DataFrame | None = None


def write_chrome(
    path: str | os.PathLike[str],
    timelines: tuple[ExportedTimeline, ...],
    ranks: Mapping[Worker, int],
    header: Mapping[str, Any],
) -> int:
    """Write the timelines; returns the number of slices. Raises OutputError.

    `ranks`: the global rank of each worker. `header`: plain JSON data stored as `otherData`, together with what locates
    a slice: process id 1 + position in `timelines` x workers + position in `workers`, and where each step begins.
    """
    starts = _step_starts(timelines)
    other = {
        **header,
        "timelines": [timeline.name for timeline in timelines],
        "workers": [(worker.dp_rank, worker.pp_rank, rank) for worker, rank in ranks.items()],
        "step_starts_us": {str(step): start for step, start in starts.iter_rows()},
    }
    drawn = (_drawn(timeline, number, starts, tuple(ranks)) for number, timeline in enumerate(timelines))
    return write_timelines(path, other, _tracks(timelines, ranks), drawn)


@dataclass(frozen=True, slots=True)
class Tracks:
    """Names of the tracks: `processes` by process id, `threads` by process id and thread."""

    processes: Mapping[int, str]
    threads: Mapping[tuple[int, int], str]

    def events(self) -> Iterator[dict[str, Any]]:
        """The events that name the tracks, and sort processes by their ids."""
        for pid, name in self.processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for (pid, tid), name in self.threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


@dataclass(frozen=True, slots=True)
class DrawnTimeline:
    """Place and time of slices: `pid`, `tid`, `ts` and `dur` (microseconds), `name`, `args` and `step`.

    `critical_path`: the slices on it, in order.
    """

    slices: pl.DataFrame
    critical_path: pl.DataFrame


def write_timelines(
    path: str | os.PathLike[str], other: Mapping[str, Any], tracks: Tracks, timelines: Iterable[DrawnTimeline]
) -> int:
    """Write the timelines, one at a time; returns the number of slices. `other`: plain JSON data stored as `otherData`.

    Raises OutputError; leaves no half-written file, and replaces only another timeline of tracekit.
    """
    slices = arrows = 0
    with (
        replacing(path, TIMELINE_FILE) as temporary,
        gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file,
    ):
        file.write(f'{_BEGINNING}{VERSION}, {json.dumps(other)[1:]}, "traceEvents": [\n')
        file.write(_SEPARATOR.join(map(json.dumps, tracks.events())))
        for timeline in timelines:
            for lines in (*_slices(timeline.slices), *_arrows(timeline.critical_path, arrows)):
                file.write(_SEPARATOR)
                file.write(lines)
            slices += timeline.slices.height
            arrows += timeline.critical_path.height
        file.write(END)
    return slices


def is_timeline(file: BinaryIO) -> bool:
    """Whether tracekit wrote this timeline; also true for an unpacked one."""
    head = file.read(4096)
    with contextlib.suppress(zlib.error):
        head = zlib.decompressobj(wbits=31).decompress(head, len(_BEGINNING))
    return head.startswith(_BEGINNING.encode())


#: The kind of file that `write_timelines` replaces.
TIMELINE_FILE = Kind("a timeline that tracekit wrote", is_timeline)


def _step_starts(timelines: tuple[ExportedTimeline, ...]) -> pl.DataFrame:
    """Where each step begins on the common axis, microseconds: after the slowest replay of the step before."""
    longest = pl.concat(
        [timeline.ops.select("step", end=pl.col("start") + pl.col("duration")) for timeline in timelines]
    )
    by_step = longest.group_by("step").agg(pl.col("end").max()).sort("step")
    return by_step.select("step", step_start_us=((pl.col("end") + GAP_S).cum_sum().shift(1, fill_value=0.0)) * 1e6)


def _tracks(timelines: tuple[ExportedTimeline, ...], ranks: Mapping[Worker, int]) -> Tracks:
    workers = [
        f"{timeline.name}: dp {worker.dp_rank} pp {worker.pp_rank} (rank {rank})"
        for timeline in timelines
        for worker, rank in ranks.items()
    ]
    processes = dict(enumerate(workers, start=1))
    streams = dict.fromkeys(STREAMS.values())
    threads = {(pid, tid): stream for pid in processes for tid, stream in enumerate(streams)}
    return Tracks(processes, threads)


def _drawn(timeline: ExportedTimeline, number: int, starts: pl.DataFrame, workers: tuple[Worker, ...]) -> DrawnTimeline:
    """The ops of timeline `number` as slices of workers' tracks."""
    streams = list(dict.fromkeys(STREAMS.values()))
    thread = {str(kind): streams.index(STREAMS[kind]) for kind in KINDS}
    cells = pl.DataFrame(
        [(worker.dp_rank, worker.pp_rank) for worker in workers],
        {name: timeline.ops.schema[name] for name in ("dp_rank", "pp_rank")},
        orient="row",
    ).with_row_index("position")
    placed = (
        timeline.ops.join(starts, on="step", maintain_order="left")
        .join(cells, on=["dp_rank", "pp_rank"], maintain_order="left")
        .with_columns(
            pid=pl.col("position") + (number * len(workers) + 1),
            tid=pl.col("kind").cast(pl.String).replace_strict(thread, return_dtype=pl.Int32),
            ts=(pl.col("step_start_us") + pl.col("start") * 1e6).round(6),
            dur=(pl.col("duration") * 1e6).round(6),
            name=pl.col("kind").cast(pl.String),
            args=pl.struct("step", "dp_rank", "pp_rank", "seq", "microbatch", "chunk"),
        )
    )
    path = timeline.critical_path
    on_path = placed.clear() if path is None else path.join(placed, on=path.columns, maintain_order="left")
    return DrawnTimeline(placed, on_path)


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
