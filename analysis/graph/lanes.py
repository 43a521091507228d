"""From table rows to matrices: place each op of a trace into its [row, lane] cell.

In: a `Trace`. Out: `LaneGroup`s, one per distinct structure, with recorded starts and durations as [rows, lanes]
matrices. A lane is one model-parallel group (one dp_rank, all its stages) in one step. Integer arithmetic gives the
cell of every op, so nothing is sorted and Python never loops over ops. Ops that only some lanes have are added
afterwards (`occasional`). What does not depend on which steps a process holds is in `JobLanes`: the structures, the
lanes that tell which rules the job follows, and whether its pipeline is V-shaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis import native
from tracekit.analysis.graph.megatron import (
    BACKWARD,
    COMPUTE_STREAM,
    DP_STREAM,
    FORWARD,
    LaneOps,
    Structure,
    after_tails,
    build_structure,
    first_after_tail,
    is_held,
    is_v_shaped,
    virtual_stages,
)
from tracekit.analysis.graph.posting import RecordedLanes, sampled_lanes
from tracekit.analysis.graph.unrecorded import Gap, gaps_of, missing_ops, with_inferred_transfers
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints
from tracekit.analysis.numeric.parallel import UNDIVIDED, Whole, by_name
from tracekit.base.errors import GraphError
from tracekit.base.text import short
from tracekit.trace.canonical import Trace
from tracekit.trace.model import DP_COLLECTIVES, KINDS, OpKind
from tracekit.trace.schema import POSTED, RESUMED

if TYPE_CHECKING:
    from tracekit.analysis.graph.occasional import OccasionalOps

#: Represents "no chunk" and "no microbatch" in integer columns.
NONE = -1
#: The largest number of DP ranks, or stages, that a message names.
_MOST_SHOWN = 4
_TRANSFERS = (FORWARD.send, FORWARD.recv, BACKWARD.send, BACKWARD.recv)
#: Kinds that only follow each other in a worker's compute stream: a lane without one is complete.
OPTIONAL = COMPUTE_STREAM[2:]
_MIX = 0x9E3779B97F4A7C15
#: Hashes of the counts of lanes, and of what else makes a structure.
StructureHash = tuple[int, int]
#: Digest of a structure, and how many structures before it are equal.
StructureKey = tuple[str, int]
_Here = tuple[Structure, Int32s, Int32s, int]
_Part = tuple[Mapping[StructureKey, _Here], tuple[tuple[int, int], ...], pl.DataFrame, float]


class PlacedLanes(Struct, frozen=True, eq=False):
    """Lanes with the same rows, which are ordered by (pp_rank, kind, seq).

    `counts`: rows of each kind and stage, [stages x kinds]. `step`: index into the steps, `dp_rank`: both [lanes].
    `start`, `duration`: recorded seconds, [rows, lanes]. `chunk`, `microbatch`, `seq`: [rows, 1] if all lanes agree,
    else [rows, lanes]. `present`: mask of the ops that exist, [rows, lanes], None for all; an absent op takes no time
    and begins when the op before it ends. `stream_order`: orders the rows of a stream, [rows]; None: use the starts of
    any lane. `posted`, `resumed`: recorded seconds, [rows, lanes], at which the host requested a transfer and continued
    after waiting for it, nan for other ops; None if not recorded. `after_tail`: as in `LaneOps`; None: as in any lane.
    """

    counts: Int32s
    step: Int32s
    dp_rank: Int32s
    start: Floats
    duration: Floats
    chunk: Int32s
    microbatch: Int32s
    seq: Int32s
    present: Bools | None = None
    stream_order: Floats | None = None
    after_tail: Ints | None = None
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


class LaneGroup(PlacedLanes, frozen=True, eq=False, kw_only=True):
    """All lanes of one structure, ordered by (step, dp_rank)."""

    structure: Structure


class Lanes(Struct, frozen=True, eq=False):
    """The lanes of a trace. `dropped_lanes`: (step number, dp_rank) of lanes that cannot replay because a stage is
    missing.

    `missing`: the `missing_ops`. `inferred_transfers`: no transfer was
    recorded, so they were inferred from the computes. `virtual`: the `virtual_stages` of the job.
    """

    steps: Int32s
    groups: tuple[LaneGroup, ...]
    dropped_lanes: tuple[tuple[int, int], ...]
    missing: pl.DataFrame
    virtual: Ints
    inferred_transfers: bool = False


def place_lanes(trace: Trace, whole: Whole = UNDIVIDED) -> Lanes:
    """Place every op of `trace`. Raises GraphError if a lane's ops contradict each other, or no lane is complete."""
    layout = trace.layout
    virtual = virtual_stages(layout, v_shaped=is_v_shaped(trace, whole))
    ops = _LaneOps(trace)
    counts = ops.counts()
    lanes, dropped_lanes = _complete_lanes(counts, ops.steps, ops.dp_ranks, layout.pp, trace.name)
    bounds = counts[lanes].min(axis=0), counts[lanes].max(axis=0)
    placed = {} if optional_kinds(bounds[1] - bounds[0]) else _alike(ops, counts, lanes)
    fewest, most, structures = whole.combined(lambda: (*bounds, set(placed)), _joined)
    inferred = layout.pp > 1 and not most.reshape(-1, len(KINDS))[:, [kind.code for kind in _TRANSFERS]].any()
    if inferred:
        ops = _LaneOps(with_inferred_transfers(trace, virtual, whole), inferred=True)
        counts = ops.counts()
    missing = missing_ops(counts, lanes, ops.steps, ops.dp_ranks, layout.pp)
    varying, optional = optional_kinds(most - fewest), optional_kinds(most)
    if inferred or varying or (optional and len(structures) > 1):
        placed.clear()
        tried = dict.fromkeys((varying, optional)) if inferred or varying else (optional,)
        placed = _united(ops, counts, lanes, tried, whole)
    groups = [_group(part, ops, virtual) for part in placed.values()]
    return Lanes(ops.steps, tuple(groups), dropped_lanes, missing, virtual, inferred)


def _joined(parts: Sequence[tuple[Int32s, Int32s, set[StructureHash]]]) -> tuple[Int32s, Int32s, set[StructureHash]]:
    """The fewest and the most ops of each stage and kind that a lane has, [stages x kinds] each, and the structures if
    no optional kind varies.
    """
    fewest, most, structures = zip(*parts, strict=True)
    return np.min(fewest, axis=0), np.max(most, axis=0), set().union(*structures)


def _united(
    ops: _LaneOps, counts: Int32s, lanes: Ints, tried: Iterable[tuple[OpKind, ...]], whole: Whole
) -> dict[StructureHash, PlacedLanes]:
    """The lanes by structure, regardless of ops that only some lanes have, unless lanes have too little in common.

    `tried`: the kinds of such ops, and those to disregard instead if lanes differ in more than these.
    """
    from tracekit.analysis.graph.occasional import Cells, merged_names, with_occasional

    parts: dict[StructureHash, PlacedLanes] = {}
    for kinds in tried:
        parts.clear()  # one placement at a time fits into memory
        parts = _alike(ops, _without(counts, kinds), lanes)
        occasional = {key: ops.occasional(kinds, part) for key, part in parts.items()}
        cells = {key: Cells.of(part, occasional[key]) for key, part in parts.items()}
        sizes = {key: (cells[key].names, len(occasional[key].lane), part.start.shape) for key, part in parts.items()}
        names, fit = whole.combined(partial(dict, sizes), merged_names)
        if len(names) == 1:
            break
    if not fit:
        parts.clear()
        return _alike(ops, counts, lanes)
    return {key: with_occasional(parts.pop(key), occasional[key], cells[key].among(names[key])) for key in list(parts)}


def _without(counts: Int32s, kinds: tuple[OpKind, ...]) -> Int32s:
    """The counts without some kinds; `counts` itself if there is nothing to leave out."""
    if not kinds:
        return counts
    rest = counts.copy()
    rest.reshape(len(counts), -1, len(KINDS))[:, :, [kind.code for kind in kinds]] = 0
    return rest


def _alike(ops: _LaneOps, counts: Int32s, lanes: Ints) -> dict[StructureHash, PlacedLanes]:
    """The counted ops of `lanes`, placed and grouped by structure."""
    by_key = {}
    for placed in ops.placed(counts, lanes):
        for key, same in by_structure(placed, by_microbatch=ops.inferred).items():
            part = placed.only(same)
            part = replace(part, chunk=part.chunk[:, :1])
            by_key[key] = replace(part, microbatch=part.microbatch[:, :1]) if ops.inferred else part
    return by_key


class _LaneOps:
    """The ops of a trace, in order of step, DP rank, stage, kind and seq."""

    def __init__(self, trace: Trace, *, inferred: bool = False) -> None:
        self.trace, self.stages, self.inferred = trace, trace.layout.pp, inferred
        # often only a few DP ranks of many are traced: count lanes over those
        self.steps, self.dp_ranks, self.workers = trace.steps, trace.dp_ranks, trace.workers

    def counts(self) -> Int32s:
        """The number of ops of each kind and stage in each lane, [steps x dp_ranks, stages x kinds]; collectives of a
        single DP rank do not count.
        """
        counts = self.workers.counts.reshape(-1, self.stages * len(KINDS)).copy()
        if not self.trace.layout.has_dp_collectives:
            counts.reshape(-1, self.stages, len(KINDS))[:, :, [kind.code for kind in DP_COLLECTIVES]] = 0
        return counts

    def lane_of(self, part: PlacedLanes) -> Ints:
        """The indices of the lanes in `counts`."""
        return part.step.astype(np.int64) * len(self.dp_ranks) + np.searchsorted(self.dp_ranks, part.dp_rank)

    def occasional(self, kinds: tuple[OpKind, ...], part: PlacedLanes) -> OccasionalOps:
        """The ops of these kinds in the lanes of `part`."""
        from tracekit.analysis.graph.occasional import OccasionalOps

        lanes = self.lane_of(part)
        column = np.zeros(len(self.steps) * len(self.dp_ranks), np.int64)
        column[lanes] = np.arange(len(lanes))
        recorded = self.workers.counts.reshape(-1, self.stages, len(KINDS))
        wanted = np.zeros_like(recorded)
        wanted[lanes] = recorded[lanes] * np.isin(np.arange(len(KINDS)), [kind.code for kind in kinds])
        cell, kind, seq, place = self.workers.places_of(wanted.reshape(-1, len(KINDS)))
        names = ("start", "duration", "chunk", "microbatch")
        columns = {name: values[place] for name, values in zip(names, self.trace.ordered(*names), strict=True)}
        return OccasionalOps(column[cell // self.stages], cell % self.stages, kind, seq, **columns)

    def placed(self, counts: Int32s, lanes: Ints) -> list[PlacedLanes]:
        """The counted ops of `lanes`: one part for each distinct count."""
        groups = by_value(row_hash(counts[lanes]), lanes)
        of_group = [counts[same[0]] for same in groups]
        first = self.workers.first.reshape(counts.shape)
        timed = self.trace.optional >= {POSTED, RESUMED}
        # Labels last: their matrices are freed at once, and would leave gaps below those of times.
        names = ("start", "duration", *((POSTED, RESUMED) if timed else ()), "chunk", "microbatch")
        columns: list[dict[str, Any]] = [{} for _ in groups]
        for name, values in zip(names, self.trace.ordered(*names), strict=True):
            for same, rows, part in zip(groups, of_group, columns, strict=True):
                matrix = _gathered(values, first, same, rows)
                agree = name in ("chunk", "microbatch") and (matrix == matrix[:, :1]).all()
                part[name] = matrix[:, :1].copy() if agree else matrix
        for part in columns if timed else ():
            part[POSTED], part[RESUMED] = part["start"] - part[POSTED], part["start"] + part[RESUMED]
        return [
            PlacedLanes(
                counts=rows,
                step=(same // len(self.dp_ranks)).astype(np.int32),
                dp_rank=self.dp_ranks[same % len(self.dp_ranks)],
                seq=_positions(rows).astype(np.int32).reshape(-1, 1),
                **part,
            )
            for same, rows, part in zip(groups, of_group, columns, strict=True)
        ]


def _gathered(values: npt.NDArray[Any], first: Ints, lanes: Ints, counts: Int32s) -> npt.NDArray[Any]:
    """The values of the ops of `lanes`, [rows, lanes]. `counts`: the rows of each cell of a lane; `first`: where the
    ops of each cell begin in `values`, [all lanes, cells].
    """
    cell, seq = np.repeat(np.arange(len(counts)), counts), _positions(counts)
    matrix = np.empty((len(cell), len(lanes)), values.dtype)
    gather: Any = native.gather_times if values.dtype == np.float64 else native.gather_labels

    def run(part: slice) -> None:
        gather(values, first, lanes, cell, seq, part.start, part.stop, matrix)

    parallel.each(run, parallel.slices(len(lanes), matrix.size))
    return matrix


def _positions(counts: Int32s) -> Ints:
    """The index of each row among those of its stage and kind, [rows]."""
    begin = np.cumsum(counts) - counts
    positions: Ints = np.arange(int(counts.sum())) - np.repeat(begin, counts)
    return positions


def _group(placed: PlacedLanes, ops: _LaneOps, virtual: Ints) -> LaneGroup:
    """The lanes of one structure. Raises GraphError if their ops contradict each other."""
    cell = np.repeat(np.arange(len(placed.counts)), placed.counts)
    trace, start = ops.trace, np.ascontiguousarray(placed.start[:, 0])
    structure = build_structure(
        LaneOps(
            pp_rank=(cell // len(KINDS)).astype(np.int16),
            kind=(cell % len(KINDS)).astype(np.uint8),
            seq=_positions(placed.counts).astype(np.int32),
            chunk=placed.chunk[:, 0].astype(np.int16),
            start=start,
            end=start + placed.duration[:, 0],
            stream_order=start if placed.stream_order is None else placed.stream_order,
            stages=trace.layout.pp,
            virtual=virtual,
            where=f"{short(trace.name)}: step {ops.steps[placed.step[0]]}, dp_rank {placed.dp_rank[0]}",
            after_tail=first_after_tail(placed) if placed.after_tail is None else placed.after_tail,
            microbatch=placed.microbatch[:, 0] if ops.inferred else None,
        )
    )
    return LaneGroup(**{name: getattr(placed, name) for name in placed.__struct_fields__}, structure=structure)


def _complete_lanes(
    counts: Int32s, steps: Int32s, dp_ranks: Int32s, stages: int, name: str
) -> tuple[Ints, tuple[tuple[int, int], ...]]:
    """Lanes in which every stage has ops, and (step number, dp_rank) of those in which only some stages have."""
    staged: Bools = np.any(counts.reshape(len(counts), stages, -1) > 0, axis=2)
    complete = np.flatnonzero(staged.all(axis=1))
    if not len(complete):
        raise GraphError(_none_complete(staged.reshape(len(steps), len(dp_ranks), stages), steps, dp_ranks, name))
    partial = np.flatnonzero(staged.any(axis=1) & ~staged.all(axis=1))
    return complete, tuple((int(steps[lane // len(dp_ranks)]), int(dp_ranks[lane % len(dp_ranks)])) for lane in partial)


def _none_complete(staged: Bools, steps: Int32s, dp_ranks: Int32s, name: str) -> str:
    """Describe what is missing if no DP rank is complete. `staged`: stages with ops, [steps, dp_ranks, stages]."""
    best = staged.sum(axis=2).max(axis=0)  # each DP rank in its most complete step
    lacks = []
    for dp_index in np.argsort(-best, kind="stable")[:_MOST_SHOWN]:
        step = int(staged[:, dp_index].sum(axis=1).argmax())
        missing = np.flatnonzero(~staged[step, dp_index])
        shown = ", ".join(map(str, missing[:_MOST_SHOWN])) + (" ..." if len(missing) > _MOST_SHOWN else "")
        lacks.append(f"DP rank {dp_ranks[dp_index]} lacks stage {shown} in step {steps[step]}")
    more = f" (and {len(dp_ranks) - _MOST_SHOWN} more DP ranks)" if len(dp_ranks) > _MOST_SHOWN else ""
    return (
        f"{short(name)}: no DP rank has ops on all {staged.shape[2]} stages in any step: {'; '.join(lacks)}{more}; the"
        " replay needs one complete DP rank: record all stages of one, or correct dp_rank, pp_rank and the layout's pp"
    )


class JobLanes(Struct, frozen=True, eq=False):
    """The lanes of a job. `structures`: each distinct one. `sampled`: some of its lanes, evenly spread: their step
    numbers and DP ranks, [lanes] each.

    `steps`, `lanes_of_step`: the step numbers, and how many lanes each has, [steps]. `dp_ranks`: ascending. `ops`: the
    number of ops. `dropped`: as `Lanes.dropped_lanes`. `gaps`: of `Lanes.missing`.
    `first_s`: start of the first op of any step, seconds after the step's.
    """

    structures: Mapping[StructureKey, Structure]
    sampled: Mapping[StructureKey, tuple[Int32s, Int32s]]
    steps: Int32s
    lanes_of_step: Ints
    dp_ranks: Int32s
    ops: int
    dropped: tuple[tuple[int, int], ...]
    gaps: tuple[Gap, ...]
    first_s: float

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The kinds of op, in the order of `OpKind`."""
        codes = np.unique(np.concatenate([structure.kind for structure in self.structures.values()]))
        return tuple(KINDS[code] for code in codes)

    def samples_in(self, lanes: Lanes) -> dict[StructureKey, RecordedLanes]:
        """The sampled lanes that are among `lanes`, in their order."""
        return {
            key: _recorded(group.only(_find(group, lanes.steps, *self.sampled[key])))
            for key, group in by_key(lanes).items()
        }


def by_key(lanes: Lanes) -> dict[StructureKey, LaneGroup]:
    """The lanes by structure."""
    groups: dict[StructureKey, LaneGroup] = {}
    for group in lanes.groups:
        digest, again = _digest(group.structure), 0
        while (digest, again) in groups:
            again += 1
        groups[digest, again] = group
    return groups


def lanes_here(lanes: Lanes) -> _Part:
    """What some steps contribute to `JobLanes`: each structure, the step numbers and DP ranks of its lanes, and the
    number of their ops; the lanes that were dropped; the ops that are missing; and `first_s`.
    """
    groups = {
        key: (group.structure, lanes.steps[group.step], group.dp_rank, group.ops)
        for key, group in by_key(lanes).items()
    }
    return groups, lanes.dropped_lanes, lanes.missing, min(float(group.start.min()) for group in lanes.groups)


def merged_lanes(parts: Sequence[_Part]) -> JobLanes:
    """The lanes of a job from the `lanes_here` of its batches of steps."""
    groups, dropped, missing, first_s = zip(*parts, strict=True)
    structures: dict[StructureKey, Structure] = {}
    sampled, every_step, every_rank = {}, [], []
    for key, of_batches in by_name(groups).items():
        structures[key] = of_batches[0][0]
        step, dp_rank = (np.concatenate([batch[field_number] for batch in of_batches]) for field_number in (1, 2))
        chosen = sampled_lanes(len(step))
        sampled[key] = step[chosen], dp_rank[chosen]
        every_step.append(step)
        every_rank.append(dp_rank)
    steps, lanes_of_step = np.unique(np.concatenate(every_step), return_counts=True)
    return JobLanes(
        structures,
        sampled,
        steps,
        lanes_of_step,
        np.unique(np.concatenate(every_rank)),
        ops=sum(lanes[3] for part in groups for lanes in part.values()),
        dropped=tuple(chain.from_iterable(dropped)),
        gaps=gaps_of(pl.concat(missing)),
        first_s=min(first_s),
    )


def merged_samples(parts: Sequence[Mapping[StructureKey, RecordedLanes]]) -> dict[StructureKey, RecordedLanes]:
    """The sampled lanes of a job from the `samples_in` of its batches of steps."""
    return {key: RecordedLanes.joined(of_parts) for key, of_parts in by_name(parts).items()}


def _recorded(group: LaneGroup) -> RecordedLanes:
    end = group.start + group.duration
    return RecordedLanes(group.structure, group.start, end, group.present, group.posted, group.resumed)


def _find(group: LaneGroup, steps: Int32s, step: Int32s, dp_rank: Int32s) -> Ints:
    """The lanes of a group, in order, that have one of these step numbers and DP ranks."""
    width = int(max(group.dp_rank.max(), dp_rank.max())) + 1
    lane_keys = steps[group.step].astype(np.int64) * width + group.dp_rank
    return np.flatnonzero(np.isin(lane_keys, step.astype(np.int64) * width + dp_rank))


def _digest(structure: Structure) -> str:
    """A digest of the ops and edges of a structure."""
    columns = (getattr(structure, name) for name in ("pp_rank", "kind", "seq", "chunk", "before", "after", "group"))
    digest = blake2b(digest_size=16)
    for column in columns:
        digest.update(np.ascontiguousarray(column, np.int64).tobytes())
    return digest.hexdigest()


def optional_kinds(counts: Int32s) -> tuple[OpKind, ...]:
    """Optional kinds that occur. `counts`: ops of each kind and stage, [stages x kinds]."""
    by_stage = counts.reshape(-1, len(KINDS))
    return tuple(kind for kind in OPTIONAL if by_stage[:, kind.code].any())


def by_structure(placed: PlacedLanes, *, by_microbatch: bool = False) -> dict[StructureHash, Ints]:
    """Indices of lanes by counts, chunk assignment, order within streams, host work among the ops at the end of a step,
    and sends that waited for a reduction.

    `by_microbatch`: also by the order of microbatches.
    """
    signature = np.empty(len(placed.step), np.uint64)
    signature[:] = row_hash(placed.chunk.T)
    if by_microbatch:
        signature = signature * np.uint64(_MIX) + row_hash(placed.microbatch.T)
    native.hash_streams(placed.start, *_stream_ranges(placed.by_stage), signature)
    _hash_held_sends(placed, signature)
    for rows, after_tail in after_tails(placed):
        for row in np.flatnonzero(after_tail.any(axis=1)):
            signature += after_tail[row].astype(np.uint64) * _mark(rows[row])
    counts = int(row_hash(placed.counts[None])[0])
    return {(counts, int(signature[same[0]])): same for same in by_value(signature, np.arange(len(signature)))}


def row_hash(values: Int32s) -> npt.NDArray[np.uint64]:
    """A 64-bit hash per row, [rows]."""
    # Weights of splitmix64: importing numpy.random takes longer than hashing all rows.
    weights = np.arange(1, values.shape[1] + 1, dtype=np.uint64) * np.uint64(_MIX)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        weights = (weights ^ (weights >> np.uint64(shift))) * np.uint64(factor)
    return values.astype(np.uint64) @ ((weights ^ (weights >> np.uint64(31))) | np.uint64(1))


def by_value(keys: npt.NDArray[np.uint64], items: Ints) -> list[Ints]:
    """`items` split by equal key, groups in order of first appearance, items in order."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return [items[inverse == number] for number in np.argsort(first, kind="stable")]


def _stream_ranges(by_stage: Int32s) -> tuple[Ints, Ints]:
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
