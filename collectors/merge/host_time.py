"""Turn what the training thread of a pipeline does between its ops, host work, into ops of its own.

In: ops with absolute times, and the transfers with the times at which the host issued them and waited for them. Out:
`host-delay` for the time in which the host neither ran an op nor waited for a transfer, split where it issued one.

Between two computes, a schedule picks the next one, creates and posts its transfers, and may have to wait while other
threads use its processor. This work takes the time it takes; only time in which no thread worked is a launch delay.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from tracekit.collectors.merge.collective_ops import CLIP, REDUCTIONS
from tracekit.trace.model import OpKind

_CLOSING = (*REDUCTIONS, CLIP, str(OpKind.OPTIMIZER))


def between_ops(ops: pl.DataFrame, transfers: pl.DataFrame, on_device: Sequence[int]) -> pl.DataFrame:
    """Host work between the ops of a step, up to its first reduction or optimizer, in the columns of `ops`.

    `transfers` (`rank`, `step`, `posted_ns`, `wait_ns`, `resumed_ns`): when the host issued each transfer, began to
    wait for it and resumed. `on_device`: ranks that a GPU timed; the work of their hosts is unknown.
    """
    key = ["rank", "step"]
    is_transfer = pl.col("kind").is_in([str(kind) for kind in OpKind if kind.is_p2p])
    place = ops.select(*key, "dp_rank", "pp_rank").unique(key)
    closing = ops.filter(pl.col("kind").is_in(_CLOSING)).group_by(key).agg(closing_ns=pl.col("start_ns").min())
    busy = (
        ops.filter(~is_transfer).select(*key, "start_ns", "end_ns"),
        transfers.select(*key, start_ns="posted_ns", end_ns="posted_ns"),
        transfers.select(*key, start_ns="wait_ns", end_ns="resumed_ns"),
    )
    gaps = (
        pl.concat(busy)
        .filter(~pl.col("rank").is_in(on_device))
        .sort(*key, "start_ns", "end_ns")
        .with_columns(free_ns=pl.col("end_ns").cum_max().shift(1).over(key))
        .join(closing, on=key, how="left")
        .filter(
            (pl.col("free_ns") < pl.col("start_ns"))
            & (pl.col("start_ns") <= pl.col("closing_ns")).fill_null(value=True)
        )
        .select(*key, start_ns="free_ns", end_ns="start_ns")
    )
    return as_host_delays(gaps.join(place, on=key), ops)


def as_host_delays(gaps: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """`gaps` as ops like `ops`, of no microbatch or chunk."""
    none = {name: pl.lit(None, ops.schema[name]) for name in ("microbatch", "chunk")}
    return gaps.with_columns(kind=pl.lit(str(OpKind.HOST_DELAY)), **none)
