"""A job ready to be replayed under any scenario.

In: a `Trace`. Out: step times or timelines per scenario, of a graph whose clocks are set right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.clocks import Clocks, measure_clocks, with_clocks_set
from tracekit.analysis.replay.costs import Durations, measure_durations
from tracekit.analysis.replay.ideal import ideal_rows
from tracekit.analysis.replay.kernel import (
    Costs,
    LanesToReplay,
    Timeline,
    replay_lanes,
    replay_meeting_lanes,
    replay_meeting_timelines,
    replay_timeline,
)
from tracekit.analysis.replay.method import Method
from tracekit.errors import SelectionError
from tracekit.trace import Trace


class CostRule(Protocol):
    """What each op costs in a replay, such as a what-if `Scenario`."""

    def costs(self, graph: DependencyGraph, durations: Durations, number: int) -> Costs:
        """The costs of block `number` of `graph`."""
        ...


@dataclass(frozen=True, slots=True)
class JobReplay:
    """The graph of a job and what each op costs.

    `clocks`: what was taken off the recorded starts before. `as_recorded`: the same job without reconstructed members
    of collectives, None where nothing was reconstructed. `stalled_s`: seconds of each step in which no rank does
    anything and which the graph leaves out, [steps], None where it leaves nothing out; `overlap_s`: those in which the
    next step has begun.
    """

    graph: DependencyGraph
    durations: Durations
    clocks: Clocks
    as_recorded: JobReplay | None = None
    stalled_s: Floats | None = None
    overlap_s: Floats | None = None

    @classmethod
    def from_trace(cls, trace: Trace, method: Method = Method.TRACEKIT) -> JobReplay:
        """Build the graph of `trace`, set its clocks right and measure its durations.

        The published method takes the clocks as they are. Raises GraphError where the ops do not fit together.
        """
        if method is Method.PUBLISHED:
            graph = DependencyGraph.from_trace(trace)
            return cls(graph, measure_durations(graph, method), Clocks.right(graph.layout.pp, len(graph.dp_ranks)))
        replay = cls._with_clocks_set(DependencyGraph.from_trace(trace, reconstruct=True, posting=None), trace)
        if not replay.graph.reconstructed:
            return replay
        as_recorded = DependencyGraph.from_trace(trace, posting=None)
        return replace(replay, as_recorded=cls._with_clocks_set(as_recorded, trace))

    @classmethod
    def _with_clocks_set(cls, graph: DependencyGraph, trace: Trace) -> JobReplay:
        clocks = measure_clocks(graph, trace.step_starts)
        if clocks.any_off:
            graph = with_clocks_set(graph, clocks, trace.step_starts)
        return cls(graph, measure_durations(graph), clocks)

    def with_ideals(self, method: Method) -> JobReplay:
        """The same job with the ideal costs of that method."""
        ideal = ideal_rows(self.graph.blocks, self.durations.own, self.graph.layout.pp, method)
        return replace(self, durations=replace(self.durations, ideal=ideal))

    def only_steps(self, steps: Sequence[int]) -> JobReplay:
        """The same job with only these step numbers; ideal costs stay those of the whole job.

        Raises SelectionError where none of them is in the job.
        """
        wanted = np.flatnonzero(np.isin(self.graph.steps, list(steps)))
        if not len(wanted):
            raise SelectionError(
                f"none of these steps is in the job; it has {len(self.graph.steps)} steps from {self.graph.steps[0]} to"
                f" {self.graph.steps[-1]}"
            )
        blocks, own, delays, ideal = [], [], [], []
        for number, block in enumerate(self.graph.blocks):
            lanes = np.flatnonzero(np.isin(block.step, wanted))
            if len(lanes):
                blocks.append(block.only_lanes(lanes, np.searchsorted(wanted, block.step[lanes]).astype(np.int32)))
                own.append(np.ascontiguousarray(self.durations.own[number][:, lanes]))
                delays.append(np.ascontiguousarray(self.durations.launch_delay[number][:, lanes]))
                ideal.append(self.durations.ideal[number])
        return JobReplay(
            replace(self.graph, steps=self.graph.steps[wanted], blocks=tuple(blocks)),
            replace(self.durations, own=tuple(own), launch_delay=tuple(delays), ideal=tuple(ideal)),
            self.clocks,
        )

    def recorded_step_times(self) -> Floats:
        """When the last op of each step ended in the recording, seconds, [steps]."""
        times = np.zeros(len(self.graph.steps))
        for block in self.graph.blocks:
            ends = block.start[0] + block.duration[0]
            for start, duration in zip(block.start, block.duration, strict=True):
                np.maximum(ends, start + duration, out=ends)
            np.maximum.at(times, block.step, ends)
        return times

    def step_times(self, scenario: CostRule, *, threads: int | None = None) -> Floats:
        """The duration of each step under `scenario`, seconds, [steps]. `threads`: default one per core."""
        return self._step_times(self._lanes(scenario), threads=threads)

    def step_times_at(self, costs: Sequence[Costs], *, threads: int | None = None) -> Floats:
        """The duration of each step where the ops of each block have these costs, seconds, [steps]."""
        lanes = [
            LanesToReplay(block.template, block.step, block.first_lane, cost)
            for block, cost in zip(self.graph.blocks, costs, strict=True)
        ]
        return self._step_times(lanes, threads=threads)

    def _step_times(self, parts: Sequence[LanesToReplay], *, threads: int | None) -> Floats:
        if self.graph.blocks_meet:
            ends = replay_meeting_lanes(parts, self.graph.joins, threads=threads)
        else:
            ends = [replay_lanes(lanes.template, lanes.first_lane, lanes.costs, threads=threads) for lanes in parts]
        times = np.zeros(len(self.graph.steps))
        for block, end in zip(self.graph.blocks, ends, strict=True):
            np.maximum.at(times, block.step, end)
        return times

    def mean_step_time(self, scenario: CostRule) -> float:
        """T(scenario): the mean over the steps, seconds."""
        return float(self.step_times(scenario).mean())

    def timelines(self, scenario: CostRule, *, threads: int | None = None) -> tuple[Timeline, ...]:
        """When every op runs under `scenario`, one timeline per block of the graph."""
        if self.graph.blocks_meet:
            return tuple(replay_meeting_timelines(self._lanes(scenario), self.graph.joins, threads=threads))
        return tuple(
            replay_timeline(lanes.template, lanes.first_lane, lanes.costs, threads=threads)
            for lanes in self._lanes(scenario)
        )

    def _lanes(self, scenario: CostRule) -> list[LanesToReplay]:
        """The lanes of each block with their costs under `scenario`."""
        return [
            LanesToReplay(
                block.template,
                block.step,
                block.first_lane,
                scenario.costs(self.graph, self.durations, number),
            )
            for number, block in enumerate(self.graph.blocks)
        ]
