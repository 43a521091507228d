"""What collectives become: ops of their own, parts of the computes around them, or time without a kind.

In: records of collectives and computes, ns on one clock, and which rank is in which process group. Out: the collectives
with their kind, where the graph knows one, and ops fitted to them: computes that end where the gradients' reduction
begins and that do not count the waiting inside, reductions that overlap joined into one.
"""

from __future__ import annotations

import polars as pl

from tracekit.collectors.device_ops import ON_DEVICE
from tracekit.collectors.runtime.words import Flag
from tracekit.model import OpKind

COMPUTES = (str(OpKind.FORWARD_COMPUTE), str(OpKind.BACKWARD_COMPUTE))
#: What collectives and collections of garbage that start inside it belong to.
HOSTS = (*COMPUTES, str(OpKind.DATA_LOAD), str(OpKind.CHECKPOINT))
REDUCTIONS = (str(OpKind.ALL_REDUCE), str(OpKind.GRADS_REDUCE_SCATTER))
CLIP = str(OpKind.OPTIMIZER_CLIP_MAIN_GRAD)
OP_COLUMNS = ("step", "rank", "dp_rank", "pp_rank", "kind", "microbatch", "chunk", "start_ns", "end_ns")
_ALL_TO_ALL = pl.col("name").str.contains("alltoall") | pl.col("name").str.contains("all_to_all")


def mark_nested(records: pl.DataFrame, direct: pl.DataFrame) -> pl.DataFrame:
    """`nested`: the record starts inside a compute, data fetch or checkpoint of its rank, which `host_kind` names."""
    hosts = direct.filter(pl.col("kind").is_in(HOSTS)).select(
        "rank", "start_ns", host_end_ns="end_ns", host_kind="kind"
    )
    hosts = hosts.sort("start_ns")
    marked = records.sort("start_ns").join_asof(hosts, on="start_ns", by="rank", check_sortedness=False)
    return marked.with_columns(nested=(pl.col("start_ns") < pl.col("host_end_ns")).fill_null(value=False))


def classify_collectives(collectives: pl.DataFrame, groups: pl.DataFrame, direct: pl.DataFrame) -> pl.DataFrame:
    """Collectives with the kind the graph knows, null where it knows none; reductions are never `nested`.

    Gradients are reduced from the step's last backward on; parameters are gathered before the chunk's first forward.
    What model-parallel ranks reduce between the last backward and the optimizer is the norm of the gradients.
    """
    computes = direct.filter(pl.col("kind").is_in(COMPUTES))
    optimizers = direct.filter(pl.col("kind") == str(OpKind.OPTIMIZER))
    marked = mark_nested(collectives, direct).join(groups, on=["rank", "peer"], how="left", maintain_order="left")
    marked = marked.with_columns(all_there_ns=_all_there_ns())
    of_step = computes.group_by("rank", "step").agg(last_ns=pl.col("start_ns").max())
    of_step = of_step.join(
        optimizers.group_by("rank", "step").agg(optimizer_ns=pl.col("start_ns").min()), on=["rank", "step"], how="left"
    )
    forwards = (
        computes.filter(pl.col("kind") == "forward-compute")
        .group_by("rank", "step", "chunk")
        .agg(pl.col("start_ns").min())
        .select("rank", "step", "start_ns", next_chunk="chunk")
        .sort("start_ns")
    )
    marked = (
        marked.join(of_step, on=["rank", "step"], how="left")
        .sort("start_ns")
        .join_asof(forwards, on="start_ns", by=["rank", "step"], strategy="forward", check_sortedness=False)
    )
    name = pl.col("name")
    after_computes = pl.col("start_ns") >= pl.col("last_ns")
    before_chunk = pl.col("next_chunk").is_not_null() & ~pl.col("nested")
    reduces = (name.str.starts_with("allreduce") | name.str.starts_with("all_reduce")) & after_computes
    kind = (
        pl.when(reduces)
        .then(pl.lit(str(OpKind.ALL_REDUCE)))
        .when(name.str.contains("reduce_scatter") & after_computes)
        .then(pl.lit(str(OpKind.GRADS_REDUCE_SCATTER)))
        .when((name.str.contains("all_gather") | name.str.contains("allgather")) & before_chunk)
        .then(pl.lit(str(OpKind.PARAMS_ALL_GATHER)))
        .when(_ALL_TO_ALL & ~pl.col("nested"))
        .then(pl.lit(str(OpKind.ALL_TO_ALL)))
    )
    data_parallel = pl.col("data_parallel").fill_null(value=False) | _ALL_TO_ALL
    of_norm = reduces & ~pl.col("nested") & (pl.col("start_ns") < pl.col("optimizer_ns")) & (pl.col("size") > 1)
    of_host = pl.col("nested") & ~pl.col("host_kind").is_in(COMPUTES)
    known = pl.when(data_parallel).then(kind).otherwise(pl.when(of_norm).then(pl.lit(CLIP)))
    marked = marked.with_columns(kind=pl.when(~of_host).then(known))
    gather = pl.col("kind") == str(OpKind.PARAMS_ALL_GATHER)
    own_name = name + pl.lit("@") + pl.col("group").fill_null("?")
    return marked.with_columns(
        nested=pl.col("nested") & pl.col("kind").is_null(),
        chunk=pl.when(gather).then(pl.col("next_chunk")),
        microbatch=pl.lit(None, pl.Int32),
        name=own_name,
    )


def _all_there_ns() -> pl.Expr:
    """When the last rank of a data-parallel group began the collective, and the wait for it was over.

    The k-th of a step and name is the same collective on all ranks that counted as many.
    """
    alike = ["step", "members", "name"]
    number = pl.col("start_ns").rank("ordinal").over("rank", *alike)
    counted = pl.len().over("rank", *alike)
    is_same = pl.col("data_parallel") & (counted.n_unique().over(alike) == 1)
    last_ns = pl.min_horizontal("end_ns", pl.col("start_ns").max().over(*alike, number))
    return pl.when(is_same).then(last_ns).otherwise("start_ns")


def cut_last_computes(ops: pl.DataFrame) -> pl.DataFrame:
    """End a step's last compute where the last reduction inside it starts; move the others behind that point."""
    compute = pl.col("kind").is_in(COMPUTES)
    reduction = pl.col("kind").is_in(REDUCTIONS)
    last = (
        ops.filter(compute)
        .group_by("rank", "step")
        .agg(pl.col("start_ns").max().alias("last_start_ns"), pl.col("end_ns").max().alias("last_end_ns"))
    )
    cuts = (
        ops.filter(reduction)
        .join(last, on=["rank", "step"])
        .filter(pl.col("start_ns").is_between("last_start_ns", "last_end_ns"))
        .group_by("rank", "step", "last_start_ns")
        .agg(cut_ns=pl.col("start_ns").max())
    )
    joined = ops.join(cuts, on=["rank", "step"], how="left")
    is_cut = compute & (pl.col("start_ns") == pl.col("last_start_ns"))
    start_ns = pl.when(reduction).then(pl.max_horizontal("start_ns", "cut_ns")).otherwise(pl.col("start_ns"))
    end_ns = (
        pl.when(is_cut)
        .then(pl.min_horizontal("end_ns", "cut_ns"))
        .when(reduction)
        .then(pl.max_horizontal("end_ns", "cut_ns"))
        .otherwise(pl.col("end_ns"))
    )
    return joined.with_columns(start_ns=start_ns, end_ns=end_ns).select(OP_COLUMNS)


def without_waits(ops: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Computes and the like as long as they would have been without waiting inside for ranks that came later.

    What a GPU's streams waited for is not known: what was timed there stays as it is.
    """
    host = pl.col("kind").is_in(HOSTS)
    blocking = ((pl.col("flags") & int(Flag.BLOCKING)) != 0) & ~ON_DEVICE
    waits = collectives.filter(blocking).select(
        "rank", wait_start_ns="start_ns", waited_ns=pl.col("all_there_ns") - pl.col("start_ns")
    )
    hosts = ops.filter(host).select("rank", "start_ns", "end_ns").sort("start_ns")
    waited = (
        waits.sort("wait_start_ns")
        .join_asof(hosts, left_on="wait_start_ns", right_on="start_ns", by="rank", check_sortedness=False)
        .filter(pl.col("wait_start_ns") < pl.col("end_ns"))
        .group_by("rank", "start_ns")
        .agg(pl.col("waited_ns").sum())
    )
    joined = ops.join(waited, on=["rank", "start_ns"], how="left")
    shorter_ns = pl.col("end_ns") - pl.when(host).then("waited_ns").fill_null(0)
    return joined.with_columns(end_ns=pl.max_horizontal("start_ns", shorter_ns)).select(OP_COLUMNS)


def with_one_clip(ops: pl.DataFrame) -> pl.DataFrame:
    """All that reduces the norm of the gradients, in parts and over several groups, is one op of a worker's step."""
    is_clip = pl.col("kind") == CLIP
    whole = (
        ops.filter(is_clip)
        .group_by("rank", "step", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), pl.exclude("start_ns", "end_ns").first())
    )
    return pl.concat([ops.filter(~is_clip), whole.select(OP_COLUMNS)])


def with_joined_reductions(ops: pl.DataFrame) -> pl.DataFrame:
    """All-reduces that run at the same time become one op: the buckets of DistributedDataParallel share the network.

    The graph runs the collectives of a worker in turn. What overlaps on one DP rank of a stage is joined on all of
    them, so that each still finds its counterpart; where ranks differ in their number, nothing is.
    """
    is_reduction = pl.col("kind") == str(OpKind.ALL_REDUCE)
    key, peers = ["rank", "step"], ["step", "pp_rank"]
    reductions = (
        ops.filter(is_reduction)
        .sort("start_ns", "end_ns")
        .with_columns(
            number=pl.int_range(pl.len()).over(key),
            count=pl.len().over(key),
            # A bucket that ended inside the backward has been moved behind it, without a length.
            overlaps=(
                (pl.col("start_ns") < pl.col("end_ns").cum_max().shift(1).over(key))
                | (pl.col("start_ns") == pl.col("start_ns").shift(1).over(key))
            ).fill_null(value=False),
        )
        .with_columns(alike=pl.col("count").n_unique().over(peers) == 1)
        .with_columns(joined=pl.col("overlaps").any().over(*peers, "number") & pl.col("alike"))
        .with_columns(op=(~pl.col("joined")).cum_sum().over(key, order_by="number"))
    )
    whole = reductions.group_by(*key, "op").agg(
        pl.col("start_ns").min(), pl.col("end_ns").max(), pl.exclude("start_ns", "end_ns").first()
    )
    return pl.concat([ops.filter(~is_reduction), whole.select(OP_COLUMNS)])
