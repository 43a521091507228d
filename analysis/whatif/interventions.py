"""Interventions: changes to a job, and the step times that result.

In: a replay of any job and `Intervention`s. Out: step times or timelines. Edits change costs and launch delays of ops,
`Restructure` what waits for what, `Together` is several of them; everything else stays as recorded. Repairs are such
changes, and so are the questions of the paper (`paper.py`).

Launch delays are kept. In a pipeline, those of compute ops are: the host causes them. So are those of the collectives
that begin a worker's step, which have nothing earlier to wait for. Launch delays of other communication are dropped: a
recv is posted when the framework gets to it, so most of its "delay" is waiting, which would go with the straggler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from msgspec import Struct

from tracekit.analysis.graph.compiled import Mask
from tracekit.analysis.graph.op_grid import GridPart
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.arrays import Bools, Floats, Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.graph_replay import GraphReplay
from tracekit.analysis.replay.kernel import Timeline
from tracekit.analysis.whatif.overlay import ChangedRows, CostOverlay
from tracekit.analysis.whatif.selection import Selection, everything

if TYPE_CHECKING:
    from tracekit.analysis.graph.op_graph import FoldedGraph


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
    """Give each op of an op graph this cost, seconds, [ops]."""

    cost: Floats

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost = self.cost


class SetCosts(Struct, frozen=True, eq=False):
    """Give each op of each block this cost, seconds, [rows, lanes] per block."""

    costs: tuple[Floats, ...]

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_cost, overlay.cost = None, [ChangedRows.of(cost) for cost in self.costs]


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
        own = np.flatnonzero(np.isfinite(self.arrives_s) & (recorded > 0))
        launched_by, arrives_s, most = self.launched_by[own], self.arrives_s[own], recorded[own]
        overlay.op_delay, graph = recorded.copy(), cast("FoldedGraph", overlay.replay.graph)
        late = overlay.op_delay[own] = np.zeros(len(own))
        for _ in range(_PASSES):
            timelines, before = overlay.timelines(), late
            start_s = graph.of_ops([timeline.start for timeline in timelines], own)
            launched_s = graph.of_ops([timeline.end for timeline in timelines], launched_by)
            late = np.clip(launched_s + arrives_s - (start_s - before), 0.0, most)
            overlay.op_delay[own] = late
            if np.allclose(late, before, rtol=0.0, atol=_ROUNDING_S):  # every further pass would find the same
                break


#: So many passes are enough for launches to settle, but for rounding, seconds.
_PASSES, _ROUNDING_S = 4, 1e-12


class OnlyDelays(Struct, frozen=True):
    """Keep the recorded launch delays of the selected ops, of whatever kind, and no others."""

    selection: Selection

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_delay, overlay.delay = None, [ChangedRows.of(of) for of in overlay.replay.durations.launch_delay]
        for number, mask in overlay.masks(self.selection):
            overlay.delay[number].put(~mask, _NONE)


class NoDelays(Struct, frozen=True):
    """Remove all launch delays."""

    def make(self, overlay: CostOverlay) -> None:
        overlay.op_delay = None
        for block in overlay.delay:
            block.put(_ALL, _NONE)


_ALL, _NONE = np.ones((1, 1), np.bool_), np.zeros((1, 1))


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


def changed(replay: GraphReplay, changes: Iterable[Intervention]) -> CostOverlay:
    """The job after some changes, in this order."""
    changes, overlay = tuple(changes), CostOverlay.recorded(replay)
    for change in changes:
        change.make(overlay)
    if isinstance(replay, JobReplay) and replay.sampled is not None:
        overlay.sampled = changed(replay.sampled, changes)
    return overlay


def step_times(replay: GraphReplay, changes: Iterable[Intervention]) -> Floats:
    """The duration of each step after the changes, seconds, [steps]."""
    return changed(replay, changes).step_times()


def mean_step_time(replay: GraphReplay, changes: Iterable[Intervention]) -> float:
    """The mean over the steps, seconds."""
    return float(step_times(replay, changes).mean())


def step_times_each(replay: GraphReplay, each: Sequence[Iterable[Intervention]]) -> Floats:
    """As `step_times` for each of several questions by itself, side by side, seconds, [questions, steps]."""
    times = np.zeros((len(each), len(replay.graph.steps)))

    def run(number: int) -> None:
        times[number] = step_times(replay, each[number])

    # Few lanes leave all cores but one idle; many lanes use all cores for one question.
    parallel.each(run, range(len(each)), numbers=replay.cells * len(each) if replay.has_few_lanes else 0)
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


def removal(selection: Selection) -> Changes:
    """The original job with the selection ideal: what fixing the selection would save."""
    return (Idealise(selection), *ORIGINAL)


def addition(selection: Selection) -> Changes:
    """The ideal job with the selection as recorded: what the selection costs alone (S_x in the paper)."""
    return (Idealise(~selection), *ORIGINAL)
