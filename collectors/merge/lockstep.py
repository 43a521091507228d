"""Measure how long the ranks of a worker waited for each other: tensor- and context-parallel ranks run in lockstep.

In: records of all ranks, ns on one clock, and the ops of the rank that represents each worker. Out: for each op, how
long each rank of the worker waited inside it for the last one; and for each kind of op, how long each rank took for it.
The ranks of a worker meet in collectives many times per op, so all of them take equally long, whichever rank is slow.
Only their waits for each other show which one it is. Between such ops, each rank works independently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.collectors.merge.collective_ops import all_there_ns, counted_alike
from tracekit.collectors.merge.placement import MeshPlace, Placement
from tracekit.trace.model import OpKind
from tracekit.trace.schema import LASTED, WAITED

_WORKER = ("step", "dp_rank", "pp_rank")


def ranks_of_workers(placement: Placement) -> dict[int, list[int]]:
    """The rank that represents a worker -> all its ranks, ascending; workers with one rank are left out."""
    workers: dict[tuple[int, int], list[int]] = {}
    for rank, place in sorted(placement.places.items()):
        workers.setdefault((place.dp, place.pp), []).append(rank)
    return {
        next(rank for rank in ranks if stands_for_worker(placement.places[rank])): ranks
        for ranks in workers.values()
        if len(ranks) > 1 and any(stands_for_worker(placement.places[rank]) for rank in ranks)
    }


def positions(members: Mapping[int, Sequence[int]]) -> pl.DataFrame:
    """`members` as a table: `stands`, the rank that represents the worker, `rank` and its `position` in the worker."""
    rows = [(stands, rank, at) for stands, ranks in members.items() for at, rank in enumerate(ranks)]
    return pl.DataFrame(rows, {"stands": pl.Int32, "rank": pl.Int32, "position": pl.Int64}, orient="row")


def stands_for_worker(place: MeshPlace) -> bool:
    """True if the ops of a rank count as those of its worker."""
    return place.tp == place.cp == 0


def with_waits_for_peers(
    ops: pl.DataFrame,
    records: pl.DataFrame,
    groups: pl.DataFrame,
    placement: Placement,
    step_starts_ns: Mapping[int, int],
) -> pl.DataFrame:
    """Add `waited` to `ops` in canonical columns; unchanged if all ranks of a worker never met, or it has only one.

    `groups`: `within_worker` is true for process groups that have ranks of one worker only.
    """
    members = ranks_of_workers(placement)
    if not members:
        return ops
    waits = _meetings(records, groups)
    size = max(map(len, members.values()))
    # Without all ranks of the worker, the last one to arrive is unknown.
    waits = waits.filter(pl.col("ranks") == size)
    if waits.is_empty():
        return ops
    steps = pl.DataFrame(
        {"step": list(step_starts_ns), "step_ns": list(step_starts_ns.values())},
        {"step": waits.schema["step"], "step_ns": pl.Int64},
    )
    waits = waits.join(positions(members), on="rank").join(steps, on="step")
    # The op inside which the rank that represents the worker met the others.
    met = waits.filter(pl.col("rank") == pl.col("stands")).select(
        "step", "instance", rank="stands", met=(pl.col("start_ns") - pl.col("step_ns")) / 1e9
    )
    numbered = ops.with_row_index("op")
    inside = (
        met.sort("met")
        .join_asof(
            numbered.select("op", "step", "rank", "start", end=pl.col("start") + pl.col("duration")).sort("start"),
            left_on="met",
            right_on="start",
            by=["step", "rank"],
            check_sortedness=False,
        )
        .filter(pl.col("met") < pl.col("end"))
    )
    of_op = (
        waits.join(inside.select("step", "instance", "op"), on=["step", "instance"])
        .group_by("op", "position")
        .agg(pl.col("waited_ns").sum() / 1e9)
        .sort("op", "position")
        .group_by("op", maintain_order=True)
        .agg(pl.col("waited_ns").alias(WAITED))
        .filter(pl.col(WAITED).list.len() == size)
    )
    return numbered.join(of_op, on="op", how="left", maintain_order="left").drop("op")


def with_work_of_ranks(ops: pl.DataFrame, of_ranks: pl.DataFrame, placement: Placement) -> pl.DataFrame:
    """Add `lasted` to `ops` in canonical columns, on the first op of each kind in a worker's step.

    `of_ranks`: the ops of all ranks (`step`, `rank`, `kind`, `start_ns`, `end_ns`). A step that one
    rank of the worker lacks gets none. If ranks of a worker collect garbage but its representative does not, the worker
    gets an op of no length at the start of the step, to hold their times.
    """
    members = ranks_of_workers(placement)
    places = positions(members)
    size = max(map(len, members.values()))
    took = of_ranks.group_by("step", "rank", "kind").agg(took=(pl.col("end_ns") - pl.col("start_ns")).sum() / 1e9)
    took = took.join(places, on="rank")
    whole = took.group_by("step", "stands").agg(ranks=pl.col("rank").n_unique()).filter(pl.col("ranks") == size)
    grid = took.select("step", "stands", "kind").unique().join(whole, on=["step", "stands"])
    lasted = (
        grid.join(places, on="stands")
        .join(took, on=["step", "stands", "rank", "position", "kind"], how="left")
        .sort("step", "stands", "kind", "position")
        .group_by("step", "stands", "kind", maintain_order=True)
        .agg(pl.col("took").fill_null(0.0).alias(LASTED))
        .select("step", "kind", LASTED, rank="stands", seq=pl.lit(0, ops.schema["seq"]))
    )
    collects = lasted.filter(kind=str(OpKind.GC)).join(ops, on=["step", "rank", "kind"], how="anti")
    firsts = ops.sort("start").group_by("step", "rank").agg(pl.col("dp_rank", "pp_rank", "start").first())
    silent = collects.drop(LASTED).join(firsts, on=["step", "rank"]).with_columns(duration=pl.lit(0.0))
    ops = pl.concat([ops, silent], how="diagonal")
    return ops.join(lasted, on=["step", "rank", "kind", "seq"], how="left", maintain_order="left")


def _meetings(records: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Collectives in which ranks of one worker meet: `instance`, its number of `ranks`, `waited_ns` of each rank."""
    within = groups.filter("within_worker")
    collectives = records.filter(pl.col("category") == "collective").join(within, on=["rank", "peer"])
    collectives = collectives.filter(counted_alike())
    key = ["step", "members", "name", "number"]
    numbered = collectives.with_columns(
        number=pl.col("start_ns").rank("ordinal").over("rank", "step", "members", "name"),
        waited_ns=all_there_ns() - pl.col("start_ns"),
    )
    return numbered.with_columns(
        ranks=pl.len().over(key), instance=pl.struct("members", "name", "number").rank("dense")
    )
