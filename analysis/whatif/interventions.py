"""Interventions: changes to a job, and the step times that result.

In: a replay of any job and `Intervention`s. Out: step times or timelines. Edits change costs and launch delays of ops,
`Restructure` what waits for what, `Together` is several of them; everything else stays as recorded. Repairs are such
changes, and so are the questions of the paper ("Understanding Stragglers in Large Model Training Using What-if
Analysis", OSDI'25): `IDEAL`, `addition` and so on.

Launch delays are kept. In a pipeline, those of compute ops are: the host causes them. So are those of collectives that
wait for nothing but work of their own worker: at the beginning of a step, and where gradients are reduced. Those of
other communication are dropped: a recv is posted when the framework gets to it, so most of its "delay" is waiting,
which would go with the straggler.

Changes are made to a `CostOverlay`. It knows which rows of a block are recorded, constant in all lanes, or replaced, so
that a question about kinds or stages copies no matrix and never changes a recorded one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from msgspec import Struct, field

from tracekit.analysis.graph.compiled import GridPart, Mask
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import NO_MATRIX, Costs, LanesToReplay, Timeline
from tracekit.analysis.whatif.selection import Selection, block_masks, everything

if TYPE_CHECKING:
    from tracekit.analysis.graph.op_graph import FoldedGraph

#: So many passes are enough for launches to settle, but for rounding, seconds.
_PASSES, _ROUNDING_S = 4, 1e-12
_ALL, _NONE = np.ones((1, 1), np.bool_), np.zeros((1, 1))


class Intervention(Protocol):
    """One change to a job. Those that multiply may come in any order; others replace what earlier ones did."""

    def make(self, overlay: CostOverlay) -> None:
        """Apply the intervention to `overlay`."""
        ...


class Grid(Protocol):
    """Ops that know where they are in the blocks, such as an `OpGrid`."""

    def parts(self, values: Floats) -> Iterator[GridPart]:
        """`values`, which broadcast to the grid's shape, as parts of the blocks."""
        ...


class Scale(Struct, frozen=True, eq=False):
    """Multiply the ops of a grid by `factor`, which broadcasts to the grid."""

    ops: Grid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        _scale(overlay.cost_of_blocks(), self.ops.parts(self.factor))


class ScaleDelays(Struct, frozen=True, eq=False):
    """Multiply the launch delays of a grid's ops by `factor`, which broadcasts to the grid."""

    ops: Grid
    factor: Floats

    def make(self, overlay: CostOverlay) -> None:
        _scale(overlay.delay, self.ops.parts(self.factor))


class ScaleParts(Struct, frozen=True, eq=False):
    """Multiply the costs of some ops."""

    parts: tuple[GridPart, ...]

    def make(self, overlay: CostOverlay) -> None:
        _scale(overlay.cost_of_blocks(), self.parts)


class SetParts(Struct, frozen=True, eq=False):
    """Give some ops other costs, seconds; nan for those that keep theirs."""

    parts: tuple[GridPart, ...]

    def make(self, overlay: CostOverlay) -> None:
        blocks = overlay.cost_of_blocks()
        for part in self.parts:
            blocks[part.block].set(part)


class Idealise(Struct, frozen=True):
    """Give the selected ops their ideal cost."""

    selection: Selection

    def make(self, overlay: CostOverlay) -> None:
        ideal, blocks = overlay.replay.durations.ideal, overlay.cost_of_blocks()
        for number, mask in overlay.masks(self.selection):
            blocks[number].put(mask, ideal[number].reshape(len(ideal[number]), -1))


class SetCost(Struct, frozen=True):
    """Give the selected ops this cost, seconds."""

    selection: Selection
    cost_s: float

    def make(self, overlay: CostOverlay) -> None:
        blocks, cost = overlay.cost_of_blocks(), np.full((1, 1), self.cost_s)
        for number, mask in overlay.masks(self.selection):
            present = overlay.replay.graph.blocks[number].present
            blocks[number].put(mask if present is None else mask & present, cost)


class SetOps(Struct, frozen=True, eq=False):
    """Give ops of an op graph this cost, seconds, [ops]. `chosen`: which ones, [ops]; None: all."""

    cost: Floats
    chosen: Bools | None = None

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost = self.cost if self.chosen is None else np.where(self.chosen, self.cost, overlay.cost_of_ops())


class SetCosts(Struct, frozen=True, eq=False):
    """Give each op of each block this cost, seconds, [rows, lanes] per block."""

    costs: tuple[Floats, ...]

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost, overlay.cost = None, [ChangedRows.of(cost) for cost in self.costs]


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
    """Take what recording cost hosts off an op graph, after all other changes. `share`: what remains of the own
    cost of each op; `most_delay_s`: its launch delay without a profiler, seconds; [ops].
    """

    share: Floats
    most_delay_s: Floats

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost = overlay.cost_of_ops() * self.share
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
        launched = np.flatnonzero(np.isfinite(self.arrives_s) & (recorded > 0))
        launched_by, arrives_s, most = self.launched_by[launched], self.arrives_s[launched], recorded[launched]
        overlay.op_delay, graph = recorded.copy(), cast("FoldedGraph", overlay.replay.graph)
        late = overlay.op_delay[launched] = np.zeros(len(launched))
        for _ in range(_PASSES):
            timelines, before = overlay.timelines(), late
            start_s = graph.of_ops([timeline.start for timeline in timelines], launched)
            launched_s = graph.of_ops([timeline.end for timeline in timelines], launched_by)
            late = np.clip(launched_s + arrives_s - (start_s - before), 0.0, most)
            overlay.op_delay[launched] = late
            if np.allclose(late, before, rtol=0.0, atol=_ROUNDING_S):  # every further pass would find the same
                break


class OnlyDelays(Struct, frozen=True):
    """Keep the recorded launch delays of the selected ops, of whatever kind, and no others."""

    selection: Selection

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_delay = None
        overlay.delay = [ChangedRows.of(matrix) for matrix in overlay.replay.durations.launch_delay]
        for number, mask in overlay.masks(self.selection):
            overlay.delay[number].put(~mask, _NONE)


class NoDelays(Struct, frozen=True):
    """Remove all launch delays."""

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_delay = None
        for block in overlay.delay:
            block.put(_ALL, _NONE)


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
        overlay.replay, overlay.cost, overlay.delay = recorded.replay, recorded.cost, recorded.delay
        overlay.overlap_s = recorded.overlap_s


class Together(Struct, frozen=True):
    """Several interventions at once: `Together((first, second))`."""

    interventions: tuple[Intervention, ...]

    def make(self, overlay: CostOverlay) -> None:
        for intervention in self.interventions:
            intervention.make(overlay)


Changes = tuple[Intervention, ...]
_STEPS_ALONE: Changes = (NoStalls(), NoOverlap())
#: The job as it ran, without launch delays.
ORIGINAL: Changes = (NoDelays(), *_STEPS_ALONE)
#: Every op at its ideal cost, without launch delays.
IDEAL: Changes = (Idealise(everything()), *ORIGINAL)


def delayed(selection: Selection) -> Changes:
    """The job as it ran, with the launch delays of the selection only."""
    return (OnlyDelays(selection), *_STEPS_ALONE)


#: The job as it ran, with all launch delays.
RECORDED = delayed(everything())


def changed(replay: GraphReplay, changes: Iterable[Intervention]) -> CostOverlay:
    """The job after some changes, in this order."""
    changes, overlay = tuple(changes), CostOverlay.recorded(replay)
    for change in changes:
        change.make(overlay)
    if replay.sampled is not None:
        overlay.sampled = changed(replay.sampled, changes)
    return overlay


def step_times(replay: GraphReplay, changes: Iterable[Intervention]) -> Floats:
    """The duration of each step after the changes, seconds, [steps]."""
    return changed(replay, changes).step_times()


def mean_step_time(replay: GraphReplay, changes: Iterable[Intervention]) -> float:
    """The mean over the steps, seconds."""
    return float(step_times(replay, changes).mean())


def step_times_each(replay: GraphReplay, scenarios: Sequence[Iterable[Intervention]]) -> Floats:
    """As `step_times` for each of several questions by itself, side by side, seconds, [questions, steps]."""
    times = np.zeros((len(scenarios), len(replay.graph.steps)))

    def run(number: int) -> None:
        times[number] = step_times(replay, scenarios[number])

    # Few lanes leave all cores but one idle; many lanes use all cores for one question.
    parallel.each(run, range(len(scenarios)), numbers=replay.cells * len(scenarios) if replay.has_few_lanes else 0)
    return times


def timelines(replay: GraphReplay, changes: Iterable[Intervention]) -> tuple[Timeline, ...]:
    """Times of every op after the changes, one timeline per block of the graph."""
    return changed(replay, changes).timelines()


def scaled_ops(masks: Sequence[Mask], factor: float) -> ScaleParts:
    """Multiply the costs of the selected ops, `masks` [rows, lanes] of each block."""
    parts = []
    for number, mask in enumerate(masks):
        rows = np.flatnonzero(mask.any(axis=1))
        parts.append(GridPart(number, rows, np.where(mask[rows], factor, 1.0)))
    return ScaleParts(tuple(parts))


def scaled(matrices: Sequence[Floats], parts: Iterable[GridPart]) -> tuple[Floats, ...]:
    """The matrices, one [rows, lanes] per block, with the values of `parts` multiplied."""
    blocks = [ChangedRows.of(matrix) for matrix in matrices]
    _scale(blocks, parts)
    return tuple(block.matrix() for block in blocks)


def _scale(matrices: Sequence[ChangedRows], parts: Iterable[GridPart]) -> None:
    """Multiply the values of `parts`, except rows whose factor is 1 throughout."""
    for part in parts:
        rows = (part.values != 1).any(axis=1)
        if rows.all():
            matrices[part.block].scale(part)
        elif rows.any():
            matrices[part.block].scale(GridPart(part.block, part.rows[rows], part.values[rows]))


def removal(selection: Selection) -> Changes:
    """The original job with the selection ideal: what fixing the selection would save."""
    return (Idealise(selection), *ORIGINAL)


def addition(selection: Selection) -> Changes:
    """The ideal job with the selection as recorded: what the selection costs alone (S_x in the paper).

    Questions of the paper are about steps alone, without stalls between steps and without their overlap.
    """
    return (Idealise(~selection), *ORIGINAL)


class ChangedRows(Struct):
    """Costs or launch delays of a block, seconds: a matrix `base` [rows, lanes] of which some rows are replaced.

    `constant`: the value of a row in all lanes, nan for the others, [rows]. `rows`: row number -> its values, [lanes].
    """

    base: Floats
    constant: Floats
    rows: dict[int, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, base: Floats, zero: Bools | None = None) -> ChangedRows:
        """The matrix as it is, but for rows that are 0 in all lanes, [rows]."""
        constant = np.full(len(base), np.nan)
        if zero is not None:
            constant[zero] = 0.0
        return cls(base, constant)

    @property
    def as_recorded(self) -> bool:
        """True if nothing was replaced."""
        return not self.rows and bool(np.isnan(self.constant).all())

    def put(self, mask: Mask, values: Floats) -> None:
        """Replace what `mask` selects by `values`; both broadcast to [rows, lanes]."""
        if mask.shape[1] == values.shape[1] == 1:
            chosen = np.broadcast_to(mask[:, 0], len(self.base))
            self.constant = np.where(chosen, values[:, 0], self.constant)
            self.rows = {row: value for row, value in self.rows.items() if not chosen[row]}
            return
        if len(mask) == 1 < mask.shape[1]:  # whole lanes; the others stay as they are
            lanes = np.flatnonzero(mask[0])
            matrix = self._matrix_to_change()
            matrix[:, lanes] = np.broadcast_to(values, self.base.shape)[:, lanes]
            return
        touched = np.flatnonzero(np.broadcast_to(mask.any(axis=1), len(self.base)))
        if len(touched) == len(self.base):
            np.copyto(self._matrix_to_change(), values, where=mask)
            return
        changed = self._values(touched)
        np.copyto(changed, values if len(values) == 1 else values[touched], where=mask[touched])
        self._replace(dict(zip(touched.tolist(), changed, strict=True)))

    def scale(self, part: GridPart) -> None:
        """Multiply the values of a part; a row that is 0 in all lanes stays constant."""
        if part.rows.ndim == 1:
            for row, factor in zip(part.rows.tolist(), part.values, strict=True):
                if row in self.rows:
                    self.rows[row] *= factor
                elif self.constant[row] != 0:
                    same = not np.isnan(self.constant[row])
                    self._replace({row: (self.constant[row] if same else self.base[row]) * factor})
            return
        rows = np.unique(part.rows)
        values, place = self._values(rows), np.searchsorted(rows, part.rows)
        np.put_along_axis(values, place, np.take_along_axis(values, place, axis=0) * part.values, axis=0)
        zero = (self.constant[rows] == 0).tolist()
        self._replace(
            {row: of_row for row, of_row, stays in zip(rows.tolist(), values, zero, strict=True) if not stays}
        )

    def set(self, part: GridPart) -> None:
        """Replace the values of a part by those that are not nan."""
        values = np.where(np.isnan(part.values), self._values(part.rows), part.values)
        self._replace(dict(zip(part.rows.tolist(), values, strict=True)))

    def laid_out(self) -> tuple[Floats, Ints, Floats]:
        """The matrix, the row of it that each row reads (-1: constant), and the rows that follow those of the matrix,
        as in `Costs`.
        """
        source = np.where(np.isnan(self.constant), np.arange(len(self.base)), -1)
        source[list(self.rows)] = len(self.base) + np.arange(len(self.rows))
        if (source < 0).all():
            return NO_MATRIX, source, NO_MATRIX
        return self.base, source, np.stack(list(self.rows.values())) if self.rows else NO_MATRIX

    def matrix(self) -> Floats:
        """The whole matrix; `base` itself if nothing changed."""
        return self.base if self.as_recorded else self._values(np.arange(len(self.base)))

    def _matrix_to_change(self) -> Floats:
        """The whole matrix as a new `base`, which may be changed in place."""
        self.base = self._values(np.arange(len(self.base)))
        self.constant, self.rows = np.full(len(self.base), np.nan), {}
        return self.base

    def _values(self, rows: Ints) -> Floats:
        """A copy of some rows, [rows, lanes]."""
        values, constant = self.base[rows], self.constant[rows]
        same = ~np.isnan(constant)
        values[same] = constant[same, None]
        if self.rows:
            for place, row in enumerate(rows.tolist()):
                if row in self.rows:
                    values[place] = self.rows[row]
        return values

    def _replace(self, rows: dict[int, Floats]) -> None:
        self.constant[list(rows)] = np.nan
        self.rows.update(rows)


class CostOverlay(Struct):
    """A job while interventions are applied.

    `replay`: the job; `cost` and `delay`: own costs and kept launch delays per block. `stalled_s`, `overlap_s`: seconds
    of each step in which the job stalls, and that it shares with the next, [steps]. `op_cost`, `op_delay`: of an op
    graph, the own cost and launch delay of each op, [ops], in place of `cost` and `delay`; blocks look them up only as
    they are replayed, so that many overlays fit into memory. `sampled`: the same changes to `GraphReplay.sampled`.
    """

    replay: GraphReplay
    cost: list[ChangedRows]
    delay: list[ChangedRows]
    stalled_s: Floats
    overlap_s: Floats
    op_cost: Floats | None = None
    op_delay: Floats | None = None
    sampled: CostOverlay | None = None

    @classmethod
    def recorded(cls, replay: GraphReplay) -> CostOverlay:
        """The job as it ran."""
        cost = [ChangedRows.of(matrix) for matrix in replay.durations.cost]
        delay = [ChangedRows.of(matrix, ~mask) for matrix, mask in replay.kept_delays]
        return cls(replay, cost, delay, *replay.between_steps_s())

    def masks(self, selection: Selection) -> Iterator[tuple[int, Mask]]:
        """The number of each block and the mask of its ops in a selection, which broadcasts to [rows, lanes]."""
        return enumerate(block_masks(selection, self.replay.graph, self.replay.durations))

    def cost_of_ops(self) -> Floats:
        """The own cost of each op of an op graph, seconds, [ops]."""
        if self.op_cost is not None:
            return self.op_cost
        return self._of_ops(self.cost, self.replay.cost_of_ops)

    def delay_of_ops(self) -> Floats:
        """The launch delay of each op of an op graph, seconds, [ops]."""
        if self.op_delay is not None:
            return self.op_delay
        return self._of_ops(self.delay, self.replay.delay_of_ops)

    def cost_of_blocks(self) -> list[ChangedRows]:
        """The own costs of each block, for interventions to change."""
        if self.op_cost is not None:
            self.cost, self.op_cost = [ChangedRows.of(matrix) for matrix in self._looked_up(self.op_cost)], None
        return self.cost

    def costs(self) -> list[Costs]:
        """The costs of each block for its replay."""
        cost = self.cost if self.op_cost is None else map(ChangedRows.of, self._looked_up(self.op_cost))
        delay = self.delay if self.op_delay is None else map(ChangedRows.of, self._looked_up(self.op_delay))
        return [_costs(*block) for block in zip(cost, delay, strict=True)]

    def step_times(self) -> Floats:
        """The duration of each step, seconds, [steps]."""
        costs = self.costs()
        return self._begun(costs).step_times(costs) + self.stalled_s - self.overlap_s

    def timelines(self) -> tuple[Timeline, ...]:
        """Times of every op, one timeline per block of the graph."""
        costs = self.costs()
        return self._begun(costs).timelines(costs)

    def lanes(self) -> list[LanesToReplay]:
        """The lanes of each block with their costs."""
        costs = self.costs()
        return self._begun(costs).lanes(costs)

    def _begun(self, costs: Sequence[Costs]) -> GraphReplay:
        return self.replay.begun(costs if self.sampled is None else self.sampled.costs())

    def _looked_up(self, values: Floats) -> Iterator[Floats]:
        """Values of ops as a matrix for each block."""
        return (values.take(block.op) for block in cast("FoldedGraph", self.replay.graph).blocks)

    def _of_ops(self, blocks: Sequence[ChangedRows], recorded: Floats) -> Floats:
        if all(block.as_recorded for block in blocks):
            return recorded
        return cast("FoldedGraph", self.replay.graph).of_ops([block.matrix() for block in blocks])


def _costs(cost: ChangedRows, delay: ChangedRows) -> Costs:
    matrix, matrix_row, changed_cost = cost.laid_out()
    delays, delay_row, changed_delay = delay.laid_out()
    return Costs(matrix, matrix_row, np.nan_to_num(cost.constant), delays, delay_row, changed_cost,
                 changed_delay=changed_delay)  # fmt: skip
