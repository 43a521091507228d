"""The critical path across ranks: the ops that a step consists of, one after the other, and the slack of the others.

In: a replay and a scenario. Out: `CriticalPath`, the ops that together take exactly the time of each step, and the
slack of every op. Found by walking a replayed timeline backwards: from the op that ends last to whatever it waited for
longest, across ranks wherever a collective or transfer waited for somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tracekit.analysis import native
from tracekit.analysis.graph.compiled import CompiledGraph
from tracekit.analysis.graph.labels import UNLABELLED, LabelledGraph, Value
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.analysis.replay.graph_replay import CostRule, GraphReplay
from tracekit.analysis.replay.kernel import Timeline


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The ops on the critical path of every step, [ops] each, those of a step from its first to its last.

    `step`: index into the graph's steps. `block`, `row`, `lane`: which op. `cost_s`: the part of the step that it
    takes, `delay_s`: how long before nothing ran although all that the path waits for had ended, such as launch
    delays, where the scenario keeps them. Both together add up to the step's time.
    """

    graph: LabelledGraph
    step: Int32s
    block: Int32s
    row: Ints
    lane: Ints
    cost_s: Floats
    delay_s: Floats

    def seconds_by(self, names: Sequence[str]) -> dict[tuple[Value | None, ...], float]:
        """Mean seconds of a step that ops of each combination of labels take on the path, most first; None: unlabelled.

        Delays are left out. Raises SelectionError for a label that no op has.
        """
        totals: dict[tuple[Value | None, ...], float] = {}
        for number in np.unique(self.block).tolist():
            here = self.block == number
            labels = [self.graph.label(number, name) for name in names]
            shape = self.graph.blocks[number].start.shape
            codes = [np.broadcast_to(label.codes, shape)[self.row[here], self.lane[here]] for label in labels]
            combined, inverse = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True)
            seconds = np.bincount(inverse.ravel(), weights=self.cost_s[here])
            for found, total in zip(combined.tolist(), seconds.tolist(), strict=True):
                key = tuple(
                    None if code == UNLABELLED else label.value(code) for label, code in zip(labels, found, strict=True)
                )
                totals[key] = totals.get(key, 0.0) + total
        steps = len(self.graph.steps)
        return {key: total / steps for key, total in sorted(totals.items(), key=lambda item: -item[1])}

    @property
    def mean_delay_s(self) -> float:
        """Mean seconds of a step in which nothing on the path ran."""
        return float(self.delay_s.sum()) / len(self.graph.steps)


def critical_path(replay: GraphReplay, scenario: CostRule) -> CriticalPath:
    """The critical path of every step under `scenario`."""
    graph, timelines = replay.graph, replay.timelines(scenario)
    walks = [_Walk(block.template, timeline) for block, timeline in zip(graph.blocks, timelines, strict=True)]
    meeting = [_joined_rows(block.template) if graph.blocks_meet else {} for block in graph.blocks]
    last = [timeline.end.max(axis=0) for timeline in timelines]
    parts = []
    for step, places in enumerate(_lanes_of_steps(graph)):
        block, lane = max(
            ((number, first + int(last[number][first:end].argmax())) for number, first, end in places),
            key=lambda at: last[at[0]][at[1]],
        )
        row = int(timelines[block].end[:, lane].argmax())
        lanes_of = {number: (first, end) for number, first, end in places}
        while True:
            walk = walks[block]
            ops = walk.back(row, lane, lanes_of[block], apart=graph.blocks_meet)
            if ops.late_row[-1] >= 0:
                parts.append(_Part(step, block, ops))
                break
            # A collective that lanes of several templates take part in: who of them all was there last?
            join = int(walk.template.join[walk.group_of_row[ops.row[-1]]])
            late = max(
                (
                    (float(timelines[number].start[at, one]), number, int(at), one)
                    for number, (first, end) in lanes_of.items()
                    for at in meeting[number].get(join, ())
                    for one in [first + int(timelines[number].start[at, first:end].argmax())]
                ),
            )
            parts.append(_Part(step, block, ops, late[1:]))
            waits = walks[late[1]].waits(late[2])
            if not len(waits):
                break
            block, lane = late[1], late[3]
            row = int(waits[timelines[block].end[waits, lane].argmax()])
    return _assembled(graph, timelines, parts)


def slack(replay: GraphReplay, scenario: CostRule) -> tuple[Floats, ...]:
    """How much later each op could end without making its step longer, seconds, [rows, lanes] per block.

    Only for graphs none of whose steps has lanes of several templates.
    """
    graph = replay.graph
    assert not graph.blocks_meet, "lanes of several templates meet in one step"
    found = []
    for number, (block, timeline) in enumerate(zip(graph.blocks, replay.timelines(scenario), strict=True)):
        template, costs = block.template, scenario.costs(graph, replay.durations, number)
        shape = timeline.end.shape
        cost, delay = np.empty(shape), np.zeros(shape)
        cost[:] = costs.constant[:, None]
        own, late = np.flatnonzero(costs.matrix_row >= 0), np.flatnonzero(costs.delay_row >= 0)
        cost[own] = costs.matrix[costs.matrix_row[own]]
        if len(late):
            delay[late] = costs.delay[costs.delay_row[late]]
        times = np.zeros(len(graph.steps))
        np.maximum.at(times, block.step, timeline.end.max(axis=0))
        latest = np.empty(shape)
        native.latest_ends(
            template.first_wait, template.waits_for, template.order, template.first_of_group, template.join,
            block.first_lane, template.is_communication, cost, delay, times[block.step], latest,
        )  # fmt: skip
        found.append(latest - timeline.end)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Ops:
    """Ops of a path, last first, and who of each one's group arrived last, [ops] each."""

    row: Ints
    lane: Ints
    late_row: Ints
    late_lane: Ints


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a path within one block. `late`: (block, row, lane) that arrived last at its last collective."""

    step: int
    block: int
    ops: _Ops
    late: tuple[int, int, int] | None = None


class _Walk:
    """Walks the replayed timeline of one block."""

    def __init__(self, template: CompiledGraph, timeline: Timeline) -> None:
        self.template, self.timeline = template, timeline
        groups = len(template.join)
        self.group_of_row = np.empty(template.rows, np.int64)
        self.group_of_row[template.order] = np.repeat(np.arange(groups), np.diff(template.first_of_group))
        self.room = [np.empty(groups, np.int64) for _ in range(4)]

    def back(self, row: int, lane: int, lanes: tuple[int, int], *, apart: bool) -> _Ops:
        """The path from an op back to the step's start, or to a collective that other templates take part in."""
        template = self.template
        count = native.critical_path(
            template.first_wait, template.waits_for, template.order, template.first_of_group, self.group_of_row,
            template.join, template.is_communication, self.timeline.start, self.timeline.end, *lanes, row, lane, apart,
            *self.room,
        )  # fmt: skip
        return _Ops(*(part[:count].copy() for part in self.room))

    def waits(self, row: int) -> Ints:
        """The rows that a row waits for."""
        return self.template.waits_for[self.template.first_wait[row] : self.template.first_wait[row + 1]]


def _joined_rows(template: CompiledGraph) -> dict[int, Ints]:
    """The rows that take part in each collective of all lanes."""
    return {
        int(join): template.order[first:last]
        for join, first, last in zip(
            template.join, template.first_of_group[:-1], template.first_of_group[1:], strict=True
        )
        if join >= 0
    }


def _lanes_of_steps(graph: LabelledGraph) -> list[list[tuple[int, int, int]]]:
    """(block, first lane, lane after the last) of each step."""
    places: list[list[tuple[int, int, int]]] = [[] for _ in graph.steps]
    for number, block in enumerate(graph.blocks):
        bounds = block.first_lane.tolist()
        for first, last in pairwise(bounds):
            places[block.step[first]].append((number, first, last))
    return places


def _assembled(graph: LabelledGraph, timelines: Sequence[Timeline], parts: Sequence[_Part]) -> CriticalPath:
    """The path from its pieces, in the order of steps, each from its first op to its last."""
    step, block, row, lane, begin, end = [], [], [], [], [], []
    for part in parts:
        ops, timeline = part.ops, timelines[part.block]
        count = len(ops.row)
        begun = np.empty(count)
        inside = ops.late_row >= 0
        begun[inside] = timeline.start[ops.late_row[inside], ops.late_lane[inside]]
        if part.late is not None:
            begun[-1] = timelines[part.late[0]].start[part.late[1:]]
        step.append(np.full(count, part.step, np.int32))
        block.append(np.full(count, part.block, np.int32))
        row.append(ops.row)
        lane.append(ops.lane)
        begin.append(begun)
        end.append(timeline.end[ops.row, ops.lane])
    steps = np.concatenate(step)
    order = np.lexsort((-np.arange(len(steps)), steps))
    ends, begins = np.concatenate(end)[order], np.concatenate(begin)[order]
    steps = steps[order]
    before = np.concatenate([[0.0], ends[:-1]])
    before[np.flatnonzero(np.diff(steps, prepend=-1))] = 0.0
    return CriticalPath(
        graph,
        steps,
        np.concatenate(block)[order],
        np.concatenate(row)[order],
        np.concatenate(lane)[order],
        ends - begins,
        begins - before,
    )
