"""Give the recorded communication ops the GPU times from NCCL.

In: the records of an attempt, on the reference clock, and its rings. Out: the same records, start and end of those with
a match replaced by the GPU's, and counts of the unmatched on both sides.

Both sides carry the step. Within a step a rank's collectives are matched by the communicator's ranks and NCCL's
function, in sequence; transfers by peer and direction, in sequence. Where the two sides differ in number (a coalesced
call is one record and several operations, an all-to-all a transfer with each rank) each operation goes to the record it
was enqueued in. Matches with different sizes are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import polars as pl

from tracekit.collectors.nccl.rings import COLLECTIVE, CommunicatorMembers, NcclRecording, converted
from tracekit.collectors.record.wire_format import Flag
from tracekit.collectors.run_directory.segments import ClockFit

#: Beginning of a collective's name -> NCCL's function; the first that fits.
FUNCTIONS = (
    ("allreduce", "AllReduce"),
    ("all_reduce", "AllReduce"),
    ("barrier", "AllReduce"),
    ("allgather", "AllGather"),
    ("all_gather", "AllGather"),
    ("_allgather", "AllGather"),
    ("reduce_scatter", "ReduceScatter"),
    ("_reduce_scatter", "ReduceScatter"),
    ("reduce", "Reduce"),
    ("broadcast", "Broadcast"),
    ("alltoall", "AlltoAll"),
    ("all_to_all", "AlltoAll"),
    ("gather", "Gather"),
    ("scatter", "Scatter"),
)
#: `group`: number of the group's ranks for a collective, the other rank for a transfer.
_KEY = ["rank", "step", "function", "group"]
_WANTED = [*_KEY, "record", "name", "start_ns", "size", "members"]
#: Columns of NCCL's operations.
_OPERATION_SCHEMA: dict[str, type[pl.DataType]] = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "function": pl.String,
    "group": pl.Int32,
    "ranks_number": pl.Int32,
    "number": pl.UInt8,
    "communicator_id": pl.UInt64,
    "communicator_ranks": pl.Int32,
    "sequence": pl.Int64,
    "bytes": pl.Int64,
    "enqueue_ns": pl.Int64,
    "gpu_start_ns": pl.Int64,
    "gpu_end_ns": pl.Int64,
}

Groups = Mapping[int, Mapping[int, Mapping[str, Any]]]
_Members = tuple[int, ...]


def join_nccl(
    records: pl.DataFrame, groups: Groups, nccl: NcclRecording, clocks: Mapping[str, ClockFit], steps: pl.DataFrame
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Replace host times by GPU times in `steps` (rank, step). `groups`: rank -> number in records -> process group.

    Returns the records, rows and columns as before; and, for the trace's metadata, counts of NCCL's operations in the
    recorded steps:

    `timed`: records that now have GPU times. `untimed`: matched, but a channel's end or the GPU's clock is missing.
    `size_differs`: rejected matches. `unmatched_records`, `unmatched_operations`: name -> count. `split`: function ->
    number of operations that all their ranks reported, their mean wait for the last rank and median transfer, seconds.
    `clocks`: rank -> fit of its GPU's clock. `ranks_without_ring`, `unreadable`: what is missing.
    """
    numbers = _numbers(groups)
    numbered = records.with_row_index("record")
    communication = pl.concat([_collectives(numbered, groups, numbers), _transfers(numbered)])
    wanted = communication.join(steps, on=["rank", "step"], how="semi")
    operations = (
        _operations(nccl, numbers, clocks).join(steps, on=["rank", "step"], how="semi").with_row_index("operation")
    )
    matches = _matches(wanted, operations)
    exchanges = _exchanges(operations.join(matches, on="operation", how="anti"))
    matches = pl.concat([matches, _matches(wanted.join(matches, on="record", how="anti"), exchanges)])
    whole = _whole(matches, pl.concat([operations, exchanges]).unique("operation", keep="last"), wanted)
    believed = whole.filter("believed")
    timed = believed.drop_nulls(["gpu_start_ns", "gpu_end_ns"])
    used = matches.join(believed, on="record", how="semi")
    report = {
        "timed": timed.height,
        "untimed": believed.height - timed.height,
        "size_differs": whole.height - believed.height,
        "unmatched_records": _counts(wanted.join(believed, on="record", how="anti")["name"]),
        "unmatched_operations": _counts(operations.join(used, on="operation", how="anti")["function"]),
        "split": _split(operations),
        "overwritten": sum(ring.overwritten for ring in nccl.ranks),
        "dropped": sum(ring.dropped for ring in nccl.ranks),
        "proxy_steps": sum(ring.proxy_steps for ring in nccl.ranks),
        "clocks": {str(ring.rank): asdict(ring.clock) for ring in nccl.ranks if ring.clock is not None},
        "ranks_without_ring": list(nccl.ranks_without_ring),
        "unreadable": list(nccl.unreadable),
    }
    return _replaced(numbered, timed), report


# ---- the two sides ---------------------------------------------------------------------------------------------------


def _numbers(groups: Groups) -> dict[_Members, int]:
    """A number for every set of ranks that forms a process group."""
    distinct = {tuple(map(int, group["ranks"])) for of_rank in groups.values() for group in of_rank.values()}
    return {members: number for number, members in enumerate(sorted(distinct))}


def _collectives(records: pl.DataFrame, groups: Groups, numbers: Mapping[_Members, int]) -> pl.DataFrame:
    """Recorded collectives that have an NCCL function. `size`: bytes of the first tensor, 0 if unknown."""
    rows = []
    for rank, of_rank in groups.items():
        for peer, group in of_rank.items():
            members = tuple(map(int, group["ranks"]))
            rows.append((rank, peer, numbers[members], len(members)))
    schema = {"rank": pl.Int32, "peer": pl.Int32, "group": pl.Int32, "members": pl.Int64}
    function = pl.lit(None, pl.String)
    for start, name in reversed(FUNCTIONS):
        function = pl.when(pl.col("name").str.starts_with(start)).then(pl.lit(name)).otherwise(function)
    return (
        records.filter(pl.col("category") == "collective")
        .join(pl.DataFrame(rows, schema=schema, orient="row"), on=["rank", "peer"])
        .with_columns(function=function, size="extra")
        .filter(pl.col("function").is_not_null() & (pl.col("members") > 1))  # NCCL reports nothing for a single rank
        .select(_WANTED)
    )


def _transfers(records: pl.DataFrame) -> pl.DataFrame:
    """Recorded transfers of a pipeline; they carry no size."""
    send = pl.col("name").str.ends_with("send")
    return (
        records.filter(pl.col("category") == "p2p")
        .with_columns(
            function=pl.when(send).then(pl.lit("Send")).otherwise(pl.lit("Recv")),
            group=pl.col("peer").cast(pl.Int32),
            size=pl.lit(0, pl.Int64),
            members=pl.lit(2, pl.Int64),
        )
        .select(_WANTED)
    )


def _operations(nccl: NcclRecording, numbers: Mapping[_Members, int], clocks: Mapping[str, ClockFit]) -> pl.DataFrame:
    """NCCL's operations of all ranks on the reference clock, with their `group` as numbered in the records."""
    rows = []
    for identity, members in nccl.communicators.items():
        places = _places(members, numbers)
        stated = [members.ranks.get(place) for place in range(members.size)]
        rows.append((identity, numbers.get(tuple(places)) if places else None, places or stated))
    schema: dict[str, Any] = {"communicator_id": pl.UInt64, "ranks_number": pl.Int32, "places": pl.List(pl.Int32)}
    communicators = pl.DataFrame(rows, schema=schema, orient="row")
    frames = []
    for of_rank in nccl.ranks:
        frame = of_rank.operations.with_columns(rank=pl.lit(of_rank.rank, pl.Int32))
        fit = clocks.get(of_rank.host)
        if fit is not None:
            frame = converted(frame, ("enqueue_ns", "gpu_start_ns", "gpu_end_ns"), fit.to_reference)
        frames.append(frame)
    if not frames:
        return pl.DataFrame(schema=_OPERATION_SCHEMA)
    other = pl.col("places").list.get(pl.col("peer"), null_on_oob=True)
    return (
        pl.concat(frames)
        .join(communicators, on="communicator_id", how="left", maintain_order="left")
        .with_columns(group=pl.when(pl.col("number") == COLLECTIVE).then("ranks_number").otherwise(other))
        .select(list(_OPERATION_SCHEMA))
    )


def _places(members: CommunicatorMembers, numbers: Mapping[_Members, int]) -> list[int] | None:
    """The ranks of a communicator by place: as its ranks report, else the one process group that agrees with them."""
    if len(members.ranks) == members.size:
        return [members.ranks[place] for place in range(members.size)]
    fitting = [
        ranks
        for ranks in numbers
        if len(ranks) == members.size and all(ranks[place] == rank for place, rank in members.ranks.items())
    ]
    return list(fitting[0]) if len(fitting) == 1 else None


# ---- matching --------------------------------------------------------------------------------------------------------


def _matches(wanted: pl.DataFrame, operations: pl.DataFrame) -> pl.DataFrame:
    """`record` and `operation`, one row per operation that has a record."""
    wanted = wanted.sort("start_ns", "record").with_columns(
        order=pl.int_range(pl.len()).over(_KEY), records=pl.len().over(_KEY)
    )
    operations = (
        operations.drop_nulls(["function", "group"])
        .sort("enqueue_ns", "sequence")
        .with_columns(order=pl.int_range(pl.len()).over(_KEY), operations=pl.len().over(_KEY))
    )
    counts = wanted.select(*_KEY, "records").unique()
    operations = operations.join(counts, on=_KEY, how="inner", maintain_order="left")
    same = pl.col("operations") == pl.col("records")
    in_sequence = operations.filter(same).join(wanted.select(*_KEY, "order", "record"), on=[*_KEY, "order"])
    in_time = (
        operations.filter(~same)
        .sort("enqueue_ns")
        .join_asof(
            wanted.select(*_KEY, "record", "start_ns").sort("start_ns"),
            left_on="enqueue_ns",
            right_on="start_ns",
            by=_KEY,
            check_sortedness=False,
        )
        .drop_nulls("record")
    )
    return pl.concat([frame.select("record", "operation") for frame in (in_sequence, in_time)])


def _exchanges(unrecorded: pl.DataFrame) -> pl.DataFrame:
    """Turn unrecorded transfers into the all-to-all they may be part of: torch makes one of transfers with each rank.

    A rank receives as much as the record's tensor, so sends count nothing.
    """
    received = pl.when(pl.col("function") == "Recv").then("bytes").otherwise(0)
    return unrecorded.filter(pl.col("number") != COLLECTIVE).with_columns(
        function=pl.lit("AlltoAll"), group="ranks_number", bytes=received
    )


def _whole(matches: pl.DataFrame, operations: pl.DataFrame, wanted: pl.DataFrame) -> pl.DataFrame:
    """Combine the operations of each matched record: first start and last end (null if one is missing), and whether to
    accept the match: the record's tensor has the size that NCCL moved, or that the parts of all ranks make up.
    """
    size, moved = pl.col("size"), pl.col("bytes")
    same = (size == 0) | moved.is_null() | (size == moved) | (size == moved * pl.col("members"))
    return (
        matches.join(operations.select("operation", "bytes", "gpu_start_ns", "gpu_end_ns"), on="operation")
        .group_by("record")
        .agg(
            gpu_start_ns=pl.when(pl.col("gpu_start_ns").null_count() == 0).then(pl.col("gpu_start_ns").min()),
            gpu_end_ns=pl.when(pl.col("gpu_end_ns").null_count() == 0).then(pl.col("gpu_end_ns").max()),
            bytes=pl.when(moved.null_count() == 0).then(moved.sum()),
        )
        .join(wanted.select("record", "size", "members"), on="record")
        .with_columns(believed=same)
    )


def _replaced(records: pl.DataFrame, timed: pl.DataFrame) -> pl.DataFrame:
    """The records in their order; a transfer's wait begins with it, since the host did not wait for it.

    Where CUDA events timed a collective, its start is when its stream got there: NCCL's kernel may have waited behind
    another one. Its end is NCCL's if that is earlier: the event may be of the stream that waited.
    """
    joined = records.join(
        timed.select("record", "gpu_start_ns", "gpu_end_ns"), on="record", how="left", maintain_order="left"
    )
    is_transfer = (pl.col("category") == "p2p") & pl.col("gpu_start_ns").is_not_null()
    by_events = ((pl.col("flags") & int(Flag.DEVICE_CLOCK)) != 0) & (pl.col("category") == "collective")
    earlier_ns = pl.max_horizontal("start_ns", pl.min_horizontal("end_ns", "gpu_end_ns"))
    return joined.with_columns(
        start_ns=pl.when(by_events).then("start_ns").otherwise(pl.coalesce("gpu_start_ns", "start_ns")),
        end_ns=pl.when(by_events).then(earlier_ns).otherwise(pl.coalesce("gpu_end_ns", "end_ns")),
        extra=pl.when(is_transfer).then("gpu_start_ns").otherwise("extra"),
    ).drop("record", "gpu_start_ns", "gpu_end_ns")


# ---- reporting -------------------------------------------------------------------------------------------------------


def _split(operations: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Wait and transfer of the collectives that all their ranks reported, from GPU times alone."""
    start, latest = pl.col("gpu_start_ns"), pl.col("gpu_start_ns").max()
    whole = (
        operations.filter(pl.col("number") == COLLECTIVE)
        .drop_nulls(["gpu_start_ns", "gpu_end_ns"])
        .group_by("communicator_id", "communicator_ranks", "function", "sequence")
        .agg(
            ranks=pl.col("rank").n_unique(),
            wait_s=(latest - start).mean() / 1e9,
            transfer_s=(pl.col("gpu_end_ns").max() - latest) / 1e9,
        )
        .filter(pl.col("ranks") == pl.col("communicator_ranks"))
        .sort("communicator_id", "function", "sequence")  # sums in one order: the same records give the same bits
        .group_by("function", maintain_order=True)
        .agg(count=pl.len(), wait_s=pl.col("wait_s").mean(), transfer_s=pl.col("transfer_s").median())
        .sort("function")
    )
    return {row.pop("function"): row for row in whole.iter_rows(named=True)}


def _counts(names: pl.Series) -> dict[str, int]:
    counted = names.fill_null("?").value_counts().sort(names.name)
    return {str(name): int(count) for name, count in counted.iter_rows()}
