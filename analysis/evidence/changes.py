"""What a fix changes in the costs of a job, and what the job then takes.

In: a `JobReplay` and `Change`s. Out: `JobCosts`, step times. A what-if `Scenario` idealises ops; a `Change` gives them
the cost their healthy peers have, which is what a repair brings. Launch delays of ops that compute are kept: they are
the host's. So are those of collectives that a worker's step begins with: nothing came before that they could have
waited for. Those of other communication are not: a recv is posted when the framework gets to it, so most of its "delay"
is waiting, and would go with the straggler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.graph.op_grid import OpGrid, Part, TransferGrid
from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import Costs
from tracekit.model import DP_COLLECTIVES


@dataclass
class CostOverlay:
    """Costs under change: own costs and launch delays per block, copied when first changed.

    `stalled_s`, `overlap_s`: seconds of each step beside the graph, and those that it shares with the next, [steps].
    """

    own: list[Floats]
    delay: list[Floats]
    stalled_s: Floats
    overlap_s: Floats
    keeps_delays: bool = True
    _copied: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def recorded(cls, replay: JobReplay) -> CostOverlay:
        """As the job ran."""
        none = np.zeros(len(replay.graph.steps))
        return cls(
            list(replay.durations.own),
            list(replay.durations.launch_delay),
            none if replay.stalled_s is None else replay.stalled_s,
            none if replay.overlap_s is None else replay.overlap_s,
        )

    def scale_own(self, parts: Iterable[Part]) -> None:
        """Multiply the own costs of `parts`."""
        self._scale("own", self.own, parts)

    def scale_delays(self, parts: Iterable[Part]) -> None:
        """Multiply the launch delays of `parts`."""
        self._scale("delay", self.delay, parts)

    def _scale(self, name: str, matrices: list[Floats], parts: Iterable[Part]) -> None:
        for part in parts:
            if (name, part.block) not in self._copied:
                self._copied.add((name, part.block))
                matrices[part.block] = matrices[part.block].copy()
            matrix = matrices[part.block]
            if part.rows.ndim == 1:
                matrix[part.rows] *= part.values
            else:
                values = np.take_along_axis(matrix, part.rows, axis=0) * part.values
                np.put_along_axis(matrix, part.rows, values, axis=0)


class Change(Protocol):
    """One change to the costs of a job. All multiply, so that several can be made in any order."""

    def make(self, overlay: CostOverlay) -> None:
        """Make the change in `overlay`."""
        ...


@dataclass(frozen=True, slots=True)
class Scale:
    """The ops of a grid times `factor`, which broadcasts to the grid."""

    ops: ComputeTable | OpGrid | TransferGrid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.scale_own(_changed(self.ops.parts(self.factor)))


@dataclass(frozen=True, slots=True)
class ScaleDelays:
    """The launch delays of the ops of a grid times `factor`, which broadcasts to it."""

    ops: OpGrid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.scale_delays(_changed(self.ops.parts(self.factor)))


@dataclass(frozen=True, slots=True)
class NoDelays:
    """No launch delay anywhere."""

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.keeps_delays = False


@dataclass(frozen=True, slots=True)
class NoStalls:
    """No time in which no rank does anything."""

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.stalled_s = np.zeros_like(overlay.stalled_s)


@dataclass(frozen=True, slots=True)
class NoOverlap:
    """Every step ends before the next one begins: what made some workers late at its end is gone."""

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.overlap_s = np.zeros_like(overlay.overlap_s)


@dataclass(frozen=True, slots=True)
class Together:
    """Several changes at once."""

    changes: tuple[Change, ...]

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        for change in self.changes:
            change.make(overlay)


def step_times_with(replay: JobReplay, changes: Iterable[Change]) -> Floats:
    """The duration of each step after the changes, seconds, [steps]."""
    overlay = CostOverlay.recorded(replay)
    Together(tuple(changes)).make(overlay)
    costs = []
    for block, own, delay in zip(replay.graph.blocks, overlay.own, overlay.delay, strict=True):
        rows = np.arange(block.template.rows)
        delayed = np.where(_keeps_delay(block.template) & overlay.keeps_delays, rows, -1)
        costs.append(Costs(own, rows, np.zeros(len(rows)), delay, delayed))
    return replay.step_times_at(costs) + overlay.stalled_s - overlay.overlap_s


def _keeps_delay(template: Template) -> np.ndarray:
    """Whose launch delays are the host's, [rows]."""
    collective = np.isin(template.kind, [kind.code for kind in DP_COLLECTIVES])
    begins = np.diff(template.first_wait) == 0
    kept: np.ndarray = ~template.is_communication | (collective & begins)
    return kept


def delayed_step_times(replay: JobReplay) -> Floats:
    """The duration of each step as recorded, with all launch delays, those of communication too, seconds, [steps]."""
    durations = replay.durations
    return replay.step_times_at(
        [Costs.of_matrix(own, delay) for own, delay in zip(durations.own, durations.launch_delay, strict=True)]
    )


def _changed(parts: Iterable[Part]) -> Iterator[Part]:
    """Parts without the rows whose factor is 1 throughout."""
    for part in parts:
        rows = (part.values != 1).any(axis=1)
        if rows.all():
            yield part
        elif rows.any():
            yield Part(part.block, part.rows[rows], part.values[rows])
