"""Turn records into ops of the dependency graph.

In: the records of whole steps, ns on one clock, with each rank's place. Out: ops with kind, microbatch, chunk, start
and end, and counts of the records that did not become an op of their own.

A compute includes the nested collectives (tensor parallelism) and garbage collections that ran inside it, but not the
time it waited in them for the last data-parallel rank. In a job without a pipeline, the waits of a compute become an op
of their own, each all-to-all by itself, with the rows that it moves. Gradient reductions that start inside
a step's last backward are cut out of it: the compute ends where the last of them starts. An optimizer that calls its
closure begins where the last op inside it ended. A send ends when its recv ends, or when its own host stops waiting for
it, if that is earlier.

Records without a kind become `host-delay` if they lie between the worker's computes; in any case they are counted under
their own name. The time they spend waiting for the last rank of a data-parallel group does not count as a delay. The
loop's work between two steps is also `host-delay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from tracekit.collectors.merge.collective_ops import (
    ALL_TO_ALL,
    CLIP,
    COMPUTES,
    CUT_AT_WAITS,
    OP_COLUMNS,
    REDUCTIONS,
    classify_collectives,
    copied_buckets,
    cut_last_computes,
    ended_by_optimizers,
    inside_hosts,
    mark_nested,
    with_joined_reductions,
    with_one_clip,
    without_waits,
)
from tracekit.collectors.merge.record_times import FUSED_TRANSFERS, ON_DEVICE, one_after_another
from tracekit.trace.model import Layout, OpKind
from tracekit.trace.schema import RECEIVED, ROWS_TYPE, SENT

#: If a wait is shorter than this, ns, its transfer had already finished.
NO_WAIT_NS = 100_000
_DIRECT = {
    "compute": COMPUTES,
    "optimizer": ("optimizer",),
    "data_load": ("data-load",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluation",),
}
_UNKINDED = ("step", "rank", "dp_rank", "pp_rank", "name", "microbatch", "chunk", "start_ns", "end_ns", "all_there_ns")


def build_ops(records: pl.DataFrame, layout: Layout, groups: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Build the ops of the trace from the records of whole steps; and, for the trace's metadata, count `ops` and the
    records that did not become an op of their own:

    `nested`: collectives and garbage collections inside computes, data fetches and checkpoints, whose durations include
    them. `other`: own name -> count, seconds, and how many became host-delay. `estimated_recvs`: recvs whose data had
    already arrived when the host began to wait. `causality_violations`: recvs that ended before their send started.
    """
    is_step = pl.col("category") == "step"
    steps = records.filter(is_step)
    records = _with_chunks(_with_single_kinds(records.filter(~is_step)), layout)
    direct = _without_repeats(records.filter(_has_kind())).with_columns(kind=pl.col("name"))
    transfers, counts = _transfers(records.filter(pl.col("category") == "p2p"))
    marked = mark_nested(records.filter(pl.col("category").is_in(["collective", "gc"])), direct)
    is_pause = pl.col("category") == "gc"
    collectives = classify_collectives(copied_buckets(marked.filter(~is_pause)), groups, direct)
    pauses = marked.filter(is_pause).with_columns(kind=pl.when(~pl.col("nested")).then(pl.lit(str(OpKind.GC))))
    others = [frame.filter(pl.col("kind").is_not_null()).select(OP_COLUMNS) for frame in (collectives, pauses)]
    ops = cut_last_computes(pl.concat([direct.select(OP_COLUMNS), transfers.select(OP_COLUMNS), *others]))
    optimizers = direct.filter(pl.col("kind") == str(OpKind.OPTIMIZER))
    is_separate = pl.col("joins_all") & pl.col("inside") & pl.col("host_kind").is_in(CUT_AT_WAITS) & (layout.pp == 1)
    ops = without_waits(ops, collectives.filter(~is_separate.fill_null(value=False)))
    on_device = records.filter(ON_DEVICE)["rank"].unique().to_list()
    ops = one_after_another(with_joined_reductions(ops, on_device), on_device)
    waits = records.filter(pl.col("category") == "wait").join(groups, on=["rank", "peer"])
    exchanges = waits.clear()
    if layout.pp == 1 and waits.height:
        joined_by_all = waits.filter("joins_all")
        exchanges = joined_by_all.filter(ALL_TO_ALL)
        ops = with_exchanges_apart(ops, exchanges.select("rank", "start_ns", "end_ns"))
        ops = with_waits_apart(ops, joined_by_all.filter(~ALL_TO_ALL).select("rank", "start_ns", "end_ns"))
    ops = _with_collections_marked(_without_closures(with_one_clip(ops)))
    inside_optimizers = ops.filter("inside")
    ops = ended_by_optimizers(ops.filter(~pl.col("inside")).select(OP_COLUMNS))
    if waits.height:
        ops = shorter_by_waits(ops, waits.filter("data_parallel").select("rank", "start_ns", "end_ns"))
    unkinded = [
        records.filter(pl.col("category").is_in(["span", "compute"]) & ~_has_kind()).with_columns(
            all_there_ns=pl.col("start_ns")
        ),
        collectives.filter(pl.col("kind").is_null() & ~pl.col("nested")),
        _before_closures(optimizers, ops),
    ]
    delays, other = _host_delays(pl.concat([frame.select(_UNKINDED) for frame in unkinded]), ops)
    ops = pl.concat([ops, delays.select(OP_COLUMNS)])
    meetings = collectives.select("rank", wait_ns="start_ns", released_ns="all_there_ns")
    gaps = without_meetings(_between_steps(steps, ops, optimizers, on_device), meetings)
    ops = pl.concat([ops, gaps.select(OP_COLUMNS)])
    if transfers.height:
        host = without_meetings(between_ops(ops, transfers, on_device).select(OP_COLUMNS), meetings)
        ops = pl.concat([ops, host])
    ops = with_rows(_with_waits_of_host(ops, transfers), exchanges)
    nested = [frame.filter("nested").select("name") for frame in (collectives, pauses)]
    inside = pl.concat([*nested, inside_optimizers.select(name="kind")])
    nested_counts = dict(inside.group_by("name").len().sort("name").iter_rows())
    return ops, {"ops": ops.height, "nested": nested_counts, "other": other, **counts}


def _with_single_kinds(records: pl.DataFrame) -> pl.DataFrame:
    """Split each Megatron timer that covers several transfers into one record per transfer."""
    fused = {name: [str(kind) for kind in kinds] for name, kinds in FUSED_TRANSFERS.items()}
    is_fused = (pl.col("category") == "span") & pl.col("name").is_in(list(fused))
    parts = pl.DataFrame({"name": list(fused), "part": list(fused.values())})
    single = records.filter(is_fused).join(parts, on="name").explode("part").with_columns(name=pl.col("part"))
    return pl.concat([records.filter(~is_fused), single.select(records.columns)])


def _without_repeats(direct: pl.DataFrame) -> pl.DataFrame:
    """Drop spans and Megatron timers inside which a hook recorded an op of the same kind, so that it counts once."""
    is_span = pl.col("category") == "span"
    if not direct.select(is_span.any()).item():
        return direct
    hooked = direct.filter(~is_span).select("rank", "name", "start_ns", hooked_ns="start_ns").sort("start_ns")
    spans = direct.filter(is_span).sort("start_ns")
    marked = spans.join_asof(hooked, on="start_ns", by=["rank", "name"], strategy="forward", check_sortedness=False)
    alone = marked.filter((pl.col("hooked_ns") >= pl.col("end_ns")).fill_null(value=True))
    return pl.concat([direct.filter(~is_span), alone.select(direct.columns)])


def _has_kind() -> pl.Expr:
    """True if the name of a record is its kind: records of the hooks, and spans that the user named after a kind."""
    category, name = pl.col("category"), pl.col("name")
    hooked = pl.any_horizontal((category == code) & name.is_in(names) for code, names in _DIRECT.items())
    return hooked | ((category == "span") & name.is_in([str(kind) for kind in OpKind]))


def _with_chunks(records: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """Move the pipeline stage index to `stage`; make `chunk` its position among the stages of the rank."""
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


def _transfers(records: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """One op per p2p transfer, and counts of what is odd about them.

    A send ends with its recv, or earlier if its own host stopped waiting for it earlier.
    If the data had arrived before the host began to wait, the recv ended at an unknown earlier time. If its sender
    waited for the transfer, the recv ends when that wait ended. Otherwise it lasts, from the later of send and recv, as
    long as the median recv that was waited for.
    """
    key = ["step", "rank", "dp_rank", "pp_rank", "name", "microbatch", "chunk", "stage"]
    whole = records.group_by(key).agg(
        pl.col("start_ns").min(),
        pl.col("end_ns").max(),
        wait_ns=pl.col("extra").min(),
        posted_ns=pl.col("start_ns").min(),
        resumed_ns=pl.col("end_ns").max(),
    )
    forward = pl.col("name").str.starts_with("forward")
    is_send = pl.col("name").str.ends_with("send")
    ahead = pl.when(forward).then(1).otherwise(-1)
    whole = whole.with_columns(
        direction=forward, target=pl.when(is_send).then(pl.col("stage") + ahead).otherwise(pl.col("stage"))
    )
    pair = ["step", "dp_rank", "direction", "microbatch", "target"]
    sends = whole.filter(is_send)
    held = pl.when(pl.col("end_ns") - pl.col("wait_ns") >= NO_WAIT_NS).then("end_ns")
    recvs = whole.filter(~is_send).join(
        sends.select(*pair, send_ns="start_ns", released_ns=held), on=pair, how="left", nulls_equal=True
    )
    both_ns = pl.max_horizontal("start_ns", "send_ns")
    waited = recvs.filter(pl.col("end_ns") - pl.col("wait_ns") >= NO_WAIT_NS)
    usual_ns = waited.select((pl.col("end_ns") - both_ns).median()).item() if waited.height else 0.0
    found_there = (pl.col("end_ns") - pl.col("wait_ns") < NO_WAIT_NS) & (pl.col("wait_ns") - both_ns > NO_WAIT_NS)
    usually_ns = pl.coalesce("released_ns", both_ns + int(max(0.0, usual_ns or 0.0)))
    guess_ns = pl.max_horizontal(both_ns, pl.min_horizontal("wait_ns", usually_ns))
    recvs = recvs.with_columns(
        estimated=found_there, end_ns=pl.when(found_there).then(guess_ns).otherwise(pl.col("end_ns"))
    )
    received = recvs.select(*pair, recv_ns="start_ns", recv_end_ns="end_ns")
    ended = sends.with_columns(released_ns=held).join(received, on=pair, how="left", nulls_equal=True)
    matched = pl.max_horizontal("start_ns", "recv_ns", pl.min_horizontal("recv_end_ns", "released_ns"))
    sends = ended.with_columns(end_ns=pl.coalesce(pl.when(pl.col("recv_end_ns").is_not_null()).then(matched), "end_ns"))
    columns = [*key, "start_ns", "end_ns", "posted_ns", "wait_ns", "resumed_ns"]
    ops = pl.concat([sends.select(columns), recvs.select(columns)]).with_columns(kind=pl.col("name"))
    return ops, {
        "estimated_recvs": int(recvs["estimated"].sum()),
        "unmatched_p2p": int(ended["recv_end_ns"].null_count() + recvs["send_ns"].null_count()),
        "causality_violations": int((recvs["end_ns"] < recvs["send_ns"]).sum()),
    }


def _with_waits_of_host(ops: pl.DataFrame, transfers: pl.DataFrame) -> pl.DataFrame:
    """`ops` with `posted_ns`, when the host issued a transfer, and `resumed_ns`, when its wait for it ended."""
    key = ["rank", "step", "kind", "microbatch", "chunk"]
    asked = transfers.select(*key, "posted_ns", "resumed_ns")
    return ops.join(asked, on=key, how="left", nulls_equal=True, maintain_order="left")


def _without_closures(ops: pl.DataFrame) -> pl.DataFrame:
    """Cut the closure out of each optimizer that calls one: its computes and other ops are ops of their own."""
    is_optimizer = pl.col("kind") == str(OpKind.OPTIMIZER)
    inner = ops.filter(~is_optimizer).select("rank", "step", "kind", inner_ns="start_ns", inner_end_ns="end_ns")
    optimizers = ops.filter(is_optimizer).select("rank", "step", "start_ns", "end_ns")
    closures = (
        optimizers.join(inner, on=["rank", "step"])
        .filter(pl.col("inner_ns").is_between("start_ns", "end_ns", closed="left"))
        .group_by("rank", "step", "start_ns")
        .agg(
            begins_ns=pl.min_horizontal("inner_end_ns", "end_ns").max(),
            has_closure=pl.col("kind").is_in(COMPUTES).any(),
        )
        .filter("has_closure")
        .with_columns(kind=pl.lit(str(OpKind.OPTIMIZER)))
    )
    joined = ops.join(closures, on=["rank", "step", "kind", "start_ns"], how="left")
    return joined.with_columns(start_ns=pl.coalesce("begins_ns", "start_ns")).select(OP_COLUMNS)


def _before_closures(optimizers: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The work of optimizers before they call their closure: host work with its own name before the first compute."""
    computes = ops.filter(pl.col("kind").is_in(COMPUTES)).select("rank", "step", compute_ns="start_ns")
    first = (
        optimizers.join(computes, on=["rank", "step"])
        .filter(pl.col("compute_ns").is_between("start_ns", "end_ns", closed="left"))
        .group_by("rank", "step", "start_ns")
        .agg(pl.col("compute_ns").min())
    )
    return optimizers.join(first, on=["rank", "step", "start_ns"]).with_columns(
        name=pl.lit("optimizer before its closure"), end_ns="compute_ns", all_there_ns="start_ns"
    )


def _with_collections_marked(ops: pl.DataFrame) -> pl.DataFrame:
    """Add `inside`, whether an op is a garbage collection that counts as part of another op: it starts inside an
    optimizer, or while gradients are reduced, where its thread would have waited.
    """
    key = ["rank", "step"]
    optimizers = ops.filter(pl.col("kind") == str(OpKind.OPTIMIZER)).select(*key, "start_ns", until_ns="end_ns")
    reduced = (
        ops.filter(pl.col("kind").is_in([*REDUCTIONS, CLIP]))
        .group_by(key)
        .agg(reducing_ns=pl.col("start_ns").min(), reduced_ns=pl.col("end_ns").max())
    )
    is_pause = pl.col("kind") == str(OpKind.GC)
    pauses = ops.filter(is_pause).sort("start_ns")
    placed = pauses.join_asof(optimizers.sort("start_ns"), on="start_ns", by=key, check_sortedness=False)
    placed = placed.join(reduced, on=key, how="left")
    inside = pl.col("start_ns") < pl.col("until_ns")
    reducing = pl.col("start_ns").is_between("reducing_ns", "reduced_ns", closed="left")
    marked = placed.select(*OP_COLUMNS, inside=inside.fill_null(value=False) | reducing.fill_null(value=False))
    return pl.concat([ops.filter(~is_pause).with_columns(inside=pl.lit(value=False)), marked])


def _between_steps(
    steps: pl.DataFrame, ops: pl.DataFrame, optimizers: pl.DataFrame, on_device: Sequence[int]
) -> pl.DataFrame:
    """The time from the end of a rank's previous step to its first op, as host-delay: logging, evaluation, other work.

    `optimizers`: as recorded, since `ops` no longer includes the waits at their end. If the previous step was not
    recorded, it ends when the host ended it; ranks timed by a GPU (`on_device`) then get no delay, as their GPU may
    have ended later.
    """
    spanned = ops.group_by("rank", "step").agg(
        pl.col("dp_rank", "pp_rank").first(), first_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max()
    )
    ended = pl.concat([spanned.select("rank", "step", "last_ns"), optimizers.select("rank", "step", last_ns="end_ns")])
    before = ended.group_by("rank", pl.col("step") + 1).agg(before_ns=pl.col("last_ns").max())
    host = steps.filter(~pl.col("rank").is_in(on_device)).select("rank", "step", ended_ns="start_ns")
    gaps = (
        spanned.join(before, on=["rank", "step"], how="left")
        .join(host, on=["rank", "step"], how="left")
        .with_columns(start_ns=pl.coalesce("before_ns", "ended_ns"), end_ns="first_ns")
        .filter(pl.col("start_ns") < pl.col("end_ns"))
    )
    return as_host_delays(gaps, ops)


def _host_delays(rest: pl.DataFrame, ops: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, dict[str, float]]]:
    """Turn records without a kind into host-delay if they overlap no op of the worker; count all by their own name.

    After the first reduction or optimizer of a step, the graph has no place for host work. Such records are only
    counted, and their time becomes the launch delay of the next op.
    """
    key = ["rank", "step"]
    ops = ops.join(rest, on=key, how="semi")
    ends = ops.filter(pl.col("kind").is_in([*REDUCTIONS, CLIP, str(OpKind.OPTIMIZER)]))
    closing = ends.group_by(key).agg(closing_ns=pl.col("start_ns").min())
    rest = rest.sort("start_ns", "end_ns", descending=[False, True])
    busy = ops.select(*key, "start_ns", "end_ns").sort("start_ns")
    before = busy.with_columns(busy_until_ns=pl.col("end_ns").cum_max().over(key)).select(
        *key, "start_ns", "busy_until_ns"
    )
    after = busy.select(*key, "start_ns", next_ns="start_ns")
    placed = (
        rest.join_asof(before, on="start_ns", by=key, check_sortedness=False)
        .join_asof(after, on="start_ns", by=key, strategy="forward", check_sortedness=False)
        .join(closing, on=key, how="left")
        .with_columns(earlier_ns=pl.col("end_ns").cum_max().shift(1).over(key))
    )
    free = (
        (pl.col("busy_until_ns").fill_null(0) <= pl.col("start_ns"))
        & (pl.col("next_ns").is_null() | (pl.col("end_ns") <= pl.col("next_ns")))
        & (pl.col("earlier_ns").fill_null(0) <= pl.col("start_ns"))
        & (pl.col("start_ns") < pl.col("closing_ns")).fill_null(value=True)
    )
    placed = placed.with_columns(free=free)
    table = placed.group_by("name").agg(
        count=pl.len(), seconds=(pl.col("end_ns") - pl.col("start_ns")).sum() / 1e9, host_delays=pl.col("free").sum()
    )
    other = {
        row["name"]: {k: float(v) for k, v in row.items() if k != "name"}
        for row in table.sort("name").iter_rows(named=True)
    }
    delays = placed.filter("free").with_columns(start_ns="all_there_ns", kind=pl.lit(str(OpKind.HOST_DELAY)))
    return delays, other


_CLOSING = (*REDUCTIONS, CLIP, str(OpKind.OPTIMIZER))


def between_ops(ops: pl.DataFrame, transfers: pl.DataFrame, on_device: Sequence[int]) -> pl.DataFrame:
    """Host work between the ops of a step, up to its first reduction or optimizer, in the columns of `ops`.

    There, a schedule picks the next op, creates and posts its transfers: that takes the time it takes, and only time in
    which no thread worked is a launch delay.

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
    nulls = {name: pl.lit(None, ops.schema[name]) for name in ("microbatch", "chunk")}
    return gaps.with_columns(kind=pl.lit(str(OpKind.HOST_DELAY)), **nulls)


_COLLECTIVES = {
    str(OpKind.FORWARD_COMPUTE): str(OpKind.FORWARD_COLLECTIVES),
    str(OpKind.LOSS): str(OpKind.FORWARD_COLLECTIVES),
    str(OpKind.EVALUATION): str(OpKind.FORWARD_COLLECTIVES),
    str(OpKind.BACKWARD_COMPUTE): str(OpKind.BACKWARD_COLLECTIVES),
}
_BETWEEN = ("at_ns", "until_ns")


def with_waits_apart(ops: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Split the computes of `ops` that contain `waits` (rank, start_ns, end_ns). Not for jobs with a pipeline.

    A compute becomes its work up to the last wait, all its waits as one collective, and its work after that. The ranks
    of a collective leave it together: if the waits stayed inside, one slow rank would make all ranks look slow.

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
    hosts = computes.select("rank", "compute", "start_ns", host_end_ns="end_ns")
    placed = inside_hosts(waits, hosts).select("compute", "start_ns", end_ns=pl.min_horizontal("end_ns", "host_end_ns"))
    if placed.is_empty():
        return ops
    whole = computes.drop("start_ns", "end_ns")
    before = placed.select("compute", at_ns="end_ns", until_ns="start_ns")
    spans = computes.select("compute", at_ns="start_ns", until_ns="end_ns")
    worked = (  # from each end to the next begin
        pl.concat([spans, before])
        .with_columns(pl.col(name).sort().over("compute", mapping_strategy="group_to_rows") for name in _BETWEEN)
        .with_columns(start_ns="at_ns", end_ns=pl.max_horizontal(_BETWEEN))
        .join(whole, on="compute")
    )
    exchanges = placed.join(whole, on="compute").with_columns(kind=pl.col("kind").replace(_COLLECTIVES))
    return pl.concat([ops.filter(~is_compute), worked.select(ops.columns), exchanges.select(ops.columns)])


def with_rows(ops: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Add to all-to-alls the rows that they move: `waits` (rank, start_ns, and sent, received if ranks wrote them).

    An empty list if they were not recorded; none without waits.
    """
    if waits.is_empty():
        return ops
    empty = pl.lit([], ROWS_TYPE)
    rows = (pl.col(name).fill_null(empty) if name in waits.columns else empty.alias(name) for name in (SENT, RECEIVED))
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
    hosts = computes.select("rank", "compute", "start_ns", host_end_ns="end_ns")
    placed = (
        inside_hosts(waits, hosts)
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
