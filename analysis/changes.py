"""What a fix changes in the costs of a job, and what the job then takes.

In: a `JobReplay` and `Change`s. Out: `JobCosts`, step times. A what-if `Scenario` idealises ops; a `Change` gives them
the cost their healthy peers have, which is what a repair brings. Launch delays of ops that compute are kept: they are
the host's. Those of communication are not: a recv is posted when the framework gets to it, so most of its "delay" is
waiting, and would go with the straggler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tracekit.analysis.compute_table import ComputeTable
from tracekit.analysis.job_replay import JobReplay
from tracekit.analysis.op_grid import OpGrid, TransferGrid
from tracekit.analysis.replay import Costs, replay_lanes
from tracekit.analysis.structure import Floats


@dataclass(frozen=True, slots=True)
class JobCosts:
    """Own cost and launch delay of every op, seconds, one [rows, lanes] matrix per block of the graph."""

    own: tuple[Floats, ...]
    delay: tuple[Floats, ...]

    @classmethod
    def recorded(cls, replay: JobReplay) -> JobCosts:
        """As the job ran."""
        return cls(replay.durations.own, replay.durations.launch_delay)


class Change(Protocol):
    """One change to the costs of a job."""

    @property
    def order(self) -> int:
        """Changes of lower order are made first."""
        ...

    def apply(self, costs: JobCosts) -> JobCosts:
        """The costs after the change; the ones given stay as they are."""
        ...


@dataclass(frozen=True, slots=True)
class RemovePauses:
    """Forwards and backwards without `pause_s`, which has the shape of the table's grid."""

    table: ComputeTable
    pause_s: Floats
    order: int = 0

    def apply(self, costs: JobCosts) -> JobCosts:
        """See `Change.apply`."""
        grid = np.maximum(self.table.gather(costs.own) - self.pause_s, 0.0)
        return JobCosts(self.table.scatter(costs.own, grid), costs.delay)


@dataclass(frozen=True, slots=True)
class ScaleComputes:
    """Forwards and backwards times `factor`, which broadcasts to the table's grid."""

    table: ComputeTable
    factor: Floats
    order: int = 1

    def apply(self, costs: JobCosts) -> JobCosts:
        """See `Change.apply`."""
        return JobCosts(self.table.scatter(costs.own, self.table.gather(costs.own) * self.factor), costs.delay)


@dataclass(frozen=True, slots=True)
class ScaleOps:
    """The ops of a grid times `factor`, which broadcasts to it."""

    ops: OpGrid | TransferGrid
    factor: Floats
    order: int = 1

    def apply(self, costs: JobCosts) -> JobCosts:
        """See `Change.apply`."""
        return JobCosts(self.ops.scale(costs.own, self.factor), costs.delay)


@dataclass(frozen=True, slots=True)
class ScaleDelays:
    """The launch delays of the ops of a grid times `factor`, which broadcasts to it."""

    ops: OpGrid
    factor: Floats
    order: int = 1

    def apply(self, costs: JobCosts) -> JobCosts:
        """See `Change.apply`."""
        return JobCosts(costs.own, self.ops.scale(costs.delay, self.factor))


@dataclass(frozen=True, slots=True)
class NoDelays:
    """No launch delay anywhere."""

    order: int = 2

    def apply(self, costs: JobCosts) -> JobCosts:
        """See `Change.apply`."""
        return JobCosts(costs.own, tuple(np.minimum(delay, 0.0) for delay in costs.delay))


@dataclass(frozen=True, slots=True)
class Together:
    """Several changes at once."""

    changes: tuple[Change, ...]
    order: int = 1

    def apply(self, costs: JobCosts) -> JobCosts:
        """See `Change.apply`."""
        return apply_changes(costs, self.changes)


def apply_changes(costs: JobCosts, changes: Iterable[Change]) -> JobCosts:
    """The costs after all changes, in their order."""
    for change in sorted(changes, key=lambda change: change.order):
        costs = change.apply(costs)
    return costs


def step_times(replay: JobReplay, costs: JobCosts) -> Floats:
    """The duration of each step at these costs, seconds, [steps]."""
    times = np.zeros(len(replay.graph.steps))
    for block, own, delay in zip(replay.graph.blocks, costs.own, costs.delay, strict=True):
        rows = np.arange(block.template.rows)
        delayed = np.where(block.template.is_communication, -1, rows)
        replayed = Costs(own, rows, np.zeros(len(rows)), delay, delayed)
        ends = replay_lanes(block.template, block.first_lane, replayed)
        np.maximum.at(times, block.step, ends)
    return times


def step_times_with(replay: JobReplay, changes: Iterable[Change]) -> Floats:
    """The duration of each step after the changes, seconds, [steps]."""
    return step_times(replay, apply_changes(JobCosts.recorded(replay), changes))
