"""A graph ready to be replayed with any costs.

In: a graph and the recorded cost of each op. Out: step times or timelines for these or other costs. This module does
not depend on the kind of job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.graph.compiled import LabelledBlock, LabelledGraph
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s
from tracekit.analysis.replay.costs import Durations
from tracekit.analysis.replay.kernel import (
    Choices,
    Costs,
    LanesToReplay,
    Timeline,
    replay_lanes,
    replay_meeting_lanes,
    replay_timelines,
)
from tracekit.base.limits import check_time

if TYPE_CHECKING:
    from tracekit.analysis.graph.op_graph import FoldedGraph

#: With fewer lanes than this, walking the graph takes longer than replaying them; so many replays run side by side.
FEW_LANES, CHOICES_SIDE_BY_SIDE = 8, 16
#: Add up this many ops at a time, so that they stay in the cache.
_OPS_AT_ONCE = 1 << 16


class Fit(Struct, frozen=True, eq=False):
    """How well a replay explains the recording: step times as recorded, and as replayed with all launch delays,
    seconds, [steps].
    """

    recorded: Floats
    with_delays: Floats

    @property
    def recorded_s(self) -> float:
        """The mean recorded step, seconds."""
        return float(self.recorded.mean())

    @property
    def error(self) -> float:
        """How far the replayed mean step misses the recorded one, as a share of it; nan if steps take no time."""
        recorded_s = self.recorded_s
        return abs(float(self.with_delays.mean()) - recorded_s) / (recorded_s or math.nan)


class GraphReplay(Struct, frozen=True, eq=False, dict=True):
    """A graph and the recorded cost of each op. `Costs` are those of the ops of each block."""

    graph: LabelledGraph
    durations: Durations

    @cached_property
    def fit(self) -> Fit:
        """How well the replay explains the recording."""
        return Fit(self.recorded_step_times(), self._with_delays())

    def _with_delays(self) -> Floats:
        return self.step_times(self.recorded_costs())

    def recorded_costs(self) -> list[Costs]:
        """The costs as recorded, with all launch delays."""
        return [Costs.of_matrix(*of) for of in zip(self.durations.cost, self.durations.launch_delay, strict=True)]

    @cached_property
    def kept_delays(self) -> list[tuple[Floats, Bools]]:
        """The launch delays that a changed job keeps, [rows, lanes], and which rows have any, [rows], per block."""
        return [(delay, np.ones(len(delay), np.bool_)) for delay in self.durations.launch_delay]

    def between_steps_s(self) -> tuple[Floats, Floats]:
        """Seconds of each step in which no rank does anything, and in which the next step has begun, [steps] each."""
        none = np.zeros(len(self.graph.steps))
        return none, none

    @cached_property
    def cost_of_ops(self) -> Floats:
        """The own cost of each op of an op graph, seconds, [ops]."""
        return cast("FoldedGraph", self.graph).of_ops(self.durations.cost)

    @cached_property
    def delay_of_ops(self) -> Floats:
        """The launch delay of each op of an op graph, seconds, [ops]."""
        return cast("FoldedGraph", self.graph).of_ops(self.durations.launch_delay)

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

    def step_times(
        self, costs: Sequence[Costs], sampled: Sequence[Costs] = (), *, threads: int | None = None
    ) -> Floats:
        """The duration of each step, seconds, [steps]. `sampled`: see `JobReplay.sampled`. `threads`: default one per
        core.
        """
        check_time()
        parts = self.lanes(costs, sampled)
        if self.graph.blocks_meet:
            ends = replay_meeting_lanes(parts, self.graph.rendezvous_count, threads=threads)
        else:
            ends = [replay_lanes(lanes.template, lanes.first_lane, lanes.costs, threads=threads) for lanes in parts]
        times = np.zeros(len(self.graph.steps))
        for block, end in zip(self.graph.blocks, ends, strict=True):
            np.maximum.at(times, block.step, end)
        return times

    def timelines(self, costs: Sequence[Costs], sampled: Sequence[Costs] = ()) -> tuple[Timeline, ...]:
        """Times of every op, one timeline per block of the graph."""
        check_time()
        graph = self.graph
        return tuple(replay_timelines(self.lanes(costs, sampled), graph.rendezvous_count, meet=graph.blocks_meet))

    def step_times_each_choice(
        self, usual: Sequence[Floats], chosen: Sequence[Floats], codes: Sequence[Int32s], choices: int
    ) -> Floats:
        """The duration of each step if the ops of one choice cost what `chosen` says and all others what `usual` says,
        without launch delays, for each choice, seconds, [choices, steps].

        `usual`, `chosen`: seconds, [rows, lanes] or [rows] per block. `codes`: the choice of each op, -1 for none;
        broadcasts to [rows, lanes] of a block. For graphs with few lanes, whose replays run side by side.
        """
        times = np.zeros((choices, len(self.graph.steps)))
        for number, block in enumerate(self.graph.blocks):
            check_time()
            shape = block.start.shape
            usual_cost, other = (np.broadcast_to(of[number].reshape(shape[0], -1), shape) for of in (usual, chosen))
            code = np.ascontiguousarray(np.broadcast_to(codes[number], (shape[0], codes[number].shape[1])))
            costs = replace(Costs.of_matrix(usual_cost), choices=Choices(code, np.ascontiguousarray(other), 0))
            for choice, ends in enumerate(_ends_of_choices(block, costs, choices)):
                np.maximum.at(times[choice], block.step, ends)
        return times

    @property
    def has_few_lanes(self) -> bool:
        """True if walking the graph takes longer than replaying its lanes, none of which meet across blocks."""
        return not self.graph.blocks_meet and all(len(block.step) < FEW_LANES for block in self.graph.blocks)

    @property
    def cells(self) -> int:
        """The number of ops, absent ones included."""
        return sum(block.start.size for block in self.graph.blocks)

    def lanes(self, costs: Sequence[Costs], sampled: Sequence[Costs] = ()) -> list[LanesToReplay]:
        """The lanes of each block with these costs. `sampled`: see `step_times`."""
        assert not sampled, "only a pipeline is replayed some steps at a time"
        return [
            LanesToReplay(block.template, block.step, block.first_lane, cost)
            for block, cost in zip(self.graph.blocks, costs, strict=True)
        ]


def _ends_of_choices(block: LabelledBlock, costs: Costs, choices: int) -> Floats:
    """End of the last op of each lane in the replay of each choice, seconds, [choices, lanes]."""
    lanes = len(block.step)
    ends, together = np.empty((choices, lanes)), max(1, CHOICES_SIDE_BY_SIDE // lanes)

    def run(first: int) -> None:
        batch = range(min(together, choices - first))
        first_lane = np.concatenate([*(block.first_lane[:-1] + at * lanes for at in batch), [len(batch) * lanes]])
        batch_costs = replace(costs, choices=replace(costs.choices, first=first))
        ends[first : first + len(batch)] = replay_lanes(block.template, first_lane, batch_costs, threads=1).reshape(
            -1, lanes
        )

    parallel.each(run, range(0, choices, together), numbers=block.start.size * choices)
    return ends
