"""Time that ranks of a worker waited for each other, and time in which a training thread should have worked but did
not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.collectors.merge.collective_ops import ALIKE, all_there_ns, counted_alike
from tracekit.collectors.merge.placement import MeshPlace, Placement
from tracekit.trace.model import OpKind
from tracekit.trace.schema import LASTED, OFF_CPU, QUEUED, WAITED


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
    rows = [(stands, rank, index) for stands, ranks in members.items() for index, rank in enumerate(ranks)]
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

    The ranks of a worker meet in collectives many times per op, so all take equally long, whichever is slow: only their
    waits for each other tell.
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
    meetings = waits.filter(pl.col("rank") == pl.col("stands")).select(
        "step", "instance", rank="stands", met=(pl.col("start_ns") - pl.col("step_ns")) / 1e9
    )
    numbered = ops.with_row_index("op")
    inside = (
        meetings.sort("met")
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


#: Assume that at least this share of a rank's steps are quiet: the rank neither stops nor runs longer than usual in
#: other ops.
QUIET_SHARE = 0.25
#: Time in other ops may vary by this many times the distance between a quiet step and the median one.
VARIATIONS = 3.0
#: Delays after the first rank to leave a collective are usual up to this quantile: threads wake up late.
COMMON_SHARE = 0.9
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


def with_thread_waits(
    ops: pl.DataFrame, records: pl.DataFrame, groups: pl.DataFrame, members: Mapping[int, Sequence[int]]
) -> pl.DataFrame:
    """Add `OFF_CPU` and `QUEUED`, seconds, to the first op of each worker's step; neither if nothing is known of it.

    A thread is queued if it was ready without a processor; off the CPU if it was not ready, as one that is stopped, or
    that waits for memory or a file.
    `records`: those of whole steps, with `peer` and `chunk` as in the wire format. `groups`: `within_worker` is true
    for process groups that have ranks of one worker only. `members`: as returned by `ranks_of_workers`. A worker's step
    gets none if the time of one of its ranks is unknown.
    """
    steps = records.filter((pl.col("category") == "step") & (pl.col("peer") >= 0) & (pl.col("chunk") >= 0))
    if steps.is_empty():
        return ops
    counted = steps.group_by("step", "rank").agg(
        ran_s=pl.col("chunk").cast(pl.Int64).sum() / 1e6, queued_s=pl.col("peer").sum() / 1e6
    )
    # The thread also runs in other ops, such as data loading: usually for this long (negative). By how much that varies
    # is no time off the CPU, unless the thread was active in the whole step for less time than its own ops lasted.
    idle = pl.col("own_s") - pl.col("ran_s")
    off = idle - pl.col("queued_s")
    elsewhere, ran_elsewhere = (
        counter.quantile(QUIET_SHARE, "lower").over("rank", "position").clip(upper_bound=0) for counter in (off, idle)
    )
    varies = VARIATIONS * (off.median().over("rank", "position") - elsewhere)
    uncertain = (off <= 0) & (off - elsewhere <= varies)
    # The thread also waits for a processor after collectives, and in what is not its own.
    queued = pl.min_horizontal("queued_s", (idle - ran_elsewhere).clip(0))
    off_cpu = (
        _own_s(ops, _together_s(records, groups), members)
        .join(counted, left_on=["step", "member"], right_on=["step", "rank"], how="left")
        .with_columns(
            pl.when(uncertain).then(0.0).otherwise((off - elsewhere).clip(0)).alias(OFF_CPU),
            pl.when(pl.col("queued_s").is_not_null()).then(queued).alias(QUEUED),
        )
        .sort("step", "rank", "position")
        .group_by("step", "rank", maintain_order=True)
        .agg(OFF_CPU, QUEUED)
        .filter(pl.col(OFF_CPU).list.eval(pl.element().is_not_null()).list.all())
    )
    if off_cpu.is_empty():
        return ops
    joined = ops.join(off_cpu, on=["step", "rank"], how="left", maintain_order="left")
    first = pl.int_range(pl.len()).over("step", "rank") == 0
    return joined.with_columns(pl.when(first).then(name).alias(name) for name in (OFF_CPU, QUEUED))


def _together_s(records: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Time that each rank had reason to wait in collectives of its worker, seconds: `step`, `member`, `own_s`.

    This time ends when all ranks have arrived and the first has left, plus the usual delay. A thread that is still
    inside then was stopped there. Time that all ranks spend inside may be due to the network and counts for none.
    """
    within = records.filter(pl.col("category") == "collective").join(
        groups.filter("within_worker"), on=["rank", "peer"]
    )
    number = pl.col("start_ns").rank("ordinal").over("rank", *ALIKE)
    meetings = within.with_columns(
        alike=counted_alike(), there_ns=all_there_ns(), first_left_ns=pl.col("end_ns").min().over(*ALIKE, number)
    )
    left_ns = pl.when("alike").then(pl.max_horizontal("there_ns", "first_left_ns")).otherwise("end_ns")
    behind = meetings.with_columns(left_ns=left_ns).with_columns(behind_ns=pl.col("end_ns") - pl.col("left_ns"))
    usual_ns = pl.col("behind_ns").quantile(COMMON_SHARE, "lower").over("members", "name")
    stays_ns = pl.min_horizontal("end_ns", pl.col("left_ns") + usual_ns) - pl.col("start_ns")
    stays = behind.with_columns(stays_ns=stays_ns)
    return stays.group_by("step", member="rank").agg(own_s=pl.col("stays_ns").sum() / 1e9)


def _own_s(ops: pl.DataFrame, together_s: pl.DataFrame, members: Mapping[int, Sequence[int]]) -> pl.DataFrame:
    """Duration of each rank's own ops of a step, without the collectives of its worker inside them: `step`, `rank` (of
    the worker), `position`, `member`, `own_s`.
    """
    own = ops.filter(pl.col("kind").cast(pl.String).is_in([str(kind) for kind in _OWN]))
    alone = (
        own.filter(~pl.col("rank").is_in(list(members))).group_by("step", "rank").agg(own_s=pl.col("duration").sum())
    )
    alone = alone.select("step", "rank", "own_s", member="rank", position=pl.lit(0, pl.Int64))
    if not members or LASTED not in ops.columns:
        return alone
    places = (
        positions(members)
        .select("position", rank="stands", member="rank")
        .cast(dict.fromkeys(("rank", "member"), own.schema["rank"]))
    )
    measured = own.filter(pl.col(LASTED).list.len() > 0)
    position = pl.int_ranges(pl.col(LASTED).list.len(), dtype=pl.Int64)
    lasted = measured.select("step", "rank", position=position, own_s=LASTED).explode("position", "own_s")
    alike = ["step", "rank", "position"]
    worked = lasted.group_by(alike).agg(pl.col("own_s").sum()).join(places, on=["rank", "position"])
    inside = worked.join(together_s, on=["step", "member"], how="left", suffix="_inside")
    own_ops = inside.with_columns(own_s=pl.col("own_s") - pl.col("own_s_inside").fill_null(0.0))
    return pl.concat([alone, own_ops.select(alone.columns)])
