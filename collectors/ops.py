"""The rules that turn records into ops of the dependency graph.

In: the records of whole steps, ns on one clock, with each rank's place. Out: ops with kind, microbatch, chunk, start
and end, and an `OpReport` that counts what became no op of its own.

A compute contains what ran inside it: nested collectives (tensor parallelism, FSDP's gathering in a pipeline),
collections of garbage. Without a pipeline, its waits for data-parallel collectives are an op of their own (`waits.py`).
Gradient reductions that start inside a step's last backward are cut out of it: the compute ends where the last of them
starts. A send ends when its recv ends. Anything without a kind counts as `host-delay` where it lies between the
worker's other ops, and is counted under its own name either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from tracekit.collectors.device_ops import ON_DEVICE, one_after_another
from tracekit.collectors.ndtimeline import METRICS
from tracekit.collectors.waits import with_waits_apart
from tracekit.model import Layout, OpKind

#: A wait shorter than this, ns, found its transfer finished.
NO_WAIT_NS = 100_000
_DIRECT = {
    "compute": ("forward-compute", "backward-compute"),
    "optimizer": ("optimizer",),
    "data_load": ("data-load",),
    "checkpoint": ("checkpoint",),
}
_ALL_TO_ALL = pl.col("name").str.contains("alltoall") | pl.col("name").str.contains("all_to_all")
_COLUMNS = ("step", "rank", "dp_rank", "pp_rank", "kind", "microbatch", "chunk", "start_ns", "end_ns")
_UNKINDED = ("step", "rank", "dp_rank", "pp_rank", "name", "microbatch", "chunk", "start_ns", "end_ns")


@dataclass(frozen=True, slots=True)
class OpReport:
    """What became of the records. `other`: own name -> count, seconds, and how many became host-delay.

    `nested`: collectives and collections inside computes, counted in the compute's duration. `estimated_recvs`: recvs
    whose wait found the data there. `causality_violations`: recvs that ended before their send started.
    """

    ops: int
    nested: Mapping[str, int]
    other: Mapping[str, Mapping[str, float]]
    estimated_recvs: int
    unmatched_p2p: int
    causality_violations: int


@dataclass(frozen=True, slots=True)
class _Transfers:
    ops: pl.DataFrame
    estimated: int
    unmatched: int
    violations: int


def build_ops(records: pl.DataFrame, layout: Layout, groups: pl.DataFrame) -> tuple[pl.DataFrame, OpReport]:
    """Ops of the trace from the records of whole steps."""
    is_step = pl.col("category") == "step"
    steps = records.filter(is_step)
    records = _with_chunks(_with_single_kinds(records.filter(~is_step)), layout)
    direct = _without_repeats(records.filter(_has_kind())).with_columns(kind=pl.col("name"))
    computes = direct.filter(pl.col("kind").is_in(_DIRECT["compute"]))
    transfers = _transfers(records.filter(pl.col("category") == "p2p"))
    collectives = _classified(records.filter(pl.col("category") == "collective"), groups, computes)
    pauses = _mark_nested(records.filter(pl.col("category") == "gc"), computes).with_columns(
        kind=pl.when(~pl.col("nested")).then(pl.lit(str(OpKind.GC)))
    )
    kept = [frame.filter(pl.col("kind").is_not_null()).select(_COLUMNS) for frame in (collectives, pauses)]
    ops = _cut_last_computes(pl.concat([direct.select(_COLUMNS), transfers.ops.select(_COLUMNS), *kept]))
    ops = one_after_another(ops, records.filter(ON_DEVICE)["rank"].unique().to_list())
    if layout.pp == 1:
        waits = records.filter(pl.col("category") == "wait").join(groups.filter("joins_all"), on=["rank", "peer"])
        ops = with_waits_apart(ops, waits.select("rank", "start_ns", "end_ns"))
    ops = _with_joined_reductions(ops)
    unkinded = [
        records.filter(pl.col("category").is_in(["span", "compute"]) & ~_has_kind()),
        collectives.filter(pl.col("kind").is_null() & ~pl.col("nested")),
    ]
    delays, other = _host_delays(pl.concat([frame.select(_UNKINDED) for frame in unkinded]), ops)
    ops = pl.concat([ops, delays.select(_COLUMNS)])
    ops = pl.concat([ops, _between_steps(steps, ops, records).select(_COLUMNS)])
    inside = pl.concat([frame.filter("nested").select("name") for frame in (collectives, pauses)])
    report = OpReport(
        ops=ops.height,
        nested=dict(inside.group_by("name").len().sort("name").iter_rows()),
        other=other,
        estimated_recvs=transfers.estimated,
        unmatched_p2p=transfers.unmatched,
        causality_violations=transfers.violations,
    )
    return ops, report


def _with_single_kinds(records: pl.DataFrame) -> pl.DataFrame:
    """A timer of Megatron that times several transfers at once becomes one record for each of them."""
    fused = {name: [str(kind) for kind in kinds] for name, kinds in METRICS.items() if len(kinds) > 1}
    is_fused = (pl.col("category") == "span") & pl.col("name").is_in(list(fused))
    parts = pl.DataFrame({"name": list(fused), "part": list(fused.values())})
    apart = records.filter(is_fused).join(parts, on="name").explode("part").with_columns(name=pl.col("part"))
    return pl.concat([records.filter(~is_fused), apart.select(records.columns)])


def _without_repeats(direct: pl.DataFrame) -> pl.DataFrame:
    """Without the spans and Megatron timers inside which a hook saw the op of that kind: it counts once."""
    is_span = pl.col("category") == "span"
    hooked = direct.filter(~is_span).select("rank", "name", "start_ns", hooked_ns="start_ns").sort("start_ns")
    spans = direct.filter(is_span).sort("start_ns")
    marked = spans.join_asof(hooked, on="start_ns", by=["rank", "name"], strategy="forward", check_sortedness=False)
    alone = marked.filter((pl.col("hooked_ns") >= pl.col("end_ns")).fill_null(value=True))
    return pl.concat([direct.filter(~is_span), alone.select(direct.columns)])


def _has_kind() -> pl.Expr:
    """Records whose name is their kind: what the hooks name so, and spans the user named so."""
    category, name = pl.col("category"), pl.col("name")
    hooked = pl.any_horizontal((category == one) & name.is_in(names) for one, names in _DIRECT.items())
    return hooked | ((category == "span") & name.is_in([str(kind) for kind in OpKind]))


def _with_chunks(records: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """`stage` keeps the pipeline stage index; `chunk` is its position among the stages of the rank."""
    staged = pl.col("category").is_in(["compute", "p2p"])
    records = records.with_columns(
        stage=pl.when(staged & (pl.col("chunk") >= 0)).then(pl.col("chunk")),
        microbatch=pl.when(pl.col("microbatch") >= 0).then(pl.col("microbatch")),
    )
    chunks = (
        records.filter(pl.col("stage").is_not_null())
        .select("rank", "stage")
        .unique()
        .with_columns(position=(pl.col("stage").rank("dense").over("rank") - 1).cast(pl.Int32))
    )
    placed = records.drop("chunk").join(chunks, on=["rank", "stage"], how="left")
    alone = pl.when(staged).then(pl.lit(0, pl.Int32))
    return placed.with_columns(chunk=pl.coalesce("position", alone) if layout.vpp == 1 else pl.col("position")).drop(
        "position"
    )


def _transfers(records: pl.DataFrame) -> _Transfers:
    """One op per p2p transfer, sends ended by their recvs.

    A recv whose wait found the data there ended at an unknown time before; it is taken to have lasted as long as the
    median of those that were waited for, counted from the later of send and recv.
    """
    key = ["step", "rank", "dp_rank", "pp_rank", "name", "microbatch", "chunk", "stage"]
    whole = records.group_by(key).agg(pl.col("start_ns").min(), pl.col("end_ns").max(), wait_ns=pl.col("extra").min())
    forward = pl.col("name").str.starts_with("forward")
    is_send = pl.col("name").str.ends_with("send")
    ahead = pl.when(forward).then(1).otherwise(-1)
    whole = whole.with_columns(
        direction=forward,
        target=pl.when(is_send).then(pl.col("stage") + ahead).otherwise(pl.col("stage")),
    )
    pair = ["step", "dp_rank", "direction", "microbatch", "target"]
    sends = whole.filter(is_send)
    recvs = whole.filter(~is_send).join(sends.select(*pair, send_ns="start_ns"), on=pair, how="left", nulls_equal=True)
    both_ns = pl.max_horizontal("start_ns", "send_ns")
    waited = recvs.filter(pl.col("end_ns") - pl.col("wait_ns") >= NO_WAIT_NS)
    usual_ns = waited.select((pl.col("end_ns") - both_ns).median()).item() if waited.height else 0.0
    found_there = (pl.col("end_ns") - pl.col("wait_ns") < NO_WAIT_NS) & (pl.col("wait_ns") - both_ns > NO_WAIT_NS)
    guess_ns = pl.min_horizontal(pl.col("end_ns"), both_ns + int(max(0.0, usual_ns or 0.0)))
    recvs = recvs.with_columns(
        estimated=found_there, end_ns=pl.when(found_there).then(guess_ns).otherwise(pl.col("end_ns"))
    )
    ended = sends.join(recvs.select(*pair, recv_end_ns="end_ns"), on=pair, how="left", nulls_equal=True)
    matched = pl.max_horizontal("start_ns", "recv_end_ns")
    sends = ended.with_columns(end_ns=pl.coalesce(pl.when(pl.col("recv_end_ns").is_not_null()).then(matched), "end_ns"))
    columns = [*key, "start_ns", "end_ns"]
    ops = pl.concat([sends.select(columns), recvs.select(columns)]).with_columns(kind=pl.col("name"))
    return _Transfers(
        ops,
        estimated=int(recvs["estimated"].sum()),
        unmatched=int(ended["recv_end_ns"].null_count() + recvs["send_ns"].null_count()),
        violations=int((recvs["end_ns"] < recvs["send_ns"]).sum()),
    )


def _mark_nested(records: pl.DataFrame, computes: pl.DataFrame) -> pl.DataFrame:
    """`nested`: the record starts inside a compute of its rank; `host_start_ns`, `host_last` tell which."""
    hosts = computes.select("rank", "start_ns", host_start_ns="start_ns", host_end_ns="end_ns", host_kind="kind").sort(
        "start_ns"
    )
    marked = records.sort("start_ns").join_asof(hosts, on="start_ns", by="rank", check_sortedness=False)
    return marked.with_columns(nested=(pl.col("start_ns") < pl.col("host_end_ns")).fill_null(value=False))


def _classified(collectives: pl.DataFrame, groups: pl.DataFrame, computes: pl.DataFrame) -> pl.DataFrame:
    """Collectives with the kind the graph knows, null where it knows none; reductions are never `nested`.

    Gradients are reduced from the step's last backward on; parameters are gathered before the chunk's first forward.
    """
    marked = _mark_nested(collectives, computes).join(groups, on=["rank", "peer"], how="left", maintain_order="left")
    of_step = computes.group_by("rank", "step").agg(
        last_ns=pl.col("start_ns").max(),
        first_forward_ns=pl.col("start_ns").filter(pl.col("kind") == "forward-compute").min(),
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
    kind = (
        pl.when((name.str.starts_with("allreduce") | name.str.starts_with("all_reduce")) & after_computes)
        .then(pl.lit(str(OpKind.ALL_REDUCE)))
        .when(name.str.contains("reduce_scatter") & after_computes)
        .then(pl.lit(str(OpKind.GRADS_REDUCE_SCATTER)))
        .when((name.str.contains("all_gather") | name.str.contains("allgather")) & before_chunk)
        .then(pl.lit(str(OpKind.PARAMS_ALL_GATHER)))
        .when(_ALL_TO_ALL & ~pl.col("nested"))
        .then(pl.lit(str(OpKind.ALL_TO_ALL)))
    )
    data_parallel = pl.col("data_parallel").fill_null(value=False) | _ALL_TO_ALL
    marked = marked.with_columns(kind=pl.when(data_parallel).then(kind))
    gather = pl.col("kind") == str(OpKind.PARAMS_ALL_GATHER)
    own_name = name + pl.lit("@") + pl.col("group").fill_null("?")
    return marked.with_columns(
        nested=pl.col("nested") & pl.col("kind").is_null(),
        chunk=pl.when(gather).then(pl.col("next_chunk")),
        microbatch=pl.lit(None, pl.Int32),
        name=own_name,
    )


def _cut_last_computes(ops: pl.DataFrame) -> pl.DataFrame:
    """End a step's last compute where the last reduction inside it starts; move the others behind that point."""
    compute = pl.col("kind").is_in(_DIRECT["compute"])
    reduction = pl.col("kind").is_in([str(OpKind.ALL_REDUCE), str(OpKind.GRADS_REDUCE_SCATTER)])
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
    return joined.with_columns(start_ns=start_ns, end_ns=end_ns).select(_COLUMNS)


def _with_joined_reductions(ops: pl.DataFrame) -> pl.DataFrame:
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
    return pl.concat([ops.filter(~is_reduction), whole.select(_COLUMNS)])


def _between_steps(steps: pl.DataFrame, ops: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """From the end of a rank's last step to its first op, as host-delay: logging, evaluation, whatever the loop does.

    Where the step before was not recorded, the host says when it ended; a GPU may have ended it later.
    """
    on_device = records.filter(ON_DEVICE)["rank"].unique().to_list()
    spanned = ops.group_by("rank", "dp_rank", "pp_rank", "step").agg(
        first_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max()
    )
    before = spanned.select("rank", pl.col("step") + 1, before_ns="last_ns")
    host = steps.filter(~pl.col("rank").is_in(on_device)).select("rank", "step", ended_ns="start_ns")
    return (
        spanned.join(before, on=["rank", "step"], how="left")
        .join(host, on=["rank", "step"], how="left")
        .with_columns(start_ns=pl.coalesce("before_ns", "ended_ns"), end_ns="first_ns")
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .with_columns(
            kind=pl.lit(str(OpKind.HOST_DELAY)),
            microbatch=pl.lit(None, ops.schema["microbatch"]),
            chunk=pl.lit(None, ops.schema["chunk"]),
        )
    )


def _host_delays(rest: pl.DataFrame, ops: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, dict[str, float]]]:
    """What has no kind, as host-delay where it overlaps no op of the worker, and counted under its own name."""
    key = ["rank", "step"]
    rest = rest.sort("start_ns", "end_ns", descending=[False, True])
    busy = ops.select(*key, "start_ns", "end_ns").sort("start_ns")
    before = busy.with_columns(busy_until_ns=pl.col("end_ns").cum_max().over(key)).select(
        *key, "start_ns", "busy_until_ns"
    )
    after = busy.select(*key, "start_ns", next_ns="start_ns")
    placed = (
        rest.join_asof(before, on="start_ns", by=key, check_sortedness=False)
        .join_asof(after, on="start_ns", by=key, strategy="forward", check_sortedness=False)
        .with_columns(earlier_ns=pl.col("end_ns").cum_max().shift(1).over(key))
    )
    free = (
        (pl.col("busy_until_ns").fill_null(0) <= pl.col("start_ns"))
        & (pl.col("next_ns").is_null() | (pl.col("end_ns") <= pl.col("next_ns")))
        & (pl.col("earlier_ns").fill_null(0) <= pl.col("start_ns"))
    )
    placed = placed.with_columns(free=free)
    table = placed.group_by("name").agg(
        count=pl.len(),
        seconds=(pl.col("end_ns") - pl.col("start_ns")).sum() / 1e9,
        host_delays=pl.col("free").sum(),
    )
    other = {
        row["name"]: {k: float(v) for k, v in row.items() if k != "name"}
        for row in table.sort("name").iter_rows(named=True)
    }
    delays = placed.filter("free").with_columns(kind=pl.lit(str(OpKind.HOST_DELAY)))
    return delays, other
