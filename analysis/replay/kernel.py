"""The replay kernel: times at which every op would have run with these durations.

In: the blocks of a `DependencyGraph` and, per block, the cost of each op (and its launch delay, if kept). Out: the time
of each step, or the whole timeline. Pure: it reads nothing but the arguments and changes nothing.

An op starts when everything that it waits for has ended, plus its launch delay. A compute op ends at start + duration.
A communication op ends at (latest start in its group) + its own transfer duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from tracekit.analysis import native
from tracekit.analysis.graph.compiled import CompiledGraph
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints

#: Replay this many lanes together: their live end times fit into the second-level cache.
LANES_AT_ONCE = 512
NO_MATRIX = np.empty((0, 1))


class Choices(Struct, frozen=True, eq=False):
    """Costs of a graph of few lanes in several replays side by side: in each, only the ops of one choice are changed.

    `code`: the choice of each op, [rows, lanes] or [rows, 1]. `chosen`: what ops of the replayed choice cost, seconds,
    [rows, lanes]; other ops cost what the matrix says. `first`: the choice of the first replay.
    """

    code: Int32s
    chosen: Floats
    first: int


NO_CHOICES = Choices(np.empty((0, 1), np.int32), NO_MATRIX, 0)


class Costs(Struct, frozen=True, eq=False):
    """The cost of each op of a block, seconds.

    `matrix`: [rows of the matrix, lanes]; `matrix_row`: the matrix row of each template row, -1 if `constant` (both
    [rows]) applies to all lanes. `delay`, `delay_row`: launch delays, likewise, -1 if there is none. `changed`:
    additional rows of the matrix, [rows, lanes], so that changing some rows does not copy the matrix; `changed_delay`
    likewise. `choices`: see `Choices`.
    """

    matrix: Floats
    matrix_row: Ints
    constant: Floats
    delay: Floats
    delay_row: Ints
    changed: Floats = field(default_factory=lambda: NO_MATRIX)
    choices: Choices = field(default_factory=lambda: NO_CHOICES)
    changed_delay: Floats = field(default_factory=lambda: NO_MATRIX)

    @classmethod
    def of_matrix(cls, matrix: Floats, delay: Floats | None = None) -> Costs:
        """Every op has its own cost (and launch delay) in every lane: `matrix` and `delay` are [rows, lanes]."""
        rows = np.arange(len(matrix))
        if delay is None:
            return cls(matrix, rows, np.zeros(len(rows)), NO_MATRIX, np.full(len(rows), -1))
        return cls(matrix, rows, np.zeros(len(rows)), delay, rows)

    @classmethod
    def of_constant(cls, constant: Floats) -> Costs:
        """Every op costs the same in all lanes, without launch delays: `constant` is [rows]."""
        no_rows = np.full(len(constant), -1)
        return cls(NO_MATRIX, no_rows, constant, NO_MATRIX, no_rows)

    def only_lanes(self, lanes: Ints) -> Costs:
        """The costs of some lanes."""
        names = ("matrix", "delay", "changed", "changed_delay")
        sliced = {name: part for name in names if len(part := getattr(self, name)) and part.shape[1] != len(lanes)}
        return replace(self, **{name: part[:, lanes] for name, part in sliced.items()})

    def delays_of(self, rows: Ints) -> Floats:
        """The launch delays of some rows, all of which have one, seconds, [rows, lanes]."""
        source, whole = self.delay_row[rows], len(self.delay)
        delays = self.delay[np.minimum(source, whole - 1)] if whole else self.changed_delay[source]
        changed = np.flatnonzero(source >= whole)
        delays[changed] = self.changed_delay[source[changed] - whole]
        return delays

    def with_delays(self, rows: Ints, delay: Floats) -> Costs:
        """The same costs with other launch delays of some rows, seconds, [rows, lanes], or [1, lanes] for all rows."""
        delay_row = self.delay_row.copy()
        delay_row[rows] = len(self.delay) + len(self.changed_delay) + np.arange(len(delay))
        changed = np.concatenate([self.changed_delay, delay]) if len(self.changed_delay) else delay
        return replace(self, delay_row=delay_row, changed_delay=changed)

    @property
    def same_in_all_lanes(self) -> bool:
        """True if all lanes have the same costs."""
        return not ((self.matrix_row >= 0).any() or (self.delay_row >= 0).any())


class LanesToReplay(Struct, frozen=True, eq=False):
    """Lanes of one template and the costs of their ops.

    `step`: the step of each lane, ascending, [lanes]. `first_lane`: where the lanes of each step begin, [steps here +
    1].
    """

    template: CompiledGraph
    step: Int32s
    first_lane: Ints
    costs: Costs

    def of_steps(self, first: int, last: int) -> LanesToReplay:
        """The lanes of the steps from position `first` to before `last`."""
        bounds = self.first_lane[first : last + 1]
        lanes = np.arange(bounds[0], bounds[-1])
        return LanesToReplay(self.template, self.step[lanes], bounds - bounds[0], self.costs.only_lanes(lanes))


class Timeline(Struct, frozen=True, eq=False):
    """Times of each op in a replay, seconds from the step's start, [rows, lanes] each."""

    start: Floats
    end: Floats


def replay_lanes(template: CompiledGraph, first_lane: Ints, costs: Costs, *, threads: int | None = None) -> Floats:
    """End of the last op of each lane, seconds, [lanes].

    `first_lane`: where the lanes of each step begin, [steps + 1]; lanes of one step meet at each rendezvous.
    """
    if costs.same_in_all_lanes:
        end = np.zeros(1)
        _run(template, np.array([0, 1]), costs, end, _NO_TIMELINE, threads=1)
        return np.full(int(first_lane[-1]), end[0])
    ends = np.zeros(int(first_lane[-1]))
    _run(template, first_lane, costs, ends, _NO_TIMELINE, threads=threads)
    return ends


def replay_meeting_lanes(
    parts: Sequence[LanesToReplay], rendezvous_count: int, *, threads: int | None = None
) -> list[Floats]:
    """Like `replay_lanes`, for lanes of several templates that meet `rendezvous_count` times per step; one array for
    each template.
    """
    ends = [np.zeros(len(part.step)) for part in parts]
    _run_meeting(parts, rendezvous_count, ends, [_NO_TIMELINE] * len(parts), threads=threads)
    return ends


def replay_timelines(parts: Sequence[LanesToReplay], rendezvous_count: int, *, meet: bool) -> list[Timeline]:
    """Times of every op of every lane, a timeline for each template.

    `meet`: lanes of several templates meet, `rendezvous_count` times per step.
    """
    shapes = [(part.template.rows, int(part.first_lane[-1])) for part in parts]
    timelines = [Timeline(np.empty(shape), np.empty(shape)) for shape in shapes]
    ends = [np.zeros(lanes) for _, lanes in shapes]
    if meet:
        _run_meeting(parts, rendezvous_count, ends, timelines)
    else:
        for part, end, timeline in zip(parts, ends, timelines, strict=True):
            _run(part.template, part.first_lane, part.costs, end, timeline)
    return timelines


def path_lengths(
    template: CompiledGraph, costs: Costs, rendezvous_count: int, source: int, lanes: tuple[int, int]
) -> Floats:
    """The longest path from `source` to each rendezvous and to the lane's end, seconds, [rendezvous_count + 1, lanes].

    Paths stay in their lane and pass no other rendezvous; -inf if there is none. `source`: the number of a rendezvous,
    from whose start paths count and before which nothing may run (`without_starts`), or `rendezvous_count` for the
    start of the step. `lanes`: the first lane, and the one after the last.
    """
    first, last = lanes
    costs, count = _contiguous(costs), last - first
    steps, numbers = np.arange(first, last + 1), np.arange(count)  # each lane separately, as if it were a step
    rendezvous_start, ends = np.full((rendezvous_count, count), -np.inf), np.full(last, -np.inf)
    live, lengths = np.empty((template.buffer_count, count)), np.full((rendezvous_count + 1, count), -np.inf)
    for groups in _round_bounds(template):
        _replay(template, costs, groups, steps, numbers, rendezvous_start, live, ends, _NO_TIMELINE)
        rendezvous = template.rendezvous[groups[1] : groups[2]]
        rendezvous = rendezvous[rendezvous >= 0]
        lengths[rendezvous] = rendezvous_start[rendezvous]
        rendezvous_start[rendezvous] = np.where(rendezvous == source, 0.0, -np.inf)[:, None]
    lengths[rendezvous_count] = ends[first:]
    return lengths


def without_starts(template: CompiledGraph, costs: Costs, lanes: int) -> Costs:
    """The same costs, but ops that wait for nothing never run. `lanes`: number of lanes in the block."""
    return costs.with_delays(np.flatnonzero(np.diff(template.first_wait) == 0), np.full((1, lanes), -np.inf))


_NO_TIMELINE = Timeline(NO_MATRIX, NO_MATRIX)
_NOT_MET = np.empty((0, 0))


def _contiguous(costs: Costs) -> Costs:
    """The same costs in the memory layout of the kernel."""
    names = ("matrix", "constant", "delay", "changed", "changed_delay")
    return replace(costs, **{name: np.ascontiguousarray(getattr(costs, name)) for name in names})


def _replay(
    template: CompiledGraph,
    costs: Costs,
    groups: tuple[int, int, int],
    first_lane: Ints,
    steps: Ints,
    rendezvous_start: Floats,
    live: Floats,
    ends: Floats,
    timeline: Timeline,
) -> None:
    """Replay `groups` (see `_round_bounds`) for the lanes from `first_lane[0]` to `first_lane[-1]`."""
    native.replay(
        template.order, template.first_of_group, template.first_wait, template.waits_for, template.buffer,
        template.rendezvous, template.is_communication,
        costs.matrix, costs.matrix_row, costs.constant, costs.delay, costs.delay_row,
        *groups, first_lane, steps, rendezvous_start, live, ends, timeline.start, timeline.end, costs.changed,
        template.begin, costs.choices.code, costs.choices.chosen, costs.choices.first,
        costs.changed_delay,
    )  # fmt: skip


def _run(
    template: CompiledGraph,
    first_lane: Ints,
    costs: Costs,
    ends: Floats,
    timeline: Timeline,
    *,
    threads: int | None = None,
) -> None:
    """Fill `ends` (and `timeline`), distributing runs of whole steps over the cores."""
    costs, everything = _contiguous(costs), (0, 0, len(template.rendezvous))

    def part(bounds: tuple[int, int]) -> None:
        lanes = first_lane[bounds[0] : bounds[1] + 1]
        live = np.empty((template.buffer_count, lanes[-1] - lanes[0]))
        _replay(template, costs, everything, lanes, lanes, _NOT_MET, live, ends, timeline)

    parallel.each(part, _runs(np.diff(first_lane)), threads=threads)


def _run_meeting(
    parts: Sequence[LanesToReplay],
    rendezvous_count: int,
    ends: Sequence[Floats],
    timelines: Sequence[Timeline],
    *,
    threads: int | None = None,
) -> None:
    """Like `_run`, round by round: all templates up to where they meet, the rendezvous, then the next round."""
    steps = max(int(part.step[-1]) for part in parts) + 1
    costs = [_contiguous(part.costs) for part in parts]
    bounds = [_round_bounds(part.template) for part in parts]

    def run(first_and_last_step: tuple[int, int]) -> None:
        first_step, last_step = first_and_last_step
        rendezvous_start = np.full((rendezvous_count, last_step - first_step), -np.inf)
        places = []
        for part in parts:
            numbers = part.step[part.first_lane[:-1]]
            low, high = np.searchsorted(numbers, (first_step, last_step))
            lanes = part.first_lane[low : high + 1]
            live = np.empty((part.template.buffer_count, int(lanes[-1] - lanes[0])))
            places.append((lanes, (numbers[low:high] - first_step).astype(np.int64), live))
        for number in range(max(len(rounds) for rounds in bounds)):
            for place, (lanes, in_run, live) in enumerate(places):
                if number < len(bounds[place]) and len(in_run):
                    template, groups = parts[place].template, bounds[place][number]
                    _replay(
                        template,
                        costs[place],
                        groups,
                        lanes,
                        in_run,
                        rendezvous_start,
                        live,
                        ends[place],
                        timelines[place],
                    )

    lanes_of_step = np.sum([np.bincount(part.step, minlength=steps) for part in parts], axis=0)
    parallel.each(run, _runs(lanes_of_step), threads=threads)


def _round_bounds(template: CompiledGraph) -> list[tuple[int, int, int]]:
    """Per round, and once more after the last: groups that only finish, new groups, end of the new groups.

    The first bound is the first rendezvous of the round before; the second is where this round's own groups begin.
    """
    count = np.concatenate([[0], np.cumsum(template.rendezvous >= 0)])
    firsts = template.first_of_round
    bounds, finish = [], 0
    for first, last in pairwise(firsts.tolist()):
        bounds.append((finish, first, last))
        finish = last - int(count[last] - count[first])
    return [*bounds, (finish, int(firsts[-1]), int(firsts[-1]))]


def _runs(lanes_of_step: Ints) -> list[tuple[int, int]]:
    """Runs of whole steps with about LANES_AT_ONCE lanes each: first step, and the step after the last."""
    runs, first, lanes, last = [], 0, 0, len(lanes_of_step) - 1
    for step, width in enumerate(lanes_of_step.tolist()):
        lanes += width
        if lanes >= LANES_AT_ONCE or step == last:
            runs.append((first, step + 1))
            first, lanes = step + 1, 0
    return runs
