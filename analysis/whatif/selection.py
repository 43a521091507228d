"""Selections: which ops a question is about.

In: choices written in Python (`stage(3) & ~kind(OpKind.GC)`) or as text (see `selection_text`). Out: a mask for each
block of a graph. A selection is a small expression tree; its mask broadcasts to [rows, lanes], so a choice of kinds or
stages never touches the lanes and stays cheap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.analysis.graph.dependency_graph import Block, DependencyGraph
from tracekit.analysis.replay.costs import Durations
from tracekit.errors import SelectionError
from tracekit.model import COMMUNICATION, OpKind, Worker

Mask = npt.NDArray[np.bool_]


class Selection(ABC):
    """A set of ops. Combine with `&`, `|` and `~`."""

    @abstractmethod
    def mask(self, context: Context) -> Mask:
        """Which ops of the block are in the set; broadcasts to [rows, lanes]."""

    def __and__(self, other: Selection) -> Selection:
        return _And(self, other)

    def __or__(self, other: Selection) -> Selection:
        return _Or(self, other)

    def __invert__(self) -> Selection:
        return _Not(self)


@dataclass(frozen=True, slots=True)
class Context:
    """What a selection may look at: one block of a graph, and the durations of all of it."""

    graph: DependencyGraph
    durations: Durations
    number: int

    @property
    def block(self) -> Block:
        """The block whose mask is asked for."""
        return self.graph.blocks[self.number]


@dataclass(frozen=True, slots=True)
class Everything(Selection):
    """All ops."""

    def mask(self, context: Context) -> Mask:
        return np.ones((context.block.template.rows, 1), np.bool_)


@dataclass(frozen=True, slots=True)
class Kinds(Selection):
    """Ops of these kinds."""

    kinds: frozenset[OpKind]

    def mask(self, context: Context) -> Mask:
        codes = [kind.code for kind in self.kinds]
        return np.isin(context.block.template.kind, codes).reshape(-1, 1)


@dataclass(frozen=True, slots=True)
class Stages(Selection):
    """Ops on these pipeline stages."""

    pp_ranks: frozenset[int]

    def mask(self, context: Context) -> Mask:
        return np.isin(context.block.template.pp_rank, list(self.pp_ranks)).reshape(-1, 1)


@dataclass(frozen=True, slots=True)
class DpRanks(Selection):
    """Ops on these data-parallel ranks."""

    dp_ranks: frozenset[int]

    def mask(self, context: Context) -> Mask:
        return np.isin(context.block.dp_rank, list(self.dp_ranks)).reshape(1, -1)


@dataclass(frozen=True, slots=True)
class Workers(Selection):
    """Ops on these workers."""

    workers: frozenset[Worker]

    def mask(self, context: Context) -> Mask:
        block = context.block
        stages_in_job = context.graph.layout.pp
        cells = [at.dp_rank * stages_in_job + at.pp_rank for at in self.workers if at.pp_rank < stages_in_job]
        stages = block.template.pp_rank.astype(np.int64).reshape(-1, 1)
        return np.isin(block.dp_rank.astype(np.int64) * stages_in_job + stages, cells)


@dataclass(frozen=True, slots=True)
class Steps(Selection):
    """Ops of steps from `first` to `last`, both included."""

    first: int
    last: int

    def mask(self, context: Context) -> Mask:
        step = context.graph.steps[context.block.step]
        return ((step >= self.first) & (step <= self.last)).reshape(1, -1)


@dataclass(frozen=True, slots=True)
class StepSet(Selection):
    """Ops of these steps."""

    steps: frozenset[int]

    def mask(self, context: Context) -> Mask:
        return np.isin(context.graph.steps[context.block.step], list(self.steps)).reshape(1, -1)


@dataclass(frozen=True, slots=True)
class Microbatches(Selection):
    """Ops of these microbatches; ops recorded without one are in no set."""

    microbatches: frozenset[int]

    def mask(self, context: Context) -> Mask:
        return np.isin(context.block.microbatch, list(self.microbatches))


@dataclass(frozen=True, slots=True)
class Slowest(Selection):
    """Of each kind the `percent` of ops that cost most, over all steps and workers."""

    percent: float

    def mask(self, context: Context) -> Mask:
        own, block = context.durations.own[context.number], context.block
        chosen = np.zeros(own.shape, np.bool_)
        for code in np.unique(block.template.kind):
            costs = [
                matrix[part.template.kind == code].ravel()
                for part, matrix in zip(context.graph.blocks, context.durations.own, strict=True)
            ]
            threshold = np.percentile(np.concatenate(costs), 100 - self.percent)
            rows = block.template.kind == code
            chosen[rows] = own[rows] >= threshold
        return chosen


@dataclass(frozen=True, slots=True)
class _And(Selection):
    left: Selection
    right: Selection

    def mask(self, context: Context) -> Mask:
        return self.left.mask(context) & self.right.mask(context)


@dataclass(frozen=True, slots=True)
class _Or(Selection):
    left: Selection
    right: Selection

    def mask(self, context: Context) -> Mask:
        return self.left.mask(context) | self.right.mask(context)


@dataclass(frozen=True, slots=True)
class _Not(Selection):
    inner: Selection

    def mask(self, context: Context) -> Mask:
        return ~self.inner.mask(context)


def everything() -> Selection:
    """All ops."""
    return Everything()


def kind(*kinds: OpKind) -> Selection:
    """Ops of these kinds."""
    return Kinds(frozenset(kinds))


def communication() -> Selection:
    """Ops that wait for peers; `~communication()` is all that computes."""
    return Kinds(frozenset(COMMUNICATION))


def stage(*pp_ranks: int) -> Selection:
    """Ops on these pipeline stages."""
    return Stages(frozenset(pp_ranks))


def dp_rank(*dp_ranks: int) -> Selection:
    """Ops on these data-parallel ranks."""
    return DpRanks(frozenset(dp_ranks))


def worker(*workers: Worker) -> Selection:
    """Ops on these workers."""
    return Workers(frozenset(workers))


def steps(first: int, last: int | None = None) -> Selection:
    """Ops of steps `first` to `last` (both included), or of one step."""
    return Steps(first, first if last is None else last)


def microbatch(*microbatches: int) -> Selection:
    """Ops of these microbatches."""
    return Microbatches(frozenset(microbatches))


def slowest(percent: float) -> Selection:
    """Of each kind the `percent` (0 to 100) of ops that cost most. Raises SelectionError outside that range."""
    if not 0 < percent <= 100:
        raise SelectionError(f"slowest {percent:g} %; expected more than 0 and at most 100")
    return Slowest(percent)


def all_of(selections: Iterable[Selection]) -> Selection:
    """The union of several selections; raises SelectionError for none."""
    parts = list(selections)
    if not parts:
        raise SelectionError("no selection given; expected at least one")
    while len(parts) > 1:  # in pairs, so that the tree of a long list stays shallow
        pairs = [left | right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def count_selected(selection: Selection, graph: DependencyGraph, durations: Durations) -> int:
    """How many ops of the graph are in the selection."""
    total = 0
    for number, block in enumerate(graph.blocks):
        mask = selection.mask(Context(graph, durations, number))
        total += int(mask.sum()) * (block.start.size // mask.size)
    return total
