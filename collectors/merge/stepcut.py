"""Cut ops on an absolute clock into steps that start at 0, and number the ops of each kind within a step."""

from __future__ import annotations

import polars as pl

from tracekit.trace.model import OpKind
from tracekit.trace.schema import POSTED, RECEIVED, RESUMED, SENT

COLUMNS = ("step", "rank", "dp_rank", "pp_rank", "kind", "seq", "microbatch", "chunk", "start", "duration")


def cut_steps(ops: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, int]]:
    """Express starts in seconds from the start of the step, and number `seq` in order of start. Returns the ops in
    canonical columns, and the start of each step on the clock of the ops, ns.

    A step starts when the last rank begins it. Ranks of a late stage begin while an early stage still finishes the
    previous step, and that time belongs to the previous step; such ops have a negative start.
    """
    firsts = ops.group_by("step", "rank").agg(first_ns=pl.col("start_ns").min())
    starts = firsts.group_by("step").agg(step_ns=pl.col("first_ns").max()).sort("step")
    waits = {}
    if "posted_ns" in ops.columns:
        waits[POSTED] = pl.col("start_ns") - pl.col("posted_ns")
    if "resumed_ns" in ops.columns:
        waits[RESUMED] = pl.col("resumed_ns") - pl.col("start_ns")
    ordered = (
        ops.join(starts, on="step")
        .with_columns(
            start=(pl.col("start_ns") - pl.col("step_ns")) / 1e9,
            duration=(pl.col("end_ns") - pl.col("start_ns")) / 1e9,
            **{name: lasted.clip(0) / 1e9 for name, lasted in waits.items()},
        )
        .sort("step", "rank", "kind", "start_ns", "end_ns")
        .with_columns(seq=place_in_run("step", "rank", "kind"))
    )
    waited = [name for name in waits if ordered[name].count()]
    waited += [name for name in (SENT, RECEIVED) if name in ordered.columns]
    return ordered.select(*COLUMNS, *waited), {int(step): int(start) for step, start in starts.iter_rows()}


def place_in_run(*columns: str) -> pl.Expr:
    """The position of each row, from 0, among the adjacent rows that are equal in `columns`."""
    row = pl.int_range(pl.len())
    begins = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift()) for name in columns) | (row == 0)
    return row - pl.when(begins).then(row).forward_fill()


#: Name of the fused transfer -> the ops in it.
FUSED_TRANSFERS: dict[str, tuple[OpKind, ...]] = {
    "forward-send-backward-recv": (OpKind.FORWARD_SEND, OpKind.BACKWARD_RECV),
    "backward-send-forward-recv": (OpKind.BACKWARD_SEND, OpKind.FORWARD_RECV),
    "forward-send-forward-recv": (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV),
    "backward-send-backward-recv": (OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV),
    "forward-backward-send-forward-backward-recv": (
        OpKind.FORWARD_SEND,
        OpKind.BACKWARD_SEND,
        OpKind.FORWARD_RECV,
        OpKind.BACKWARD_RECV,
    ),
}
