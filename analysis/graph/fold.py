"""Folding: equal steps of an op graph become lanes of one template.

In: an `OpGraph`. Out: a `FoldedGraph`, which replays and answers questions like any other graph. If no two steps are
alike, each is a template with one lane; only speed depends on folding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracekit.analysis.graph.compiled import NO_RENDEZVOUS, CompiledGraph, Wiring, compile_graphs
from tracekit.analysis.graph.labels import Label, Mask, unknown_label
from tracekit.analysis.graph.op_graph import OpGraph
from tracekit.analysis.numeric.arrays import Floats, Int32s, Ints


@dataclass(frozen=True, slots=True, eq=False)
class FoldedSteps:
    """Steps with the same ops and dependencies: a row per op in replay order, a lane per step.

    `op`: the op in each cell, [rows, lanes]. The other fields: as in `labels.LabelledBlock`.
    """

    template: CompiledGraph
    step: Int32s
    first_lane: Ints
    start: Floats
    duration: Floats
    op: Ints
    present: Mask | None = None


@dataclass(frozen=True, eq=False)
class FoldedGraph:
    """An op graph, laid out for replay."""

    ops: OpGraph
    steps: Int32s
    blocks: tuple[FoldedSteps, ...]
    rendezvous_count: int = 0
    blocks_meet: bool = False

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels that ops of this job have."""
        return tuple(dict.fromkeys(("step", "rank", "peer", *self.ops.labels)))

    def of_ops(self, matrices: Sequence[Floats], ops: Ints | None = None) -> Floats:
        """The values of matrices, one [rows, lanes] per block, by op, [ops]; only those of some `ops`."""
        cells = matrices[0].ravel() if len(matrices) == 1 else np.concatenate([matrix.ravel() for matrix in matrices])
        return cells.take(self._cell if ops is None else self._cell[ops])

    @cached_property
    def _cell(self) -> Ints:
        """Where each op is in the concatenated cells of all blocks, [ops]."""
        cells = np.empty(len(self.ops.start), np.int64)
        cells[np.concatenate([block.op.ravel() for block in self.blocks])] = np.arange(len(cells))
        return cells

    def label(self, number: int, name: str) -> Label:
        """A label of the ops of block `number`. Raises SelectionError, with the labels that exist, if there is none."""
        block, ops = self.blocks[number], self.ops
        if name == "step":
            return Label(self.steps[block.step].reshape(1, -1))
        if name == "rank":
            return Label(ops.rank[block.op[:, :1]])
        if name == "peer":
            return Label(ops.peer[block.op[:, :1]], ops.peer_names)
        if name not in ops.labels:
            raise unknown_label(name, self.label_names)
        label = ops.labels[name]
        codes = label.codes[block.op]
        return Label(codes[:, :1] if (codes == codes[:, :1]).all() else codes, label.names)


def fold(graph: OpGraph) -> FoldedGraph:
    """Lay out `graph` for replay. Raises GraphError if dependencies form a cycle."""
    alike: dict[bytes, list[_Step]] = {}
    for step in _steps(graph):
        alike.setdefault(step.signature(graph), []).append(step)
    blocks = tuple(_block(graph, steps) for steps in alike.values())
    return FoldedGraph(graph, graph.steps, blocks)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step: its index, its ops, and the dependencies among them, numbered from 0."""

    number: int
    first: int
    last: int
    before: Int32s
    after: Int32s
    group: Int32s

    def signature(self, graph: OpGraph) -> bytes:
        """Equal for steps that fold: the same ranks, comparable ops, and dependencies."""
        span = slice(self.first, self.last)
        parts = (graph.rank[span], graph.peer[span], self.group, graph.rendezvous[span] >= 0, self.before, self.after)
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part).data)
        return digest.digest()


def _steps(graph: OpGraph) -> Iterator[_Step]:
    """Each step with its own edges, in canonical order."""
    first_op = np.searchsorted(graph.step, graph.steps)
    bounds = [*first_op.tolist(), len(graph.step)]
    order = np.lexsort((graph.before, graph.after))
    before, after = graph.before[order], graph.after[order]
    first_edge = np.searchsorted(after, bounds)
    for number in range(len(graph.steps)):
        first, last = bounds[number], bounds[number + 1]
        edges = slice(first_edge[number], first_edge[number + 1])
        yield _Step(
            number, first, last, before[edges] - first, after[edges] - first, _groups(graph.rendezvous[first:last])
        )


def _groups(rendezvous: Ints) -> Int32s:
    """A group per op: the first op of its rendezvous, else itself."""
    group = np.arange(len(rendezvous), dtype=np.int32)
    members = np.flatnonzero(rendezvous >= 0)
    _, first, inverse = np.unique(rendezvous[members], return_index=True, return_inverse=True)
    group[members] = members[first[inverse]]
    return group


def _block(graph: OpGraph, steps: list[_Step]) -> FoldedSteps:
    sample = steps[0]
    rows = sample.last - sample.first
    wiring = Wiring(
        before=sample.before,
        after=sample.after,
        group=sample.group,
        rendezvous_key=np.full(rows, -1, np.int64),
        synchronises=graph.rendezvous[sample.first : sample.last] >= 0,
        describe=lambda row: graph.describe(sample.first + row),
    )
    (template,) = compile_graphs([wiring], NO_RENDEZVOUS)
    op = template.order[:, None] + np.array([step.first for step in steps])
    return FoldedSteps(
        template=template.in_replay_order(),
        step=np.array([step.number for step in steps], np.int32),
        first_lane=np.arange(len(steps) + 1),
        start=graph.start[op],
        duration=graph.duration[op],
        op=op,
    )
