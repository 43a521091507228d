"""Own cost of each op: durations without waiting, launch delays, and the ideal.

In: a `DependencyGraph`. Out: per block, the cost of each op (`cost`), its launch delay and its ideal cost. Waiting for
peers is removed from communication ops: transfer duration = recorded end - latest recorded start in the group. Launch
delay = recorded start - latest recorded end of the ops that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from tracekit.analysis import native
from tracekit.analysis.graph.dependency_graph import DependencyGraph
from tracekit.analysis.graph.labels import LabelledBlock, LabelledGraph
from tracekit.analysis.graph.rules.gathering import HOST_KINDS
from tracekit.analysis.graph.rules.posting import Posting
from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats
from tracekit.analysis.numeric.whole import UNDIVIDED, Whole
from tracekit.analysis.replay.calls import separate_transfers
from tracekit.analysis.replay.ideal import ideal_rows
from tracekit.analysis.replay.method import Method
from tracekit.trace.model import DP_COLLECTIVES

if TYPE_CHECKING:
    from tracekit.analysis.graph.fold import FoldedGraph

#: Clocks differ: a transfer or delay down to this far below zero is kept, so that the replay reproduces the recording;
#: one below that is set to 0 and counted.
CLOCK_TOLERANCE_S = 10e-3


class Durations(Struct, frozen=True, eq=False):
    """Costs of all ops of a graph, seconds; one array per block.

    `cost`: own cost of each op, `launch_delay`: how long it was ready before it started, [rows, lanes]. `ideal`:
    duration of the ops of a row without stragglers (see `ideal`), [rows], or [rows, lanes] if lanes differ.
    `clamped_transfers`, `clamped_delays`: how many values were more than 10 ms below zero and were set to 0. An absent
    op of a block (`LabelledBlock.present`) has 0 everywhere.
    """

    cost: tuple[Floats, ...]
    launch_delay: tuple[Floats, ...]
    ideal: tuple[Floats, ...]
    clamped_transfers: int
    clamped_delays: int


def measure_durations(graph: DependencyGraph, method: Method = Method.TRACEKIT, whole: Whole = UNDIVIDED) -> Durations:
    """Split every recorded duration of a pipeline job into the op's own cost and waiting. `whole`: the job of which
    the graph may be some steps.
    """

    def ideals(costs: Sequence[Floats]) -> tuple[Floats, ...]:
        if graph.posting.rule is Posting.BATCHED:
            separate_transfers(graph.blocks, costs, whole)
        return ideal_rows(graph.blocks, costs, graph.layout.pp, method, whole=whole)

    durations = _split(graph, ideals)
    for block, delay in zip(graph.blocks, durations.launch_delay, strict=True):
        if block.present is not None:  # an absent op at the start of a lane does not delay others
            first = np.broadcast_to(block.begins(), delay.shape)
            delay[~block.present] = 0.0
            delay[first] = (block.start - block.template.begin[:, None])[first]
        if graph.rank_begin_s is not None:
            first = np.broadcast_to(block.begins(), delay.shape)
            delay[first] -= graph.rank_begins(block, np.arange(len(delay)))[first]
    return durations


def measure_op_durations(graph: FoldedGraph) -> Durations:
    """Split every recorded duration of an op graph into the op's own cost and waiting."""
    from tracekit.analysis.replay.ideal_of_peers import ideals_of_peers

    return _split(graph, lambda costs: ideals_of_peers(graph, costs))


def keeps_delay(template: Template) -> Bools:
    """Rows with launch delays that the host causes, [rows]: of collectives, those that wait only for host work."""
    collective = np.isin(template.kind, [kind.code for kind in DP_COLLECTIVES])
    for_work = np.isin(template.kind[template.waits_for], [kind.code for kind in HOST_KINDS])
    waits_for_others = np.bincount(np.repeat(np.arange(template.rows), np.diff(template.first_wait))[~for_work])
    begins = np.arange(template.rows) >= len(waits_for_others)
    begins[: len(waits_for_others)] |= waits_for_others == 0
    by_host: Bools = ~template.is_communication | (collective & begins)
    return by_host


def _split(graph: LabelledGraph, ideals: Callable[[Sequence[Floats]], tuple[Floats, ...]]) -> Durations:
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
