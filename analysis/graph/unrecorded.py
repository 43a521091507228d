"""Ops that nobody recorded: members of collectives, added from their peers, and transfers, inferred from computes.

In: a trace. Out: its `missing_ops` and the trace with them; and the trace with a receive before each compute that needs
the result of another stage, if the pipeline has no send or receive. Such a receive begins when that result is
there. If the stage had nothing else to do by then, it waited for the transfer, which took until the compute began.
Any other transfer takes the median of those that its stage waited for, at most as long as it could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.graph.megatron import BACKWARD, COMPUTE_STREAM, FORWARD, Direction
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.base.errors import GraphError
from tracekit.base.text import short
from tracekit.trace.canonical import Trace
from tracekit.trace.model import DP_COLLECTIVES, KINDS, OpKind, Worker
from tracekit.trace.schema import KIND_TYPE, SCHEMA

#: A worker takes part in these collectives whenever its peers on other DP ranks do.
SHARED = (
    *(kind for kind in KINDS if kind in DP_COLLECTIVES),
    OpKind.EMBEDDING_GRADS_ALL_REDUCE,
    OpKind.OPTIMIZER_CLIP_MAIN_GRAD,
)
_LINK = ["kind", "pp_rank", "sender"]
_STAGE = ("step", "dp_rank", "pp_rank")
_MISSING = {"step": pl.Int32, "dp_rank": pl.Int32, "pp_rank": pl.Int16, "kind": pl.UInt8, "seq": pl.Int32}
_START, _END = pl.col("start"), pl.col("start") + pl.col("duration")


class Gap(Struct, frozen=True):
    """Ops of one kind that are missing from a worker although its peers recorded them.

    `steps`: the step numbers, ascending, one for each missing op.
    """

    kind: OpKind
    worker: Worker
    steps: tuple[int, ...]

    @property
    def ops(self) -> int:
        """The number of missing ops."""
        return len(self.steps)


def missing_ops(counts: Int32s, lanes: Ints, steps: Int32s, dp_ranks: Int32s, stages: int) -> pl.DataFrame:
    """The ops missing from `lanes`: step, dp_rank, pp_rank, the code of the kind, and seq.

    `counts`: ops of each lane, [steps x dp_ranks, stages x kinds]. `steps`, `dp_ranks`: their numbers.
    """
    by_lane = counts.reshape(len(steps), len(dp_ranks), stages, len(KINDS))
    complete = np.zeros(len(counts), np.bool_)
    complete[lanes] = True
    in_step = complete.reshape(len(steps), len(dp_ranks))
    rows: list[Ints] = []
    for kind in SHARED:
        count = by_lane[:, :, :, kind.code]
        if not count.any():
            continue
        expected = np.where(in_step[:, :, None], count, 0).max(axis=1, keepdims=True)
        joined = _joined_stages(kind, stages)
        expected[:, :, joined] = expected[:, :, joined].max(axis=2, keepdims=True)
        lacks = np.where(in_step[:, :, None], expected - count, 0)
        cells = np.argwhere(lacks > 0)
        often = lacks[tuple(cells.T)]
        cell = np.repeat(np.arange(len(cells)), often)
        seq = count[tuple(cells.T)][cell] + np.arange(len(cell)) - (np.cumsum(often) - often)[cell]
        step, dp_index, stage = cells[cell].T
        rows.append(np.stack([steps[step], dp_ranks[dp_index], stage, np.full(len(cell), kind.code), seq], axis=1))
    table = np.concatenate(rows) if rows else np.empty((0, 5), np.int64)
    return pl.DataFrame(table, list(_MISSING)).cast(pl.Schema(_MISSING))


def gaps_of(missing: pl.DataFrame) -> tuple[Gap, ...]:
    """The `missing_ops` by worker and kind."""
    key = "kind", "dp_rank", "pp_rank"
    rows = missing.group_by(key).agg(pl.col("step").sort()).sort(key).rows()
    return tuple(Gap(KINDS[kind], Worker(dp_rank, pp_rank), tuple(steps)) for kind, dp_rank, pp_rank, steps in rows)


def _joined_stages(kind: OpKind, stages: int) -> list[int]:
    """The stages that a collective joins; a stage without a recording took part too."""
    if kind is OpKind.OPTIMIZER_CLIP_MAIN_GRAD:
        return list(range(stages))
    return [0, stages - 1] if kind is OpKind.EMBEDDING_GRADS_ALL_REDUCE else [0]


def with_missing_ops(trace: Trace, missing: pl.DataFrame) -> Trace:
    """The trace with its `missing_ops`; each begins and ends at the median times of the same op on its peers.

    A collective waits for all of its members, so without a late member none seems to have been late. A member that its
    peers recorded must have taken part; the graph computes its start (see `DependencyGraph.from_trace`).
    """
    rank_of = trace.worker_ranks()
    ranks = [rank_of[Worker(*place)] for place in missing.select("dp_rank", "pp_rank").rows()]
    wanted = missing.with_columns(rank=pl.Series(ranks, dtype=pl.Int32), kind=missing["kind"].cat.to(KIND_TYPE))
    times = pl.col("start").median(), (pl.col("start") + pl.col("duration")).median().alias("end")
    shared = trace.ops.filter(pl.col("kind").is_in([str(kind) for kind in SHARED]))
    key = ["step", "kind", "seq"]
    of_stage = shared.group_by(*key, "pp_rank").agg(*times, pl.col("chunk").first())
    of_all = shared.group_by(key).agg(*times)
    # Embedding gradients are summed over the first and the last stage of one DP rank, not over DP ranks.
    of_lane = shared.filter(pl.col("kind") == OpKind.EMBEDDING_GRADS_ALL_REDUCE).group_by(*key, "dp_rank").agg(*times)
    filled = (
        wanted.join(of_stage, on=[*key, "pp_rank"], how="left")
        .join(of_all, on=key, how="left", suffix="_of_all")
        .join(of_lane, on=[*key, "dp_rank"], how="left", suffix="_of_lane")
        .with_columns(pl.coalesce(f"{name}_of_lane", name, f"{name}_of_all").alias(name) for name in ("start", "end"))
        .with_columns(duration=pl.col("end") - pl.col("start"), microbatch=pl.lit(None, pl.Int32))
    )
    put_in = filled.select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
    ops = pl.concat([trace.ops, put_in], how="diagonal")
    return Trace(ops.rechunk(), trace.layout, trace.name, trace.step_starts, trace.metadata)


def with_inferred_transfers(trace: Trace, virtual: Ints, whole: Whole = UNDIVIDED) -> Trace:
    """Add the receives. Computes without a microbatch get one, in order of start. `virtual`: the `virtual_stages`.
    `whole`: the job of which `trace` may be some steps.

    Raises GraphError for a microbatch that repeats, and for a compute that ends before what it needs has begun.
    """
    place = pl.col("chunk").fill_null(0).cast(pl.Int64) * trace.layout.pp + pl.col("pp_rank")
    stream = trace.ops.filter(pl.col("kind").is_in([str(kind) for kind in COMPUTE_STREAM])).sort(*_STAGE, "start")
    computes = stream.with_columns(
        free=_END.cum_max().shift(1).over(_STAGE),  # from when on the stage has nothing else to do
        virtual=place.replace_strict(range(virtual.size), virtual.reshape(-1), return_dtype=pl.Int64),
        nth=pl.int_range(pl.len(), dtype=pl.Int32).over(*_STAGE, "kind", "chunk", order_by="seq"),
    ).filter(pl.col("kind").is_in([str(FORWARD.compute), str(BACKWARD.compute)]))
    if computes["microbatch"].null_count():
        computes = computes.with_columns(microbatch="nth")
    recorded = computes.select(list(SCHEMA))
    others = trace.ops.join(recorded, on=[*_STAGE, "kind", "seq"], how="anti")
    received = pl.concat([_received(computes, direction, short(trace.name)) for direction in (FORWARD, BACKWARD)])
    usual = whole.combined(lambda: _waits(received), _usual_waits)
    types = {name: received.schema[name] for name in _LINK} | {"usual": pl.Float64}
    waits = pl.DataFrame([(*link, wait) for link, wait in usual.items()], types, orient="row")
    at_most = pl.min_horizontal("took", pl.col("usual").fill_null(0.0))
    received = received.join(waits, on=_LINK, how="left", maintain_order="left").with_columns(
        duration=pl.when("waited").then("took").otherwise(at_most)
    )
    received = received.select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
    ops = pl.concat([others, recorded, received], how="diagonal").rechunk()
    return Trace(ops, trace.layout, trace.name, trace.step_starts, trace.metadata)


def _received(computes: pl.DataFrame, direction: Direction, name: str) -> pl.DataFrame:
    """The receives of one direction, and how long each `took` at most; `waited`: its stage had nothing else to do."""
    consumers = computes.filter(pl.col("kind") == direction.compute).sort(*_STAGE, "seq")
    same = ["step", "dp_rank", "virtual", "microbatch"]
    if (again := consumers.filter(pl.struct(same).is_duplicated())).height:
        row = again.row(0, named=True)
        raise GraphError(f"{_where(name, row)} repeats microbatch {row['microbatch']}, so that its order is unknown")
    producers = consumers.select(
        "step",
        "dp_rank",
        pl.col("virtual") + direction.stride,
        "microbatch",
        sender="pp_rank",
        began="start",
        sent=_END,
    )
    received = consumers.join(producers, on=same, maintain_order="left").filter(pl.col("sender") != pl.col("pp_rank"))
    if (early := received.filter(pl.col("began").gt(_START) & pl.col("began").ge(_END))).height:
        raise GraphError(
            f"{_where(name, early.row(0, named=True))} ends before the compute that it needs begins: the clocks of the"
            " ranks differ too much"
        )
    # A link carries one transfer after the other: the one before had ended when its compute began.
    linked = pl.max_horizontal("sent", _START.shift(1).over(*_STAGE, "sender"))
    return received.with_columns(
        kind=pl.lit(str(direction.recv)),
        seq=pl.int_range(pl.len()).over(_STAGE),
        start="sent",
        took=(_START - linked).clip(0),
        waited=(pl.col("sent") >= pl.col("free")).fill_null(value=True),
    )


def _waits(received: pl.DataFrame) -> dict[tuple[Any, ...], Floats]:
    """The times of the transfers that stages waited for, seconds, by link."""
    links = received.filter("waited").group_by(_LINK).agg("took")
    return {tuple(link): np.array(took) for *link, took in links.iter_rows()}


def _usual_waits(parts: Sequence[Mapping[tuple[Any, ...], Floats]]) -> dict[tuple[Any, ...], float]:
    """The median of each link. In: `_waits` of batches of steps."""
    return {link: float(np.median(np.concatenate(of_parts))) for link, of_parts in by_name(parts).items()}


def _where(name: str, row: dict[str, object]) -> str:
    return f"{name}: step {row['step']}, dp_rank {row['dp_rank']}, stage {row['pp_rank']}: {row['kind']} {row['seq']}"
