"""What each op cost by itself: durations cleaned of waiting, launch delays, and the ideal.

In: a `DependencyGraph`. Out: per block the cost of each op (`own`), its launch delay and its ideal cost.
Waiting for peers is taken out of communication ops: transfer duration = recorded end - latest recorded start in the
group. Launch delay = recorded start - latest recorded end of what the op waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.kernels import kernel
from tracekit.analysis.replay.calls import separate_transfers
from tracekit.analysis.replay.ideal import ideal_rows
from tracekit.analysis.replay.method import Method

#: Clocks differ: a transfer or delay down to this much below zero is kept, so that the replay reproduces the
#: recording; one further below is taken as 0 and counted.
CLOCK_TOLERANCE_S = 10e-3


@dataclass(frozen=True, slots=True)
class Durations:
    """Costs of all ops of a graph, seconds; one array per block.

    `own`: what each op costs by itself, `launch_delay`: how long it was ready before it started, [rows, lanes].
    `ideal`: what the ops of a row would take without stragglers (see `ideal`), [rows]. `clamped_transfers`,
    `clamped_delays`: how many values lay more than 10 ms below zero and were taken as 0.
    """

    own: tuple[Floats, ...]
    launch_delay: tuple[Floats, ...]
    ideal: tuple[Floats, ...]
    clamped_transfers: int
    clamped_delays: int


def measure_durations(graph: DependencyGraph, method: Method = Method.TRACEKIT) -> Durations:
    """Split every recorded duration of `graph` into own cost and waiting."""
    joined = np.full((graph.joins, len(graph.steps)), -np.inf)
    for block in graph.blocks:
        template = block.template
        _latest_joins(template.order, template.first_of_group, template.join, block.start, block.step, joined)
    own, delays = [], []
    clamped_transfers = clamped_delays = 0
    for block in graph.blocks:
        block_own, transfers = _own_costs(block, joined)
        if block.structure.call is not None:
            separate_transfers(block, block_own)
        block_delay, late = _launch_delays(block)
        own.append(block_own)
        delays.append(block_delay)
        clamped_transfers += transfers
        clamped_delays += late
    return Durations(
        own=tuple(own),
        launch_delay=tuple(delays),
        ideal=ideal_rows(graph.blocks, own, graph.layout.pp, method),
        clamped_transfers=clamped_transfers,
        clamped_delays=clamped_delays,
    )


def _own_costs(block: Block, joined: Floats) -> tuple[Floats, int]:
    template = block.template
    own = block.duration.copy()
    clamped = _transfer_durations(
        template.order, template.first_of_group, template.join, template.is_communication,
        block.start, block.step, joined, -CLOCK_TOLERANCE_S, own,
    )  # fmt: skip
    return own, int(clamped)


def _launch_delays(block: Block) -> tuple[Floats, int]:
    template = block.template
    delay = block.start.copy()
    clamped = _delays(template.first_wait, template.waits_for, block.start, block.duration, -CLOCK_TOLERANCE_S, delay)
    return delay, int(clamped)


@kernel
def _latest_joins(order, first_of_group, join, start, step, joined):  # type: ignore[no-untyped-def]
    """Raise `joined`, [joins, steps], to the latest recorded start of each data-parallel collective in each step."""
    for group in range(len(join)):
        if join[group] < 0:
            continue
        for at in range(first_of_group[group], first_of_group[group + 1]):
            row = order[at]
            for i in range(start.shape[1]):
                joined[join[group], step[i]] = max(joined[join[group], step[i]], start[row, i])


@kernel
def _transfer_durations(  # type: ignore[no-untyped-def]
    order, first_of_group, join, is_communication, start, step, joined, lowest, own
):
    """Replace the durations of communication ops in `own` by transfer durations; how many were clamped."""
    lanes = start.shape[1]
    latest = np.empty(lanes)
    clamped = 0
    for group in range(len(first_of_group) - 1):
        first, last = first_of_group[group], first_of_group[group + 1]
        if not is_communication[order[first]] or (last - first == 1 and join[group] < 0):
            continue
        latest[:] = start[order[first]]
        for at in range(first + 1, last):
            other = start[order[at]]
            for i in range(lanes):
                latest[i] = max(latest[i], other[i])
        if join[group] >= 0:
            for i in range(lanes):
                latest[i] = joined[join[group], step[i]]
        for at in range(first, last):
            row = order[at]
            for i in range(lanes):
                transfer = start[row, i] + own[row, i] - latest[i]
                if transfer < lowest:
                    transfer = 0.0
                    clamped += 1
                own[row, i] = transfer
    return clamped


@kernel
def _delays(first_wait, waits_for, start, duration, lowest, delay):  # type: ignore[no-untyped-def]
    """Turn recorded starts in `delay` into launch delays; how many were clamped."""
    rows, lanes = start.shape
    ready = np.empty(lanes)
    clamped = 0
    for row in range(rows):
        if first_wait[row] == first_wait[row + 1]:
            continue
        ready[:] = -np.inf
        for wait in range(first_wait[row], first_wait[row + 1]):
            before = waits_for[wait]
            for i in range(lanes):
                ready[i] = max(ready[i], start[before, i] + duration[before, i])
        for i in range(lanes):
            value = start[row, i] - ready[i]
            if value < lowest:
                value = 0.0
                clamped += 1
            delay[row, i] = value
    return clamped
