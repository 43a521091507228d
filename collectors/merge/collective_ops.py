"""Classify collectives as ops of their own, parts of the computes around them, or time without a kind; sizes of
gradients and what their reductions take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.merge.placement import Placement
from tracekit.collectors.merge.record_times import ON_DEVICE, place_in_run
from tracekit.collectors.record.wire_format import Flag
from tracekit.trace.model import OpKind

_BACKWARDS = (str(OpKind.BACKWARD_COMPUTE), str(OpKind.BACKWARD_WEIGHT))
COMPUTES = (str(OpKind.FORWARD_COMPUTE), str(OpKind.LOSS), *_BACKWARDS)
#: Ops that own the collectives and garbage collections that start inside them.
HOSTS = (*COMPUTES, str(OpKind.EVALUATION), str(OpKind.DATA_LOAD), str(OpKind.CHECKPOINT))
#: Those of them that are cut where they wait for other ranks.
CUT_AT_WAITS = (*COMPUTES, str(OpKind.EVALUATION))
REDUCTIONS = (str(OpKind.ALL_REDUCE), str(OpKind.GRADS_REDUCE_SCATTER))
CLIP = str(OpKind.OPTIMIZER_CLIP_MAIN_GRAD)
OP_COLUMNS = ("step", "rank", "dp_rank", "pp_rank", "kind", "microbatch", "chunk", "start_ns", "end_ns")
ALL_TO_ALL = pl.col("name").str.contains("alltoall") | pl.col("name").str.contains("all_to_all")


def inside_hosts(rows: pl.DataFrame, hosts: pl.DataFrame) -> pl.DataFrame:
    """The `rows` that start inside one of the `hosts` on their rank, with its columns. `hosts`: `rank`, `start_ns`,
    `host_end_ns`, and others.
    """
    placed = rows.sort("start_ns").join_asof(hosts.sort("start_ns"), on="start_ns", by="rank", check_sortedness=False)
    return placed.filter(pl.col("start_ns") < pl.col("host_end_ns"))


def mark_nested(records: pl.DataFrame, direct: pl.DataFrame) -> pl.DataFrame:
    """Add `nested`, whether the record starts inside one of `HOSTS` on its rank, and `host_kind`, that op's kind."""
    hosts = direct.filter(pl.col("kind").is_in(HOSTS)).select(
        "rank", "start_ns", host_end_ns="end_ns", host_kind="kind"
    )
    hosts = hosts.sort("start_ns")
    marked = records.sort("start_ns").join_asof(hosts, on="start_ns", by="rank", check_sortedness=False)
    return marked.with_columns(nested=(pl.col("start_ns") < pl.col("host_end_ns")).fill_null(value=False))


def copied_buckets(marked: pl.DataFrame) -> pl.DataFrame:
    """End the buckets of a host when the backward around them does, which copies what was reduced.

    `marked`: as returned by `mark_nested`. What a GPU copies is part of its stream.
    """
    copied = ((pl.col("flags") & int(Flag.BUCKET)) != 0) & pl.col("nested") & ~ON_DEVICE
    end_ns = pl.when(copied).then(pl.max_horizontal("end_ns", "host_end_ns")).otherwise("end_ns")
    return marked.with_columns(end_ns=end_ns)


def classify_collectives(marked: pl.DataFrame, groups: pl.DataFrame, direct: pl.DataFrame) -> pl.DataFrame:
    """Collectives with their kind in the graph, null if it has none; reductions are never `nested`, but may be `inside`
    a compute. `marked`: collectives, as returned by `mark_nested`.

    Gradients are reduced from the step's last backward on; parameters are gathered before the chunk's first forward. A
    reduction among model-parallel ranks between the last backward and the optimizer is the gradient norm. Any other
    collective in which all data-parallel ranks meet between two computes (a barrier, a broadcast, FSDP2's
    reduce-scatter of a chunk other than the last) has the direction of the compute before it; from the last backward
    on, it counts as a reduction. A collective inside an optimizer is part of the optimizer.
    """
    computes = direct.filter(pl.col("kind").is_in(COMPUTES))
    optimizers = direct.filter(pl.col("kind") == str(OpKind.OPTIMIZER))
    marked = marked.join(groups, on=["rank", "peer"], how="left", maintain_order="left")
    # All data-parallel ranks of the stage meet in the collective, and the call itself waits for it.
    meets = _is_blocking() & pl.col("joins_all") & ~pl.col("nested") & counted_alike()
    marked = marked.with_columns(all_there_ns=all_there_ns(), meets=meets.fill_null(value=False))
    of_step = computes.group_by("rank", "step").agg(last_ns=pl.col("start_ns").max())
    of_step = of_step.join(
        optimizers.group_by("rank", "step").agg(
            optimizer_ns=pl.col("start_ns").min(), optimizer_end_ns=pl.col("end_ns").max()
        ),
        on=["rank", "step"],
        how="left",
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
        .join_asof(
            computes.select("rank", "step", "start_ns", compute_before="kind").sort("start_ns"),
            on="start_ns",
            by=["rank", "step"],
            check_sortedness=False,
        )
    )
    # An optimizer that begins before the last compute calls that compute in its closure.
    has_closure = (pl.col("optimizer_ns") < pl.col("last_ns")).fill_null(value=False)
    before_optimizer = (pl.col("start_ns") < pl.col("optimizer_ns")) | has_closure
    in_optimizer = (
        pl.col("start_ns").is_between("optimizer_ns", "optimizer_end_ns", closed="left").fill_null(value=False)
        & _is_blocking()
        & ~has_closure
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
        .when(ALL_TO_ALL & ~pl.col("nested"))
        .then(pl.lit(str(OpKind.ALL_TO_ALL)))
        .when(~pl.col("meets"))
        .then(None)
        .when(after_computes)
        .then(pl.when(before_optimizer.fill_null(value=True)).then(pl.lit(str(OpKind.ALL_REDUCE))))
        .when(pl.col("compute_before").is_in(_BACKWARDS))
        .then(pl.lit(str(OpKind.BACKWARD_COLLECTIVES)))
        .otherwise(pl.lit(str(OpKind.FORWARD_COLLECTIVES)))
    )
    data_parallel = pl.col("data_parallel").fill_null(value=False) | ALL_TO_ALL
    of_norm = reduces & ~pl.col("nested") & before_optimizer & (pl.col("size") > 1)
    of_host = pl.col("nested") & ~pl.col("host_kind").is_in(COMPUTES)
    kind_of_named = pl.when(data_parallel).then(kind).otherwise(pl.when(of_norm).then(pl.lit(CLIP)))
    marked = marked.with_columns(kind=pl.when(~of_host & ~in_optimizer).then(kind_of_named))
    own_name = name + pl.lit("@") + pl.col("group").fill_null("?")
    return _with_gathered_chunks(marked, forwards).with_columns(
        nested=pl.col("nested") & pl.col("kind").is_null(),
        inside="nested",
        microbatch=pl.lit(None, pl.Int32),
        name=own_name,
    )


def _with_gathered_chunks(marked: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    """Add `chunk`: the chunk whose parameters a collective gathers; null for other collectives.

    Gathers for several chunks may be issued at once, in the order in which the chunks are used, with equally many
    gathers per chunk. If the records contradict this, each gather belongs to the next forward.
    """
    key = ["rank", "step"]
    marked = marked.with_columns(is_gather=(pl.col("kind") == str(OpKind.PARAMS_ALL_GATHER)).fill_null(value=False))
    if not marked["is_gather"].any():
        return marked.with_columns(chunk=pl.when("is_gather").then("next_chunk"))
    order = forwards.with_columns(place=pl.int_range(pl.len()).over(key), chunks=pl.len().over(key))
    placed = (
        marked.with_columns(
            number=pl.int_range(pl.len()).over(*key, "is_gather"), count=pl.len().over(*key, "is_gather")
        )
        .join(order.group_by(key).agg(pl.col("chunks").first()), on=key, how="left", maintain_order="left")
        .with_columns(place=pl.col("number") * pl.col("chunks") // pl.col("count"))
        .join(
            order.select(*key, "place", used_ns="start_ns", used_chunk="next_chunk"),
            on=[*key, "place"],
            how="left",
            maintain_order="left",
        )
    )
    in_order = (pl.col("count") % pl.col("chunks") == 0) & (pl.col("start_ns") < pl.col("used_ns"))
    in_order = in_order.fill_null(value=False).all().over(*key, "is_gather")
    chunk = pl.when(in_order).then("used_chunk").otherwise("next_chunk")
    return placed.with_columns(chunk=pl.when("is_gather").then(chunk))


#: The k-th collective of a step, group and name is the same one on all ranks that recorded equally many.
ALIKE = ("step", "members", "name")


def counted_alike() -> pl.Expr:
    """True if all ranks of the group began equally many collectives of this name in the step."""
    return (pl.len().over("rank", *ALIKE).n_unique().over(ALIKE) == 1) & pl.col("members").is_not_null()


def all_there_ns() -> pl.Expr:
    """Time at which the last rank of the group began the collective, which ends the wait for it."""
    number = pl.col("start_ns").rank("ordinal").over("rank", *ALIKE)
    last_ns = pl.min_horizontal("end_ns", pl.col("start_ns").max().over(*ALIKE, number))
    return pl.when(counted_alike()).then(last_ns).otherwise("start_ns")


def _is_blocking() -> pl.Expr:
    """True if the caller waits inside the collective."""
    return (pl.col("flags") & int(Flag.BLOCKING)) != 0


def cut_last_computes(ops: pl.DataFrame) -> pl.DataFrame:
    """End a step's last compute where the last reduction inside it starts; start the other reductions no earlier."""
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
    """Shorten each of `HOSTS` by the time it waited in its collectives for ranks that came later.

    Waits of a GPU's streams are unknown, so waits in collectives that a GPU timed are not subtracted.
    """
    host = pl.col("kind").is_in(HOSTS)
    waited_ns = pl.col("all_there_ns") - pl.col("start_ns")
    waits = collectives.filter(_is_blocking() & ~ON_DEVICE).select("rank", "start_ns", waited_ns=waited_ns)
    if waits.is_empty():
        return ops
    hosts = ops.filter(host).select("rank", "start_ns", host_ns="start_ns", host_end_ns="end_ns")
    waited = inside_hosts(waits, hosts).group_by("rank", start_ns="host_ns").agg(pl.col("waited_ns").sum())
    joined = ops.join(waited, on=["rank", "start_ns"], how="left")
    shorter_ns = pl.col("end_ns") - pl.when(host).then("waited_ns").fill_null(0)
    return joined.with_columns(end_ns=pl.max_horizontal("start_ns", shorter_ns)).select(OP_COLUMNS)


def ended_by_optimizers(ops: pl.DataFrame) -> pl.DataFrame:
    """End reductions at the latest when the optimizer that waited for them begins: their ends may be recorded late."""
    key = ["rank", "step"]
    is_reduction = pl.col("kind").is_in(REDUCTIONS)
    optimizers = ops.filter(pl.col("kind") == str(OpKind.OPTIMIZER)).select(*key, "start_ns", optimizer_ns="start_ns")
    placed = (
        ops.filter(is_reduction)
        .sort("start_ns")
        .join_asof(optimizers.sort("start_ns"), on="start_ns", by=key, strategy="forward", check_sortedness=False)
        .with_columns(end_ns=pl.min_horizontal("end_ns", "optimizer_ns"))
    )
    return pl.concat([ops.filter(~is_reduction), placed.select(OP_COLUMNS)])


def with_one_clip(ops: pl.DataFrame) -> pl.DataFrame:
    """Join all reductions of the gradient norm (in parts, over several groups) into one op per worker and step."""
    is_clip = pl.col("kind") == CLIP
    whole = (
        ops.filter(is_clip)
        .group_by("rank", "step", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), pl.exclude("start_ns", "end_ns").first())
    )
    return pl.concat([ops.filter(~is_clip), whole.select(OP_COLUMNS)])


def with_joined_reductions(ops: pl.DataFrame, on_device: list[int]) -> pl.DataFrame:
    """Join reductions of one kind that begin inside the last backward, or run at the same time, into one op.

    Examples are the buckets of DistributedDataParallel and the layers that FSDP reduce-scatters. What is left of them
    after the backward is no measure of how long each takes. On the GPUs of the ranks `on_device`, those that begin
    later only queue. Reductions that are joined on one DP rank of a stage are joined on all its DP ranks, so that each
    still finds its counterpart. If the ranks have different numbers of reductions, none are joined.
    """
    is_reduction = pl.col("kind").is_in(REDUCTIONS)
    key, peers = ["rank", "step", "kind"], ["step", "pp_rank", "kind"]
    reductions = (
        ops.filter(is_reduction)
        .sort(*key, "start_ns", "end_ns")
        .with_columns(
            number=place_in_run(*key), count=pl.len().over(key), before_ns=pl.col("end_ns").cum_max().shift(1).over(key)
        )
        .with_columns(
            # What began inside the backward was moved to its end.
            overlaps=(~pl.col("rank").is_in(on_device) & (pl.col("start_ns") < pl.col("before_ns")))
            | ((pl.col("number") > 0) & (pl.col("start_ns") == pl.col("start_ns").shift(1))),
            alike=pl.col("count").n_unique().over(peers) == 1,
        )
        .with_columns(joined=pl.col("overlaps").any().over(*peers, "number") & pl.col("alike"))
        .with_columns(op=(~pl.col("joined")).cum_sum())
    )
    whole = reductions.group_by(*key, "op").agg(
        pl.col("start_ns").min(), pl.col("end_ns").max(), pl.exclude("start_ns", "end_ns").first()
    )
    return pl.concat([ops.filter(~is_reduction), whole.select(OP_COLUMNS)])


#: Buckets of a step that are kept, and cells of the arrays in which their times are added up.
_MOST_BUCKETS, _MOST_CELLS = 64, 1 << 21
#: Reductions that run at once: gloo has two threads, a stream of a GPU has one queue.
_ON_HOST, _ON_STREAM = 2, 1
_Seconds = npt.NDArray[np.float64]


def gradient_figures(
    facts: Mapping[int, Mapping[str, list[Any]]], records: pl.DataFrame, groups: pl.DataFrame, placement: Placement
) -> dict[str, Any]:
    """The metadata, empty if no rank wrote the sizes of its gradients. `facts`: of each rank.

    `layers`, of each pipeline stage, too, if all stages wrote those that a plan can move.
    """
    written = _written(facts, placement)
    sizes = [layers or wrapped.get("bytes", []) for wrapped, layers in written]
    if not all(sizes):
        return {}
    # All buckets of a reducer on the host are one collective, of which only the end is seen.
    on_host = [sum(of_layers) for of_layers in sizes]
    reductions = (
        records.filter(pl.col("category") == "collective", pl.col("name").str.contains("allreduce|reduce_scatter"))
        .join(groups, on=["rank", "peer"], how="left", maintain_order="left")
        .with_columns(all_there_ns=all_there_ns(), on_device=ON_DEVICE)
        .filter("data_parallel", ~pl.col("extra").is_in(on_host))
        .sort("rank", "step", "start_ns")
        .group_by("rank", "step", maintain_order=True)
        .agg("extra", "all_there_ns", "start_ns", "end_ns", pl.col("on_device").any(), queued_us="chunk")
    )
    keys = ["rank", "extra"]  # the buckets of most steps: the first step, and those without some layers, have others
    sets = reductions.group_by(keys).agg(pl.len(), last=pl.col("step").max()).sort("len", "last", descending=True)
    most = sets.unique("rank", keep="first", maintain_order=True)
    usual = reductions.join(most, on=keys, how="semi", maintain_order="left")
    steps = _steps_of_ranks(records)
    timed = [_TimedBuckets.of(alike, steps) for _, alike in usual.group_by("extra", maintain_order=True)]
    rows = [row for buckets in timed for row in buckets.rows()]
    figures = {**written[0][0], "bytes": sizes, "reductions": rows[:_MOST_BUCKETS], **_delay(usual, records)}
    if timed:
        figures["copy_per_mb_s"] = max(buckets.copy_per_mb_s() for buckets in timed)
        figures["at_once"] = timed[0].at_once
    moves = len(written) > 1 and all(layers for _, layers in written)
    return {"gradients": figures, **({"layers": list(map(len, sizes))} if moves else {})}


def _written(
    facts: Mapping[int, Mapping[str, list[Any]]], placement: Placement
) -> list[tuple[Mapping[str, Any], list[int]]]:
    """What the first rank of each stage with such facts wrote of its gradients, [stages]: that of
    DistributedDataParallel, and the bytes of the layers of its pipeline stages, which a plan can move.
    """
    of_stage: dict[int, tuple[Mapping[str, Any], list[int]]] = {}
    for rank, place in sorted(placement.places.items()):
        of_rank = facts.get(rank, {})
        if (place.tp, place.cp) == (0, 0) and (of_rank.get("gradients") or of_rank.get("layers")):
            layers = [size for stage in of_rank.get("layers", []) for size in stage["bytes"]]
            of_stage.setdefault(place.pp, (of_rank.get("gradients", [{}])[-1], layers))
    return [of_stage.get(stage, ({}, [])) for stage in range(placement.layout.pp)]


def _steps_of_ranks(records: pl.DataFrame) -> pl.DataFrame:
    """When the last backward of each step of each rank began and ended, ns."""
    of_step = records.filter(pl.col("name") == "backward-compute").group_by("rank", "step")
    return of_step.agg(backward_ns=pl.col("start_ns").max(), over_ns=pl.col("end_ns").max())


def _delay(reductions: pl.DataFrame, records: pl.DataFrame) -> dict[str, float]:
    """How much reductions delay a backward, `delay_s`, with its standard error `delay_error_s`, by what the kernel
    counted; nothing if it did not.

    Between its first bucket and its last, the training thread runs for a share of the time, waits for a processor for
    the rest. Other programs keep it waiting as well, but not only then.
    """
    in_step = records.filter(pl.col("category") == "step", pl.col("peer") >= 0, pl.col("chunk") >= 0)
    between = reductions.filter(pl.col("queued_us").list.min() >= 0).select(
        "rank",
        "step",
        lasted_us=(pl.col("start_ns").list.last() - pl.col("start_ns").list.first()) / 1e3,
        queued_us=pl.col("queued_us").list.last() - pl.col("queued_us").list.first(),
    )
    steps = between.join(in_step.select("rank", "step", all_us="peer", ran_us="chunk"), on=["rank", "step"])
    steps = steps.filter(pl.col("lasted_us") > pl.col("queued_us"), pl.col("queued_us") >= 0)
    if steps.is_empty():
        return {}
    lasted_us, queued_us, all_us, ran_us = (steps[name].to_numpy().astype(float) for name in steps.columns[2:])
    ran_between_us = lasted_us - queued_us
    differences_us = (ran_us - ran_between_us, all_us - queued_us)
    apart_us, queued_apart_us = (max(float(times_us.sum()), 0.0) for times_us in differences_us)
    usual_share = apart_us / max(apart_us + queued_apart_us, 1.0)
    if usual_share == 0:
        return {}
    delay_s = (lasted_us - ran_between_us / usual_share) / 1e6
    error_s = float(delay_s.std() / max(len(delay_s) - 1, 1) ** 0.5)
    return {"delay_s": max(float(delay_s.mean()), 0.0), "delay_error_s": error_s}


@dataclass(frozen=True, eq=False)
class _TimedBuckets:
    """Steps with the same buckets: their bytes, [buckets], and seconds from the start of the last backward until each
    was ready and reduced, [steps, buckets], and until the backward ended, [steps]. `at_once`: that are reduced at once.
    """

    sizes: list[int]
    ready: _Seconds
    end: _Seconds
    over: _Seconds
    at_once: int

    @classmethod
    def of(cls, alike: pl.DataFrame, steps: pl.DataFrame) -> _TimedBuckets:
        """`alike`: the reductions of each step; `steps`: as returned by `_steps_of_ranks`."""
        sizes = alike["extra"][0].to_list()
        of_steps = alike.join(steps, on=["rank", "step"]).head(max(_MOST_CELLS // (2 * len(sizes) ** 2), 8))
        from_ns = of_steps["backward_ns"].to_numpy().reshape(-1, 1)
        names = ("all_there_ns", "end_ns")
        ready, end = (np.array(of_steps[name].to_list()).reshape(-1, len(sizes)) - from_ns for name in names)
        over = of_steps["over_ns"].to_numpy() - from_ns[:, 0]
        at_once = _ON_STREAM if of_steps["on_device"].any() else _ON_HOST
        return cls(sizes, ready / 1e9, end / 1e9, over / 1e9, at_once)

    def rows(self) -> list[tuple[int, float, float, float]]:
        """Of each bucket: bytes, seconds of service alone and during the backward, and until it was ready; medians."""
        if not len(self.ready):
            return []
        figures = (*_service(self.ready, self.end, self.at_once), self.ready)
        return list(zip(self.sizes, *(np.median(times_us, axis=0).tolist() for times_us in figures), strict=True))

    def copy_per_mb_s(self) -> float:
        """Seconds that a MiB of reduced gradients takes to be copied; 0 on a GPU.

        The reducer waits for the buckets in turn and copies each; the backward ends with the last copy.
        """
        if not len(self.ready) or self.at_once == _ON_STREAM:
            return 0.0
        reduced = np.maximum(self.end, self.ready.max(axis=1)[:, None])
        behind_mb = np.cumsum(self.sizes[::-1])[::-1] / (1 << 20)
        return max(float(np.median(((self.over[:, None] - reduced) / behind_mb).min(axis=1))), 0.0)


def _service(ready: _Seconds, end: _Seconds, at_once: int) -> tuple[_Seconds, _Seconds]:
    """Seconds in which each bucket was reduced, alone and while a backward computed, [steps, buckets].

    Those under way share the time: the oldest `at_once` of them. The backward ends when the last bucket is ready.
    """
    edges = np.sort(np.concatenate([ready, end], axis=1), axis=1)
    begin, lasts = edges[:, None, :-1], np.diff(edges, axis=1)[:, None]
    under_way = (ready[:, :, None] <= begin) & (end[:, :, None] > begin)
    served = under_way & (np.cumsum(under_way, axis=1) <= at_once)
    took = served * lasts / np.maximum(served.sum(axis=1, keepdims=True), 1)
    overlaps = begin < ready.max(axis=1)[:, None, None]
    return (took * ~overlaps).sum(axis=2), (took * overlaps).sum(axis=2)
