"""The replay kernel: when would every op have run, had the durations been these.

In: the blocks of a `DependencyGraph` and, per block, the cost of each op (and launch delays, where kept). Out: the
time of each step, or the whole timeline. Pure: nothing is read but the arguments, nothing is changed.

An op starts when all it waits for has ended, plus its launch delay. A compute op ends start + duration. A
communication op ends (latest start in its group) + its own transfer duration.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from tracekit.analysis.graph import Template
from tracekit.analysis.kernels import kernel
from tracekit.analysis.structure import Floats, Ints

#: Lanes replayed together: their live end times fit the second-level cache.
LANES_AT_ONCE = 512
NO_MATRIX = np.empty((0, 1))


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each op of a block, seconds.

    `matrix`: [rows of the matrix, lanes]; `matrix_row`: the matrix row of each template row, -1 where `constant`
    (both [rows]) holds for all lanes. `delay`, `delay_row`: launch delays likewise, -1 where there is none.
    """

    matrix: Floats
    matrix_row: Ints
    constant: Floats
    delay: Floats
    delay_row: Ints

    @classmethod
    def of_matrix(cls, matrix: Floats, delay: Floats | None = None) -> Costs:
        """Every op has its own cost (and launch delay) in every lane: `matrix` and `delay` are [rows, lanes]."""
        rows = np.arange(len(matrix))
        if delay is None:
            return cls(matrix, rows, np.zeros(len(rows)), NO_MATRIX, np.full(len(rows), -1))
        return cls(matrix, rows, np.zeros(len(rows)), delay, rows)

    @classmethod
    def of_constant(cls, constant: Floats) -> Costs:
        """Every op costs the same in all lanes and nothing delays it: `constant` is [rows]."""
        none = np.full(len(constant), -1)
        return cls(NO_MATRIX, none, constant, NO_MATRIX, none)

    @property
    def same_in_all_lanes(self) -> bool:
        """True where no lane can differ from another."""
        return not ((self.matrix_row >= 0).any() or (self.delay_row >= 0).any())


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each op runs in a replay, seconds from the step's start, [rows, lanes] each."""

    start: Floats
    end: Floats


def replay_lanes(template: Template, first_lane: Ints, costs: Costs, *, threads: int | None = None) -> Floats:
    """When the last op of each lane ends, seconds, [lanes].

    `first_lane`: where the lanes of each step begin, [steps + 1]; lanes of one step join where the template says so.
    """
    if costs.same_in_all_lanes:
        one = np.zeros(1)
        _run(template, np.array([0, 1]), costs, one, None, threads=1)
        return np.full(int(first_lane[-1]), one[0])
    ends = np.zeros(int(first_lane[-1]))
    _run(template, first_lane, costs, ends, None, threads=threads)
    return ends


def replay_timeline(template: Template, first_lane: Ints, costs: Costs, *, threads: int | None = None) -> Timeline:
    """When every op of every lane runs. Arguments as for `replay_lanes`."""
    shape = (template.rows, int(first_lane[-1]))
    timeline = Timeline(np.empty(shape), np.empty(shape))
    _run(template, first_lane, costs, np.zeros(shape[1]), timeline, threads=threads)
    return timeline


def _run(
    template: Template, first_lane: Ints, costs: Costs, ends: Floats, timeline: Timeline | None, *, threads: int | None
) -> None:
    """Fill `ends` (and `timeline`), spreading runs of whole steps over the cores."""
    starts_out, ends_out = (NO_MATRIX, NO_MATRIX) if timeline is None else (timeline.start, timeline.end)
    arguments = (
        template.order, template.first_of_group, template.first_wait, template.waits_for, template.slot,
        template.slots, template.joins_lanes, template.is_communication,
        costs.matrix, costs.matrix_row, costs.constant, costs.delay, costs.delay_row,
    )  # fmt: skip

    def part(bounds: tuple[int, int]) -> None:
        first, last = bounds
        _replay(*arguments, first_lane[first : last + 1], ends, starts_out, ends_out)

    parts = _parts(first_lane)
    workers = threads or os.cpu_count() or 1
    if workers == 1 or len(parts) == 1:
        for bounds in parts:
            part(bounds)
    else:
        list(_pool(workers).map(part, parts))


def _parts(first_lane: Ints) -> Sequence[tuple[int, int]]:
    """Runs of whole steps of about LANES_AT_ONCE lanes: (first, last) positions in `first_lane`."""
    parts, first = [], 0
    for last in range(1, len(first_lane)):
        if first_lane[last] - first_lane[first] >= LANES_AT_ONCE or last == len(first_lane) - 1:
            parts.append((first, last))
            first = last
    return parts


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="replay")


@kernel
def _replay(  # type: ignore[no-untyped-def]
    order, first_of_group, first_wait, waits_for, slot, slots, joins_lanes, is_communication,
    matrix, matrix_row, constant, delay, delay_row, first_lane, ends, starts_out, ends_out,
):  # fmt: skip
    low, high = first_lane[0], first_lane[-1]
    width = high - low
    live = np.empty((slots, width))
    latest = np.empty(width)
    final = np.zeros(width)
    for group in range(len(first_of_group) - 1):
        first, last = first_of_group[group], first_of_group[group + 1]
        for at in range(first, last):
            row = order[at]
            ready = live[slot[row]]
            wait_first, wait_last = first_wait[row], first_wait[row + 1]
            if wait_first == wait_last:
                ready[:] = 0.0
            else:
                other = live[slot[waits_for[wait_first]]]
                for i in range(width):
                    ready[i] = other[i]
                for wait in range(wait_first + 1, wait_last):
                    other = live[slot[waits_for[wait]]]
                    for i in range(width):
                        ready[i] = other[i] if other[i] > ready[i] else ready[i]
            if delay_row[row] >= 0:
                late = delay[delay_row[row], low:high]
                for i in range(width):
                    ready[i] += late[i]
            if starts_out.shape[0] > 0:
                starts_out[row, low:high] = ready
        if is_communication[order[first]]:
            joins = joins_lanes[group]
            if joins or last - first > 1:
                for i in range(width):
                    latest[i] = live[slot[order[first]], i]
                for at in range(first + 1, last):
                    other = live[slot[order[at]]]
                    for i in range(width):
                        latest[i] = other[i] if other[i] > latest[i] else latest[i]
                if joins:
                    for step in range(len(first_lane) - 1):
                        begin, end = first_lane[step] - low, first_lane[step + 1] - low
                        top = latest[begin]
                        for i in range(begin + 1, end):
                            top = max(top, latest[i])
                        latest[begin:end] = top
                for at in range(first, last):
                    live[slot[order[at]]] = latest
        for at in range(first, last):
            row = order[at]
            value = live[slot[row]]
            source = matrix_row[row]
            if source >= 0:
                cost = matrix[source, low:high]
                for i in range(width):
                    value[i] += cost[i]
            else:
                fixed = constant[row]
                for i in range(width):
                    value[i] += fixed
            for i in range(width):
                final[i] = value[i] if value[i] > final[i] else final[i]
            if ends_out.shape[0] > 0:
                ends_out[row, low:high] = value
    ends[low:high] = final
