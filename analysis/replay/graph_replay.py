"""A graph ready to be replayed with any costs, and what its ops cost.

In: a graph. Out: its `Durations`, and step times or timelines for these or other costs. Nothing here depends on the
kind of job, except for ideal costs, here those of op graphs.

Waiting for peers is removed from communication ops: transfer duration = recorded end - latest recorded start in the
group. Launch delay = recorded start - latest recorded end of the ops that it waits for.

The ideal of an op of an op graph is the usual cost of its peers, the ops of its class: of work the mean, of transfers
the median. A class that some ranks or steps do not have is compared as a total per rank and step, zero where it is
absent, so that work done by one rank only (garbage collection, a checkpoint) is excess and not its own ideal. Its peers
depend on which ranks could have it. If all ranks along some axis of the mesh have it, it belongs to their position (the
embedding of the first stage), and its peers are the ranks that have it; otherwise its peers are all ranks. The ideal of
an op without comparable ops is its own cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis import native
from tracekit.analysis.graph.compiled import LabelledBlock, LabelledGraph
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, combinations
from tracekit.analysis.numeric.statistics import lower_median_of
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
    from tracekit.analysis.graph.op_graph import FoldedGraph, Mesh

#: With fewer lanes than this, walking the graph takes longer than replaying them; so many replays run side by side.
FEW_LANES, CHOICES_SIDE_BY_SIDE = 8, 16
#: Add up this many ops at a time, so that they stay in the cache.
_OPS_AT_ONCE = 1 << 16
#: Clocks differ: a transfer or delay down to this far below zero is kept, so that the replay reproduces the recording;
#: one below that is set to 0 and counted. Chosen.
CLOCK_TOLERANCE_S = 10e-3


class Durations(Struct, frozen=True, eq=False):
    """Costs of all ops of a graph, seconds; one array per block.

    `cost`: own cost of each op, `launch_delay`: how long it was ready before it started, [rows, lanes]. `ideal`:
    duration of the ops of a row without stragglers, [rows], or [rows, lanes] if lanes differ.
    `clamped_transfers`, `clamped_delays`: how many values were more than 10 ms below zero and were set to 0. An absent
    op of a block (`LabelledBlock.present`) has 0 everywhere.
    """

    cost: tuple[Floats, ...]
    launch_delay: tuple[Floats, ...]
    ideal: tuple[Floats, ...]
    clamped_transfers: int
    clamped_delays: int


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
        costs = self.recorded_costs()
        replay = self.begun(costs if self.sampled is None else self.sampled.recorded_costs())
        return Fit(self.recorded_step_times(), replay.step_times(costs))

    @property
    def sampled(self) -> GraphReplay | None:
        """Steps of the whole job that tell when its workers begin steps, if these are only some steps of it."""
        return None

    def begun(self, costs: Sequence[Costs]) -> GraphReplay:  # noqa: ARG002
        """The replay in which workers begin steps as early as they would with these costs: of the `sampled` steps, else
        of its own.
        """
        return self

    def recorded_costs(self) -> list[Costs]:
        """The costs as recorded, with all launch delays."""
        blocks = zip(self.durations.cost, self.durations.launch_delay, strict=True)
        return [Costs.of_matrix(cost, launch_delay) for cost, launch_delay in blocks]

    @cached_property
    def kept_delays(self) -> list[tuple[Floats, Bools]]:
        """The launch delays that a changed job keeps, [rows, lanes], and which rows have any, [rows], per block."""
        return [(delay, np.ones(len(delay), np.bool_)) for delay in self.durations.launch_delay]

    def between_steps_s(self) -> tuple[Floats, Floats]:
        """Seconds of each step in which no rank does anything, and in which the next step has begun, [steps] each."""
        zeros = np.zeros(len(self.graph.steps))
        return zeros, zeros

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
            batch_size = max(1, _OPS_AT_ONCE // len(block.step))
            for first in range(0, len(block.start), batch_size):
                rows = slice(first, first + batch_size)
                np.maximum(latest, (block.start[rows] + block.duration[rows]).max(axis=0), out=latest)
            np.maximum.at(times, block.step, latest)
        return times

    def step_times(self, costs: Sequence[Costs], *, threads: int | None = None) -> Floats:
        """The duration of each step, seconds, [steps]. `threads`: default one per core."""
        check_time()
        parts = self.lanes(costs)
        if self.graph.blocks_meet:
            ends = replay_meeting_lanes(parts, self.graph.rendezvous_count, threads=threads)
        else:
            ends = [replay_lanes(lanes.template, lanes.first_lane, lanes.costs, threads=threads) for lanes in parts]
        times = np.zeros(len(self.graph.steps))
        for block, end in zip(self.graph.blocks, ends, strict=True):
            np.maximum.at(times, block.step, end)
        return times

    def timelines(self, costs: Sequence[Costs]) -> tuple[Timeline, ...]:
        """Times of every op, one timeline per block of the graph."""
        check_time()
        graph = self.graph
        return tuple(replay_timelines(self.lanes(costs), graph.rendezvous_count, meet=graph.blocks_meet))

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
            usual_cost, other = (np.broadcast_to(s[number].reshape(shape[0], -1), shape) for s in (usual, chosen))
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

    def lanes(self, costs: Sequence[Costs]) -> list[LanesToReplay]:
        """The lanes of each block with these costs."""
        return [
            LanesToReplay(block.template, block.step, block.first_lane, cost)
            for block, cost in zip(self.graph.blocks, costs, strict=True)
        ]


def measure_op_durations(graph: FoldedGraph) -> Durations:
    """Split every recorded duration of an op graph into the op's own cost and waiting."""
    return split_durations(graph, lambda costs: ideals_of_peers(graph, costs))


def split_durations(graph: LabelledGraph, ideals: Callable[[Sequence[Floats]], tuple[Floats, ...]]) -> Durations:
    """Split the durations. `ideals`: the ideal costs, given costs from which it may subtract other waits."""
    rendezvous_start = np.full((graph.rendezvous_count, len(graph.steps)), -np.inf)
    for block in graph.blocks:
        template = block.template
        native.rendezvous_starts(
            template.order, template.first_of_group, template.rendezvous, block.start, block.step, rendezvous_start
        )
    costs, delays = [], []
    clamped_transfers = clamped_delays = 0
    for block in graph.blocks:
        (cost, transfers), (block_delay, late) = parallel.both(
            partial(_op_costs, block, rendezvous_start), partial(_launch_delays, block), numbers=block.start.size
        )
        costs.append(cost)
        delays.append(block_delay)
        clamped_transfers += transfers
        clamped_delays += late
    ideal = ideals(costs)
    return Durations(
        cost=tuple(costs),
        launch_delay=tuple(delays),
        ideal=ideal,
        clamped_transfers=clamped_transfers,
        clamped_delays=clamped_delays,
    )


def _op_costs(block: LabelledBlock, rendezvous_start: Floats) -> tuple[Floats, int]:
    template = block.template
    cost = block.duration.copy()
    clamped = native.transfer_durations(
        template.order, template.first_of_group, template.rendezvous, template.is_communication,
        block.start, block.step, rendezvous_start, -CLOCK_TOLERANCE_S, cost,
    )  # fmt: skip
    return cost, clamped


def _launch_delays(block: LabelledBlock) -> tuple[Floats, int]:
    template = block.template
    delay = block.start.copy()
    lowest = -CLOCK_TOLERANCE_S if block.present is None else -np.inf
    clamped = native.launch_delays(template.first_wait, template.waits_for, block.start, block.duration, lowest, delay)
    early = (template.begin != 0) & (np.diff(template.first_wait) == 0)
    delay[early] -= template.begin[early][:, None]
    if block.present is not None:  # an absent op has no recorded start that could contradict the graph
        waits = np.diff(template.first_wait) > 0
        low = (delay < -CLOCK_TOLERANCE_S) & waits[:, None]
        clamped = int(np.count_nonzero(low & block.present))
        delay[low] = 0.0
    return delay, clamped


def ideals_of_peers(graph: FoldedGraph, costs: Sequence[Floats]) -> tuple[Floats, ...]:
    """The ideal cost of each row, seconds, [rows] per block, or [rows, lanes] if that of some ops is their own cost.

    `costs`: cost of each op, seconds, [rows, lanes] per block.
    """
    ops = graph.ops
    cost = graph.of_ops(costs)
    ranks, steps = ops.mesh.ranks, len(graph.steps)
    # A cell is all ops of a class on one rank in one step.
    cells, cell = combinations([ops.peer, ops.rank, ops.step])
    ops_in_cell = np.bincount(cell)
    total = np.bincount(cell, weights=cost).astype(np.float64)
    peer_of_cell, rank_of_cell = cells[:, 0], np.searchsorted(ranks, cells[:, 1])
    ideal = _usual_of_ops(ops.peer, ops.rendezvous >= 0, cost, len(ops.peer_names))[ops.peer]
    bounds = np.searchsorted(peer_of_cell, np.arange(len(ops.peer_names) + 1))
    usual_total = np.full(len(cells), np.nan)
    for peer in range(len(ops.peer_names)):
        of_peer = slice(bounds[peer], bounds[peer + 1])
        holders = np.unique(rank_of_cell[of_peer])
        expected = len(holders) if fill_an_axis(ops.mesh, holders) else len(ranks)
        present = bounds[peer + 1] - bounds[peer]
        if present == expected * steps and (ops_in_cell[of_peer] == ops_in_cell[bounds[peer]]).all():
            continue
        usual_total[of_peer] = lower_median_of(total[of_peer], expected * steps)
    occasional = ~np.isnan(usual_total[cell])
    ideal[occasional] = (usual_total / ops_in_cell)[cell[occasional]]
    if ops.comparable is not None:
        ideal[~ops.comparable] = cost[~ops.comparable]
        return tuple(ideal[block.op] for block in graph.blocks)
    return tuple(ideal[block.op[:, 0]] for block in graph.blocks)


def _usual_of_ops(peer: Int32s, transfers: Bools, cost: Floats, classes: int) -> Floats:
    """Mean, or median if the ops of the class are transfers, seconds, [classes]."""
    counts = np.bincount(peer, minlength=classes)
    usual: Floats = np.bincount(peer, weights=cost, minlength=classes) / np.maximum(counts, 1)
    synchronises = np.bincount(peer[transfers], minlength=classes) > 0
    transferred = np.flatnonzero(synchronises[peer])
    order, count = transferred[np.lexsort((cost[transferred], peer[transferred]))], counts[synchronises]
    first = np.cumsum(count) - count
    low, high = cost[order[first + (count - 1) // 2]], cost[order[first + count // 2]]
    usual[synchronises] = (low + high) / 2
    return usual


def fill_an_axis(mesh: Mesh, holders: Ints) -> bool:
    """True if, along some axis, all ranks next to a holder are holders too. `holders`: indices into `mesh.ranks`."""
    if len(holders) == len(mesh.ranks):
        return True
    for axis, size in enumerate(mesh.axes.values()):
        if size == 1:
            continue
        line = np.zeros(len(mesh.ranks), np.int64)
        for other, width in enumerate(mesh.axes.values()):
            if other != axis:
                line = line * width + mesh.coordinates[:, other]
        if np.isin(line, line[holders]).sum() == len(holders):
            return True
    return False


def _ends_of_choices(block: LabelledBlock, costs: Costs, choices: int) -> Floats:
    """End of the last op of each lane in the replay of each choice, seconds, [choices, lanes]."""
    lanes = len(block.step)
    ends, batch_size = np.empty((choices, lanes)), max(1, CHOICES_SIDE_BY_SIDE // lanes)

    def run(first: int) -> None:
        batch = range(min(batch_size, choices - first))
        first_lane = np.concatenate([*(block.first_lane[:-1] + lanes * copy for copy in batch), [len(batch) * lanes]])
        batch_costs = replace(costs, choices=replace(costs.choices, first=first))
        ends[first : first + len(batch)] = replay_lanes(block.template, first_lane, batch_costs, threads=1).reshape(
            -1, lanes
        )

    parallel.each(run, range(0, choices, batch_size), numbers=block.start.size * choices)
    return ends
