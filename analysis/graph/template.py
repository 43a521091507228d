"""Templates: the graph of one lane's ops, laid out for replay.

In: structures (dependencies among the ops of a lane). Out: `Template`s: the same graph in an order in which it can be
replayed, cut into rounds between which lanes of other templates may join, with a place for each op's end time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.analysis import native
from tracekit.analysis.graph.structure import Structure
from tracekit.analysis.numeric.arrays import Int32s, Ints
from tracekit.errors import GraphError
from tracekit.model import COMMUNICATION, KINDS

_IS_COMMUNICATION = np.array([kind in COMMUNICATION for kind in KINDS])
NO_JOINS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Template:
    """A graph of ops, laid out for replay.

    Ops are rows, [rows] columns: `member` (which of its structures a row comes from), `pp_rank`, `kind`, `seq`,
    `chunk`, `is_communication`. Row r waits for `waits_for[first_wait[r]:first_wait[r + 1]]`.
    Rows that start their transfer together form a group; `order[first_of_group[g]:first_of_group[g + 1]]` are the
    rows of the g-th group, groups in replay order. `join[g]`: number of the data-parallel collective for which the
    group waits in all lanes of its step, -1 for none. Groups come in rounds: those of round r are
    `first_of_round[r]:first_of_round[r + 1]`, its joins last; a join of round r depends on joins of earlier rounds
    only, and the same collective has the same round in every template of a graph.
    `slot`: where a row's end time is kept while later rows need it; `slots` of them suffice.
    """

    member: Int32s
    pp_rank: npt.NDArray[np.int16]
    kind: npt.NDArray[np.uint8]
    seq: Int32s
    chunk: npt.NDArray[np.int16]
    is_communication: npt.NDArray[np.bool_]
    first_wait: Ints
    waits_for: Ints
    order: Ints
    first_of_group: Ints
    join: Ints
    first_of_round: Ints
    slot: Ints
    slots: int

    @property
    def rows(self) -> int:
        """How many ops the template has."""
        return len(self.kind)


def join_keys(structures: Sequence[Structure]) -> Ints:
    """The data-parallel collectives of a job: the distinct `Structure.dp_key`s, ascending."""
    keys = np.unique(np.concatenate([structure.dp_key for structure in structures]))
    return keys[keys >= 0]


def build_templates(structures: Sequence[Structure], keys: Ints) -> list[Template]:
    """A template per structure; their data-parallel collectives (`keys`) join the lanes of a step across them.

    Raises GraphError where the dependencies form a cycle.
    """
    drafts = [_Draft([structure], keys) for structure in structures]
    rounds = np.zeros(len(keys), np.int64)
    for _ in range(len(keys) + 1):
        # A collective takes place in the latest round that any template gives it; that may push others back.
        latest = rounds.copy()
        for draft in drafts:
            number = draft.rounds(rounds)
            np.maximum.at(latest, draft.join[draft.join >= 0], number[draft.join >= 0])
        if np.array_equal(latest, rounds):
            return [draft.template(rounds) for draft in drafts]
        rounds = latest
    raise GraphError(
        "DP ranks run their collectives in orders that contradict each other; the recorded order cannot be right"
    )


def build_coupled_template(structures: Sequence[Structure]) -> Template:
    """One graph of several lanes of a step, whose data-parallel collectives join within it.

    Raises GraphError where the dependencies form a cycle.
    """
    return _Draft(structures, NO_JOINS).template(NO_JOINS)


class _Draft:
    """Ops of one or more structures, grouped and in an order in which they can be replayed."""

    def __init__(self, structures: Sequence[Structure], keys: Ints) -> None:
        self.structures = structures
        self.sizes = np.array([len(structure.kind) for structure in structures])
        self.offsets = np.cumsum(self.sizes) - self.sizes
        parts = list(zip(structures, self.offsets, strict=True))
        before = np.concatenate([part.before + offset for part, offset in parts])
        after = np.concatenate([part.after + offset for part, offset in parts])
        group = np.concatenate([part.group + offset for part, offset in parts])
        dp_key = np.concatenate([part.dp_key for part in structures])
        joined = np.flatnonzero(dp_key >= 0)
        if len(joined):  # a collective is one group over all members: name it after its first row
            _, first, inverse = np.unique(dp_key[joined], return_index=True, return_inverse=True)
            group[joined] = joined[first[inverse]]
        rows = len(group)
        _, self.group = np.unique(group, return_inverse=True)
        groups = int(self.group.max()) + 1
        self.by_group = np.argsort(self.group, kind="stable")
        self.first_of_group = np.searchsorted(self.group[self.by_group], np.arange(groups + 1))
        self.join = np.full(groups, -1, np.int64)
        if len(keys):
            self.join[self.group[joined]] = np.searchsorted(keys, dp_key[joined])
        self.first_wait, self.waits_for = _adjacency(after, before, rows)
        self.first_next, self.nexts = _adjacency(before, after, rows)
        waits = np.diff(self.first_wait)
        ordered = np.empty(groups, np.int64)
        count = native.replay_order(
            self.group, self.by_group, self.first_of_group, self.first_next, self.nexts, waits, ordered
        )
        self.ordered = ordered[:count]
        if len(self.ordered) < groups:
            raise self._cycle(np.setdiff1d(np.arange(groups), self.ordered))

    def rounds(self, of_joins: Ints) -> Ints:
        """The round of each group, [groups], where no join comes before its round in `of_joins`, [keys]."""
        number = np.zeros(len(self.ordered), np.int64)
        native.rounds(
            self.ordered, self.by_group, self.first_of_group, self.first_wait, self.waits_for, self.group,
            self.join, of_joins, number,
        )  # fmt: skip
        return number

    def template(self, of_joins: Ints) -> Template:
        """The finished template."""
        number = self.rounds(of_joins)
        joins = self.join >= 0
        place = np.lexsort((joins[self.ordered], number[self.ordered]))  # stable: within, the order stays
        ordered = self.ordered[place]
        lengths = np.diff(self.first_of_group)[ordered]
        first_of_group = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(len(self.group)) + np.repeat(self.first_of_group[ordered] - first_of_group[:-1], lengths)
        order = self.by_group[positions]
        last_round = int(number.max())
        slot = np.empty(len(order), np.int64)
        units = _units(number[ordered], joins[ordered])
        slots = native.assign_slots(order, first_of_group, self.first_wait, self.waits_for, units, slot)
        kind = np.concatenate([part.kind for part in self.structures])
        return Template(
            member=np.repeat(np.arange(len(self.structures), dtype=np.int32), self.sizes),
            pp_rank=np.concatenate([part.pp_rank for part in self.structures]),
            kind=kind,
            seq=np.concatenate([part.seq for part in self.structures]),
            chunk=np.concatenate([part.chunk for part in self.structures]),
            is_communication=_IS_COMMUNICATION[kind],
            first_wait=self.first_wait,
            waits_for=self.waits_for,
            order=order,
            first_of_group=first_of_group,
            join=self.join[ordered],
            first_of_round=np.searchsorted(number[ordered], np.arange(last_round + 2)),
            slot=slot,
            slots=slots,
        )

    def _cycle(self, stuck: Ints) -> GraphError:
        row = int(self.by_group[self.first_of_group[stuck[0]]])
        member = int(np.searchsorted(self.offsets, row, side="right")) - 1
        part, at = self.structures[member], row - int(self.offsets[member])
        return GraphError(
            f"the dependencies form a cycle: {KINDS[part.kind[at]]} {part.seq[at]} of stage {part.pp_rank[at]} and"
            f" {len(stuck) - 1} more ops wait for each other; sends and recvs were recorded in an order that cannot run"
        )


def _units(number: Ints, joins: npt.NDArray[np.bool_]) -> Ints:
    """Groups that may run at the same time share a number: all joins of a round, every other group alone."""
    fresh = np.ones(len(number), np.bool_)
    fresh[1:] = ~(joins[1:] & joins[:-1] & (number[1:] == number[:-1]))
    return np.cumsum(fresh) - 1


def _adjacency(sources: Ints, targets: Ints, rows: int) -> tuple[Ints, Ints]:
    """Edges grouped by source: where each row's targets begin, [rows + 1], and the targets, [edges]."""
    order = np.argsort(sources, kind="stable")
    return np.searchsorted(sources[order], np.arange(rows + 1)), targets[order]
