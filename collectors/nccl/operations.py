"""Turn the slots of a ring into operations: collectives and transfers with the GPU times of their channels.

In: a `NcclRing`. Out: polars frames. An operation is a start whose channels point to it by handle; it began when its
first channel did and ended with its last. Slots may come in any order, and any of them may be missing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.nccl.ring_reader import SLOT, NcclRing

#: `enum action` of ring.h and `enum event_number` of abi.h.
START, STATE, STOP = 1, 2, 3
COLLECTIVE, P2P, PROXY_OP, PROXY_STEP, KERNEL_CHANNEL = 1, 2, 3, 4, 6

#: Bytes of an element, by NCCL's name of its type.
TYPE_BYTES = {
    "ncclInt8": 1,
    "ncclChar": 1,
    "ncclUint8": 1,
    "ncclInt32": 4,
    "ncclInt": 4,
    "ncclUint32": 4,
    "ncclInt64": 8,
    "ncclUint64": 8,
    "ncclFloat16": 2,
    "ncclHalf": 2,
    "ncclFloat32": 4,
    "ncclFloat": 4,
    "ncclFloat64": 8,
    "ncclDouble": 8,
    "ncclBfloat16": 2,
    "ncclFloat8e4m3": 1,
    "ncclFloat8e5m2": 1,
}
_COMMUNICATORS = {
    "communicator": pl.UInt16,
    "communicator_id": pl.UInt64,
    "communicator_ranks": pl.Int32,
    "communicator_rank": pl.Int32,
}


def operations(ring: NcclRing, timed: pl.DataFrame | None = None) -> pl.DataFrame:
    """One row per operation, by time of its enqueueing. `timed`: `channels(ring)`, if already computed.

    Columns: `handle`, `number` (1 collective, 2 p2p), `communicator_id`, `communicator_ranks`, `communicator_rank`,
    `function`, `sequence` (of the function on the communicator), `step`, `peer` (root, or the other rank, by place in
    the communicator), `count`, `data_type`, `bytes` (null for unknown types), `algorithm`, `protocol`, `channels` (as
    announced), `enqueue_ns` (host), `gpu_start_ns`, `gpu_end_ns` (GPU clock; null unless all channels were timed),
    `channels_timed`.
    """
    number = ring.slots["number"]
    starts = frame(ring.slots[(ring.slots["action"] == START) & ((number == COLLECTIVE) | (number == P2P))])
    names = pl.DataFrame({"number": range(len(ring.names)), "text": ring.names}, schema_overrides={"number": pl.UInt8})
    for column in ("function", "data_type", "algorithm", "protocol"):
        text = names.rename({"number": column, "text": f"{column}_text"})
        starts = starts.join(text, on=column, how="left", maintain_order="left").drop(column)
        starts = starts.rename({f"{column}_text": column})
    rows = [(at, one.id, one.ranks, one.rank) for at, one in enumerate(ring.communicators)]
    communicators = pl.DataFrame(rows, schema=_COMMUNICATORS, orient="row")
    timed = channels(ring) if timed is None else timed
    whole = timed.group_by(pl.col("operation").alias("handle")).agg(
        gpu_start_ns=pl.when(pl.col("gpu_start_ns").null_count() == 0).then(pl.col("gpu_start_ns").min()),
        gpu_end_ns=pl.when(pl.col("gpu_end_ns").null_count() == 0).then(pl.col("gpu_end_ns").max()),
        channels_timed=pl.len(),
    )
    return (
        starts.join(communicators, on="communicator", how="left", maintain_order="left")
        .join(whole, on="handle", how="left", maintain_order="left")
        .with_columns(
            # Where events were lost, those of a channel can be among them, and the operation's first or last one gone.
            known=pl.lit(not (ring.overwritten or ring.dropped)) | (pl.col("channels_timed") >= pl.col("channel")),
            element=pl.col("data_type").replace_strict(TYPE_BYTES, default=None, return_dtype=pl.Int64),
            count=pl.col("first").cast(pl.Int64, strict=False),
            sequence=pl.col("second").cast(pl.Int64, strict=False),
        )
        .select(
            "handle",
            "number",
            "communicator_id",
            "communicator_ranks",
            "communicator_rank",
            "function",
            "sequence",
            "step",
            "peer",
            "count",
            "data_type",
            (pl.col("count") * pl.col("element")).alias("bytes"),
            "algorithm",
            "protocol",
            pl.col("channel").alias("channels"),
            pl.col("host_ns").alias("enqueue_ns"),
            pl.when("known").then("gpu_start_ns"),
            pl.when("known").then("gpu_end_ns"),
            pl.col("channels_timed").fill_null(0),
        )
        .sort("enqueue_ns", maintain_order=True)
    )


def channels(ring: NcclRing) -> pl.DataFrame:
    """One row per channel of an operation: `operation` (handle), `channel`, `gpu_start_ns`, `gpu_end_ns` (GPU clock),
    `seen_start_ns`, `seen_end_ns` (host clock, time of NCCL's report). Null if a start is 0, or if an end is missing
    or before its start.
    """
    slots = frame(ring.slots[ring.slots["number"] == KERNEL_CHANNEL])
    ends = slots.filter(pl.col("action") == STATE).select(
        "handle", gpu_end_ns=pl.col("first").cast(pl.Int64, strict=False), seen_end_ns="host_ns"
    )
    start, end = pl.col("gpu_start_ns"), pl.col("gpu_end_ns")
    return (
        slots.filter(pl.col("action") == START)
        .select(
            "handle",
            "channel",
            operation="first",
            gpu_start_ns=pl.col("second").cast(pl.Int64, strict=False),
            seen_start_ns="host_ns",
        )
        .join(ends.unique("handle", keep="last"), on="handle", how="left", maintain_order="left")
        .with_columns(
            gpu_start_ns=pl.when(start > 0).then(start), gpu_end_ns=pl.when((start > 0) & (end >= start)).then(end)
        )
    )


def count_proxy_steps(ring: NcclRing) -> int:
    """The number of network transfers of proxy ops, if they were requested."""
    return int(((ring.slots["number"] == PROXY_STEP) & (ring.slots["action"] == START)).sum())


def frame(slots: npt.NDArray[np.void]) -> pl.DataFrame:
    """Slots as columns."""
    return pl.DataFrame({name: np.ascontiguousarray(slots[name]) for name in SLOT.names or ()})
