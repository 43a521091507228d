"""Selections: which ops a question is about.

In: choices written in Python (`stage(3) & ~kind(OpKind.GC)`) or as text (see `selection_text`). Out: a mask for each
block of a graph. A selection is a small expression tree. Its mask broadcasts to [rows, lanes], so choosing kinds or
stages never touches the lanes and stays cheap.
"""

from __future__ import annotations

import operator
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
from msgspec import Struct, StructMeta, field

from tracekit.analysis.graph.compiled import (
    Label,
    LabelledBlock,
    LabelledGraph,
    Mask,
    Value,
    label_values,
    shown_values,
)
from tracekit.analysis.replay.graph_replay import Durations
from tracekit.base.errors import SelectionError
from tracekit.base.limits import check_time, search
from tracekit.base.text import did_you_mean
from tracekit.trace.model import OpKind, Worker


class _AbstractStruct(StructMeta, ABCMeta):
    """The metaclass of structs with abstract methods."""


class Selection(Struct, frozen=True, metaclass=_AbstractStruct):
    """A set of ops. Combine with `&`, `|` and `~`."""

    @abstractmethod
    def mask(self, context: Context) -> Mask:
        """Mask of the block's ops in the set; broadcasts to [rows, lanes]."""

    def __and__(self, other: Selection) -> Selection:
        return _Combined(operator.and_, (self, other))

    def __or__(self, other: Selection) -> Selection:
        return _Combined(operator.or_, (self, other))

    def __invert__(self) -> Selection:
        return _Combined(operator.invert, (self,))


class Context(Struct, frozen=True, eq=False):
    """What a selection can read: one block of a graph, and the durations of all blocks.

    `remembered`: what is the same for all blocks of the graph, computed once for all of them.
    """

    graph: LabelledGraph
    durations: Durations
    number: int
    remembered: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def block(self) -> LabelledBlock:
        """The block to compute the mask of."""
        return self.graph.blocks[self.number]

    def label(self, name: str) -> Label:
        """A label of the block's ops. Raises SelectionError, which lists the labels, if there is none of that name."""
        return self.graph.label(self.number, self.written(name))

    def written(self, name: str) -> str:
        """The name of a label as the job writes it: capitals count only where it has the label with them."""
        return name if name in self.graph.label_names else name.lower()


class Everything(Selection, frozen=True):
    """All ops."""

    def mask(self, context: Context) -> Mask:
        return np.ones((context.block.template.rows, 1), np.bool_)


class Communication(Selection, frozen=True):
    """Ops that wait for peers."""

    def mask(self, context: Context) -> Mask:
        return context.block.template.is_communication.reshape(-1, 1)


class Labelled(Selection, frozen=True):
    """Ops whose label has one of these values, numbers or names; excludes ops without the label.

    `ranges`: more numbers, whichever they are; as many as there are cost no more than a few.
    """

    label: str
    values: frozenset[Value]
    ranges: tuple[range, ...] = ()

    def mask(self, context: Context) -> Mask:
        label = context.label(self.label)
        wanted = str if label.names is not None else int
        unknown = {value for value in self.values if isinstance(value, str)}.difference(label.names or ())
        numbers = self.ranges if label.names is None else ()
        if (label.names is not None and unknown) or not (
            numbers or any(isinstance(value, wanted) for value in self.values)
        ):
            values = label_values(context.graph, context.written(self.label))
            article = "an" if self.label[:1] in set("aeio") else "a"
            first = min(map(str, unknown or self.values))
            meant = "" if label.names is None else did_you_mean(first, map(str, values))  # no number is mistyped
            shown = shown_values(values)
            raise SelectionError(f"{first!r:.80} is not {article} {self.label} of this job; it has {shown}{meant}")
        return label.within(numbers) if numbers else label.where(self.values)


class LabelledLike(Selection, frozen=True):
    """Ops whose label is a name that the regular expression `pattern` matches anywhere."""

    label: str
    pattern: str

    def mask(self, context: Context) -> Mask:
        label = context.label(self.label)
        if label.names is None:
            raise SelectionError(f"{self.label} has numbers, not names: the pattern {self.pattern!r} matches none")
        if self not in context.remembered:
            matched = zip(label.names, search(self.pattern, label.names), strict=True)
            context.remembered[self] = frozenset(name for name, matches in matched if matches)
        return label.where(context.remembered[self])


class Workers(Selection, frozen=True):
    """Ops on these workers."""

    workers: frozenset[Worker]

    def mask(self, context: Context) -> Mask:
        stage, dp_rank = context.label("stage").codes, context.label("dp_rank").codes
        # The last row and column are for ops without these labels, whose code is -1.
        chosen = np.zeros((2 + int(stage.max()), 2 + int(dp_rank.max())), np.bool_)
        for of_worker in self.workers:
            if of_worker.pp_rank < chosen.shape[0] - 1 and of_worker.dp_rank < chosen.shape[1] - 1:
                chosen[of_worker.pp_rank, of_worker.dp_rank] = True
        mask: Mask = chosen[stage, dp_rank]
        return mask


class Slowest(Selection, frozen=True):
    """The `percent` of ops of each kind that cost most, over all steps and workers."""

    percent: float

    def mask(self, context: Context) -> Mask:
        codes, cost = context.graph.label(context.number, "kind").codes, context.durations.cost[context.number]
        chosen = np.zeros(cost.shape, np.bool_)
        for code in np.unique(codes).tolist():
            if (self, code) not in context.remembered:
                context.remembered[self, code] = self._threshold(context, code)
            rows = (codes == code).any(axis=1)
            chosen[rows] |= (codes[rows] == code) & (cost[rows] >= context.remembered[self, code])
        return chosen

    def _threshold(self, context: Context, code: int) -> float:
        """What an op of that kind costs that is just among the slowest, seconds."""
        of_kind = []
        for number, (block, matrix) in enumerate(zip(context.graph.blocks, context.durations.cost, strict=True)):
            codes = context.graph.label(number, "kind").codes
            rows = (codes == code).any(axis=1)  # all lanes of most jobs have the same kinds
            of_code = np.broadcast_to(codes == code, matrix.shape)[rows]
            of_kind.append(matrix[rows][of_code if block.present is None else of_code & block.present[rows]])
        return float(np.percentile(np.concatenate(of_kind), 100 - self.percent))


class _Combined(Selection, frozen=True):
    """What an operator makes of the masks of one selection or two."""

    how: Callable[..., Mask]
    parts: tuple[Selection, ...]

    def mask(self, context: Context) -> Mask:
        check_time()
        return self.how(*(part.mask(context) for part in self.parts))


def everything() -> Selection:
    """All ops."""
    return Everything()


def labelled(label: str, *values: Value) -> Selection:
    """Ops whose label has one of these values: `labelled("host", "n17")`, `labelled("tp_rank", 3)`."""
    return Labelled(label, frozenset(values))


def kind(*kinds: OpKind) -> Selection:
    """Ops of these kinds."""
    return Labelled("kind", frozenset(map(str, kinds)))


def communication() -> Selection:
    """Ops that wait for peers; `~communication()` selects everything that computes."""
    return Communication()


def stage(*pp_ranks: int) -> Selection:
    """Ops on these pipeline stages."""
    return Labelled("stage", frozenset(pp_ranks))


def dp_rank(*dp_ranks: int) -> Selection:
    """Ops on these data-parallel ranks."""
    return Labelled("dp_rank", frozenset(dp_ranks))


def worker(*workers: Worker) -> Selection:
    """Ops on these workers."""
    return Workers(frozenset(workers))


def steps(first: int, last: int | None = None) -> Selection:
    """Ops of steps `first` to `last` (both included), or of one step."""
    numbers = range(first, (first if last is None else last) + 1)
    return Labelled("step", frozenset(), (numbers,)) if numbers else ~everything()


def microbatch(*microbatches: int) -> Selection:
    """Ops of these microbatches; excludes ops recorded without one."""
    return Labelled("microbatch", frozenset(microbatches))


def slowest(percent: float) -> Selection:
    """The `percent` (0 to 100) of ops of each kind that cost most. Raises SelectionError outside that range."""
    if not 0 < percent <= 100:
        raise SelectionError(f"slowest {percent:g}%; expected more than 0 and at most 100")
    return Slowest(percent)


def all_of(selections: Iterable[Selection]) -> Selection:
    """The union of several selections. Raises SelectionError if there is none."""
    parts = list(selections)
    if not parts:
        raise SelectionError("no selection given; expected at least one")
    while len(parts) > 1:  # in pairs, so that the tree of a long list stays shallow
        pairs = [left | right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def block_masks(selection: Selection, graph: LabelledGraph, durations: Durations) -> Iterator[Mask]:
    """The selected ops of each block; broadcasts to [rows, lanes]."""
    remembered = dict[Hashable, Any]()
    for number in range(len(graph.blocks)):
        check_time()
        yield selection.mask(Context(graph, durations, number, remembered))


def masks_of(selection: Selection, graph: LabelledGraph, durations: Durations) -> list[Mask]:
    """The selected ops that exist, [rows, lanes] for each block."""
    return [
        np.broadcast_to(mask if block.present is None else mask & block.present, block.start.shape)
        for block, mask in zip(graph.blocks, block_masks(selection, graph, durations), strict=True)
    ]


def count_selected(selection: Selection, graph: LabelledGraph, durations: Durations) -> int:
    """How many ops of the graph are in the selection."""
    return sum(int(mask.sum()) for mask in masks_of(selection, graph, durations))
