"""Read the ring file of one rank, also while its process still writes.

In: `nccl-<host>-<pid>.ring`, as `ring.h` lays it out, and the slots that the launcher saved from it before their reuse.
Out: a `NcclRing` with every whole slot once, in the order of its lane. A slot counts only if its sequence number fits
its place, before and after it was copied; torn slots and overwritten ones are counted instead.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tracekit.base.errors import FormatError
from tracekit.collectors.record.nccl_wire_format import LOG_SUFFIX, RING_SUFFIX
from tracekit.collectors.record.small_file import open_to_read

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

    path: Path
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
    return RingFile(path, header, lanes)


def is_ring(path: Path) -> bool:
    """True if the file has the name of a ring."""
    return _FILE.match(path.name) is not None


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
            Communicator(int(one["id"]), int(one["ranks"]), int(one["rank"]))
            for one in header["communicator"]
            if one["ready"]
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
