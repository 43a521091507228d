"""Ops in their cells, and the lanes grouped by structure.

In: matrices of recorded times. Out: `PlacedLanes`, and a signature per lane. The rules of `rules.megatron` apply in the
same way to lanes of equal signature.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis import native
from tracekit.analysis.graph.rules.megatron import BACKWARD, COMPUTE_STREAM, DP_STREAM, is_held
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.trace.model import KINDS, OpKind

_MIX = 0x9E3779B97F4A7C15
#: Hashes of the counts of lanes, and of what else makes a structure.
StructureHash = tuple[int, int]


class PlacedLanes(Struct, frozen=True, eq=False):
    """Lanes with the same rows, which are ordered by (pp_rank, kind, seq).

    `counts`: rows of each kind and stage, [stages x kinds]. `step`: index into the steps, `dp_rank`: both [lanes].
    `start`, `duration`: recorded seconds, [rows, lanes]. `chunk`, `microbatch`, `seq`: [rows, 1] if all lanes agree,
    else [rows, lanes]. `present`: mask of the ops that exist, [rows, lanes], None for all; an absent op takes no time
    and begins when the op before it ends. `stream_order`: orders the rows of a stream, [rows]; None: use the starts of
    any lane. `posted`, `resumed`: recorded seconds, [rows, lanes], at which the host requested a transfer and continued
    after waiting for it, nan for other ops; None if not recorded.
    """

    counts: Int32s
    step: Int32s
    dp_rank: Int32s
    start: Floats
    duration: Floats
    chunk: Int32s
    microbatch: Int32s
    seq: Int32s
    present: npt.NDArray[np.bool_] | None = None
    stream_order: Floats | None = None
    posted: Floats | None = None
    resumed: Floats | None = None

    @property
    def by_stage(self) -> Int32s:
        """`counts` as [stages, kinds]."""
        return self.counts.reshape(-1, len(KINDS))

    @property
    def ops(self) -> int:
        """The number of ops of all lanes."""
        return self.start.size if self.present is None else int(self.present.sum())

    def only(self, lanes: Ints) -> Self:
        """Only these lanes; no copy if that is all of them."""
        names = ("start", "duration", "chunk", "microbatch", "seq", "present", "posted", "resumed")
        parts = {name: part for name in names if (part := getattr(self, name)) is not None}
        of_lanes = {name: self._of_lanes(part, lanes) for name, part in parts.items()}
        return replace(self, step=self.step[lanes], dp_rank=self.dp_rank[lanes], **of_lanes)

    def _of_lanes(self, matrix: npt.NDArray[Any], lanes: Ints) -> npt.NDArray[Any]:
        """The columns of `lanes`; no copy if that is all of them, or if all lanes share one column."""
        shared = matrix.shape[1] == 1 < len(self.step)
        return matrix if shared or len(lanes) == len(self.step) else np.ascontiguousarray(matrix[:, lanes])


def by_structure(placed: PlacedLanes, *, by_microbatch: bool = False) -> dict[StructureHash, npt.NDArray[np.int64]]:
    """Indices of lanes by counts, chunk assignment, order within streams, and sends that waited for a reduction.

    `by_microbatch`: also by the order of microbatches.
    """
    signature = np.empty(len(placed.step), np.uint64)
    signature[:] = row_hash(placed.chunk.T)
    if by_microbatch:
        signature = signature * np.uint64(_MIX) + row_hash(placed.microbatch.T)
    native.hash_streams(placed.start, *_stream_ranges(placed.by_stage), signature)
    _hash_held_sends(placed, signature)
    counts = int(row_hash(placed.counts[None])[0])
    return {(counts, int(signature[same[0]])): same for same in by_value(signature, np.arange(len(signature)))}


def row_hash(values: Int32s) -> npt.NDArray[np.uint64]:
    """A 64-bit hash per row, [rows]."""
    # Weights of splitmix64: importing numpy.random takes longer than hashing all rows.
    weights = np.arange(1, values.shape[1] + 1, dtype=np.uint64) * np.uint64(_MIX)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        weights = (weights ^ (weights >> np.uint64(shift))) * np.uint64(factor)
    return values.astype(np.uint64) @ ((weights ^ (weights >> np.uint64(31))) | np.uint64(1))


def by_value(keys: npt.NDArray[np.uint64], items: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """`items` split by equal key, groups in order of first appearance, items in order."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return [items[inverse == number] for number in np.argsort(first, kind="stable")]


def _stream_ranges(by_stage: Int32s) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row ranges to merge by start: bounds [ranges, 2], and where each stream's ranges begin [streams + 1]."""
    end = np.cumsum(by_stage.reshape(-1)).reshape(by_stage.shape)
    bounds, streams = [], [0]
    for stage in range(len(by_stage)):
        for kinds in (COMPUTE_STREAM, DP_STREAM):
            present = [kind.code for kind in kinds if by_stage[stage, kind.code]]
            if len(present) > 1:
                bounds += [(end[stage, code] - by_stage[stage, code], end[stage, code]) for code in present]
                streams.append(len(bounds))
    return np.array(bounds, np.int64).reshape(-1, 2), np.array(streams, np.int64)


def _mark(row: int) -> np.uint64:
    """A 64-bit number that differs from row to row."""
    return np.uint64((int(row) + 1) * _MIX % 2**64)


def _hash_held_sends(placed: PlacedLanes, signature: npt.NDArray[np.uint64]) -> None:
    """Add to each lane's signature whether a stage's last backward-send waited for its gradient reduction."""
    by_stage = placed.by_stage
    end = np.cumsum(by_stage.reshape(-1)).reshape(by_stage.shape)
    for stage in range(len(by_stage)):
        if by_stage[stage, OpKind.ALL_REDUCE.code] and by_stage[stage, BACKWARD.send.code]:
            reduction, send = end[stage, OpKind.ALL_REDUCE.code] - 1, end[stage, BACKWARD.send.code] - 1
            begin = placed.start[reduction]
            held = is_held(placed.start[send], begin, begin + placed.duration[reduction])
            signature += np.where(held, _mark(send), np.uint64(0))
