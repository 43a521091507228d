"""Graphs as replay and what-if see them: laid out for replay, with labels of their ops.

In: `Wiring`s (the dependencies among some ops, and which ops start together) and codes per op. Out:
`CompiledGraph`s: the same in replay order, cut into rounds between which a graph meets the lanes of other graphs,
with a buffer for each op's end time; and `Label`s, which selections choose by, attribution groups by, and reports
print. This module is independent of the kind of ops and of the front end that built the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis import native
from tracekit.analysis.numeric.arrays import Bools, Floats, Int32s, Ints, adjacency, dense, strong_components
from tracekit.base.errors import GraphError, SelectionError
from tracekit.base.text import did_you_mean, listed, ranks_text

NO_RENDEZVOUS = np.empty(0, np.int64)

Mask = Bools
#: The value of a label: a number or a name.
Value = int | str
#: The code of an op without the label.
UNLABELLED = -1
#: Messages list so many values, or runs of numbers.
MOST_SHOWN = 20


class Wiring(Struct, frozen=True, eq=False):
    """Dependencies among ops, which are rows.

    `before`, `after`: edges, [edges] row numbers. `group`: rows that start their transfer together share a number,
    [rows]. `rendezvous_key`: rows that also wait for the same op in other lanes of their step share a number, which is
    the same in every wiring of the job; -1 for other rows, [rows]. `synchronises`: a row ends its cost after the latest
    start of its group rather than after its own start, [rows]. `describe`: returns the name of a row for messages.
    """

    before: Ints | Int32s
    after: Ints | Int32s
    group: Ints | Int32s
    rendezvous_key: Ints
    synchronises: Bools
    describe: Callable[[int], str]


class CompiledGraph(Struct, frozen=True, eq=False):
    """A graph of ops, laid out for replay.

    Ops are rows. Row r waits for `waits_for[first_wait[r]:first_wait[r + 1]]`. `is_communication`: it also waits for
    its group, [rows]. Rows that start their transfer together form a group; `order[first_of_group[g]:first_of_group[g +
    1]]` are the rows of group g, and groups are in replay order. `rendezvous[g]`: number of the collective in which the
    group meets all other lanes of its step, -1 if it does not.

    Groups come in rounds: those of round r are `first_of_round[r]:first_of_round[r + 1]`, with those that meet other
    lanes at the end. A rendezvous of round r depends on earlier rounds only, and the same collective has the same round
    in every graph compiled with it. `buffer`: the one of `buffer_count` buffers that keeps a row's end time while later
    rows need it. `begin`: time at which a row would be ready if nothing before it took any time, seconds from the start
    of the step, [rows].
    """

    is_communication: Bools
    first_wait: Int32s
    waits_for: Int32s
    order: Int32s
    first_of_group: Int32s
    rendezvous: Int32s
    first_of_round: Ints
    buffer: Int32s
    buffer_count: int
    begin: Floats

    @property
    def rows(self) -> int:
        """The number of ops in the graph."""
        return len(self.buffer)

    def in_replay_order(self) -> CompiledGraph:
        """The same graph with rows numbered in replay order: row i is the former row `order[i]`.

        Walking a large graph is much faster this way, because its costs are read from front to back.
        """
        place = np.empty(self.rows, np.int32)
        place[self.order] = np.arange(self.rows)
        waits = np.diff(self.first_wait)[self.order]
        first_wait = _bounds(waits)
        edges = np.repeat(self.first_wait[self.order] - first_wait[:-1], waits)
        edges += np.arange(len(edges), dtype=np.int32)
        return replace(
            self,
            is_communication=self.is_communication[self.order],
            first_wait=first_wait,
            waits_for=place[self.waits_for[edges]],
            order=np.arange(self.rows, dtype=np.int32),
            buffer=self.buffer[self.order],
            begin=self.begin[self.order],
        )


def compile_graphs(wirings: Sequence[Wiring], keys: Ints) -> list[CompiledGraph]:
    """Lay out graphs in which the lanes of a step meet. `keys`: the rendezvous keys in use, ascending; without keys,
    ops with a rendezvous key meet within their graph.

    Raises GraphError if dependencies form a cycle.
    """
    drafts = [_Draft(wiring, keys) for wiring in wirings]
    rounds = np.zeros(len(keys), np.int32)
    for _ in range(len(keys) + 1):
        # A collective runs in the latest round that any graph gives it, which may move others to later rounds.
        latest = rounds.copy()
        for draft in drafts:
            number = draft.rounds(rounds)
            np.maximum.at(latest, draft.rendezvous[draft.rendezvous >= 0], number[draft.rendezvous >= 0])
        if np.array_equal(latest, rounds):
            return [draft.compiled(rounds) for draft in drafts]
        rounds = latest
    raise GraphError(
        "DP ranks run their collectives in contradictory orders, which cannot be right; record the job again"
    )


class _Draft:
    """Ops in groups, in an order that can be replayed."""

    def __init__(self, wiring: Wiring, keys: Ints) -> None:
        self.wiring = wiring
        group, rows = wiring.group.copy(), len(wiring.group)
        meeting = np.flatnonzero(wiring.rendezvous_key >= 0)
        if len(meeting):  # a collective is one group over all members, named after its first row
            _, first, inverse = np.unique(wiring.rendezvous_key[meeting], return_index=True, return_inverse=True)
            group[meeting] = meeting[first[inverse]]
        self.group = dense(group).astype(np.int32)
        groups = int(self.group.max()) + 1
        self.first_of_group, self.by_group = adjacency(self.group, np.arange(rows, dtype=np.int32), groups)
        self.rendezvous = np.full(groups, -1, np.int32)
        if len(keys):
            self.rendezvous[self.group[meeting]] = np.searchsorted(keys, wiring.rendezvous_key[meeting])
        self.first_wait, self.waits_for = adjacency(wiring.after, wiring.before, rows)
        first_next, nexts = adjacency(wiring.before, wiring.after, rows)
        ordered = np.empty(groups, np.int32)
        waits = np.diff(self.first_wait)
        count = native.replay_order(self.group, self.by_group, self.first_of_group, first_next, nexts, waits, ordered)
        if count < groups:
            self._raise_cycle()
        self.ordered = ordered

    def rounds(self, of_rendezvous: Int32s) -> Int32s:
        """The round of each group, [groups], with no rendezvous before its round in `of_rendezvous`, [keys]."""
        number = np.zeros(len(self.ordered), np.int32)
        native.rounds(
            self.ordered, self.by_group, self.first_of_group, self.first_wait, self.waits_for, self.group,
            self.rendezvous, of_rendezvous, number,
        )  # fmt: skip
        return number

    def compiled(self, of_rendezvous: Int32s) -> CompiledGraph:
        """The finished graph."""
        number = self.rounds(of_rendezvous)
        meets = self.rendezvous >= 0
        place = np.lexsort((meets[self.ordered], number[self.ordered]))  # stable: keeps the order within a round
        ordered = self.ordered[place]
        lengths = np.diff(self.first_of_group)[ordered]
        first_of_group = _bounds(lengths)
        positions = np.repeat(self.first_of_group[ordered] - first_of_group[:-1], lengths)
        positions += np.arange(len(positions), dtype=np.int32)
        order = self.by_group[positions]
        last_round = int(number.max())
        buffer = np.empty(len(order), np.int32)
        units = _units(number[ordered], meets[ordered])
        buffer_count = native.assign_buffers(order, first_of_group, self.first_wait, self.waits_for, units, buffer)
        return CompiledGraph(
            is_communication=self.wiring.synchronises,
            first_wait=self.first_wait,
            waits_for=self.waits_for,
            order=order,
            first_of_group=first_of_group,
            rendezvous=self.rendezvous[ordered],
            first_of_round=np.searchsorted(number[ordered], np.arange(last_round + 2)),
            buffer=buffer,
            buffer_count=buffer_count,
            begin=np.zeros(len(order)),
        )

    def _raise_cycle(self) -> NoReturn:
        """Raise GraphError for the first cycle, without what only waits for it."""
        groups = len(self.first_of_group) - 1
        before, after = self.group[self.wiring.before], self.group[self.wiring.after]
        component = strong_components(before, after, groups)
        in_cycle = (np.bincount(component) > 1)[component]
        in_cycle[before[before == after]] = True
        first = int(in_cycle.argmax())
        op = self.wiring.describe(int(self.by_group[self.first_of_group[first]]))
        others = int((component == component[first]).sum()) - 1
        if not others:
            raise GraphError(f"the dependencies form a cycle: {op} waits for itself or for an op of its own collective")
        raise GraphError(
            f"the dependencies form a cycle: {op} and {others} more op{'s' * (others > 1)} wait for each other; they"
            " were recorded in an order that cannot run"
        )


def _bounds(lengths: Ints | Int32s) -> Int32s:
    """Where each of the groups of these lengths begins, and where the last one ends, [groups + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _units(number: Int32s, meets: Bools) -> Int32s:
    """Groups that may run at the same time share a number: all that meet in a round; every other group has its own."""
    fresh = np.ones(len(number), np.bool_)
    fresh[1:] = ~(meets[1:] & meets[:-1] & (number[1:] == number[:-1]))
    return np.cumsum(fresh, dtype=np.int32) - np.int32(1)


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
        ends = np.clip([(span[0], span[-1]) for span in ranges], 0, np.iinfo(np.int64).max).astype(np.int64)
        first, last = ends[np.argsort(ends[:, 0])].T
        place = np.searchsorted(first, self.codes, "right") - 1
        chosen: Mask = (place >= 0) & (self.codes <= np.maximum.accumulate(last)[place])
        return chosen

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


class GridPart(Struct, frozen=True, eq=False):
    """Some ops of one block with a value for each, [ops, lanes]. `rows`: [ops], or [ops, lanes] if lanes differ."""

    block: int
    rows: Ints
    values: Floats
