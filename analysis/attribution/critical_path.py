"""The critical path across ranks: the chain of ops that determines the step time.

In: a replay and changes to it. Out: `CriticalPath`, whose ops and gaps add up to the time of each step. Walks a
replayed timeline backwards: from the op that ends last to the op that it waited for longest, and on to another rank
wherever a collective or transfer waited for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis import native
from tracekit.analysis.graph.compiled import UNLABELLED, CompiledGraph, LabelledBlock, LabelledGraph, Value
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, combinations
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import Timeline, replay_timelines
from tracekit.analysis.whatif.interventions import Intervention, changed

if TYPE_CHECKING:
    from tracekit.analysis.replay.engine import JobReplay

#: Allocate room for the longest possible path of this many steps at once.
_STEPS_AT_ONCE = 256
#: Replay about so many ops at once: all timelines of a large job would be its largest matrices.
_OPS_AT_ONCE = 1 << 22


class CriticalPath(Struct, frozen=True, eq=False):
    """The ops on the critical path of every step, [ops] each; those of a step in the order in which they run.

    `step`: index into the graph's steps. `block`, `row`, `lane`: which op. `cost_s`: how much of the step the op takes,
    seconds; `delay_s`: how long nothing on the path ran before it although everything that it waits for had ended, such
    as a launch delay if the changes keep them. `cost_s` and `delay_s` add up to the step time.
    """

    graph: LabelledGraph
    step: Int32s
    block: Int32s
    row: Ints
    lane: Ints
    cost_s: Floats
    delay_s: Floats

    def seconds_by(self, names: Sequence[str]) -> dict[tuple[Value | None, ...], float]:
        """Mean seconds per step that the ops of each combination of labels take on the path, largest first; None:
        unlabelled.

        Leaves out delays. Raises SelectionError for a label that no op has.
        """
        steps = len(self.graph.steps)
        means = {key: math.fsum(seconds) / steps for key, seconds in self.step_seconds_by(names).items()}
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    def ops_of(self, cells: Sequence[Ints]) -> Ints:
        """The ops on the path, [path]. `cells`: the op in each cell of each block, [rows, lanes]."""
        ops = np.empty(len(self.row), np.int64)
        for number, of_block in enumerate(cells):
            inside = self.block == number
            ops[inside] = of_block[self.row[inside], self.lane[inside]]
        return ops

    def step_seconds_by(self, names: Sequence[str]) -> dict[tuple[Value | None, ...], list[float]]:
        """Like `seconds_by`: seconds of each step in which such ops are on the path, in any order."""
        totals: dict[tuple[Value | None, ...], list[float]] = {}
        for number in np.unique(self.block).tolist():
            of_block = self.block == number
            labels = [self.graph.label(number, name) for name in names]
            shape = self.graph.blocks[number].start.shape
            codes = [np.broadcast_to(label.codes, shape)[self.row[of_block], self.lane[of_block]] for label in labels]
            combined, place = combinations([*codes, self.step[of_block]])
            seconds = np.bincount(place, weights=self.cost_s[of_block])
            keys: dict[tuple[int, ...], tuple[Value | None, ...]] = {}
            for (*of_key, _), total in zip(combined.tolist(), seconds.tolist(), strict=True):
                if (key_codes := tuple(of_key)) not in keys:
                    keys[key_codes] = tuple(
                        None if code == UNLABELLED else label.value(code)
                        for label, code in zip(labels, key_codes, strict=True)
                    )
                totals.setdefault(keys[key_codes], []).append(total)
        return totals

    @property
    def step_delays_s(self) -> Floats:
        """Seconds of each step in which nothing on the path ran, [steps]."""
        return np.asarray(np.bincount(self.step, self.delay_s, len(self.graph.steps)), np.float64)

    @property
    def mean_delay_s(self) -> float:
        """Mean seconds per step in which nothing on the path ran."""
        return math.fsum(self.step_delays_s) / len(self.graph.steps)


def critical_path(replay: GraphReplay, changes: Sequence[Intervention]) -> CriticalPath:
    """The critical path of every step after some changes."""
    graph, overlay = replay.graph, changed(replay, changes)
    if graph.blocks_meet:
        walks = [
            _Walk(block.template, timeline) for block, timeline in zip(graph.blocks, overlay.timelines(), strict=True)
        ]
        return _assembled(graph, list(_across_blocks(graph, walks)))
    parts = []
    for number, lanes in enumerate(overlay.lanes()):
        size = graph.blocks[number].start.size
        batch_size = max(1, min(_STEPS_AT_ONCE, _OPS_AT_ONCE * len(lanes.first_lane) // size))
        for first in range(0, len(lanes.first_lane) - 1, batch_size):
            batch = lanes.of_steps(first, first + batch_size)
            (timeline,) = replay_timelines([batch], 0, meet=False)
            walk, bounds = _Walk(batch.template, timeline), batch.first_lane
            lane = _last_lanes(walk.last, bounds)
            counts, ops = walk.back(bounds, lane, timeline.end[:, lane].argmax(axis=0), apart=False)
            part = _part(np.repeat(batch.step[bounds[:-1]], counts), number, ops, timeline)
            offset = int(lanes.first_lane[first])
            parts.append(replace(part, ops=replace(ops, lane=ops.lane + offset)))
    return _assembled(graph, parts)


def _across_blocks(graph: LabelledGraph, walks: Sequence[_Walk]) -> Iterator[_Part]:
    """The path of each step of a graph that has steps with lanes of several templates."""
    for step, places in enumerate(_lanes_of_steps(graph)):
        lanes_of = {number: np.array([first, last]) for number, first, last in places}
        ends = {number: _last_lanes(walks[number].last, lanes)[0] for number, lanes in lanes_of.items()}
        block = max(ends, key=lambda number: walks[number].last[ends[number]])
        lane = int(ends[block])
        row = int(walks[block].timeline.end[:, lane].argmax())
        while True:
            walk = walks[block]
            _, ops = walk.back(lanes_of[block], np.array([lane]), np.array([row]), apart=True)
            steps = np.full(len(ops.row), step, np.int32)
            part = _part(steps, block, ops, walk.timeline)
            if ops.late_row[-1] >= 0:
                yield part
                break
            # Lanes of several templates take part in the collective: find the lane that arrived last.
            rendezvous = int(walk.template.rendezvous[walk.group_of_row[ops.row[-1]]])
            late = max(walks[number].latest(rendezvous, number, lanes) for number, lanes in lanes_of.items())
            part.begin_s[-1], block, late_row, lane = late
            yield part
            waits = walks[block].waits(late_row)
            if not len(waits):
                break
            row = int(waits[walks[block].timeline.end[waits, lane].argmax()])


def _last_lanes(last: Floats, bounds: Ints) -> Ints:
    """The lane of each step that ends last, [steps]; `last`: end of each lane."""
    latest = np.maximum.reduceat(last[bounds[0] : bounds[-1]], bounds[:-1] - bounds[0])
    at_top = np.flatnonzero(last[bounds[0] : bounds[-1]] == np.repeat(latest, np.diff(bounds)))
    step = np.searchsorted(bounds - bounds[0], at_top, side="right") - 1
    _, first = np.unique(step, return_index=True)
    lanes: Ints = at_top[first] + bounds[0]
    return lanes


def critical_ops(replay: JobReplay, changes: Sequence[Intervention]) -> pl.DataFrame:
    """The critical path of a pipeline job as a frame: step, dp_rank, pp_rank, kind and seq of its ops, in order."""
    from tracekit.trace.schema import KIND_TYPE  # recordings of GPUs have no columns of pipelines

    path, graph = critical_path(replay, changes), replay.graph
    frames = []
    for number, block in enumerate(graph.blocks):
        positions = np.flatnonzero(path.block == number)
        row, lane, template = path.row[positions], path.lane[positions], block.template
        frames.append(
            pl.DataFrame(
                {
                    "place": positions,
                    "step": graph.steps[path.step[positions]],
                    "dp_rank": block.dp_rank[lane],
                    "pp_rank": template.pp_rank[row],
                    "kind": pl.Series(template.kind[row]).cat.to(KIND_TYPE),
                    "seq": np.broadcast_to(block.seq, block.start.shape)[row, lane],
                }
            )
        )
    return pl.concat(frames).sort("place").drop("place")


class _PathOps(Struct, frozen=True, eq=False):
    """Ops of paths, last op first, and the op of each one's group that arrived last, [ops] each."""

    row: Ints
    lane: Ints
    late_row: Ints
    late_lane: Ints


class _Part(Struct, frozen=True, eq=False):
    """Paths, or a piece of one, within one block. `step`: the step of each op.

    `begin_s`, `end_s`: when the op of its group that arrived last began, and when it ended.
    """

    step: Int32s
    block: int
    ops: _PathOps
    begin_s: Floats
    end_s: Floats


def _part(step: Int32s, block: int, ops: _PathOps, timeline: Timeline) -> _Part:
    """The part of the path that `ops` are, with the times of `timeline`; nan for what arrived last in another block."""
    begin, inside = np.full(len(ops.row), np.nan), ops.late_row >= 0
    begin[inside] = timeline.start[ops.late_row[inside], ops.late_lane[inside]]
    return _Part(step, block, ops, begin, timeline.end[ops.row, ops.lane])


class _Walk:
    """Walks the replayed timeline of one block, or of some of its steps."""

    def __init__(self, template: CompiledGraph, timeline: Timeline) -> None:
        self.template, self.timeline = template, timeline
        self.last = timeline.end.max(axis=0)
        groups = len(self.template.rendezvous)
        self.group_of_row = np.empty(self.template.rows, np.int32)
        self.group_of_row[self.template.order] = np.repeat(np.arange(groups), np.diff(self.template.first_of_group))
        meeting = np.flatnonzero(self.template.rendezvous >= 0)
        self.group_of_rendezvous = dict(zip(self.template.rendezvous[meeting].tolist(), meeting.tolist(), strict=True))

    def back(self, first_lane: Ints, lane: Ints, row: Ints, *, apart: bool) -> tuple[Ints, _PathOps]:
        """Follow paths back from ops to the start of their steps, or to a collective that other templates take part in.

        Returns the number of ops on each path, and the ops.
        """
        template, counts = self.template, np.empty(len(row), np.int64)
        room = [np.empty(len(row) * len(template.rendezvous), np.int64) for _ in range(4)]
        count = native.critical_paths(
            template.first_wait, template.waits_for, template.order, template.first_of_group, self.group_of_row,
            template.rendezvous, template.is_communication, self.timeline.start, self.timeline.end, first_lane, row,
            lane, np.array([apart]), counts, *room,
        )  # fmt: skip
        return counts, _PathOps(*(part[:count].copy() for part in room))

    def latest(self, rendezvous: int, number: int, lanes: Ints) -> tuple[float, int, int, int]:
        """The lane that arrives last at a collective: its time, `number`, row, lane."""
        group = self.group_of_rendezvous.get(rendezvous)
        if group is None:
            return -np.inf, number, -1, -1
        rows = self.template.order[self.template.first_of_group[group] : self.template.first_of_group[group + 1]]
        start = self.timeline.start[rows, lanes[0] : lanes[1]]
        member, lane = np.unravel_index(start.argmax(), start.shape)
        return float(start[member, lane]), number, int(rows[member]), int(lanes[0] + lane)

    def waits(self, row: int) -> Int32s:
        """The rows that a row waits for."""
        return self.template.waits_for[self.template.first_wait[row] : self.template.first_wait[row + 1]]


def _lanes_of_steps(graph: LabelledGraph) -> list[list[tuple[int, int, int]]]:
    """(block, first lane, lane after the last) of each step."""
    places: list[list[tuple[int, int, int]]] = [[] for _ in graph.steps]
    for number, block in enumerate(graph.blocks):
        for first, last in pairwise(block.first_lane.tolist()):
            places[block.step[first]].append((number, first, last))
    return places


def _assembled(graph: LabelledGraph, parts: Sequence[_Part]) -> CriticalPath:
    """Join the pieces into one path: steps in order, the ops of a step from first to last."""
    steps = np.concatenate([part.step for part in parts])
    order = np.lexsort((-np.arange(len(steps)), steps))
    ends, begins = (
        np.concatenate(arrays)[order] for arrays in zip(*((part.end_s, part.begin_s) for part in parts), strict=True)
    )
    steps = steps[order]
    before = np.concatenate([[0.0], ends[:-1]])
    before[np.flatnonzero(np.diff(steps, prepend=-1))] = 0.0
    ran = np.concatenate([_present(graph.blocks[part.block], part.ops) for part in parts])[order]
    return CriticalPath(
        graph,
        steps[ran],
        np.concatenate([np.full(len(part.step), part.block, np.int32) for part in parts])[order][ran],
        np.concatenate([part.ops.row for part in parts])[order][ran],
        np.concatenate([part.ops.lane for part in parts])[order][ran],
        (ends - begins)[ran],
        (begins - before)[ran],
    )


def _present(block: LabelledBlock, ops: _PathOps) -> Bools:
    """Mask of the ops that exist, [ops]; the others take no time."""
    if block.present is None:
        return np.ones(len(ops.row), np.bool_)
    present: Bools = block.present[ops.row, ops.lane]
    return present
