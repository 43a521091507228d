"""The ring files of an attempt, each with the rank that wrote it, as operations with GPU times of their channels."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.errors import FormatError
from tracekit.collectors.record.small_file import open_to_read
from tracekit.collectors.record.wire_format import LOG_SUFFIX, RING_SUFFIX
from tracekit.collectors.run_directory.segments import ProcessId


@dataclass(frozen=True, slots=True)
class RankOperations:
    """One rank's operations as of `operations.operations`, with GPU times on the host's monotonic clock. `clock`: None
    if no channel relates both clocks; the GPU times are then null.
    """

    rank: int
    host: str
    operations: pl.DataFrame
    clock: GpuClock | None
    overwritten: int
    dropped: int
    proxy_steps: int


@dataclass(frozen=True, slots=True)
class CommunicatorMembers:
    """A communicator: its size, and the ranks at its places as far as known."""

    size: int
    ranks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NcclRecording:
    """NCCL's events in one attempt. `unreadable`: rings that are damaged, or of no rank of the attempt, and why."""

    ranks: tuple[RankOperations, ...]
    communicators: Mapping[int, CommunicatorMembers]
    ranks_without_ring: tuple[int, ...]
    unreadable: tuple[str, ...]


def ring_files(directory: Path) -> list[Path]:
    """The rings of an attempt."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.glob(f"nccl-*{RING_SUFFIX}") if _FILE.match(path.name))


def read_nccl(directory: Path, processes: Mapping[int, ProcessId]) -> NcclRecording | None:
    """Read the rings of an attempt, by rank; None if there are none. Damaged ones are listed, not raised.

    Ranks are found by host and process: NCCL only has places within a communicator.
    """
    rank_of = {process: rank for rank, process in processes.items()}
    rings: dict[int, NcclRing] = {}
    unreadable = []
    files = ring_files(directory)
    for path in files:
        try:
            ring = read_ring(path)
        except (FormatError, OSError) as error:
            unreadable.append(str(error))
            continue
        rank = rank_of.get(ProcessId(ring.host, ring.process))
        if rank is None:
            unreadable.append(f"{path}: written by process {ring.process} on {ring.host}, which is not a recorded rank")
        else:
            rings[rank] = ring
    if not files:
        return None
    return NcclRecording(
        ranks=tuple(_of_rank(rank, rings[rank]) for rank in sorted(rings)),
        communicators=_members(rings),
        ranks_without_ring=tuple(sorted(rank for rank in rank_of.values() if rank not in rings)),
        unreadable=tuple(unreadable),
    )


def _of_rank(rank: int, ring: NcclRing) -> RankOperations:
    timed = channels(ring)
    timed_operations = operations(ring, timed)
    clock = fit_gpu_clock(timed, timed_operations)
    times = ("gpu_start_ns", "gpu_end_ns")
    if clock is None:
        timed_operations = timed_operations.with_columns(pl.lit(None, pl.Int64).alias(name) for name in times)
    else:
        timed_operations = converted(timed_operations, times, clock.to_host)
    return RankOperations(
        rank, ring.host, timed_operations, clock, ring.overwritten, ring.dropped, count_proxy_steps(ring)
    )


def _members(rings: Mapping[int, NcclRing]) -> dict[int, CommunicatorMembers]:
    """Map communicators to the places of ranks, as far as its ranks wrote rings."""
    sizes: dict[int, int] = {}
    places: dict[int, dict[int, int]] = {}
    for rank, ring in rings.items():
        for communicator in ring.communicators:
            sizes[communicator.id] = communicator.ranks
            places.setdefault(communicator.id, {})[communicator.rank] = rank
    return {identity: CommunicatorMembers(size, places[identity]) for identity, size in sizes.items()}


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
    """One row per operation, by time of its enqueueing: a start whose channels point to it. `timed`: `channels(ring)`,
    if already computed.

    Columns: `handle`, `number` (1 collective, 2 p2p), `communicator_id`, `communicator_ranks`, `communicator_rank`,
    `function`, `sequence` (of the function on the communicator), `step`, `peer` (root, or the other rank, by place in
    the communicator), `count`, `data_type`, `bytes` (null for unknown types), `algorithm`, `protocol`, `channels` (as
    announced), `enqueue_ns` (host), `gpu_start_ns`, `gpu_end_ns` (GPU clock; null unless all channels were timed),
    `channels_timed`.
    """
    number = ring.slots["number"]
    starts = frame(ring.slots[(ring.slots["action"] == START) & ((number == COLLECTIVE) | (number == P2P))])
    numbered = pl.col("function", "data_type", "algorithm", "protocol")
    names = dict(enumerate(ring.names))
    starts = starts.with_columns(numbered.replace_strict(names, default=None, return_dtype=pl.String))
    rows = [(index, group.id, group.ranks, group.rank) for index, group in enumerate(ring.communicators)]
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


MAGIC = int.from_bytes(b"TKNCCL1\n", "little")
VERSION = 2
HEADER_BYTES = 40960

#: `struct slot` packed into words by `push` of plugin.c.
SLOT = np.dtype(
    [
        ("sequence", "<u8"),
        ("host_ns", "<i8"),
        ("handle", "<u8"),
        ("first", "<u8"),
        ("second", "<u8"),
        ("step", "<i4"),
        ("peer", "<i4"),
        ("action", "u1"),
        ("lane", "u1"),
        ("channel", "u1"),
        ("warps", "u1"),
        ("communicator", "<u2"),
        ("state", "<u2"),
        ("function", "u1"),
        ("data_type", "u1"),
        ("algorithm", "u1"),
        ("protocol", "u1"),
        ("number", "u1"),
        ("flags", "u1"),
        ("unused", "<u2"),
    ]
)
_LANE = np.dtype([("written", "<u8"), ("taken", "<u4"), ("reserved", "<u4"), ("unused", "<u4", 12)])
_COMMUNICATOR = np.dtype(
    [("ready", "<u4"), ("ranks", "<i4"), ("rank", "<i4"), ("unused", "<u4"), ("id", "<u8"), ("padding", "V40")]
)
_NAME = np.dtype([("pointer", "<u8"), ("text", "S24")])
_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("communicators", "<u4"),
        ("slots_per_lane", "<u8"),
        ("process", "<i8"),
        ("dropped", "<u8"),
        ("unused", "<u8", 27),
        ("lane", _LANE, 32),
        ("communicator", _COMMUNICATOR, 512),
        ("name", _NAME, 128),
        ("padding", "u1", 1792),
    ]
)
_FILE = re.compile(rf"nccl-(?P<host>.+)-(?P<process>\d+){re.escape(RING_SUFFIX)}$")


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator as seen by one of its ranks. `id` is the same on all ranks, `rank` is the place of this one."""

    id: int
    ranks: int
    rank: int


@dataclass(frozen=True, slots=True)
class NcclRing:
    """NCCL's events in one process. `slots`: dtype `SLOT`, by lane and sequence.

    `overwritten`: slots reused before they were read, including torn ones. `dropped`: events of threads for which no
    lane was left.
    """

    host: str
    process: int
    slots: npt.NDArray[np.void]
    communicators: tuple[Communicator, ...]
    names: tuple[str, ...]
    overwritten: int
    dropped: int


@dataclass(frozen=True, slots=True)
class RingFile:
    """An open ring file: its header as it was when opened, its lanes as they are. Raises FormatError and OSError."""

    header: npt.NDArray[np.void]
    lanes: npt.NDArray[np.void]

    def lane(self, number: int, after: int) -> npt.NDArray[np.void]:
        """Whole slots of a lane with sequence numbers beyond `after` that are still there, ascending."""
        written, size = int(self.header["lane"]["written"][number]), self.lanes.shape[1]
        wanted = np.arange(max(after, written - size) + 1, written + 1, dtype=np.uint64)
        places = ((wanted - 1) % np.uint64(size)).astype(np.intp)
        shared = self.lanes[number]
        before = shared["sequence"][places]
        copy: npt.NDArray[np.void] = shared[places]
        whole = (before == wanted) & (copy["sequence"] == wanted) & (shared["sequence"][places] == wanted)
        whole &= copy["lane"] == number
        return copy.compress(whole)


def open_ring(path: Path) -> RingFile:
    """Map a ring file for reading. Raises FormatError if it is not one, or of another version."""
    if path.stat().st_size < HEADER_BYTES:
        raise FormatError(f"{path}: {path.stat().st_size} bytes; a ring of NCCL events has at least {HEADER_BYTES}")
    header = np.fromfile(path, _HEADER, 1)[0]
    if int(header["magic"]) != MAGIC or int(header["version"]) != VERSION:
        raise FormatError(f"{path}: not a ring of NCCL events this tracekit reads; upgrade, or record again")
    size = int(header["slots_per_lane"])
    if path.stat().st_size < HEADER_BYTES + len(header["lane"]) * size * SLOT.itemsize or size & (size - 1) or not size:
        raise FormatError(f"{path}: damaged, {size} slots per lane do not fit into the file; record again")
    lanes = np.memmap(path, SLOT, "r", HEADER_BYTES, (len(header["lane"]), size))
    return RingFile(header, lanes)


def read_ring(path: str | os.PathLike[str]) -> NcclRing:
    """Read all events of one process. Raises FormatError if the file is damaged."""
    path = Path(path)
    match = _FILE.match(path.name)
    if match is None:
        raise FormatError(f"{path}: not the name of a ring; expected nccl-HOST-PID{RING_SUFFIX}")
    opened = open_ring(path)
    header = opened.header
    logged = _read_log(path.with_suffix(LOG_SUFFIX))
    parts = []
    for number in np.flatnonzero(header["lane"]["written"]):
        earlier = logged[logged["lane"] == number]
        last = int(earlier["sequence"].max()) if len(earlier) else 0
        parts += [earlier, opened.lane(int(number), last)]
    slots = np.concatenate([np.empty(0, SLOT), *parts])
    return NcclRing(
        host=match["host"],
        process=int(header["process"]),
        slots=slots,
        communicators=tuple(
            Communicator(int(communicator["id"]), int(communicator["ranks"]), int(communicator["rank"]))
            for communicator in header["communicator"]
            if communicator["ready"]
        ),
        names=tuple(text.decode("utf-8", errors="replace") for text in header["name"]["text"]),
        overwritten=int(header["lane"]["written"].sum()) - len(slots),
        dropped=int(header["dropped"]),
    )


def _read_log(path: Path) -> npt.NDArray[np.void]:
    """Slots the launcher saved; a torn tail is cut off."""
    try:
        with open_to_read(path) as file:
            content = file.read()
    except FileNotFoundError:
        content = b""
    return np.frombuffer(content, SLOT, len(content) // SLOT.itemsize)


#: Number of stretches of time for the drift fit, the least number, and the fewest channels of a stretch.
STRETCHES, LEAST_STRETCHES = 16, 4
LEAST_CHANNELS = 8
REFINEMENTS = 3
#: Assumed drift of a clock if too few channels allow a fit.
UNKNOWN_DRIFT = 5e-5
#: A less certain clock is rejected: it may have been set back while the job ran.
LARGEST_UNCERTAINTY_NS = 5_000_000

_Times = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GpuClock:
    """host = `host_ns` + (gpu - `gpu_ns`) x (1 + `drift`), ns.

    `uncertainty_ns`: largest error of a time, from the width of the bounds and the distance of the line from their
    middles. `channels`: number of channels used.
    """

    gpu_ns: int
    host_ns: int
    drift: float
    uncertainty_ns: float
    channels: int

    def to_host(self, gpu_ns: _Times) -> _Times:
        """GPU times on the host's monotonic clock, ns."""
        since = gpu_ns - self.gpu_ns
        return self.host_ns + since + np.round(self.drift * since).astype(np.int64)


def converted(frame: pl.DataFrame, names: Iterable[str], convert: Callable[[_Times], _Times]) -> pl.DataFrame:
    """The frame with the times `names` on another clock; nulls stay."""
    return frame.with_columns(
        pl.when(pl.col(name).is_not_null()).then(pl.Series(convert(frame[name].fill_null(0).to_numpy()))).alias(name)
        for name in names
    )


def fit_gpu_clock(channels: pl.DataFrame, operations: pl.DataFrame) -> GpuClock | None:
    """Fit the clock of one rank's GPU to its channels and operations; None if no channel has both bounds, or no line
    fits them.

    A channel cannot start before its operation was enqueued, and NCCL cannot report its start or end before it
    happened: each bounds the difference of the clocks from both sides. In a stretch of time, the tightest bounds leave
    a few microseconds; a line through their middles is the drift.
    """
    enqueued = operations.select("enqueue_ns", operation="handle")
    bounded = channels.join(enqueued, on="operation").drop_nulls(["gpu_start_ns", "gpu_end_ns", "seen_end_ns"])
    if bounded.is_empty():
        return None
    start, end, enqueue, seen_start, seen_end = (
        bounded[name].to_numpy()
        for name in ("gpu_start_ns", "gpu_end_ns", "enqueue_ns", "seen_start_ns", "seen_end_ns")
    )
    base_gpu = int(start[0])
    base = int(enqueue[0]) - base_gpu  # differences of clocks are small numbers from here on
    least = (enqueue - start - base).astype(np.float64)  # host - gpu is at least this
    most = np.minimum(seen_start - start, seen_end - end).astype(np.float64) - base
    since = (start - base_gpu).astype(np.float64)
    drift, missed = 0.0, UNKNOWN_DRIFT * float(np.ptp(since)) / 2
    for _ in range(REFINEMENTS):  # bounds of one stretch are only tight after drift is removed
        means, low, high = _stretches(since, least - drift * since, most - drift * since)
        if len(means) > 1:
            residual_drift, missed = min((_line(means, bounds) for bounds in (low, high)), key=lambda line: line[1])
            drift += residual_drift
    lowest, highest = float((least - drift * since).max()), float((most - drift * since).min())
    offset = (lowest + highest) / 2
    # The error of the line counts twice towards the ends of the recording.
    uncertainty = abs(highest - lowest) / 2 + 2 * missed
    if uncertainty > LARGEST_UNCERTAINTY_NS:
        return None
    return GpuClock(
        gpu_ns=base_gpu,
        host_ns=base_gpu + base + round(offset),
        drift=drift,
        uncertainty_ns=uncertainty,
        channels=len(start),
    )


def _line(times: _Floats, bounds: _Floats) -> tuple[float, float]:
    """The slope of the line through bounds, and the largest distance of one from it."""
    slope, offset = np.polyfit(times, bounds, 1)
    return float(slope), float(np.abs(bounds - (slope * times + offset)).max())


def _stretches(since: _Floats, least: _Floats, most: _Floats) -> tuple[_Floats, _Floats, _Floats]:
    """Mean time and tightest bounds of each stretch of time."""
    count = min(STRETCHES, len(since) // LEAST_CHANNELS)
    count = count if count >= LEAST_STRETCHES else 1
    length = np.ptp(since) / count or 1.0
    stretch = np.minimum(((since - since.min()) / length).astype(np.int64), count - 1)
    numbers, sizes = np.unique(stretch, return_counts=True)
    whole = [stretch == number for number in numbers[sizes >= LEAST_CHANNELS]] or [np.ones(len(since), dtype=bool)]
    low = np.array([least[inside].max() for inside in whole])
    high = np.array([most[inside].min() for inside in whole])
    means = np.array([since[inside].mean() for inside in whole])
    return means, low, high
