"""Handle records that a GPU timed.

In: records; those with `Flag.DEVICE_CLOCK` are on the clock of their rank's GPU. Out: all records on the host's clock,
without time that only seems to be the worker's: steps timed partly by the host and partly by the GPU, host work that
the GPU did not wait for, and the wait of a collective for the previous one.
"""

from __future__ import annotations

import polars as pl

from tracekit.collectors.merge.device_clock import DeviceClockFit
from tracekit.collectors.record.wire_format import Flag
from tracekit.trace.model import KINDS, OpKind

ON_DEVICE = (pl.col("flags") & int(Flag.DEVICE_CLOCK)) != 0
#: Work of the host alone; nothing waits for it while the device still has work.
_HOST_WORK = pl.col("category").is_in(["data_load", "checkpoint", "gc", "span"]) & ~ON_DEVICE
#: Kinds of collectives that run one after another on a GPU.
_IN_TURN = [str(kind) for kind in (OpKind.ALL_REDUCE, OpKind.GRADS_REDUCE_SCATTER, OpKind.PARAMS_ALL_GATHER)]
#: Kinds of ops that run one after another on the host's clock, too: transfers to one neighbour share a connection, and
#: gathers of parameters that are issued at once finish one chunk after another.
_ALWAYS_IN_TURN = [str(kind) for kind in KINDS if kind.is_p2p or kind is OpKind.PARAMS_ALL_GATHER]


def on_host_clock(records: pl.DataFrame, fit: DeviceClockFit) -> pl.DataFrame:
    """Convert the device times of one rank to times of its host; `extra` of p2p is the time at which the wait began."""

    def converted(column: str, rows: pl.Expr) -> pl.Expr:
        host = pl.Series(column, fit.to_host(records[column].to_numpy()))
        return pl.when(rows).then(host).otherwise(pl.col(column)).alias(column)

    return records.with_columns(
        converted("start_ns", ON_DEVICE),
        converted("end_ns", ON_DEVICE),
        converted("extra", ON_DEVICE & (pl.col("category") == "p2p")),
    )


def timed_alike(records: pl.DataFrame, steps: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The (rank, step) pairs whose computes and optimizers were all timed by the GPU, if the GPU timed any of any rank;
    and how many others were left out.

    Workers with launch times would look fast among workers with kernel times.
    """
    timed = records.filter(pl.col("category").is_in(["compute", "optimizer"]))
    if not timed.select(ON_DEVICE.any()).item():
        return steps, 0
    on_host = timed.filter(~ON_DEVICE).select("rank", "step").unique()
    alike = steps.join(on_host, on=["rank", "step"], how="anti")
    return alike, steps.height - alike.height


def waited_for(records: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """Start host work when the GPU finishes what it began before the host was done; drop host work that this hides.

    Returns the records, and name -> number of the records that the GPU never waited for.
    """
    device = records.filter(ON_DEVICE & (pl.col("category") != "step"))
    if device.is_empty():
        return records, {}
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
    return pl.concat([rest, seen]), dict(hidden.group_by("name").len().sort("name").iter_rows())


def one_after_another(ops: pl.DataFrame, ranks: list[int]) -> pl.DataFrame:
    """Start ops that run one after another when the previous one of their kind ended: collectives on the GPUs of
    `ranks`, transfers and gathers of parameters on all ranks.

    An op is launched while the previous one still runs; waiting for that one is not part of its own transfer.
    """
    queued = pl.col("kind").is_in(_ALWAYS_IN_TURN)
    on_device = pl.col("rank").is_in(ranks) & pl.col("kind").is_in(_IN_TURN)
    in_turn = on_device | queued
    if not ops.select(in_turn.any()).item():
        return ops
    before_ns = pl.col("end_ns").cum_max().shift(1).over("rank", "step", "kind").fill_null(0)
    ordered = ops.sort("start_ns", "end_ns").with_columns(before_ns=before_ns)
    # Ops finish in the order in which they are issued: an end before the previous op's end was estimated or noticed
    # too early.
    ends = pl.when(queued).then(pl.max_horizontal("end_ns", "before_ns")).otherwise(pl.col("end_ns"))
    begins = pl.min_horizontal(pl.max_horizontal("start_ns", "before_ns"), ends)
    return ordered.with_columns(start_ns=pl.when(in_turn).then(begins).otherwise(pl.col("start_ns")), end_ns=ends).drop(
        "before_ns"
    )
