"""A graph ready to be replayed under any scenario.

In: a graph and the cost of each op. Out: step times or timelines per scenario. This module does not depend on the kind
of job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.labels import LabelledBlock, LabelledGraph
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.costs import Durations
from tracekit.analysis.replay.kernel import (
    Costs,
    LanesToReplay,
    Timeline,
    replay_lanes,
    replay_meeting_lanes,
    replay_timelines,
)

#: If a block has fewer lanes than this, replay scenarios side by side until there are as many: walking the graph costs
#: the same for one lane as for this many.
LANES_SIDE_BY_SIDE = 8
#: Add up this many ops at a time, so that they stay in the cache.
_OPS_AT_ONCE = 1 << 16


class CostRule(Protocol):
    """The cost of each op in a replay, such as a what-if `Scenario`."""

    def costs(self, graph: LabelledGraph, durations: Durations, number: int) -> Costs:
        """The costs of block `number` of `graph`."""
        ...


class GraphReplay(Struct, frozen=True, eq=False):
    """A graph and the cost of each op."""

    graph: LabelledGraph
    durations: Durations

    def recorded_step_times(self) -> Floats:
        """End of the last op of each step in the recording, seconds, [steps]."""
        times = np.zeros(len(self.graph.steps))
        for block in self.graph.blocks:
            latest = np.full(len(block.step), -np.inf)
            together = max(1, _OPS_AT_ONCE // len(block.step))
            for first in range(0, len(block.start), together):
                rows = slice(first, first + together)
                np.maximum(latest, (block.start[rows] + block.duration[rows]).max(axis=0), out=latest)
            np.maximum.at(times, block.step, latest)
        return times

    def step_times(self, scenario: CostRule, *, threads: int | None = None) -> Floats:
        """The duration of each step under `scenario`, seconds, [steps]. `threads`: default one per core."""
        return self._step_times(self._lanes(scenario), threads=threads)

    def step_times_at(self, costs: Sequence[Costs]) -> Floats:
        """The duration of each step for given costs of the ops of each block, seconds, [steps]."""
        return self._step_times(self._lanes_at(costs))

    def step_times_each(self, scenarios: Sequence[CostRule], *, threads: int | None = None) -> Floats:
        """The duration of each step under each scenario, seconds, [scenarios, steps].

        The result is that of one `step_times` call per scenario. Blocks with few lanes replay many scenarios at once.
        """
        if self.graph.blocks_meet:
            return np.array([self.step_times(scenario, threads=threads) for scenario in scenarios])
        times = np.zeros((len(scenarios), len(self.graph.steps)))
        workers = threads or os.cpu_count() or 1
        for number, block in enumerate(self.graph.blocks):
            lanes = len(block.step)
            together = max(1, LANES_SIDE_BY_SIDE // (workers * lanes))
            firsts = range(0, len(scenarios), together)
            # Few lanes leave all cores but one idle; many lanes use all cores for one scenario.
            run = partial(self._ends, number, scenarios, together, 1 if lanes < LANES_SIDE_BY_SIDE else threads)
            with ThreadPoolExecutor(workers if lanes < LANES_SIDE_BY_SIDE else 1) as pool:
                for first, ends in zip(firsts, pool.map(run, firsts), strict=True):
                    for at, end in enumerate(ends.reshape(-1, lanes)):
                        np.maximum.at(times[first + at], block.step, end)
        return times

    def _ends(
        self, number: int, scenarios: Sequence[CostRule], together: int, threads: int | None, first: int
    ) -> Floats:
        """Ends of the lanes of block `number` under the scenarios from `first` on, seconds, [scenarios x lanes]."""
        costs = [one.costs(self.graph, self.durations, number) for one in scenarios[first : first + together]]
        return _replay_side_by_side(self.graph.blocks[number], costs, threads=threads)

    def mean_step_time(self, scenario: CostRule) -> float:
        """T(scenario): the mean over the steps, seconds."""
        return float(self.step_times(scenario).mean())

    def timelines(self, scenario: CostRule) -> tuple[Timeline, ...]:
        """Times of every op under `scenario`, one timeline per block of the graph."""
        graph = self.graph
        return tuple(replay_timelines(self._lanes(scenario), graph.rendezvous_count, meet=graph.blocks_meet))

    def _step_times(self, parts: Sequence[LanesToReplay], *, threads: int | None = None) -> Floats:
        if self.graph.blocks_meet:
            ends = replay_meeting_lanes(parts, self.graph.rendezvous_count, threads=threads)
        else:
            ends = [replay_lanes(lanes.template, lanes.first_lane, lanes.costs, threads=threads) for lanes in parts]
        times = np.zeros(len(self.graph.steps))
        for block, end in zip(self.graph.blocks, ends, strict=True):
            np.maximum.at(times, block.step, end)
        return times

    def _lanes(self, scenario: CostRule) -> list[LanesToReplay]:
        """The lanes of each block with their costs under `scenario`."""
        return self._lanes_at(self._costs(scenario))

    def _costs(self, scenario: CostRule) -> list[Costs]:
        """The costs of each block under `scenario`."""
        return [scenario.costs(self.graph, self.durations, number) for number in range(len(self.graph.blocks))]

    def _lanes_at(self, costs: Sequence[Costs]) -> list[LanesToReplay]:
        """The lanes of each block with these costs."""
        return [
            LanesToReplay(block.template, block.step, block.first_lane, cost)
            for block, cost in zip(self.graph.blocks, costs, strict=True)
        ]


def _replay_side_by_side(block: LabelledBlock, costs: Sequence[Costs], *, threads: int | None) -> Floats:
    """End of the last op of each lane under each of several costs, seconds, [costs x lanes]."""
    if len(costs) == 1:
        return replay_lanes(block.template, block.first_lane, costs[0], threads=threads)
    rows, lanes = block.template.rows, len(block.step)
    delay = _delays_side_by_side(rows, lanes, costs)
    # Most costs differ in few rows, so start all of them from the first one.
    matrix = np.empty((rows, len(costs), lanes))
    matrix[:] = _costs_of_rows(costs[0], slice(None), lanes)[:, None]
    for at, cost in enumerate(costs):
        differs = cost.matrix_row != costs[0].matrix_row
        if cost.matrix is not costs[0].matrix or cost.constant is not costs[0].constant:
            differs = np.ones(rows, np.bool_)
        changed = np.flatnonzero(differs)
        matrix[changed, at] = _costs_of_rows(cost, changed, lanes)
    starts = [block.first_lane[:-1] + at * lanes for at in range(len(costs))]
    first_lane = np.concatenate([*starts, [lanes * len(costs)]])
    wide = (rows, len(costs) * lanes)
    return replay_lanes(
        block.template,
        first_lane,
        Costs.of_matrix(matrix.reshape(wide), None if delay is None else delay.reshape(wide)),
        threads=threads,
    )


def _costs_of_rows(cost: Costs, rows: Ints | slice, lanes: int) -> Floats:
    """The cost of these rows in each lane, seconds, [rows, lanes]."""
    source = cost.matrix_row[rows]
    varies = source >= 0
    if varies.all():
        return cost.matrix[source]
    values = np.repeat(cost.constant[rows][:, None], lanes, axis=1)
    values[varies] = cost.matrix[source[varies]]
    return values


def _delays_side_by_side(rows: int, lanes: int, costs: Sequence[Costs]) -> Floats | None:
    """The launch delays of several costs, seconds, [rows, costs, lanes]; None if there are none."""
    first, late = costs[0], [np.flatnonzero(cost.delay_row >= 0) for cost in costs]
    if not any(map(len, late)):
        return None
    delay = np.zeros((rows, len(costs), lanes))
    if all(cost.delay is first.delay and np.array_equal(cost.delay_row, first.delay_row) for cost in costs):
        delay[late[0]] = first.delay[first.delay_row[late[0]]][:, None]
        return delay
    for at, cost in enumerate(costs):
        delay[late[at], at] = cost.delay[cost.delay_row[late[at]]]
    return delay
