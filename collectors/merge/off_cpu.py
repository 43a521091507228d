"""Time in which a training thread should have worked, and neither ran nor was ready to.

In: the canonical ops of a recording, and its records of steps, with the times that the kernel counted. Out: the ops
with the column `OFF_CPU`. A process that is stopped (by SIGSTOP, a debugger, a frozen cgroup) or waits for memory or
a file shows here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.model import OpKind
from tracekit.schema import LASTED, OFF_CPU, WAITED

#: Ops in which the thread has no reason to wait. Where it also ran in other ops, it was off the CPU for longer.
_OWN = (
    OpKind.FORWARD_COMPUTE,
    OpKind.BACKWARD_COMPUTE,
    OpKind.BACKWARD_WEIGHT,
    OpKind.LOSS,
    OpKind.OPTIMIZER,
    OpKind.GC,
    OpKind.HOST_DELAY,
)


def with_off_cpu(ops: pl.DataFrame, records: pl.DataFrame, members: Mapping[int, Sequence[int]]) -> pl.DataFrame:
    """`ops` with `OFF_CPU`, seconds, on the first op of each worker's step; as they are if nothing is known.

    `records`: those of whole steps, with `peer` and `chunk` as the wire format says. `members`: as `ranks_of_workers`.
    A step of which one rank of a worker says nothing gets none.
    """
    steps = records.filter((pl.col("category") == "step") & (pl.col("peer") >= 0) & (pl.col("chunk") >= 0))
    active_us = pl.col("peer") + pl.col("chunk").cast(pl.Int64)
    counted = steps.group_by("step", "rank").agg(active_s=active_us.sum() / 1e6)
    off = pl.col("own_s") - pl.col("active_s")
    known = (
        _own_s(ops, members)
        .join(counted, left_on=["step", "member"], right_on=["step", "rank"], how="left")
        .sort("step", "rank", "position")
        .group_by("step", "rank", maintain_order=True)
        .agg(off.clip(0).alias(OFF_CPU))
        .filter(pl.col(OFF_CPU).list.eval(pl.element().is_not_null()).list.all())
    )
    if known.is_empty():
        return ops
    joined = ops.join(known, on=["step", "rank"], how="left", maintain_order="left")
    first = pl.int_range(pl.len()).over("step", "rank") == 0
    return joined.with_columns(pl.when(first).then(OFF_CPU).alias(OFF_CPU))


def _own_s(ops: pl.DataFrame, members: Mapping[int, Sequence[int]]) -> pl.DataFrame:
    """What each rank's own ops of a step lasted: `step`, `rank` (of the worker), `position`, `member`, `own_s`."""
    own = ops.filter(pl.col("kind").cast(pl.String).is_in([str(kind) for kind in _OWN]))
    alone = (
        own.filter(~pl.col("rank").is_in(list(members))).group_by("step", "rank").agg(own_s=pl.col("duration").sum())
    )
    alone = alone.select("step", "rank", "own_s", member="rank", position=pl.lit(0, pl.Int64))
    if not members or LASTED not in ops.columns:
        return alone
    places = pl.DataFrame(
        [(stands, rank, at) for stands, ranks in members.items() for at, rank in enumerate(ranks)],
        {"rank": own.schema["rank"], "member": own.schema["rank"], "position": pl.Int64},
        orient="row",
    )
    # Without what a rank waits for the others inside them.
    lasted, waited = (_of_positions(own, name) for name in (LASTED, WAITED))
    each = pl.concat([lasted, waited.with_columns(own_s=-pl.col("own_s"))])
    summed = each.group_by("step", "rank", "position").agg(pl.col("own_s").sum())
    together = summed.join(lasted.select("step", "rank").unique(), on=["step", "rank"], how="semi")
    return pl.concat([alone, together.join(places, on=["rank", "position"]).select(alone.columns)])


def _of_positions(ops: pl.DataFrame, name: str) -> pl.DataFrame:
    """The column of lists by rank: `step`, `rank`, `position`, `own_s`."""
    known = ops.filter(pl.col(name).list.len() > 0)
    position = pl.int_ranges(pl.col(name).list.len(), dtype=pl.Int64)
    return known.select("step", "rank", position=position, own_s=name).explode("position", "own_s")
