"""Changes to the costs of a job, and the step times that result.

In: a `JobReplay` and `Change`s. Out: `CostOverlay`, step times. A what-if `Scenario` idealises ops; a `Change` gives
them the cost of their healthy peers, which is what a repair achieves.

Launch delays of compute ops are kept: the host causes them. So are those of the collectives that begin a worker's step,
which have nothing earlier to wait for. Launch delays of other communication are dropped: a recv is posted when the
framework gets to it, so most of its "delay" is waiting, which would go with the straggler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct, field

from tracekit.analysis.evidence.compute_table import ComputeTable
from tracekit.analysis.graph.op_grid import OpGrid, Part, TransferGrid
from tracekit.analysis.graph.rules.gathering import HOST_KINDS
from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs
from tracekit.trace.model import DP_COLLECTIVES


class ChangedRows(Struct):
    """A matrix `base` [rows, lanes] with some rows replaced: `rows` maps a row number to its values, [lanes]."""

    base: Floats
    rows: dict[int, Floats] = field(default_factory=dict)

    def scale(self, part: Part) -> None:
        """Multiply the values of a part."""
        touched = np.unique(part.rows)
        for row in touched.tolist():
            if row not in self.rows:
                self.rows[row] = self.base[row].copy()
        if part.rows.ndim == 1:
            for row, factor in zip(part.rows.tolist(), part.values, strict=True):
                self.rows[row] *= factor
            return
        values = np.stack([self.rows[row] for row in touched.tolist()])
        place = np.searchsorted(touched, part.rows)
        np.put_along_axis(values, place, np.take_along_axis(values, place, axis=0) * part.values, axis=0)
        self.rows.update(zip(touched.tolist(), values, strict=True))

    def source(self) -> Ints:
        """Index of each row in `base`, or, counting on from there, in `changed`, [rows]."""
        source = np.arange(len(self.base))
        source[list(self.rows)] = len(self.base) + np.arange(len(self.rows))
        return source

    def changed(self) -> Floats:
        """The changed rows, [changed rows, lanes]."""
        return np.stack(list(self.rows.values())) if self.rows else NO_MATRIX

    def matrix(self) -> Floats:
        """The whole matrix; `base` itself if nothing changed."""
        if not self.rows:
            return self.base
        whole = self.base.copy()
        whole[list(self.rows)] = self.changed()
        return whole


class CostOverlay(Struct):
    """The costs of a job while changes are applied: own costs and launch delays per block.

    `stalled_s`, `overlap_s`: seconds of each step in which the job stalls, and that it shares with the next, [steps].
    """

    cost: list[ChangedRows]
    delay: list[ChangedRows]
    stalled_s: Floats
    overlap_s: Floats
    kept: list[np.ndarray] | None = None
    keeps_delays: bool = True

    @classmethod
    def recorded(cls, replay: JobReplay) -> CostOverlay:
        """Costs as the job ran."""
        none = np.zeros(len(replay.graph.steps))
        return cls(
            [ChangedRows(matrix) for matrix in replay.durations.cost],
            [ChangedRows(matrix) for matrix in replay.kept_delay or replay.durations.launch_delay],
            none if replay.stalled_s is None else replay.stalled_s,
            none if replay.overlap_s is None else replay.overlap_s,
            None if replay.kept_delay is None else [np.asarray(matrix.any(axis=1)) for matrix in replay.kept_delay],
        )

    def scale_costs(self, parts: Iterable[Part]) -> None:
        """Multiply the own costs of `parts`."""
        for part in parts:
            self.cost[part.block].scale(part)

    def scale_delays(self, parts: Iterable[Part]) -> None:
        """Multiply the launch delays of `parts`."""
        for part in parts:
            self.delay[part.block].scale(part)

    def costs(self, number: int, template: Template) -> Costs:
        """The costs of a block for its replay, with the launch delays that the host causes."""
        cost, delay = self.cost[number], self.delay[number]
        kept = keeps_delay(template) if self.kept is None else self.kept[number]
        delayed = np.where(kept & self.keeps_delays, np.arange(template.rows), -1)
        constant = np.zeros(template.rows)
        return Costs(cost.base, cost.source(), constant, delay.matrix(), delayed, cost.changed())


class Change(Protocol):
    """One change to the costs of a job. All changes multiply, so their order does not matter."""

    def make(self, overlay: CostOverlay) -> None:
        """Apply the change to `overlay`."""
        ...


class Scale(Struct, frozen=True, eq=False):
    """Multiply the ops of a grid by `factor`, which broadcasts to the grid."""

    ops: ComputeTable | OpGrid | TransferGrid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.scale_costs(_changed(self.ops.parts(self.factor)))


class ScaleDelays(Struct, frozen=True, eq=False):
    """Multiply the launch delays of a grid's ops by `factor`, which broadcasts to the grid."""

    ops: OpGrid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.scale_delays(_changed(self.ops.parts(self.factor)))


class NoDelays(Struct, frozen=True):
    """Remove all launch delays."""

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.keeps_delays = False


class NoStalls(Struct, frozen=True):
    """Remove the time in which no rank does anything."""

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.stalled_s = np.zeros_like(overlay.stalled_s)


class NoOverlap(Struct, frozen=True):
    """Make every step end before the next one begins, which removes any lateness of workers at its end."""

    def make(self, overlay: CostOverlay) -> None:
        """See `Change.make`."""
        overlay.overlap_s = np.zeros_like(overlay.overlap_s)


class Together(Struct, frozen=True):
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
    for number, block in enumerate(replay.graph.blocks):
        costs.append(overlay.costs(number, block.template))
    return replay.step_times_at(costs) + overlay.stalled_s - overlay.overlap_s


def scaled(matrices: Sequence[Floats], parts: Iterable[Part]) -> tuple[Floats, ...]:
    """The matrices, one [rows, lanes] per block, with the values of `parts` multiplied."""
    changed = [ChangedRows(matrix) for matrix in matrices]
    for part in _changed(parts):
        changed[part.block].scale(part)
    return tuple(rows.matrix() for rows in changed)


def keeps_delay(template: Template) -> np.ndarray:
    """Rows with launch delays that the host causes, [rows]: of collectives, those that wait only for host work."""
    collective = np.isin(template.kind, [kind.code for kind in DP_COLLECTIVES])
    for_work = np.isin(template.kind[template.waits_for], [kind.code for kind in HOST_KINDS])
    waits_for_others = np.bincount(np.repeat(np.arange(template.rows), np.diff(template.first_wait))[~for_work])
    begins = np.arange(template.rows) >= len(waits_for_others)
    begins[: len(waits_for_others)] |= waits_for_others == 0
    kept: np.ndarray = ~template.is_communication | (collective & begins)
    return kept


def delayed_step_times(replay: JobReplay) -> Floats:
    """Recorded step times, seconds, [steps], with all launch delays, including those of communication."""
    durations = replay.durations
    return replay.step_times_at(
        [Costs.of_matrix(cost, delay) for cost, delay in zip(durations.cost, durations.launch_delay, strict=True)]
    )


def _changed(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts without the rows whose factor is 1 throughout."""
    for part in parts:
        rows = (part.values != 1).any(axis=1)
        if rows.all():
            yield part
        elif rows.any():
            yield Part(part.block, part.rows[rows], part.values[rows])
