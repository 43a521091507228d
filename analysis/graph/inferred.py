"""Transfers that nobody recorded, inferred from the computes at their two ends.

In: the trace of a pipeline without any send or receive. Out: the trace with a receive before each compute that needs
the result of another stage. It begins when that result is there. If the stage had nothing else to do by then, it waited
for the transfer, which took until the compute began. Any other transfer takes the median of those that its stage waited
for, at most as long as it could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.graph.rules.megatron import BACKWARD, COMPUTE_STREAM, FORWARD, Direction
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.numeric.whole import UNDIVIDED, Whole, by_name
from tracekit.base.errors import GraphError
from tracekit.base.text import short
from tracekit.trace.canonical import Trace
from tracekit.trace.schema import SCHEMA

_LINK = ["kind", "pp_rank", "sender"]
_STAGE = ("step", "dp_rank", "pp_rank")
_START, _END = pl.col("start"), pl.col("start") + pl.col("duration")


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
    usual = whole.agreed(lambda: _waits(received), _usual_waits)
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
    return {link: float(np.median(np.concatenate(some))) for link, some in by_name(parts).items()}


def _where(name: str, row: dict[str, object]) -> str:
    return f"{name}: step {row['step']}, dp_rank {row['dp_rank']}, stage {row['pp_rank']}: {row['kind']} {row['seq']}"
