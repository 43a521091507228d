"""Time in which a training thread should have worked, and neither ran nor was ready to.

In: the canonical ops of a recording, and its records of steps, with the times that the kernel counted. Out: the ops
with the column `OFF_CPU`. A process that is stopped (by SIGSTOP, a debugger, a frozen cgroup) or waits for memory or
a file shows here and nowhere else.
"""

from __future__ import annotations

import polars as pl

from tracekit.model import OpKind
from tracekit.schema import OFF_CPU

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


def with_off_cpu(ops: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """`ops` with `OFF_CPU`, seconds, on the first op of each worker's step; as they are if nothing is known.

    `records`: those of whole steps, with `peer` and `chunk` as the wire format says.
    """
    steps = records.filter((pl.col("category") == "step") & (pl.col("peer") >= 0) & (pl.col("chunk") >= 0))
    if steps.is_empty():
        return ops
    key = ["step", "rank"]
    counted = steps.group_by(key).agg(active_s=(pl.col("peer") + pl.col("chunk").cast(pl.Int64)).sum() / 1e6)
    own = ops.filter(pl.col("kind").cast(pl.String).is_in([str(kind) for kind in _OWN]))
    worked = own.group_by(key).agg(own_s=pl.col("duration").sum())
    known = worked.join(counted, on=key).select(*key, (pl.col("own_s") - pl.col("active_s")).clip(0).alias(OFF_CPU))
    first = pl.int_range(pl.len()).over(key) == 0
    joined = ops.join(known, on=key, how="left", maintain_order="left")
    return joined.with_columns(pl.when(first).then(OFF_CPU).alias(OFF_CPU))
