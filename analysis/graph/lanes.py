"""From rows to matrices: each op of a trace placed into its [row, lane] cell.

In: a `Trace`. Out: `LaneGroup`s, one per distinct structure, with recorded starts and durations as [rows, lanes]
matrices. A lane is one model-parallel group (one dp_rank, all its stages) in one step. Every op finds its cell by
integer arithmetic, so nothing is sorted and nothing loops over ops in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis import native
from tracekit.analysis.graph.gaps import MissingOps, missing_ops
from tracekit.analysis.graph.rules.megatron import (
    BACKWARD,
    COMPUTE_STREAM,
    DP_STREAM,
    FORWARD,
    NO_OP_SLACK_S,
    build_structure,
    is_held,
)
from tracekit.analysis.graph.structure import LaneOps, Structure
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.errors import GraphError
from tracekit.model import DP_COLLECTIVES, KINDS, OpKind
from tracekit.schema import distinct_steps, step_positions
from tracekit.text import short
from tracekit.trace import Trace

#: Stands for "no chunk" and "no microbatch" in integer columns.
NONE = -1
#: DP ranks, and stages, that a message names.
_MOST_SHOWN = 4
_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class LaneGroup:
    """All lanes of one structure. Lanes are ordered by (step, dp_rank).

    `step`: index into `Lanes.steps`, `dp_rank`: both [lanes]. `start`, `duration`: recorded seconds, [rows, lanes].
    `microbatch`: [rows, 1] where all lanes agree, else [rows, lanes].
    """

    structure: Structure
    step: Int32s
    dp_rank: Int32s
    start: Floats
    duration: Floats
    microbatch: Int32s


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of a trace. `dropped_lanes`: (step number, dp_rank) of lanes that lack a stage, so cannot replay.

    `missing`: ops that a lane lacks although its peers recorded them.
    """

    steps: Int32s
    groups: tuple[LaneGroup, ...]
    dropped_lanes: tuple[tuple[int, int], ...]
    missing: MissingOps


def place_lanes(trace: Trace) -> Lanes:
    """Place every op of `trace`. Raises GraphError where a lane's ops do not fit together, or none is complete."""
    layout = trace.layout
    columns = {name: trace.ops[name].to_numpy() for name in ("step", "dp_rank", "pp_rank", "seq", "start", "duration")}
    kind = trace.kind_codes()
    steps = trace.steps
    step_index = step_positions(columns["step"], steps)
    dp_rank_numbers = distinct_steps(columns["dp_rank"])  # few of many may be traced: lanes are counted over those
    columns["dp_rank"] = step_positions(columns["dp_rank"], dp_rank_numbers)
    dp_ranks = len(dp_rank_numbers)

    cells = layout.pp * len(KINDS)
    counts = np.zeros((len(steps) * dp_ranks, cells), np.int32)
    native.count_ops(step_index, columns["dp_rank"], columns["pp_rank"], kind, dp_ranks, len(KINDS), counts)
    if not layout.has_dp_collectives:
        dropped_kinds = [dp_kind.code for dp_kind in DP_COLLECTIVES]
        counts.reshape(-1, layout.pp, len(KINDS))[:, :, dropped_kinds] = 0
    lanes, dropped_lanes = _complete_lanes(counts, steps, dp_rank_numbers, layout.pp, trace.name)

    missing = missing_ops(counts, lanes, steps, dp_rank_numbers, layout.pp)

    group_of_lane = np.full(len(counts), -1, np.int32)
    column_of_lane = np.zeros(len(counts), np.int64)
    members = _by_value(_row_hash(counts[lanes]), lanes)
    for number, group_lanes in enumerate(members):
        group_of_lane[group_lanes] = number
        column_of_lane[group_lanes] = np.arange(len(group_lanes))
    group_counts = np.stack([counts[group_lanes[0]] for group_lanes in members])
    lanes_in_group = np.array([len(group_lanes) for group_lanes in members], np.int64)
    rows_in_group = group_counts.sum(axis=1, dtype=np.int64)
    row_base = np.cumsum(group_counts, axis=1, dtype=np.int64) - group_counts
    row_base[group_counts == 0] = -1
    row_offset = np.cumsum(rows_in_group) - rows_in_group
    cell_offset = np.cumsum(rows_in_group * lanes_in_group) - rows_in_group * lanes_in_group

    total = int((rows_in_group * lanes_in_group).sum())
    start, duration = np.empty(total), np.empty(total)
    address = (
        step_index, columns["dp_rank"], columns["pp_rank"], kind, columns["seq"], dp_ranks, len(KINDS),
        group_of_lane, column_of_lane, row_base, lanes_in_group, cell_offset,
    )  # fmt: skip
    native.place_times(*address, columns["start"], columns["duration"], start, duration)

    def labels(name: str) -> list[Int32s]:
        """An integer column per group: [rows, 1] where its lanes agree, else [rows, lanes]."""
        values = trace.ops[name].cast(pl.Int32).fill_null(NONE).to_numpy()
        uniform = np.full(int(rows_in_group.sum()), NONE - 1, np.int32)
        varies = np.zeros(len(members), np.bool_)
        native.place_uniform(*address[:8], row_base, values, row_offset, NONE - 1, uniform, varies)
        every = np.empty(total if varies.any() else 0, np.int32)
        if varies.any():
            native.place_labels(*address, values, every)
        return [
            every[cells_of[number]].reshape(rows_in_group[number], -1)
            if varies[number]
            else uniform[row_offset[number] : row_offset[number] + rows_in_group[number]].reshape(-1, 1)
            for number in range(len(members))
        ]

    cells_of = [
        slice(int(first), int(first + rows * width))
        for first, rows, width in zip(cell_offset, rows_in_group, lanes_in_group, strict=True)
    ]
    chunks, microbatches = labels("chunk"), labels("microbatch")
    groups: list[LaneGroup] = []
    for number, group_lanes in enumerate(members):
        shape = (int(rows_in_group[number]), len(group_lanes))
        placed = _Placed(
            counts=group_counts[number],
            step=(group_lanes // dp_ranks).astype(np.int32),
            dp_rank=dp_rank_numbers[group_lanes % dp_ranks],
            start=start[cells_of[number]].reshape(shape),
            duration=duration[cells_of[number]].reshape(shape),
            chunk=chunks[number],
            microbatch=microbatches[number],
        )
        groups.extend(_by_structure(placed, trace, steps))
    return Lanes(steps=steps, groups=tuple(groups), dropped_lanes=dropped_lanes, missing=missing)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Lanes with equal op counts, not yet told apart by the order of their ops. Fields as in `LaneGroup`."""

    counts: Int32s
    step: Int32s
    dp_rank: Int32s
    start: Floats
    duration: Floats
    chunk: Int32s
    microbatch: Int32s


def _by_structure(placed: _Placed, trace: Trace, steps: Int32s) -> list[LaneGroup]:
    """Split lanes with equal counts by chunk assignment, order within streams and sends or recvs that never ran."""
    stages, chunks = trace.layout.pp, trace.layout.vpp
    by_stage = placed.counts.reshape(stages, len(KINDS))
    cell = np.repeat(np.arange(by_stage.size), placed.counts)
    pp_rank, kind = (cell // len(KINDS)).astype(np.int16), (cell % len(KINDS)).astype(np.uint8)
    seq = (np.arange(len(cell)) - (np.cumsum(placed.counts) - placed.counts)[cell]).astype(np.int32)
    signature = np.zeros(len(placed.step), np.uint64)
    if placed.chunk.shape[1] > 1:
        signature = _row_hash(placed.chunk.T)
    native.hash_streams(placed.start, *_stream_ranges(by_stage), signature)
    _hash_held_sends(placed, by_stage, signature)
    if chunks > 1:
        _hash_no_ops(placed, by_stage, signature)
    groups = []
    for lanes in _by_value(signature, np.arange(len(signature))):
        first = lanes[0]
        start = np.ascontiguousarray(placed.start[:, first])
        structure = build_structure(
            LaneOps(
                pp_rank=pp_rank,
                kind=kind,
                seq=seq,
                chunk=_of_lanes(placed.chunk, lanes[:1])[:, 0].astype(np.int16),
                start=start,
                end=start + placed.duration[:, first],
                stages=stages,
                chunks=chunks,
                where=f"{short(trace.name)}: step {steps[placed.step[first]]}, dp_rank {placed.dp_rank[first]}",
            )
        )
        groups.append(
            LaneGroup(
                structure=structure,
                step=placed.step[lanes],
                dp_rank=placed.dp_rank[lanes],
                start=_of_lanes(placed.start, lanes),
                duration=_of_lanes(placed.duration, lanes),
                microbatch=_of_lanes(placed.microbatch, lanes),
            )
        )
    return groups


def _of_lanes(matrix: npt.NDArray[Any], lanes: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The columns of `lanes`; no copy where that is all of them or all lanes share one column."""
    return matrix if matrix.shape[1] in (1, len(lanes)) else np.ascontiguousarray(matrix[:, lanes])


def _complete_lanes(
    counts: Int32s, steps: Int32s, dp_ranks: Int32s, stages: int, name: str
) -> tuple[npt.NDArray[np.int64], tuple[tuple[int, int], ...]]:
    """Lanes in which every stage has ops, and those (step number, dp_rank) in which some but not all have."""
    staged: npt.NDArray[np.bool_] = np.any(counts.reshape(len(counts), stages, -1) > 0, axis=2)
    complete = np.flatnonzero(staged.all(axis=1))
    if not len(complete):
        raise GraphError(_none_complete(staged.reshape(len(steps), len(dp_ranks), stages), steps, dp_ranks, name))
    partial = np.flatnonzero(staged.any(axis=1) & ~staged.all(axis=1))
    return complete, tuple((int(steps[lane // len(dp_ranks)]), int(dp_ranks[lane % len(dp_ranks)])) for lane in partial)


def _none_complete(staged: npt.NDArray[np.bool_], steps: Int32s, dp_ranks: Int32s, name: str) -> str:
    """What is missing where no DP rank is complete. `staged`: which stages have ops, [steps, dp_ranks, stages]."""
    best = staged.sum(axis=2).max(axis=0)  # each DP rank in its best step
    lacks = []
    for at in np.argsort(-best, kind="stable")[:_MOST_SHOWN]:
        step = int(staged[:, at].sum(axis=1).argmax())
        missing = np.flatnonzero(~staged[step, at])
        shown = ", ".join(map(str, missing[:_MOST_SHOWN])) + (" ..." if len(missing) > _MOST_SHOWN else "")
        lacks.append(f"DP rank {dp_ranks[at]} lacks stage {shown} in step {steps[step]}")
    more = f" (and {len(dp_ranks) - _MOST_SHOWN} more DP ranks)" if len(dp_ranks) > _MOST_SHOWN else ""
    return (
        f"{short(name)}: no DP rank has ops on all {staged.shape[2]} stages in any step: {'; '.join(lacks)}{more}; the"
        " replay needs one complete DP rank: record all stages of one, or correct dp_rank, pp_rank and the layout's pp"
    )


def _row_hash(values: Int32s) -> npt.NDArray[np.uint64]:
    """A 64-bit hash per row, [rows]."""
    weights = np.random.default_rng(0).integers(1, 2**63, values.shape[1], dtype=np.uint64) | np.uint64(1)
    return values.astype(np.uint64) @ weights


def _by_value(keys: npt.NDArray[np.uint64], items: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
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


def _hash_no_ops(placed: _Placed, by_stage: Int32s, signature: npt.NDArray[np.uint64]) -> None:
    """Fold into each lane's signature which recvs start too late, and which sends end too early, to have run."""
    end = np.cumsum(by_stage.reshape(-1)).reshape(by_stage.shape)

    def rows(stage: int, kind: OpKind) -> range:
        return range(end[stage, kind.code] - by_stage[stage, kind.code], end[stage, kind.code])

    for stage in range(len(by_stage)):
        for direction in (FORWARD, BACKWARD):
            computes = rows(stage, direction.compute)
            if not computes:
                continue
            last_start = placed.start[computes[-1]] - NO_OP_SLACK_S
            first_end = placed.start[computes[0]] + placed.duration[computes[0]] + NO_OP_SLACK_S
            for row in rows(stage, direction.recv):
                signature += np.where(placed.start[row] < last_start, np.uint64(0), _mark(row))
            for row in rows(stage, direction.send):
                early = placed.start[row] + placed.duration[row] < first_end
                signature += np.where(early, _mark(row), np.uint64(0))


def _mark(row: int) -> np.uint64:
    """A 64-bit number that differs from row to row."""
    return np.uint64((int(row) + 1) * _MIX % 2**64)


def _hash_held_sends(placed: _Placed, by_stage: Int32s, signature: npt.NDArray[np.uint64]) -> None:
    """Fold into each lane's signature whether a stage's last backward-send waited for its gradient reduction."""
    end = np.cumsum(by_stage.reshape(-1)).reshape(by_stage.shape)
    for stage in range(len(by_stage)):
        if by_stage[stage, OpKind.ALL_REDUCE.code] and by_stage[stage, BACKWARD.send.code]:
            reduction, send = end[stage, OpKind.ALL_REDUCE.code] - 1, end[stage, BACKWARD.send.code] - 1
            held = is_held(placed.start[send], placed.start[reduction] + placed.duration[reduction])
            signature += np.where(held, _mark(send), np.uint64(0))
