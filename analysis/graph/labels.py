"""Labels: named properties of each op, independent of the front end that built the graph.

In: codes per op, row or lane. Out: `Label`s, which selections choose by, attribution groups by, and reports print.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tracekit.analysis.graph.compiled import CompiledGraph
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints
from tracekit.base.errors import SelectionError
from tracekit.base.text import did_you_mean, listed, ranks_text

Mask = npt.NDArray[np.bool_]
#: The value of a label: a number or a name.
Value = int | str
#: The code of an op without the label.
UNLABELLED = -1
#: Messages list so many values, or runs of numbers.
MOST_SHOWN = 20


class Label(Struct, frozen=True, eq=False):
    """One label of the ops of a block.

    `codes` broadcasts to [rows, lanes]: the number itself, or an index into `names`; UNLABELLED for ops without the
    label.
    """

    codes: npt.NDArray[Any]
    names: tuple[str, ...] | None = None

    def where(self, values: Collection[Value]) -> Mask:
        """Mask of the ops with one of these values; broadcasts to [rows, lanes]."""
        if self.names is not None:
            table = np.array([name in values for name in self.names] + [False])  # the last entry is for UNLABELLED, -1
            chosen: Mask = table[self.codes]
            return chosen
        numbers = [value for value in values if isinstance(value, int) and value != UNLABELLED]
        return np.isin(self.codes, numbers) if len(numbers) != 1 else self.codes == numbers[0]

    def within(self, ranges: Sequence[range]) -> Mask:
        """Mask of the ops with a number in one of these ranges; broadcasts to [rows, lanes]."""
        ends = np.clip([(each[0], each[-1]) for each in ranges], 0, np.iinfo(np.int64).max).astype(np.int64)
        first, last = ends[np.argsort(ends[:, 0])].T
        place = np.searchsorted(first, self.codes, "right") - 1
        chosen: Mask = (place >= 0) & (self.codes <= np.maximum.accumulate(last)[place])
        return chosen

    def between(self, first: int, last: int) -> Mask:
        """Mask of the ops with a value from `first` to `last`, both included; broadcasts to [rows, lanes]."""
        return (self.codes >= first) & (self.codes <= last)

    def value(self, code: int) -> Value:
        """The value of a code."""
        return int(code) if self.names is None else self.names[code]


class LabelledBlock(Protocol):
    """A compiled graph and the lanes that it covers, ordered by step.

    `step`: index into the steps of its graph, [lanes]; `first_lane`: where the lanes of each step begin, [steps here +
    1]; `start`, `duration`: recorded seconds, [rows, lanes]. `present`: mask of the ops that exist, [rows, lanes], None
    for all; an absent op costs nothing in any replay.
    """

    @property
    def template(self) -> CompiledGraph: ...
    @property
    def step(self) -> Int32s: ...
    @property
    def first_lane(self) -> Ints: ...
    @property
    def start(self) -> Floats: ...
    @property
    def duration(self) -> Floats: ...
    @property
    def present(self) -> Mask | None: ...


class LabelledGraph(Protocol):
    """All ops of a job with their dependencies and labels: everything that replay and what-if need from a graph.

    `steps`: step numbers, [steps]. `rendezvous_count`: number of collectives per step in which lanes meet.
    """

    @property
    def steps(self) -> Int32s: ...
    @property
    def blocks(self) -> tuple[LabelledBlock, ...]: ...
    @property
    def rendezvous_count(self) -> int: ...
    @property
    def blocks_meet(self) -> bool: ...
    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels that ops of this job have."""
        ...

    def label(self, number: int, name: str) -> Label:
        """A label of the ops of block `number`. Raises SelectionError, with the labels that exist, if there is none."""
        ...


def unknown_label(name: str, names: Iterable[str]) -> SelectionError:
    """The error for a label that no op of the job has."""
    labels = list(names)
    meant = did_you_mean(name, labels)
    return SelectionError(f"{name!r:.80} is not a label of this job; it has {', '.join(labels)}{meant}")


def label_values(graph: LabelledGraph, name: str) -> list[Value]:
    """The values of a label that occur in the job, ascending."""
    values: set[Value] = set()
    for number in range(len(graph.blocks)):
        label = graph.label(number, name)
        values.update(label.value(code) for code in np.unique(label.codes).tolist() if code != UNLABELLED)
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def shown_values(values: Sequence[Value]) -> str:
    """Some of the ascending values, as messages list them; consecutive numbers as ranges."""
    if numbers := [value for value in values if isinstance(value, int)]:
        return ranks_text(numbers, MOST_SHOWN).partition(" ")[2]
    return listed(map(str, values), MOST_SHOWN)
