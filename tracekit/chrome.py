"""Timelines in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

In: frames of ops (step, dp_rank, pp_rank, kind, seq, microbatch, chunk, start, duration), one per replay. Out: a
`.json.gz` file: one process per replay and worker, one thread per stream, one slice per op with all its columns as
args, and arrows along the critical path. Steps follow each other; a step begins at the same time in every replay, so
that they can be compared.
`collectors/importers/exported_timeline.py` reads the recorded timeline back.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import polars as pl

from tracekit.atomic_write import Kind, replacing
from tracekit.model import KINDS, OpKind, Worker
from tracekit.records import dataclass

#: First key of `otherData`, by which the file is recognised; its value is the version of what stands there.
MARK = "tracekit_timeline"
VERSION = 1
#: Key of `otherData` that says that the slices are ops of any shape (`op_chrome.py`), which are not read back.
OPS_MARK = "ops"
#: The timeline that is read back.
RECORDED = "recorded"
#: More slices than this make a browser stall.
MOST_SLICES = 2_000_000
#: Between two events, each of which is one line, and behind the last.
SEPARATOR, END = ",\n", "\n]}\n"
_ROWS_AT_ONCE = 100_000
_BEGINNING = f'{{"displayTimeUnit": "ms", "otherData": {{"{MARK}": '
_GAP_S = 1e-3

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
    """Write the timelines; returns how many slices.

    Raises OutputError; leaves no half-written file, and replaces none but another timeline of tracekit.

    `ranks`: the global rank of each worker. `header`: plain JSON data kept as `otherData`. With them goes what places a
    slice: process id 1 + position in `timelines` x workers + position in `workers`, and where each step begins.
    """
    starts = _step_starts(timelines)
    slices = 0
    with (
        replacing(path, TIMELINE_FILE) as temporary,
        gzip.open(temporary, "wt", encoding="utf-8", compresslevel=4) as file,
    ):
        other = {
            **header,
            "timelines": [timeline.name for timeline in timelines],
            "workers": [(worker.dp_rank, worker.pp_rank, rank) for worker, rank in ranks.items()],
            "step_starts_us": {str(step): start for step, start in starts.iter_rows()},
        }
        file.write(f'{_BEGINNING}{VERSION}, {json.dumps(other)[1:]}, "traceEvents": [\n')
        file.write(SEPARATOR.join(_track_names(timelines, ranks)))
        for number, timeline in enumerate(timelines):
            ops = timeline.ops.join(starts, on="step", maintain_order="left")
            for lines in _slices(_placed(ops, number, tuple(ranks))):
                file.write(SEPARATOR)
                file.write(lines)
            if timeline.critical_path is not None and timeline.critical_path.height > 1:
                on_path = timeline.critical_path.join(ops, on=timeline.critical_path.columns, maintain_order="left")
                file.write(SEPARATOR)
                file.write(_arrows(_placed(on_path, number, tuple(ranks))))
            slices += timeline.ops.height
        file.write(END)
    return slices


def is_timeline(file: BinaryIO) -> bool:
    """Whether tracekit wrote this timeline; unpacked it still is one."""
    head = file.read(4096)
    with contextlib.suppress(zlib.error):
        head = zlib.decompressobj(wbits=31).decompress(head, len(_BEGINNING))
    return head.startswith(_BEGINNING.encode())


#: What `write_chrome` replaces.
TIMELINE_FILE = Kind("a timeline that tracekit wrote", is_timeline)


def _step_starts(timelines: tuple[ExportedTimeline, ...]) -> pl.DataFrame:
    """Where each step begins on the common axis, microseconds: after the slowest replay of the step before."""
    longest = pl.concat(
        [timeline.ops.select("step", end=pl.col("start") + pl.col("duration")) for timeline in timelines]
    )
    by_step = longest.group_by("step").agg(pl.col("end").max()).sort("step")
    return by_step.select("step", step_start_us=((pl.col("end") + _GAP_S).cum_sum().shift(1, fill_value=0.0)) * 1e6)


def _track_names(timelines: tuple[ExportedTimeline, ...], ranks: Mapping[Worker, int]) -> Iterator[str]:
    streams = list(dict.fromkeys(STREAMS.values()))
    for number, timeline in enumerate(timelines):
        for position, (worker, rank) in enumerate(ranks.items()):
            pid = number * len(ranks) + position + 1
            name = f"{timeline.name}: dp {worker.dp_rank} pp {worker.pp_rank} (rank {rank})"
            yield json.dumps({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            yield json.dumps({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
            for thread, stream in enumerate(streams):
                yield json.dumps(
                    {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": stream}}
                )


def _placed(ops: pl.DataFrame, number: int, workers: tuple[Worker, ...]) -> pl.DataFrame:
    """The ops of timeline `number` with `pid`, `tid`, `ts` and `dur` (microseconds) of their slices."""
    streams = list(dict.fromkeys(STREAMS.values()))
    thread = {str(kind): streams.index(STREAMS[kind]) for kind in KINDS}
    cells = pl.DataFrame(
        [(worker.dp_rank, worker.pp_rank) for worker in workers],
        {name: ops.schema[name] for name in ("dp_rank", "pp_rank")},
        orient="row",
    ).with_row_index("position")
    return ops.join(cells, on=["dp_rank", "pp_rank"], maintain_order="left").with_columns(
        pid=pl.col("position") + (number * len(workers) + 1),
        tid=pl.col("kind").cast(pl.String).replace_strict(thread, return_dtype=pl.Int32),
        ts=(pl.col("step_start_us") + pl.col("start") * 1e6).round(6),
        dur=(pl.col("duration") * 1e6).round(6),
    )


def _slices(ops: pl.DataFrame) -> Iterator[str]:
    """JSON lines of placed ops, a chunk of rows at a time, formatted by polars."""
    line = pl.struct(
        "pid", "tid", "ts", "dur",
        ph=pl.lit("X"),
        name=pl.col("kind").cast(pl.String),
        args=pl.struct("step", "dp_rank", "pp_rank", "seq", "microbatch", "chunk"),
    ).struct.json_encode()  # fmt: skip
    for part in ops.iter_slices(_ROWS_AT_ONCE):
        yield part.select(line.alias("line"))["line"].str.join(SEPARATOR)[0]


def _arrows(path: pl.DataFrame) -> str:
    """JSON lines of arrows from each op of the critical path to the next one of its step.

    An arrow leaves at the end of a slice, and arrives when that ends, or when the next slice begins if that is later.
    """
    end = pl.col("ts") + pl.col("dur")
    following = [pl.col(name).shift(-1).over("step").alias(f"next_{name}") for name in ("pid", "tid", "ts", "dur")]
    pairs = path.with_columns(*following).drop_nulls("next_pid").with_row_index("id")
    arrival = pl.max_horizontal("next_ts", pl.min_horizontal(end, pl.col("next_ts") + pl.col("next_dur")))
    called, number = pl.lit("critical path"), pl.col("id") + pl.col("pid") * 2**20
    leaves = pl.struct("pid", "tid", ph=pl.lit("s"), ts=end.round(6), name=called, cat=called, id=number)
    arrives = pl.struct(
        ph=pl.lit("f"), bp=pl.lit("e"), pid=pl.col("next_pid"), tid=pl.col("next_tid"), ts=arrival.round(6),
        name=called, cat=called, id=number,
    )  # fmt: skip
    lines = pairs.select(pl.concat_list(leaves.struct.json_encode(), arrives.struct.json_encode()).alias("line"))
    joined: str = lines.explode("line")["line"].str.join(SEPARATOR)[0]
    return joined
