"""Time in which a training thread should have worked, and neither ran nor was ready to.

In: the canonical ops of a recording, and its records of steps, with the times that the kernel counted. Out: the ops
with the column `OFF_CPU`. A process that is stopped (by SIGSTOP, a debugger, a frozen cgroup) or waits for memory or
a file shows here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.model import OpKind
from tracekit.schema import LASTED, OFF_CPU

#: At least this share of a rank's steps are quiet: it neither stops nor runs longer than usual in other ops.
QUIET_SHARE = 0.25
#: Ops in which the thread has no reason to wait.
_OWN = (
    OpKind.FORWARD_COMPUTE,
    OpKind.BACKWARD_COMPUTE,
    OpKind.BACKWARD_WEIGHT,
    OpKind.LOSS,
    OpKind.OPTIMIZER,
    OpKind.GC,
    OpKind.HOST_DELAY,
)


def with_off_cpu(
    ops: pl.DataFrame, records: pl.DataFrame, groups: pl.DataFrame, members: Mapping[int, Sequence[int]]
) -> pl.DataFrame:
    """`ops` with `OFF_CPU`, seconds, on the first op of each worker's step; as they are if nothing is known.

    `records`: those of whole steps, with `peer` and `chunk` as the wire format says. `groups`: `within_worker`
    tells which process groups have ranks of one worker only. `members`: as `ranks_of_workers`. A step of which one rank
    of a worker says nothing gets none.
    """
    steps = records.filter((pl.col("category") == "step") & (pl.col("peer") >= 0) & (pl.col("chunk") >= 0))
    active_us = pl.col("peer") + pl.col("chunk").cast(pl.Int64)
    counted = steps.group_by("step", "rank").agg(active_s=active_us.sum() / 1e6)
    off = pl.col("own_s") - pl.col("active_s")
    # It also runs in other ops, such as loading data: usually for so long.
    elsewhere = off.quantile(QUIET_SHARE, "lower").over("rank", "position").clip(upper_bound=0)
    known = (
        _own_s(ops, _together_s(records, groups), members)
        .join(counted, left_on=["step", "member"], right_on=["step", "rank"], how="left")
        .with_columns((off - elsewhere).clip(0).alias(OFF_CPU))
        .sort("step", "rank", "position")
        .group_by("step", "rank", maintain_order=True)
        .agg(pl.col(OFF_CPU))
        .filter(pl.col(OFF_CPU).list.eval(pl.element().is_not_null()).list.all())
    )
    if known.is_empty():
        return ops
    joined = ops.join(known, on=["step", "rank"], how="left", maintain_order="left")
    first = pl.int_range(pl.len()).over("step", "rank") == 0
    return joined.with_columns(pl.when(first).then(OFF_CPU).alias(OFF_CPU))


def _together_s(records: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """How long each rank was in collectives of its worker: `step`, `member`, `own_s`."""
    within = records.filter(pl.col("category") == "collective").join(
        groups.filter("within_worker"), on=["rank", "peer"]
    )
    lasted_s = (pl.col("end_ns") - pl.col("start_ns")).sum() / 1e9
    return within.group_by("step", member="rank").agg(own_s=lasted_s)


def _own_s(ops: pl.DataFrame, together_s: pl.DataFrame, members: Mapping[int, Sequence[int]]) -> pl.DataFrame:
    """What each rank's own ops of a step lasted without what ranks of a worker do together inside them: `step`, `rank`
    (of the worker), `position`, `member`, `own_s`.
    """
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
    told = own.filter(pl.col(LASTED).list.len() > 0)
    position = pl.int_ranges(pl.col(LASTED).list.len(), dtype=pl.Int64)
    lasted = told.select("step", "rank", position=position, own_s=LASTED).explode("position", "own_s")
    alike = ["step", "rank", "position"]
    worked = lasted.group_by(alike).agg(pl.col("own_s").sum()).join(places, on=["rank", "position"])
    inside = worked.join(together_s, on=["step", "member"], how="left", suffix="_inside")
    apart = inside.with_columns(own_s=pl.col("own_s") - pl.col("own_s_inside").fill_null(0.0))
    return pl.concat([alone, apart.select(alone.columns)])
