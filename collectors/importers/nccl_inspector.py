"""Importer of the NCCL Inspector's JSON lines, which contain the durations of collective kernels.

In: one `<host>-pid<pid>.log`, or a folder of them. Out: a `Trace` that shows which ranks the others wait for.

The Inspector records no steps, no compute and no process groups, but it shows when a rank enters a collective: its
kernel runs from then until the collective is over on all ranks. So a step of the trace is one collective, numbered as
NCCL does: a `host-delay` from the end of the communicator's collective before it, which all ranks left together, to the
rank's arrival, then the collective, as `all-reduce`, whatever NCCL's function. The clocks of the hosts need not agree.
The ranks of the communicator become data-parallel ranks. The trace holds the collectives of one communicator, function
and size, those that ran longest in total; a mean over different ones would mean nothing. The metadata counts the rest.

Without `NCCL_INSPECTOR_DUMP_VERBOSE=1` arrivals are unknown: a delay is then relative to the first rank, and time that
all ranks spent alike is missing from the step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tracekit.base.errors import FormatError
from tracekit.base.text import encodable
from tracekit.trace.canonical import UNIT_KEY, Trace
from tracekit.trace.model import Layout, OpKind, TimeUnit, is_size

#: Steps are numbered in 32 bits.
_LARGEST_STEP = 1 << 31
#: Sizes of messages are kept in 64 bits.
_LARGEST_SIZE_BYTES = 1 << 63
#: Columns that identify a collective of a communicator on all its ranks.
_COLLECTIVE = ["function", "sequence"]
_BODIES = ("coll_perf", "p2p_perf", "dump_stats", "proxy_trace")
_SCHEMA = {
    "communicator": pl.String,
    "communicator_name": pl.String,
    "ranks": pl.Int32,
    "rank": pl.Int32,
    "host": pl.String,
    "function": pl.String,
    "sequence": pl.Int64,
    "bytes": pl.Int64,
    "exec_us": pl.Float64,
    "start_us": pl.Float64,
}


@dataclass(slots=True)
class _Log:
    """The collectives of all files, and counts of everything else. `dropped`: by communicator and rank."""

    rows: list[tuple[Any, ...]]
    other: Counter[str]
    dropped: dict[tuple[str, int], int]
    torn_lines: int = 0


def read_inspector(path: Path) -> Trace:
    """The trace of the collective that took longest in total. Raises FormatError with file and line."""
    log = _Log([], Counter(), {})
    for file in sorted(entry for entry in path.glob("*.log") if entry.is_file()) if path.is_dir() else [path]:
        _read_file(file, log)
    frame = pl.DataFrame(log.rows, schema=_SCHEMA, orient="row")
    if frame.is_empty():
        raise FormatError(f"{path}: has no collectives of the NCCL Inspector; expected lines with `coll_perf`")
    return _trace(frame, log, path)


def _read_file(path: Path, log: _Log) -> None:
    """Add the lines of one process. Newer versions write header and metadata once, in front of a dump's lines."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    context: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # the process died while writing it
                log.torn_lines += 1
                return
            raise FormatError(f"{path}, line {number}: not JSON ({error!s:.200}); delete the line") from None
        try:
            context = {key: entry.get(key, context.get(key)) for key in ("header", "metadata")}
            _read_line(entry, context, log)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FormatError(
                f"{path}, line {number}: damaged ({error!r:.200}); expected header, metadata and one of"
                f" {', '.join(_BODIES)}"
            ) from None


def _read_line(entry: dict[str, Any], context: dict[str, Any], log: _Log) -> None:
    header, body = context["header"], entry.get("coll_perf")
    identity, rank = encodable(str(header["id"])), int(header["rank"])
    if body is None:
        (kind,) = (name for name in _BODIES if name in entry)
        if kind == "dump_stats":
            log.dropped[identity, rank] = int(entry[kind].get("coll_dropped_total", 0))
        else:
            log.other[kind] += 1
        return
    ranks, sequence, exec_us = int(header["n_ranks"]), int(body["coll_sn"]), float(body["coll_exec_time_us"])
    if not (0 <= rank < ranks and 0 <= sequence < _LARGEST_STEP and 0 <= exec_us < math.inf):
        raise ValueError(f"rank {rank:.8g} of {ranks:.8g}, coll_sn {sequence:.8g}, coll_exec_time_us {exec_us}")
    size = int(body["coll_msg_size_bytes"])
    if not (is_size(ranks) and 0 <= size < _LARGEST_SIZE_BYTES):
        raise ValueError(f"n_ranks {ranks:.8g}, coll_msg_size_bytes {size:.8g}")
    row = (
        identity,
        encodable(str(header.get("comm_name", "unknown"))),
        ranks,
        rank,
        encodable(str(context["metadata"]["hostname"])),
        encodable(str(body["coll"])),
        sequence,
        size,
        exec_us,
        _start_us(body),
    )
    log.rows.append(row)


def _start_us(body: dict[str, Any]) -> float | None:
    """Return the start of the first channel's kernel, microseconds since 1970; None if the log is not verbose."""
    events = body.get("event_trace_ts", {}).get("kernel_events", [])
    return min((float(event["kernel_start_ts"]) for event in events), default=None)


def _trace(frame: pl.DataFrame, log: _Log, path: Path) -> Trace:
    own = frame.filter(pl.col("communicator") == _longest(frame))
    once = own.unique([*_COLLECTIVE, "rank"], keep="first", maintain_order=True)
    verbose = once["start_us"].null_count() == 0
    # How much later than the first rank each one arrived, because all end together.
    after_first_us = pl.col("exec_us").max().over(_COLLECTIVE) - pl.col("exec_us")
    arrivals = _since_previous(once) if verbose else once.with_columns(delay_us=after_first_us)
    ranks = once["rank"].n_unique()
    whole = arrivals.filter(pl.len().over(_COLLECTIVE) == ranks)
    if whole.is_empty():
        raise FormatError(
            f"{path}: no collective that all {ranks} ranks reported"
            f"{', together with the one before it' if verbose else ''}; raise NCCL_INSPECTOR_DUMP_COLL_RING_SIZE"
        )
    chosen = whole.filter(_is_longest_class(whole))
    size = int(own["ranks"][0])
    starts: dict[int, float] = {}
    if verbose:  # when the last rank had left the collective before, seconds since 1970
        starts = dict(chosen.group_by("sequence").agg(pl.col("left_us").max() / 1e6).sort("sequence").iter_rows())
    first, other = chosen.row(0, named=True), frame.filter(pl.col("communicator") != own["communicator"][0])
    return Trace.from_frame(
        _ops(chosen),
        Layout(dp=size, world_size=size),
        name=path.stem,
        step_starts=starts,
        metadata={
            "format": "nccl-inspector",
            UNIT_KEY: str(TimeUnit.US),
            "framework": "NCCL",
            "hosts": {str(rank): host for rank, host in own.select("rank", "host").unique().sort("rank").iter_rows()},
            "steps": "one collective each",
            "arrivals": "measured" if verbose else "behind the first rank only: the logs are not verbose",
            "communicator": {"id": first["communicator"], "name": first["communicator_name"], "ranks": size},
            "collective": {"function": first["function"], "bytes": first["bytes"]},
            "other_collectives": _summed(once.join(chosen, on=[*_COLLECTIVE, "rank"], how="anti"), "function", "bytes"),
            "other_communicators": _summed(other, "communicator", "communicator_name", "ranks"),
            "repeated": own.height - once.height,
            "dropped_by_the_inspector": sum(n for (id_, _), n in log.dropped.items() if id_ == first["communicator"]),
            "other_lines": dict(log.other),
            "torn_lines": log.torn_lines,
        },
        source=str(path),
    )


def _longest(frame: pl.DataFrame) -> str:
    """Return the communicator whose collectives took longest in total; the first of several equals."""
    sums = frame.group_by("communicator", maintain_order=True).agg(pl.col("exec_us").sum())
    return str(sums.sort("exec_us", descending=True, maintain_order=True)["communicator"][0])


def _is_longest_class(frame: pl.DataFrame) -> pl.Expr:
    """Mask of the rows of the function and size that took longest in total."""
    sums = frame.group_by("function", "bytes", maintain_order=True).agg(pl.col("exec_us").sum())
    function, size, _ = sums.sort("exec_us", descending=True, maintain_order=True).row(0)
    chosen: pl.Expr = (pl.col("function") == function) & (pl.col("bytes") == size)
    return chosen


def _since_previous(once: pl.DataFrame) -> pl.DataFrame:
    """Add `delay_us`: from the end of the rank's previous collective to the start of this one, if the previous one is
    the same on all ranks that reported it.
    """
    ordered = once.sort("rank", "start_us", maintain_order=True).with_columns(
        before=pl.struct(_COLLECTIVE).shift(1).over("rank"),
        left_us=(pl.col("start_us") + pl.col("exec_us")).shift(1).over("rank"),
    )
    after_common = ordered.filter(
        pl.col("left_us").is_not_null() & (pl.col("before").n_unique().over(_COLLECTIVE) == 1)
    )
    return after_common.with_columns(delay_us=pl.max_horizontal(0.0, pl.col("start_us") - pl.col("left_us")))


def _ops(chosen: pl.DataFrame) -> pl.DataFrame:
    """Build canonical columns: per collective and rank the delay, then the collective."""
    null, zero = pl.lit(None, pl.Int32), pl.lit(0, pl.Int32)
    place = [
        pl.col("sequence").cast(pl.Int32).alias("step"),
        pl.col("rank"),
        pl.col("rank").alias("dp_rank"),
        zero.alias("pp_rank"),
    ]
    times = {
        OpKind.HOST_DELAY: (pl.lit(0.0), pl.col("delay_us")),
        OpKind.ALL_REDUCE: (pl.col("delay_us"), pl.col("exec_us")),
    }
    parts = [
        chosen.select(
            *place,
            pl.lit(str(kind)).alias("kind"),
            zero.alias("seq"),
            null.alias("microbatch"),
            null.alias("chunk"),
            (start / 1e6).alias("start"),
            (duration / 1e6).alias("duration"),
        )
        for kind, (start, duration) in times.items()
    ]
    return pl.concat(parts)


def _summed(frame: pl.DataFrame, *by: str) -> list[dict[str, Any]]:
    """Summarise collectives that are not in the trace: count, and total seconds over all ranks."""
    summed = frame.group_by(by, maintain_order=True).agg(count=pl.len(), seconds=pl.col("exec_us").sum() / 1e6)
    return list(summed.iter_rows(named=True))
