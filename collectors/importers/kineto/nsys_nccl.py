"""What NCCL says of its collectives in an export of Nsight Systems.

In: the ranges of NCCL's NVTX domain, if the recording has their payloads. Out: the arguments of its kernels. A payload
holds the communicator, bytes and peer of a call, in binary as the file's schemas describe it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.collectors.importers.kineto.event_tables import NO_ID, CollectiveArgs, Ints, Table, rows_of
from tracekit.collectors.importers.kineto.nsys_file import Export, columns

#: NCCL's labels of what a payload holds, by our names.
_LABELS = {
    "communicator": "NCCL communicator ID", "bytes": "Message size [bytes]", "peer": "Peer rank",
    "size": "No. of ranks", "rank": "Rank", "device": "CUDA device",
}  # fmt: skip
_PLACES = {label: place for place, label in enumerate(_LABELS.values())}
#: NVTX's numbers of integer types, as `struct` names them.
_INTEGERS = {5: "<i", 6: "<I", 7: "<q", 8: "<Q", 9: "<q", 10: "<Q", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 22: "<Q"}
#: What comes before a binary payload: its domain, its schema, its bytes, and all bytes.
_HEAD = struct.Struct("<4Q")
#: Of each schema: which label, its type, and its place in the payload.
_Schemas = Mapping[int, Sequence[tuple[int, str, int]]]
_CALL = re.compile(r"nccl([A-Z]\w*)")
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


def nccl_calls(export: Export) -> tuple[Table, tuple[str, ...]]:
    """Return the calls with payloads: start (ns), thread, `call`, _LABELS (-1 if not there); and the names of calls."""
    names: dict[str, int] = {}
    schemas = _schemas(export)

    def found() -> Iterator[tuple[int, ...]]:
        if not export.has("NVTX_EVENTS", "binaryData"):
            return
        texts, where = (("text", "textId"), ("binaryData", "")), "binaryData IS NOT NULL"
        for start, thread, text, binary in export.rows("NVTX_EVENTS", ("start", "globalTid"), texts, where):
            values = _decoded(binary, schemas)
            if values[0] != NO_ID and text is not None and (name := _CALL.match(text)):
                yield start, thread, names.setdefault(_WORD.sub("_", name[1]).lower(), len(names)), *values

    return columns(found(), ("start", "thread", "call", *_LABELS)), tuple(names)


@dataclass(frozen=True, slots=True)
class Communicators:
    """`size`: the number of ranks of each, as far as known. `ranks`: those in the job, if all are known, by their rank
    in the communicator.
    """

    size: Mapping[int, int]
    ranks: Mapping[int, Sequence[int]]


def communicators(calls: Table, rank: Ints) -> Communicators:
    """Return what calls say of communicators. `rank`: of the job, that made each call, -1 for none, [calls].

    One that began before the recording has the ranks that use it, if there are several.
    """
    creations = np.flatnonzero((calls["size"] > 0) & (calls["rank"] >= 0))
    size = {
        int(one): int(count)
        for one, count in zip(calls["communicator"][creations], calls["size"][creations], strict=True)
    }
    ranks = {}
    for communicator in np.unique(calls["communicator"]).tolist():
        of_communicator = calls["communicator"] == communicator
        if communicator in size:
            of_members = creations[of_communicator[creations] & (rank[creations] >= 0)]
            by_place = dict(zip(calls["rank"][of_members].tolist(), rank[of_members].tolist(), strict=True))
            listed = [by_place[place] for place in sorted(by_place)]
        else:
            listed = [one for one in np.unique(rank[of_communicator]).tolist() if one >= 0]
        if len(listed) == size.get(communicator, max(len(listed), 2)):
            ranks[communicator] = listed
    return Communicators(size, ranks)


def collectives(
    launched: Table, calls: Table, names: Sequence[str], communicators: Communicators
) -> tuple[Ints, tuple[CollectiveArgs, ...]]:
    """Return the arguments of NCCL's kernels, and which of them each has, -1 for none, [kernels].

    `launched`: the thread, the start of the launch (ns) and the rank of each. A kernel does what its thread called
    since it launched the kernel before: a group of calls is launched when it ends.
    """
    numbers: dict[CollectiveArgs, int] = {}
    which = np.full(len(launched["start"]), NO_ID)
    calls = rows_of(calls, np.flatnonzero(calls["bytes"] >= 0))
    calls = rows_of(calls, np.argsort(calls["start"], kind="stable"))
    for thread in np.unique(launched["thread"]).tolist():
        of_thread = rows_of(calls, np.flatnonzero(calls["thread"] == thread))
        kernels = np.flatnonzero(launched["thread"] == thread)
        kernels = kernels[np.argsort(launched["start"][kernels], kind="stable")]
        until = np.searchsorted(of_thread["start"], launched["start"][kernels], side="right").tolist()
        before = 0
        for kernel, end in zip(kernels.tolist(), until, strict=True):
            if end:
                group = {name: values[min(before, end - 1) : end] for name, values in of_thread.items()}
                args = _args(group, names, int(launched["rank"][kernel]), communicators)
                which[kernel] = numbers.setdefault(args, len(numbers))
            before = end
    return which, tuple(numbers)


def _args(group: Table, names: Sequence[str], rank: int, communicators: Communicators) -> CollectiveArgs:
    """The arguments of the calls that one kernel does."""
    communicator = int(group["communicator"][-1])
    group = rows_of(group, np.flatnonzero(group["communicator"] == communicator))
    did = {names[call] for call in group["call"].tolist()}
    name = "send_recv" if did == {"send", "recv"} else names[group["call"][-1]]
    peers, members, peer = np.unique(group["peer"]).tolist(), communicators.ranks.get(communicator), None
    size = communicators.size.get(communicator, len(members) if members else None)
    if name in {"send", "recv"} and len(peers) == 1:
        peer = members[peers[0]] if members and 0 <= peers[0] < len(members) else peers[0]
    ends: tuple[int | None, int | None] = (None, None)
    if peer is not None:
        ends = (rank, peer) if name == "send" else (peer, rank)
    received = np.array([names[call] == "recv" for call in group["call"].tolist()])
    moved = int(group["bytes"][~received if name == "send_recv" else slice(None)].sum())
    listed = None if members is None else str(sorted(members))
    return CollectiveArgs(
        name, moved, None, "Byte", size, f"{communicator & (1 << 64) - 1:#x}", None,
        listed, None, None, None, *ends,
    )  # fmt: skip


def _schemas(export: Export) -> _Schemas:
    fields: dict[int, list[tuple[int, str, int]]] = {}
    entries = export.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", ("schemaId", "type", "offset"), [("name", "")])
    for schema, kind, offset, label in set(entries):
        if label in _PLACES and kind in _INTEGERS:
            fields.setdefault(schema, []).append((_PLACES[label], _INTEGERS[kind], max(offset, 0)))
    return fields


def _decoded(payload: bytes | str, schemas: _Schemas) -> list[int]:
    """Return the integers of a binary payload, by _LABELS; -1 for those it lacks."""
    values = [NO_ID] * len(_LABELS)
    try:
        binary = bytes.fromhex(payload) if isinstance(payload, str) else payload
        for place, kind, offset in schemas.get(_HEAD.unpack_from(binary)[1], ()):
            (value,) = struct.unpack_from(kind, binary, _HEAD.size + offset)
            values[place] = _signed(value)
    except (struct.error, ValueError):  # cut, or of another kind
        return [NO_ID] * len(_LABELS)
    return values


def _signed(value: int) -> int:
    """A communicator's number fills all 64 bits."""
    return value - (1 << 64) if value >> 63 == 1 else value
