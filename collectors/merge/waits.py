"""Split computes that wait for collectives in their middle, such as FSDP's all-gathers of parameters.

In: ops, and the waits inside them. Out: ops in which such a compute becomes three: its work up to the last wait, all
its waits as one collective, and its work after the last wait. The ranks of a collective leave it together, so one rank
waits as long as another is late. If the waits stayed inside the compute, one slow rank would make all ranks look slow.

The positions of the earlier waits are lost. All waits join the same ranks, so the rank that works longest up to the
last wait has waited least. The time left after all ranks have done their work is the transfer.
"""

from __future__ import annotations

import polars as pl

from tracekit.trace.model import OpKind
from tracekit.trace.schema import RECEIVED, ROWS_TYPE, SENT

_COLLECTIVES = {
    str(OpKind.FORWARD_COMPUTE): str(OpKind.FORWARD_COLLECTIVES),
    str(OpKind.LOSS): str(OpKind.FORWARD_COLLECTIVES),
    str(OpKind.EVALUATION): str(OpKind.FORWARD_COLLECTIVES),
    str(OpKind.BACKWARD_COMPUTE): str(OpKind.BACKWARD_COLLECTIVES),
}
_BETWEEN = ("at_ns", "until_ns")


def with_waits_apart(ops: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Split the computes of `ops` that contain `waits` (rank, start_ns, end_ns). Not for jobs with a pipeline.

    In a pipeline, a recv belongs to one compute; the collectives between the parts of the compute would come between
    the two.
    """
    is_compute = pl.col("kind").is_in(list(_COLLECTIVES))
    computes = ops.filter(is_compute).with_row_index("compute")
    waited = _waited(computes, waits)
    if waited.is_empty():
        return ops
    split = computes.join(waited, on="compute", how="left")
    whole = split.filter(pl.col("waited_ns").is_null())
    cut = split.filter(pl.col("waited_ns") > 0)
    worked_ns = pl.col("last_ns") - pl.col("waited_ns")
    parts = (
        whole,
        cut.with_columns(end_ns=worked_ns),
        cut.with_columns(kind=pl.col("kind").replace(_COLLECTIVES), start_ns=worked_ns, end_ns="last_ns"),
        cut.with_columns(start_ns="last_ns"),
    )
    return pl.concat([ops.filter(~is_compute), *(part.select(ops.columns) for part in parts)])


def with_exchanges_apart(ops: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Split the computes of `ops` at each all-to-all that they wait for: `waits` (rank, start_ns, end_ns).

    So it stays known which rank waited in which of them.
    """
    is_compute = pl.col("kind").is_in(list(_COLLECTIVES))
    computes = ops.filter(is_compute).with_row_index("compute")
    hosts = computes.select("rank", "compute", "start_ns", host_end_ns="end_ns").sort("start_ns")
    placed = (
        waits.sort("start_ns")
        .join_asof(hosts, on="start_ns", by="rank", check_sortedness=False)
        .filter(pl.col("start_ns") < pl.col("host_end_ns"))
        .select("compute", "start_ns", end_ns=pl.min_horizontal("end_ns", "host_end_ns"))
    )
    if placed.is_empty():
        return ops
    whole = computes.drop("start_ns", "end_ns")
    before = placed.select("compute", at_ns="end_ns", until_ns="start_ns")
    own = computes.select("compute", at_ns="start_ns", until_ns="end_ns")
    worked = (  # from each end to the next begin
        pl.concat([own, before])
        .with_columns(pl.col(name).sort().over("compute", mapping_strategy="group_to_rows") for name in _BETWEEN)
        .with_columns(start_ns="at_ns", end_ns=pl.max_horizontal(_BETWEEN))
        .join(whole, on="compute")
    )
    apart = placed.join(whole, on="compute").with_columns(kind=pl.col("kind").replace(_COLLECTIVES))
    return pl.concat([ops.filter(~is_compute), worked.select(ops.columns), apart.select(ops.columns)])


def with_rows(ops: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Add to all-to-alls the rows that they move: `waits` (rank, start_ns, and sent, received if ranks wrote them).

    An empty list if they were not recorded; none without waits.
    """
    if waits.is_empty():
        return ops
    none = pl.lit([], ROWS_TYPE)
    rows = (pl.col(name).fill_null(none) if name in waits.columns else none.alias(name) for name in (SENT, RECEIVED))
    moved = waits.select("rank", "start_ns", *rows).unique(["rank", "start_ns"])
    waited = pl.col("kind").is_in([*_COLLECTIVES.values()])
    joined = ops.join(moved, on=["rank", "start_ns"], how="left", maintain_order="left")
    return joined.with_columns(pl.when(waited).then(name).alias(name) for name in (SENT, RECEIVED))


def shorter_by_waits(ops: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Subtract `waits` (rank, start_ns, end_ns), such as those for weights that other ranks update, from optimizers."""
    is_optimizer = pl.col("kind") == str(OpKind.OPTIMIZER)
    optimizers = ops.filter(is_optimizer).with_row_index("compute")
    shorter = optimizers.join(_waited(optimizers, waits), on="compute", how="left")
    shorter = shorter.with_columns(end_ns=pl.col("end_ns") - pl.col("waited_ns").fill_null(0))
    return pl.concat([ops.filter(~is_optimizer), shorter.select(ops.columns)])


def without_meetings(gaps: pl.DataFrame, meetings: pl.DataFrame) -> pl.DataFrame:
    """The parts of `gaps` in which a rank did not wait for others: those between its `meetings`.

    `gaps`: ops that do not overlap on a rank. `meetings` (rank, wait_ns, released_ns): when a rank entered a
    collective, and when the last rank did.
    """
    placed = (
        meetings.filter(pl.col("released_ns") > pl.col("wait_ns"))
        .sort("wait_ns")
        .join_asof(gaps.sort("start_ns"), left_on="wait_ns", right_on="start_ns", by="rank", check_sortedness=False)
        .filter(pl.col("wait_ns") < pl.col("end_ns"))
    )
    begins = gaps.with_columns(wait_ns="start_ns", released_ns="start_ns")
    parts = (
        pl.concat([begins, placed.select(begins.columns)])
        .sort("rank", "wait_ns", "released_ns")
        .with_columns(
            free_ns=pl.col("released_ns").cum_max().over("rank"),
            busy_ns=pl.min_horizontal("end_ns", pl.col("wait_ns").shift(-1).over("rank")).fill_null(pl.col("end_ns")),
        )
        .filter(pl.col("free_ns") < pl.col("busy_ns"))
    )
    return parts.with_columns(start_ns="free_ns", end_ns="busy_ns").select(gaps.columns)


def _waited(computes: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """For each compute that waited: its total wait, and when its last wait ended, ns."""
    hosts = computes.select("rank", "compute", "start_ns", host_end_ns="end_ns").sort("start_ns")
    placed = (
        waits.sort("start_ns")
        .join_asof(hosts, on="start_ns", by="rank", check_sortedness=False)
        .filter(pl.col("start_ns") < pl.col("host_end_ns"))
        .with_columns(end_ns=pl.min_horizontal("end_ns", "host_end_ns"))
        # A wait may lie inside another one: the wait for a `Work` inside FSDP's own wait. Count the time once.
        .with_columns(before_ns=pl.col("end_ns").cum_max().shift(1).over("compute").fill_null(0))
        .with_columns(length_ns=pl.col("end_ns") - pl.max_horizontal("start_ns", "before_ns"))
    )
    return (
        placed.group_by("compute")
        .agg(waited_ns=pl.col("length_ns").clip(0).sum(), last_ns=pl.col("end_ns").max())
        .filter(pl.col("waited_ns") > 0)
    )
