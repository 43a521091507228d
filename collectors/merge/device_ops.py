"""What is different about records that a GPU timed.

In: records, those with `Flag.DEVICE_CLOCK` on the clock of their rank's GPU. Out: all on the host's clock, and the same
records without what only looks like time of the worker: steps timed half here and half there, host work that the GPU
did not wait for, a collective's wait for the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from tracekit.collectors.merge.device_clock import DeviceClockFit
from tracekit.collectors.runtime.wire_format import Flag
from tracekit.model import KINDS, OpKind

ON_DEVICE = (pl.col("flags") & int(Flag.DEVICE_CLOCK)) != 0
#: Work of the host alone; while the device still has work, nobody waits for it.
_HOST_WORK = pl.col("category").is_in(["data_load", "checkpoint", "gc", "span"]) & ~ON_DEVICE
#: Collectives of one kind that run one after the other.
_IN_TURN = [str(kind) for kind in (OpKind.ALL_REDUCE, OpKind.GRADS_REDUCE_SCATTER, OpKind.PARAMS_ALL_GATHER)]
#: Ops of one kind that run so on the host's clock, too: transfers to one neighbour share a connection, and parameters
#: that are asked for at once come one chunk after the other.
_ALWAYS_IN_TURN = [str(kind) for kind in KINDS if kind.is_p2p or kind is OpKind.PARAMS_ALL_GATHER]


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """`steps`: (rank, step) timed by one kind of clock. `left_out`: how many were not."""

    steps: pl.DataFrame
    left_out: int


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """`records` with host work cut to what the device waited for. `hidden`: name -> how many it never waited for."""

    records: pl.DataFrame
    hidden: Mapping[str, int]


def on_host_clock(records: pl.DataFrame, fit: DeviceClockFit) -> pl.DataFrame:
    """Device times of one rank as times of its host; `extra` of p2p is the time at which the wait began."""

    def converted(column: str, rows: pl.Expr) -> pl.Expr:
        host = pl.Series(column, fit.to_host(records[column].to_numpy()))
        return pl.when(rows).then(host).otherwise(pl.col(column)).alias(column)

    return records.with_columns(
        converted("start_ns", ON_DEVICE),
        converted("end_ns", ON_DEVICE),
        converted("extra", ON_DEVICE & (pl.col("category") == "p2p")),
    )


def timed_alike(records: pl.DataFrame, steps: pl.DataFrame) -> TimedSteps:
    """The (rank, step) whose computes and optimizers are all timed by the GPU, where any rank's are.

    Times of launches among times of kernels would look like fast workers.
    """
    timed = records.filter(pl.col("category").is_in(["compute", "optimizer"]))
    if not timed.select(ON_DEVICE.any()).item():
        return TimedSteps(steps, 0)
    on_host = timed.filter(~ON_DEVICE).select("rank", "step").unique()
    kept = steps.join(on_host, on=["rank", "step"], how="anti")
    return TimedSteps(kept, steps.height - kept.height)


def waited_for(records: pl.DataFrame) -> WaitedFor:
    """Start host work where the GPU ran out of work that began before the host was done; drop what it covers."""
    device = records.filter(ON_DEVICE)
    if device.is_empty():
        return WaitedFor(records, {})
    busy = device.sort("start_ns").select(
        "rank", began_ns="start_ns", busy_until_ns=pl.col("end_ns").cum_max().over("rank")
    )
    ranks = device["rank"].unique().to_list()
    host = records.filter(_HOST_WORK & pl.col("rank").is_in(ranks)).sort("end_ns")
    placed = host.join_asof(busy, left_on="end_ns", right_on="began_ns", by="rank", check_sortedness=False)
    start = pl.max_horizontal("start_ns", pl.col("busy_until_ns").fill_null(0))
    hidden = placed.filter(start >= pl.col("end_ns"))
    seen = placed.filter(start < pl.col("end_ns")).with_columns(start_ns=start).select(records.columns)
    rest = records.filter(~(_HOST_WORK & pl.col("rank").is_in(ranks)))
    return WaitedFor(pl.concat([rest, seen]), dict(hidden.group_by("name").len().sort("name").iter_rows()))


def one_after_another(ops: pl.DataFrame, ranks: list[int]) -> pl.DataFrame:
    """Start an op where the one of its kind before it ended, where they run in turn: collectives, on these ranks' GPUs;
    transfers and the gathering of parameters everywhere.

    They are launched while the one before still runs, and the wait for that is not their transfer.
    """
    key = ["rank", "step", "kind"]
    ordered = ops.sort("start_ns", "end_ns").with_columns(
        before_ns=pl.col("end_ns").cum_max().shift(1).over(key).fill_null(0)
    )
    # What is asked for later comes later: an end before that of the one before was estimated, or noticed, too early.
    queued = pl.col("kind").is_in(_ALWAYS_IN_TURN)
    on_device = pl.col("rank").is_in(ranks) & pl.col("kind").is_in(_IN_TURN)
    in_turn = on_device | queued
    ends = pl.when(queued).then(pl.max_horizontal("end_ns", "before_ns")).otherwise(pl.col("end_ns"))
    begins = pl.min_horizontal(pl.max_horizontal("start_ns", "before_ns"), ends)
    return ordered.with_columns(start_ns=pl.when(in_turn).then(begins).otherwise(pl.col("start_ns")), end_ns=ends).drop(
        "before_ns"
    )
