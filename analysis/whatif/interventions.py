"""Interventions: what a repair changes in a job, and the step times that result.

In: a replay of any job and `Intervention`s. Out: step times. Edits change costs and launch delays of ops, `Restructure`
what waits for what, `Together` is several of them; everything else stays as recorded. A `Scenario` instead asks the
question of the paper: it idealises ops.

Launch delays are kept. In a pipeline, those of compute ops are: the host causes them. So are those of the collectives
that begin a worker's step, which have nothing earlier to wait for. Launch delays of other communication are dropped: a
recv is posted when the framework gets to it, so most of its "delay" is waiting, which would go with the straggler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from msgspec import Struct, field

from tracekit.analysis.graph.labels import LabelledGraph, Mask
from tracekit.analysis.graph.op_grid import Part
from tracekit.analysis.graph.rules.gathering import HOST_KINDS
from tracekit.analysis.graph.template import Template
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.costs import Durations
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs
from tracekit.trace.model import DP_COLLECTIVES

if TYPE_CHECKING:
    from tracekit.analysis.graph.fold import FoldedGraph


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

    def set(self, part: Part) -> None:
        """Replace the values of a part by those that are not nan."""
        for row, values in zip(part.rows.tolist(), part.values, strict=True):
            self.rows[row] = np.where(np.isnan(values), self.rows.get(row, self.base[row]), values)

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
    """A job while interventions are applied: `replay`, and own costs and launch delays per block. A `CostRule`.

    `stalled_s`, `overlap_s`: seconds of each step in which the job stalls, and that it shares with the next, [steps].
    `kept`: which rows of each block keep launch delays. `op_cost`: own cost of each op of an op graph, [ops], in place
    of `cost`, and `op_delay` its launch delay; blocks look them up only as they are replayed, so that many overlays
    fit into memory.
    """

    replay: GraphReplay
    cost: list[ChangedRows]
    delay: list[ChangedRows]
    stalled_s: Floats
    overlap_s: Floats
    kept: list[np.ndarray]
    keeps_delays: bool = True
    op_cost: Floats | None = None
    op_delay: Floats | None = None

    @classmethod
    def recorded(cls, replay: GraphReplay) -> CostOverlay:
        """Costs as the job ran."""
        delays, none = replay.durations.launch_delay, np.zeros(len(replay.graph.steps))
        stalled_s = overlap_s = None
        kept = [np.ones(block.template.rows, np.bool_) for block in replay.graph.blocks]
        if isinstance(replay, JobReplay):
            stalled_s, overlap_s = replay.stalled_s, replay.overlap_s
            delays = replay.kept_delay or delays
            if replay.kept_delay is None:
                kept = [keeps_delay(block.template) for block in replay.graph.blocks]
            else:
                kept = [np.asarray(matrix.any(axis=1)) for matrix in delays]
        return cls(
            replay,
            [ChangedRows(matrix) for matrix in replay.durations.cost],
            [ChangedRows(matrix) for matrix in delays],
            none if stalled_s is None else stalled_s,
            none if overlap_s is None else overlap_s,
            kept,
        )

    def cost_of_ops(self) -> Floats:
        """The own cost of each op of an op graph, seconds, [ops]."""
        return self.replay.cost_of_ops if self.op_cost is None else self.op_cost

    def delay_of_ops(self) -> Floats:
        """The launch delay of each op of an op graph, seconds, [ops]."""
        return self.replay.delay_of_ops if self.op_delay is None else self.op_delay

    def costs(self, graph: LabelledGraph, durations: Durations, number: int) -> Costs:
        """The costs of a block for its replay, see `CostRule.costs`."""
        assert durations is self.replay.durations, "an overlay is of one replay"
        cost, delay, rows = self.cost[number], self.delay[number], len(self.kept[number])
        if self.op_cost is not None:
            cost = ChangedRows(self.op_cost.take(cast("FoldedGraph", graph).blocks[number].op))
        if self.op_delay is not None:
            delay = ChangedRows(self.op_delay.take(cast("FoldedGraph", graph).blocks[number].op))
        delayed = np.where(self.kept[number] & self.keeps_delays, delay.source(), -1)
        return Costs(cost.base, cost.source(), np.zeros(rows), delay.base, delayed, cost.changed(),
                     changed_delay=delay.changed())  # fmt: skip


class Intervention(Protocol):
    """One change to a job. Those that multiply may come in any order; others replace what earlier ones did."""

    def make(self, overlay: CostOverlay) -> None:
        """Apply the intervention to `overlay`."""
        ...


class Grid(Protocol):
    """Ops that know where they are in the blocks, such as an `OpGrid`."""

    def parts(self, values: Floats) -> Iterator[Part]:
        """`values`, which broadcast to the grid's shape, as parts of the blocks."""
        ...


class Scale(Struct, frozen=True, eq=False):
    """Multiply the ops of a grid by `factor`, which broadcasts to the grid."""

    ops: Grid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        _scale(overlay.cost, self.ops.parts(self.factor))


class ScaleDelays(Struct, frozen=True, eq=False):
    """Multiply the launch delays of a grid's ops by `factor`, which broadcasts to the grid."""

    ops: Grid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        _scale(overlay.delay, self.ops.parts(self.factor))


class ScaleParts(Struct, frozen=True, eq=False):
    """Multiply the costs of some ops."""

    parts: tuple[Part, ...]

    def make(self, overlay: CostOverlay) -> None:
        _scale(overlay.cost, self.parts)


class SetParts(Struct, frozen=True, eq=False):
    """Give some ops other costs, seconds; nan for those that keep theirs."""

    parts: tuple[Part, ...]

    def make(self, overlay: CostOverlay) -> None:
        for part in self.parts:
            overlay.cost[part.block].set(part)


class SetOps(Struct, frozen=True, eq=False):
    """Give each op of an op graph this cost, seconds, [ops]."""

    cost: Floats

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost = self.cost


class SetSomeOps(Struct, frozen=True, eq=False):
    """Give some ops of an op graph another cost, seconds. `chosen`: which ones, [ops]; `cost`: [ops]."""

    chosen: Bools
    cost: Floats

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost = np.where(self.chosen, self.cost, overlay.cost_of_ops())


class LessTime(Struct, frozen=True, eq=False):
    """Take time off ops of an op graph, as far as they have it. `cost_s`, `delay_s`: off their own cost and off their
    launch delay, seconds, [ops]. Several of these may come in any order.
    """

    cost_s: Floats
    delay_s: Floats | None = None

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost = np.maximum(overlay.cost_of_ops() - self.cost_s, 0.0)
        if self.delay_s is not None:
            delay = overlay.delay_of_ops()
            overlay.op_delay = np.where(
                self.delay_s > 0, np.maximum(delay - self.delay_s, np.minimum(delay, 0.0)), delay
            )


class LessRecording(Struct, frozen=True, eq=False):
    """Take what recording cost hosts off an op graph, after all other changes. `kept`: the share that stays of the own
    cost of each op; `most_delay_s`: its launch delay without a profiler, seconds; [ops].
    """

    kept: Floats
    most_delay_s: Floats

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost = overlay.cost_of_ops() * self.kept
        overlay.op_delay = np.minimum(overlay.delay_of_ops(), self.most_delay_s)


class QueuedAhead(Struct, frozen=True, eq=False):
    """Let launch latency cost nothing where, after the changes before this one, the GPU has other work meanwhile.

    A launch delay counts from the last op that an op waits for, but the latency of its launch runs from the launch on.
    `arrives_s`: how long after the end of `launched_by` each op arrived, seconds, nan for ops without such latency;
    [ops]. Each pass lets later ops begin later, so that fewer of their launches arrive too late.
    """

    arrives_s: Floats
    launched_by: Ints

    def make(self, overlay: CostOverlay) -> None:
        recorded = overlay.delay_of_ops()
        own = np.flatnonzero(np.isfinite(self.arrives_s) & (recorded > 0))
        launched_by, arrives_s, most = self.launched_by[own], self.arrives_s[own], recorded[own]
        overlay.op_delay, graph = recorded.copy(), cast("FoldedGraph", overlay.replay.graph)
        late = overlay.op_delay[own] = np.zeros(len(own))
        for _ in range(_PASSES):
            timelines, before = overlay.replay.timelines(overlay), late
            start_s = graph.of_ops([one.start for one in timelines], own)
            launched_s = graph.of_ops([one.end for one in timelines], launched_by)
            late = np.clip(launched_s + arrives_s - (start_s - before), 0.0, most)
            overlay.op_delay[own] = late
            if np.allclose(late, before, rtol=0.0, atol=_ROUNDING_S):  # every further pass would find the same
                break


#: So many passes are enough for launches to settle, but for rounding, seconds.
_PASSES, _ROUNDING_S = 4, 1e-12


class NoDelays(Struct, frozen=True):
    """Remove all launch delays."""

    def make(self, overlay: CostOverlay) -> None:
        overlay.keeps_delays = False


class NoStalls(Struct, frozen=True):
    """Remove the time in which no rank does anything."""

    def make(self, overlay: CostOverlay) -> None:
        overlay.stalled_s = np.zeros_like(overlay.stalled_s)


class NoOverlap(Struct, frozen=True):
    """Make every step end before the next one begins, which removes whatever made some workers late at its end."""

    def make(self, overlay: CostOverlay) -> None:
        overlay.overlap_s = np.zeros_like(overlay.overlap_s)


class AddTime(Struct, frozen=True):
    """Make each step longer by `seconds`, in which no rank does anything."""

    seconds: float

    def make(self, overlay: CostOverlay) -> None:
        overlay.stalled_s = overlay.stalled_s + self.seconds


class Restructure(Struct, frozen=True, eq=False):
    """The same ops with other edges, or on another schedule: those of `replay`. Of edits of costs before it, it keeps
    those of single ops and of whole steps.
    """

    replay: GraphReplay

    def make(self, overlay: CostOverlay) -> None:
        recorded = CostOverlay.recorded(self.replay)
        recorded.op_cost, recorded.op_delay = overlay.op_cost, overlay.op_delay
        recorded.stalled_s = overlay.stalled_s
        for name in CostOverlay.__struct_fields__:
            setattr(overlay, name, getattr(recorded, name))


class Together(Struct, frozen=True):
    """Several interventions at once."""

    interventions: tuple[Intervention, ...]

    def make(self, overlay: CostOverlay) -> None:
        for intervention in self.interventions:
            intervention.make(overlay)


def step_times(replay: GraphReplay, interventions: Iterable[Intervention]) -> Floats:
    """The duration of each step after the interventions, seconds, [steps]."""
    overlay = _after(replay, interventions)
    return overlay.replay.step_times(overlay) + overlay.stalled_s - overlay.overlap_s


def step_times_each(replay: GraphReplay, each: Iterable[Intervention]) -> Floats:
    """As `step_times` for each of several edits by itself, side by side, seconds, [edits, steps]."""
    overlays = [_after(replay, (one,)) for one in each]
    stalls = np.array([overlay.stalled_s - overlay.overlap_s for overlay in overlays])
    return np.asarray(replay.step_times_each(overlays) + stalls)


def _after(replay: GraphReplay, interventions: Iterable[Intervention]) -> CostOverlay:
    overlay = CostOverlay.recorded(replay)
    Together(tuple(interventions)).make(overlay)
    return overlay


def scaled_ops(masks: Sequence[Mask], factor: float) -> ScaleParts:
    """Multiply the costs of the selected ops, `masks` [rows, lanes] of each block."""
    parts = []
    for number, mask in enumerate(masks):
        rows = np.flatnonzero(mask.any(axis=1))
        parts.append(Part(number, rows, np.where(mask[rows], factor, 1.0)))
    return ScaleParts(tuple(parts))


def scaled(matrices: Sequence[Floats], parts: Iterable[Part]) -> tuple[Floats, ...]:
    """The matrices, one [rows, lanes] per block, with the values of `parts` multiplied."""
    changed = [ChangedRows(matrix) for matrix in matrices]
    _scale(changed, parts)
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


def _scale(matrices: Sequence[ChangedRows], parts: Iterable[Part]) -> None:
    """Multiply the values of `parts`, except rows whose factor is 1 throughout."""
    for part in parts:
        rows = (part.values != 1).any(axis=1)
        if rows.all():
            matrices[part.block].scale(part)
        elif rows.any():
            matrices[part.block].scale(Part(part.block, part.rows[rows], part.values[rows]))
