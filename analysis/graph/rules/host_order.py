"""The order in which the host of each stage worked and waited, if it was recorded.

In: structures made by the rules of the published method, and recorded times of some of their lanes, including when the
host requested each transfer and when it continued after it. Out: structures in which a transfer waits for the host's
previous work, and the host's next work waits for the transfers that it had waited for. `posting` has to infer this
order from the times of the transfers.

A host does one thing at a time. Its computes and other work are in order anyway. It requests a transfer between two of
them, and waits for it between two of them, at the same places in every step. A send that ended before its receive was
requested was buffered: its sender did not wait for the receiver.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.graph.rules.megatron import BACKWARD, FORWARD, merged_order
from tracekit.analysis.graph.rules.posting import OBEYED_SHARE, RECVS, SENDS, STREAM, TAIL, RecordedLanes, in_most_lanes
from tracekit.analysis.graph.structure import Structure
from tracekit.analysis.numeric.arrays import Ints

_TRANSFERS = (*SENDS, *RECVS)


def with_host_order(lanes: RecordedLanes) -> Structure | None:
    """The structure of the lanes with the order of each host; None without transfers, or if times of one are missing.

    `lanes`: of this structure, as recorded.
    """
    structure = lanes.structure
    transfers = np.flatnonzero(np.isin(structure.kind, _TRANSFERS))
    if lanes.posted is None or lanes.resumed is None or not len(transfers):
        return None
    if np.isnan(lanes.posted[transfers]).any() or np.isnan(lanes.resumed[transfers]).any():
        return None
    recorded = np.logical_not(_inferred(structure))
    edges = [edge for stage in np.unique(structure.pp_rank[transfers]) for edge in _edges(lanes, int(stage))]
    before, after = zip(*edges, strict=True) if edges else ((), ())
    return replace(
        structure,
        before=np.concatenate([structure.before[recorded], np.array(before, np.int64)]),
        after=np.concatenate([structure.after[recorded], np.array(after, np.int64)]),
    )


def _inferred(structure: Structure) -> np.ndarray:
    """Edges that place the host's request for a transfer, [edges]: those from computes, except from the compute whose
    result is sent.
    """
    before, after = structure.kind[structure.before], structure.kind[structure.after]
    requested = np.zeros(len(before), np.bool_)
    for way in (FORWARD, BACKWARD):
        requested |= after == way.recv.code
        requested |= (after == way.send.code) & (before != way.compute.code)
    computes = (FORWARD.compute.code, BACKWARD.compute.code)
    inferred: np.ndarray = requested & np.isin(before, computes)
    return inferred


def _edges(lanes: RecordedLanes, stage: int) -> Iterator[tuple[int, int]]:
    """The edges (before, after) of one stage's host."""
    assert lanes.posted is not None, "checked by the caller"
    assert lanes.resumed is not None, "checked by the caller"
    structure = lanes.structure
    of_stage = structure.pp_rank == stage
    transfers = np.flatnonzero(of_stage & np.isin(structure.kind, _TRANSFERS))
    host = _host(lanes, stage)
    posted, resumed = lanes.posted[transfers], lanes.resumed[transfers]
    asked_at, resumed_at = (in_most_lanes(lanes.done_before(host, times)) for times in (posted, resumed))
    waited = [not _buffered(lanes, int(row)) for row in transfers]
    for number, row in enumerate(transfers.tolist()):
        if asked_at[number] > 0:
            yield int(host[asked_at[number] - 1]), row
        # After the same work of the host, and waited for before it requested this one.
        before = (resumed_at == asked_at[number]) & (np.median(posted[number] - resumed, axis=1) >= 0) & waited
        for other in transfers[before].tolist():
            yield other, row
        if waited[number] and resumed_at[number] < len(host):
            yield row, int(host[resumed_at[number]])


def _host(lanes: RecordedLanes, stage: int) -> Ints:
    """Work of a stage's host, in order: the rows of its stream, and the first op after them."""
    structure = lanes.structure
    of_stage = structure.pp_rank == stage
    rows = [np.flatnonzero(of_stage & (structure.kind == code)) for code in STREAM]
    stream = merged_order(np.median(lanes.start, axis=1), rows)
    tail = [row for code in TAIL for row in np.flatnonzero(of_stage & (structure.kind == code)).tolist()]
    return np.concatenate([stream, np.array(tail[:1], np.int64)])


def _buffered(lanes: RecordedLanes, row: int) -> bool:
    """True if a send ended in some lanes before its receive was requested."""
    assert lanes.posted is not None, "checked by the caller"
    assert lanes.resumed is not None, "checked by the caller"
    structure = lanes.structure
    if structure.kind[row] not in SENDS:
        return False
    (recv,) = np.setdiff1d(np.flatnonzero(structure.group == structure.group[row]), [row])
    met = lanes.resumed[row] >= lanes.posted[recv]
    return bool(met.mean() < OBEYED_SHARE)
